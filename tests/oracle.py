"""The oracle: what a suffix tree answers, found by slicing stored token lists. Slow, and nothing here is clever.

An occurrence of a context counts when its next token is visible. `transitions` lists them;
the rest only adds up.
"""

from collections import defaultdict
from dataclasses import dataclass

RUNNING, HISTORY = 0, 1


@dataclass
class Text:
    token_ids: list[int]  # the tail of its prompt, then its own tokens
    num_prompt_tokens: int  # length of that tail: contexts may start in it, next tokens in it are not counted again
    kind: int  # RUNNING or HISTORY
    is_open: bool = False


class NaiveSuffixTree:
    """The methods of SuffixTree; every count is exact, also while sequences are open."""

    def __init__(self, *, max_order=16):
        self.max_order = max_order
        self.texts = []
        self.prompts = {0: []}
        self.sequences = {}

    @property
    def num_tokens(self):
        return sum(len(text.token_ids) - text.num_prompt_tokens for text in self.texts)

    @property
    def num_open_sequences(self):
        return len(self.sequences)

    def _new_text(self, token_ids, prompt, kind, is_open=False):
        tail = self.prompts[prompt][-self.max_order :]
        text = Text(tail + list(token_ids), len(tail), kind, is_open)
        self.texts.append(text)
        return text

    def add_prompt(self, token_ids):
        self._new_text(token_ids, 0, RUNNING)
        handle = len(self.prompts)
        self.prompts[handle] = list(token_ids)
        return handle

    def add(self, token_ids, *, prompt=0):
        self._new_text(token_ids, prompt, HISTORY)

    def open(self, *, prompt=0):
        sequence = len(self.texts)
        self.sequences[sequence] = self._new_text([], prompt, RUNNING, is_open=True)
        return sequence

    def extend(self, sequence, token_ids):
        self.sequences[sequence].token_ids.extend(token_ids)

    def close(self, sequence):
        self.sequences.pop(sequence).is_open = False

    def transitions(self):
        """Yield (context, next token, text, start of the context in the text) for every occurrence that counts."""
        for text in self.texts:
            for end in range(text.num_prompt_tokens, len(text.token_ids)):
                for start in range(max(0, end - self.max_order), end + 1):
                    yield tuple(text.token_ids[start:end]), text.token_ids[end], text, start

    def table(self, *, only_settled=False):
        """Return {context: {next token: (running, history)}}.

        `only_settled` leaves out what an open sequence may still hold back: occurrences that start within its last
        `max_order` tokens. So it is the lower bound of what a tree may report, and the full table the upper bound.
        """
        table = defaultdict(dict)
        for context, token, text, start in self.transitions():
            if only_settled and text.is_open and start >= len(text.token_ids) - self.max_order:
                continue
            running, history = table[context].get(token, (0, 0))
            table[context][token] = (running + (text.kind == RUNNING), history + (text.kind == HISTORY))
        return dict(table)

    def child_counts(self, context, token, *, only_settled=False):
        return self.table(only_settled=only_settled).get(tuple(context), {}).get(token, (0, 0))

    def counts(self, context, *, only_settled=False):
        return add_up(self.table(only_settled=only_settled).get(tuple(context), {}).values())

    def child_counts_bounds(self, context, token):
        return self.child_counts(context, token, only_settled=True), self.child_counts(context, token)

    def counts_bounds(self, context):
        return self.counts(context, only_settled=True), self.counts(context)

    def top_child(self, context):
        """The most frequent next token; of equals the latest. Holds for texts that were indexed one after another."""
        tokens = [token for other, token, _, _ in self.transitions() if other == tuple(context)]
        return max(reversed(tokens), key=tokens.count, default=None)

    def first_child(self, context):
        """What followed where the context was first seen, None at the end of a text. As for `top_child`."""
        for text in self.texts:
            tokens = text.token_ids
            for start in range(len(tokens) - len(context) + 1):
                if tuple(tokens[start : start + len(context)]) == tuple(context):
                    return tokens[start + len(context)] if start + len(context) < len(tokens) else None
        return None

    def last_contexts(self, sequence, draft_token_ids=()):
        """The contexts of order 1, 2, ... that end an open sequence followed by draft tokens."""
        token_ids = [*self.sequences[sequence].token_ids, *draft_token_ids]
        return [tuple(token_ids[-n:]) for n in range(1, min(self.max_order, len(token_ids)) + 1)]

    def continuations(self, sequence, draft_token_ids=()):
        return list_continuations(self, self.last_contexts(sequence, draft_token_ids))


def add_up(counts):
    """Sum pairs (running, history)."""
    counts = list(counts)
    return sum(running for running, _ in counts), sum(history for _, history in counts)


def list_continuations(tree, contexts):
    """What `continuations` must answer, by separate look-ups in the same tree."""
    answer = []
    for context in contexts:
        if tree.counts(context) == (0, 0):
            break
        answer.append((*tree.counts(context), tree.top_child(context)))
    return answer
