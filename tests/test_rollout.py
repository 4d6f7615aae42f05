"""Rollout and prompt_key: what they accept, what they refuse and how they say so."""

import copy
import pickle
import subprocess
import sys
from collections import OrderedDict
from dataclasses import FrozenInstanceError, fields

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from das import Rollout, RolloutHistory, prompt_key
from das.rollout import named_prompt_key, rollouts_of_fields

PROMPT, RESPONSE = [1, 2, 3], [4, 5, 6]
FIELDS = {"prompt_token_ids": PROMPT, "response_token_ids": RESPONSE}
token_ids = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=20)


def rollout(**changes):
    return Rollout(**{"prompt_token_ids": PROMPT, "response_token_ids": RESPONSE, **changes})


# ---------------------------------------------------------------- prompt_key


def test_prompt_key_is_pinned():
    """Keys are stored in state files and shared by machines: they never change."""
    assert prompt_key([1, 2, 3]) == 11402386789778234582
    assert prompt_key([0]) == 11387576302567392334
    assert prompt_key([2**31 - 1]) == 13571549749108319247


def test_prompt_key_is_the_same_in_every_process():
    command = [sys.executable, "-R", "-c", "from das import prompt_key; print(prompt_key([7, 8, 9]))"]
    keys = {subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(2)}
    assert keys == {f"{prompt_key([7, 8, 9])}\n"}


@given(token_ids)
def test_prompt_key_depends_on_the_values_only(ids):
    key = prompt_key(ids)
    assert 0 <= key < 2**64
    forms = (tuple(ids), np.array(ids, np.int32), np.array(ids, np.int64), np.array(ids, ">i8"), iter(ids))
    assert {prompt_key(form) for form in forms} == {key}
    assert prompt_key([*ids, 0]) != key
    assert rollout(prompt_token_ids=ids).key == rollout(prompt_token_ids=ids).prompt_key == key


def test_prompt_key_of_a_view_that_is_not_contiguous():
    assert prompt_key(np.arange(10, dtype=np.int32)[::2]) == prompt_key([0, 2, 4, 6, 8])


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        ([], ValueError, "prompt_token_ids is empty; it must hold at least one token id"),
        ([1, -1], ValueError, r"prompt_token_ids\[1\] is -1; token ids are 0 <= id < 2\*\*31"),
        (None, TypeError, "prompt_token_ids must be a sequence of token ids, not NoneType"),
    ],
)
def test_prompt_key_refuses(bad, error, message):
    with pytest.raises(error, match=message):
        prompt_key(bad)


# ---------------------------------------------------------------- bad arguments

BAD_TOKEN_IDS = [
    ([], ValueError, r"{name} is empty; it must hold at least one token id"),
    (np.array([], np.int64), ValueError, r"{name} is empty"),
    ([1, 2, -3], ValueError, r"{name}\[2\] is -3; token ids are 0 <= id < 2\*\*31"),
    ([2**31], ValueError, r"{name}\[0\] is 2147483648; token ids"),
    ([0, 10**30], ValueError, r"{name}\[1\] is 10+; token ids"),
    (np.array([1, 2**31]), ValueError, r"{name}\[1\] is 2147483648; token ids"),
    (np.array([5, -1], np.int32), ValueError, r"{name}\[1\] is -1; token ids"),
    (np.array([[1, 2]]), ValueError, r"{name} has 2 dimensions"),
    (np.array([1.0]), TypeError, r"{name} has dtype float64"),
    (np.array([True]), TypeError, r"{name} has dtype bool"),
    ([1, 2.0], TypeError, r"{name}\[1\] is a float; token ids are ints"),
    ([True], TypeError, r"{name}\[0\] is a bool; token ids are ints"),
    ([1, "2"], TypeError, r"{name}\[1\] is a str"),
    ([[1]], TypeError, r"{name}\[0\] is a list"),
    ("12", TypeError, r"{name} must hold token ids \(ints\), not str"),
    (b"12", TypeError, r"{name} must hold token ids \(ints\), not bytes"),
    ({1, 2}, TypeError, r"{name} must be a sequence of token ids; a set does not say their order"),
    (frozenset(), TypeError, r"{name} must be a sequence of token ids; a frozenset does not say their order"),
    ({1: 2}, TypeError, r"{name} must be a sequence of token ids; a dict does not say their order"),
    (OrderedDict({1: 2}), TypeError, r"{name} must be a sequence of token ids; a OrderedDict does not"),
    ({1: 2}.keys(), TypeError, r"{name} must be a sequence of token ids; a dict_keys does not"),
    (None, TypeError, r"{name} must be a sequence of token ids, not NoneType"),
    (7, TypeError, r"{name} must be a sequence of token ids, not int"),
]


@pytest.mark.parametrize("name", ["prompt_token_ids", "response_token_ids"])
@pytest.mark.parametrize(("bad", "error", "message"), BAD_TOKEN_IDS)
def test_token_ids_are_refused(name, bad, error, message):
    with pytest.raises(error, match="^" + message.format(name=name)):
        rollout(**{name: bad})


@pytest.mark.parametrize(
    ("name", "bad", "error", "message"),
    [
        ("training_step", -1, ValueError, r"training_step is -1; it must be 0 <= training_step < 2\*\*62"),
        ("training_step", 2**62, ValueError, r"training_step is 4611686018427387904; it must be 0 <="),
        ("training_step", 1.0, TypeError, "training_step must be an int, not float"),
        ("training_step", "1", TypeError, "training_step must be an int, not str"),
        ("training_step", True, TypeError, "training_step must be an int, not bool"),
        ("prompt_key", -1, ValueError, r"prompt_key is -1; it must be 0 <= prompt_key < 2\*\*64"),
        ("prompt_key", 2**64, ValueError, r"prompt_key is 18446744073709551616; it must be 0 <="),
        ("prompt_key", "a", TypeError, "prompt_key must be an int, not str"),
        ("ordinal", -1, ValueError, r"ordinal is -1; it must be 0 <= ordinal < 2\*\*31"),
        ("ordinal", 2**31, ValueError, "ordinal is 2147483648; it must be 0 <="),
        ("ordinal", None, TypeError, "ordinal must be an int, not NoneType"),
        ("reward", float("nan"), ValueError, "reward is nan; it must be finite"),
        ("reward", -float("inf"), ValueError, "reward is -inf; it must be finite"),
        pytest.param("reward", 10**400, ValueError, "reward", id="reward-huge"),
        ("reward", "1", TypeError, "reward must be a number or None, not str"),
        ("reward", True, TypeError, "reward must be a number or None, not bool"),
        ("reward", np.array([1.0]), TypeError, "reward must be a number or None, not ndarray"),
        ("request_id", 5, TypeError, "request_id must be a str or None, not int"),
        ("request_id", b"a", TypeError, "request_id must be a str or None, not bytes"),
        ("response_mask", [True], ValueError, r"response_mask has shape \(1,\); it must be \(3,\)"),
        ("response_mask", [[True] * 3], ValueError, r"response_mask has shape \(1, 3\); it must be \(3,\)"),
        ("response_mask", True, ValueError, r"response_mask has shape \(\); it must be \(3,\)"),
        ("response_mask", [1, 0, 2], (TypeError, ValueError), r"response_mask.*\b2\b"),
        ("response_mask", [1.0, 0.0, 1.0], TypeError, "response_mask must hold booleans .*, not float64"),
        ("response_mask", "yes", TypeError, "response_mask must hold booleans"),
        ("response_mask", [True, None, False], TypeError, "response_mask must hold booleans .*, not object"),
        ("response_mask", [[True], [True, False], []], (TypeError, ValueError), "response_mask"),
    ],
)
def test_other_arguments_are_refused(name, bad, error, message):
    with pytest.raises(error, match="^" + message):
        rollout(**{name: bad})


def test_arguments_are_keywords():
    with pytest.raises(TypeError):
        Rollout(PROMPT, RESPONSE)
    with pytest.raises(TypeError):
        Rollout(prompt_token_ids=PROMPT)


# ---------------------------------------------------------------- what it holds


def test_defaults():
    r = rollout()
    assert (r.training_step, r.reward, r.request_id, r.response_mask, r.ordinal) == (None, None, None, None, 0)
    assert r.key == r.prompt_key == prompt_key(PROMPT)


def test_arrays_are_read_only_copies():
    prompt, response = np.array(PROMPT, np.int32), np.array(RESPONSE, np.int32)
    mask = np.array([True, False, True])
    r = rollout(prompt_token_ids=prompt, response_token_ids=response, response_mask=mask)
    prompt[:] = response[:] = 0
    mask[:] = False
    assert r.prompt_token_ids.tolist() == PROMPT
    assert r.response_token_ids.tolist() == RESPONSE
    assert r.response_mask.tolist() == [True, False, True]
    for array, dtype in ((r.prompt_token_ids, np.int32), (r.response_token_ids, np.int32), (r.response_mask, bool)):
        assert array.dtype == dtype
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


@pytest.mark.parametrize("value", [1, 1.0, np.float32(1), np.int64(1)])
def test_a_reward_becomes_a_float(value):
    assert (type(rollout(reward=value).reward), rollout(reward=value).reward) == (float, 1.0)


@pytest.mark.parametrize("value", [0, 2**62 - 1, np.int64(3), np.uint8(3)])
def test_training_steps(value):
    step = rollout(training_step=value).training_step
    assert (step, type(step)) == (value, int)  # it is counted on from and written as JSON


@pytest.mark.parametrize("key", [0, 2**64 - 1, np.uint64(2**64 - 1)])
def test_the_callers_own_key(key):
    assert (rollout(prompt_key=key).key, type(rollout(prompt_key=key).key)) == (key, int)


@pytest.mark.parametrize(
    "mask", [[True, False, True], [1, 0, 1], (1, 0, 1), np.array([1, 0, 1], np.uint8), np.array([1, 0, 1], np.int64)]
)
def test_masks(mask):
    assert rollout(response_mask=mask).response_mask.tolist() == [True, False, True]


@pytest.mark.parametrize("mask", [[True] * 3, [False] * 3])
def test_a_mask_of_one_kind_is_kept(mask):
    assert rollout(response_mask=mask).response_mask.tolist() == mask


@pytest.mark.parametrize("ordinal", [0, 1, 2**31 - 1])
def test_ordinals(ordinal):
    assert rollout(ordinal=ordinal).ordinal == ordinal


def test_response_hash_depends_on_the_response_only():
    same = {rollout().response_hash, rollout(prompt_token_ids=[9], reward=1.0, ordinal=3).response_hash}
    assert len(same) == 1
    assert rollout(response_token_ids=[4, 5]).response_hash not in same


def test_it_is_frozen_and_slotted():
    r = rollout()
    with pytest.raises(FrozenInstanceError):
        r.reward = 1.0
    assert not hasattr(r, "__dict__")


def test_two_rollouts_are_equal_only_if_the_same():
    """Arrays compare element by element; identity of content is the history's business."""
    r = rollout()
    assert r == r
    assert r != rollout()
    assert len({r, rollout()}) == 2


PASSED_ON = {
    **{f"pickle {n}": lambda r, n=n: pickle.loads(pickle.dumps(r, n)) for n in range(2, pickle.HIGHEST_PROTOCOL + 1)},
    "pickle twice": lambda r: pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(r)))),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}


@pytest.mark.parametrize("way", PASSED_ON)
@pytest.mark.parametrize("mask", [None, [True, False, True]])
def test_what_another_process_gets_is_equal_and_read_only_too(way, mask):
    r = rollout(response_mask=mask, training_step=3, reward=0.5, request_id="a", prompt_key=7, ordinal=2)
    passed_on = PASSED_ON[way](r)
    assert type(passed_on) is Rollout
    for field in fields(Rollout):
        before, after = getattr(r, field.name), getattr(passed_on, field.name)
        if isinstance(before, np.ndarray):
            assert (after.tolist(), after.dtype) == (before.tolist(), before.dtype)
            with pytest.raises(ValueError, match="read-only"):
                after[0] = 1
        else:
            assert after == before
    with pytest.raises(FrozenInstanceError):
        passed_on.reward = 1.0


def test_rollouts_that_share_a_prompt_still_do_after_pickling():
    history = RolloutHistory()
    history.add_many([rollout(), rollout(ordinal=1)])
    first, second = pickle.loads(pickle.dumps(history.rollouts(prompt_key(PROMPT))))
    assert first.prompt_token_ids is second.prompt_token_ids


def test_rollouts_of_plain_values():
    items = [FIELDS, FIELDS | {"prompt_key": "problem 17", "reward": 0.5}, FIELDS | {"prompt_key": 5}]
    given = copy.deepcopy(items)
    found = rollouts_of_fields(items)
    assert [one.key for one in found] == [prompt_key(PROMPT), named_prompt_key("problem 17"), 5]
    assert found[1].reward == 0.5
    assert items == given
    assert rollouts_of_fields([]) == []


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        ({}, "rollout 1: .*prompt_token_ids"),
        ([1], "rollout 1: it must be a mapping of the fields of a rollout, not list"),
        (FIELDS | {"colour": 1}, "rollout 1: .*colour"),
        (FIELDS | {"training_step": -1}, "rollout 1: training_step is -1"),
        (FIELDS | {"prompt_key": 0.5}, "rollout 1: prompt_key must be an int, not float"),
    ],
)
def test_the_first_that_is_no_rollout_is_named(bad, error):
    with pytest.raises(ValueError, match=f"^{error}"):
        rollouts_of_fields([FIELDS, bad, {}])
