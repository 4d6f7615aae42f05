"""Feed: takes rollouts from a trainer's hot path, and brings them where they are kept, in a thread of its own."""

from __future__ import annotations

import atexit
import logging
import os
import random
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from das.rollout import Rollout, TokenIds, named_prompt_key
from das_trainers.turns import turns_of

logger = logging.getLogger("das.trainers")
_MAX_ROLLOUTS_AT_ONCE = 256
_EXIT_S = 10.0  # that a process that ends waits for what is queued


class Sink(Protocol):
    """Where rollouts go: a `das.RolloutHistory`, a RolloutLog, or whatever else takes them."""

    def add_many(self, rollouts: Iterable[Rollout], /) -> Any: ...


@dataclass(frozen=True, slots=True)
class FeedStatistics:
    """What a feed has done.

    Args:
        num_taken_in: samples that hooks brought.
        num_fed: rollouts that every sink has.
        num_dropped: samples that came while too much was queued.
        num_empty: samples without a prompt or a response: aborted before their first token.
        fault: why feeding is off; empty: it is on.
    """

    num_taken_in: int = 0
    num_fed: int = 0
    num_dropped: int = 0
    num_empty: int = 0
    fault: str = ""


class Feed:
    """Brings what a trainer has sampled to sinks; never raises into the trainer, and never makes it wait.

    The first fault, of a hook or of a sink, is logged with its traceback, and feeding is off from then on.

    Args:
        sinks: whose `add_many` takes rollouts. Called in order, in one thread.
        as_turns: cut rollouts with tool output into the requests that engines saw, for histories that learn from
            engines as well.
        max_queued_tokens: beyond so many, what comes is dropped, and told of once.

    Thread safety: any thread may call. In a forked process the feed begins anew, with an empty queue.
    """

    def __init__(self, *sinks: Sink, as_turns: bool = False, max_queued_tokens: int = 1 << 25) -> None:
        self.fault = ""
        self._sinks = sinks
        self._as_turns = as_turns
        self._max_queued_tokens = max_queued_tokens
        self._begin()
        atexit.register(self.close, timeout_s=_EXIT_S)

    def add(
        self,
        *,
        prompt_token_ids: TokenIds,
        response_token_ids: TokenIds,
        training_step: int | None = None,
        reward: float | None = None,
        response_mask: Sequence[int | bool] | npt.NDArray[np.bool_] | None = None,
        prompt_key: int | str | None = None,
        sample: int | None = None,
    ) -> None:
        """Take in a sample. Never raises, never waits.

        Args:
            prompt_token_ids, response_token_ids: as the engine had them, the end of the response included; copied.
            training_step: version of the policy at the first generated token; None: the prompt's newest epoch.
            reward: None: not known (yet: the same sample again brings it).
            response_mask: 0 or False where the model did not write; None: it wrote everything.
            prompt_key: as requests name it; None: by the prompt's tokens.
            sample: a number that tells the samples of a prompt and training step apart, and by which one that comes
                again is known; None: it comes once only.

        Complexity: O(tokens), to copy the lists. Everything else happens in the feed's thread.
        """
        if self.fault:
            return
        if os.getpid() != self._pid:
            self._begin()
        try:
            if not len(prompt_token_ids) or not len(response_token_ids):
                self._num_empty += 1
                return
            fields = {
                "prompt_token_ids": copy(prompt_token_ids),
                "response_token_ids": copy(response_token_ids),
                "training_step": training_step,
                "reward": reward,
                "response_mask": copy(response_mask),
                "prompt_key": None if prompt_key is None else named_prompt_key(prompt_key),
                "ordinal": self._numbers.getrandbits(31) if sample is None else sample,
            }
        except Exception as error:
            self.switch_off("a hook", error)
            return
        self._enqueue(fields, len(prompt_token_ids) + len(response_token_ids))

    def switch_off(self, what: str, error: BaseException) -> None:
        """Feed no more after a fault in `what`, and say so once. Never raises."""
        with self._changed:
            if self.fault:
                return
            fault = f"{what}: {type(error).__name__}: {error}"
            logger.error(
                "das: feeding rollouts is off from here on; training goes on without. Reason: a fault in %s. Please "
                "report this with the lines below at the das-drafter project.",
                fault,
                exc_info=error,
            )
            self.fault = fault
            self._queue.clear()
            self._num_queued_tokens = 0
            self._changed.notify_all()

    @contextmanager
    def guard(self, what: str) -> Iterator[None]:
        """Let nothing that is raised inside get out; the first time it happens, feeding goes off."""
        try:
            yield
        except Exception as error:
            self.switch_off(what, error)

    def flush(self, *, timeout_s: float = 60.0) -> bool:
        """Wait until the sinks have everything that was taken in; return whether they have. Never raises."""
        end_s = time.monotonic() + timeout_s
        with self._changed:
            while (self._queue or self._is_busy) and not self.fault:
                if not self._changed.wait(end_s - time.monotonic()):
                    break
            return not (self._queue or self._is_busy or self.fault)

    def close(self, *, timeout_s: float = 60.0) -> None:
        """Flush, and end the thread; what comes later starts it again. Never raises."""
        if os.getpid() != self._pid:
            return  # forked: what is queued is the other process'
        self.flush(timeout_s=timeout_s)
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()

    def statistics(self) -> FeedStatistics:
        """Return what was done so far. O(1)."""
        with self._changed:
            return FeedStatistics(self._num_taken_in, self._num_fed, self._num_dropped, self._num_empty, self.fault)

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._numbers = random.Random()  # of its own, seeded by the system: trainers seed the common one
        self._changed = threading.Condition()
        self._queue: deque[tuple[dict[str, Any], int]] = deque()
        self._num_queued_tokens = 0
        self._num_taken_in = self._num_fed = self._num_dropped = self._num_empty = 0
        self._is_busy = self._is_closing = self._has_thread = False

    def _enqueue(self, fields: dict[str, Any], num_tokens: int) -> None:
        with self._changed:
            if self._queue and self._num_queued_tokens + num_tokens > self._max_queued_tokens:
                if not self._num_dropped:
                    logger.warning(
                        "das: sinks are slower than the trainer: with %d tokens queued, rollouts are dropped "
                        "(FeedStatistics.num_dropped counts them)",
                        self._num_queued_tokens,
                    )
                self._num_dropped += 1
                return
            self._num_taken_in += 1
            self._queue.append((fields, num_tokens))
            self._num_queued_tokens += num_tokens
            self._is_closing = False
            if not self._has_thread:
                self._has_thread = True
                threading.Thread(target=self._run, name="das-feed", daemon=True).start()
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()
                while not self._queue and not self._is_closing:
                    self._changed.wait()
                if not self._queue:
                    self._has_thread = False
                    return
                taken = [self._queue.popleft() for _ in range(min(len(self._queue), _MAX_ROLLOUTS_AT_ONCE))]
                self._num_queued_tokens -= sum(num_tokens for _, num_tokens in taken)
                self._is_busy = True
            try:
                self._feed([Rollout(**fields) for fields, _ in taken])
            except Exception as error:
                self.switch_off("a sink, or a rollout that is none", error)

    def _feed(self, rollouts: list[Rollout]) -> None:
        if self._as_turns:
            rollouts = [turn for rollout in rollouts for turn in turns_of(rollout)]
        for sink in self._sinks:
            sink.add_many(rollouts)
        with self._changed:
            self._num_fed += len(rollouts)
