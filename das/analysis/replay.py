"""Replay logged rollouts through the drafter, as an engine would run them, and count what would have been accepted.

A deterministic draft token x is accepted with probability p(x), and a token sampled from p equals x with that very
probability. So "accepted where the draft equals the log" estimates an engine's acceptance without bias, as long as the
log was sampled with the settings that the engine verifies with (Leviathan et al. 2023, Theorem 3.5).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from das.analysis.decoding import Decoding, Observer
from das.analysis.logged_request import LoggedBatch, LoggedRequest, logged_batches, num_generated_tokens
from das.budget import BudgetPolicy
from das.drafter import Drafter, Shape, check_shape
from das.history import RolloutHistory
from das.history_statistics import HistoryStatistics
from das.length_budget import LengthAwareBudget
from das.metrics import AcceptanceCounters, summarise
from das.reliability import Figures, Reliability, reliability_of
from das.rollout import Rollout
from das.step import check_widths

Order = Literal["step", "lockstep"]
_NUMBERS = itertools.count()


@dataclass(frozen=True, slots=True)
class BatchResult:
    """One generation batch: a group of samples of every prompt of a training step.

    Args:
        training_step: of its rollouts; None: the log names none.
        group: which group of samples of that step, from 0.
        requests: each finished request's counters, in order of their end.
        longest_response_tokens: decode steps that the batch would have taken without drafts.
        num_batch_steps: target forwards until the last request ended.
        reliability: of all predictions scored meanwhile, drafted or not, those of requests that did not end included.
        is_complete: False where the replay was stopped in the middle.
        num_padded_tokens: that the engine verified beside the drafted ones, as all requests of a pass have one width.
        num_context_tokens: that the requests' passes read, summed over decode steps.
        num_context_tokens_without_drafts: the same for one token a decode step, of the requests that ended.
    """

    training_step: int | None
    group: int
    requests: tuple[AcceptanceCounters, ...]
    longest_response_tokens: int
    num_batch_steps: int
    reliability: Reliability
    is_complete: bool = True
    num_padded_tokens: int = 0
    num_context_tokens: int = 0
    num_context_tokens_without_drafts: int = 0

    def summary(self) -> dict[str, Any]:
        """Return the batch's figures by name; see `das.metrics.summarise`."""
        return {
            "training_step": self.training_step,
            "group": self.group,
            "num_requests": len(self.requests),
            "longest_response_tokens": self.longest_response_tokens,
            "num_batch_steps": self.num_batch_steps,
            "num_padded_tokens": self.num_padded_tokens,
            "num_context_tokens": self.num_context_tokens,
            "num_context_tokens_without_drafts": self.num_context_tokens_without_drafts,
            "is_complete": self.is_complete,
            **summarise(self.requests),
            "reliability": self.reliability.as_dict(),
        }


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """What a replay counted.

    Args:
        settings: what was applied, by name.
        batches: in order of generation.
        reliability: of all predictions scored, drafted or not.
        history: what the history held at the end, and did.
        plan_us, extend_us: mean time of drafting, and of taking in the emitted tokens, per request and decode step.
        is_complete: whether the whole log was replayed.
    """

    settings: dict[str, Any]
    batches: tuple[BatchResult, ...]
    reliability: Reliability
    history: HistoryStatistics
    plan_us: float
    extend_us: float
    is_complete: bool

    @property
    def counters(self) -> AcceptanceCounters:
        """Sums over all requests."""
        return sum((counters for batch in self.batches for counters in batch.requests), AcceptanceCounters())

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain values, for JSON."""
        return {
            "settings": self.settings,
            "is_complete": self.is_complete,
            "total": {
                "num_requests": sum(len(batch.requests) for batch in self.batches),
                "longest_response_tokens": sum(batch.longest_response_tokens for batch in self.batches),
                "num_batch_steps": sum(batch.num_batch_steps for batch in self.batches),
                "num_padded_tokens": sum(batch.num_padded_tokens for batch in self.batches),
                "num_context_tokens": sum(batch.num_context_tokens for batch in self.batches),
                "num_context_tokens_without_drafts": sum(
                    batch.num_context_tokens_without_drafts for batch in self.batches
                ),
                **summarise(counters for batch in self.batches for counters in batch.requests),
                "reliability": self.reliability.as_dict(),
            },
            "batches": [batch.summary() for batch in self.batches],
            "history": asdict(self.history),
            "plan_us": self.plan_us,
            "extend_us": self.extend_us,
        }


def replay(
    log: Iterable[Rollout],
    *,
    policy: BudgetPolicy | None = None,
    group_size: int = 8,
    order: Order = "step",
    window_epochs: int = 4,
    max_bytes: int = 8 << 30,
    drafter: Drafter | None = None,
    shape: Shape = "chain",
    widths: Sequence[int] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> ReplayResult:
    """Replay a log and return what was counted; see `Replay`, which can be stopped half-way and asked for the rest.

    Args, Raises, Complexity: as `Replay`. `progress` is called with (tokens done, tokens in all).
    """
    run = Replay(
        log,
        policy=policy,
        group_size=group_size,
        order=order,
        window_epochs=window_epochs,
        max_bytes=max_bytes,
        drafter=drafter,
        shape=shape,
        widths=widths,
    )
    run.run(progress=progress)
    return run.result()


class Replay:
    """A replay in progress.

    Training steps follow one another. Within a step all prompts run together, in order of appearance, `group_size`
    samples of each at a time; the next samples of the step start when these have ended. A request sees its prompt, its
    own tokens so far, its siblings' tokens so far and the finished rollouts of the window, never the future.

    Args:
        log: rollouts, in file order; without a training step they count as step 0.
        policy: None: LengthAwareBudget().
        group_size: samples of a prompt that run at once, >= 1.
        order: "step": all running requests draft in one `plan_step`, then all extend, as engines work. "lockstep":
            each request drafts and extends before the next one drafts.
        window_epochs, max_bytes: of the history.
        drafter: one to go on with, and its history; None: a new one.
        shape: of the drafts, "chain" or "tree".
        widths: verify widths of an engine that has one for the whole batch, as in `plan_step`; with order "step" only.
        observer: who is told of each step, for a report; None: nobody.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, or an empty log.

    Complexity: O(tokens) time; the log stays in memory.
    """

    def __init__(
        self,
        log: Iterable[Rollout],
        *,
        policy: BudgetPolicy | None = None,
        group_size: int = 8,
        order: Order = "step",
        window_epochs: int = 4,
        max_bytes: int = 8 << 30,
        drafter: Drafter | None = None,
        shape: Shape = "chain",
        widths: Sequence[int] | None = None,
        observer: Observer | None = None,
    ) -> None:
        if order not in ("step", "lockstep"):
            raise ValueError(f"order is {order!r}; it must be 'step' or 'lockstep'")
        check_shape(shape)
        if widths is not None:
            widths = check_widths(widths)
            if order != "step":
                raise ValueError(f"widths goes with order 'step', where requests share a pass, not with {order!r}")
        if drafter is None:
            drafter = Drafter(RolloutHistory(window_epochs=window_epochs, max_bytes=max_bytes))
        self.policy: BudgetPolicy = LengthAwareBudget() if policy is None else policy
        self.drafter = drafter
        self._batches = logged_batches(log, group_size=group_size)
        self._settings = {
            "policy": repr(self.policy),
            "group_size": group_size,
            "order": order,
            "shape": shape,
            "widths": None if widths is None else list(widths),
            "window_epochs": drafter.history.window_epochs,
            "max_bytes": drafter.history.max_bytes,
            "num_rollouts": sum(len(batch.rollouts) for batch in self._batches),
        }
        self._in_lockstep = order == "lockstep"
        self._decoding = Decoding(drafter, policy=self.policy, shape=shape, widths=widths, observer=observer)
        self._done: list[BatchResult] = []
        self._histogram = np.zeros_like(drafter.confidence.histogram)  # of predictions, in the batches that are done
        self._current: _BatchRun | None = None
        self._names = f"replay{next(_NUMBERS)}"  # request ids must not repeat where replays share a drafter
        self._num_started = 0

    def run(self, *, progress: Callable[[int, int], None] | None = None) -> None:
        """Replay to the end. After an exception, KeyboardInterrupt included, `result` still tells what was counted."""
        try:
            self._run(progress)
        finally:
            self.drafter.history.discard_builds()  # else the interpreter would wait for them at its end

    def _run(self, progress: Callable[[int, int], None] | None) -> None:
        total = sum(num_generated_tokens(rollout) for batch in self._batches for rollout in batch.rollouts)
        done = 0
        for batch in self._batches:
            self.drafter.history.prepare({rollout.key for rollout in batch.rollouts})
            name = f"{self._names}-{self._num_started}"
            self._current = _BatchRun(batch, self._decoding, name)
            self._num_started += len(batch.rollouts)
            while self._current.active:
                done += self._current.step(in_lockstep=self._in_lockstep)
                if progress is not None:
                    progress(done, total)
            self._done.append(self._current.result())
            self._histogram += self._current.histogram()
            self._current = None

    def result(self) -> ReplayResult:
        """Return what has been counted so far; a batch in progress counts with the requests that ended."""
        batches, histogram = list(self._done), self._histogram
        num_planned = max(1, self._decoding.num_planned)
        if self._current is not None:
            batches.append(self._current.result())
            histogram = histogram + self._current.histogram()
        return ReplayResult(
            settings=self._settings,
            batches=tuple(batches),
            reliability=reliability_of(histogram),
            history=self.drafter.history.statistics(),
            plan_us=1e6 * self._decoding.plan_s / num_planned,
            extend_us=1e6 * self._decoding.extend_s / num_planned,
            is_complete=len(self._done) == len(self._batches),
        )


class _BatchRun:
    """One batch while it runs."""

    def __init__(self, batch: LoggedBatch, decoding: Decoding, name: str) -> None:
        self._batch = batch
        self._decoding = decoding
        self._confidence = decoding.drafter.confidence
        self._finished: list[AcceptanceCounters] = []
        self._num_steps = 0
        self._num_padded = 0
        self._num_context = 0
        self._num_context_without_drafts = 0
        self._longest = 0
        self._histogram_before = self._confidence.histogram.copy()
        logged = [LoggedRequest(f"{name}-{i}", rollout) for i, rollout in enumerate(batch.rollouts)]
        for request in logged:
            decoding.start(request)
        self.active = [request for request in logged if not self._end_if_done(request)]

    def step(self, *, in_lockstep: bool) -> int:
        """Run one decode step of every active request and return how many tokens were emitted."""
        self._num_steps += 1
        num_running = len(self.active)
        self._num_context += sum([request.num_context_tokens() for request in self.active])
        turns = [[request] for request in self.active] if in_lockstep else [self.active]
        steps = [self._decoding.step(requests, num_running=num_running) for requests in turns]
        self._num_padded += sum([step.num_padded_tokens for step in steps])
        self.active = [request for request in self.active if not self._end_if_done(request)]
        return sum([step.num_emitted_tokens for step in steps])

    def result(self) -> BatchResult:
        return BatchResult(
            training_step=self._batch.training_step,
            group=self._batch.group,
            requests=tuple(self._finished),
            longest_response_tokens=self._longest,
            num_batch_steps=self._num_steps,
            reliability=reliability_of(self.histogram()),
            is_complete=not self.active,
            num_padded_tokens=self._num_padded,
            num_context_tokens=self._num_context,
            num_context_tokens_without_drafts=self._num_context_without_drafts,
        )

    def histogram(self) -> Figures:
        """Return the histogram of the predictions scored so far; see `das.reliability`."""
        return self._confidence.histogram - self._histogram_before

    def _end_if_done(self, request: LoggedRequest) -> bool:
        if not request.is_done():
            return False
        counters = self._decoding.finish(request)
        self._num_context_without_drafts += request.num_context_tokens_without_drafts()
        self._finished.append(counters)
        self._longest = max(self._longest, counters.num_emitted_tokens)
        return True
