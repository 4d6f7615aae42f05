"""The directory of a saved state: which files it consists of, how they are replaced, and who may write.

    state.das               which segments make up the state, and what confidence and policy have learned
    rollouts-00000001.das   segments: see das.rollout_segment; all files: see das.checked_file
    lock                    held by whoever writes; holds the writer's process id

A save writes what changed since the last one as a new segment, then replaces `state.das`, which makes it valid: a crash
leaves the state before, or the new one. Each of the two is synced, then renamed, then its directory synced. Segments
never change. Files that `state.das` does not name are remains of a crash, and the next save removes them. When more
than half of the tokens on disk are of rollouts that are gone, or there are 64 segments, a save writes everything anew
into one segment. Readers take no lock: where a segment went away meanwhile, they begin again.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from das.checked_file import Array, CheckedFile, FileIdentity, StateError, write_checked_file
from das.file_errors import naming_file
from das.prompt_record import PromptWindow
from das.rollout import TokenArray
from das.rollout_segment import Place, Segment, SegmentWriter

HEAD_NAME = "state.das"
HISTORY_SETTINGS = ("window_epochs", "max_bytes", "max_common_tokens")
_KIND = "state"
_LOCK_NAME = "lock"
_SEGMENT_NAME = "rollouts-{:08d}.das"
_OURS = re.compile(r"(rollouts-\d{8}|state)\.das(\.tmp)?")
_COUNTS = ("num_prompts", "num_rollouts", "num_tokens", "num_live_tokens")
_MAX_SEGMENTS = 64
_MIN_LIVE_SHARE = 0.5  # of the tokens on disk
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveSummary:
    """What a save has done.

    Args:
        num_prompts, num_rollouts, num_tokens: of responses, in the state.
        num_bytes: the state has on disk.
        num_written_bytes: by this save.
        num_segments: of the state; 1 where all was written anew.
    """

    num_prompts: int
    num_rollouts: int
    num_tokens: int
    num_bytes: int
    num_written_bytes: int
    num_segments: int


@dataclass(frozen=True, slots=True)
class StoredSegment:
    """A segment of a state.

    Args:
        number: of the segment.
        num_tokens: of its texts.
        identity: of its file.
    """

    number: int
    num_tokens: int
    identity: FileIdentity


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What `state.das` says.

    Args:
        save_id: of the save that wrote it.
        segments: that make up the state, in order.
        num_prompts, num_rollouts, num_tokens: as in SaveSummary.
        num_live_tokens: of texts that are of use.
        history_settings: as in SavedState.
        learned: confidence, policy and policy_name, with names instead of `arrays`.
    """

    save_id: str
    segments: tuple[StoredSegment, ...]
    num_prompts: int
    num_rollouts: int
    num_tokens: int
    num_live_tokens: int
    history_settings: dict[str, int]
    learned: Any
    arrays: dict[str, Array]

    @classmethod
    def read(cls, directory: Path) -> Head:
        """Read it. Raises OSError, StateError."""
        with CheckedFile(directory / HEAD_NAME, kind=_KIND) as file:
            values = file.values
            try:
                return cls(
                    save_id=_of_type(values["save_id"], str),
                    segments=tuple(
                        StoredSegment(_count(number), _count(num_tokens), FileIdentity(_count(size), _count(checksum)))
                        for number, num_tokens, size, checksum in values["segments"]
                    ),
                    **{name: _count(values[name]) for name in _COUNTS},
                    history_settings={name: _count(values["history_settings"][name]) for name in HISTORY_SETTINGS},
                    learned=_of_type(values["learned"], dict),
                    arrays={name: file.any_array(name) for name in values["array_names"]},
                )
            except (KeyError, TypeError, ValueError) as error:
                if isinstance(error, StateError):
                    raise
                raise StateError(file.path, f"it makes no sense: {type(error).__name__}: {error}") from error

    @property
    def next_number(self) -> int:
        """The number of the next segment."""
        return max([segment.number for segment in self.segments], default=0) + 1

    @property
    def is_wasteful(self) -> bool:
        """Whether the next save shall write everything anew."""
        num_stored = sum([segment.num_tokens for segment in self.segments])
        return len(self.segments) >= _MAX_SEGMENTS or self.num_live_tokens < _MIN_LIVE_SHARE * num_stored

    def write(self, directory: Path, writer: SegmentWriter) -> SaveSummary:
        """Write what the writer collected, make it part of the state, and the state valid; remove all other files."""
        segments, num_written = self.segments, 0
        if not writer.is_empty:
            identity = writer.write(directory / _SEGMENT_NAME.format(writer.number))
            segments = (*segments, StoredSegment(writer.number, writer.num_tokens, identity))
            num_written = identity.num_bytes
        values = {
            "save_id": self.save_id,
            "segments": [[s.number, s.num_tokens, s.identity.num_bytes, s.identity.checksum] for s in segments],
            **{name: getattr(self, name) for name in (*_COUNTS, "history_settings", "learned")},
            "array_names": list(self.arrays),
        }
        written = write_checked_file(directory / HEAD_NAME, kind=_KIND, values=values, arrays=self.arrays)
        names = {HEAD_NAME, *(_SEGMENT_NAME.format(segment.number) for segment in segments)}
        _remove_others(directory, names)
        return SaveSummary(
            num_prompts=self.num_prompts,
            num_rollouts=self.num_rollouts,
            num_tokens=self.num_tokens,
            num_bytes=sum([segment.identity.num_bytes for segment in segments]) + written.num_bytes,
            num_written_bytes=num_written + written.num_bytes,
            num_segments=len(segments),
        )

    def open_segments(self, directory: Path, *, with_texts: bool, mapped: bool = True) -> list[Segment]:
        """Read the segments; `with_texts` and `mapped` as of Segment. Raises OSError, StateError."""
        found = []
        for stored in self.segments:
            path = directory / _SEGMENT_NAME.format(stored.number)
            segment = Segment(path, stored.number, with_texts=with_texts, mapped=mapped)
            if segment.identity != stored.identity:
                raise StateError(path, f"it is not the file that {HEAD_NAME} names: size or checksum differ")
            found.append(segment)
        return found


@dataclass(frozen=True, slots=True)
class Entry:
    """Where the window of a prompt is: in which segment, and which of its prompts."""

    segment: Segment
    position: int

    def places(self) -> dict[int, Place]:
        """Return the texts of the window, by hash."""
        return self.segment.places(self.position)


def entries_of(segments: Iterable[Segment]) -> dict[int, Entry]:
    """Return where the window of each prompt is, by key: the last segment that names it counts."""
    found: dict[int, Entry] = {}
    for segment in segments:
        pairs = zip(segment.prompt_keys.tolist(), segment.num_rollouts.tolist(), strict=True)
        for position, (key, num_rollouts) in enumerate(pairs):
            found.pop(key, None)  # so that it comes last
            if num_rollouts:
                found[key] = Entry(segment, position)
    return found


def windows_of(segments: list[Segment]) -> Iterator[PromptWindow]:
    """Return the windows of a state, whose segments hold their texts. Raises as `Segment.text`."""
    by_number = {segment.number: segment for segment in segments}

    def text_of(place: Place) -> TokenArray:
        return by_number[place.segment].text(place)

    return (entry.segment.window(entry.position, text_of) for entry in entries_of(segments).values())


def read_state(directory: Path, *, mapped: bool) -> tuple[Head, list[Segment]]:
    """Read a whole state, while others may be writing to the directory."""
    head = Head.read(directory)
    while True:
        try:
            segments = head.open_segments(directory, with_texts=True, mapped=mapped)
            break
        except (FileNotFoundError, StateError) as error:
            newer = Head.read(directory)
            if newer.save_id == head.save_id:
                if isinstance(error, StateError):
                    raise
                raise StateError(Path(error.filename), f"it is missing, though {HEAD_NAME} names it") from error
            head = newer  # a save has replaced the segments meanwhile
    num_tokens_of = {segment.number: segment.num_tokens for segment in segments}
    for segment in segments:
        segment.check_places(num_tokens_of)
    return head, segments


@contextmanager
def writing(directory: Path) -> Iterator[None]:
    """Hold the directory's lock. It goes with the process, however that ends."""
    lock = os.open(directory / _LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            writer = os.pread(lock, 20, 0).decode(errors="replace") or "another"
            raise StateError(directory, f"process {writer} is writing to it; only one can at a time") from None
        with naming_file(directory / _LOCK_NAME):
            os.ftruncate(lock, 0)
            os.pwrite(lock, str(os.getpid()).encode(), 0)
        yield
        fcntl.flock(lock, fcntl.LOCK_UN)  # also for a process forked meanwhile, which has it open as well
    finally:
        os.close(lock)


def _remove_others(directory: Path, names: set[str]) -> None:
    """Remove files of this format that the state does not consist of. A failure does no harm: the next save tries."""
    for entry in directory.iterdir():
        if _OURS.fullmatch(entry.name) and entry.name not in names:
            with suppress(OSError):
                entry.unlink()


def _of_type(value: Any, kind: type[_T]) -> _T:
    if not isinstance(value, kind):
        raise TypeError(f"{value!r} is no {kind.__name__}")
    return value


def _count(value: Any) -> int:
    count = _of_type(value, int)
    if isinstance(value, bool) or not 0 <= count < 1 << 63:
        raise ValueError(f"{value!r} is no count")
    return count
