"""One shard of the history service: a plain class, which das_ray.service makes an actor of. Bytes in, bytes out."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from das.checked_file import write_checked_bytes
from das.rollout import Rollout
from das_ray.delta import Delta
from das_ray.learned import Learned, merged
from das_ray.messages import (
    MAX_MESSAGE_BYTES,
    MessageError,
    Piece,
    check_worker,
    note_message,
    numbers_in,
    piece_name,
    read_note,
    read_pieces,
    shard_of,
)
from das_ray.running_texts import RunningTexts
from das_ray.shard_store import ShardStore

MAX_PROMPTS_OF_PULL = 1 << 16
MAX_LEARNED_WORKERS = 256  # those that told last; a worker that restarts has a new name
_MAX_DELTA_BYTES = MAX_MESSAGE_BYTES // 4  # of token ids in one answer, a prompt's share whole
_MAX_DELTA_ROLLOUTS = 1 << 14


class HistoryShard:
    """The history of the prompts of one shard, and what their running requests have generated.

    Args:
        directory: of the shard; see das_ray.shard_store.
        index, num_shards: which shard of how many.
        window_epochs, max_bytes: as of ShardStore.

    Raises:
        as ShardStore.
    """

    def __init__(self, directory: str, index: int, num_shards: int, window_epochs: int, max_bytes: int) -> None:
        self._place = {"index": index, "num_shards": num_shards}
        self._settings = {"window_epochs": window_epochs, "max_bytes": max_bytes}
        self._store = ShardStore(
            Path(directory), index=index, num_shards=num_shards, window_epochs=window_epochs, max_bytes=max_bytes
        )
        self._running = RunningTexts()
        self._counts: Counter[str] = Counter()
        self._learned: dict[str, Learned] = {}  # by worker; who told last comes last
        for path in sorted(Path(directory).glob("learned-*.das"), key=lambda path: path.stat().st_mtime_ns):
            learned = Learned.from_bytes(path.read_bytes())
            self._learned[learned.worker] = learned

    def describe(self) -> bytes:
        """Return which shard this is, and of which service: "shard"."""
        return note_message("shard", {**self._place, **self._settings, "store_id": self._store.store_id})

    def publish(self, rollouts: bytes, pieces: bytes = b"") -> bytes:
        """Take in finished rollouts, which last once this returns, and pieces of running ones, which do not.

        Returns:
            "published": `resend`, names of running requests whose pieces have to come again from their first token.

        Raises:
            MessageError: a message that is none, or of other prompts than this shard's. OSError: the disk refuses.
            Nothing changes then.
        """
        read = read_pieces(pieces, "pieces") if pieces else []
        for piece in read:
            if shard_of(piece.rollout.key, self._place["num_shards"]) != self._place["index"]:
                raise MessageError(f"pieces: prompt {piece.rollout.key} belongs to another shard")
        worker, finished = self._store.publish(rollouts) if rollouts else ("", [])
        resend = [piece.name for piece in read if not self._running.add(piece)]
        self._running.forget([piece_name(worker, rollout) for rollout in finished])
        self._counts["num_publishes"] += 1
        self._counts["num_received_bytes"] += len(rollouts) + len(pieces)
        return note_message("published", {}, {"resend": np.array(resend, np.uint64)})

    def pull(self, request: bytes) -> bytes:
        """Return what is new: "delta".

        Args:
            request: "pull": `worker`, `store_id` (of the answer before); arrays `prompt_key`, `known_version` (of each,
                as the last answer said), `following` (names of running requests) and `following_length` (tokens known).

        Returns:
            `store_id`, `version`, `num_answered` (prompts of the request that are answered: ask again for the others);
            arrays `rollouts` and `pieces` (messages), and `gone` (those of `following` that run no more).

        Raises:
            MessageError: no such request.
        """
        note = read_note(request, "pull", "pull")
        worker = check_worker(note.values.get("worker"))
        keys = numbers_in(note, "prompt_key", "pull")
        if len(keys) > MAX_PROMPTS_OF_PULL:
            raise MessageError(f"pull: it asks for {len(keys)} prompts; {MAX_PROMPTS_OF_PULL} is the most")
        versions = numbers_in(note, "known_version", "pull", length=len(keys))
        names = numbers_in(note, "following", "pull")
        lengths = numbers_in(note, "following_length", "pull", length=len(names))
        if note.values.get("store_id") != self._store.store_id:  # what it knows, it knows of another store
            versions = [0] * len(keys)
        rollouts, pieces, num_answered = self._changes(keys, versions, dict(zip(names, lengths, strict=True)), worker)
        answer = Delta(
            store_id=self._store.store_id,
            version=self._store.version,
            num_answered=num_answered,
            rollouts=rollouts,
            pieces=pieces,
            gone=self._running.gone(names),
        ).to_bytes()
        self._counts["num_pulls"] += 1
        self._counts["num_sent_bytes"] += len(answer)
        return answer

    def put_learned(self, data: bytes) -> bytes:
        """Keep what a worker has learned, in place of what it had before; it lasts once this returns.

        Raises:
            MessageError: no such message. OSError: the disk refuses. Nothing changes then.
        """
        learned = Learned.from_bytes(data)
        write_checked_bytes(self._learned_path(learned.worker), data)
        self._learned.pop(learned.worker, None)
        self._learned[learned.worker] = learned
        while len(self._learned) > MAX_LEARNED_WORKERS:
            forgotten = next(iter(self._learned))
            self._learned_path(forgotten).unlink(missing_ok=True)
            del self._learned[forgotten]
        return note_message("published", {})

    def learned(self) -> bytes:
        """Return what all workers have learned together, "learned"; empty: nothing yet."""
        found = merged(self._learned.values())
        return found.to_bytes() if found is not None else b""

    def statistics(self) -> bytes:
        """Return counters and what is held: "statistics"."""
        store = self._store
        values: dict[str, Any] = {
            **self._place,
            "process": os.getpid(),
            "version": store.version,
            "num_prompts": store.num_prompts,
            "num_rollouts": store.num_rollouts,
            "held_bytes": store.held_bytes,
            "num_running": len(self._running),
            "num_running_tokens": self._running.num_tokens,
            "num_learned_workers": len(self._learned),
            **store.counts,
            **self._counts,
        }
        return note_message("statistics", values)

    def _learned_path(self, worker: str) -> Path:
        name = hashlib.blake2b(worker.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
        return self._store.directory / f"learned-{name}.das"

    def _changes(
        self, keys: list[int], versions: list[int], following: dict[int, int], worker: str
    ) -> tuple[list[Rollout], list[Piece], int]:
        rollouts: list[Rollout] = []
        pieces: list[Piece] = []
        num_bytes = num_answered = 0
        for key, version in zip(keys, versions, strict=True):
            if num_bytes > _MAX_DELTA_BYTES or len(rollouts) + len(pieces) > _MAX_DELTA_ROLLOUTS:
                break
            delta = self._store.changed_since(key, version, worker=worker)
            rollouts += delta.rollouts
            of_prompt = self._running.of_prompt(key, following, worker=worker)
            pieces += of_prompt
            num_bytes += delta.num_bytes + sum([piece.rollout.response_token_ids.nbytes for piece in of_prompt])
            num_answered += 1
        return rollouts, pieces, num_answered
