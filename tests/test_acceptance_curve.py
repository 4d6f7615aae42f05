"""The acceptance curve: its formula, and an estimate that recovers it, follows it, and waits where little was seen."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from cpu_cost import least_us
from hypothesis import given
from hypothesis import strategies as st

from das import FixedBudget
from das.acceptance_curve import DEFAULT_ALPHA, DEFAULT_K, AcceptanceEstimator, decode_steps
from das.analysis import read_log
from das.analysis.replay import replay

EXAMPLE = Path(__file__).parent.parent / "examples" / "amc23_rollouts.jsonl.gz"


def rollouts(rng, num_rollouts, *, k, alpha, cap, prompts=24, noise=0.08):
    """Finished rollouts of caps that are always used up: d tokens each step, so p / l = d (1 - A / l)."""
    lengths = rng.integers(50, 3000, num_rollouts)
    keys = rng.integers(0, prompts, num_rollouts).astype(np.uint64)
    shares = np.clip(k + noise * rng.standard_normal(num_rollouts), 0.02, 0.98)
    low, high = np.zeros(num_rollouts), np.full(num_rollouts, float(cap))
    for _ in range(50):  # p / l
        middle = (low + high) / 2
        too_few = cap * (1 - shares * (1 - np.exp(-alpha * middle))) > middle
        low, high = np.where(too_few, middle, low), np.where(too_few, high, middle)
    drafted = np.round(low * lengths)
    accepted = np.round(shares * lengths * (1 - np.exp(-alpha * low)))
    return keys, lengths, drafted.astype(np.int64), np.minimum(accepted, drafted).astype(np.int64)


def tell(estimator, keys, emitted, drafted, accepted):
    estimator.observe(keys, num_emitted_tokens=emitted, num_drafted_tokens=drafted, num_accepted_tokens=accepted)


def taught(*batches, **settings):
    estimator = AcceptanceEstimator(**settings)
    for batch in batches:
        tell(estimator, *batch)
    return estimator


def share(estimator, drafted_per_token):
    return estimator.k * (1 - math.exp(-estimator.alpha * drafted_per_token))


# ---------------------------------------------------------------- the curve


def test_decode_steps_by_hand():
    steps = decode_steps([0, 100, math.inf, 5], lengths=[100, 100, 100, 0], k=0.6, alpha=1.0)
    assert steps.tolist() == pytest.approx([100, 100 * (0.4 + 0.6 / math.e), 40, 0])
    assert decode_steps(50, lengths=100, k=1, alpha=2) == pytest.approx(100 / math.e)


# ---------------------------------------------------------------- recovery


@pytest.mark.parametrize(("k", "alpha"), [(0.62, 1.43), (0.85, 1.6), (0.4, 1.2), (0.7, 2.0)])
def test_caps_of_all_lengths_show_both_parameters(k, alpha):
    rng = np.random.default_rng(1)
    estimator = taught(*(rollouts(rng, 256, k=k, alpha=alpha, cap=cap) for cap in (1, 2, 4, 8, 16)))
    assert estimator.k == pytest.approx(k, abs=0.02)
    assert estimator.alpha == pytest.approx(alpha, rel=0.1)  # held a little by the start


@pytest.mark.parametrize("cap", [1, 4, 16])
@pytest.mark.parametrize("k", [0.45, 0.62, 0.85])
def test_one_cap_shows_k_and_alpha_stays_near_the_start(k, cap):
    estimator = taught(rollouts(np.random.default_rng(2), 512, k=k, alpha=DEFAULT_ALPHA, cap=cap))
    assert estimator.k == pytest.approx(k, abs=0.07)
    assert estimator.alpha == pytest.approx(DEFAULT_ALPHA, rel=0.15)


def test_scatter_across_the_curve_is_not_taken_for_its_form():
    """At one cap predictable rollouts draft less and accept more: read point by point, alpha would be endless."""
    batch = rollouts(np.random.default_rng(3), 1024, k=0.6, alpha=1.43, cap=8, noise=0.2)
    _, emitted, drafted, accepted = batch
    assert np.corrcoef(drafted / emitted, accepted / emitted)[0, 1] < -0.9
    assert taught(batch).alpha == pytest.approx(1.43, rel=0.15)


def test_drift_is_followed():
    rng = np.random.default_rng(4)
    estimator = AcceptanceEstimator(memory_rollouts=500)
    found = []
    for epoch in range(40):
        k = 0.3 if epoch < 20 else 0.8
        tell(estimator, *rollouts(rng, 128, k=k, alpha=DEFAULT_ALPHA, cap=8))
        found.append(estimator.k)
    assert found[19] == pytest.approx(0.3, abs=0.03)
    assert 0.3 < found[21] < 0.75  # not at once
    assert found[39] == pytest.approx(0.8, abs=0.03)
    keys = np.arange(24, dtype=np.uint64)
    assert np.median(estimator.estimate(keys)[0]) == pytest.approx(0.8, abs=0.05)


# ---------------------------------------------------------------- shrinkage


def test_without_observations_there_is_the_start():
    estimator = AcceptanceEstimator()
    assert (estimator.k, estimator.alpha, len(estimator)) == (DEFAULT_K, DEFAULT_ALPHA, 0)
    k, alpha = estimator.estimate(np.array([1, 2, 1], np.uint64))
    assert (k.tolist(), alpha.tolist()) == ([DEFAULT_K] * 3, [DEFAULT_ALPHA] * 3)
    assert [part.shape for part in estimator.estimate([])] == [(0,), (0,)]
    assert AcceptanceEstimator(k=0.3, alpha=2.0).estimate([7])[0].tolist() == [0.3]


def test_a_few_rollouts_move_the_curve_of_all_prompts_little():
    few = taught(rollouts(np.random.default_rng(5), 2, k=0.2, alpha=1.43, cap=8, noise=0))
    many = taught(rollouts(np.random.default_rng(5), 200, k=0.2, alpha=1.43, cap=8, noise=0))
    assert 0.25 < few.k < 0.5
    assert many.k == pytest.approx(0.2, abs=0.03)


def test_a_prompt_leaves_the_curve_of_all_as_it_shows_its_own():
    rng = np.random.default_rng(6)
    estimator = taught(rollouts(rng, 2000, k=0.6, alpha=1.43, cap=8))
    far = []
    for _ in range(30):
        tell(estimator, np.array([2**64 - 1], np.uint64), *rollouts(rng, 1, k=0.1, alpha=1.43, cap=8, noise=0)[1:])
        far.append(estimator.estimate([2**64 - 1])[0][0])
    assert far[0] > 0.4  # one rollout against the weight of four
    assert far == sorted(far, reverse=True)
    assert far[-1] == pytest.approx(0.1, abs=0.1)
    assert estimator.k == pytest.approx(0.6, abs=0.03)


def test_where_prompts_differ_their_own_k_predicts_the_next_rollout_better():
    rng = np.random.default_rng(15)
    estimator, squares = AcceptanceEstimator(), np.zeros(2)
    for i in range(600):
        key, k = np.array([i % 20], np.uint64), 0.3 + 0.03 * (i % 20)
        _, emitted, drafted, accepted = rollouts(rng, 1, k=k, alpha=1.43, cap=8, noise=0.1)
        reached = 1 - math.exp(-estimator.alpha * drafted[0] / emitted[0])
        for position, guess in enumerate((estimator.estimate(key)[0][0], estimator.k)):
            squares[position] += (accepted[0] / emitted[0] - guess * reached) ** 2
        tell(estimator, key, emitted, drafted, accepted)
    assert squares[0] < 0.6 * squares[1]


def test_a_running_request_counts_as_one_more_rollout_of_its_prompt():
    estimator = taught(rollouts(np.random.default_rng(7), 500, k=0.6, alpha=1.43, cap=8))
    keys = np.array([99, 99, 99], np.uint64)
    counts = {"num_emitted_tokens": [0, 50, 5000], "num_drafted_tokens": [0, 100, 10_000]}
    of_requests, _ = estimator.estimate(keys, **counts, num_accepted_tokens=[0, 0, 0])
    plain, _ = estimator.estimate(keys)
    assert of_requests[0] == plain[0] == estimator.k
    assert of_requests[2] < of_requests[1] < of_requests[0]
    assert of_requests[2] == pytest.approx(0.8 * estimator.k, rel=0.04)  # one of 0 with four of k
    assert estimator.estimate(keys)[0].tolist() == plain.tolist()
    assert len(estimator) == 24


# ---------------------------------------------------------------- real rollouts


@pytest.fixture(scope="module")
def replayed():
    """By cap, (prompt keys, emitted, drafted, accepted) of real rollouts in order of their end."""

    class Listening(FixedBudget):
        __slots__ = ("heard",)

        def observe_finished(self, finished):
            counts = finished.num_emitted_tokens, finished.num_drafted_tokens, finished.num_accepted_tokens
            self.heard.append((finished.prompt_keys, *counts))

    log = [record.rollout for record in read_log(EXAMPLE)]
    prompts = sorted({rollout.key for rollout in log})[:10]
    log = [rollout for rollout in log if rollout.key in prompts]
    batches = {}
    for cap in (1, 4, 16):
        policy = Listening(cap)
        policy.heard = []
        replay(log, policy=policy)
        batches[cap] = tuple(np.concatenate(part) for part in zip(*policy.heard, strict=True))
    return batches


def points(batches):
    return {cap: (drafted.sum() / n.sum(), a.sum() / n.sum()) for cap, (_, n, drafted, a) in batches.items()}


def test_the_form_fits_real_rollouts_at_all_caps(replayed):
    estimator = taught(*replayed.values(), memory_rollouts=10_000)
    for drafted, accepted in points(replayed).values():
        assert share(estimator, drafted) == pytest.approx(accepted, abs=0.025)
    assert 1.3 < estimator.alpha < 1.8


@pytest.mark.parametrize("cap", [1, 4, 16])
def test_one_cap_on_real_rollouts_tells_what_others_would_accept(replayed, cap):
    estimator = taught(replayed[cap])
    for drafted, accepted in points(replayed).values():
        assert share(estimator, drafted) == pytest.approx(accepted, abs=0.06)


# ---------------------------------------------------------------- whatever comes


counts = st.integers(-3, 40) | st.sampled_from([2**40, 2**62, -(2**62)])
rows = st.lists(st.tuples(st.integers(0, 5), counts, counts, counts), max_size=20)


@given(batches=st.lists(rows, max_size=4), memory=st.integers(1, 5))
def test_nothing_makes_nan_and_impossible_counts_change_nothing(batches, memory):
    estimator, careful = (AcceptanceEstimator(memory_rollouts=memory, prompt_memory_rollouts=memory) for _ in "ab")
    for batch in batches:
        if batch:
            tell(estimator, *(np.array(column) for column in zip(*batch, strict=True)))
        possible = [row for row in batch if 0 <= row[3] <= row[2] < 2**62 and row[3] <= row[1] < 2**62 and row[2] > 0]
        possible = [row for row in possible if row[1] > 0]
        if possible:
            tell(careful, *(np.array(column) for column in zip(*possible, strict=True)))
        k, alpha = estimator.estimate(range(7))
        assert ((k >= 0.01) & (k <= 1) & (alpha >= 0.25) & (alpha <= 8)).all()
        assert estimator.state() == careful.state()
        own = {"num_emitted_tokens": [5, 0], "num_drafted_tokens": [9, -1], "num_accepted_tokens": [5, 2**62]}
        assert np.isfinite(estimator.estimate([0, 1], **own)[0]).all()


def test_observing_at_once_or_one_by_one_is_the_same():
    batch = rollouts(np.random.default_rng(8), 300, k=0.5, alpha=1.5, cap=4)
    one_by_one = taught(*(tuple(part[i : i + 1] for part in batch) for i in range(300)))
    assert taught(batch).state() == one_by_one.state()


def test_memory_is_bounded_and_the_prompts_seen_last_stay():
    estimator = AcceptanceEstimator(max_prompts=40)
    rng = np.random.default_rng(9)
    for start in range(0, 200, 10):
        keys = np.arange(start, start + 10, dtype=np.uint64)
        tell(estimator, keys, *rollouts(rng, 10, k=0.1, alpha=1.43, cap=8)[1:])
        tell(estimator, np.array([5], np.uint64), *rollouts(rng, 1, k=0.9, alpha=1.43, cap=8)[1:])
    assert len(estimator) == 40
    assert set(estimator.state()["prompt_keys"]) == {5, *range(161, 200)}
    k, _ = estimator.estimate([5, 199, 3])
    assert k[0] > k[2] == estimator.k > k[1]


def test_state_round_trip():
    estimator = taught(rollouts(np.random.default_rng(10), 300, k=0.4, alpha=1.2, cap=4, prompts=50))
    state = json.loads(json.dumps(estimator.state()))
    copy = AcceptanceEstimator()
    copy.load_state(state)
    assert copy.state() == estimator.state()
    assert (copy.k, copy.alpha) == (estimator.k, estimator.alpha)
    more = rollouts(np.random.default_rng(11), 200, k=0.8, alpha=1.2, cap=16, prompts=90)
    for one in (copy, estimator):
        tell(one, *more)
    assert copy.state() == estimator.state()
    small = AcceptanceEstimator(max_prompts=7)
    small.load_state(state)
    assert small.state()["prompt_keys"] == state["prompt_keys"][-7:]
    empty = AcceptanceEstimator()
    empty.load_state(AcceptanceEstimator().state())
    assert (empty.k, empty.alpha) == (DEFAULT_K, DEFAULT_ALPHA)
    assert repr(empty) == "AcceptanceEstimator(k=0.62, alpha=1.43, 0 prompts)"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bins": [[1.0] * 4]}, r"bins has shape \(1, 4\); it must be \(16, 4\)"),
        ({"cohort": [1.0, 5.0, 3.0, 4.0]}, "cohort holds numbers that are no sums over rollouts"),
        ({"cohort": [1.0, 0.0, 0.0, 0.0]}, "cohort holds numbers that are no sums over rollouts"),
        ({"cohort": [math.nan] * 4}, "cohort holds numbers that are no sums over rollouts"),
        ({"num_in_cohort": -1}, "num_in_cohort is -1; it must be an int that is at least 0"),
        ({"num_in_cohort": True}, "num_in_cohort is True"),
        ({"num_in_cohort": 0}, "num_in_cohort is 0, which does not go with cohort"),
        ({"cohort": [0.0] * 4}, "num_in_cohort is 2, which does not go with cohort"),
        ({"prompt_keys": [1, 1]}, "prompt_keys names a prompt twice"),
        ({"prompt_keys": [1]}, r"prompts has shape \(2, 4\); it must be \(1, 4\)"),
        ({"prompts": [[1.0, -2.0, 1.0, 1.0]] * 2}, "prompts holds numbers that are no sums over rollouts"),
        ({"bins": None}, "bins"),
    ],
)
def test_a_bad_state_changes_nothing(changes, message):
    estimator = taught(rollouts(np.random.default_rng(12), 2, k=0.4, alpha=1.2, cap=4, prompts=1000))
    before = estimator.state()
    state = {name: part for name, part in (before | changes).items() if part is not None}
    with pytest.raises((ValueError, KeyError), match=message):
        estimator.load_state(state)
    assert estimator.state() == before


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        ({"k": 0}, ValueError, r"k is 0; it must be 0\.01 <= k <= 1"),
        ({"k": math.nan}, ValueError, "k is nan"),
        ({"alpha": 9}, ValueError, r"alpha is 9; it must be 0\.25 <= alpha <= 8"),
        ({"alpha": "1"}, TypeError, "alpha must be a number, not str"),
        ({"memory_rollouts": 0}, ValueError, "memory_rollouts is 0; it must be at least 1"),
        ({"prompt_memory_rollouts": 1.5}, TypeError, "prompt_memory_rollouts must be an int, not float"),
        ({"max_prompts": True}, TypeError, "max_prompts must be an int, not bool"),
    ],
)
def test_bad_settings(bad, error, message):
    with pytest.raises(error, match=message):
        AcceptanceEstimator(**bad)


def test_counts_that_do_not_go_together():
    estimator = AcceptanceEstimator()
    with pytest.raises(ValueError, match=r"num_drafted_tokens has shape \(1,\); it must have 2 entries"):
        tell(estimator, [1, 2], [5, 5], [3], [1, 1])
    with pytest.raises(TypeError, match="num_accepted_tokens go together"):
        estimator.estimate([1], num_emitted_tokens=[3])
    assert len(estimator) == 0


def test_estimates_of_256_requests_take_less_than_half_a_millisecond():
    """About 0.1 ms, as much as one finished rollout takes."""
    estimator = taught(rollouts(np.random.default_rng(13), 2000, k=0.6, alpha=1.43, cap=8, prompts=256))
    keys, emitted, drafted, accepted = rollouts(np.random.default_rng(14), 256, k=0.6, alpha=1.43, cap=8, prompts=256)
    own = {"num_emitted_tokens": emitted, "num_drafted_tokens": drafted, "num_accepted_tokens": accepted}
    assert least_us(lambda: estimator.estimate(keys, **own)) < 500
    assert least_us(lambda: tell(estimator, keys[:1], emitted[:1], drafted[:1], accepted[:1])) < 500
