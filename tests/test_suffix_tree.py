"""SuffixTree by named examples, one reason each."""

import random

import pytest
from checks import CheckedTree
from das._tree_arrays import EDGE_BYTES, NODE_BYTES
from oracle import list_continuations

from das._suffix_tree import MAX_ORDER, SuffixTree


def word(letters):
    return [ord(letter) for letter in letters]


def top(checked, context):
    token = checked.tree.top_child(word(context))
    return None if token is None else chr(token)


def counts(checked, context, child=None):
    if child is None:
        return checked.tree.counts(word(context))
    return checked.tree.child_counts(word(context), ord(child))


# --- examples: closed sequences ---


def test_empty_tree_answers_nothing():
    tree = SuffixTree()
    tree.check_invariants()
    assert (tree.max_order, tree.num_tokens, tree.num_open_sequences) == (16, 0, 0)
    assert (tree.counts(()), tree.child_counts([], 7), tree.top_child(())) == ((0, 0), (0, 0), None)
    assert (tree.counts([7]), tree.child_counts([7], 7), tree.top_child([7])) == ((0, 0), (0, 0), None)


def test_banana():
    checked = CheckedTree(max_order=5)
    checked.add(word("banana"))
    checked.check()
    assert counts(checked, "a") == (0, 2)  # the last `a` has no next token
    assert counts(checked, "an") == counts(checked, "an", "a") == (0, 2)
    assert counts(checked, "ana") == counts(checked, "ana", "n") == (0, 1)
    assert counts(checked, "anana") == (0, 0)
    assert counts(checked, "banan", "a") == (0, 1)
    assert (top(checked, "n"), top(checked, "b"), top(checked, "anana")) == ("a", "a", None)


def test_mississippi():
    checked = CheckedTree(max_order=4)
    checked.add(word("mississippi"))
    checked.check()
    assert [counts(checked, context)[1] for context in ("i", "s", "ss", "is", "issi", "p")] == [3, 4, 2, 2, 2, 2]
    assert counts(checked, "issi", "s") == counts(checked, "issi", "p") == counts(checked, "i", "p") == (0, 1)
    assert (counts(checked, "i", "s"), top(checked, "i"), top(checked, "issi")) == ((0, 2), "s", "p")


def test_empty_context_counts_every_visible_token():
    checked = CheckedTree()
    prompt = checked.add_prompt(word("ab"))
    checked.add(word("abb"), prompt=prompt)
    checked.check()
    assert counts(checked, "") == (2, 3)
    assert (counts(checked, "", "a"), counts(checked, "", "b"), top(checked, "")) == ((1, 1), (1, 2), "b")
    assert checked.tree.num_tokens == 5


def test_self_overlap():
    checked = CheckedTree(max_order=3)
    sequence = checked.open()
    for _ in range(8):
        checked.extend(sequence, word("a"))
        checked.check()
    checked.close(sequence)
    checked.check()
    assert [counts(checked, "a" * n) for n in range(4)] == [(8, 0), (7, 0), (6, 0), (5, 0)]


def test_two_rollouts_diverge_at_last_token():
    checked = CheckedTree()
    checked.add(word("the same long beginning x"))
    checked.add(word("the same long beginning y"))
    checked.check()
    assert counts(checked, "long beginning ") == (0, 2)
    assert counts(checked, "long beginning ", "x") == counts(checked, "long beginning ", "y") == (0, 1)
    assert top(checked, "long beginning ") == "y"  # of equals the latest


def test_same_rollout_twice():
    checked = CheckedTree(max_order=4)
    checked.add(word("abcabd"))
    num_edges = checked.tree.num_edges
    sequence = checked.open()
    checked.extend(sequence, word("abcabd"))
    checked.close(sequence)
    checked.check()
    assert (counts(checked, "ab"), counts(checked, "cab", "d")) == ((2, 2), (1, 1))
    assert checked.tree.num_edges >= num_edges


def test_split_keeps_the_counts_of_both_sides():
    """An edge counted three times is split: the part above counts four, the old part below still three."""
    checked = CheckedTree(max_order=4)
    for letters in ("abcde", "abcde", "abcde", "abx"):
        checked.add(word(letters))
    checked.check()
    assert (counts(checked, "ab"), counts(checked, "ab", "c"), counts(checked, "ab", "x")) == ((0, 4), (0, 3), (0, 1))
    assert (counts(checked, "abcd"), counts(checked, "a", "b")) == ((0, 3), (0, 4))
    assert (top(checked, "a"), top(checked, "ab"), top(checked, "abc")) == ("b", "c", "d")


def test_split_keeps_the_class():
    checked = CheckedTree(max_order=4)
    checked.add(word("abcd"))
    sequence = checked.open()
    checked.extend(sequence, word("abx"))
    checked.close(sequence)
    checked.check()
    assert (counts(checked, "ab"), counts(checked, "ab", "c"), counts(checked, "ab", "x")) == ((1, 1), (0, 1), (1, 0))


def test_end_of_a_sequence_is_a_context_without_continuation():
    checked = CheckedTree(max_order=4)
    checked.add(word("abc"))
    checked.add(word("xab"))
    checked.check()
    assert counts(checked, "ab") == (0, 1)
    assert (counts(checked, "xab"), counts(checked, "ca")) == ((0, 0), (0, 0))  # nothing leads from one to the next


@pytest.mark.parametrize("max_order", range(1, 17))
def test_contexts_of_the_highest_order_branch(max_order):
    """Strings of max_order + 1 tokens are the deepest that count: they differ in the last token, or occur twice."""
    prefix = word("abcdefghijklmnop")[:max_order]
    checked = CheckedTree(max_order=max_order)
    for last in "xyyx" + "x" * max_order:
        checked.add([*prefix, ord(last), ord("z")])
    checked.check()
    assert checked.tree.counts(prefix) == (0, 4 + max_order)
    assert checked.tree.child_counts(prefix, ord("x")) == (0, 2 + max_order)
    assert checked.tree.child_counts(prefix, ord("y")) == (0, 2)
    assert checked.tree.top_child(prefix) == ord("x")


def test_top_child_follows_counts_then_recency():
    checked = CheckedTree(max_order=2)
    seen = []
    for letters in ("ab", "ac", "ad", "ac", "ab", "ab", "ad", "ad"):
        checked.add(word(letters))
        seen.append(top(checked, "a"))
    checked.check()
    assert "".join(seen) == "bcdcbbbd"


def test_extreme_token_ids():
    largest = 2**31 - 1
    checked = CheckedTree(max_order=2)
    checked.add([0, largest, 0, 0, largest, largest])
    checked.check()
    assert checked.tree.child_counts([0], largest) == (0, 2)
    assert checked.tree.top_child([largest]) == largest


# --- examples: prompts ---


def test_prompt_tail_is_context_for_the_first_response_token():
    checked = CheckedTree(max_order=3)
    prompt = checked.add_prompt(word("abcd"))
    for response in ("x", "xy"):
        checked.add(word(response), prompt=prompt)
    checked.check()
    assert (counts(checked, "bcd"), counts(checked, "d", "x")) == ((0, 2), (0, 2))
    assert counts(checked, "dx", "y") == (0, 1)
    assert counts(checked, "abc") == (1, 0)  # the prompt's own transitions: once, however many responses there are


def test_prompt_shorter_than_the_highest_order():
    checked = CheckedTree(max_order=8)
    prompt = checked.add_prompt(word("ab"))
    first, second = checked.open(prompt=prompt), checked.open(prompt=prompt)
    checked.check()
    for sequence, letters in ((first, "cab"), (second, "cac"), (first, "ab"), (second, "")):
        checked.extend(sequence, word(letters))
        checked.check()
    checked.close_all()
    checked.check()
    assert (counts(checked, "ab"), counts(checked, "abca")) == ((3, 0), (2, 0))


def test_prompt_that_repeats_itself():
    """The prompt's end occurs inside the prompt: contexts of the response start on shared edges."""
    checked = CheckedTree(max_order=4)
    prompt = checked.add_prompt(word("abababab"))
    checked.add(word("ab"), prompt=prompt)
    checked.check()
    assert (counts(checked, "abab", "a"), counts(checked, "abab")) == ((2, 1), (2, 1))


def test_two_prompts_with_the_same_tail():
    checked = CheckedTree(max_order=2)
    prompts = [checked.add_prompt(word(letters)) for letters in ("xab", "yab", "ab")]
    for prompt, response in zip(prompts, "cde", strict=True):
        checked.add(word(response), prompt=prompt)
    checked.check()
    assert (counts(checked, "ab"), top(checked, "ab")) == ((0, 3), "e")


def test_open_sequence_without_tokens_continues_its_prompt():
    checked = CheckedTree(max_order=3)
    prompt = checked.add_prompt(word("ab"))
    checked.add(word("cd"), prompt=prompt)
    sequence = checked.open(prompt=prompt)
    expected = [(0, 1, ord("c")), (0, 1, ord("c"))]
    assert checked.tree.continuations(checked.sequences[sequence]) == expected
    assert checked.tree.continuations(checked.sequences[sequence], word("c")) == [(0, 1, ord("d"))] * 3


@pytest.mark.parametrize("max_order", [1, 5, 16])
@pytest.mark.parametrize("letters", ["a", "ab", "abcdefgh"])
def test_a_cursor_follows_a_draft_of_any_length(max_order, letters):
    """Its places move through a buffer that is shorter than the longest draft."""
    text = word(random.Random(0).choices(letters, k=200))
    checked = CheckedTree(max_order=max_order)
    checked.add(text)
    sequence = checked.open()
    checked.extend(sequence, text[:20])
    for num_drafted in range(100):
        draft = text[20 : 20 + num_drafted]
        expected = list_continuations(checked.tree, checked.oracle.last_contexts(sequence, draft))
        assert len(expected) == max_order
        assert checked.tree.continuations(checked.sequences[sequence], draft) == expected


# --- examples: several open sequences ---


def run(steps, *, max_order=4, prompt=None):
    """Extend sequences named by letters in turn, check after every step, then close all and check again."""
    checked = CheckedTree(max_order=max_order)
    handle = checked.add_prompt(word(prompt)) if prompt else 0
    sequences = {}
    for name, letters in steps:
        if name == "add":
            checked.add(word(letters), prompt=handle)
        elif letters is None:
            checked.close(sequences.pop(name))
        else:
            if name not in sequences:
                sequences[name] = checked.open(prompt=handle)
            checked.extend(sequences[name], word(letters))
        checked.check()
    checked.close_all()
    checked.check()
    return checked


def test_visible_at_once():
    checked = CheckedTree()
    sequence = checked.open()
    checked.extend(sequence, word("abcab"))
    assert checked.tree.continuations(checked.sequences[sequence]) == [(1, 0, ord("c")), (1, 0, ord("c"))]
    sibling = checked.open()
    checked.extend(sibling, word("b"))
    assert checked.tree.continuations(checked.sequences[sibling]) == [(1, 0, ord("c"))]


def test_sibling_overtakes_the_tip_which_goes_on_differently():
    checked = run([("A", "abc"), ("B", "abcd"), ("A", "x"), ("B", "e")])
    assert (counts(checked, "abc"), counts(checked, "abc", "d"), counts(checked, "bc", "x")) == ((2, 0), (1, 0), (1, 0))


def test_sibling_overtakes_the_tip_which_goes_on_the_same_way():
    checked = run([("A", "abc"), ("B", "abcd"), ("A", "d"), ("A", "e"), ("B", "f")])
    assert counts(checked, "abc", "d") == counts(checked, "bcd") == (2, 0)
    assert counts(checked, "abcd", "e") == counts(checked, "abcd", "f") == (1, 0)


def test_tip_is_overtaken_and_closed():
    checked = run([("A", "abc"), ("B", "abcd"), ("A", None), ("B", "e"), ("C", "abcd")])
    assert (counts(checked, "abc", "d"), counts(checked, "abcd", "e")) == ((2, 0), (1, 0))


def test_tip_is_overtaken_by_two_siblings():
    checked = run([("A", "abc"), ("B", "abcd"), ("C", "abce"), ("A", "f"), ("B", "g"), ("C", "h"), ("A", "abce")])
    assert counts(checked, "abc") == (4, 0)


def test_tip_is_overtaken_by_history():
    checked = run([("A", "abc"), ("add", "abcd"), ("add", "abce"), ("A", "e"), ("A", "x")])
    assert (counts(checked, "abc", "e"), counts(checked, "abc", "d")) == ((1, 1), (0, 1))
    assert counts(checked, "abce", "x") == (1, 0)


def test_sequence_overtakes_its_own_tip():
    run([("A", "ababab"), ("A", "aba"), ("A", "bb"), ("A", "ababab")], max_order=6)


def test_sibling_rides_on_the_end_of_a_closed_sequence():
    checked = run([("A", "abc"), ("A", None), ("B", "abc"), ("B", "d"), ("C", "abcd"), ("C", "e")])
    assert counts(checked, "abc") == counts(checked, "abc", "d") == (2, 0)
    assert counts(checked, "bcd", "e") == (1, 0)


def test_two_sequences_end_at_the_same_place():
    run([("A", "abcd"), ("B", "abc"), ("C", "abc"), ("B", None), ("C", None), ("D", "abcx"), ("A", "abc")])


def test_sibling_splits_the_edge_another_stands_on():
    """B stands in the middle of A's edge when C splits it above, below and exactly there."""
    for split in ("ax", "abx", "abcx", "abcdx"):
        checked = run([("A", "abcdef"), ("B", "abc"), ("C", split), ("B", "d"), ("B", "y"), ("add", "abcde")])
        assert counts(checked, "a") == (3, 1)


def test_edge_is_split_several_times_under_one_place():
    steps = [("A", "abcdefgh"), ("B", "abcdef"), ("C", "abx"), ("C", "abcdx"), ("C", "abcx"), ("C", "ax"), ("B", "gy")]
    run(steps, max_order=8)


def test_responses_diverge_behind_one_prompt():
    run([("A", "c"), ("B", "c"), ("C", "d"), ("A", "abd"), ("B", "abe"), ("C", "ab"), ("add", "cab")], prompt="xaab")


def test_growth_past_segment_boundaries():
    """Long edges are read across the stretches in which interleaved sequences keep their text."""
    checked = CheckedTree()
    first, second = checked.open(), checked.open()
    texts = {first: list(range(1300)), second: list(range(600, 1900))}  # each token unique, then shared with the other
    rng = random.Random(1)
    while any(texts.values()):
        for sequence, rest in texts.items():
            size = rng.randint(1, 8)
            checked.extend(sequence, rest[:size])
            del rest[:size]
    checked.check()
    checked.close(first)
    checked.add(list(range(500, 1000)))
    checked.close(second)
    checked.check()
    assert checked.tree.counts(range(700, 716)) == (2, 1)


def test_room_for_the_next_segment():
    """A segment may begin in the middle of an extension; what it takes must have been reserved before."""
    for size in range(1, 50):
        checked = CheckedTree()
        sequence = checked.open()
        for start in range(0, 300, size):
            checked.extend(sequence, range(start, start + size))
            checked.tree.check_invariants()


def test_room_for_closing_many_sequences():
    """Each of them stands on 16 edges, and makes 16 nodes when it ends, long after room was last made."""
    checked = CheckedTree()
    leader = checked.open()
    for start in range(0, 1600, 4):
        checked.extend(leader, range(start, start + 4))
    for start in range(0, 1600, 20):
        checked.extend(checked.open(), range(start, start + 16))
    num_nodes = checked.tree.num_nodes
    for sequence in list(checked.sequences):
        checked.close(sequence)
        checked.tree.check_invariants()
    checked.check()
    assert checked.tree.num_nodes >= num_nodes + 80 * 15


@pytest.mark.parametrize("num_letters", [1, 2, 3, 8, 200])
@pytest.mark.parametrize("max_order", [1, 2, 5, 16])
def test_long_interleaved_sequences(num_letters, max_order):
    rng = random.Random(100 * num_letters + max_order)
    checked = CheckedTree(max_order=max_order)
    sequences = [checked.open(prompt=checked.add_prompt([rng.randrange(num_letters)])) for _ in range(4)]
    for step in range(240):
        token_ids = [rng.randrange(num_letters) for _ in range(rng.randint(1, 4))]
        if rng.random() < 0.7:  # go on as somebody else did
            text = rng.choice(checked.texts)
            start = rng.randrange(len(text))
            token_ids = text[start : start + 8]
        checked.extend(rng.choice(sequences), token_ids)
        if step % 60 == 59:
            checked.check()
            sequences[0] = checked.open()
    checked.close_all()
    checked.check()


# --- sizes ---


def test_constants():
    assert (MAX_ORDER, NODE_BYTES, EDGE_BYTES) == (16, 32, 16)


def test_memory_grows_with_the_text_and_within_reason():
    rng = random.Random(5)
    tree = SuffixTree()
    sizes = [tree.memory_bytes()]
    for _ in range(5):
        tree.add([rng.randrange(500) for _ in range(20_000)])
        sizes.append(tree.memory_bytes())
        assert sizes[-1] >= NODE_BYTES * tree.num_nodes + 4 * tree.num_tokens
    assert sizes == sorted(sizes)
    assert 0 <= sizes[0] < 100_000
    assert sizes[-1] < 200 * tree.num_tokens


@pytest.mark.parametrize("num_expected_tokens", [0, 1, 40, 100_000])
def test_what_is_expected_changes_no_answer(num_expected_tokens):
    words = [[1, 2, 3, 1, 2, 4] * 9, [1, 2, 3] * 20, list(range(100))]
    hinted, plain = SuffixTree(num_expected_tokens=num_expected_tokens), SuffixTree()
    for tree in (hinted, plain):
        for word in words:
            tree.add(word)
        tree.check_invariants()
    for context in ([], [1], [1, 2], [2, 3, 1], [40, 41, 42]):
        assert hinted.counts(context) == plain.counts(context)
        assert hinted.top_child(context) == plain.top_child(context)


def test_expected_tokens_fit_without_growing():
    tree = SuffixTree(num_expected_tokens=20_000)
    before = tree.memory_bytes()
    order = random.Random(0)
    tree.add([order.randrange(60) if order.random() < 0.5 else 7 for _ in range(10_000)])
    assert tree.memory_bytes() - before < 1000  # one slot for the sequence


def test_open_sequences_fit_without_growing():
    tree = SuffixTree()
    order = random.Random(0)
    tree.add([order.randrange(60) for _ in range(4_000)])  # room is made for as much at most
    sequences = [tree.open(num_expected_tokens=1_000) for _ in range(4)]
    before = tree.memory_bytes()
    for _ in range(40):  # with 400 tokens each, all together are longer than one was expected to be
        for sequence in sequences:
            tree.extend(sequence, [order.randrange(60) if order.random() < 0.5 else 7 for _ in range(10)])
    assert tree.memory_bytes() == before
    tree.check_invariants()
