"""The length-aware price: a pass is worth most to the requests that end last, since they decide when the batch ends.

`ThroughputBudget` spreads what a pass costs evenly over the requests in it. That is right while there is always another
request to take a place that becomes free. A batch that must end as a whole takes as many passes as its last request:
the expected number falls by one for each decode step less that a request needs, times the probability that it is the
last one. So that probability is the request's share of the pass, and the rest is the same break-even price.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from das._chances import LOOKS, chances_to_be_largest, shares, smooth
from das.budget import FinishedRollouts, FloatArray, RunningRequests
from das.checked_values import check_state, checked_number
from das.latency import LatencyEstimator, LatencyModel
from das.length_grid import LENGTH_EDGES
from das.lengths import LengthModel
from das.throughput_budget import ThroughputBudget, even_share

_HORIZONS = 2.0 ** np.arange(2.0, 17.5, 0.5)  # decode steps from now
_START_STEPS = 20.0  # decode steps of usual speed that a request counts as before its own
_CALLS_KEPT = 16  # decode steps between looks at the lengths, which change slowly
_TIMES_SMOOTHED = 2  # blurs by some 35 % of the horizon: how fast a request will get on is as little known
_STARTS = np.array([0.125, 0.375, 0.625, 0.875])  # of requests that wait, as parts of the time until none does


class LengthAwareBudget(ThroughputBudget):
    """Draft while one more token costs less than it brings to the makespan: `ThroughputBudget` that knows of lengths.

    A request's price is `T / (share c_base / c_tok + 1 + D)`, where its share of a pass is the probability that it ends
    last, by the lengths of finished rollouts (`das.lengths`), how far it has got and how fast it gets on; mixed with
    1 / running, as lengths are hard to foresee. Requests that wait for a place compete for the end of the batch, too;
    as far as one of them will end last, every running request counts alike, because each frees a place. Where nothing
    is known of lengths, or only one request runs, this is `ThroughputBudget`.

    Args:
        latency, max_draft_tokens: as `ThroughputBudget`.
        length_weight: of the probability to end last against 1 / running, 0 <= length_weight <= 1; 0 ignores lengths.
        lengths: with what was learned, or other settings; no other policy may teach it. None: LengthModel().

    Attributes:
        tokens_per_decode_step, drafted_per_decode_step: T and D, running means as in `ThroughputBudget`.
        lengths: as of now.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, or out of range.

    Source: the makespan problem of DAS (arXiv 2511.13841, Eq. 5 and 6) with random lengths: by the envelope theorem the
    expected maximum changes by P(i is the maximum) times the change of i.
    """

    __slots__ = ("_chances", "_has_new_rollouts", "_num_calls", "_numbers", "length_weight", "lengths")

    def __init__(
        self,
        *,
        latency: LatencyModel | LatencyEstimator | None = None,
        max_draft_tokens: int = 16,
        length_weight: float = 0.5,
        lengths: LengthModel | None = None,
    ) -> None:
        super().__init__(latency=latency, max_draft_tokens=max_draft_tokens)
        self.length_weight = checked_number(length_weight, "length_weight")
        if not 0.0 <= self.length_weight <= 1.0:
            raise ValueError(f"length_weight is {length_weight}; it must be 0 <= length_weight <= 1")
        if lengths is not None and not isinstance(lengths, LengthModel):
            raise TypeError(f"lengths must be a LengthModel, not {type(lengths).__name__}")
        self.lengths = LengthModel() if lengths is None else lengths
        self._has_new_rollouts = True  # since running requests were noted
        self._forget_chances()

    def observe_finished(self, finished: FinishedRollouts) -> None:
        """Learn from the lengths of finished rollouts. O(rollouts), some 0.3 us each."""
        self.lengths.observe_finished(finished.prompt_keys, finished.num_response_tokens)
        self._has_new_rollouts = True

    def state(self) -> dict[str, Any]:
        """Return what was learned: as `ThroughputBudget`, and the state of `lengths`.

        The latter holds numpy arrays, which JSON does not: `das.save_state` saves them.
        """
        return super().state() | {"lengths": self.lengths.state()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Replace what was learned by `state`; what a ThroughputBudget saved leaves lengths as they are.

        Raises:
            as `ThroughputBudget.load_state` and `LengthModel.load_state`. Nothing changes then.
        """
        before = super().state()
        super().load_state(state)
        if "lengths" in state:
            try:
                check_state(state["lengths"], "lengths")
                self.lengths.load_state(state["lengths"])
            except BaseException:
                super().load_state(before)
                raise
        self._has_new_rollouts = True
        self._forget_chances()

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, length_weight={self.length_weight:g})"

    def _base_shares(self, requests: RunningRequests) -> FloatArray | float:
        even = even_share(requests)
        if self.length_weight == 0.0 or len(requests) < 2:
            return even
        if self._num_calls % _CALLS_KEPT == 0:
            if self._has_new_rollouts and len(requests) == requests.num_running:
                self.lengths.observe_running(requests.num_response_tokens)
                self._has_new_rollouts = False
            self._note(requests, self._chances_of_ending_last(requests))
        self._num_calls += 1
        return shares(self._numbers, self._chances, requests.request_numbers, even, self.length_weight)

    def _note(self, requests: RunningRequests, chances: FloatArray) -> None:
        order = np.argsort(requests.request_numbers)
        self._numbers, self._chances = requests.request_numbers[order], chances[order]

    def _chances_of_ending_last(self, requests: RunningRequests) -> FloatArray:
        """Return each request's chance, with its part of the chance that one that waits ends last; the sum is 1."""
        forecast = self.lengths.forecast(requests.prompt_keys, requests.num_response_tokens)
        usual = self.tokens_per_decode_step
        speeds = (requests.num_emitted_tokens + _START_STEPS * usual) / (requests.num_decode_steps + _START_STEPS)
        going_on = forecast.remaining_survival(speeds[:, None] * _HORIZONS)
        smooth(going_on, _TIMES_SMOOTHED)
        waiting = np.zeros((len(LOOKS), len(_HORIZONS) + 1))
        if requests.num_waiting:
            left = float((forecast.expected_remaining_tokens() / speeds).sum())
            waiting = self._waiting_ended(requests.num_waiting, len(requests), left)
        chances = chances_to_be_largest(1.0 - going_on, waiting)
        rest = max(0.0, 1.0 - float(chances.sum()))
        return chances + rest / len(requests)

    def _waiting_ended(self, num_waiting: int, num_running: int, running_steps: float) -> FloatArray:
        """Return the logarithm of the probability that all which wait have ended, at each look at each stretch of time.

        They start at even distances in the time that the places need for what runs and waits now.
        """
        survival, usual = self.lengths.survival_at_edges(), self.tokens_per_decode_step
        mean_tokens = float(((survival[1:] + survival[:-1]) / 2 * np.diff(LENGTH_EDGES)).sum())
        drained = (running_steps + max(0, num_waiting - num_running) * mean_tokens / usual) / num_running
        tokens = usual * (_HORIZONS - drained * _STARTS[:, None])
        going_on = np.interp(tokens, LENGTH_EDGES, survival)
        smooth(going_on, _TIMES_SMOOTHED)
        edges = np.zeros((len(_STARTS), len(_HORIZONS) + 2))
        edges[:, 1:-1], edges[:, -1] = 1.0 - going_on, 1.0
        looks = [np.maximum(edges[:, :-1] * (1.0 - look) + edges[:, 1:] * look, 1e-12) for look in LOOKS]
        return np.array([num_waiting / len(_STARTS) * np.log(look).sum(axis=0) for look in looks])

    def _forget_chances(self) -> None:
        self._num_calls = 0
        self._numbers, self._chances = np.zeros(0, np.int64), np.zeros(0)
