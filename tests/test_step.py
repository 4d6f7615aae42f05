"""plan_step: budgets meet drafts, engine limits are kept, and the policy hears what was verified."""

import numpy as np
import pytest
import strategies
from hypothesis import given
from hypothesis import strategies as st
from rollout_samples import KEY, PROMPT, draft, filled, rollout, scored, stored

from das import Drafter, FixedBudget, NoDraft, PriceBudget, UnlimitedBudget, plan_step

LONG = list(range(100, 200))


class Recorder:
    """A policy of one's own: fixed caps and prices; remembers all it was told."""

    def __init__(self, cap=4, price=0.0):
        self.cap, self.price = cap, price
        self.asked, self.heard = [], []

    def budgets(self, requests):
        self.asked.append(requests)
        return np.full(len(requests), self.cap), np.full(len(requests), self.price)

    def observe(self, drafted, accepted, *, step_ms=None):
        self.heard.append((drafted.tolist(), accepted.tolist(), step_ms))


def crowd(*names, response=LONG):
    """A drafter with requests on a prompt that has been answered before."""
    drafter = Drafter(filled(rollout(response, 0)))
    for name in names:
        drafter.start(name, prompt_token_ids=PROMPT, training_step=1)
    return drafter


def lengths(drafts):
    return {name: len(one) for name, one in drafts.items()}


# ---------------------------------------------------------------- policies


@pytest.mark.parametrize(
    ("policy", "length"),
    [
        (FixedBudget(), 8),
        (FixedBudget(0), 0),
        (FixedBudget(3), 3),
        (FixedBudget(64), 64),
        (UnlimitedBudget(), 16),
        (UnlimitedBudget(max_draft_tokens=64), 64),
        (PriceBudget(min_survival=0.0), 16),
        (PriceBudget(min_survival=0.0, max_draft_tokens=5), 5),
        (PriceBudget(min_survival=1.0), 0),
        (NoDraft(), 0),
    ],
    ids=repr,
)
def test_lengths_of_drafts(policy, length):
    drafter = crowd("a", "b")
    drafter.extend("b", LONG[:98])
    drafts = plan_step(drafter, ["a", "b"], policy=policy)
    assert lengths(drafts) == {"a": length, "b": min(length, 2)}
    assert drafts["a"].draft_token_ids == LONG[:length]
    assert drafts["b"].draft_token_ids == LONG[98 : 98 + length]


@given(st.data())
def test_a_price_cuts_the_unlimited_draft_where_survival_falls_below_it(data):
    alphabet = data.draw(strategies.alphabets)
    words = data.draw(st.lists(strategies.words(alphabet), min_size=1, max_size=4))
    rollouts = [rollout(word, 0, ordinal=i) for i, word in enumerate(words)]
    drafter = Drafter(filled(*rollouts))
    drafter.start("a", prompt_token_ids=PROMPT, training_step=1)
    drafter.extend("a", data.draw(strategies.words_after(alphabet, words)))
    whole = plan_step(drafter, ["a"], policy=UnlimitedBudget())["a"]
    assert all(0 < later <= sooner <= 1 for sooner, later in zip([1.0, *whole.survival], whole.survival, strict=False))
    prices = [*data.draw(st.lists(st.floats(0, 1), max_size=5)), *whole.survival, 0.15]
    for price in prices:
        policy = PriceBudget() if price == 0.15 else PriceBudget(min_survival=price)
        kept = plan_step(drafter, ["a"], policy=policy)["a"]
        num_kept = sum(survival >= price for survival in whole.survival)
        assert kept.draft_token_ids == whole.draft_token_ids[:num_kept]
        assert kept.survival == whole.survival[:num_kept]


def test_no_draft_looks_nothing_up_and_learns_nothing():
    drafter = crowd("a")
    for token in LONG:
        assert len(plan_step(drafter, ["a"], policy=NoDraft())["a"]) == 0
        drafter.extend("a", [token])
    counters = drafter.finish("a")
    assert (counters.num_decode_steps, counters.num_verification_steps, counters.num_emitted_tokens) == (100, 0, 100)
    assert drafter.confidence.hits.sum() == drafter.confidence.misses.sum() == 0
    assert stored(drafter.history)[-1] == (1, LONG)


def test_a_policy_is_told_who_runs():
    drafter, policy = crowd("a", "b"), Recorder()
    drafter.extend("b", [100])
    plan_step(drafter, ["b", "a"], policy=policy)
    plan_step(drafter, ["a"], policy=policy, num_running=9)
    plan_step(drafter, [], policy=policy, num_running=3)
    assert [requests.num_running for requests in policy.asked] == [2, 9, 3]
    assert policy.asked[0].num_response_tokens.tolist() == [1, 0]
    assert policy.asked[0].num_prompt_tokens.tolist() == [3, 3]
    assert policy.asked[0].prompt_keys.tolist() == [KEY, KEY]


# ---------------------------------------------------------------- engine limits


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        (None, {"a": 4, "b": 4}),
        ({}, {"a": 4, "b": 4}),
        ({"a": 2}, {"a": 2, "b": 4}),
        ({"a": 0, "b": 1}, {"a": 0, "b": 1}),
        ({"a": 99, "b": 5}, {"a": 4, "b": 4}),
        ({"somebody": 0}, {"a": 4, "b": 4}),
    ],
)
def test_limits_of_a_request(limits, expected):
    drafter, policy = crowd("a", "b"), Recorder(4)
    drafts = plan_step(drafter, ["a", "b"], policy=policy, max_draft_tokens=limits)
    assert lengths(drafts) == expected
    for name in "ab":
        drafter.extend(name, LONG[:10])
    plan_step(drafter, ["a", "b"], policy=policy)
    assert policy.heard == [([expected["a"], expected["b"]], [expected["a"], expected["b"]], None)]


def test_a_limit_of_the_batch_keeps_the_likeliest_tokens():
    drafter = crowd("a", "b")
    drafter.extend("b", LONG[:20])
    whole = plan_step(drafter, ["a", "b"], policy=Recorder(8))
    ranked = sorted(((-p, name) for name, one in whole.items() for p in one.survival))
    assert len({p for p, _ in ranked}) == 16  # no ties
    for limit in range(18):
        policy = Recorder(8)
        cut = plan_step(drafter, ["a", "b"], policy=policy, max_batch_draft_tokens=limit)
        kept = [name for _, name in ranked[:limit]]
        assert lengths(cut) == {name: kept.count(name) for name in "ab"}
        for name in "ab":
            assert cut[name].draft_token_ids == whole[name].draft_token_ids[: len(cut[name])]


def test_equal_tokens_are_cut_from_the_later_request_first():
    drafter = crowd("a", "b")
    cut = plan_step(drafter, ["b", "a"], policy=FixedBudget(3), max_batch_draft_tokens=3)
    assert lengths(cut) == {"b": 2, "a": 1}


def test_what_a_limit_cut_is_scored_as_a_prediction_but_not_counted_as_drafted():
    drafter = crowd("a")
    plan_step(drafter, ["a"], policy=FixedBudget(8), max_batch_draft_tokens=2)
    drafter.extend("a", LONG[:9])
    counters = drafter.counters("a")
    assert (counters.num_drafted_tokens, counters.num_accepted_tokens) == (2, 2)
    assert scored(drafter.confidence) == (3, 0)


@given(max_total_tokens=st.integers(0, 40), verified=st.integers(0, 16), cap=st.integers(0, 20))
def test_no_step_can_run_past_max_total_tokens(max_total_tokens, verified, cap):
    """Accepting all that is drafted and the bonus ends within the limit, at every step of a request."""
    drafter = Drafter(filled(rollout(LONG, 0)))
    drafter.start("a", prompt_token_ids=PROMPT, training_step=1, max_total_tokens=max_total_tokens)
    position = 0
    while len(PROMPT) + position < max_total_tokens:
        drafted = len(plan_step(drafter, ["a"], policy=FixedBudget(cap))["a"])
        assert drafted <= cap
        accepted = min(drafted, verified)
        drafter.extend("a", LONG[position : position + accepted + 1], num_verified_draft_tokens=accepted)
        position += accepted + 1
    assert len(PROMPT) + position <= max(max_total_tokens, len(PROMPT))
    assert len(plan_step(drafter, ["a"], policy=FixedBudget(cap))["a"]) == 0


# ---------------------------------------------------------------- feedback


def test_a_policy_hears_what_was_verified_in_order_and_once():
    drafter, policy = crowd("a", "b", "c"), Recorder(4)
    names = ["a", "b", "c"]
    plan_step(drafter, names, policy=policy)
    drafter.extend("c", [100, 101, 0])
    drafter.extend("a", [100, 101, 102, 103, 104])
    drafter.extend("b", [7], num_verified_draft_tokens=0)
    plan_step(drafter, names, policy=policy, step_ms=7.5)
    drafter.extend("b", [8], num_verified_draft_tokens=None)  # an unknown context: nothing was drafted
    drafter.extend("a", [1, 2], generated=False)  # no decode step
    drafter.extend("c", [])
    plan_step(drafter, ["a"], policy=policy)
    plan_step(drafter, ["a"], policy=policy)
    plan_step(drafter, ["a"], policy=policy, step_ms=1.0)
    assert policy.heard == [
        ([4, 4, 0], [2, 4, 0], 7.5),
        ([0], [0], None),
        ([], [], 1.0),
    ]


def test_feedback_of_a_finished_request_is_heard():
    drafter, policy = crowd("a"), Recorder(4)
    plan_step(drafter, ["a"], policy=policy)
    drafter.extend("a", LONG[:5])
    drafter.finish("a")
    assert plan_step(drafter, [], policy=policy) == {}
    assert policy.heard == [([4], [4], None)]


def test_called_again_it_replaces_the_pending_drafts():
    drafter, policy = crowd("a", "b"), Recorder(8)
    plan_step(drafter, ["a", "b"], policy=policy)
    policy.cap = 1
    plan_step(drafter, ["a"], policy=policy)
    drafter.extend("a", LONG[:3])
    drafter.extend("b", LONG[:9])
    plan_step(drafter, ["a"], policy=policy)
    assert policy.heard == [([1, 8], [1, 8], None)]
    assert scored(drafter.confidence) == (2 + 9, 0)


def test_a_policy_that_asks_for_too_much_is_told():
    drafter = crowd("a")
    with pytest.raises(ValueError, match=r"max_draft_tokens\[0\] is 65; it must be 0 <= cap <= 64"):
        plan_step(drafter, ["a"], policy=Recorder(65))
    assert lengths(plan_step(drafter, ["a"], policy=Recorder(65), max_draft_tokens={"a": 7})) == {"a": 7}


# ---------------------------------------------------------------- the same calls, the same drafts


@given(st.data())
def test_two_drafters_fed_the_same_calls_draft_the_same(data):
    alphabet = data.draw(strategies.alphabets)
    word = strategies.words(alphabet, max_size=8)
    rollouts = [rollout(text, i % 2, ordinal=i) for i, text in enumerate(data.draw(st.lists(word, max_size=4)))]
    pair = [Drafter(filled(*rollouts)) for _ in range(2)]
    running = []
    for number in range(data.draw(st.integers(1, 12))):
        step = data.draw(st.sampled_from([None, 1, 2]))
        if not running or data.draw(st.booleans()):
            running.append(f"r{number}")
            prompt = data.draw(st.sampled_from([[1], [1, 2]]))
            for drafter in pair:
                drafter.start(running[-1], prompt_token_ids=prompt, prompt_key=KEY, training_step=step)
        limit = data.draw(st.sampled_from([None, 3]))
        price = data.draw(st.sampled_from([0.0, 0.3]))
        first, second = (
            plan_step(
                drafter, running, policy=PriceBudget(min_survival=price), max_batch_draft_tokens=limit
            )
            for drafter in pair
        )  # fmt: skip
        assert first == second
        assert [first[name].survival for name in running] == [second[name].survival for name in running]
        for name in running:
            num_accepted = data.draw(st.integers(0, len(first[name])))
            emitted = first[name].draft_token_ids[:num_accepted] + data.draw(word)
            for drafter in pair:
                drafter.extend(name, emitted)
        if data.draw(st.booleans()):
            for drafter in pair:
                drafter.history.prepare([KEY])
                drafter.finish(running[0], training_step=step)
            running.pop(0)
    assert pair[0].history.statistics() == pair[1].history.statistics()


def test_drafter_draft_is_what_plan_step_uses():
    drafter = crowd("a")
    assert plan_step(drafter, ["a"], policy=Recorder(5, 0.4))["a"] == draft(drafter, "a", 5, 0.4)
