"""Where draft tokens were seen before: behind how long a context, and in whose text. Told to people only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from das._drafts import Draft
from das._suffix_tree import SuffixTree


@dataclass(frozen=True, slots=True)
class TokenOrigin:
    """The longest context behind which a draft token was seen before, and how often there.

    Args:
        order: tokens of that context, 1..16.
        num_running: in running text: the request's own and its siblings', and what ended since the tree was built.
        num_history: in rollouts of earlier epochs.
        is_common: seen in other prompts' text only; the two counts are of that text then.
    """

    order: int
    num_running: int
    num_history: int
    is_common: bool = False


def origins_of(
    draft: Draft, *, text: Sequence[int], trees: Sequence[tuple[SuffixTree, int]]
) -> list[TokenOrigin | None]:
    """Return the origin of each token of a draft.

    Args:
        draft: a chain or a tree of tokens.
        text: the tokens before it; the last 16 are enough.
        trees: the prompt's tree and the request's sequence in it, then those of the common text where it draws on that.

    Returns:
        an entry a token; None for one that no tree knows.

    Complexity: O(draft tokens squared), at most 17 tree steps each.
    """
    paths: list[list[int]] = []  # of draft tokens, to each of them
    origins = []
    for token, parent in zip(draft.draft_token_ids, draft.parents, strict=True):
        before = paths[parent] if parent >= 0 else []
        paths.append([*before, token])
        origin = None
        for number, (tree, sequence) in enumerate(trees):
            origin = _origin(tree, sequence, before, [*text, *before], token, is_common=number > 0)
            if origin is not None:
                break
        origins.append(origin)
    return origins


def _origin(
    tree: SuffixTree, sequence: int, before: list[int], text: list[int], token: int, *, is_common: bool
) -> TokenOrigin | None:
    """What one tree knows of a token: from the longest context with any continuation down."""
    for order in range(len(tree.continuations(sequence, before)), 0, -1):
        num_running, num_history = tree.child_counts(text[-order:], token)
        if num_running or num_history:
            return TokenOrigin(order, num_running, num_history, is_common)
    return None
