"""The budget policies: what they answer, their defaults, what they learn, and what they refuse."""

import json
import math
import re

import numpy as np
import pytest
from cpu_cost import least_us
from hypothesis import given
from hypothesis import strategies as st
from rollout_samples import PROMPT, filled, rollout

from das import (
    Drafter,
    FixedBudget,
    LatencyEstimator,
    LatencyModel,
    NoDraft,
    PriceBudget,
    RunningRequests,
    ThroughputBudget,
    UnlimitedBudget,
    plan_step,
)


def running(num_requests, num_running=None):
    lengths = np.arange(num_requests, dtype=np.int64)
    return RunningRequests(
        request_numbers=lengths,
        prompt_keys=lengths.astype(np.uint64),
        num_prompt_tokens=lengths,
        num_response_tokens=lengths,
        num_decode_steps=lengths,
        num_drafted_tokens=0 * lengths,
        num_accepted_tokens=0 * lengths,
        num_emitted_tokens=lengths,
        num_running=num_requests if num_running is None else num_running,
    )


POLICIES = [
    (FixedBudget(), 8, 0.0, "FixedBudget(max_draft_tokens=8, min_survival=0)"),
    (FixedBudget(0), 0, 0.0, "FixedBudget(max_draft_tokens=0, min_survival=0)"),
    (FixedBudget(max_draft_tokens=64), 64, 0.0, "FixedBudget(max_draft_tokens=64, min_survival=0)"),
    (UnlimitedBudget(), 16, 0.0, "UnlimitedBudget(max_draft_tokens=16, min_survival=0)"),
    (UnlimitedBudget(max_draft_tokens=3), 3, 0.0, "UnlimitedBudget(max_draft_tokens=3, min_survival=0)"),
    (PriceBudget(), 16, 0.15, "PriceBudget(max_draft_tokens=16, min_survival=0.15)"),
    (PriceBudget(min_survival=1, max_draft_tokens=0), 0, 1.0, "PriceBudget(max_draft_tokens=0, min_survival=1)"),
    (NoDraft(), 0, math.inf, "NoDraft(max_draft_tokens=0, min_survival=inf)"),
]


@pytest.mark.parametrize(("policy", "cap", "price", "text"), POLICIES, ids=[text for *_, text in POLICIES])
def test_the_same_for_every_request(policy, cap, price, text):
    assert repr(policy) == text
    for num_requests in (0, 1, 5):
        caps, prices = policy.budgets(running(num_requests))
        assert (caps.dtype, prices.dtype) == (np.int64, np.float64)
        assert (caps.tolist(), prices.tolist()) == ([cap] * num_requests, [price] * num_requests)


@pytest.mark.parametrize("policy", [policy for policy, *_ in POLICIES], ids=repr)
def test_nothing_is_learned(policy):
    before = [part.tolist() for part in policy.budgets(running(2))]
    policy.observe(np.array([4, 0]), np.array([1, 0]))
    policy.observe(np.array([], np.int64), np.array([], np.int64), step_ms=8.0)
    assert policy.state() == {}
    policy.load_state(policy.state())
    assert [part.tolist() for part in policy.budgets(running(2))] == before


@pytest.mark.parametrize("policy", [FixedBudget, UnlimitedBudget, PriceBudget, ThroughputBudget])
@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        (-1, ValueError, "max_draft_tokens is -1; it must be 0 <= max_draft_tokens <= 64"),
        (65, ValueError, "max_draft_tokens is 65; it must be 0 <= max_draft_tokens <= 64"),
        (8.0, TypeError, "max_draft_tokens must be an int, not float"),
        ("8", TypeError, "max_draft_tokens must be an int, not str"),
        (True, TypeError, "max_draft_tokens must be an int, not bool"),
        (None, TypeError, "max_draft_tokens must be an int, not NoneType"),
    ],
)
def test_bad_lengths(policy, bad, error, message):
    with pytest.raises(error, match=f"^{message}$"):
        policy(max_draft_tokens=bad)


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        (-0.1, ValueError, "min_survival is -0.1; it must be 0 <= min_survival <= 1"),
        (1.5, ValueError, "min_survival is 1.5; it must be 0 <= min_survival <= 1"),
        (math.nan, ValueError, "min_survival is nan; it must be 0 <= min_survival <= 1"),
        (math.inf, ValueError, "min_survival is inf; it must be 0 <= min_survival <= 1"),
        ("0.5", TypeError, "min_survival must be a number, not str"),
        (True, TypeError, "min_survival must be a number, not bool"),
        (None, TypeError, "min_survival must be a number, not NoneType"),
    ],
)
def test_bad_prices(bad, error, message):
    with pytest.raises(error, match=f"^{message}$"):
        PriceBudget(min_survival=bad)


def test_what_is_a_keyword():
    assert FixedBudget(3).max_draft_tokens == 3
    for call in (
        lambda: UnlimitedBudget(3),
        lambda: PriceBudget(0.5),
        lambda: NoDraft(3),
        lambda: FixedBudget(3, 0.5),
        lambda: ThroughputBudget(3),
    ):
        with pytest.raises(TypeError, match="argument"):
            call()


def test_running_requests_are_a_frozen_value():
    requests = running(3)
    assert len(requests) == 3
    with pytest.raises(AttributeError):
        requests.num_running = 4
    with pytest.raises(TypeError):
        RunningRequests(num_running=1)


ARRAYS = [name for name in RunningRequests.__slots__ if name not in ("num_running", "num_waiting")]
WRONG = {
    "int32": (lambda array: array.astype(np.int32), TypeError, "not of int32"),
    "float": (lambda array: array.astype(np.float64), TypeError, "not of float64"),
    "bool": (lambda array: array.astype(np.bool_), TypeError, "not of bool"),
    "objects": (lambda array: array.astype(object), TypeError, "not of object"),
    "list": (lambda array: array.tolist(), TypeError, "not list"),
    "apart": (lambda array: np.repeat(array, 2)[::2], ValueError, "has strides (16,)"),
    "square": (lambda array: array.reshape(2, 2), ValueError, "has shape (2, 2)"),
    "longer": (lambda array: np.append(array, array), ValueError, "has shape ("),
}


@pytest.mark.parametrize(
    ("numbers", "error", "told"),
    [
        ({"num_running": 3}, ValueError, "num_running is 3; it must be at least the number of entries, 4"),
        ({"num_running": -1}, ValueError, "num_running is -1; it must be 0 <="),
        ({"num_running": 4.0}, TypeError, "num_running must be an int, not float"),
        ({"num_waiting": -5}, ValueError, "num_waiting is -5; it must be 0 <="),
        ({"num_waiting": "x"}, TypeError, "num_waiting must be an int, not str"),
    ],
)
def test_numbers_of_requests_are_checked_too(numbers, error, told):
    requests = {slot: getattr(running(4), slot) for slot in RunningRequests.__slots__}
    with pytest.raises(error, match=re.escape(told)):
        RunningRequests(**requests | numbers)


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_of_requests_are_checked_before_a_policy_reads_them(name, wrong):
    requests = {slot: getattr(running(4), slot) for slot in RunningRequests.__slots__}
    make, error, told = WRONG[wrong]
    with pytest.raises(error, match=re.escape(told)) as caught:
        RunningRequests(**requests | {name: make(requests[name])})
    if (name, wrong) != ("num_response_tokens", "longer"):  # which says how many requests there are
        assert str(caught.value).startswith(name)


def test_what_a_drafter_tells_of_its_requests_would_pass_the_check():
    drafter = Drafter()
    for request_id in ("a", "b", "c"):
        drafter.start(request_id, prompt_token_ids=[1, 2])
    for named in ([], ["b"], ["c", "a", "b"]):
        told = drafter.running(named)
        assert isinstance(told, RunningRequests)
        RunningRequests(**{slot: getattr(told, slot) for slot in RunningRequests.__slots__})


# ---------------------------------------------------------------- the price that tunes itself

RATE = 0.002  # written here a second time on purpose


def told_one_by_one(tokens, drafted_mean, drafted, accepted):
    """The recursion as the study has it."""
    for d, a in zip(drafted, accepted, strict=True):
        tokens += RATE * (a + 1 - tokens)
        drafted_mean += RATE * (d - drafted_mean)
    return tokens, drafted_mean


def means(policy):
    return policy.tokens_per_decode_step, policy.drafted_per_decode_step


def price(policy, num_running, *, num_requests=1):
    (cap, *_), (first, *rest) = (part.tolist() for part in policy.budgets(running(num_requests, num_running)))
    assert cap == policy.max_draft_tokens
    assert set(rest) <= {first}
    return first


def model(base, tok, kv=0.0, engine=0.0):
    return LatencyModel(c_base_ms=base, c_tok_ms=tok, c_kv_ms=kv, c_engine_ms=engine)


steps = st.lists(st.integers(0, 16).flatmap(lambda d: st.tuples(st.just(d), st.integers(0, d))), max_size=40)


def test_price_by_hand():
    """theta = T / (c_base / (c_tok running) + 1 + D), T = 1.5 and D = 1 at first, c_base / c_tok = 200."""
    policy = ThroughputBudget()
    assert (policy.max_draft_tokens, means(policy)) == (16, (1.5, 1.0))
    for num_running in (1, 16, 128, 320):
        assert price(policy, num_running) == pytest.approx(1.5 / (200 / num_running + 2))
        assert price(ThroughputBudget(latency=model(8, 0.025)), num_running) == pytest.approx(
            1.5 / (320 / num_running + 2)
        )
    assert price(policy, 9, num_requests=5) == price(policy, 9)
    caps, prices = policy.budgets(running(0))
    assert (caps.dtype, prices.dtype, len(caps), len(prices)) == (np.int64, np.float64, 0, 0)
    text = "LatencyModel(c_base_ms=5.0, c_tok_ms=0.025, c_kv_ms=0.0, c_engine_ms=0.0)"
    assert repr(policy) == f"ThroughputBudget(latency={text}, max_draft_tokens=16)"
    assert price(ThroughputBudget(max_draft_tokens=3), 1) == price(policy, 1)


def test_all_that_a_pass_costs_anyway_is_its_base():
    base = price(ThroughputBudget(latency=model(8, 0.1)), 4)
    assert base == pytest.approx(1.5 * 0.4 / (8 + 0.4 * 2))
    assert price(ThroughputBudget(latency=model(3, 0.1, 0, 5)), 4) == pytest.approx(base)
    # Three requests of 0, 1 and 2 prompt and as many response tokens: 2 a request, so 12 where six run.
    context = price(ThroughputBudget(latency=model(8, 0.1, 0.5)), 6, num_requests=3)
    assert context == pytest.approx(1.5 * 0.6 / (8 + 6 + 0.6 * 2))


@given(start=steps, chunks=st.lists(steps, max_size=5))
def test_means_are_those_of_the_recursion(start, chunks):
    policy, expected = ThroughputBudget(), (1.5, 1.0)
    for chunk in [start, *chunks]:
        drafted, accepted = np.array(chunk, np.int64).reshape(-1, 2).T
        policy.observe(drafted, accepted)
        expected = told_one_by_one(*expected, drafted, accepted)
        assert means(policy) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("num_steps", [1, 256, 1023, 1024, 1025, 3000])
def test_means_of_many_steps_at_once(num_steps):
    drafted = np.arange(num_steps) * 7 % 17
    accepted = drafted * 3 % (drafted + 1)
    policy = ThroughputBudget()
    policy.observe(drafted, accepted)
    assert means(policy) == pytest.approx(told_one_by_one(1.5, 1.0, drafted, accepted), rel=1e-11)


@given(history=steps, num_running=st.integers(1, 5000), ratio=st.floats(0.01, 1e4))
def test_laws_of_the_price(history, num_running, ratio):
    drafted, accepted = np.array(history, np.int64).reshape(-1, 2).T
    latencies = [model(ratio, 1), model(ratio + 1, 1), model(ratio, 1, 0, 1)]
    policies = [ThroughputBudget(latency=latency) for latency in latencies]
    for policy in policies:
        policy.observe(drafted, accepted)
    here, dearer_base, engine = (price(policy, num_running) for policy in policies)
    assert 0 < dearer_base == engine < here <= 1
    assert (price(policies[0], num_running + 1) > here) == (here < 1)
    assert price(policies[0], 10**9) == pytest.approx(means(policies[0])[0] / (1 + means(policies[0])[1]), rel=1e-4)


def test_tokens_that_cost_nothing_are_always_worth_it_and_the_price_stops_at_one():
    assert price(ThroughputBudget(latency=model(5, 0)), 10**6) == 0
    policy = ThroughputBudget(latency=model(0, 1))
    for _ in range(100):
        policy.observe(np.zeros(100, np.int64), np.zeros(100, np.int64))
    assert means(policy) == pytest.approx((1, 0), abs=1e-7)
    assert 1 - 1e-7 < price(policy, 1) <= 1  # off, but still asking: a price above 1 would look nothing up


def test_few_running_requests_draft_more_than_many():
    lengths = {}
    for num_running in (1, 16, 128, 5000):
        drafter = Drafter(filled(*(rollout([0, 1, 2, 3, *range(10 * i + 10, 10 * i + 20)], 0) for i in range(3))))
        drafter.start("a", prompt_token_ids=PROMPT, training_step=1)
        drafter.extend("a", [0, 1, 2])
        policy = ThroughputBudget(latency=model(200, 1))
        lengths[num_running] = len(plan_step(drafter, ["a"], policy=policy, num_running=num_running)["a"])
    assert list(lengths.values()) == sorted(lengths.values(), reverse=True)
    assert lengths[1] > lengths[5000]


def test_the_latency_is_learned_from_steps_of_the_whole_batch():
    policy = ThroughputBudget()
    drafted = np.array([3, 0, 1])
    for _ in range(50):
        policy.budgets(running(3))
        policy.observe(drafted, drafted, step_ms=10.0)
    assert policy.latency.step_ms(7) == pytest.approx(10, rel=0.01)
    estimate = policy.latency
    policy.budgets(running(3, 4))  # a part of the batch
    policy.observe(drafted, drafted, step_ms=12.0)
    policy.budgets(running(3))
    policy.observe(drafted[:2], drafted[:2], step_ms=12.0)  # one ended without an answer
    policy.budgets(running(3))
    policy.observe(drafted, drafted)
    policy.observe(np.array([], np.int64), np.array([], np.int64), step_ms=12.0)
    policy.observe(drafted, drafted, step_ms=12.0)  # of no step that was asked about
    assert policy.latency == estimate
    assert policy.state()["latency"]["num_outliers"] == 0
    policy.budgets(running(3))
    policy.observe(drafted, drafted, step_ms=10.5)
    assert policy.latency != estimate
    kept = ThroughputBudget(latency=model(5, 1))
    kept.budgets(running(3))
    kept.observe(drafted, drafted, step_ms=10.0)
    assert kept.latency == model(5, 1)
    estimator = LatencyEstimator(model(7, 1), memory_steps=10)
    assert ThroughputBudget(latency=estimator).latency == model(7, 1)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -1.0, 0.0])
def test_a_broken_clock_changes_no_price(garbage):
    policy, untimed = ThroughputBudget(), ThroughputBudget()
    for one, step_ms in ((policy, garbage), (untimed, None)):
        one.budgets(running(2))
        one.observe(np.array([1, 2]), np.array([1, 0]), step_ms=step_ms)
    assert price(policy, 5) == price(untimed, 5)
    assert policy.state()["latency"]["num_ignored"] == 1


def test_throughput_state_round_trip():
    policy = ThroughputBudget()
    policy.budgets(running(2))
    policy.observe(np.array([4, 2]), np.array([1, 2]), step_ms=9.0)
    state = json.loads(json.dumps(policy.state()))
    copy = ThroughputBudget()
    copy.load_state(state)
    assert copy.state() == policy.state()
    assert price(copy, 7) == price(policy, 7)
    kept = ThroughputBudget(latency=model(5, 1))
    kept.load_state(state)
    assert (means(kept), kept.latency) == (means(policy), model(5, 1))
    assert "latency" not in kept.state()
    policy.load_state(kept.state())
    assert copy.state() == policy.state()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"tokens_per_decode_step": 0.5}, ValueError, r"tokens_per_decode_step is 0\.5; it must be 1 <= tokens"),
        ({"tokens_per_decode_step": math.nan}, ValueError, "tokens_per_decode_step is nan"),
        ({"drafted_per_decode_step": -0.1}, ValueError, r"drafted_per_decode_step is -0\.1; it must be 0 <= drafted"),
        ({"drafted_per_decode_step": math.inf}, ValueError, "drafted_per_decode_step is inf"),
        ({"drafted_per_decode_step": "1"}, TypeError, "drafted_per_decode_step must be a number, not str"),
        ({"tokens_per_decode_step": True}, TypeError, "tokens_per_decode_step must be a number, not bool"),
        ({"tokens_per_decode_step": None}, KeyError, "tokens_per_decode_step"),
        ({"latency": {}}, KeyError, "gram"),
    ],
)
def test_a_bad_throughput_state_changes_nothing(changes, error, message):
    policy = ThroughputBudget()
    policy.budgets(running(2))
    policy.observe(np.array([4, 2]), np.array([1, 2]), step_ms=9.0)
    before = policy.state()
    state = {"tokens_per_decode_step": 2.0, "drafted_per_decode_step": 2.0, **changes}
    with pytest.raises(error, match=message):
        policy.load_state({name: part for name, part in state.items() if part is not None})
    assert policy.state() == before


def test_bad_throughput_arguments():
    with pytest.raises(TypeError, match="latency must be a LatencyModel or a LatencyEstimator, not float"):
        ThroughputBudget(latency=200.0)
    policy = ThroughputBudget()
    with pytest.raises(ValueError, match="drafted has 2 entries, accepted 1; they describe the same steps"):
        policy.observe(np.array([1, 2]), np.array([1]))
    assert means(policy) == (1.5, 1.0)


def test_budgets_and_feedback_of_256_requests_take_less_than_150_us():
    """About 10 us, and 30 with a measured time."""
    policy, requests = ThroughputBudget(), running(256)
    drafted = np.arange(256) % 5

    def step():
        policy.observe(drafted, drafted // 2, step_ms=9.0)
        policy.budgets(requests)

    assert least_us(step) < 150
