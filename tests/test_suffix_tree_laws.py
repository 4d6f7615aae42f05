"""Laws of SuffixTree: what must hold between answers, whatever they are."""

import strategies
from checks import CheckedTree, answers, replay
from hypothesis import given
from hypothesis import strategies as st
from oracle import list_continuations

orders = strategies.max_orders


@given(texts=strategies.collections(), max_order=orders)
def test_of_equals_the_latest_is_the_top_child(texts, max_order):
    checked = CheckedTree(max_order=max_order)
    for token_ids in texts:
        checked.add(token_ids)
    for context in checked.oracle.table():
        assert checked.tree.top_child(context) == checked.oracle.top_child(context)


@given(texts=strategies.collections(), max_order=orders)
def test_the_first_child_followed_the_first_occurrence(texts, max_order):
    checked = CheckedTree(max_order=max_order)
    for token_ids in texts:
        checked.add(token_ids)
    for context in checked.oracle.table():
        assert checked.tree.first_child(context) == (checked.oracle.first_child(context) if context else None)


@given(calls=strategies.call_lists(), max_order=orders)
def test_same_calls_same_answers(calls, max_order):
    assert answers(replay(calls, max_order=max_order)) == answers(replay(calls, max_order=max_order))


@given(calls=strategies.call_lists(), max_order=orders)
def test_extending_token_by_token_is_extending_at_once(calls, max_order):
    split = []
    for method, *arguments in calls:
        if method == "extend":
            split += [("extend", arguments[0], [token]) for token in arguments[1]]
        else:
            split.append((method, *arguments))
    assert answers(replay(split, max_order=max_order)) == answers(replay(calls, max_order=max_order))


@given(texts=strategies.collections(), max_order=orders, data=st.data())
def test_order_of_adding_does_not_change_counts(texts, max_order, data):
    shuffled = data.draw(st.permutations(texts))
    trees = [replay([("add", token_ids, 0) for token_ids in order], max_order=max_order) for order in (texts, shuffled)]
    assert answers(trees[0])["children"] == answers(trees[1])["children"]


@given(calls=strategies.call_lists(), max_order=orders, data=st.data())
def test_relabelling_tokens_relabels_answers(calls, max_order, data):
    original = replay(calls, max_order=max_order)
    tokens = sorted({token for text in original.texts for token in text})
    images = data.draw(st.lists(strategies.token_ids, min_size=len(tokens), max_size=len(tokens), unique=True))
    image = dict(zip(tokens, images, strict=True)) | {None: None}
    relabelled = replay(
        [tuple([image[t] for t in a] if isinstance(a, list) else a for a in call) for call in calls],
        max_order=max_order,
    )
    for context, children in original.oracle.table().items():
        there = [image[token] for token in context]
        assert relabelled.tree.counts(there) == original.tree.counts(context)
        assert relabelled.tree.top_child(there) == image[original.tree.top_child(context)]
        for token in children:
            assert relabelled.tree.child_counts(there, image[token]) == original.tree.child_counts(context, token)


@given(calls=strategies.call_lists(), max_order=orders, data=st.data())
def test_continuations_of_a_draft(calls, max_order, data):
    """Drafting changes nothing; really extending then finds the same history, and no less in the running class."""
    checked = replay(calls, max_order=max_order)
    sequence = checked.open(prompt=data.draw(st.sampled_from(sorted(checked.prompts))))
    checked.extend(sequence, data.draw(strategies.words_after([0, 1], checked.texts)))
    draft = data.draw(strategies.words_after([0, 1], checked.texts))
    before = answers(checked)
    drafted = checked.tree.continuations(checked.sequences[sequence], draft)
    assert drafted == list_continuations(checked.tree, checked.oracle.last_contexts(sequence, draft))
    assert answers(checked) == before
    checked.extend(sequence, draft)
    extended = checked.tree.continuations(checked.sequences[sequence])
    assert len(extended) >= len(drafted)
    for (running, history, _), (running_now, history_now, _) in zip(drafted, extended, strict=False):
        assert (running_now >= running, history_now) == (True, history)
