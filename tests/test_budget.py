"""The constant budget policies: what they answer, their defaults, and what they refuse."""

import math

import numpy as np
import pytest

from das import FixedBudget, NoDraft, PriceBudget, RunningRequests, UnlimitedBudget


def running(num_requests):
    lengths = np.arange(num_requests, dtype=np.int64)
    return RunningRequests(
        num_prompt_tokens=lengths,
        num_response_tokens=lengths,
        prompt_keys=lengths.astype(np.uint64),
        num_running=num_requests,
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


@pytest.mark.parametrize("policy", [FixedBudget, UnlimitedBudget, PriceBudget])
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
    for call in (lambda: UnlimitedBudget(3), lambda: PriceBudget(0.5), lambda: NoDraft(3), lambda: FixedBudget(3, 0.5)):
        with pytest.raises(TypeError, match="argument"):
            call()


def test_running_requests_are_a_frozen_value():
    requests = running(3)
    assert len(requests) == 3
    with pytest.raises(AttributeError):
        requests.num_running = 4
    with pytest.raises(TypeError):
        RunningRequests(num_running=1)
