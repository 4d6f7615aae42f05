"""Whatever a state holds in one of its places: load_state takes it or says what is wrong, and then changes nothing."""

import math

import numpy as np
import pytest

from das import (
    AdaptiveBudget,
    Confidence,
    FixedBudget,
    Hedge,
    LatencyEstimator,
    LengthAwareBudget,
    LengthClassBudget,
    LengthClasses,
    LengthModel,
    NoDraft,
    PriceBudget,
    ThroughputBudget,
    UnlimitedBudget,
)
from das.acceptance_curve import AcceptanceEstimator
from das.budget import FinishedRollouts
from das.checked_values import checked_number, checked_numbers

FINISHED = FinishedRollouts(
    prompt_keys=np.array([5, 6], np.uint64),
    **{name: np.array([40, 9]) for name in FinishedRollouts.__dataclass_fields__ if name != "prompt_keys"},
)


def taught(kind):
    """A learner that has learned what it can from two rollouts."""
    learner = AdaptiveBudget(kind) if isinstance(kind, str) else kind()
    if isinstance(learner, (LengthModel, LengthClasses)):
        learner.observe_finished(FINISHED.prompt_keys, FINISHED.num_response_tokens)
    elif isinstance(learner, AcceptanceEstimator):
        learner.observe(
            FINISHED.prompt_keys, num_emitted_tokens=[40, 9], num_drafted_tokens=[30, 6], num_accepted_tokens=[20, 3]
        )
    elif isinstance(learner, LatencyEstimator):
        learner.observe(30, 100, 9.0)
    elif hasattr(learner, "budgets"):
        learner.observe(np.array([4, 5]), np.array([1, 0]))
        if hasattr(learner, "observe_finished"):
            learner.observe_finished(FINISHED)
    return learner


POLICIES = (FixedBudget, UnlimitedBudget, PriceBudget, NoDraft, ThroughputBudget, LengthAwareBudget, LengthClassBudget)
POLICIES += ("aimd", "batch-threshold", "goodput", "beg-mab")
OTHERS = (Confidence, Hedge, LengthModel, LengthClasses, LatencyEstimator, AcceptanceEstimator)
LEARNERS = pytest.mark.parametrize("kind", POLICIES + OTHERS, ids=lambda kind: getattr(kind, "__name__", kind))

WRONG_PARTS = (
    None, {}, "x", b"1", 1j, object(), math.nan, math.inf, -1, 10**400, -(10**400), [], [None], ["1"], [1j],
    [10**400], [[1.0], [1.0, 2.0]], np.ones(9, complex), np.ones((4, 24), complex), np.full(9, "x"), np.ones(9, bool),
    np.longdouble("1e4000") * np.ones(9, np.longdouble),
)  # fmt: skip


def places(state, path=()):
    """The path to each part of a state, and of the states in it."""
    for name, part in state.items():
        yield (*path, name)
        if isinstance(part, dict):
            yield from places(part, (*path, name))


def with_part(state, path, part):
    """A copy of a state with another part."""
    first, *rest = path
    return {**state, first: with_part(state[first], rest, part) if rest else part}


def refusal(learner, state):
    """The error, of those that load_state is allowed, that it raises; None: it raises none."""
    try:
        learner.load_state(state)
    except (KeyError, TypeError, ValueError) as error:
        return error
    return None


def shown(state):
    """A state as text, to compare."""
    with np.printoptions(threshold=10**6, floatmode="unique"):
        return str(state)


@LEARNERS
@pytest.mark.filterwarnings("error")
def test_a_part_that_is_wrong_is_named_and_changes_nothing(kind):
    learner = taught(kind)
    before = learner.state()
    for path in places(before):
        for wrong in WRONG_PARTS:
            error = refusal(learner, with_part(before, path, wrong))
            if error is not None:
                names_what_it_lacks = isinstance(wrong, dict) and isinstance(error, KeyError)
                assert names_what_it_lacks or path[-1] in str(error)
                assert shown(learner.state()) == shown(before)
            learner.load_state(before)
            assert shown(learner.state()) == shown(before), "and what it took can be replaced"


@LEARNERS
@pytest.mark.parametrize("wrong", [None, 5, "x", [], [("weights", 1)]])
def test_a_state_is_a_mapping(kind, wrong):
    learner = taught(kind)
    before = shown(learner.state())
    with pytest.raises(TypeError, match=f"^state must be a mapping, not {type(wrong).__name__}$"):
        learner.load_state(wrong)
    assert shown(learner.state()) == before


@pytest.mark.parametrize("kind", [Confidence, Hedge])
def test_a_merge_says_which_state_is_wrong(kind):
    learner = taught(kind)
    before = learner.state()
    for wrong in (None, 5, "x", [], {}, *(with_part(before, path, [1j]) for path in places(before))):
        with pytest.raises((KeyError, TypeError), match=r"states\[1\]: "):
            learner.merge([before, wrong])
    for wrong in (None, 5):
        with pytest.raises(TypeError, match=f"^states must be an iterable of states, not {type(wrong).__name__}$"):
            learner.merge(wrong)
    assert shown(learner.state()) == shown(before)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, MemoryError])
def test_a_length_aware_budget_takes_all_of_a_state_or_nothing(error, monkeypatch):
    policy, other = taught(LengthAwareBudget), taught(LengthAwareBudget)
    other.observe(np.array([9]), np.array([9]))
    before = shown(policy.state())

    def fail(*_):
        raise error

    monkeypatch.setattr(LengthModel, "load_state", fail)
    with pytest.raises(error):
        policy.load_state(other.state())
    assert shown(policy.state()) == before


def test_numbers_of_every_honest_kind():
    for value in (3, 3.0, np.float32(3), np.int8(3), np.uint64(3)):
        assert checked_number(value, "x") == 3.0
        assert type(checked_number(value, "x")) is float
        for values in ([value, 2**70], (value, 2.0**70), np.array([value, 2**70], object)):
            assert checked_numbers(values, "x", shape=(None,)).tolist() == [3.0, 2.0**70]
    assert checked_number(-(10**400), "x") == -math.inf
    given = np.ones(2)
    assert not np.shares_memory(checked_numbers(given, "x", shape=(2,)), given)
    with pytest.raises(ValueError, match=r"x has shape \(2,\); it must be \(any, 2\)"):
        checked_numbers(given, "x", shape=(None, 2))
