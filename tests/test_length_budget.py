"""LengthAwareBudget: a pass is worth most to the requests that will end last."""

from functools import partial

import numpy as np
import pytest
from cpu_cost import times_us
from hypothesis import given
from hypothesis import strategies as st

from das import (
    FinishedRollouts,
    LatencyEstimator,
    LatencyModel,
    LengthAwareBudget,
    LengthModel,
    RunningRequests,
    ThroughputBudget,
    _chances,
)
from das._chances import chances_to_be_largest

LATENCY = LatencyModel(c_base_ms=200.0, c_tok_ms=1.0)
NONE = np.zeros((2, 5))


def requests(lengths, *, keys=None, numbers=None, num_running=None, num_waiting=0, tokens_per_step=1.5):
    lengths = np.array(lengths, np.int64)
    steps = (lengths / tokens_per_step).astype(np.int64)
    return RunningRequests(
        request_numbers=np.arange(len(lengths)) if numbers is None else np.array(numbers, np.int64),
        prompt_keys=np.zeros(len(lengths), np.uint64) if keys is None else np.array(keys, np.uint64),
        num_prompt_tokens=lengths,
        num_response_tokens=lengths,
        num_decode_steps=steps,
        num_drafted_tokens=steps,
        num_accepted_tokens=lengths - steps,
        num_emitted_tokens=lengths,
        num_running=len(lengths) if num_running is None else num_running,
        num_waiting=num_waiting,
    )


def finished(keys, lengths):
    lengths = np.array(lengths, np.int64)
    return FinishedRollouts(np.array(keys, np.uint64), lengths, *[0 * lengths] * 4)


def shares(policy, asked):
    """What part of a pass each request's price says it saves by one decode step less."""
    base, tokens, drafted = policy.latency.c_base_ms, policy.tokens_per_decode_step, policy.drafted_per_decode_step
    return (tokens / policy.budgets(asked)[1] - 1 - drafted) * policy.latency.c_tok_ms / base


def taught(*, weight=1.0, short=20, long=400, shrinkage=16.0):
    """Key 1 answers shortly, key 2 at length."""
    lengths = LengthModel(shrinkage_rollouts=shrinkage)
    policy = LengthAwareBudget(latency=LATENCY, length_weight=weight, lengths=lengths)
    policy.observe_finished(finished([1, 2] * 32, [short, long] * 32))
    return policy


# ---------------------------------------------------------------- the chance to be the largest


def cumulative_of(masses):
    return np.cumsum(np.array(masses, float) / np.sum(masses, axis=1, keepdims=True), axis=1)[:, :-1]


def drawn_chances(masses, num_draws=40_000):
    """By drawing: a number is anywhere in its stretch."""
    rng, masses = np.random.default_rng(7), np.array(masses, float)
    draws = [rng.choice(masses.shape[1], num_draws, p=row / row.sum()) + rng.random(num_draws) for row in masses]
    return np.bincount(np.argmax(draws, axis=0), minlength=len(masses)) / num_draws


@pytest.mark.parametrize(
    "masses",
    [
        [[1, 1, 1, 1, 1]] * 2,
        [[1, 1, 1, 1, 1]] * 7,
        [[8, 4, 2, 1, 1], [1, 1, 2, 4, 8]],
        [[0, 0, 1, 0, 0], [1, 1, 1, 1, 1], [0, 5, 0, 5, 0]],
        [[0, 0, 0, 0, 1], [1, 0, 0, 0, 0]],
        [[9, 1, 0, 0, 0]] * 5 + [[5, 4, 1, 0, 0]],
    ],
)
def test_chances_are_those_of_drawing(masses):
    assert chances_to_be_largest(cumulative_of(masses), NONE) == pytest.approx(drawn_chances(masses), abs=0.03)


rows = st.lists(st.lists(st.integers(0, 9), min_size=5, max_size=5).filter(any), min_size=2, max_size=9)


@given(rows)
def test_chances_sum_to_one_and_follow_the_numbers(masses):
    cumulative = cumulative_of(masses)
    chances = chances_to_be_largest(cumulative, NONE)
    assert chances.sum() == pytest.approx(1)
    assert (chances >= 0).all()
    backwards = chances_to_be_largest(cumulative[::-1], NONE)
    assert backwards[::-1] == pytest.approx(chances)
    for i in range(len(masses)):  # one that is always at least as large has no smaller chance
        for j in range(len(masses)):
            if (cumulative[i] <= cumulative[j]).all():
                assert chances[i] >= chances[j] - 1e-9


@given(rows, st.lists(st.floats(-9, -0.01), min_size=10, max_size=10))
def test_others_take_their_part_of_the_chances(masses, others):
    cumulative = cumulative_of(masses)
    alone, beside = (
        chances_to_be_largest(cumulative, NONE),
        chances_to_be_largest(cumulative, np.sort(others).reshape(5, 2).T),
    )
    assert beside.sum() <= 1 + 1e-9
    assert (beside >= 0).all()
    assert (beside <= alone + 0.5).all()


def test_hundreds_of_numbers_leave_no_chance_undefined():
    chances = chances_to_be_largest(cumulative_of([[1, 0, 0, 0, 0]] * 500 + [[0, 0, 0, 0, 1]]), NONE)
    assert np.isfinite(chances).all()
    assert chances[-1] == pytest.approx(1)


def test_numbers_and_others_on_different_grids_are_refused():
    with pytest.raises(ValueError, match=r"others has shape \(2, 4\); it must be \(2, edges \+ 1\)"):
        chances_to_be_largest(cumulative_of([[1, 1, 1, 1, 1]] * 2), np.zeros((2, 4)))


@given(st.lists(st.lists(st.floats(0, 1), min_size=3, max_size=3), min_size=1, max_size=4), st.integers(0, 3))
def test_smoothing_is_a_quarter_of_each_neighbour(rows, times):
    smoothed = np.array(rows)
    _chances.smooth(smoothed, times)
    for _ in range(times):
        rows = [[(3 * a + b) / 4, (a + 2 * b + c) / 4, (b + 3 * c) / 4] for a, b, c in rows]
    assert smoothed == pytest.approx(np.array(rows))


@given(
    st.dictionaries(st.integers(0, 30), st.floats(0.001, 1)), st.sets(st.integers(0, 30), min_size=1), st.floats(0, 1)
)
def test_shares_mix_what_is_known_with_an_even_part(known, asked, weight):
    even, of_known = 0.25, np.array([known[number] for number in sorted(known)])
    found = _chances.shares(
        np.array(sorted(known), np.int64), of_known, np.array(sorted(asked), np.int64), even, weight
    )
    last = [known.get(number, 1 / len(asked)) for number in sorted(asked)]
    expected = [weight * len(asked) * even * chance / sum(last) + (1 - weight) * even for chance in last]
    assert found == pytest.approx(expected)


def test_chances_of_other_requests_than_named_are_refused():
    with pytest.raises(ValueError, match="known_numbers has 2 entries, known_chances 1"):
        _chances.shares(np.arange(2), np.ones(1), np.arange(2), 0.5, 0.5)


# ---------------------------------------------------------------- prices


def test_without_weight_it_is_the_throughput_price():
    asked = requests([0, 5, 900], keys=[1, 1, 2], num_running=9)
    ignoring, even = taught(weight=0), ThroughputBudget(latency=LATENCY)
    assert ignoring.budgets(asked)[1].tolist() == even.budgets(asked)[1].tolist()
    assert ignoring.budgets(asked)[0].tolist() == [16, 16, 16]


def test_requests_that_are_alike_get_the_throughput_price():
    for policy in (LengthAwareBudget(latency=LATENCY), taught()):
        for num_running in (1, 2, 40):
            asked = requests([7] * num_running, keys=[2] * num_running)
            price = ThroughputBudget(latency=LATENCY).budgets(asked)[1]
            assert policy.budgets(asked)[1] == pytest.approx(price)
            policy = type(policy)(latency=LATENCY, length_weight=1.0, lengths=policy.lengths)


def test_the_longer_answer_drafts_further():
    short, long = taught().budgets(requests([10, 10], keys=[1, 2]))[1]
    assert long < short / 3
    half = LengthAwareBudget(latency=LATENCY, lengths=taught().lengths)
    assert long < half.budgets(requests([10, 10], keys=[1, 2]))[1][1] < short
    assert half.length_weight == 0.5


def test_the_slower_request_drafts_further():
    asked = requests([100, 100], keys=[2, 2])
    slow = np.array([100, 25], np.int64)
    asked = RunningRequests(**{name: getattr(asked, name) for name in asked.__slots__} | {"num_decode_steps": slow})
    first, second = taught().budgets(asked)[1]
    assert first < second


def test_what_is_known_to_end_soon_gets_almost_nothing_of_the_pass():
    policy = taught(short=10, long=2000, shrinkage=0.1)
    parts = shares(policy, requests([5] * 30 + [5], keys=[1] * 30 + [2]))
    assert parts.sum() == pytest.approx(1)
    assert parts[-1] > 0.5
    assert (parts[:-1] < 1 / 31).all()


def test_requests_that_wait_make_running_ones_alike():
    def unevenness(num_waiting):
        parts = shares(taught(), requests([10] * 8, keys=[1, 2] * 4, num_waiting=num_waiting))
        assert parts.sum() == pytest.approx(1)
        return parts.max() - parts.min()

    alone, few, many = unevenness(0), unevenness(4), unevenness(4000)
    assert alone > few > many
    assert many < 0.01


def test_a_part_of_the_batch_shares_its_even_part_of_the_pass():
    asked = requests([10, 10], keys=[1, 2], num_running=8)
    parts = shares(taught(), asked)
    assert parts.sum() == pytest.approx(2 / 8)
    assert parts[1] > parts[0]


def test_between_looks_at_the_lengths_chances_stay_with_their_requests():
    policy = taught()
    first = shares(policy, requests([10, 10, 10], keys=[1, 2, 2], numbers=[4, 2, 9]))
    moved = shares(policy, requests([10, 10, 10], keys=[2, 1, 2], numbers=[2, 4, 9]))
    assert moved == pytest.approx(first[[1, 0, 2]])
    without = shares(policy, requests([10, 10], keys=[2, 1], numbers=[2, 4]))
    assert without == pytest.approx(first[[1, 0]] / first[:2].sum())
    with_new = shares(policy, requests([10, 10, 0], keys=[2, 1, 2], numbers=[2, 4, 11]))
    assert with_new.sum() == pytest.approx(1)
    assert with_new[2] == pytest.approx((1 / 3) / (first[:2].sum() + 1 / 3))
    for _ in range(12):
        kept = shares(policy, requests([10, 10, 0], keys=[2, 1, 2], numbers=[2, 4, 11]))
        assert kept[2] == pytest.approx(with_new[2])
    anew = shares(policy, requests([10, 10, 0], keys=[2, 1, 2], numbers=[2, 4, 11]))  # the 17th call
    assert anew[2] > with_new[2]


def test_prices_are_those_of_the_same_calls():
    rng = np.random.default_rng(1)
    calls = [(rng.integers(0, 500, 20), rng.integers(0, 3, 20), int(rng.integers(0, 50))) for _ in range(30)]

    def prices():
        policy, given_prices = taught(), []
        for lengths, keys, num_waiting in calls:
            given_prices.append(policy.budgets(requests(lengths, keys=keys, num_waiting=num_waiting))[1].tolist())
            policy.observe_finished(finished(keys[:3], lengths[:3] + 1))
        return given_prices

    assert prices() == prices()


@pytest.mark.parametrize("lengths", [[], [0], [0, 0], [2**40, 1], [10**6] * 3])
@pytest.mark.parametrize("num_waiting", [0, 10**9])
def test_odd_batches_get_prices_of_one_or_less(lengths, num_waiting):
    for policy in (LengthAwareBudget(latency=LATENCY, length_weight=1), taught()):
        for _ in range(10):
            caps, prices = policy.budgets(requests(lengths, num_waiting=num_waiting))
            assert caps.tolist() == [16] * len(lengths)
            assert len(prices) == len(lengths)
            assert ((prices > 0) & (prices <= 1)).all()


def test_running_requests_count_before_the_first_rollout_ended():
    policy, blind = (LengthAwareBudget(latency=LATENCY) for _ in range(2))
    policy.budgets(requests([3000] * 20))
    assert policy.lengths.quantile(0.5) > 2 * blind.lengths.quantile(0.5)


# ---------------------------------------------------------------- state and errors


def test_state_holds_lengths_and_means():
    policy = taught(weight=0.25)
    policy.observe(np.array([4, 5]), np.array([1, 0]))
    copy = LengthAwareBudget(latency=LATENCY, length_weight=0.25)
    copy.load_state(policy.state())
    asked = requests([10, 10], keys=[1, 2])
    assert copy.budgets(asked)[1].tolist() == policy.budgets(asked)[1].tolist()
    even = ThroughputBudget(latency=LATENCY)
    even.observe(np.array([9]), np.array([9]))
    copy.load_state(even.state())
    assert copy.tokens_per_decode_step == even.tokens_per_decode_step
    assert copy.lengths.num_rollouts == 64


def test_a_state_that_does_not_fit_changes_nothing():
    policy, other = taught(), taught()
    other.observe(np.array([4, 5]), np.array([1, 0]))
    bad = other.state()
    bad["lengths"]["window"] = np.array([200], np.uint8)
    with pytest.raises(ValueError, match="window"):
        policy.load_state(bad)
    assert policy.tokens_per_decode_step == taught().tokens_per_decode_step
    assert policy.lengths.num_rollouts == 64


def test_the_latency_is_learned_as_in_throughput_budget():
    estimator = LatencyEstimator(LATENCY)
    policy = LengthAwareBudget(latency=estimator)
    for num_requests in (4, 9, 30) * 20:
        policy.budgets(requests([10] * num_requests))
        policy.observe(
            np.ones(num_requests, np.int64), np.ones(num_requests, np.int64), step_ms=50 + 2.0 * num_requests
        )
    assert policy.latency.c_base_ms == pytest.approx(50, rel=0.1)


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"length_weight": -0.1}, ValueError, "length_weight is -0.1"),
        ({"length_weight": 1.01}, ValueError, "length_weight is 1.01"),
        ({"length_weight": float("nan")}, ValueError, "length_weight is nan"),
        ({"length_weight": "1"}, TypeError, "length_weight must be a number, not str"),
        ({"length_weight": True}, TypeError, "length_weight must be a number, not bool"),
        ({"lengths": 3}, TypeError, "lengths must be a LengthModel, not int"),
        ({"latency": 3}, TypeError, "latency must be"),
        ({"max_draft_tokens": 65}, ValueError, "max_draft_tokens is 65"),
    ],
)
def test_bad_settings(arguments, error, match):
    with pytest.raises(error, match=match):
        LengthAwareBudget(**arguments)


def test_repr_tells_the_settings():
    shown = repr(LengthAwareBudget(latency=LATENCY, lengths=LengthModel()))
    assert shown == f"LengthAwareBudget(latency={LATENCY}, max_draft_tokens=16, length_weight=0.5)"


@pytest.mark.timed
def test_a_step_of_256_requests_costs_little():
    rng = np.random.default_rng(3)
    policy = LengthAwareBudget(latency=LATENCY)
    policy.observe_finished(finished(rng.integers(0, 40, 2048), rng.integers(1, 2000, 2048)))
    keys = rng.integers(0, 40, 256)
    steps = [  # a request ends and another starts in every one
        requests(rng.integers(0, 1000, 256), keys=keys, numbers=np.arange(i, i + 256), num_waiting=50)
        for i in range(100)
    ]
    spent_us = times_us(partial(policy.budgets, step) for step in steps)
    assert np.mean(sorted(spent_us)[:80]) < 3 * 150  # the bar is 150 us; machines that run tests are busy


# ---------------------------------------------------------------- a batch that ends as a whole


def batch_cost(policy, *, lengths, keys, accepted_share, seed):
    """Generate requests whose draft tokens each hold with a known probability; return passes and tokens, at 200 : 1."""
    rng = np.random.default_rng(seed)
    so_far, steps, cost = np.zeros(len(lengths), np.int64), np.zeros(len(lengths), np.int64), 0.0
    survival = accepted_share ** np.arange(1, 17)
    while (active := np.flatnonzero(so_far < lengths)).size:
        asked = requests(so_far[active], keys=keys[active], numbers=active)
        asked = RunningRequests(**{n: getattr(asked, n) for n in asked.__slots__} | {"num_decode_steps": steps[active]})
        prices = policy.budgets(asked)[1]
        drafted = (survival >= prices[:, None]).sum(axis=1)
        held = rng.geometric(1 - accepted_share, len(active)) - 1
        accepted = np.minimum(held, drafted)
        so_far[active] += accepted + 1
        steps[active] += 1
        cost += 200 + len(active) + drafted.sum()
        policy.observe(drafted, accepted)
    return cost


def test_lengths_that_prompts_foretell_end_the_batch_sooner():
    rng, costs = np.random.default_rng(5), {0.0: 0.0, 0.5: 0.0, 1.0: 0.0}
    for seed in range(3):
        usual = np.sort(rng.lognormal(4.5, 0.8, 24))  # of each prompt
        keys = np.repeat(np.arange(24), 8)
        lengths, past = ((usual[keys] * rng.lognormal(0, 0.15, len(keys))).astype(np.int64) + 1 for _ in range(2))
        for weight in costs:
            policy = LengthAwareBudget(latency=LATENCY, length_weight=weight)
            policy.observe_finished(finished(np.tile(keys, 2), np.tile(past, 2)))
            costs[weight] += batch_cost(policy, lengths=lengths, keys=keys, accepted_share=0.65, seed=seed)
    assert costs[0.5] < 0.985 * costs[0.0]
    assert costs[1.0] < 0.98 * costs[0.0]
