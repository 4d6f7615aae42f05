"""Drafts as SGLang verifies them: a token and a row of ancestors for each of `width + 1` nodes of every request."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from das import Draft, DraftTree


def verify_arrays(
    drafts: Sequence[Draft | None], root_token_ids: Sequence[int], *, width: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Return the tokens to verify and their mask.

    Node 0 of a request is its last token, node 1 + j token j of its draft. Nodes beyond the draft are padding: they
    repeat the last token, see the context and themselves, and are no node's child, so nothing can accept them. (Padding
    that hangs on the root, as SGLang's own, makes siblings of one token, which its sampler then takes too often.)

    Args:
        drafts: one a request, of at most `width` tokens; None: none.
        root_token_ids: each request's last token.
        width: draft tokens a request.

    Returns:
        int64 [requests * (width + 1)], and bool [requests * (width + 1) ** 2], where row i of a request marks node i
        and its ancestors.

    Raises:
        ValueError: a draft longer than `width`.

    Complexity: O(requests * width ** 2), vectorised.
    """
    num_nodes = width + 1
    tokens = np.repeat(np.asarray(root_token_ids, np.int64), num_nodes).reshape(-1, num_nodes)
    lengths = np.zeros(len(drafts), np.int64)
    parents = np.full((len(drafts), num_nodes), -1, np.int64)
    is_tree = False
    for row, draft in enumerate(drafts):
        length = 0 if draft is None else len(draft)
        if draft is None or not length:
            continue
        if length > width:
            raise ValueError(f"drafts[{row}] has {length} tokens; it must have at most {width}")
        tokens[row, 1 : 1 + length] = draft.draft_token_ids
        lengths[row] = length
        if isinstance(draft, DraftTree):
            is_tree = True
            parents[row, 1 : 1 + length] = draft.parents
    mask = _tree_mask(parents, lengths) if is_tree else _chain_mask(lengths, num_nodes)
    return tokens.reshape(-1), mask.reshape(-1)


def _chain_mask(lengths: npt.NDArray[np.int64], num_nodes: int) -> npt.NDArray[np.bool_]:
    is_node = np.arange(num_nodes) <= lengths[:, None]
    chain = np.tri(num_nodes, dtype=np.bool_)
    return np.where(is_node[:, :, None], chain, np.eye(num_nodes, dtype=np.bool_))


def _tree_mask(parents: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    num_requests, num_nodes = parents.shape
    mask = np.zeros((num_requests, num_nodes, num_nodes), np.bool_)
    mask[:, range(num_nodes), range(num_nodes)] = True
    for node in range(1, num_nodes):
        rows = np.flatnonzero(lengths >= node)
        mask[rows, node] |= mask[rows, parents[rows, node] + 1]
    return mask
