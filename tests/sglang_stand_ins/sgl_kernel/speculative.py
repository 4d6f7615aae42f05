"""The links of the verification trees, from their masks."""

import torch

from sgl_kernel._absent import absent

__getattr__ = absent(__name__)


def reconstruct_indices_from_tree_mask(
    tree_mask, verified_seq_len, positions, retrieve_index, next_token, next_sibling, batch_size, draft_token_num
):
    """Row i of a mask marks the ancestors of node i and itself; write depths, first children and next siblings."""
    order = torch.arange(draft_token_num)
    ancestors = tree_mask.reshape(batch_size, draft_token_num, draft_token_num).bool() & (order < order[:, None])
    positions.copy_((ancestors.sum(-1) + verified_seq_len.view(batch_size, 1)).reshape(-1))
    retrieve_index.copy_(torch.arange(batch_size * draft_token_num).view(batch_size, draft_token_num))
    parents = torch.where(ancestors.any(-1), (ancestors * order).argmax(-1), -1)
    next_token.fill_(-1)
    next_sibling.fill_(-1)
    for row, parents_of_row in enumerate(parents.tolist()):
        first_child = {}
        for node in reversed(range(draft_token_num)):
            next_token[row, node] = first_child.get(node, -1)
            if parents_of_row[node] >= 0:
                next_sibling[row, node] = first_child.get(parents_of_row[node], -1)
                first_child[parents_of_row[node]] = node
