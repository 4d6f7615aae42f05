"""The hash behind SGLang's seeded sampling: MurmurHash3 of (seed, position, token), as 32-bit words."""

import torch

_MASK = 0xFFFFFFFF


def _mix(h, k):
    k = (k * 0xCC9E2D51) & _MASK
    k = ((k << 15) | (k >> 17)) & _MASK
    k = (k * 0x1B873593) & _MASK
    h = h ^ k
    h = ((h << 13) | (h >> 19)) & _MASK
    return (h * 5 + 0xE6546B64) & _MASK


def _hash(seed, positions, columns):
    seed, positions, columns = (values.to(torch.int64) for values in (seed, positions, columns))
    h = torch.zeros_like(seed)
    for word in (seed & _MASK, (seed >> 32) & _MASK, positions & _MASK):
        h = _mix(h, word)
    h = _mix(h[:, None], columns[None, :] & _MASK) ^ 16
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h = ((h ^ (h >> shift)) * factor) & _MASK
    return (h ^ (h >> 16)).to(torch.uint32)


@torch.library.custom_op("sgl_kernel::murmur_hash32_cpu", mutates_args=())
def murmur_hash32_cpu(seed: torch.Tensor, positions: torch.Tensor, col_indices: torch.Tensor) -> torch.Tensor:
    return _hash(seed, positions, col_indices)


@murmur_hash32_cpu.register_fake
def _(seed, positions, col_indices):
    return seed.new_empty((seed.shape[0], col_indices.shape[0]), dtype=torch.uint32)
