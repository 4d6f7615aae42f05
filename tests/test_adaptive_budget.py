"""The published baselines: their rules by hand, what they find in small closed loops, state, arguments and time."""

import json
import math

import numpy as np
import pytest
from cpu_cost import least_us
from rollout_samples import PROMPT, filled, rollout

from das import AdaptiveBudget, Drafter, LatencyModel, RunningRequests, plan_step
from das.adaptive_budget import ADAPTIVE_BUDGETS

LATENCY = LatencyModel(c_base_ms=10.0, c_tok_ms=0.05)
NAMES = list(ADAPTIVE_BUDGETS)


class Batch:
    """Requests that run, and accept each draft token with a probability, given that those before it were."""

    def __init__(self, num_requests, *, acceptance, seed=0, first_number=0):
        self.numbers = np.arange(first_number, first_number + num_requests, dtype=np.int64)
        self.steps, self.drafted, self.accepted = np.zeros((3, num_requests), np.int64)
        self.acceptance = acceptance
        self.random = np.random.default_rng(seed)
        self.time_ms = 0.0
        self.lengths = []  # of the first request

    def requests(self):
        emitted = self.steps + self.accepted
        return RunningRequests(
            request_numbers=self.numbers,
            prompt_keys=self.numbers.astype(np.uint64),
            num_prompt_tokens=0 * self.numbers,
            num_response_tokens=emitted,
            num_decode_steps=self.steps.copy(),
            num_drafted_tokens=self.drafted.copy(),
            num_accepted_tokens=self.accepted.copy(),
            num_emitted_tokens=emitted,
            num_running=len(self.numbers),
        )

    def step(self, policy, *, accepted=None, step_ms=None):
        """One decode step of all; `accepted` instead of chance."""
        caps, prices = policy.budgets(self.requests())
        assert (caps.dtype, prices.dtype, prices.tolist()) == (np.int64, np.float64, [0.0] * len(caps))
        if accepted is None:
            hits = self.random.random((len(caps), 64)) < self.acceptance
            accepted = np.cumprod(hits, axis=1).sum(axis=1)
        accepted = np.minimum(caps, accepted)
        self.steps += 1
        self.drafted += caps
        self.accepted += accepted
        self.lengths.append(int(caps[0]))
        self.time_ms += LATENCY.step_ms(len(caps) + int(caps.sum()))
        policy.observe(caps, accepted, step_ms=step_ms)
        return caps.tolist()

    def ms_per_token(self):
        return self.time_ms / float(self.steps.sum() + self.accepted.sum())


def expected_ms_per_token(length, num_running, acceptance):
    """Of a fixed length, by the geometric model."""
    return LATENCY.step_ms(num_running * (1 + length)) / num_running / sum(acceptance**j for j in range(length + 1))


def best_length(num_running, acceptance, lengths=range(17)):
    return min(lengths, key=lambda length: expected_ms_per_token(length, num_running, acceptance))


# ---------------------------------------------------------------- AIMD


def test_aimd_doubles_after_a_whole_draft_and_halves_after_any_other():
    policy, batch = AdaptiveBudget("aimd"), Batch(3, acceptance=0)
    whole = 99
    assert batch.step(policy, accepted=[whole, 1, 0]) == [2, 2, 2]
    assert batch.step(policy, accepted=[whole, whole, 0]) == [4, 1, 1]
    assert batch.step(policy, accepted=[7, whole, whole]) == [8, 2, 1]
    assert batch.step(policy, accepted=[whole, whole, whole]) == [4, 4, 2]
    assert batch.step(policy, accepted=[whole, whole, whole]) == [8, 8, 4]
    assert batch.step(policy, accepted=[whole, whole, whole]) == [16, 16, 8]
    assert batch.step(policy, accepted=[whole, 15, whole]) == [16, 16, 16]
    assert batch.step(policy, accepted=[whole, whole, whole]) == [16, 8, 16]


def test_aimd_asks_about_each_step_once_and_in_any_company():
    policy, batch = AdaptiveBudget("aimd"), Batch(4, acceptance=0)
    batch.step(policy, accepted=[9, 9, 0, 0])
    first = policy.budgets(batch.requests())[0].tolist()
    assert policy.budgets(batch.requests())[0].tolist() == first == [4, 4, 1, 1]  # nothing was decoded in between
    all_requests = batch.requests()
    for i in range(4):  # one request a call, as order lockstep asks
        alone = {name: getattr(all_requests, name)[i : i + 1] for name in all_requests.__slots__[:-2]}
        caps, _ = policy.budgets(RunningRequests(**alone, num_running=4))
        assert caps.tolist() == first[i : i + 1]


def test_aimd_starts_new_requests_afresh_and_remembers_a_bounded_number():
    policy = AdaptiveBudget("aimd", max_draft_tokens=8, first_draft_tokens=4)
    old, new = Batch(1, acceptance=1), Batch(1, acceptance=1, first_number=1 << 16)
    assert [old.step(policy, accepted=[9])[0] for _ in range(3)] == [4, 8, 8]
    assert new.step(policy, accepted=[9]) == [4]  # on the same place of the ring
    assert old.step(policy, accepted=[9]) == [4]
    for size in (policy._numbers, policy._lengths, policy._steps, policy._accepted):
        assert size.nbytes == 8 << 16


def test_aimd_on_real_drafts_halves_where_the_text_has_none():
    drafter = Drafter(filled(*(rollout([*range(30), *range(100 * i + 100, 100 * i + 120)], 0) for i in range(3))))
    policy = AdaptiveBudget("aimd")
    drafter.start("a", prompt_token_ids=PROMPT, training_step=1)
    drafter.extend("a", [0])
    lengths, text, position = [], [*range(30), *range(500, 540)], 1
    while position < 60:
        draft = plan_step(drafter, ["a"], policy=policy)["a"].draft_token_ids
        lengths.append(len(draft))
        num_accepted = next((i for i, token in enumerate(draft) if token != text[position + i]), len(draft))
        drafter.extend("a", text[position : position + num_accepted + 1])
        position += num_accepted + 1
    assert lengths[:3] == [2, 4, 8]
    assert set(lengths[-10:]) <= {0, 1}


# ---------------------------------------------------------------- threshold


def test_batch_threshold():
    policy = AdaptiveBudget("batch-threshold", max_running=4, max_draft_tokens=6)
    assert [Batch(n, acceptance=0.5).step(policy)[0] for n in (1, 4, 5, 100)] == [6, 6, 0, 0]
    assert [Batch(n, acceptance=0.5).step(AdaptiveBudget("batch-threshold"))[0] for n in (32, 33)] == [8, 0]


# ---------------------------------------------------------------- goodput


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.6, 0.8, 0.95])
@pytest.mark.parametrize("num_running", [1, 8, 64, 512])
def test_goodput_finds_the_best_length_of_its_model(acceptance, num_running):
    policy = AdaptiveBudget("goodput", latency=LATENCY, first_acceptance=0.9)
    batch = Batch(num_running, acceptance=acceptance)
    for _ in range(max(30, 1500 // num_running)):
        batch.step(policy)
    tail = Batch(num_running, acceptance=acceptance, seed=1)
    for _ in range(30):
        tail.step(policy)
    best_ms = expected_ms_per_token(best_length(num_running, acceptance), num_running, acceptance)
    chosen_ms = np.mean([expected_ms_per_token(length, num_running, acceptance) for length in tail.lengths])
    assert chosen_ms <= 1.05 * best_ms


def test_goodput_learns_the_rate_of_decided_tokens():
    """Three accepted, one rejected; of a whole draft nothing was rejected, of an empty one nothing decided."""
    policy = AdaptiveBudget("goodput", latency=LATENCY, first_acceptance=0.5)
    assert policy.acceptance == 0.5
    policy.observe(np.array([5, 0, 0]), np.array([3, 0, 0]))
    policy.observe(np.array([2]), np.array([2]))
    keep = 0.995 * 0.9995**2
    assert policy.acceptance == pytest.approx((3 * keep + 2 + 10) / (4 * keep + 2 + 20))


def test_goodput_comes_back_after_a_time_without_drafts():
    policy = AdaptiveBudget("goodput", latency=LATENCY)
    hopeless = Batch(32, acceptance=0.0)
    for _ in range(1500):
        hopeless.step(policy)
    assert 0 < np.count_nonzero(hopeless.lengths[200:]) < 40  # it tries now and then
    useful = Batch(32, acceptance=0.9)
    for _ in range(1500):
        useful.step(policy)
    assert min(useful.lengths[-50:]) >= 4
    assert policy.acceptance == pytest.approx(0.9, abs=0.02)


def test_goodput_never_learns_where_its_start_promises_nothing():
    policy, batch = AdaptiveBudget("goodput", latency=LATENCY), Batch(512, acceptance=0.95)
    for _ in range(50):
        batch.step(policy)
    assert set(batch.lengths) == {0}
    assert best_length(512, 0.95) == 3


def test_goodput_sees_the_context_that_a_pass_reads():
    requests = Batch(4, acceptance=0.5).requests()
    long = {name: getattr(requests, name) for name in requests.__slots__} | {"num_prompt_tokens": np.full(4, 50_000)}
    policy = AdaptiveBudget("goodput", latency=LatencyModel(c_base_ms=1, c_tok_ms=0.1, c_kv_ms=1e-4))
    assert policy.budgets(RunningRequests(**long))[0][0] > policy.budgets(requests)[0][0]


# ---------------------------------------------------------------- bandit


@pytest.mark.parametrize(("num_running", "acceptance"), [(12, 0.2), (20, 0.7), (30, 0.9)])
def test_the_bandit_settles_for_the_best_length_and_goes_on_exploring(num_running, acceptance):
    policy = AdaptiveBudget("beg-mab", latency=LATENCY)
    batch = Batch(num_running, acceptance=acceptance)
    for _ in range(1200):
        batch.step(policy)
    assert set(batch.lengths[:8]) == {2, 4, 8, 16}  # nothing is left untried
    late = batch.lengths[-700:]
    costs = {length: expected_ms_per_token(length, num_running, acceptance) for length in (2, 4, 8, 16)}
    good = [length for length, cost in costs.items() if cost <= 1.05 * min(costs.values())]
    assert np.mean([length in good for length in late]) > 0.85
    assert np.mean([length != max(set(late), key=late.count) for length in late]) > 0.03
    assert np.mean([costs[length] for length in late]) < 1.12 * min(costs.values())


def test_alone_it_goes_by_the_median_which_is_not_the_mean():
    """Most drafts bring nothing here, whatever their length: the median never sees what the others bring."""
    policy, batch = AdaptiveBudget("beg-mab", latency=LATENCY), Batch(1, acceptance=0.45)
    for _ in range(400):
        batch.step(policy)
    assert best_length(1, 0.45, (2, 4, 8, 16)) > 2
    assert np.mean(np.array(batch.lengths[-200:]) == 2) > 0.7


def test_buckets_of_batch_sizes_learn_apart_and_large_batches_are_off():
    curious, policy = (AdaptiveBudget("beg-mab", latency=LATENCY, exploration=share) for share in (0.5, 0.0))
    for num_running, acceptance in ((1, 0.95), (25, 0.05)):
        batch = Batch(num_running, acceptance=acceptance)
        for _ in range(300):
            batch.step(curious)
    policy.load_state(curious.state())
    assert [Batch(n, acceptance=0.5).step(policy)[0] for n in (1, 25)] == [16, 2]
    assert [Batch(20, acceptance=0.5).step(policy)[0] for _ in range(4)] == [2, 4, 8, 16]  # a bucket of its own
    before = policy.state()
    assert Batch(33, acceptance=0.5).step(policy) == [0] * 33
    assert policy.state() == before


def test_measured_times_decide_where_there_are_any():
    policy = AdaptiveBudget("beg-mab", latency=LATENCY, draft_lengths=(2, 8), exploration=0.0)
    for _ in range(20):
        batch = Batch(2, acceptance=0.9)
        caps = policy.budgets(batch.requests())[0]
        policy.observe(caps, np.minimum(caps, 4), step_ms=10.0 if caps[0] == 2 else 100.0)
    assert Batch(2, acceptance=0.9).step(policy) == [2, 2]
    rewards = policy.state()["rewards"][1]
    assert rewards[0][0] == pytest.approx(2 * 3 / 10)
    assert rewards[1] == [pytest.approx(2 * 5 / 100)]
    for broken in (0.0, -1.0, math.nan, math.inf, None):  # by the model then
        Batch(2, acceptance=1.0).step(policy, step_ms=broken)
        assert policy.state()["rewards"][1][0][-1] == pytest.approx(6 / LATENCY.step_ms(6))


def test_the_bandit_takes_medians_of_its_window():
    policy = AdaptiveBudget("beg-mab", latency=LATENCY, draft_lengths=(1, 3), exploration=0.0, window=3)
    state = {"num_choices": 0, "rewards": [[[9.0, 9.0, 1.0, 1.0, 5.0], [1.5, 2.5]]] + [[[], []]] * 3}
    policy.load_state(state)
    assert policy.state()["rewards"][0] == [[1.0, 1.0, 5.0], [1.5, 2.5]]
    assert Batch(1, acceptance=0.5).step(policy) == [3]  # medians 1 and 2


def test_seeds():
    def lengths(seed):
        policy, batch = AdaptiveBudget("beg-mab", latency=LATENCY, seed=seed), Batch(3, acceptance=0.7)
        for _ in range(200):
            batch.step(policy)
        return batch.lengths

    assert lengths(0) == lengths(0)
    assert lengths(0) != lengths(1)


# ---------------------------------------------------------------- all of them


@pytest.mark.parametrize("name", NAMES)
def test_a_policy_goes_on_from_its_state(name):
    policy, copy = (AdaptiveBudget(name) for _ in "ab")
    for num_running in (1, 3, 8, 30):
        batch = Batch(num_running, acceptance=0.6, first_number=100 * num_running)
        for _ in range(40):
            batch.step(policy)
    copy.load_state(json.loads(json.dumps(policy.state())))
    assert copy.state() == policy.state()
    batches = [Batch(6, acceptance=0.6, seed=9, first_number=10_000) for _ in "ab"]
    for _ in range(50):
        for batch, one in zip(batches, (policy, copy), strict=True):
            batch.step(one)
    assert batches[0].lengths == batches[1].lengths
    assert copy.state() == policy.state()


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_batch_and_a_repr_that_can_be_read_back(name):
    policy = AdaptiveBudget(name)
    caps, prices = policy.budgets(Batch(0, acceptance=0.5).requests())
    assert (caps.tolist(), prices.tolist()) == ([], [])
    policy.observe(np.array([], np.int64), np.array([], np.int64), step_ms=9.0)
    assert repr(eval(repr(policy))) == repr(policy)
    assert repr(policy).startswith(f"AdaptiveBudget('{name}', ")


@pytest.mark.parametrize("name", ["goodput", "beg-mab"])
def test_steps_that_do_not_go_together_change_nothing(name):
    policy = AdaptiveBudget(name)
    policy.budgets(Batch(2, acceptance=0.5).requests())
    before = policy.state()
    with pytest.raises(ValueError, match="drafted has 2 entries, accepted 1; they describe the same steps"):
        policy.observe(np.array([1, 2]), np.array([1]))
    assert policy.state() == before


@pytest.mark.parametrize(
    ("name", "state", "error", "message"),
    [
        ("goodput", {"accepted": 3.0}, KeyError, "decided"),
        ("goodput", {"accepted": 3.0, "decided": 2.0}, ValueError, r"accepted is 3\.0, decided 2\.0; it must be 0 <="),
        ("goodput", {"accepted": math.nan, "decided": 2.0}, ValueError, "accepted is nan"),
        ("goodput", {"accepted": "1", "decided": 2.0}, TypeError, "accepted must be a number, not str"),
        ("beg-mab", {"rewards": []}, KeyError, "num_choices"),
        ("beg-mab", {"num_choices": -1, "rewards": []}, ValueError, "num_choices is -1"),
        ("beg-mab", {"num_choices": 1, "rewards": [[[]]] * 4}, ValueError, "rewards has another shape"),
        ("beg-mab", {"num_choices": 1, "rewards": [[[1.0], [0.0], [], []]] * 4}, ValueError, "not a positive number"),
    ],
)
def test_a_bad_state_changes_nothing(name, state, error, message):
    policy, batch = AdaptiveBudget(name), Batch(3, acceptance=0.5)
    for _ in range(5):
        batch.step(policy)
    before = policy.state()
    with pytest.raises(error, match=message):
        policy.load_state(state)
    assert policy.state() == before


@pytest.mark.parametrize(
    ("name", "settings", "error", "message"),
    [
        ("eagle", {}, ValueError, "name is 'eagle'; it must be one of aimd, beg-mab, goodput, batch-threshold"),
        ("aimd", {"latency": LATENCY}, TypeError, "unexpected keyword"),
        ("aimd", {"max_draft_tokens": 65}, ValueError, "max_draft_tokens is 65"),
        ("aimd", {"first_draft_tokens": 0}, ValueError, "first_draft_tokens is 0; it must be at least 1"),
        ("batch-threshold", {"max_running": 1.5}, TypeError, "max_running must be an int, not float"),
        ("batch-threshold", {"max_draft_tokens": -1}, ValueError, "max_draft_tokens is -1"),
        ("goodput", {"latency": 200}, TypeError, "latency must be a LatencyModel, not int"),
        ("goodput", {"first_acceptance": 1.1}, ValueError, r"first_acceptance is 1\.1; it must be 0 <= first_"),
        ("goodput", {"first_acceptance": "1"}, TypeError, "first_acceptance must be a number, not str"),
        ("beg-mab", {"draft_lengths": ()}, ValueError, r"draft_lengths is \(\); it must hold at least one length"),
        ("beg-mab", {"draft_lengths": (2, 2)}, ValueError, "it must hold at least one length, each once"),
        ("beg-mab", {"first_of_bucket": (2, 5)}, ValueError, r"first_of_bucket is \(2, 5\); it must ascend from 1"),
        ("beg-mab", {"first_of_bucket": (1, 5, 5)}, ValueError, "it must ascend from 1"),
        ("beg-mab", {"exploration": -0.1}, ValueError, r"exploration is -0\.1"),
        ("beg-mab", {"window": 0}, ValueError, "window is 0; it must be at least 1"),
        ("beg-mab", {"seed": True}, TypeError, "seed must be an int, not bool"),
    ],
)
def test_bad_arguments(name, settings, error, message):
    with pytest.raises(error, match=message):
        AdaptiveBudget(name, **settings)


@pytest.mark.parametrize("name", NAMES)
def test_budgets_and_feedback_of_256_requests_take_less_than_150_us(name):
    """5 to 60 us."""
    policy, batch = (
        AdaptiveBudget(name, **({"max_running": 300} if name == "beg-mab" else {})),
        Batch(256, acceptance=0.5),
    )
    for _ in range(10):
        batch.step(policy)
    requests, drafted = batch.requests(), np.arange(256) % 5

    def step():
        policy.observe(drafted, drafted // 2, step_ms=9.0)
        policy.budgets(requests)

    assert least_us(step) < 150
