"""What is in a log: the figures behind `das inspect`."""

from __future__ import annotations

import math
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np

from das.analysis.logs import LogRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Mean, smallest and largest of some counts."""

    mean: float
    min: int
    max: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseTokens:
    """How long the responses are, in tokens; the percentiles are lengths that occur."""

    sum: int
    mean: float
    p50: int
    p90: int
    p99: int
    max: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSummary:
    """What one training step of a log holds, or the whole log.

    Attributes: `training_step` (None: the log names none, or this is the whole log), `num_rollouts`, `num_prompts`,
    `samples_per_prompt` (within one training step), `response_tokens`, `token_share` (of the log's response tokens,
    0..1), `reward_mean` and `truncated_share` (over the rows that say; None: no row does).
    """

    training_step: int | None
    num_rollouts: int
    num_prompts: int
    samples_per_prompt: Spread
    response_tokens: ResponseTokens
    token_share: float
    reward_mean: float | None
    truncated_share: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSummary:
    """What a log holds: as a whole, by training step (rising, unknown last), and how often prompts come back."""

    total: StepSummary
    training_steps: tuple[StepSummary, ...]
    epochs_per_prompt: Spread


@dataclass(slots=True)
class _StepCounts:
    samples: Counter[int] = field(default_factory=Counter)  # by prompt key
    lengths: array[int] = field(default_factory=lambda: array("q"))
    rewards: array[float] = field(default_factory=lambda: array("d"))
    truncated: array[int] = field(default_factory=lambda: array("b"))


class LogStatistics:
    """Collect the figures of a log, one record at a time; a summary may be asked for at any point.

    Complexity: 17 bytes a record, and one counter for each prompt and training step.
    """

    def __init__(self) -> None:
        self._steps: defaultdict[int | None, _StepCounts] = defaultdict(_StepCounts)

    def add(self, record: LogRecord) -> None:
        """Count one record in.

        Args:
            record: a row of the log.

        Complexity: O(1).
        """
        rollout = record.rollout
        counts = self._steps[rollout.training_step]
        if rollout.reward is not None:
            counts.rewards.append(rollout.reward)
        if record.truncated is not None:
            counts.truncated.append(record.truncated)
        counts.samples[rollout.key] += 1
        counts.lengths.append(len(rollout.response_token_ids))  # last: Ctrl-C may strike between these lines

    def summary(self) -> LogSummary | None:
        """Return the figures so far.

        Returns:
            the summary; None while there is no record.

        Complexity: O(n log n) for n records.
        """
        known = sorted(step for step in self._steps if step is not None)
        order = [*known, None] if None in self._steps else known
        steps = [(step, self._steps[step]) for step in order if self._steps[step].lengths]
        if not steps:
            return None
        everything = [counts for _, counts in steps]
        total = _summary(None, everything, sum(sum(counts.lengths) for counts in everything))
        epochs = Counter(key for counts in everything for key in counts.samples)
        return LogSummary(
            total=total,
            training_steps=tuple(_summary(step, [counts], total.response_tokens.sum) for step, counts in steps),
            epochs_per_prompt=_spread(epochs.values()),
        )


def _summary(training_step: int | None, parts: list[_StepCounts], num_log_tokens: int) -> StepSummary:
    response_tokens = _response_tokens(np.concatenate([np.asarray(part.lengths) for part in parts]))
    return StepSummary(
        training_step=training_step,
        num_rollouts=sum(len(part.lengths) for part in parts),
        num_prompts=len(set().union(*(part.samples for part in parts))),
        samples_per_prompt=_spread([count for part in parts for count in part.samples.values()]),
        response_tokens=response_tokens,
        token_share=response_tokens.sum / num_log_tokens,
        reward_mean=_mean([part.rewards for part in parts]),
        truncated_share=_mean([part.truncated for part in parts]),
    )


def _response_tokens(lengths: np.ndarray[tuple[int], np.dtype[np.int64]]) -> ResponseTokens:
    p50, p90, p99 = (int(p) for p in np.percentile(lengths, (50, 90, 99), method="inverted_cdf"))
    total = int(lengths.sum())
    return ResponseTokens(sum=total, mean=total / len(lengths), p50=p50, p90=p90, p99=p99, max=int(lengths.max()))


def _spread(counts: Iterable[int]) -> Spread:
    values = list(counts)
    return Spread(mean=sum(values) / len(values), min=min(values), max=max(values))


def _mean(parts: list[array[float]] | list[array[int]]) -> float | None:
    num_values = sum(len(part) for part in parts)
    if not num_values:
        return None
    total = sum(sum(part) for part in parts)
    if math.isfinite(total):
        return total / num_values
    return float(sum(Fraction(value) for part in parts for value in part) / num_values)  # finite, as all values are
