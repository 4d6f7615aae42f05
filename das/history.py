"""The recent rollouts of each prompt, in memory, and the suffix trees built from them."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import NoReturn, Protocol

from das._huge_pages import return_free_memory
from das.checked_values import check_int, checked_number
from das.common_text import CommonText
from das.history_statistics import HistoryStatistics
from das.metrics import AcceptanceCounters
from das.prompt_record import PromptRecord, PromptWindow
from das.prompt_tree import PromptTree
from das.rollout import Rollout

TREE_BYTES_PER_TOKEN = 80  # for the sake of `max_bytes`, before a tree is built; 65 is usual, 72 with running text
_MIN_RETURNED_BYTES = 4 << 20  # evicted before the C library is asked to give pages back: it searches all it has
_NUM_FINISHED_KEPT = 1 << 16  # rollouts that a policy which looks seldom still hears of
_NOT_GENERATED_HERE = AcceptanceCounters()
_HISTORIES: weakref.WeakSet[RolloutHistory] = weakref.WeakSet()


class Closeable(Protocol):
    """A drafter, as far as a history knows it."""

    def close(self) -> None: ...


class RolloutHistory:
    """The rollouts of the last epochs of each prompt; their trees are built when needed and dropped when not.

    An epoch of a prompt is one training step at which it was sampled; the last `window_epochs` of them stay. A rollout
    is known by its request_id or else by prompt, response, training step and ordinal: adding a known one updates its
    reward and step and never counts it twice. One whose id is known, with another response, is another rollout. What an
    engine generated and named, and a trainer adds under an ordinal, is one rollout, whoever comes first. Beyond
    `max_bytes`, the prompts used least recently lose their tree first, then their rollouts; prompts with open requests
    keep both.

    Args:
        window_epochs: >= 1.
        max_bytes: limit for token ids, bookkeeping and trees together, > 0.
        num_threads: background threads that `prepare` uses, >= 1.
        max_common_tokens: where a prompt has no history yet, or histories explain nothing of what is emitted now (the
            policy was replaced), its requests also draw on what those of other such prompts emit, from a tree of their
            own that begins anew after so many tokens. 0: they do not.

    Raises:
        TypeError, ValueError: an argument is not an int, or out of range.

    Thread safety: one lock, taken by every method and by the drafters that use this history.
    """

    def __init__(
        self,
        *,
        window_epochs: int = 4,
        max_bytes: int = 8 << 30,
        num_threads: int = 1,
        max_common_tokens: int = 1 << 20,
    ) -> None:
        check_int(max_common_tokens, "max_common_tokens", below=1 << 62)
        for name, value in (("window_epochs", window_epochs), ("max_bytes", max_bytes), ("num_threads", num_threads)):
            check_int(value, name, below=1 << 62)
            if value == 0:
                raise ValueError(f"{name} is 0; it must be at least 1")
        self.window_epochs = window_epochs
        self.max_bytes = max_bytes
        self.lock = threading.RLock()
        self.save_lock = threading.Lock()  # one save or load at a time; taken before `lock`
        self.saved_as: str | None = None  # the save that `is_saved` of the records speaks of
        self._num_threads = num_threads
        self._builders: ThreadPoolExecutor | None = None
        self._prompts: OrderedDict[int, PromptRecord] = OrderedDict()  # least recently used first
        self._with_tree: OrderedDict[int, None] = OrderedDict()  # the same order, only those whose tree is in memory
        # prompt key -> (version of its record, tree to come, bytes it is expected to take)
        self._builds: dict[int, tuple[int, Future[PromptTree], int]] = {}
        self.max_common_tokens = max_common_tokens
        self._common = CommonText(max_common_tokens)
        self._counts: Counter[str] = Counter()  # by field of HistoryStatistics
        self._finished: deque[tuple[int, ...]] = deque(maxlen=_NUM_FINISHED_KEPT)
        self._dropped: deque[Closeable] = deque()  # drafters whose requests are still open
        self._listeners: list[Callable[[Rollout], None]] = []
        self._evicted_bytes = 0  # of rollouts, which the C library may still have
        _HISTORIES.add(self)

    def add(self, rollout: Rollout) -> bool:
        """Take in a finished rollout.

        Args:
            rollout: where its training step is None, it joins the prompt's newest epoch.

        Returns:
            True if it was new; False if it was known (then reward and step are updated) or too late for the window.

        Raises:
            TypeError: not a Rollout.

        Complexity: O(1) beside equal responses, what leaves the window, and epochs whose step turns out to be another.
        Trees see it at the next `start`.
        """
        if not isinstance(rollout, Rollout):
            raise TypeError(f"rollout must be a Rollout, not {type(rollout).__name__}")
        with self.lock:
            self.close_dropped()
            return self._add(rollout) is not None

    def add_many(self, rollouts: Iterable[Rollout]) -> int:
        """Take in finished rollouts and return how many were new. Raises and complexity: as `add`, for each."""
        return sum([self.add(rollout) for rollout in rollouts])

    def rollouts(self, prompt_key: int) -> tuple[Rollout, ...]:
        """Return the window's rollouts of a prompt, oldest epoch first; empty for an unknown prompt. O(rollouts)."""
        with self.lock:
            self.close_dropped()
            record = self._prompts.get(prompt_key)
            return tuple(rollout for _, rollout in record.window()) if record else ()

    def prompt_keys(self) -> tuple[int, ...]:
        """Return the keys of the prompts that are known, least recently used first. O(prompts)."""
        with self.lock:
            self.close_dropped()
            return tuple(self._prompts)

    def prepare(self, prompt_keys: Iterable[int]) -> None:
        """Build these prompts' trees in the background, so that their next `start` finds them ready.

        A tree is installed by the `start` of a request, which waits for it: what a draft sees never depends on how fast
        the background was. Skipped: unknown prompts, trees that are up to date, and prompts whose trees would not fit
        into `max_bytes` beside what is held and what was ordered before.

        Raises:
            TypeError: text, or nothing to iterate over; a key that is no int. ValueError: a key out of range. Nothing
            changes then.

        Complexity: O(rollouts) here, O(tokens) in a background thread.
        """
        if isinstance(prompt_keys, (str, bytes)) or not isinstance(prompt_keys, Iterable):
            raise TypeError(f"prompt_keys must be an iterable of ints, not {type(prompt_keys).__name__}")
        prompt_keys = list(prompt_keys)
        for position, key in enumerate(prompt_keys):
            check_int(key, f"prompt_keys[{position}]", below=1 << 64)
        with self.lock:
            for key in prompt_keys:
                record = self._prompts.get(key)
                if record is None or not record.needs_build() or self._pending_build(key, record):
                    continue
                ordered_bytes = sum(expected_bytes for _, _, expected_bytes in self._builds.values())
                expected_bytes = record.num_tokens * TREE_BYTES_PER_TOKEN
                if self._held_bytes() + ordered_bytes + expected_bytes > self.max_bytes:
                    break
                if self._builders is None:
                    self._builders = ThreadPoolExecutor(self._num_threads, thread_name_prefix="das-prepare")
                build = self._builders.submit(PromptTree, record.window())
                self._builds[key] = (record.version, build, expected_bytes)

    def subscribe(self, listener: Callable[[Rollout], None]) -> None:
        """Have each rollout told that is new or updated from now on, as it is stored; not those of a saved state.

        Args:
            listener: called with the lock held, in the thread of the change. It must be quick, must not raise and must
                not change the history.

        Raises:
            TypeError: not callable.
        """
        if not callable(listener):
            raise TypeError(f"listener must be callable, not {type(listener).__name__}")
        with self.lock:
            self._listeners.append(listener)

    def show(self, prompt_key: int) -> None:
        """Let running requests of a prompt draw on rollouts that were added since they started.

        Others see them when they start. Nothing happens where no request of the prompt runs.

        Complexity: O(tokens of those rollouts), in this thread.
        """
        with self.lock:
            self.close_dropped()
            record = self._prompts.get(prompt_key)
            if record is not None and record.open_requests and record.tree is not None:
                for serial, rollout in record.window():
                    record.tree.add(serial, rollout)
                self._measure(record)
                self._enforce_limit()

    def may_join(self, prompt_key: int, training_step: int) -> bool:
        """Return whether requests of the prompt run, and one of that step could start without a tree being built."""
        with self.lock:
            record = self._prompts.get(prompt_key)
            return record is not None and bool(record.open_requests) and not record.is_stale(training_step)

    def discard_builds(self) -> None:
        """Forget what `prepare` ordered; what has not begun is never built. Complexity: O(prompts ordered)."""
        with self.lock:
            for _, build, _ in self._builds.values():
                build.cancel()
            self._builds.clear()

    def maintain(self, *, max_us: float = 500.0) -> None:
        """Drop what background threads built in vain, because its prompt has changed since, until the time is used up.

        Args:
            max_us: microseconds, at least 0; infinity: all of it.

        Raises:
            TypeError: no number. ValueError: NaN, or below 0.

        Complexity: at most one beyond `max_us`. Never changes what a draft sees.
        """
        limit_us = checked_number(max_us, "max_us")
        if not limit_us >= 0:
            raise ValueError(f"max_us is {max_us}; it must be at least 0")
        end_s = time.perf_counter() + limit_us * 1e-6
        with self.lock:
            for key in list(self._builds):
                if time.perf_counter() >= end_s:
                    break
                record = self._prompts.get(key)
                if record is None or not self._pending_build(key, record):
                    self._builds.pop(key)[1].cancel()

    def statistics(self) -> HistoryStatistics:
        """Return what is held and what was done. Complexity: O(1)."""
        with self.lock:
            self.close_dropped()
            return HistoryStatistics(
                **self._counts,
                num_prompts=len(self._prompts),
                num_trees=len(self._with_tree),
                common_bytes=self._common.memory_bytes(),
            )

    def memory_bytes(self) -> int:
        """Return the bytes held by rollouts and trees, as counted against `max_bytes`. Complexity: O(1)."""
        with self.lock:
            self.close_dropped()
            return self._held_bytes()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a RolloutHistory cannot be pickled or copied: it has a lock, threads and native trees; das.save_state "
            "keeps what it knows on disk, or keep the rollouts and add_many them to a new RolloutHistory"
        )

    # ---------------------------------------------------------------- for the drafter, with the lock held

    def record_for(self, prompt_key: int) -> PromptRecord:
        """Return the prompt's record, made at first sight, as the most recently used."""
        record = self._prompts.get(prompt_key)
        if record is None:
            record = self._prompts[prompt_key] = PromptRecord(self.window_epochs)
        self._touch(prompt_key)
        return record

    def tree_for(self, prompt_key: int, training_step: int) -> PromptTree:
        """Return the prompt's tree with its whole window in it, for a request of that step that starts now.

        Builds it here unless `prepare` did; open requests move to the new tree.
        """
        record = self.record_for(prompt_key)
        if record.tree is None or record.is_stale(training_step):
            self._install(prompt_key, record)
        assert record.tree is not None  # _install sets it
        if len(record.tree.included) < len(record):  # a tree that is not stale holds nothing outside the window
            for serial, rollout in record.window():
                record.tree.add(serial, rollout)
        record.tree.running_step = max(training_step, record.tree.running_step or 0)
        self._measure(record)
        self._enforce_limit(keep=prompt_key)
        return record.tree

    def common_tree_for(self, record: PromptRecord, *, history_explains_nothing: bool) -> PromptTree | None:
        """Return the tree of other prompts' running text, for a request whose prompt has no history of use; else None.

        Args:
            history_explains_nothing: what prompts have is of no use.
        """
        return self._common.tree_for_start() if history_explains_nothing or len(record) == 0 else None

    def close_later(self, dropped: Closeable) -> None:
        """Close a drafter that nobody holds any more, once no change is under way. Needs no lock, and takes none."""
        self._dropped.append(dropped)

    def close_dropped(self) -> None:
        """Close the drafters that were dropped. To be called before anything else that a call does."""
        while self._dropped:
            self._dropped.popleft().close()

    def finished_since(self, num_heard: int) -> tuple[int, list[tuple[int, ...]]]:
        """Return how many rollouts were ever new, and (prompt key, length, *counters) of those after `num_heard`."""
        num_added = self._counts["num_added"]
        if num_added == num_heard:  # at nearly every decode step
            return num_added, []
        newest_first = list(islice(reversed(self._finished), num_added - num_heard))
        return num_added, newest_first[::-1]

    def finish(
        self,
        prompt_key: int,
        tree: PromptTree,
        rollout: Rollout | None,
        counters: AcceptanceCounters,
        *,
        is_step_counted: bool,
    ) -> None:
        """A request of that prompt ended: keep its rollout, whose tokens are in `tree` already, or (None) forget it.

        Args:
            is_step_counted: nobody said which training step it belongs to; the prompt's epochs were counted.
        """
        record = self._prompts[prompt_key]
        if rollout is None:
            record.forget_running()
        else:
            serial = self._add(rollout, counters, is_step_counted=is_step_counted)
            if serial is None:  # known already, or too late for the window
                record.forget_running()
            elif record.tree is tree:
                tree.included.add(serial)
        self._measure(record)
        if len(record) == 0 and not record.open_requests:
            self._forget(prompt_key)
        self._enforce_limit()

    def after_fork_in_child(self) -> None:
        """Background threads do not live on in a forked process: order no more from them, wait for none of theirs."""
        self.lock = threading.RLock()
        self.save_lock = threading.Lock()
        self._builders = None
        self._builds.clear()

    # ---------------------------------------------------------------- for das.state, with `save_lock` held

    def take_changed(self, saved_as: str | None) -> tuple[list[PromptWindow], set[int]]:
        """Return what a save has to write on top of `saved_as`, and the keys of all prompts that have rollouts.

        Prompts come least recently used first. They count as saved from here on: where the save then fails, the caller
        sets `self.saved_as` to None. Complexity: O(prompts + rollouts of those that changed).
        """
        with self.lock:
            is_last_save = saved_as is not None and saved_as == self.saved_as
            with_rollouts = {key: record for key, record in self._prompts.items() if len(record)}
            changed = []
            for key, record in with_rollouts.items():
                if not (is_last_save and record.is_saved):
                    changed.append(record.stored(key))
                    record.is_saved = True
            return changed, set(with_rollouts)

    def restore(self, windows: Iterable[PromptWindow], *, saved_as: str) -> None:
        """Take in saved windows; what is known already is updated, as `add` does it. Policies do not hear of them."""
        with self.lock:
            is_first = not self._prompts
            for window in windows:
                record = self.record_for(window.prompt_key)
                before = record.rollout_bytes, len(record), record.num_tokens
                num_expired = record.restore(window)
                record.is_saved = is_first and num_expired == 0
                self._count_change(record, before)
                self._counts.update(num_restored=len(record) + num_expired - before[1], num_expired=num_expired)
                self._enforce_limit()
            if is_first:
                self.saved_as = saved_as

    # ---------------------------------------------------------------- inside

    def _add(
        self,
        rollout: Rollout,
        counters: AcceptanceCounters = _NOT_GENERATED_HERE,
        *,
        is_step_counted: bool = False,
    ) -> int | None:
        key = rollout.key
        is_first_use = key not in self._prompts
        record = self.record_for(key)
        before = record.rollout_bytes, len(record), record.num_tokens
        outcome = record.add(rollout, is_step_counted=is_step_counted)
        self._count_change(record, before)
        self._counts.update(
            num_added=int(outcome.serial is not None),
            num_updated=int(outcome.is_update),
            num_late=int(outcome.is_late),
            num_expired=outcome.num_expired,
        )
        if outcome.serial is not None:
            effort = counters.num_decode_steps, counters.num_drafted_tokens, counters.num_accepted_tokens
            self._finished.append((key, len(rollout.response_token_ids), *effort, counters.num_emitted_tokens))
        if is_first_use and len(record) == 0:
            del self._prompts[key]
        if outcome.rollout is not None:
            for listener in self._listeners:
                listener(outcome.rollout)
        self._enforce_limit()
        return outcome.serial

    def _count_change(self, record: PromptRecord, before: tuple[int, int, int]) -> None:
        self._counts.update(
            rollout_bytes=record.rollout_bytes - before[0],
            num_rollouts=len(record) - before[1],
            num_tokens=record.num_tokens - before[2],
        )

    def _pending_build(self, key: int, record: PromptRecord) -> bool:
        return key in self._builds and self._builds[key][0] == record.version

    def _install(self, key: int, record: PromptRecord) -> None:
        """Give the record a tree of its window: the one built in the background if it still fits, else a new one."""
        version, build, _ = self._builds.pop(key, (-1, None, 0))
        if build is not None and version == record.version:
            tree = build.result()
            self._counts.update(num_builds_ahead=1)
        else:
            tree = PromptTree(record.window())
            self._counts.update(num_builds_on_start=1)
        record.install(tree)
        self._with_tree[key] = None
        self._with_tree.move_to_end(key)
        self._measure(record)

    def _measure(self, record: PromptRecord) -> None:
        self._counts.update(tree_bytes=record.measure_tree())

    def _touch(self, key: int) -> None:
        self._prompts.move_to_end(key)
        if key in self._with_tree:
            self._with_tree.move_to_end(key)

    def _forget(self, key: int) -> None:
        """Drop a prompt that has no rollout and no open request: nothing is known of it."""
        record = self._prompts.pop(key)
        record.drop_tree()
        self._measure(record)
        self._with_tree.pop(key, None)
        self._builds.pop(key, None)

    def _enforce_limit(self, keep: int | None = None) -> None:
        """Drop the common text, then trees, then rollouts of the prompts used least recently, until the rest fits."""
        if self._held_bytes() <= self.max_bytes:
            return
        self._common.drop_idle()
        if self._held_bytes() <= self.max_bytes:
            return
        while self._held_bytes() > self.max_bytes:
            key = self._least_recently_used(self._with_tree, keep)
            if key is None:
                break
            record = self._prompts[key]
            record.drop_tree()
            del self._with_tree[key]
            self._measure(record)
            self._counts.update(num_evicted_trees=1)
        while self._held_bytes() > self.max_bytes:
            key = self._least_recently_used(self._prompts, keep)
            if key is None:
                break
            record = self._prompts.pop(key)
            self._builds.pop(key, None)
            self._evicted_bytes += record.rollout_bytes
            self._counts.update(
                rollout_bytes=-record.rollout_bytes,
                num_rollouts=-len(record),
                num_tokens=-record.num_tokens,
                num_evicted_rollouts=len(record),
            )
        if self._evicted_bytes >= max(_MIN_RETURNED_BYTES, self.max_bytes >> 6):
            self._evicted_bytes = 0
            return_free_memory()  # trees, which are allocated elsewhere, may be what has taken the place

    def _least_recently_used(self, keys: Iterable[int], keep: int | None) -> int | None:
        """Return the first of the prompts that may lose something, or None. O(those before it), which are busy."""
        return next((key for key in keys if key != keep and not self._prompts[key].open_requests), None)

    def _held_bytes(self) -> int:
        return self._counts["rollout_bytes"] + self._counts["tree_bytes"] + self._common.memory_bytes()


def _after_fork_in_child() -> None:
    for history in list(_HISTORIES):
        history.after_fork_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
