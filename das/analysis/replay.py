"""Replay logged rollouts through the drafter, as an engine would run them, and count what would have been accepted.

A deterministic draft token x is accepted with probability p(x), and a token sampled from p equals x with that very
probability. So "accepted where the draft equals the log" estimates an engine's acceptance without bias, as long as the
log was sampled with the settings that the engine verifies with (Leviathan et al. 2023, Theorem 3.5).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np

from das._drafts import Draft
from das.budget import BudgetPolicy
from das.drafter import Drafter, Shape, check_shape
from das.history import HistoryStatistics, RolloutHistory
from das.metrics import AcceptanceCounters, summarise
from das.reliability import Figures, Reliability, reliability_of
from das.rollout import Rollout
from das.step import StepDrafts, check_widths, plan_step
from das.throughput_budget import ThroughputBudget

Order = Literal["step", "lockstep"]
_Plan = Callable[..., StepDrafts]
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
        policy: None: ThroughputBudget().
        group_size: samples of a prompt that run at once, >= 1.
        order: "step": all running requests draft in one `plan_step`, then all extend, as engines work. "lockstep":
            each request drafts and extends before the next one drafts.
        window_epochs, max_bytes: of the history.
        drafter: one to go on with, and its history; None: a new one.
        shape: of the drafts, "chain" or "tree".
        widths: verify widths of an engine that has one for the whole batch, as in `plan_step`; with order "step" only.

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
    ) -> None:
        if isinstance(group_size, bool) or not isinstance(group_size, int):
            raise TypeError(f"group_size must be an int, not {type(group_size).__name__}")
        if group_size < 1:
            raise ValueError(f"group_size is {group_size}; it must be at least 1")
        if order not in ("step", "lockstep"):
            raise ValueError(f"order is {order!r}; it must be 'step' or 'lockstep'")
        check_shape(shape)
        if widths is not None:
            widths = check_widths(widths)
            if order != "step":
                raise ValueError(f"widths goes with order 'step', where requests share a pass, not with {order!r}")
        if drafter is None:
            drafter = Drafter(RolloutHistory(window_epochs=window_epochs, max_bytes=max_bytes))
        self.policy: BudgetPolicy = ThroughputBudget() if policy is None else policy
        self.drafter = drafter
        self._batches = list(_batches(log, group_size))
        if not self._batches:
            raise ValueError("log is empty; there is nothing to replay")
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
        self._plan: _Plan = partial(plan_step, drafter, policy=self.policy, shape=shape, widths=widths)
        self._clock = _Clock()
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
        total = sum(_num_generated(rollout) for batch in self._batches for rollout in batch.rollouts)
        done = 0
        for batch in self._batches:
            self.drafter.history.prepare({rollout.key for rollout in batch.rollouts})
            name = f"{self._names}-{self._num_started}"
            self._current = _BatchRun(batch, self.drafter, self._plan, self._clock, name)
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
        if self._current is not None:
            batches.append(self._current.result())
            histogram = histogram + self._current.histogram()
        return ReplayResult(
            settings=self._settings,
            batches=tuple(batches),
            reliability=reliability_of(histogram),
            history=self.drafter.history.statistics(),
            plan_us=self._clock.mean_us("plan"),
            extend_us=self._clock.mean_us("extend"),
            is_complete=len(self._done) == len(self._batches),
        )


@dataclass(frozen=True, slots=True)
class _Batch:
    training_step: int | None
    group: int
    rollouts: list[Rollout]


def _batches(log: Iterable[Rollout], group_size: int) -> Iterator[_Batch]:
    """Cut a log into generation batches, in order of training step."""
    steps: dict[int | None, dict[int, list[Rollout]]] = {}
    for rollout in log:
        steps.setdefault(rollout.training_step, {}).setdefault(rollout.key, []).append(rollout)
    for training_step in sorted(steps, key=lambda step: -1 if step is None else step):
        by_prompt = list(steps[training_step].values())
        for group, first in enumerate(range(0, max(map(len, by_prompt)), group_size)):
            rollouts = [rollout for samples in by_prompt for rollout in samples[first : first + group_size]]
            yield _Batch(training_step, group, rollouts)


def _num_generated(rollout: Rollout) -> int:
    mask = rollout.response_mask
    return len(rollout.response_token_ids) if mask is None else int(mask.sum())


@dataclass(slots=True)
class _Clock:
    """Time spent, and on how many requests, by kind of work."""

    seconds: dict[str, float] = field(default_factory=dict)
    requests: dict[str, int] = field(default_factory=dict)

    def add(self, kind: str, start_s: float, num_requests: int) -> None:
        self.seconds[kind] = self.seconds.get(kind, 0.0) + time.perf_counter() - start_s
        self.requests[kind] = self.requests.get(kind, 0) + num_requests

    def mean_us(self, kind: str) -> float:
        return 1e6 * self.seconds.get(kind, 0.0) / max(1, self.requests.get(kind, 0))


class _Logged:
    """A request whose future is the log: it emits what was logged."""

    __slots__ = ("_ends", "_mask", "emitted", "request_id", "rollout", "tokens")

    def __init__(self, request_id: str, rollout: Rollout) -> None:
        self.request_id = request_id
        self.rollout = rollout
        self.tokens: list[int] = rollout.response_token_ids.tolist()
        self.emitted: list[int] = []
        self._mask = rollout.response_mask
        changes = () if self._mask is None else np.flatnonzero(np.diff(self._mask)) + 1
        self._ends = [*(int(change) for change in changes), len(self.tokens)]  # where stretches of one kind end

    def is_done(self) -> bool:
        return len(self.emitted) == len(self.tokens)

    def num_context_tokens(self) -> int:
        return len(self.rollout.prompt_token_ids) + len(self.emitted)

    def num_context_tokens_without_drafts(self) -> int:
        """Return the sum over its generated tokens of what stands before each."""
        positions = np.arange(len(self.tokens)) if self._mask is None else np.flatnonzero(self._mask)
        return len(positions) * len(self.rollout.prompt_token_ids) + int(positions.sum())

    def verify(self, draft: Draft) -> list[int]:
        """Return what the engine emits for a draft: the accepted path, and the token sampled after it."""
        position = len(self.emitted)
        end = next(end for end in self._ends if end > position)
        accepted, last = position, -1
        for node, (token, parent) in enumerate(zip(draft.draft_token_ids, draft.parents, strict=True)):
            if parent == last and accepted < end and token == self.tokens[accepted]:
                accepted, last = accepted + 1, node
        return self.tokens[position : min(accepted + 1, end)]

    def environment(self) -> list[int]:
        """Return the environment tokens that come next, if any."""
        position = len(self.emitted)
        if self._mask is None or self.is_done() or self._mask[position]:
            return []
        return self.tokens[position : next(end for end in self._ends if end > position)]


class _BatchRun:
    """One batch while it runs."""

    def __init__(self, batch: _Batch, drafter: Drafter, plan: _Plan, clock: _Clock, name: str) -> None:
        self._batch = batch
        self._drafter = drafter
        self._plan = plan
        self._clock = clock
        self._finished: list[AcceptanceCounters] = []
        self._num_steps = 0
        self._num_padded = 0
        self._num_context = 0
        self._num_context_without_drafts = 0
        self._longest = 0
        self._histogram_before = drafter.confidence.histogram.copy()
        logged = [_Logged(f"{name}-{i}", rollout) for i, rollout in enumerate(batch.rollouts)]
        for request in logged:
            drafter.start(
                request.request_id,
                prompt_token_ids=request.rollout.prompt_token_ids,
                prompt_key=request.rollout.prompt_key,
                training_step=request.rollout.training_step or 0,
            )
            self._enter_environment(request)
        self.active = [request for request in logged if not self._end_if_done(request)]

    def step(self, *, in_lockstep: bool) -> int:
        """Run one decode step of every active request and return how many tokens were emitted."""
        self._num_steps += 1
        num_running = len(self.active)
        self._num_context += sum([request.num_context_tokens() for request in self.active])
        turns = [[request] for request in self.active] if in_lockstep else [self.active]
        num_emitted = sum([self._turn(requests, num_running) for requests in turns])
        self.active = [request for request in self.active if not self._end_if_done(request)]
        return num_emitted

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
        return self._drafter.confidence.histogram - self._histogram_before

    def _turn(self, requests: list[_Logged], num_running: int) -> int:
        start_s = time.perf_counter()
        drafts = self._plan([request.request_id for request in requests], num_running=num_running)
        self._clock.add("plan", start_s, len(requests))
        if drafts.width is not None:
            self._num_padded += drafts.width * len(requests) - sum(map(len, drafts.values()))
        emitted = [request.verify(drafts[request.request_id]) for request in requests]
        start_s = time.perf_counter()
        self._drafter.extend_batch({request.request_id: ids for request, ids in zip(requests, emitted, strict=True)})
        self._clock.add("extend", start_s, len(requests))
        for request, token_ids in zip(requests, emitted, strict=True):
            request.emitted += token_ids
            self._enter_environment(request)
        return sum(map(len, emitted))

    def _enter_environment(self, request: _Logged) -> None:
        token_ids = request.environment()
        if token_ids:
            self._drafter.extend(request.request_id, token_ids, generated=False)
            request.emitted += token_ids

    def _end_if_done(self, request: _Logged) -> bool:
        if not request.is_done():
            return False
        if request.emitted != request.tokens:
            raise RuntimeError(f"{request.request_id}: the replay emitted tokens that are not in the log")
        counters = self._drafter.finish(request.request_id, reward=request.rollout.reward)
        self._num_context_without_drafts += request.num_context_tokens_without_drafts()
        self._finished.append(counters)
        self._longest = max(self._longest, counters.num_emitted_tokens)
        return True
