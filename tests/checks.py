"""A SuffixTree and the oracle side by side: every call goes to both, `check` compares all they answer."""

from contextlib import contextmanager

from das._tree_arrays import _fail_allocation_after
from oracle import NaiveSuffixTree, add_up, list_continuations

from das._suffix_tree import SuffixTree

UNSEEN_TOKEN_ID = 1_234_567_890


@contextmanager
def failing_allocation(n):
    """Let the n-th allocation from now on fail."""
    _fail_allocation_after(n)
    try:
        yield
    finally:
        _fail_allocation_after(-1)


class CheckedTree:
    """The methods of SuffixTree, on the tree and its oracle at once. Prompts and sequences are named by the oracle.

    The oracle follows only when the tree did not raise.
    """

    def __init__(self, *, max_order=16):
        self.tree = SuffixTree(max_order=max_order)
        self.oracle = NaiveSuffixTree(max_order=max_order)
        self.prompts = {0: 0}  # the oracle's handle -> the tree's
        self.sequences = {}  # the open ones
        self.sequence_ids = set()  # all the tree ever gave

    @property
    def texts(self):
        """The token ids indexed so far, with prompt tails, without empty ones."""
        return [text.token_ids for text in self.oracle.texts if text.token_ids]

    def add_prompt(self, token_ids):
        handle = self.tree.add_prompt(token_ids)
        assert handle > 0
        assert handle not in self.prompts.values()
        name = self.oracle.add_prompt(token_ids)
        self.prompts[name] = handle
        return name

    def add(self, token_ids, *, prompt=0):
        assert self.tree.add(token_ids, prompt=self.prompts[prompt]) is None
        self.oracle.add(token_ids, prompt=prompt)

    def open(self, *, prompt=0, num_expected_tokens=0):
        sequence = self.tree.open(prompt=self.prompts[prompt], num_expected_tokens=num_expected_tokens)
        assert sequence not in self.sequence_ids
        self.sequence_ids.add(sequence)
        name = self.oracle.open(prompt=prompt)
        self.sequences[name] = sequence
        return name

    def extend(self, name, token_ids):
        assert self.tree.extend(self.sequences[name], token_ids) is None
        self.oracle.extend(name, token_ids)

    def close(self, name):
        assert self.tree.close(self.sequences[name]) is None
        self.oracle.close(name)
        return self.sequences.pop(name)

    def close_all(self):
        for name in list(self.sequences):
            self.close(name)

    def check(self, *, contexts=()):
        """Compare every answer about every context of the texts, near misses and `contexts` with the oracle."""
        tree, oracle = self.tree, self.oracle
        tree.check_invariants()
        assert (tree.num_tokens, tree.num_open_sequences) == (oracle.num_tokens, oracle.num_open_sequences)
        exact, settled = oracle.table(), oracle.table(only_settled=True)
        others = {*sorted(exact.get((), ()))[:6], UNSEEN_TOKEN_ID}
        for context in {(), *exact, *self._near_misses(), *map(tuple, contexts)}:
            self._check_context(context, exact.get(context, {}), settled.get(context, {}), others)
        for name, sequence in self.sequences.items():
            expected = list_continuations(tree, oracle.last_contexts(name))
            assert tree.continuations(sequence) == expected, f"continuations of sequence {name}"

    def _check_context(self, context, exact, settled, others):
        reported = {token: self.tree.child_counts(context, token) for token in exact}
        for token, counts in reported.items():
            low, high = settled.get(token, (0, 0)), exact[token]
            where = f"{context} -> {token}: reported {counts}, settled {low}, exact {high}"
            assert low[0] <= counts[0] <= high[0], where
            assert low[1] <= counts[1] <= high[1], where
            assert sum(counts) > 0, where
        for token in others - exact.keys():
            assert self.tree.child_counts(context, token) == (0, 0), f"{context} -> {token} never occurred"
        assert self.tree.counts(context) == add_up(reported.values()), f"{context}: children {reported}"
        top = self.tree.top_child(context)
        if reported:
            best = max(sum(counts) for counts in reported.values())
            assert top in reported, f"top child {top} of {context} is none of {reported}"
            assert sum(reported[top]) == best, f"top child {top} of {context} among {reported}"
        else:
            assert top is None, f"top child {top} of {context}, which has none"

    def _near_misses(self):
        """Contexts that may be absent: ends of texts, across two texts, one token changed."""
        order = self.oracle.max_order
        texts = self.texts
        for text, following in zip(texts, texts[1:] + texts[:1], strict=True):
            for n in range(1, min(order, len(text)) + 1):
                yield tuple(text[-n:])
                yield (*text[-n:], following[0])[-order:]
                yield (*text[-n:-1], UNSEEN_TOKEN_ID)
                yield (UNSEEN_TOKEN_ID, *text[-n:])[:order]


def answers(checked):
    """Everything a tree answers about the contexts of its texts, as one comparable value."""
    tree = checked.tree
    contexts = checked.oracle.table()
    return {
        "sizes": (tree.num_tokens, tree.num_nodes, tree.num_edges, tree.num_open_sequences),
        "contexts": {context: (tree.counts(context), tree.top_child(context)) for context in [(), *contexts]},
        "children": {
            (context, token): tree.child_counts(context, token) for context in contexts for token in contexts[context]
        },
        "continuations": {name: tree.continuations(sequence) for name, sequence in checked.sequences.items()},
    }


def replay(calls, *, max_order):
    """Make the calls of `strategies.call_lists` on a new tree, and return it."""
    checked = CheckedTree(max_order=max_order)
    prompts, sequences = [0], []
    for method, *arguments in calls:
        if method == "add_prompt":
            prompts.append(checked.add_prompt(*arguments))
        elif method == "add":
            checked.add(arguments[0], prompt=prompts[arguments[1]])
        elif method == "open":
            sequences.append(checked.open(prompt=prompts[arguments[0]]))
        else:
            getattr(checked, method)(sequences[arguments[0]], *arguments[1:])
    return checked
