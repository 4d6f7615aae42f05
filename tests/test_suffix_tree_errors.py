"""What SuffixTree accepts, refuses, and leaves unchanged when it raises, also when memory runs out."""

import array
import copy
import inspect
import pickle

import numpy as np
import pytest
from checks import CheckedTree, answers, failing_allocation

from das._suffix_tree import SuffixTree

UNKNOWN = 10**9
LONG = list(range(700)) + [1, 2, 3] * 100  # enough to need every array larger


def prepared():
    """A tree with a prompt (1), history and three open sequences that have something pending."""
    checked = CheckedTree(max_order=6)
    prompt = checked.add_prompt([1, 2, 3, 1, 2])
    checked.add([3, 1, 2, 3], prompt=prompt)
    checked.add([7, 8, 9])
    for token_ids in ([3, 1, 2, 4], [1, 2, 3, 1], [7, 8]):
        checked.extend(checked.open(prompt=prompt), token_ids)
    return checked


def last_open(checked):
    return max(checked.sequences)


@pytest.fixture
def checked():
    checked = prepared()
    before = answers(checked)
    yield checked
    assert answers(checked) == before
    checked.check()


# --- token ids ---

TAKE_TOKEN_IDS = {
    "add_prompt": ("token_ids", lambda tree, sequence, ids: tree.add_prompt(ids)),
    "add": ("token_ids", lambda tree, sequence, ids: tree.add(ids)),
    "add behind a prompt": ("token_ids", lambda tree, sequence, ids: tree.add(ids, prompt=1)),
    "extend": ("token_ids", lambda tree, sequence, ids: tree.extend(sequence, ids)),
    "counts": ("context_token_ids", lambda tree, sequence, ids: tree.counts(ids)),
    "child_counts": ("context_token_ids", lambda tree, sequence, ids: tree.child_counts(ids, 1)),
    "top_child": ("context_token_ids", lambda tree, sequence, ids: tree.top_child(ids)),
    "first_child": ("context_token_ids", lambda tree, sequence, ids: tree.first_child(ids)),
    "continuations": ("draft_token_ids", lambda tree, sequence, ids: tree.continuations(sequence, ids)),
}

BAD_TOKEN_IDS = [
    ([5, -1], ValueError, r"\[1\] is -1"),
    ((2**31,), ValueError, r"\[0\] is 2147483648"),
    ([0, 2**70], ValueError, r"\[1\] is 1180591620717411303424"),
    (np.array([1, 2, -3], np.int32), ValueError, r"\[2\] is -3"),
    (np.array([1, 2**31]), ValueError, r"\[1\] is 2147483648"),
    (array.array("i", [4, -4]), ValueError, r"\[1\] is -4"),
    (np.array([[1]], np.int32), ValueError, " has 2 dimensions"),
    (np.array([1.0]), TypeError, " has dtype float64"),
    ([1, 2.0], TypeError, r"\[1\] is a float"),
    ([True], TypeError, r"\[0\] is a bool"),
    ([1, "2"], TypeError, r"\[1\] is a str"),
    ([[1], [2]], TypeError, r"\[0\] is a list"),
    ({1, 2}, TypeError, " must be a sequence .*set does not say their order"),
    ({1: 2}, TypeError, " must be a sequence .*dict does not say their order"),
    ("12", TypeError, " .*str"),
    (b"12", TypeError, " .*bytes"),
    (None, TypeError, " .*NoneType"),
    (7, TypeError, " .*int"),
]


@pytest.mark.parametrize("method", TAKE_TOKEN_IDS)
@pytest.mark.parametrize(("token_ids", "error", "message"), BAD_TOKEN_IDS, ids=[repr(bad[0]) for bad in BAD_TOKEN_IDS])
def test_bad_token_ids(checked, method, token_ids, error, message):
    name, call = TAKE_TOKEN_IDS[method]
    with pytest.raises(error, match="^" + name + message):
        call(checked.tree, checked.sequences[last_open(checked)], token_ids)


@pytest.mark.parametrize("method", ["add_prompt", "add", "add behind a prompt"])
@pytest.mark.parametrize("nothing", [[], (), np.array([], np.int32)], ids=repr)
def test_nothing_to_index(checked, method, nothing):
    with pytest.raises(ValueError, match="token_ids is empty"):
        TAKE_TOKEN_IDS[method][1](checked.tree, None, nothing)


@pytest.mark.parametrize("method", ["counts", "child_counts", "top_child", "first_child"])
def test_context_too_long(checked, method):
    with pytest.raises(ValueError, match=r"context_token_ids .*7.* 6"):
        TAKE_TOKEN_IDS[method][1](checked.tree, None, [1] * 7)


@pytest.mark.parametrize("token_id", [-1, 2**31, 2**70, "1", 1.5])
def test_bad_child(checked, token_id):
    with pytest.raises(ValueError if isinstance(token_id, int) else TypeError, match="token_id"):
        checked.tree.child_counts([1], token_id)


@pytest.mark.parametrize(
    "same",
    [
        (1, 2, 3, 1, 2),
        array.array("i", [1, 2, 3, 1, 2]),
        array.array("q", [1, 2, 3, 1, 2]),
        np.array([1, 2, 3, 1, 2], np.int32),
        np.array([1, 2, 3, 1, 2]),
        np.array([1, 2, 3, 1, 2], np.uint8),
        np.array([1, 0, 2, 0, 3, 0, 1, 0, 2], np.int32)[::2],
        [np.int32(1), np.int64(2), 3, 1, 2],
        memoryview(np.array([1, 2, 3, 1, 2], np.int32)),
    ],
    ids=lambda same: type(same).__name__,
)
def test_token_ids_of_any_kind(same):
    expected, tree = SuffixTree(), SuffixTree()
    expected.add([1, 2, 3, 1, 2])
    tree.add(same)
    for context in ([], [1], [2], [1, 2], [1, 2, 3, 1]):
        assert tree.counts(context) == expected.counts(context)
    assert tree.counts(same) == (0, 0)
    assert tree.counts(same[:2]) == (0, 1)


def test_extend_by_nothing_changes_nothing(checked):
    for nothing in ([], (), np.array([], np.int32)):
        checked.extend(last_open(checked), nothing)


# --- handles and settings ---


@pytest.mark.parametrize("unknown", [0, 1, -1, UNKNOWN, 2**70, "0", None, 1.5], ids=repr)
def test_unknown_sequence(checked, unknown):
    expected = KeyError if isinstance(unknown, int) else (KeyError, TypeError)
    for call in (checked.tree.close, checked.tree.continuations, lambda name: checked.tree.extend(name, [1])):
        if unknown not in checked.sequences.values():
            with pytest.raises(expected, match=str(unknown)):
                call(unknown)


@pytest.mark.parametrize("unknown", [2, -1, UNKNOWN, 2**70, "1", None, 1.5], ids=repr)
def test_unknown_prompt(checked, unknown):
    expected = KeyError if isinstance(unknown, int) else (KeyError, TypeError)
    for call in (checked.tree.open, lambda *, prompt: checked.tree.add([1], prompt=prompt)):
        with pytest.raises(expected, match=str(unknown)):
            call(prompt=unknown)


def test_closed_sequence_stays_unknown():
    checked = prepared()
    closed = checked.close(last_open(checked))
    for _ in range(2):
        for call in (checked.tree.close, checked.tree.continuations, lambda name: checked.tree.extend(name, [1])):
            with pytest.raises(KeyError, match=str(closed)):
                call(closed)
        checked.open()  # may use the same memory, not the same id
    checked.check()


@pytest.mark.parametrize("max_order", [0, -1, 17, 2**70])
def test_max_order_out_of_range(max_order):
    with pytest.raises(ValueError, match=f"max_order is {max_order}; .*1 <= max_order <= 16"):
        SuffixTree(max_order=max_order)


@pytest.mark.parametrize("max_order", ["4", 4.0, None, True])
def test_max_order_is_an_int(max_order):
    with pytest.raises(TypeError, match="max_order"):
        SuffixTree(max_order=max_order)


def test_defaults():
    assert SuffixTree().max_order == 16


@pytest.mark.parametrize(
    ("wrong", "error"), [(-1, ValueError), (2**31, ValueError), ("4", TypeError), (True, TypeError)]
)
def test_expected_tokens_that_make_no_sense(wrong, error):
    with pytest.raises(error, match="num_expected_tokens"):
        SuffixTree(num_expected_tokens=wrong)
    tree = SuffixTree()
    with pytest.raises(error, match="num_expected_tokens"):
        tree.open(num_expected_tokens=wrong)
    assert tree.num_open_sequences == 0


def test_a_handle_is_not_a_truth_value(checked):
    with pytest.raises(KeyError, match="True"):
        checked.tree.open(prompt=True)
    assert [SuffixTree(max_order=order).max_order for order in range(1, 17)] == list(range(1, 17))
    by_default, explicit = SuffixTree(), SuffixTree(max_order=16)
    for tree, prompt in ((by_default, {}), (explicit, {"prompt": 0})):
        tree.add_prompt([1, 2])
        tree.add([2, 3], **prompt)
        sequence = tree.open(**prompt)
        tree.extend(sequence, [2, 3])
        tree.close(sequence)
        assert tree.counts([2]) == (1, 1)
        assert tree.counts([1, 2]) == (0, 0)  # none of the two came behind the prompt
    sequence = by_default.open()
    by_default.extend(sequence, [2])
    assert by_default.continuations(sequence) == by_default.continuations(sequence, ()) == [(1, 1, 3)]


def test_what_is_keyword_only():
    tree = SuffixTree()
    handle = tree.add_prompt([1])
    for call in (lambda: SuffixTree(4), lambda: tree.open(handle), lambda: tree.add([1], handle)):
        with pytest.raises(TypeError, match="positional"):
            call()


def test_read_only_properties(checked):
    for name in ("max_order", "num_tokens", "num_nodes", "num_edges", "num_open_sequences"):
        assert inspect.getdoc(getattr(SuffixTree, name))
        with pytest.raises(AttributeError):
            setattr(checked.tree, name, 1)


def test_second_init_is_harmless(checked):
    checked.tree.__init__(max_order=6)
    assert checked.tree.max_order == 6


@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy, copy.deepcopy])
def test_cannot_be_pickled(checked, copied):
    with pytest.raises(TypeError, match="SuffixTree"):
        copied(checked.tree)


# --- memory that runs out ---

MUTATIONS = {
    "add_prompt": lambda checked: checked.add_prompt(LONG),
    "add": lambda checked: checked.add(LONG),
    "add behind a prompt": lambda checked: checked.add(LONG, prompt=1),
    "open": lambda checked: checked.open(),
    "open behind a prompt": lambda checked: checked.open(prompt=1),
    "open for a response": lambda checked: checked.open(num_expected_tokens=10_000),
    "extend": lambda checked: checked.extend(last_open(checked), LONG),
    "extend by one": lambda checked: checked.extend(last_open(checked), [9]),
    "close": lambda checked: checked.close(last_open(checked)),
}
NEED_MEMORY = {  # at least so many times
    **dict.fromkeys(("add_prompt", "add", "add behind a prompt", "extend"), 4),
    "open": 1,
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_failing_allocation_changes_nothing(name):
    for n in range(32):
        checked = prepared()
        num_failures = fail_until_done(checked, n, MUTATIONS[name])
        checked.check()
        checked.close_all()
        checked.check()
        if num_failures == 0:
            assert n >= NEED_MEMORY.get(name, 0)
            return
    pytest.fail("the call never succeeded")


def test_room_for_a_response_is_gone_without_where_there_is_none():
    assert fail_until_done(prepared(), 0, MUTATIONS["open for a response"]) == 0


def fail_until_done(checked, n, call):
    """Repeat a call, each time with a later allocation failing, until it gets through; return how often it failed."""
    before = answers(checked)
    for num_failures in range(32):
        try:
            with failing_allocation(n + num_failures):
                call(checked)
        except MemoryError:
            assert answers(checked) == before
            checked.check()
        else:
            return num_failures
    return pytest.fail("the call never succeeded")


def test_failing_allocation_of_a_new_tree():
    for n in range(32):
        try:
            with failing_allocation(n):
                SuffixTree().check_invariants()
        except MemoryError:
            continue
        assert n >= 1
        return
    pytest.fail("the constructor never succeeded")
