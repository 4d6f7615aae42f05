"""From the first rank of a tensor-parallel group to all others, over torch.distributed: bytes, nothing pickled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def broadcast_in(group: Callable[[], Any]) -> Callable[[bytes], bytes]:
    """Return a function that all ranks of a group call at the same step: it returns what the first rank passed.

    Args:
        group: returns the ranks' process group for tensors on the host (gloo), once it is there.
    """

    def broadcast(message: bytes) -> bytes:
        import torch
        from torch import distributed

        ranks = group()
        source = distributed.get_global_rank(ranks, 0)
        length = torch.tensor([len(message)], dtype=torch.int64)
        distributed.broadcast(length, source, group=ranks)
        if not int(length):
            return b""
        if distributed.get_rank(ranks) == 0:
            content = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        else:
            content = torch.empty(int(length), dtype=torch.uint8)
        distributed.broadcast(content, source, group=ranks)
        return bytes(content.numpy())

    return broadcast
