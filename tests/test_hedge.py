"""Hedged drafting against the algorithm written down naively; its promise; its state."""

import copy
import math
import pickle
from itertools import pairwise

import numpy as np
import pytest
import strategies
from hypothesis import given
from hypothesis import strategies as st
from oracle import HISTORY, RUNNING
from rollout_samples import PROMPT, draft, filled, rollout, tree_of
from test_drafting_rule import (
    COMMON_WEIGHT,
    FIRST_ESTIMATE,
    KAPPA,
    NaiveRule,
    assert_agrees,
    assert_learned_alike,
    caps,
    emissions,
    prices,
)

from das import Drafter, Hedge, prompt_key

EXPERTS = [(kinds, limit) for kinds in ([RUNNING], [HISTORY], [RUNNING, HISTORY]) for limit in (3, 8, 16)]
N = len(EXPERTS)


class NaiveHedge:
    """Optimistic fixed-share Hedge over given losses."""

    def __init__(self, learning_rate, share, hint_rate):
        self.learning_rate, self.share, self.hint_rate = learning_rate, share, hint_rate
        self.weights, self.expected = [1 / N] * N, [0.0] * N

    def mixture(self):
        weights = [v * math.exp(-self.learning_rate * m) for v, m in zip(self.weights, self.expected, strict=True)]
        total = 0.0
        for weight in weights:  # not sum(), which compensates
            total += weight
        return [weight / total for weight in weights]

    def learn(self, losses):
        left = [v * math.exp(-self.learning_rate * loss) for v, loss in zip(self.weights, losses, strict=True)]
        total = 0.0
        for weight in left:
            total += weight
        self.weights = [(1 - self.share) * weight / total + self.share / N for weight in left]
        self.expected = [m + self.hint_rate * (loss - m) for m, loss in zip(self.expected, losses, strict=True)]


class NaiveHedgedRule(NaiveRule):
    """The rule with a mixture of experts for a blend."""

    def __init__(self, hedge):
        super().__init__()
        self.hedge = hedge
        self.opinions = {}  # request -> what each expert said of the tokens asked

    def estimates(self, contexts, candidate):
        estimates = [FIRST_ESTIMATE] * N
        for asked, known, weight in contexts:
            for number, (kinds, limit) in enumerate(EXPERTS):
                heard = [RUNNING, HISTORY] if weight == COMMON_WEIGHT else kinds
                count = weight * sum(asked.child_counts(known, candidate)[kind] for kind in heard)
                total = weight * sum(asked.counts(known)[kind] for kind in heard)
                if len(known) <= limit and total > 0:
                    estimates[number] = (count + KAPPA * estimates[number]) / (total + KAPPA)
        return estimates

    def blend(self, contexts, candidate):
        mixed = 0.0
        for weight, estimate in zip(self.hedge.mixture(), self.estimates(contexts, candidate), strict=True):
            mixed += weight * estimate
        return mixed

    def predict(self, tree, context, common=None):
        prediction = super().predict(tree, context, common)
        if prediction is not None:
            contexts = self.contexts(tree, context, common)
            self.asked_opinions.append([float(np.float32(p)) for p in self.estimates(contexts, prediction[0])])
        return prediction

    def draft(self, request, *arguments, **options):
        self.asked_opinions = self.opinions[request] = []
        return super().draft(request, *arguments, **options)

    def judge_history(self, request, prediction, was_hit):
        super().judge_history(request, prediction, was_hit)
        self.hedge.learn([(p - was_hit) ** 2 for p in self.opinions[request].pop(0)])


settings = st.builds(
    dict,
    learning_rate=st.sampled_from([0.3, 2.0, 20.0]),
    share=st.sampled_from([0.003, 0.3]),
    hint_rate=st.sampled_from([0.0, 0.02, 1.0]),
)


@given(st.data())
def test_the_kernel_follows_the_algorithm(data):
    """Several requests in flight over what the tree answers, as in the test of the blend."""
    alphabet = data.draw(strategies.alphabets)
    prompt = data.draw(strategies.words(alphabet))
    texts = [prompt]
    for _ in range(data.draw(st.integers(0, 3))):
        texts.append(data.draw(strategies.words_after(alphabet, texts)))
    history = [rollout(text, 0, prompt=prompt, request_id=f"h{i}") for i, text in enumerate(texts[1:])]
    chosen = data.draw(settings)
    hedge, rule = Hedge(**chosen), NaiveHedgedRule(NaiveHedge(**chosen))
    drafter, contexts = Drafter(filled(*history), hedge=hedge), {}
    for request in "abc"[: data.draw(st.integers(1, 3))]:
        drafter.start(request, prompt_token_ids=prompt, training_step=1)
        contexts[request] = list(prompt)
    tree = tree_of(drafter.history, prompt_key(prompt))
    common = None if history else drafter.history._common.tree_for_start().tree
    for _ in range(data.draw(st.integers(1, 8))):
        request = data.draw(st.sampled_from(sorted(contexts)))
        cap, price = data.draw(caps), data.draw(prices)
        drafted = assert_agrees(drafter, rule, request, tree, contexts[request][-16:], cap, price, common=common)
        emitted, num_verified = data.draw(emissions(drafted, alphabet))
        drafter.extend(request, emitted, num_verified_draft_tokens=num_verified)
        rule.extend(request, emitted, num_verified)
        contexts[request] += emitted
        assert_learned_alike(drafter, rule)
        np.testing.assert_allclose(hedge.weights, rule.hedge.weights, rtol=1e-9)
        np.testing.assert_allclose(hedge.expected_losses, rule.hedge.expected, rtol=1e-9, atol=1e-15)


losses = st.lists(st.lists(st.sampled_from([0.0, 0.01, 0.25, 1.0]), min_size=N, max_size=N), min_size=1, max_size=60)


@given(losses, settings, st.lists(st.integers(0, N - 1), min_size=60, max_size=60), st.integers(1, 60))
def test_dynamic_regret_is_what_was_promised(losses, settings, choices, length):
    """Against any sequence of experts, here one that changes every `length` rounds, over any losses."""
    hedge = NaiveHedge(**settings)
    eta, alpha = settings["learning_rate"], settings["share"]
    comparators = [choices[t // length] for t in range(len(losses))]
    regret = surprises = 0.0
    for loss, comparator in zip(losses, comparators, strict=True):
        regret += float(np.dot(hedge.mixture(), loss)) - loss[comparator]
        surprise = np.subtract(loss, hedge.expected)
        surprises += (surprise.max() - surprise.min()) ** 2
        hedge.learn(loss)
    switches = sum(one != other for one, other in pairwise(comparators))
    stays = len(losses) - 1 - switches
    start = math.log(N) + switches * math.log(N / alpha) - stays * math.log(1 - alpha)
    assert regret <= start / eta + eta / 8 * surprises + 1e-9


def test_history_is_trusted_less_where_it_misleads():
    """The history says 5 follows 4; the request writes 6, again and again."""
    hedge = Hedge(learning_rate=2.0)
    drafter = Drafter(filled(*(rollout([4, 5] * 20, 0, ordinal=i) for i in range(2))), hedge=hedge)
    drafter.start("a", prompt_token_ids=PROMPT, training_step=1)
    for _ in range(20):
        for token in (4, 6):
            draft(drafter, "a", 0)
            drafter.extend("a", [token])
    by_source = hedge.weights.reshape(3, 3).sum(axis=1)
    assert by_source[RUNNING] > 2 * by_source[HISTORY]


def test_trees_are_hedged_too():
    hedge = Hedge()
    drafter = Drafter(filled(rollout([4, 5, 6, 7], 0), rollout([4, 9], 0)), hedge=hedge)
    drafter.start("a", prompt_token_ids=PROMPT, training_step=1)
    tree = drafter.draft(["a"], max_draft_tokens=[8], min_survival=[0.0], shape="tree")["a"]
    chain = draft(drafter, "a", 1)
    assert tree.draft_token_ids[0] == chain.draft_token_ids[0]
    assert tree.survival[0] == chain.survival[0]
    before = hedge.weights
    tree = drafter.draft(["a"], max_draft_tokens=[8], min_survival=[0.0], shape="tree")["a"]
    drafter.extend("a", [4, 5, 6])
    assert not np.array_equal(hedge.weights, before)
    assert hedge.weights.sum() == pytest.approx(1, abs=1e-12)


def learned(**settings):
    hedge = Hedge(**settings)
    drafter = Drafter(filled(rollout([4, 5, 6, 4, 5, 7], 0)), hedge=hedge)
    drafter.start("a", prompt_token_ids=PROMPT, training_step=1)
    for emitted in ([4, 5, 6], [4, 5, 6], [4, 9]):
        draft(drafter, "a")
        drafter.extend("a", emitted)
    return hedge


def test_weights_of_a_request_are_its_own_and_end_with_it():
    hedge = learned(per_request=True)
    assert hedge.weights.tolist() == Hedge().weights.tolist()
    drafter = Drafter(filled(rollout([4, 5, 4, 6, 4, 5], 0)), hedge=Hedge(per_request=True, learning_rate=50.0))
    survivals = []
    for name in "ab":
        drafter.start(name, prompt_token_ids=PROMPT, training_step=1)
        drafter.confidence.reset()
        survivals.append([draft(drafter, name, 1).survival])
        drafter.extend(name, [4, 9, 4])
        drafter.confidence.reset()
        survivals[-1].append(draft(drafter, name, 1).survival)
        drafter.finish(name, keep=False)
    assert survivals[0] == survivals[1]


def test_state_round_trip_and_reset():
    hedge, copy = learned(), Hedge()
    assert hedge.weights.tolist() != copy.weights.tolist()
    copy.load_state({name: array.tolist() for name, array in hedge.state().items()})
    assert np.array_equal(copy._arrays, hedge._arrays), "the mixture, too"
    hedge.state()["weights"][:] = 7.0
    assert np.array_equal(copy._arrays, hedge._arrays)
    copy.reset()
    assert np.array_equal(copy._arrays, Hedge()._arrays)


def test_a_loaded_state_is_what_a_running_drafter_uses():
    hedge = Hedge()
    drafter = Drafter(filled(*(rollout([4, 5], 0, ordinal=i) for i in range(3))), hedge=hedge)
    drafter.start("a", prompt_token_ids=PROMPT, training_step=1)
    drafter.extend("a", [4, 6, 4])
    (even,) = draft(drafter, "a", 1).survival
    running = np.where([kinds == [RUNNING] for kinds, _ in EXPERTS], 1.0, 1e-9)
    hedge.load_state({"weights": running / running.sum(), "expected_losses": np.zeros(N)})
    answer = draft(drafter, "a", 1)
    assert answer.draft_token_ids == [5]
    assert answer.survival[0] < even / 100, "running text never continued so, and it alone counts now"


@given(st.lists(st.lists(st.floats(1e-6, 1.0), min_size=N, max_size=N), min_size=1, max_size=4), st.randoms())
def test_laws_of_merging(some, order):
    states = [{"weights": np.array(one) / sum(one), "expected_losses": np.array(one)} for one in some]
    hedge = Hedge()
    hedge.merge(states)
    for i in range(N):  # weights are exp(-eta * losses): the merged losses are the mean
        logs = [np.log(state["weights"][i] / state["weights"][0]) for state in states]
        assert np.log(hedge.weights[i] / hedge.weights[0]) == pytest.approx(np.mean(logs), abs=1e-9)
    np.testing.assert_allclose(hedge.expected_losses, np.mean(some, axis=0))
    shuffled = Hedge()
    order.shuffle(states)
    shuffled.merge(iter(states))
    assert np.array_equal(shuffled._arrays, hedge._arrays)
    shuffled.merge([hedge.state()] * 3)
    np.testing.assert_allclose(shuffled._arrays, hedge._arrays, rtol=1e-12)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"weights": np.full(8, 1 / 8)}, ValueError, r"weights has shape \(8,\); it must be \(9,\)"),
        ({"weights": np.full(9, 0.2)}, ValueError, "weights must be positive and add up to 1"),
        ({"weights": np.array([1.0] + [0.0] * 8)}, ValueError, "weights must be positive and add up to 1"),
        ({"weights": np.full(9, np.nan)}, ValueError, "weights must be positive and add up to 1"),
        ({"expected_losses": np.full(9, 1.5)}, ValueError, "expected_losses holds a loss that is not 0 <= loss <= 1"),
        ({"expected_losses": np.full(9, np.nan)}, ValueError, "expected_losses holds a loss"),
        ({"weights": None}, KeyError, "weights"),
    ],
)
def test_a_bad_state_changes_nothing(changes, error, message):
    hedge = learned()
    before = hedge._arrays.copy()
    state = {name: array for name, array in {**hedge.state(), **changes}.items() if array is not None}
    with pytest.raises(error, match=message):
        hedge.load_state(state)
    with pytest.raises(error, match=rf"states\[1\]: {message}"):
        hedge.merge([hedge.state(), state])
    with pytest.raises(ValueError, match="states is empty"):
        hedge.merge([])
    assert np.array_equal(hedge._arrays, before)


@pytest.mark.parametrize(
    ("setting", "error"),
    [
        ({"learning_rate": 0.0}, ValueError), ({"learning_rate": 101}, ValueError),
        ({"learning_rate": math.nan}, ValueError), ({"learning_rate": "1"}, TypeError),
        ({"learning_rate": True}, TypeError), ({"share": 0.0}, ValueError), ({"share": 1.0}, ValueError),
        ({"share": None}, TypeError),
        ({"learning_rate": 10**400}, ValueError), ({"share": 1j}, TypeError),
        ({"per_request": "no"}, TypeError), ({"per_request": 1}, TypeError), ({"per_request": None}, TypeError),
        ({"hint_rate": -0.1}, ValueError), ({"hint_rate": 1.1}, ValueError), ({"hint_rate": []}, TypeError),
    ],
)  # fmt: skip
def test_bad_settings(setting, error):
    with pytest.raises(error, match=f"^{next(iter(setting))} "):
        Hedge(**setting)
    with pytest.raises(TypeError, match=r"^hedge must be a Hedge or None, not dict"):
        Drafter(hedge=setting)


def test_settings_are_read_only_and_take_numbers_of_numpy():
    hedge = Hedge(learning_rate=np.float64(0.5), share=np.float32(0.25), hint_rate=np.int64(1), per_request=np.True_)
    assert (hedge.learning_rate, hedge.share, hedge.hint_rate, hedge.per_request) == (0.5, 0.25, 1.0, True)
    for name in ("learning_rate", "share", "hint_rate", "per_request"):
        with pytest.raises(AttributeError, match=name):
            setattr(hedge, name, 0.5)


@pytest.mark.parametrize("copy_of", [copy.copy, copy.deepcopy, lambda hedge: pickle.loads(pickle.dumps(hedge))])
def test_a_copy_learns_for_itself(copy_of):
    hedge, untouched = learned(share=0.3), learned(share=0.3)
    assert not np.array_equal(hedge.weights, Hedge().weights)
    assert copy_of(Hedge(per_request=True)).per_request
    copied = copy_of(hedge)
    assert (copied.learning_rate, copied.share, copied.hint_rate, copied.per_request) == (0.3, 0.3, 0.02, False)
    assert np.array_equal(copied._arrays, hedge._arrays)
    copied.reset()
    assert np.array_equal(hedge._arrays, untouched._arrays)
    hedge.reset()
    copied.load_state(untouched.state())
    assert np.array_equal(hedge._arrays, Hedge()._arrays)


def test_weights_survive_the_largest_learning_rate():
    hedge = learned(learning_rate=100.0, share=1e-12)
    assert np.isfinite(hedge._arrays).all()
    assert hedge.weights.min() > 0
