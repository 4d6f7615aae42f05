"""LengthClasses: thresholds, initial and runtime classes, upgrades, and what is refused."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from length_oracle import Oracle, longer_than

from das import LengthClass, LengthClasses, LengthModel

SHORT, MEDIUM, LONG = LengthClass
lengths = st.integers(1, 3000)
rollouts = st.lists(st.tuples(st.integers(0, 4), lengths), max_size=40)


def columns(pairs):
    keys, tokens = zip(*pairs, strict=True) if pairs else ((), ())
    return np.array(keys, np.uint64), np.array(tokens, np.int64)


def learned(pairs, **options):
    """Taught one rollout at a time."""
    classes = LengthClasses(LengthModel(**options))
    for pair in pairs:
        classes.observe_finished(*columns([pair]))
    return classes


def initial(classes, key):
    return classes.initial_classes(np.array([key], np.uint64))[0]


def present(classes, number, key, so_far):
    return classes.classes(np.array([number]), np.array([key], np.uint64), np.array([so_far]))[0]


def spread():
    """A hundred prompts with one rollout each of 10, 20, ... 1,000 tokens."""
    return learned([(1000 + number, 10 * number) for number in range(1, 101)])


def test_thresholds_are_quantiles_of_all():
    assert spread().thresholds() == pytest.approx((500, 800), rel=0.03)
    other = LengthClasses(spread().lengths, medium_above=0.2, long_above=0.9)
    assert other.thresholds() == pytest.approx((200, 900), rel=0.05)
    cold = LengthClasses().thresholds()
    assert 0 < cold[0] < cold[1]


def test_the_initial_class_is_that_of_most_of_the_prompts_rollouts():
    classes = spread()
    for key, its_lengths in {1: [100, 100, 900], 2: [600, 600, 900, 900, 100], 3: [600, 700, 100], 4: [900]}.items():
        for length in its_lengths:
            classes.observe_finished(*columns([(key, length)]))
    assert [initial(classes, key) for key in (1, 2, 3, 4)] == [SHORT, LONG, MEDIUM, LONG]  # a tie: the longer one
    assert initial(classes, 5) == MEDIUM


def test_cold_start_is_medium_and_becomes_long():
    classes = LengthClasses()
    assert present(classes, 1, 7, 0) == MEDIUM
    found = [present(classes, 1, 7, so_far) for so_far in range(0, 3000, 50)]
    assert found == sorted(found)
    assert found[-1] == LONG


def test_a_request_that_outlives_its_class_moves_up():
    classes = spread()
    for _ in range(20):
        classes.observe_finished(*columns([(7, 100)]))
    medium, long = classes.thresholds()
    assert present(classes, 1, 7, 0) == SHORT
    found = [present(classes, 1, 7, so_far) for so_far in range(0, 1000, 10)]
    assert set(found) == {SHORT, MEDIUM, LONG}
    assert found == sorted(found)
    assert found.index(LONG) * 10 <= long + 10
    assert found.index(MEDIUM) * 10 <= medium + 10


def test_a_class_never_falls_while_its_request_runs():
    classes = spread()
    assert present(classes, 1, 9, 820) == LONG
    for _ in range(50):
        classes.observe_finished(*columns([(9, 10_000)] * 50))  # now 820 tokens are not much
    assert present(classes, 2, 8, 820) == MEDIUM
    assert present(classes, 1, 9, 821) == LONG
    classes = spread()
    assert present(classes, 3, 9, 0) == MEDIUM
    for _ in range(20):
        classes.observe_finished(*columns([(9, 10)]))
    assert present(classes, 4, 9, 0) == SHORT
    assert present(classes, 3, 9, 1) == MEDIUM


def test_classes_of_requests_not_asked_about_are_remembered_up_to_a_bound(monkeypatch):
    monkeypatch.setattr("das.length_classes._MOST_REQUESTS", 3)
    classes = spread()
    numbers, keys = np.arange(3), np.array([1, 1, 1], np.uint64)
    assert classes.classes(numbers, keys, np.array([900, 0, 900])).tolist() == [LONG, MEDIUM, LONG]
    assert classes.classes(numbers[::-1], keys, np.array([0, 0, 0])).tolist() == [LONG, MEDIUM, LONG]
    assert classes.classes(np.array([3, 0]), keys[:2], np.array([0, 0])).tolist() == [MEDIUM, LONG]
    assert classes.classes(np.array([1, 2]), keys[:2], np.array([0, 0])).tolist() == [MEDIUM, LONG]  # 1 was forgotten
    assert sorted(classes._requests) == [0, 1, 2]
    five = np.arange(10, 15)
    assert classes.classes(five, np.ones(5, np.uint64), np.full(5, 900)).tolist() == [LONG] * 5
    assert classes.classes(five, np.ones(5, np.uint64), np.zeros(5, np.int64)).tolist() == [LONG] * 5


@given(pairs=rollouts, asked=st.lists(st.tuples(st.sampled_from(LengthClass), st.integers(0, 4000)), min_size=1))
def test_probabilities_by_counting(pairs, asked):
    """P(class | l, initial class) from the rollouts whose prompt had that class, and 16 like all of them."""
    classes = LengthClasses()
    histories = {its_class: [] for its_class in LengthClass}
    for key, length in pairs:
        histories[initial(classes, key)].append((0, length))
        classes.observe_finished(*columns([(key, length)]))
    medium, long = classes.thresholds()
    found = classes.probabilities(*(np.array(column) for column in zip(*asked, strict=True)))
    for (its_class, so_far), (is_short, is_medium, is_long) in zip(asked, found, strict=True):
        oracle = Oracle(histories[its_class], prompt_window=1000)
        oracle.overall = Oracle(pairs).overall
        above = oracle.above(0)
        beyond = [longer_than(above, max(so_far, at)) / longer_than(above, so_far) for at in (medium, long)]
        assert (is_short, is_medium, is_long) == pytest.approx((1 - beyond[0], beyond[0] - beyond[1], beyond[1]))


@given(pairs=rollouts, key=st.integers(0, 5))
def test_more_tokens_never_mean_a_shorter_class(pairs, key):
    classes = learned(pairs)
    so_far = np.arange(0, 4000, 37)
    for its_class in LengthClass:
        probabilities = classes.probabilities(np.full(len(so_far), its_class), so_far)
        assert probabilities.sum(axis=1) == pytest.approx(1)
        assert (probabilities > -1e-12).all()
        assert (np.diff(probabilities[:, SHORT]) <= 1e-12).all()
        assert (np.diff(probabilities[:, LONG]) >= -1e-12).all()
    once = classes.classes(np.arange(len(so_far)), np.full(len(so_far), key, np.uint64), so_far)
    assert (np.diff(once) >= 0).all()
    assert (once >= initial(classes, key)).all()


def test_only_the_window_counts():
    few = learned([(key, 50 * key) for key in range(1, 41)], window_rollouts=10, max_prompts=1)
    assert few.thresholds() == pytest.approx((1775, 1925), rel=0.05)
    above = few._above[:, 0]
    assert above.sum() == 10
    assert len(few._window) == 10


def test_odd_arrays():
    classes = spread()
    nobody = classes.classes(np.array([], np.int64), np.array([], np.uint64), np.array([], np.int64))
    assert (nobody.dtype, len(nobody)) == (np.int64, 0)
    classes.observe_finished([], [])
    found = classes.classes(np.array([1, 2, 3]), np.array([7, 7, 7], np.uint64), np.array([-5, 0, 2**62]))
    assert found.tolist() == [MEDIUM, MEDIUM, LONG]


def test_running_requests_move_thresholds():
    classes = learned([(key, 100 + key) for key in range(100)])
    before = classes.thresholds()
    classes.observe_running(np.full(100, 300))
    assert classes.thresholds()[1] > before[1] + 100


def as_json(state):
    return json.loads(json.dumps(state, default=lambda array: array.tolist()))


@given(pairs=rollouts)
def test_state_round_trip_through_json(pairs):
    classes, copy = learned(pairs, window_rollouts=15), learned([(9, 9)], window_rollouts=15)
    copy.load_state(as_json(classes.state()))
    for one in (classes, copy):
        one.observe_finished(*columns([(3, 700), (2, 5)]))
    assert as_json(copy.state()) == as_json(classes.state())
    keys, so_far = columns([(key, 150 * key) for key in range(6)])
    found = [one.classes(np.arange(6), keys, so_far).tolist() for one in (classes, copy)]
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"window_classes": [3]}, ValueError, "window_classes holds 3 to 3; it must be 0 <= entry < 3"),
        ({"window_bins": [76]}, ValueError, "window_bins holds 76 to 76; it must be 0 <= entry < 76"),
        ({"window_bins": []}, ValueError, "window_classes and window_bins differ in length"),
        ({"window_bins": None}, KeyError, "window_bins"),
        ({"window_bins": [0.5]}, TypeError, "window_bins holds 0.5"),
        ({"lengths": {}}, KeyError, "prompt_keys"),
    ],
)
def test_a_bad_state_changes_nothing(changes, error, message):
    classes = learned([(7, 100)])
    before = as_json(classes.state())
    state = {name: part for name, part in {**classes.state(), **changes}.items() if part is not None}
    with pytest.raises(error, match=message):
        classes.load_state(state)
    assert as_json(classes.state()) == before


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"medium_above": 0.8},
            ValueError,
            r"medium_above is 0\.8, long_above 0\.8; it must be 0 < medium_above <",
        ),
        ({"medium_above": 0.0}, ValueError, r"medium_above is 0\.0"),
        ({"long_above": 1}, ValueError, "long_above 1;"),
        ({"long_above": float("nan")}, ValueError, "long_above nan"),
        ({"long_above": "1"}, TypeError, "long_above must be a number, not str"),
        ({"lengths": 5}, TypeError, "lengths must be a LengthModel, not int"),
    ],
)
def test_bad_settings(options, error, message):
    with pytest.raises(error, match=message):
        LengthClasses(**options)


def test_bad_rollouts_change_nothing():
    classes = learned([(7, 100)])
    before = as_json(classes.state())
    with pytest.raises(ValueError, match="prompt_keys has 2 entries, num_response_tokens 1"):
        classes.observe_finished([1, 2], [3])
    assert as_json(classes.state()) == before
    assert repr(LengthClasses()).startswith("LengthClasses(LengthModel(window_rollouts=2048, ")
    assert repr(LengthClasses()).endswith("), medium_above=0.5, long_above=0.8)")
