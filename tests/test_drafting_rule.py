"""The batch kernel against the drafting rule written down naively, over counts found by brute force."""

import math

import numpy as np
import pytest
import strategies
from hypothesis import given
from hypothesis import strategies as st
from oracle import HISTORY, NaiveSuffixTree, add_up
from rollout_samples import draft, filled, rollout, tree_of

from das import Drafter, Rollout, RolloutHistory, prompt_key

ORDERS = (1, 2, 3, 4, 6, 8, 12, 16)
KAPPA, FIRST_ESTIMATE, PRIOR_STRENGTH, NUM_BINS = 2.0, 1e-5, 4.0, 24
MEMORY, HISTORY_MEMORY, NUM_RATES = 2000, 256, 1024
COMMON_WEIGHT = 0.2
KEY = 5

prices = st.sampled_from([0.0, 0.02, 0.15, 0.5, 0.9, 1.0])
caps = st.integers(0, 8)


class BruteForce:
    """What NaiveSuffixTree answers, tabulated once: texts must be closed and indexed one after another."""

    def __init__(self, oracle):
        self.followers = {}
        for context, token, text, _ in oracle.transitions():
            self.followers.setdefault(context, []).append((token, text.kind))

    def child_counts(self, context, token):
        kinds = [kind for other, kind in self.followers.get(tuple(context), ()) if other == token]
        return kinds.count(1 - HISTORY), kinds.count(HISTORY)

    def counts(self, context):
        tokens = {token for token, _ in self.followers.get(tuple(context), ())}
        return add_up(self.child_counts(context, token) for token in tokens)

    def top_child(self, context):
        tokens = [token for token, _ in self.followers.get(tuple(context), ())]
        return max(reversed(tokens), key=tokens.count, default=None)


class NaiveRule:
    """The calibrated blend: one object's cells learn from all requests."""

    def __init__(self):
        self.hits = np.zeros((4, NUM_BINS))
        self.misses = np.zeros((4, NUM_BINS))
        self.histogram = np.zeros((NUM_RATES, 3))  # by calibrated probability: predictions, hits, sum of probabilities
        self.explained = np.zeros(2)
        self.asked = {}  # request -> [(token, cell, calibrated probability)]
        self.has_history = {}  # request -> whether its tree holds any
        self.num_drafted = {}

    def contexts(self, tree, context, common):
        """(tree, context, weight) of what has a continuation, the weakest first.

        `common`: the tree that is asked beside the own one, where the request has that.
        """
        return [
            (asked, context[-order:], weight)
            for order in ORDERS
            for asked, weight in ((common, COMMON_WEIGHT), (tree, 1.0))
            if asked is not None and order <= len(context) and sum(asked.counts(context[-order:])) > 0
        ]

    def blend(self, contexts, candidate):
        """Rounded as the kernel rounds, so that candidates which tie there tie here."""
        estimate = FIRST_ESTIMATE
        for asked, known, weight in contexts:
            count = weight * sum(asked.child_counts(known, candidate))
            estimate = (count + KAPPA * estimate) * (1.0 / (weight * sum(asked.counts(known)) + KAPPA))
        return estimate

    def cell(self, tree, context, token, probability):
        running, history = tree.child_counts(context[-1:], token)
        source = {(False, False): 3, (True, False): 0, (False, True): 1, (True, True): 2}[running > 0, history > 0]
        clipped = min(max(probability, 1e-4), 1 - 1e-4)
        bin_ = int((math.log(clipped / (1 - clipped)) + 4) * (NUM_BINS / 8))
        return source, min(max(bin_, 0), NUM_BINS - 1)

    def hit_rate(self, cell, probability):
        hits, misses = self.hits[cell], self.misses[cell]
        return (hits + PRIOR_STRENGTH * probability) / (hits + misses + PRIOR_STRENGTH)

    def predict(self, tree, context, common=None):
        """(token, blended probability, cell) of the next token, or None where no context continues."""
        contexts = self.contexts(tree, context, common)
        candidates = dict.fromkeys(asked.top_child(known) for asked, known, _ in contexts)
        probability = {candidate: self.blend(contexts, candidate) for candidate in candidates}
        if not probability:
            return None
        token = max(probability, key=probability.get)
        return token, probability[token], self.cell(tree, context, token, probability[token])

    def draft(self, request, tree, context, max_draft_tokens, min_survival, common=None):
        context, token_ids, survival, path = list(context), [], [], 1.0
        asked = self.asked[request] = []
        self.has_history[request] = tree.counts(())[HISTORY] > 0
        while (prediction := self.predict(tree, context, common)) is not None:
            token, probability, cell = prediction
            rate = self.hit_rate(cell, probability)
            asked.append((token, cell, np.float32(rate)))
            if len(token_ids) == max_draft_tokens or path * rate < min_survival:
                break
            path *= rate
            token_ids.append(token)
            survival.append(path)
            context.append(token)
        self.num_drafted[request] = len(token_ids)
        return token_ids, survival

    def extend(self, request, token_ids, num_verified=None):
        asked = self.asked.pop(request, [])
        if num_verified is not None:
            asked = asked[: num_verified + 1]
        for prediction, token in zip(asked, token_ids, strict=False):
            was_hit = self.learn(*prediction, token)
            self.judge_history(request, prediction, was_hit)
            if not was_hit:
                break

    def judge_history(self, request, prediction, was_hit):
        """Learn whether the history knew what came, and that it would."""
        if self.has_history[request]:
            source, _ = prediction[1]
            self.explained *= 1 - 1 / HISTORY_MEMORY
            self.explained[0 if was_hit and source in (1, 2) else 1] += 1

    def learn(self, predicted, cell, rate, token):
        """Teach the cell of a prediction and the histogram what came; True where it was right."""
        self.histogram[min(int(rate * NUM_RATES), NUM_RATES - 1)] += 1, predicted == token, rate
        for cells in (self.hits, self.misses):
            cells[cell] *= 1 - 1 / MEMORY
        (self.hits if predicted == token else self.misses)[cell] += 1
        return predicted == token


def assert_agrees(drafter, rule, request, tree, context, cap, price, common=None):
    """Draft on both sides and return the tokens."""
    answer = draft(drafter, request, cap, price)
    token_ids, survival = rule.draft(request, tree, context, cap, price, common)
    assert answer.draft_token_ids == token_ids
    assert answer.survival == pytest.approx(survival, abs=1e-9)
    assert answer.survival == sorted(answer.survival, reverse=True)
    assert all(max(price, 1e-300) <= one <= 1.0 for one in answer.survival)
    return token_ids


def assert_learned_alike(drafter, rule):
    learned = drafter.confidence
    for name in ("hits", "misses", "histogram", "explained"):
        np.testing.assert_allclose(getattr(learned, name), getattr(rule, name), rtol=1e-9, atol=1e-12, err_msg=name)


@st.composite
def emissions(draw, drafted, alphabet):
    """What an engine emits for a draft: some of it, then others; and how much of the draft it verified."""
    num_verified = draw(st.one_of(st.none(), st.integers(0, len(drafted))))
    most = len(drafted) if num_verified is None else num_verified
    accepted = drafted[: draw(st.integers(0, most))]
    return accepted + draw(strategies.words(alphabet, max_size=8)), num_verified


@given(st.data())
def test_the_kernel_follows_the_rule_over_brute_force_counts(data):
    """One request at a time, drafting at its start: everything the tree holds is closed, so its counts are exact."""
    alphabet = data.draw(strategies.alphabets)
    prompts = data.draw(st.lists(strategies.words(alphabet), min_size=1, max_size=3))
    prompt_indices = st.integers(0, len(prompts) - 1)
    rule, oracle, handles, texts = NaiveRule(), NaiveSuffixTree(), {}, list(prompts)

    def handle(prompt):
        if tuple(prompt) not in handles:
            handles[tuple(prompt)] = oracle.add_prompt(prompt)
        return handles[tuple(prompt)]

    rollouts = []
    for ordinal in range(data.draw(st.integers(0, 4))):
        prompt = prompts[data.draw(prompt_indices)]
        texts.append(data.draw(strategies.words_after(alphabet, texts)))
        rollouts.append(rollout(texts[-1], 0, prompt=prompt, prompt_key=KEY, ordinal=ordinal, request_id=f"h{ordinal}"))
        oracle.add(texts[-1], prompt=handle(prompt))
    drafter = Drafter(filled(*rollouts, max_common_tokens=0))
    for request in map(str, range(data.draw(st.integers(1, 6)))):
        prompt = prompts[data.draw(prompt_indices)]
        drafter.start(request, prompt_token_ids=prompt, prompt_key=KEY, training_step=1)
        sequence = oracle.open(prompt=handle(prompt))
        counted = BruteForce(oracle)
        drafted = assert_agrees(drafter, rule, request, counted, prompt, data.draw(caps), data.draw(prices))
        emitted, num_verified = data.draw(emissions(drafted, alphabet))
        drafter.extend(request, emitted, num_verified_draft_tokens=num_verified)
        rule.extend(request, emitted, num_verified)
        assert_learned_alike(drafter, rule)
        drafter.finish(request)
        oracle.extend(sequence, emitted)
        oracle.close(sequence)


@given(st.data())
def test_a_prompt_without_history_draws_on_what_others_emitted(data):
    """One request after the other, each to a prompt of its own: nothing is shared but the common text."""
    alphabet = data.draw(strategies.alphabets)
    rule, common, handles, texts = NaiveRule(), NaiveSuffixTree(), {}, []
    drafter = Drafter()
    for number in range(data.draw(st.integers(2, 6))):
        request, prompt = str(number), data.draw(strategies.words(alphabet, max_size=20))
        tail = tuple(prompt[-16:])
        if tail not in handles:
            handles[tail] = common.add_prompt(tail)
        own = NaiveSuffixTree()
        own.add_prompt(prompt)
        drafter.start(request, prompt_token_ids=prompt, prompt_key=number)
        cap, price = data.draw(caps), data.draw(prices)
        shared = BruteForce(common)
        drafted = assert_agrees(drafter, rule, request, BruteForce(own), prompt, cap, price, common=shared)
        emitted, num_verified = data.draw(emissions(drafted, alphabet))
        texts.append(emitted)
        drafter.extend(request, emitted, num_verified_draft_tokens=num_verified)
        rule.extend(request, emitted, num_verified)
        assert_learned_alike(drafter, rule)
        drafter.finish(request)
        sequence = common.open(prompt=handles[tail])
        common.extend(sequence, emitted)
        common.close(sequence)


@given(st.data())
def test_the_kernel_follows_the_rule_over_the_trees_counts(data):
    """Several requests in flight, with their own output as context. What an open sequence still holds back is the
    tree's business (its tests compare it with the oracle): the rule is applied to what the tree answers."""
    alphabet = data.draw(strategies.alphabets)
    prompt = data.draw(strategies.words(alphabet))
    texts = [prompt]
    for _ in range(data.draw(st.integers(0, 3))):
        texts.append(data.draw(strategies.words_after(alphabet, texts)))
    history = [rollout(text, 0, prompt=prompt, request_id=f"h{i}") for i, text in enumerate(texts[1:])]
    drafter, rule = Drafter(filled(*history)), NaiveRule()
    contexts = {}
    for request in "abc"[: data.draw(st.integers(1, 3))]:
        drafter.start(request, prompt_token_ids=prompt, training_step=1)
        contexts[request] = list(prompt)
    tree = tree_of(drafter.history, prompt_key(prompt))
    common = None if history else drafter.history._common.tree_for_start().tree
    for _ in range(data.draw(st.integers(1, 8))):
        request = data.draw(st.sampled_from(sorted(contexts)))
        context = contexts[request]
        cap, price = data.draw(caps), data.draw(prices)
        drafted = assert_agrees(drafter, rule, request, tree, context[-16:], cap, price, common=common)
        emitted, num_verified = data.draw(emissions(drafted, alphabet))
        drafter.extend(request, emitted, num_verified_draft_tokens=num_verified)
        rule.extend(request, emitted, num_verified)
        context += emitted
        assert_learned_alike(drafter, rule)


def test_the_rule_on_paper():
    """Prompt 1 2, history 3 4 and 3 5: worked out by hand."""
    drafter = Drafter(filled(*(rollout([3, token], 0, prompt=[1, 2]) for token in (4, 5))))
    drafter.start("a", prompt_token_ids=[1, 2], training_step=1)
    after_one = (2 + 2 * 1e-5) / (2 + 2)  # 3 followed 2 twice; then the same of 1 2
    first = (2 + 2 * after_one) / (2 + 2)
    estimates = [1e-5]
    for _ in range(3):  # 4 and 5 followed once each of twice, after 3, 2 3 and 1 2 3; 5 is the later one
        estimates.append((1 + 2 * estimates[-1]) / (2 + 2))
    answer = draft(drafter, "a")
    assert answer.draft_token_ids == [3, 5]
    assert answer.survival == pytest.approx([first, first * estimates[-1]], abs=1e-12)
    drafter.extend("a", [3, 4])  # a hit and a miss, in the cells of history
    bins = [int((math.log(p / (1 - p)) + 4) * 3) for p in (first, estimates[-1])]
    assert drafter.confidence.hits[1, bins[0]] == drafter.confidence.misses[1, bins[1]] == 1
    assert drafter.confidence.hits.sum() == drafter.confidence.misses.sum() == 1


def test_of_equally_probable_tokens_the_shorter_contexts_candidate_is_taken():
    """After 11 came 13 five times and 12 once, after 10, 11 only 12: (1 + 2 / 8) / 3 = (2 * 5 / 8) / 3."""
    response = [1, 11, 13, 2, 11, 13, 3, 11, 13, 4, 11, 13, 5, 11, 13, 10, 11, 12]
    history = RolloutHistory()
    history.add(Rollout(prompt_token_ids=[9], response_token_ids=response, training_step=0))
    drafter = Drafter(history)
    drafter.start("request", prompt_token_ids=[9], training_step=1)
    drafter.extend("request", [10, 11])
    draft = drafter.draft(["request"], max_draft_tokens=[1], min_survival=[0.0])["request"]
    assert draft.draft_token_ids == [13]
