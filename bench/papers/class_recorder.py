"""A class policy that remembers which class each request was in, and what was drafted for it there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

import das
from das.budget import FinishedRollouts, FloatArray, IntArray
from das.length_classes import LengthClass

NAMES = {LengthClass.SHORT: "Short", LengthClass.MEDIUM: "Medium", LengthClass.LONG: "Long"}


@dataclass(slots=True)
class _Request:
    """What is known of one request: its class at the start and now, tokens so far, and drafted tokens by class."""

    started: int
    ended: int
    num_tokens: int
    drafted: IntArray


class ClassRecorder:
    """`das.LengthClassBudget` at its defaults, with a record of every request.

    Attributes:
        requests: by request number. What was drafted in a request's last decode step is not in it.
    """

    def __init__(self) -> None:
        self._policy = das.LengthClassBudget()
        self.requests: dict[int, _Request] = {}

    def budgets(self, requests: das.RunningRequests) -> tuple[IntArray, FloatArray]:
        """Caps and prices of the policy."""
        found = self._policy.budgets(requests)
        numbers, lengths = requests.request_numbers, requests.num_response_tokens
        classes = self._policy.classes.classes(numbers, requests.prompt_keys, lengths)
        rows = (numbers, classes, lengths, requests.num_drafted_tokens)
        for number, its_class, length, drafted in zip(*(row.tolist() for row in rows), strict=True):
            known = self.requests.setdefault(number, _Request(its_class, its_class, 0, np.zeros(len(NAMES), np.int64)))
            known.drafted[known.ended] += drafted - known.drafted.sum()
            known.ended, known.num_tokens = its_class, length
        return found

    def observe(self, drafted: IntArray, accepted: IntArray, *, step_ms: float | None = None) -> None:
        """Take note of verified drafts."""
        self._policy.observe(drafted, accepted, step_ms=step_ms)

    def observe_finished(self, finished: FinishedRollouts) -> None:
        """Learn from the lengths of finished rollouts."""
        self._policy.observe_finished(finished)

    def state(self) -> dict[str, object]:
        """Return what the policy learned."""
        return self._policy.state()

    def load_state(self, state: dict[str, object]) -> None:
        """Replace what the policy learned."""
        self._policy.load_state(state)

    def __repr__(self) -> str:
        return f"ClassRecorder({self._policy!r})"


@dataclass(frozen=True, slots=True)
class ClassShares:
    """What classes did, as shares of requests or of drafted tokens.

    Args:
        started, ended: of requests, by their class at first and at last.
        drafted: of drafted tokens, by the class that their request was in.
        upgraded: of requests, that ended in a longer class than they started in.
        longest_started_long, longest_ended_long: of the longest fifth of requests.
    """

    started: dict[str, float]
    ended: dict[str, float]
    drafted: dict[str, float]
    upgraded: float
    longest_started_long: float
    longest_ended_long: float


def summary(recorders: Sequence[ClassRecorder]) -> ClassShares:
    """Return the shares over all requests of some policies, at least one. O(requests)."""
    requests = [request for recorder in recorders for request in recorder.requests.values()]
    started, ended, lengths = (
        np.array(column) for column in zip(*((r.started, r.ended, r.num_tokens) for r in requests), strict=True)
    )
    drafted = sum(request.drafted for request in requests)
    is_longest = lengths >= np.quantile(lengths, 0.8)
    return ClassShares(
        started={name: float((started == its_class).mean()) for its_class, name in NAMES.items()},
        ended={name: float((ended == its_class).mean()) for its_class, name in NAMES.items()},
        drafted={name: float(drafted[its_class] / max(1, drafted.sum())) for its_class, name in NAMES.items()},
        upgraded=float((ended > started).mean()),
        longest_started_long=float((started[is_longest] == LengthClass.LONG).mean()),
        longest_ended_long=float((ended[is_longest] == LengthClass.LONG).mean()),
    )
