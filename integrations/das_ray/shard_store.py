"""What one shard keeps: the window of each of its prompts in memory, and on disk all that it ever acknowledged of it.

    shard.das                     which store this is
    snapshot-000000000000.das     all windows as they were after so many publishes; at most one counts, the newest
    published-000000000000.das    one publish, byte for byte as it came: see das_ray.messages
    lock                          held by the process whose store it is

A publish is checked whole, written (synced, renamed, its directory synced), then taken in, then acknowledged. A start
reads the newest snapshot and every publish after it, in order. When publishes have more bytes than the snapshot, all is
written anew as the next snapshot, and what came before is removed. Files never change; a crash leaves a publish or a
snapshot whole or not at all.
"""

from __future__ import annotations

import heapq
import os
import re
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from das.checked_file import CheckedFile, StateError, sync_directory, write_checked_bytes, write_checked_file
from das.prompt_record import PromptRecord
from das.rollout import Rollout
from das.rollout_segment import Segment, SegmentWriter
from das.state_directory import windows_of, writing
from das_ray.messages import MessageError, read_rollouts, shard_of

_HEAD_NAME, _KIND = "shard.das", "shard"
_NAMES = re.compile(r"(snapshot|published)-(\d{12})\.das")
_MIN_SNAPSHOT_BYTES = 16 << 20  # of publishes, before they are worth a snapshot
_MAX_PUBLISHES = 4096  # files that a start has to read one by one


@dataclass(frozen=True, slots=True)
class PromptDelta:
    """What is new of a prompt: the rollouts, and whether they are all there are."""

    prompt_key: int
    rollouts: tuple[Rollout, ...]
    num_bytes: int


class _Prompt:
    """A prompt's window, and by whom and with which publish each rollout came."""

    __slots__ = ("came", "newest", "noted_step", "record")

    def __init__(self, window_epochs: int) -> None:
        self.record = PromptRecord(window_epochs)
        self.came: dict[int, tuple[int, str]] = {}  # serial number -> (version, worker)
        self.newest = 0  # version
        self.noted_step = 1 << 62  # the lowest training step that the store's heap has of the prompt

    def forget_gone(self) -> None:
        """Of rollouts that left the window nothing is known any more."""
        self.came = {serial: self.came[serial] for serial, _ in self.record.window()}


class ShardStore:
    """The rollouts of a shard, durable.

    Args:
        directory: its own; made if it is not there.
        index, num_shards: which shard of how many; a publish of other shards' prompts is refused.
        window_epochs: epochs that each prompt keeps.
        max_bytes: limit for token ids and bookkeeping in memory. Beyond it, whole epochs go, the oldest training step
            first, whichever prompt it is of. On disk it is at most twice as much, and `_MIN_SNAPSHOT_BYTES`.

    Raises:
        StateError: a file is damaged or missing, is of another shard, or another process holds the directory.
        OSError: as the system says.
    """

    def __init__(self, directory: Path, *, index: int, num_shards: int, window_epochs: int, max_bytes: int) -> None:
        self.directory = directory
        self.version = 0  # publishes taken in so far
        self.held_bytes = 0
        self.counts: Counter[str] = Counter()
        self._index, self._num_shards = index, num_shards
        self._window_epochs, self._max_bytes = window_epochs, max_bytes
        self._prompts: dict[int, _Prompt] = {}
        self._oldest: list[tuple[int, int]] = []  # heap of (training step, prompt key), which may be outdated: too low
        self._snapshot_bytes = self._published_bytes = self._num_published = 0
        self._open = ExitStack()
        if not directory.exists():
            directory.mkdir(parents=True, exist_ok=True)
            sync_directory(directory.parent)
        self._open.enter_context(writing(directory))
        try:
            self.store_id = self._identify()
            self._read()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let go of the directory."""
        self._open.close()

    @property
    def num_prompts(self) -> int:
        """Prompts that have rollouts."""
        return len(self._prompts)

    @property
    def num_rollouts(self) -> int:
        """Rollouts in the windows. O(prompts)."""
        return sum([len(prompt.record) for prompt in self._prompts.values()])

    def publish(self, data: bytes) -> tuple[str, list[Rollout]]:
        """Take in a message of rollouts; once this returns they last. Those that are known are not counted twice.

        Returns:
            worker and rollouts of the message.

        Raises:
            MessageError: no such message, or a prompt of another shard. OSError: it cannot be written. Nothing changes
            then.

        Complexity: O(bytes of the message); now and then all there is, for a snapshot.
        """
        worker, rollouts = read_rollouts(data, "publish")
        for key in {rollout.key for rollout in rollouts}:
            if shard_of(key, self._num_shards) != self._index:
                raise MessageError(f"publish: prompt {key} belongs to another shard than {self._index}")
        if rollouts:
            write_checked_bytes(self._published(self.version + 1), data)
            self.version += 1
            self._published_bytes += len(data)
            self._num_published += 1
            self._take_in(rollouts, worker)
            if self._published_bytes > max(_MIN_SNAPSHOT_BYTES, self._snapshot_bytes) or (
                self._num_published >= _MAX_PUBLISHES
            ):
                self.compact()
        return worker, rollouts

    def changed_since(self, prompt_key: int, version: int, *, worker: str) -> PromptDelta:
        """Return the rollouts of a prompt that came with later publishes than this, of others than this worker."""
        prompt = self._prompts.get(prompt_key)
        if prompt is None or prompt.newest <= version:
            return PromptDelta(prompt_key, (), 0)
        found = []
        for serial, rollout in prompt.record.window():
            came, origin = prompt.came[serial]
            if came > version and origin != worker:
                found.append(rollout)
        num_bytes = sum([rollout.response_token_ids.nbytes + rollout.prompt_token_ids.nbytes for rollout in found])
        return PromptDelta(prompt_key, tuple(found), num_bytes)

    def compact(self) -> None:
        """Write all windows as one snapshot and remove the files that it replaces."""
        writer = SegmentWriter(1)
        for key, prompt in self._prompts.items():
            writer.add(prompt.record.stored(key), {})
        identity = writer.write(self._snapshot(self.version), {"version": self.version})
        self._snapshot_bytes, self._published_bytes, self._num_published = identity.num_bytes, 0, 0
        self.counts["num_snapshots"] += 1
        self._remove_others()

    # ---------------------------------------------------------------- inside

    def _take_in(self, rollouts: Iterable[Rollout], worker: str) -> None:
        for rollout in rollouts:
            prompt = self._prompts.get(rollout.key)
            if prompt is None:
                prompt = self._prompts[rollout.key] = _Prompt(self._window_epochs)
            before = prompt.record.rollout_bytes
            outcome = prompt.record.add(rollout)
            self.held_bytes += prompt.record.rollout_bytes - before
            self.counts["num_known"] += outcome.is_update
            self.counts["num_late"] += outcome.is_late
            self.counts["num_expired"] += outcome.num_expired
            if outcome.serial is not None:
                self.counts["num_added"] += 1
                prompt.came[outcome.serial] = (self.version, worker)
                prompt.newest = self.version
            if outcome.num_expired:
                prompt.forget_gone()
            if not len(prompt.record):
                del self._prompts[rollout.key]
            elif prompt.record.oldest_step() < prompt.noted_step:
                self._note_oldest(rollout.key, prompt)
        self._enforce_limit()

    def _note_oldest(self, key: int, prompt: _Prompt) -> None:
        prompt.noted_step = prompt.record.oldest_step()
        heapq.heappush(self._oldest, (prompt.noted_step, key))

    def _enforce_limit(self) -> None:
        while self.held_bytes > self._max_bytes and self._oldest:
            step, key = heapq.heappop(self._oldest)
            prompt = self._prompts.get(key)
            if prompt is None:
                continue
            if prompt.record.oldest_step() > step:  # that epoch has left the window
                self._note_oldest(key, prompt)
                continue
            before = prompt.record.rollout_bytes
            self.counts["num_evicted"] += prompt.record.drop_oldest_epoch()
            self.held_bytes += prompt.record.rollout_bytes - before
            if len(prompt.record):
                prompt.forget_gone()
                self._note_oldest(key, prompt)
            else:
                del self._prompts[key]

    def _identify(self) -> str:
        path = self.directory / _HEAD_NAME
        if not path.exists():
            if self._numbers("snapshot") or self._numbers("published"):
                raise StateError(path, "it is missing, though the directory holds rollouts of a shard")
            values = {"store_id": os.urandom(16).hex(), "index": self._index, "num_shards": self._num_shards}
            write_checked_file(path, kind=_KIND, values=values, arrays={})
        with CheckedFile(path, kind=_KIND) as file:
            values = file.values
        if not isinstance(values, dict) or not isinstance(values.get("store_id"), str):
            raise StateError(path, "it makes no sense")
        place = values.get("index"), values.get("num_shards")
        if place != (self._index, self._num_shards):
            problem = f"it is shard {place[0]} of {place[1]}, not {self._index} of {self._num_shards}"
            raise StateError(path, f"{problem}: start the service with as many shards as before, or a new directory")
        return str(values["store_id"])

    def _read(self) -> None:
        snapshots = self._numbers("snapshot")
        if snapshots:
            self.version = snapshots[-1]
            segment = Segment(self._snapshot(self.version), 1, with_texts=True, mapped=False)
            segment.check_places({1: segment.num_tokens})
            self._snapshot_bytes = segment.identity.num_bytes
            for window in windows_of([segment]):
                self._take_in(window.rollouts, "")
        self.counts.clear()
        for number in self._numbers("published"):
            if number <= self.version:
                continue  # part of the snapshot
            path = self._published(number)
            if number != self.version + 1:
                raise StateError(self._published(self.version + 1), f"it is missing, though {path.name} is there")
            try:
                worker, rollouts = read_rollouts(path.read_bytes(), str(path))
            except MessageError as error:
                raise StateError(path, str(error).removeprefix(f"{path}: ")) from None
            self.version = number
            self._published_bytes += path.stat().st_size
            self._num_published += 1
            self._take_in(rollouts, worker)
        self._remove_others()

    def _remove_others(self) -> None:
        """Remove what the newest snapshot replaces, and remains of a crash. A failure does no harm."""
        newest = max(self._numbers("snapshot"), default=0)
        for entry in self.directory.iterdir():
            named = _NAMES.fullmatch(entry.name)
            number = int(named[2]) if named else 0
            is_old = named and (number < newest or (number == newest and named[1] == "published"))
            if is_old or entry.name.endswith(".das.tmp"):
                with suppress(OSError):
                    entry.unlink()

    def _numbers(self, kind: str) -> list[int]:
        names = [_NAMES.fullmatch(entry.name) for entry in self.directory.iterdir()]
        return sorted([int(name[2]) for name in names if name and name[1] == kind])

    def _snapshot(self, number: int) -> Path:
        return self.directory / f"snapshot-{number:012d}.das"

    def _published(self, number: int) -> Path:
        return self.directory / f"published-{number:012d}.das"
