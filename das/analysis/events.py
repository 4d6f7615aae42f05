"""The events of a simulation, in order of time: batches start, workers step, requests end, training steps end."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, Literal, get_args

import numpy as np

from das.analysis.decoding import Decoding
from das.analysis.logged_request import LoggedBatch, LoggedRequest, num_generated_tokens
from das.analysis.projection import BatchFigures, Schedule, WorkerFigures, covered_s
from das.analysis.worker import Decodes, Worker
from das.latency import LatencyModel
from das.metrics import AcceptanceCounters

Assignment = Literal["prompt", "round-robin", "longest-first", "shared-queue"]
NUM_SLICES = 100  # of the run's time, for the number of requests running
_FINISH, _RELEASE, _STEP = range(3)  # what comes first at one moment


def check_assignment(assignment: Assignment) -> None:
    """Raise ValueError for what is no assignment."""
    if assignment not in get_args(Assignment):
        raise ValueError(f"assignment is {assignment!r}; it must be one of {', '.join(get_args(Assignment))}")


class _BatchRun:
    """A batch in the course of time, in milliseconds."""

    def __init__(self, logged: LoggedBatch) -> None:
        self.logged = logged
        self.lengths = [num_generated_tokens(rollout) for rollout in logged.rollouts]
        self.released_ms = self.ended_ms = self.exposed_ms = self.trained_ms = 0.0
        self.num_ended = 0
        self.ended: list[tuple[int, LoggedRequest]] = []  # and the worker of each, until these are shared

    def figures(self) -> BatchFigures:
        return BatchFigures(
            training_step=self.logged.training_step,
            group=self.logged.group,
            num_requests=len(self.lengths),
            num_emitted_tokens=sum(self.lengths),
            longest_response_tokens=max(self.lengths),
            released_s=self.released_ms / 1e3,
            ended_s=self.ended_ms / 1e3,
            exposed_generation_s=self.exposed_ms / 1e3,
            trained_s=self.trained_ms / 1e3,
        )


class Events:
    """One simulated run; see `das.analysis.simulate` for what is simulated.

    Args:
        batches: in order.
        decodings: how requests decode, one a worker.
        latency, max_running, assignment, lag: as of `simulate`.
        train_ms: of a training step.
        racers: how copies of other workers' requests decode, one a worker; None: there are none.
        is_decoupled, draft_token_ms: as of `Worker`.

    Complexity: O(decode steps log workers).
    """

    def __init__(
        self,
        batches: Sequence[LoggedBatch],
        decodings: Sequence[Decodes],
        *,
        latency: LatencyModel,
        max_running: int | None,
        assignment: Assignment,
        lag: int,
        train_ms: float,
        racers: Sequence[Decodes] | None = None,
        is_decoupled: bool = False,
        draft_token_ms: float = 0.0,
    ) -> None:
        shared: deque[LoggedRequest] | None = deque() if assignment == "shared-queue" else None
        self._workers = [
            Worker(
                decodes,
                queue=deque() if shared is None else shared,
                latency=latency,
                max_running=max_running,
                is_decoupled=is_decoupled,
                draft_token_ms=draft_token_ms,
            )
            for decodes in decodings
        ]
        self._assignment = assignment
        self._lag = lag
        self._train_ms = train_ms
        self._own, self._racers = list(decodings), racers
        self._batches = [_BatchRun(batch) for batch in batches]
        self._batch_of: dict[str, _BatchRun] = {}  # by request id
        self._num_trained = 0
        self._heap: list[tuple[float, int, int, Any]] = []
        self._order = count()  # of events at one moment
        self._idle = dict.fromkeys(range(len(self._workers)))  # workers, in order of becoming idle
        self._races: dict[str, list[tuple[int, LoggedRequest]]] = {}  # by id of each of the two: workers and requests
        self._lost: set[str] = set()  # ids of requests whose copies ended before they did
        self._counters = AcceptanceCounters()
        self._num_ended = [0] * len(self._workers)
        self._changes: list[tuple[float, int]] = []  # (time, change of the number of requests running)

    def run(self, *, progress: Callable[[int, int], None] | None = None) -> Schedule:
        """Simulate to the end. `progress` is called with (tokens done, tokens in all)."""
        total = sum(sum(batch.lengths) for batch in self._batches)
        for number in range(min(self._lag + 1, len(self._batches))):
            self._push(0.0, _RELEASE, number)
        while self._heap:
            now_ms, kind, _, what = heapq.heappop(self._heap)
            if kind == _STEP:
                self._step(now_ms, what)
                if progress is not None:
                    progress(min(total, sum([worker.num_emitted_tokens for worker in self._workers])), total)
            elif kind == _FINISH:
                self._finish(now_ms, *what)
            else:
                self._release(now_ms, what)
        return self._schedule(num_logged=total)

    def _push(self, time_ms: float, kind: int, what: Any) -> None:
        heapq.heappush(self._heap, (time_ms, kind, next(self._order), what))

    def _release(self, now_ms: float, number: int) -> None:
        """The requests of a batch may start."""
        batch = self._batches[number]
        batch.released_ms = now_ms
        requests = [LoggedRequest(f"{number}-{i}", rollout) for i, rollout in enumerate(batch.logged.rollouts)]
        self._batch_of.update((request.request_id, batch) for request in requests)
        for worker, request in zip(self._assigned(requests, batch.lengths), requests, strict=True):
            self._workers[worker].queue.append(request)
        for worker in self._idle:
            self._push(now_ms, _STEP, worker)
        self._idle.clear()

    def _assigned(self, requests: list[LoggedRequest], lengths: list[int]) -> list[int]:
        """The worker of each request."""
        num_workers = len(self._workers)
        if self._assignment == "prompt":
            prompts = {key: i for i, key in enumerate(dict.fromkeys(request.rollout.key for request in requests))}
            return [prompts[request.rollout.key] * num_workers // len(prompts) for request in requests]
        if self._assignment == "round-robin":
            return [i % num_workers for i in range(len(requests))]
        workers = [0] * len(requests)  # whose queue is everybody's, if it is shared
        if self._assignment == "longest-first":
            loads = [0] * num_workers
            for i in sorted(range(len(requests)), key=lambda i: -lengths[i]):
                workers[i] = loads.index(min(loads))
                loads[workers[i]] += lengths[i]
        return workers

    def _step(self, now_ms: float, number: int) -> None:
        """A worker starts what it has room for, and decodes one step; or it has nothing to do."""
        worker = self._workers[number]
        worker.clock_ms = now_ms
        if not worker.active:
            worker.decodes = self._own[number]
        while started := worker.admit():  # again, in the places of those that are done at once
            for request in started:
                self._changes.append((now_ms, 1))
                if request.is_done():
                    self._finish(now_ms, number, request)
        if worker.active:
            for request in worker.step():
                self._push(worker.clock_ms, _FINISH, (number, request))
        elif not self._join_race(number):
            self._idle[number] = None
            return
        self._push(worker.clock_ms, _STEP, number)

    def _finish(self, now_ms: float, number: int, request: LoggedRequest) -> None:
        """A request has ended; unless a copy of it was faster, it counts."""
        worker = self._workers[number]
        if request.request_id in self._lost:
            self._counters += worker.decodes.finish(request, keep=False)
            return
        self._counters += worker.decodes.finish(request)
        self._num_ended[number] += 1
        self._changes.append((now_ms, -1))
        self._end_race(now_ms, request)
        batch = self._batch_of[request.request_id]
        batch.num_ended += 1
        batch.ended.append((number, request))
        if batch.num_ended == len(batch.lengths):
            batch.ended_ms = now_ms
            self._share(batch)
            self._train()

    def _share(self, batch: _BatchRun) -> None:
        """Each worker learns what the others generated."""
        for number, decodes in enumerate(self._own):
            if isinstance(decodes, Decoding):
                decodes.drafter.history.add_many(
                    replace(
                        request.rollout,
                        training_step=request.rollout.training_step or 0,
                        request_id=request.request_id,
                    )
                    for ended_on, request in batch.ended
                    if ended_on != number
                )
        batch.ended.clear()

    def _train(self) -> None:
        """Training goes on as far as batches have ended; each step lets a batch start."""
        for number in range(self._num_trained, len(self._batches)):
            batch = self._batches[number]
            if batch.num_ended < len(batch.lengths):
                return
            before_ms = self._batches[number - 1].trained_ms if number else 0.0
            batch.exposed_ms = max(0.0, batch.ended_ms - before_ms)
            is_last_turn = number + 1 == len(self._batches) or self._batches[number + 1].logged.turn == 0
            batch.trained_ms = max(batch.ended_ms, before_ms) + (self._train_ms if is_last_turn else 0.0)
            self._num_trained += 1
            if number + 1 + self._lag < len(self._batches):
                self._push(batch.trained_ms, _RELEASE, number + 1 + self._lag)

    def _join_race(self, number: int) -> bool:
        """Let an idle worker run a copy of another one's request, if there is one that nobody races for yet."""
        if self._racers is None:
            return False
        running = [
            (self._own[other].tokens_per_decode_step(request), other, request)
            for other, worker in enumerate(self._workers)
            for request in worker.active
            if request.request_id not in self._races
        ]
        if not running:
            return False
        _, other, request = min(running, key=lambda candidate: candidate[0])
        copied = request.copy(f"{request.request_id}+{number}")
        self._batch_of[copied.request_id] = self._batch_of[request.request_id]
        race = [(other, request), (number, copied)]
        self._races.update((runner.request_id, race) for _, runner in race)
        worker = self._workers[number]
        worker.decodes = self._racers[number]
        # What the pass in progress emits is in the request already, but known only when that pass ends.
        worker.clock_ms = max(worker.clock_ms, self._workers[other].clock_ms)
        worker.admit_copy(copied)
        return True

    def _end_race(self, now_ms: float, winner: LoggedRequest) -> None:
        for number, request in self._races.pop(winner.request_id, ()):
            if request is winner:
                continue
            del self._races[request.request_id]
            self._workers[number].cancel(request, now_ms=now_ms)
            if request.is_done():  # its end is among the events to come
                self._lost.add(request.request_id)
            else:
                self._counters += self._workers[number].decodes.finish(request, keep=False)

    def _schedule(self, *, num_logged: int) -> Schedule:
        batches = tuple(batch.figures() for batch in self._batches)
        makespan_s = covered_s([(batch.released_s, batch.ended_s) for batch in batches])
        return Schedule(
            workers=tuple(
                WorkerFigures(
                    busy_s=worker.busy_ms / 1e3,
                    idle_s=makespan_s - worker.busy_ms / 1e3,
                    num_forwards=worker.num_forwards,
                    num_requests=num_ended,
                    num_verified_tokens=worker.num_verified_tokens,
                )
                for worker, num_ended in zip(self._workers, self._num_ended, strict=True)
            ),
            batches=batches,
            counters=self._counters,
            num_raced_tokens=self._counters.num_emitted_tokens - num_logged,
            num_padded_tokens=sum(worker.num_padded_tokens for worker in self._workers),
            num_running=_means(self._changes, end_ms=1e3 * max(batch.trained_s for batch in batches)),
        )


def _means(changes: list[tuple[float, int]], *, end_ms: float) -> tuple[float, ...]:
    """Return the mean of a count in equal slices of the time until `end_ms`, from (time, change) of it."""
    changes.sort()
    times, steps = np.array(changes, np.float64).T
    counts = np.cumsum(steps)
    sums = np.concatenate([[0.0], np.cumsum(counts[:-1] * np.diff(times)), [0.0]])
    sums[-1] = sums[-2]  # nothing runs after the last change
    edges = np.linspace(0.0, end_ms, NUM_SLICES + 1)
    return tuple((np.diff(np.interp(edges, [*times, end_ms], sums)) * NUM_SLICES / end_ms).tolist()) if end_ms else ()
