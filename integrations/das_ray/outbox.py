"""What waits to be published: put in by the decode thread in no time, taken out by the exchange's thread."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from das.rollout import Rollout
from das_ray.messages import Piece, shard_of

_OVERHEAD_BYTES = 200  # of a rollout in a message, beside its tokens


@dataclass(slots=True)
class Parcel:
    """What goes to one shard in one publish."""

    rollouts: list[Rollout] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    num_bytes: int = 0
    oldest_s: float = 0.0  # when the oldest rollout was put in


class Outbox:
    """A queue of bounded size. Whoever puts something in never waits.

    Where it is full, the rollouts that have waited longest are dropped, and counted: they are not shared, and stay in
    the history of the worker that made them. Of newer ones others have more use. Pieces are asked for only while less
    than half of the queue is used: what is not taken now comes with the next piece.

    Args:
        max_bytes: of the rollouts in it.
    """

    def __init__(self, *, max_bytes: int) -> None:
        self.counts: Counter[str] = Counter()
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._rollouts: deque[tuple[Rollout, int, float]] = deque()
        self._pieces: list[Piece] = []
        self._num_bytes = 0

    def put(self, rollout: Rollout) -> None:
        """Queue a finished rollout. O(1)."""
        num_bytes = rollout.response_token_ids.nbytes + rollout.prompt_token_ids.nbytes + _OVERHEAD_BYTES
        with self._lock:
            self._rollouts.append((rollout, num_bytes, time.monotonic()))
            self._num_bytes += num_bytes
            while self._num_bytes > self._max_bytes:
                _, dropped_bytes, _ = self._rollouts.popleft()
                self._num_bytes -= dropped_bytes
                self.counts.update(num_dropped_rollouts=1, num_dropped_bytes=dropped_bytes)

    def put_pieces(self, pieces: Iterable[Piece]) -> None:
        """Queue pieces of running rollouts, in order."""
        with self._lock:
            self._pieces += pieces

    def has_room_for_pieces(self) -> bool:
        """Whether pieces are welcome; counts where they are not."""
        with self._lock:
            has_room = self._num_bytes * 2 < self._max_bytes and not self._pieces
        self.counts["num_delayed_pieces"] += not has_room
        return has_room

    def take(self, *, num_shards: int, busy: set[int], max_bytes: int) -> dict[int, Parcel]:
        """Take out what goes to shards that are not busy, the oldest first, up to so many bytes a shard."""
        parcels: dict[int, Parcel] = {}
        with self._lock:
            waiting: deque[tuple[Rollout, int, float]] = deque()
            for rollout, num_bytes, put_s in self._rollouts:
                shard = shard_of(rollout.key, num_shards)
                parcel = parcels.setdefault(shard, Parcel(oldest_s=put_s)) if shard not in busy else None
                if parcel is None or (parcel.rollouts and parcel.num_bytes + num_bytes > max_bytes):
                    waiting.append((rollout, num_bytes, put_s))
                    continue
                parcel.rollouts.append(rollout)
                parcel.num_bytes += num_bytes
                self._num_bytes -= num_bytes
            self._rollouts = waiting
            pieces, self._pieces = self._pieces, []
            for piece in pieces:
                shard = shard_of(piece.rollout.key, num_shards)
                if shard in busy:
                    self._pieces.append(piece)
                else:
                    parcels.setdefault(shard, Parcel()).pieces.append(piece)
        return parcels

    def statistics(self) -> dict[str, int]:
        """Return what waits, and what was dropped or delayed."""
        with self._lock:
            waiting = {"num_queued_rollouts": len(self._rollouts), "num_queued_bytes": self._num_bytes}
        dropped = ("num_dropped_rollouts", "num_dropped_bytes", "num_delayed_pieces")
        return waiting | {name: self.counts[name] for name in dropped}
