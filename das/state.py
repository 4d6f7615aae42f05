"""What das has learned, on disk, so that a restart goes on where the process stopped.

The files and their format: das.state_directory, das.rollout_segment, das.checked_file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from das.budget import BudgetPolicy
from das.checked_file import Array, StateError, sync_directory
from das.confidence import Confidence
from das.drafter import Drafter
from das.history import RolloutHistory
from das.packed_values import packed, unpacked
from das.prompt_record import PromptWindow
from das.rollout import Rollout
from das.rollout_segment import Place, Segment, SegmentWriter
from das.state_directory import (
    HEAD_NAME,
    HISTORY_SETTINGS,
    Head,
    SaveSummary,
    entries_of,
    read_state,
    windows_of,
    writing,
)

StatePath = str | os.PathLike[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedState:
    """A state that was read and checked.

    Args:
        directory: it was read from.
        save_id: of the save that wrote it.
        windows: of each prompt, what is stored; the prompt that changed longest ago first.
        history_settings: `window_epochs`, `max_bytes` and `max_common_tokens` of the history that was saved.
        confidence: `Confidence.state()`; None: none was saved.
        policy: the `state()` of a policy; None: none was saved.
        policy_name: the policy's class.
        greatest_token_id: of all tokens on disk; -1: there is none.
        num_bytes, num_segments: of the rollouts' files.
    """

    directory: Path
    save_id: str
    windows: tuple[PromptWindow, ...]
    history_settings: dict[str, int]
    confidence: dict[str, Any] | None
    policy: dict[str, Any] | None
    policy_name: str | None
    greatest_token_id: int
    num_bytes: int
    num_segments: int

    def rollouts(self) -> Iterator[Rollout]:
        """Return all rollouts, prompt by prompt, oldest epoch first."""
        return (rollout for window in self.windows for rollout in window.rollouts)

    def check_vocabulary(self, vocabulary_size: int) -> None:
        """Raise where a model does not have all tokens that are stored: drafted, they would stop its engine.

        Args:
            vocabulary_size: tokens that the model has, >= 1.

        Raises:
            ValueError: a stored token id is vocabulary_size or more; it names the directory and the id.
        """
        if self.greatest_token_id >= vocabulary_size:
            found = f"{self.directory}: it holds token {self.greatest_token_id}"
            raise ValueError(f"{found}; the model's vocabulary has {vocabulary_size}")

    def newest_step(self) -> int | None:
        """Return the newest training step of all rollouts; None: there is no rollout."""
        return max([window.rollouts[-1].training_step or 0 for window in self.windows], default=None)

    def restore(
        self,
        *,
        history: RolloutHistory | None = None,
        drafter: Drafter | None = None,
        policy: BudgetPolicy | None = None,
    ) -> None:
        """Take the state in; arguments, errors and what changes then as of `load_state`."""
        if history is not None or drafter is not None:
            history = _history_of(history, drafter)
        for asked, found, what in ((drafter, self.confidence, "drafter's confidence"), (policy, self.policy, "policy")):
            if asked is not None and found is None:
                raise StateError(self.directory, f"it was saved without a {what}; leave that out to load the rest")
        with ExitStack() as locks:
            if history is not None:
                locks.enter_context(history.save_lock)
                locks.enter_context(history.lock)
            if policy is not None and self.policy is not None:
                try:
                    policy.load_state(self.policy)
                except Exception as error:
                    problem = f"its state of a {self.policy_name} does not fit {policy!r}: {error}"
                    raise StateError(self.directory, problem) from error
            if drafter is not None and self.confidence is not None:
                drafter.confidence.load_state(self.confidence)  # cannot fail: it was tried when the state was read
            if history is not None:
                history.restore(self.windows, saved_as=self.save_id)


def save_state(
    path: StatePath,
    *,
    history: RolloutHistory | None = None,
    drafter: Drafter | None = None,
    policy: BudgetPolicy | None = None,
) -> SaveSummary:
    """Save rollouts and what was learned, in place of what the directory holds.

    Where the directory holds the history's last save, or the state it was loaded from, only what changed since is
    written; prompts whose rollouts are all gone are forgotten there, too. Running requests are not saved.

    Args:
        path: a directory; made if it is not there.
        history: None: the drafter's.
        drafter: its confidence is saved, too. None: no confidence is.
        policy: its `state()` is saved, too. None: none is.

    Returns:
        how much is stored now.

    Raises:
        TypeError: another kind of argument, neither history nor drafter, or a policy's state that holds something else
        than dictionaries with text keys, lists, numbers, text, None and arrays of numbers. ValueError: the history is
        not the drafter's. OSError: as the system says. StateError: another process is writing to the directory.
        The directory holds the state before then; if only the very last sync failed, the new one.

    Complexity: O(prompts) and what changed, but now and then all (see the module). Another thread may call it while
    requests run: the history's lock is held while what changed is listed, 1 us a rollout, not while it is written.
    """
    history = _history_of(history, drafter)
    directory = Path(path)
    if not directory.exists():
        directory.mkdir(parents=True, exist_ok=True)
        sync_directory(directory.parent)
    with history.save_lock, writing(directory):
        try:
            summary, history.saved_as = _save(directory, history, drafter, policy)
        except BaseException:
            history.saved_as = None  # what was listed as saved is not
            raise
        return summary


def load_state(
    path: StatePath,
    *,
    history: RolloutHistory | None = None,
    drafter: Drafter | None = None,
    policy: BudgetPolicy | None = None,
    mapped: bool = True,
) -> SavedState:
    """Read a saved state, check all of it, and take it in.

    Args:
        path: the directory.
        history: takes the rollouts in; what it knows already is updated. Usually empty. None: the drafter's.
        drafter: its confidence is replaced. None: none is.
        policy: of the kind that was saved, with its own settings; what it learned is replaced. None: none is.
        mapped: token ids stay on disk until a tree is built from them. They count against the history's `max_bytes`
            nevertheless. False: they are read into memory, for processes that must not end where somebody cuts a file
            short, or the file system goes away: a mapped file does that (SIGBUS).

    Returns:
        what was read. With neither history, drafter nor policy, nothing else happens.

    Raises:
        FileNotFoundError: nothing was saved there. OSError: as the system says. StateError: a file is damaged, missing
        or newer than this das; there is no confidence or policy, though asked for; or the policy's state does not fit.
        TypeError: another kind of argument. ValueError: the history is not the drafter's. Nothing changes then.

    Complexity: O(bytes on disk), 5 us a rollout more. Memory for bookkeeping, and for tokens where not `mapped`.
    """
    if history is not None or drafter is not None:
        history = _history_of(history, drafter)
    directory = Path(path)
    head, segments = read_state(directory, mapped=mapped)
    saved = _saved_state(directory, head, segments)
    if history is not None or policy is not None:
        saved.restore(history=history, drafter=drafter, policy=policy)
    return saved


def compact_state(path: StatePath) -> SaveSummary:
    """Write a saved state anew as one segment, without what is of no use any more.

    A process that goes on saving to the directory writes everything once more then: it saves incrementally on top of
    its own last save only, and does the same as this by itself, when it pays.

    Args:
        path: the directory that `save_state` wrote; nobody else may write to it meanwhile.

    Returns:
        what was written.

    Raises:
        as `load_state` and `save_state`. The directory holds the state before then.

    Complexity: O(bytes).
    """
    directory = Path(path)
    head = Head.read(directory)  # before the lock file is made where there is no state
    with writing(directory):
        head, segments = read_state(directory, mapped=True)
        writer = SegmentWriter(head.next_number)
        num_live = sum([writer.add(window, {}) for window in windows_of(segments)])
        head = replace(head, save_id=os.urandom(16).hex(), segments=(), num_live_tokens=num_live)
        return head.write(directory, writer)


def _save(
    directory: Path, history: RolloutHistory, drafter: Drafter | None, policy: BudgetPolicy | None
) -> tuple[SaveSummary, str]:
    """Save; return what was done, and the name of the save."""
    before = Head.read(directory) if (directory / HEAD_NAME).exists() else None
    base = before if before is not None and before.save_id == history.saved_as and not before.is_wasteful else None
    segments = base.open_segments(directory, with_texts=False) if base is not None else []
    with history.lock:
        changed, prompt_keys = history.take_changed(base.save_id if base is not None else None)
        statistics = history.statistics()
        learned = {
            "confidence": None if drafter is None else drafter.confidence.state(),
            "policy": None if policy is None else policy.state(),
            "policy_name": None if policy is None else type(policy).__name__,
        }
    entries = entries_of(segments)
    writer = SegmentWriter(before.next_number if before is not None else 1)
    num_live_tokens = base.num_live_tokens if base is not None else 0
    for window in changed:
        known = entries[window.prompt_key].places() if window.prompt_key in entries else {}
        num_live_tokens += writer.add(window, known) - _num_tokens(known)
    for key in entries.keys() - prompt_keys:
        writer.add_forgotten(key)
        num_live_tokens -= _num_tokens(entries[key].places())
    arrays: dict[str, Array] = {}
    head = Head(
        save_id=os.urandom(16).hex(),
        segments=base.segments if base is not None else (),
        num_prompts=len(prompt_keys),
        num_rollouts=statistics.num_rollouts,
        num_tokens=statistics.num_tokens,
        num_live_tokens=num_live_tokens,
        history_settings={name: getattr(history, name) for name in HISTORY_SETTINGS},
        learned=packed(learned, "learned", arrays),
        arrays=arrays,
    )
    return head.write(directory, writer), head.save_id


def _saved_state(directory: Path, head: Head, segments: list[Segment]) -> SavedState:
    try:
        learned = unpacked(head.learned, head.arrays)
        if learned["confidence"] is not None:
            Confidence().load_state(learned["confidence"])
    except (KeyError, TypeError, ValueError) as error:
        raise StateError(directory / HEAD_NAME, f"what was learned makes no sense: {error}") from error
    return SavedState(
        directory=directory,
        save_id=head.save_id,
        windows=tuple(windows_of(segments)),
        history_settings=head.history_settings,
        confidence=learned["confidence"],
        policy=learned["policy"],
        policy_name=learned["policy_name"],
        greatest_token_id=max([segment.greatest_token_id for segment in segments], default=-1),
        num_bytes=sum([segment.identity.num_bytes for segment in segments]),
        num_segments=len(segments),
    )


def _history_of(history: RolloutHistory | None, drafter: Drafter | None) -> RolloutHistory:
    if drafter is not None and not isinstance(drafter, Drafter):
        raise TypeError(f"drafter must be a Drafter or None, not {type(drafter).__name__}")
    if history is None:
        if drafter is None:
            raise TypeError("neither history nor drafter is given; there is nothing to save")
        return drafter.history
    if not isinstance(history, RolloutHistory):
        raise TypeError(f"history must be a RolloutHistory or None, not {type(history).__name__}")
    if drafter is not None and drafter.history is not history:
        raise ValueError("history is not the drafter's; pass the drafter alone, or the history alone")
    return history


def _num_tokens(places: Mapping[int, Place]) -> int:
    return sum([place.length for place in set(places.values())])
