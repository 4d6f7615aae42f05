"""Counters and the only formulas for acceptance numbers.

Two lengths are in use in the field and differ as soon as some decode steps draft nothing; a mean over requests differs
from a ratio of sums. Each number here says which it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass, fields


@dataclass(frozen=True, slots=True)
class AcceptanceCounters:
    """Sums over decode steps, of one request or of many.

    Args:
        num_decode_steps: target forwards of a request, with or without a draft.
        num_verification_steps: decode steps that carried at least one draft token.
        num_drafted_tokens: draft tokens the engine verified.
        num_accepted_tokens: draft tokens accepted; the bonus token of each step excluded.
        num_emitted_tokens: tokens generated, bonus included.
    """

    num_decode_steps: int = 0
    num_verification_steps: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    num_emitted_tokens: int = 0

    def __add__(self, other: AcceptanceCounters) -> AcceptanceCounters:
        return AcceptanceCounters(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: AcceptanceCounters) -> AcceptanceCounters:
        return AcceptanceCounters(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))

    @property
    def draft_acceptance_rate(self) -> float:
        """Sum accepted / sum drafted; 0 where nothing was drafted."""
        return _ratio(self.num_accepted_tokens, self.num_drafted_tokens)

    @property
    def mean_acceptance_length(self) -> float:
        """1 + sum accepted / sum verification steps: vLLM's definition, steps without a draft left out."""
        return 1.0 + _ratio(self.num_accepted_tokens, self.num_verification_steps)

    @property
    def tokens_per_decode_step(self) -> float:
        """Sum emitted / sum decode steps: SGLang's and slime's accept length, all steps counted."""
        return _ratio(self.num_emitted_tokens, self.num_decode_steps)

    @property
    def drafted_per_decode_step(self) -> float:
        """Sum drafted / sum decode steps."""
        return _ratio(self.num_drafted_tokens, self.num_decode_steps)


_NEEDS_DRAFTS = ("draft_acceptance_rate", "mean_acceptance_length")  # a request that never drafted has neither
METRIC_NAMES = ("draft_acceptance_rate", "mean_acceptance_length", "tokens_per_decode_step", "drafted_per_decode_step")


def summarise(requests: Iterable[AcceptanceCounters]) -> dict[str, float | int]:
    """Return sums, token-weighted metrics, and `request_mean_...`: each metric's plain mean over requests.

    A request that never decoded is left out of the request means; one that never drafted is left out of the means of
    the acceptance rate and the acceptance length, which it does not have.

    Args:
        requests: the counters of each, as `Drafter.finish` returns them.

    Never raises. Complexity: O(requests).
    """
    per_request = [counters for counters in requests if counters.num_decode_steps]
    total = sum(per_request, AcceptanceCounters())
    summary: dict[str, float | int] = {field.name: getattr(total, field.name) for field in fields(total)}
    for name in METRIC_NAMES:
        values = [getattr(c, name) for c in per_request if _has(c, name)]
        summary[name] = getattr(total, name)
        summary[f"request_mean_{name}"] = _ratio(sum(values), len(values))
    return summary


class RequestMeans:
    """The request means of `summarise`, of requests that finish one by one, without keeping any."""

    __slots__ = ("_num_requests", "_sums")

    def __init__(self) -> None:
        self._sums = dict.fromkeys(METRIC_NAMES, 0.0)
        self._num_requests = dict.fromkeys(METRIC_NAMES, 0)

    def add(self, counters: AcceptanceCounters) -> None:
        """Count a request that finished. O(1)."""
        if counters.num_decode_steps:
            for name in METRIC_NAMES:
                if _has(counters, name):
                    self._sums[name] += getattr(counters, name)
                    self._num_requests[name] += 1

    def means(self) -> dict[str, float]:
        """Return each metric's mean, by `request_mean_` and its name; 0 where no request has it."""
        return {f"request_mean_{name}": _ratio(self._sums[name], self._num_requests[name]) for name in METRIC_NAMES}


def _has(counters: AcceptanceCounters, name: str) -> bool:
    return bool(counters.num_verification_steps) or name not in _NEEDS_DRAFTS


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else 0.0
