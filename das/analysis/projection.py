"""What a simulation of generation found: its makespan with drafts and without, and whether drafting should be on."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Literal

from das.metrics import AcceptanceCounters, summarise

Verdict = Literal["enable", "leave off"]
LEAST_GAIN = 0.01  # of the time: a smaller one is within the error of any latency model


@dataclass(frozen=True, slots=True)
class WorkerFigures:
    """One worker over the whole simulation.

    Args:
        busy_s, idle_s: time in forwards, and the rest of the makespan.
        num_forwards: target passes.
        num_requests: that ended on it.
        num_verified_tokens: computed in its passes: one a request, drafted tokens, padding.
    """

    busy_s: float
    idle_s: float
    num_forwards: int
    num_requests: int
    num_verified_tokens: int


@dataclass(frozen=True, slots=True)
class BatchFigures:
    """One generation batch, and the training step after it.

    Args:
        training_step: of its rollouts; None: the log names none.
        group: which group of samples of that step, from 0.
        num_requests: its rollouts.
        num_emitted_tokens, longest_response_tokens: generated tokens of all, and of the longest.
        released_s, ended_s: when its first rollout could start, and when the last one ended.
        exposed_generation_s: how long training waited for it.
        trained_s: when the training step on it ended.
    """

    training_step: int | None
    group: int
    num_requests: int
    num_emitted_tokens: int
    longest_response_tokens: int
    released_s: float
    ended_s: float
    exposed_generation_s: float
    trained_s: float

    @property
    def makespan_s(self) -> float:
        """From the moment at which its rollouts could start until the last one ended."""
        return self.ended_s - self.released_s


@dataclass(frozen=True, slots=True)
class Schedule:
    """One simulated run.

    Args:
        workers, batches: in order of number and of time.
        counters: of all decode steps, those of requests that lost a race included.
        num_raced_tokens: emitted a second time, in races between workers.
        num_padded_tokens: verified beside the drafted ones, as all requests of a pass have one width.
        num_running: mean number of requests running, in equal slices of the run's time.
    """

    workers: tuple[WorkerFigures, ...]
    batches: tuple[BatchFigures, ...]
    counters: AcceptanceCounters
    num_raced_tokens: int
    num_padded_tokens: int
    num_running: tuple[float, ...]

    @property
    def makespan_s(self) -> float:
        """Time in which a rollout was running or waiting for a place: the batches' makespans, overlaps counted once."""
        return covered_s([(batch.released_s, batch.ended_s) for batch in self.batches])

    @property
    def duration_s(self) -> float:
        """Until the last training step ended."""
        return max(batch.trained_s for batch in self.batches)

    @property
    def exposed_generation_s(self) -> float:
        """How long training waited for rollouts."""
        return sum(batch.exposed_generation_s for batch in self.batches)

    @property
    def utilisation(self) -> float:
        """Share of the workers' time, while a batch was being generated, in which they were in a forward."""
        makespan_s = self.makespan_s
        busy_s = sum(worker.busy_s for worker in self.workers)
        return busy_s / (makespan_s * len(self.workers)) if makespan_s else 1.0

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain values, for JSON."""
        return {
            "makespan_s": self.makespan_s,
            "duration_s": self.duration_s,
            "exposed_generation_s": self.exposed_generation_s,
            "utilisation": self.utilisation,
            "num_forwards": sum(worker.num_forwards for worker in self.workers),
            "num_verified_tokens": sum(worker.num_verified_tokens for worker in self.workers),
            "num_raced_tokens": self.num_raced_tokens,
            "num_padded_tokens": self.num_padded_tokens,
            **summarise([self.counters]),
            "workers": [asdict(worker) for worker in self.workers],
            "batches": [asdict(batch) | {"makespan_s": batch.makespan_s} for batch in self.batches],
            "num_running": list(self.num_running),
        }


@dataclass(frozen=True, slots=True)
class Projection:
    """What generating a log would take, by a latency model.

    Args:
        settings: what was simulated, by name.
        with_drafts: under the policy.
        without_drafts: the same with speculation switched off in the engines, so that c_engine is not paid.
        plan_s, extend_s: the drafters' own time on this machine, of all workers together: drafting, and taking in the
            emitted tokens. Measured, and no part of the simulated time.
        num_planned: requests drafted for, summed over decode steps.
    """

    settings: dict[str, Any]
    with_drafts: Schedule
    without_drafts: Schedule
    plan_s: float
    extend_s: float
    num_planned: int

    @property
    def makespan_s(self) -> float:
        """Of the run with drafts."""
        return self.with_drafts.makespan_s

    @property
    def speedup(self) -> float:
        """Makespan without drafts / with them; 1 where nothing was generated."""
        return _ratio(self.without_drafts.makespan_s, self.with_drafts.makespan_s)

    @property
    def step_speedup(self) -> float:
        """Duration, training included, without drafts / with them; 1 where nothing takes time."""
        return _ratio(self.without_drafts.duration_s, self.with_drafts.duration_s)

    @property
    def generation_share(self) -> float:
        """Share of generation in the duration of synchronous training without drafts."""
        schedule = self.without_drafts
        training_s = self.settings["train_s"] * len(schedule.batches)
        return _ratio(schedule.makespan_s, schedule.makespan_s + training_s)

    @property
    def amdahl_speedup(self) -> float:
        """What faster generation can bring to a synchronous training step; see `amdahl_speedup`."""
        return amdahl_speedup(self.speedup, generation_share=self.generation_share)

    @property
    def verdict(self) -> Verdict:
        """Whether speculation should be switched on: only where training ends earlier by 1 % or more."""
        return "enable" if self.step_speedup >= 1.0 / (1.0 - LEAST_GAIN) else "leave off"

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain values, for JSON."""
        return {
            "settings": self.settings,
            "speedup": self.speedup,
            "step_speedup": self.step_speedup,
            "generation_share": self.generation_share,
            "amdahl_speedup": self.amdahl_speedup,
            "verdict": self.verdict,
            "with_drafts": self.with_drafts.as_dict(),
            "without_drafts": self.without_drafts.as_dict(),
            "plan_s": self.plan_s,
            "extend_s": self.extend_s,
            "drafting_us": 1e6 * (self.plan_s + self.extend_s) / max(1, self.num_planned),
        }


def amdahl_speedup(generation_speedup: float, *, generation_share: float) -> float:
    """Return the speedup of a step of which only generation becomes faster: 1 / (R / alpha + 1 - R).

    Args:
        generation_speedup: alpha, > 0.
        generation_share: R, of the step's time before, 0..1.

    Raises:
        ValueError: out of range.

    Source: NeMo-RL (arXiv 2604.26779), the bound on the step speedup.
    """
    if not 0 < generation_speedup < math.inf:
        raise ValueError(f"generation_speedup is {generation_speedup}; it must be 0 < generation_speedup < infinity")
    if not 0 <= generation_share <= 1:
        raise ValueError(f"generation_share is {generation_share}; it must be 0 <= generation_share <= 1")
    return 1.0 / (generation_share / generation_speedup + 1.0 - generation_share)


def covered_s(spans: list[tuple[float, float]]) -> float:
    """Return the length of the union of intervals (start, end). O(n log n)."""
    covered, reached = 0.0, -math.inf
    for start, end in sorted(spans):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else 1.0
