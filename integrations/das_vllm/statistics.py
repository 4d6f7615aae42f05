"""What das counts in an engine, under Prometheus-style names that agree with vLLM's own spec-decode counters."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from das_vllm.proposer import DasProposer


@dataclass(frozen=True, slots=True)
class LastStep:
    """What the last engine step was: requests in it, and tokens drafted for the next one."""

    num_requests: int = 0
    num_drafted_tokens: int = 0


class DraftingTimes:
    """Clocks around drafting: how long it takes, and how long the engine takes between two calls."""

    __slots__ = ("_last_end_s", "max_propose_us", "num_steps", "sum_propose_us")

    def __init__(self) -> None:
        self.num_steps = 0
        self.sum_propose_us = 0.0
        self.max_propose_us = 0.0
        self._last_end_s: float | None = None

    def step_ms(self, now_s: float) -> float | None:
        """Return the time since drafting last ended: scheduling, forward pass and sampling; None: there is no last."""
        return None if self._last_end_s is None else (now_s - self._last_end_s) * 1e3

    def end_of_drafting(self, started_s: float, ended_s: float) -> None:
        """Count one call."""
        spent_us = (ended_s - started_s) * 1e6
        self.num_steps += 1
        self.sum_propose_us += spent_us
        self.max_propose_us = max(self.max_propose_us, spent_us)
        self._last_end_s = ended_s


def statistics(proposer: DasProposer) -> dict[str, float | int | str | bool]:
    """Return counters and gauges of a proposer, as plain values.

    `das_num_verification_steps`, `das_num_drafted_tokens` and `das_num_accepted_tokens` count what
    `vllm:spec_decode_num_drafts`, `..._num_draft_tokens` and `..._num_accepted_tokens` count; of the accepted tokens,
    `das_num_accepted_past_end_tokens` lie behind the end of their response and are no part of it.
    """
    tracker, history = proposer.tracker, proposer.history.statistics()
    counters = tracker.drafter.counters()
    values: dict[str, float | int | str | bool] = {
        f"das_{name}": value for name, value in asdict(counters).items() if name != "num_accepted_tokens"
    }
    past_end = tracker.counts["num_accepted_past_end"]
    values |= {
        "das_num_accepted_tokens": counters.num_accepted_tokens + past_end,
        "das_num_accepted_past_end_tokens": past_end,
        "das_draft_acceptance_rate": counters.draft_acceptance_rate,
        "das_mean_acceptance_length": counters.mean_acceptance_length,
        "das_tokens_per_decode_step": counters.tokens_per_decode_step,
        "das_drafted_per_decode_step": counters.drafted_per_decode_step,
        **{f"das_{name}": value for name, value in tracker.means.means().items()},
        "das_last_step_num_requests": proposer.last_step.num_requests,
        "das_last_step_num_waiting": proposer.num_waiting,
        "das_last_step_num_drafted_tokens": proposer.last_step.num_drafted_tokens,
        "das_num_requests_tracked": len(tracker),
        **{
            f"das_{name}": tracker.counts[name]
            for name in (
                "num_requests_started",
                "num_requests_finished",
                "num_requests_without_prompt",
                "num_requests_abandoned",
            )
        },
        "das_num_engine_steps": proposer.times.num_steps,
        "das_propose_us_sum": proposer.times.sum_propose_us,
        "das_propose_us_max": proposer.times.max_propose_us,
        "das_is_drafting": proposer.is_drafting,
        "das_fault": proposer.fault or "",
        "das_policy": repr(proposer.policy),
        "das_training_step": -1 if tracker.training_step is None else tracker.training_step,
    }
    if proposer.shared is not None:
        values |= {f"das_shared_{name}": value for name, value in proposer.shared.statistics().items()}
    values |= {f"das_history_{name}": value for name, value in asdict(history).items()}
    return values
