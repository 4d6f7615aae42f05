"""What a shard answered, as it is taken in: the same bytes on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from das.rollout import Rollout
from das_ray.messages import (
    MessageError,
    Piece,
    bytes_array,
    bytes_in,
    count_in,
    note_message,
    numbers_in,
    pieces_message,
    read_note,
    read_pieces,
    read_rollouts,
    rollouts_message,
)

_SENDER = "shard"


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new of some prompts.

    Args:
        store_id, version: of which shard's store, and after how many publishes.
        num_answered: prompts of the request that it answers.
        rollouts: finished ones of other workers.
        pieces: of running ones.
        gone: names of requests that run no more.
    """

    store_id: str
    version: int
    num_answered: int
    rollouts: list[Rollout]
    pieces: list[Piece]
    gone: list[int]

    @classmethod
    def from_bytes(cls, data: Any) -> Delta:
        """Read and check a "delta" message. Raises MessageError. O(bytes)."""
        note = read_note(data, "delta", "delta")
        store_id = note.values.get("store_id")
        if not isinstance(store_id, str):
            raise MessageError(f"delta: store_id is {store_id!r}; it must be a text")
        rollouts, pieces = (bytes_in(note, name, "delta") for name in ("rollouts", "pieces"))  # empty: there are none
        return cls(
            store_id=store_id,
            version=count_in(note, "version", "delta"),
            num_answered=count_in(note, "num_answered", "delta"),
            rollouts=read_rollouts(rollouts, "delta")[1] if rollouts else [],
            pieces=read_pieces(pieces, "delta") if pieces else [],
            gone=numbers_in(note, "gone", "delta"),
        )

    def to_bytes(self) -> bytes:
        """Return it as a message."""
        values = {"store_id": self.store_id, "version": self.version, "num_answered": self.num_answered}
        rollouts = rollouts_message(self.rollouts, worker=_SENDER) if self.rollouts else b""
        pieces = pieces_message(self.pieces, worker=_SENDER) if self.pieces else b""
        arrays = {
            "rollouts": bytes_array(rollouts),
            "pieces": bytes_array(pieces),
            "gone": np.array(self.gone, np.uint64),
        }
        return note_message("delta", values, arrays)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to take in."""
        return not (self.rollouts or self.pieces or self.gone)
