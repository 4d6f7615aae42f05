"""The break-even price: draft while one more token costs less than it brings, at the batch that runs now."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from das.budget import FloatArray, IntArray, RunningRequests, check_draft_length, same_caps, same_prices
from das.checked_values import check_state, checked_number
from das.latency import DEFAULT_LATENCY, LatencyEstimator, LatencyModel


class ThroughputBudget:
    """Draft while one more token costs less than it brings, at the batch that runs now: a price that tunes itself.

    With T emitted and D drafted tokens per decode step a token costs (c_base / running + c_tok (1 + D)) / T now, and a
    draft token, at c_tok, is worth its survival times that. So `min_survival = T / (c_base / (c_tok running) + 1 + D)`.
    c_base stands for all that a pass costs whatever is drafted: c_base, c_engine, c_kv for the context. The price falls
    as requests end, so the longest rollouts draft most. It stays at or below 1: predictions are asked for, and teach
    what acceptance to expect, also while none is worth drafting.

    T and D are means over past decode steps, each weighing 0.998 of the next one, from 1.5 and 1.

    Args:
        latency: a LatencyModel is kept as it is. A LatencyEstimator learns from `step_ms`; give every rank of a
            tensor-parallel engine the same times, or their drafts differ. None: an estimator that starts from c_base /
            c_tok = 200 tokens, see `das.latency.DEFAULT_LATENCY`.
        max_draft_tokens: 0..64.

    Attributes:
        tokens_per_decode_step, drafted_per_decode_step: T and D.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, or out of range.

    Source: break-even form of the makespan problem in DAS (arXiv 2511.13841, Eq. 1, 5 and 6), one token at a time.
    """

    __slots__ = (
        "_latency",
        "_open_step",
        "_open_width",
        "drafted_per_decode_step",
        "max_draft_tokens",
        "tokens_per_decode_step",
    )

    def __init__(self, *, latency: LatencyModel | LatencyEstimator | None = None, max_draft_tokens: int = 16) -> None:
        if latency is not None and not isinstance(latency, (LatencyModel, LatencyEstimator)):
            raise TypeError(f"latency must be a LatencyModel or a LatencyEstimator, not {type(latency).__name__}")
        self.max_draft_tokens = check_draft_length(max_draft_tokens)
        self._latency = LatencyEstimator(DEFAULT_LATENCY) if latency is None else latency
        self.tokens_per_decode_step = 1.5
        self.drafted_per_decode_step = 1.0
        self._open_step: tuple[int, int] | None = None  # requests, and tokens of their context; None: not the batch
        self._open_width: int | None = None  # what each request is padded to; None: not at all

    @property
    def latency(self) -> LatencyModel:
        """The latency model as of now."""
        return self._latency if isinstance(self._latency, LatencyModel) else self._latency.latency

    def budgets(self, requests: RunningRequests) -> tuple[IntArray, FloatArray]:
        """Return caps (int64, tokens) and prices (float64), one entry a request. Never raises. O(requests)."""
        num_requests = len(requests)
        latency = self.latency
        num_context_tokens = 0
        is_learning = isinstance(self._latency, LatencyEstimator)
        self._open_width = None
        if is_learning or latency.c_kv_ms > 0:
            num_context_tokens = _context_tokens(requests)
        if is_learning:
            is_whole = 0 < num_requests == requests.num_running
            self._open_step = (num_requests, num_context_tokens) if is_whole else None
        num_running = max(1, requests.num_running)
        base_ms = latency.step_ms(0, num_context_tokens=num_context_tokens / max(1, num_requests) * num_running)
        tokens_ms = latency.c_tok_ms * (1.0 + self.drafted_per_decode_step)
        shares = self._base_shares(requests)
        cost_ms = base_ms * shares + tokens_ms  # of what a request emits in a step
        price = self.tokens_per_decode_step * latency.c_tok_ms / cost_ms
        # numpy takes a microsecond for each operation, and one number needs none of them
        prices = same_prices(num_requests, min(1.0, price)) if isinstance(shares, float) else np.minimum(1.0, price)
        return same_caps(num_requests, self.max_draft_tokens), prices

    def choose_width(self, requests: RunningRequests, expected_accepted: Sequence[float], widths: Sequence[int]) -> int:
        """Return the verify width at which an emitted token is expected to cost least; of equals the smallest.

        A pass at width w takes `c_base + c_tok running (1 + w)`, whatever is padding, and emits a token a request and
        what is accepted of the first w draft tokens. Requests that run beside the ones given count like these.

        Args:
            requests: as `budgets` was asked about last.
            expected_accepted: how many of them should accept their draft token j, for each j: sums of survival.
            widths: in ascending order, tokens a request; at least one.

        Never raises. Complexity: O(widths + tokens).
        """
        num_requests, num_running = max(1, len(requests)), max(1, requests.num_running)
        num_context_tokens = _context_tokens(requests) * num_running // num_requests

        def cost_ms(width: int) -> float:
            pass_ms: float = self.latency.step_ms(num_running * (1 + width), num_context_tokens=num_context_tokens)
            return pass_ms / (1.0 + sum(expected_accepted[:width]) / num_requests)

        self._open_width = min(widths, key=cost_ms)
        return self._open_width

    def observe(self, drafted: IntArray, accepted: IntArray, *, step_ms: float | None = None) -> None:
        """Learn from decode steps, as if told of one after the other.

        Args:
            drafted, accepted: tokens of each decode step, in the order in which they ended.
            step_ms: of the pass that verified them; None: not measured. A latency estimator learns from it where the
                steps are those of the whole batch that `budgets` was last asked about.

        Raises:
            ValueError: drafted and accepted differ in length. Nothing changes then.

        Complexity: O(steps), vectorised: 256 of them in some microseconds.
        """
        num_steps = len(drafted)
        if len(accepted) != num_steps:
            raise ValueError(f"drafted has {num_steps} entries, accepted {len(accepted)}; they describe the same steps")
        if num_steps:
            weights = _USUAL_WEIGHTS[-num_steps:] if num_steps <= len(_USUAL_WEIGHTS) else _weights(num_steps)
            keep = (1.0 - _RATE) ** num_steps
            self.tokens_per_decode_step = (
                keep * self.tokens_per_decode_step + float(np.dot(weights, accepted)) + (1.0 - keep)
            )
            self.drafted_per_decode_step = keep * self.drafted_per_decode_step + float(np.dot(weights, drafted))
        if step_ms is not None and isinstance(self._latency, LatencyEstimator):
            if self._open_step is not None and self._open_step[0] == num_steps:
                padded = self._open_width
                num_drafted = int(np.sum(drafted)) if padded is None else num_steps * padded
                self._latency.observe(num_steps + num_drafted, self._open_step[1], step_ms)
            self._open_step = None

    def state(self) -> dict[str, Any]:
        """Return what was learned, as plain numbers: the running means, and the state of a latency estimator.

        `das.save_state` saves it, and so does JSON.
        """
        means = {name: getattr(self, name) for name in ("tokens_per_decode_step", "drafted_per_decode_step")}
        return means | ({"latency": self._latency.state()} if isinstance(self._latency, LatencyEstimator) else {})

    def load_state(self, state: dict[str, Any]) -> None:
        """Replace what was learned by `state`. What a policy with a fixed latency saved leaves an estimator as it is.

        Raises:
            KeyError: a mean is missing. TypeError, ValueError: no mapping; a mean is no number or out of range; as
            `LatencyEstimator.load_state`. Nothing changes then.
        """
        check_state(state)
        tokens = _mean(state["tokens_per_decode_step"], "tokens_per_decode_step", least=1.0)
        drafted = _mean(state["drafted_per_decode_step"], "drafted_per_decode_step", least=0.0)
        if "latency" in state and isinstance(self._latency, LatencyEstimator):
            check_state(state["latency"], "latency")
            self._latency.load_state(state["latency"])
        self.tokens_per_decode_step, self.drafted_per_decode_step = tokens, drafted
        self._open_step = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}(latency={self.latency}, max_draft_tokens={self.max_draft_tokens})"

    def _base_shares(self, requests: RunningRequests) -> FloatArray | float:
        """Return which share of a pass each request saves by needing one decode step less; a number: all the same."""
        return even_share(requests)


def even_share(requests: RunningRequests) -> float:
    """Return 1 / running: a request's share of a pass while another always waits for the place that it leaves."""
    return 1.0 / max(1, requests.num_running)


def _context_tokens(requests: RunningRequests) -> int:
    return int(np.add.reduce(requests.num_prompt_tokens) + np.add.reduce(requests.num_response_tokens))


_RATE = 0.002  # of the running means, each decode step of each request; not tuned


def _weights(num_steps: int) -> FloatArray:
    """Return the weight of each of so many steps in a running mean: that of the last is the rate."""
    return _RATE * (1.0 - _RATE) ** np.arange(num_steps - 1, -1, -1.0)


_USUAL_WEIGHTS = _weights(1024)


def _mean(value: Any, name: str, *, least: float) -> float:
    mean = checked_number(value, name)
    if not least <= mean < math.inf:
        raise ValueError(f"{name} is {value}; it must be {least:g} <= {name} < infinity")
    return mean
