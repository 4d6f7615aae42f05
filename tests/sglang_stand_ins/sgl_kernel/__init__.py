"""The operations of sglang-kernel that speculative decoding on a CPU calls, in torch; others raise."""

import ctypes

import torch

from sgl_kernel import murmur_hash  # noqa: F401  registers its operator
from sgl_kernel._absent import absent

__version__ = "0.4.10"
__getattr__ = absent(__name__)


def assign_extend_cache_locs_cpu(req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, pool_len):
    """Collect the cache slots start..end of each request's row, one request after the other."""
    position = 0
    for row, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        out_cache_loc[position : position + end - start] = req_to_token[row, start:end]
        position += end - start


def assign_req_to_token_pool_cpu(req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, pool_len):
    """The other way round: write the slots into each request's row."""
    position = 0
    for row, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        req_to_token[row, start:end] = out_cache_loc[position : position + end - start].to(req_to_token.dtype)
        position += end - start


def verify_tree_greedy_cpu(
    predicts,
    accept_index,
    accept_token_num,
    candidates,
    retrive_index,  # sic, as in the package
    retrive_next_token,
    retrive_next_sibling,
    target_predict,
):
    """Walk each tree from its root along the children that hold what the target predicts."""
    tables = (candidates, retrive_index, retrive_next_token, retrive_next_sibling, target_predict)
    for row, (tokens, places, children, siblings, predicted) in enumerate(
        zip(*(table.tolist() for table in tables), strict=True)
    ):
        node, accepted = 0, [places[0]]
        while len(accepted) < accept_index.shape[1]:
            child = children[node]
            while child != -1 and tokens[child] != predicted[node]:
                child = siblings[child]
            if child == -1:
                break
            predicts[places[node]] = predicted[node]
            node = child
            accepted.append(places[node])
        predicts[places[node]] = predicted[node]
        accept_index[row, : len(accepted)] = torch.tensor(accepted, dtype=accept_index.dtype)
        accept_token_num[row] = len(accepted) - 1


def copy_all_layer_kv_cache_cpu(data_ptrs, strides, target, source):
    """Copy cache slots in every layer: all are read before the first is written."""
    sources, targets = source.tolist(), target.tolist()
    for base, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        slots = [ctypes.string_at(base + slot * stride, stride) for slot in sources]
        for slot, content in zip(targets, slots, strict=True):
            ctypes.memmove(base + slot * stride, content, stride)


def fill_accept_out_cache_loc_cpu(accept_index, out_cache_loc, accept_out_cache_loc):
    """Collect the slots of the accepted tokens."""
    accepted = accept_index.reshape(-1)
    accepted = accepted[accepted > -1].long()
    accept_out_cache_loc[: accepted.numel()] = out_cache_loc[accepted].to(accept_out_cache_loc.dtype)
