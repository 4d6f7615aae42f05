"""Budget policies: how many tokens each request may draft, and at which price.

A policy is a small object with `budgets(requests) -> (caps, prices)`, `observe(...)`, `state()` and `load_state(...)`.
The cap limits a draft's length; the price is the survival probability below which one more draft token costs more than
it brings. A policy knows lengths and counts, never a tree.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from das.latency import DEFAULT_LATENCY, LatencyEstimator, LatencyModel

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
_INT64, _FLOAT64 = np.dtype(np.int64), np.dtype(np.float64)


@dataclass(frozen=True, slots=True)
class RunningRequests:
    """What a policy is told about the requests of one decode step, as arrays with one entry a request.

    Args:
        num_prompt_tokens, num_response_tokens: lengths so far, int64.
        prompt_keys: which prompt each answers, uint64.
        num_running: requests in the engine's batch now, at least as many as there are entries.
    """

    num_prompt_tokens: IntArray
    num_response_tokens: IntArray
    prompt_keys: npt.NDArray[np.uint64]
    num_running: int

    def __len__(self) -> int:
        return len(self.num_response_tokens)


def caps_array(caps: Any, *, num_requests: int) -> IntArray:
    """Return the caps that a policy gave, as int64: one int a request, its range not yet checked.

    Raises:
        TypeError: not a sequence of ints (a bool or a float is none). ValueError: not one a request.

    Complexity: O(1) for an int64 array, which is returned as it is.
    """
    return _one_a_request(caps, "max_draft_tokens", _INT64, (int, np.integer), "ints", num_requests)


def prices_array(prices: Any, *, num_requests: int) -> FloatArray:
    """Return the prices that a policy gave, as float64: one number a request, NaN included. Else as `caps_array`."""
    numbers = (int, float, np.integer, np.floating)
    return _one_a_request(prices, "min_survival", _FLOAT64, numbers, "numbers", num_requests)


class BudgetPolicy(Protocol):
    """The methods `plan_step` calls. Nothing to inherit from.

    A policy may have `choose_width`, too, as `ThroughputBudget` has it: for engines that verify one width for all.
    """

    def budgets(self, requests: RunningRequests) -> tuple[IntArray, FloatArray]: ...
    def observe(self, drafted: IntArray, accepted: IntArray, *, step_ms: float | None = None) -> None: ...
    def state(self) -> dict[str, Any]: ...
    def load_state(self, state: dict[str, Any]) -> None: ...


class _ConstantBudget:
    """The same cap and price for every request, whatever happens."""

    __slots__ = ("max_draft_tokens", "min_survival")

    def __init__(self, max_draft_tokens: int, min_survival: float) -> None:
        self.max_draft_tokens = max_draft_tokens
        self.min_survival = min_survival

    def budgets(self, requests: RunningRequests) -> tuple[IntArray, FloatArray]:
        """Return caps (int64, tokens) and prices (float64), one entry a request. Never raises. O(requests)."""
        shape = len(requests)
        return np.full(shape, self.max_draft_tokens, np.int64), np.full(shape, self.min_survival, np.float64)

    def observe(self, drafted: IntArray, accepted: IntArray, *, step_ms: float | None = None) -> None:
        """Take note of verified drafts; a constant budget learns nothing from them. Never raises."""

    def state(self) -> dict[str, Any]:
        """Return what was learned: nothing."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Accept the state of a constant budget, which is empty."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}(max_draft_tokens={self.max_draft_tokens}, min_survival={self.min_survival:g})"


class FixedBudget(_ConstantBudget):
    """Draft up to a fixed number of tokens wherever the text offers a continuation.

    Args:
        max_draft_tokens: 0..64.

    Raises:
        TypeError, ValueError: not an int, or out of range.
    """

    __slots__ = ()

    def __init__(self, max_draft_tokens: int = 8) -> None:
        super().__init__(_draft_length(max_draft_tokens), 0.0)


class UnlimitedBudget(FixedBudget):
    """Draft as far as the text reaches, up to `max_draft_tokens`: the budget-agnostic baseline of the DAS paper."""

    __slots__ = ()

    def __init__(self, *, max_draft_tokens: int = 16) -> None:
        super().__init__(max_draft_tokens)


class PriceBudget(_ConstantBudget):
    """Draft while the survival probability is at least `min_survival`.

    Args:
        min_survival: 0 <= min_survival <= 1.
        max_draft_tokens: 0..64.

    Raises:
        TypeError, ValueError: wrong type, or out of range.
    """

    __slots__ = ()

    def __init__(self, *, min_survival: float = 0.15, max_draft_tokens: int = 16) -> None:
        if isinstance(min_survival, bool) or not isinstance(min_survival, (int, float)):
            raise TypeError(f"min_survival must be a number, not {type(min_survival).__name__}")
        if not 0.0 <= min_survival <= 1.0:
            raise ValueError(f"min_survival is {min_survival}; it must be 0 <= min_survival <= 1")
        super().__init__(_draft_length(max_draft_tokens), float(min_survival))


class NoDraft(_ConstantBudget):
    """Draft nothing: the baseline, and the off switch. Nothing is looked up either."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(0, math.inf)


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
        self.max_draft_tokens = _draft_length(max_draft_tokens)
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
            num_context_tokens = int(requests.num_prompt_tokens.sum() + requests.num_response_tokens.sum())
        if is_learning:
            is_whole = 0 < num_requests == requests.num_running
            self._open_step = (num_requests, num_context_tokens) if is_whole else None
        price = self._price(latency, max(1, requests.num_running), num_context_tokens / max(1, num_requests))
        return np.full(num_requests, self.max_draft_tokens, np.int64), np.full(num_requests, price, np.float64)

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
        num_context_tokens = int(requests.num_prompt_tokens.sum() + requests.num_response_tokens.sum())
        num_context_tokens = num_context_tokens * num_running // num_requests

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
        """Return what was learned, as plain numbers: the running means, and the state of a latency estimator."""
        means = {name: getattr(self, name) for name in ("tokens_per_decode_step", "drafted_per_decode_step")}
        return means | ({"latency": self._latency.state()} if isinstance(self._latency, LatencyEstimator) else {})

    def load_state(self, state: dict[str, Any]) -> None:
        """Replace what was learned by `state`. What a policy with a fixed latency saved leaves an estimator as it is.

        Raises:
            KeyError: a mean is missing. TypeError, ValueError: a mean is no number or out of range; as
            `LatencyEstimator.load_state`. Nothing changes then.
        """
        tokens = _mean(state["tokens_per_decode_step"], "tokens_per_decode_step", least=1.0)
        drafted = _mean(state["drafted_per_decode_step"], "drafted_per_decode_step", least=0.0)
        if "latency" in state and isinstance(self._latency, LatencyEstimator):
            self._latency.load_state(state["latency"])
        self.tokens_per_decode_step, self.drafted_per_decode_step = tokens, drafted
        self._open_step = None

    def __repr__(self) -> str:
        return f"ThroughputBudget(latency={self.latency}, max_draft_tokens={self.max_draft_tokens})"

    def _price(self, latency: LatencyModel, num_running: int, mean_context_tokens: float) -> float:
        num_context_tokens = mean_context_tokens * num_running
        fixed_ms = latency.step_ms(0, num_context_tokens=num_context_tokens)
        tokens_ms = latency.c_tok_ms * num_running
        cost_ms: float = fixed_ms + tokens_ms * (1.0 + self.drafted_per_decode_step)
        return min(1.0, self.tokens_per_decode_step * tokens_ms / cost_ms)


_RATE = 0.002  # of the running means, each decode step of each request; not tuned


def _weights(num_steps: int) -> FloatArray:
    """Return the weight of each of so many steps in a running mean: that of the last is the rate."""
    return _RATE * (1.0 - _RATE) ** np.arange(num_steps - 1, -1, -1.0)


_USUAL_WEIGHTS = _weights(1024)


def _mean(value: Any, name: str, *, least: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, not {type(value).__name__}")
    if not least <= value < math.inf:
        raise ValueError(f"{name} is {value}; it must be {least:g} <= {name} < infinity")
    return float(value)


def _one_a_request(
    values: Any, name: str, dtype: np.dtype[Any], types: tuple[type, ...], plural: str, num_requests: int
) -> npt.NDArray[Any]:
    if not isinstance(values, np.ndarray) or values.dtype != dtype or values.ndim != 1:
        values = _checked_array(values, name, dtype, types, plural)
    if len(values) != num_requests:
        raise ValueError(f"{name} has {len(values)} entries; it must have {num_requests}, one a request")
    return np.ascontiguousarray(values)


def _checked_array(
    values: Any, name: str, dtype: np.dtype[Any], types: tuple[type, ...], plural: str
) -> npt.NDArray[Any]:
    """Read what is no array of that dtype value by value: numpy would cast floats, text and truth values silently."""
    if hasattr(values, "__array__"):
        values = np.asarray(values)
        if values.ndim != 1:
            raise ValueError(f"{name} has {values.ndim} dimensions; it must have one, with an entry a request")
        values = values.tolist()
    elif isinstance(values, (str, bytes, Set, Mapping)) or not isinstance(values, Iterable):
        raise TypeError(f"{name} must be a sequence of {plural}, one a request, not {type(values).__name__}")
    values = list(values)
    for position, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, types):
            raise TypeError(f"{name}[{position}] is {value!r}, a {type(value).__name__}; it must hold {plural}")
    try:
        return np.array(values, dtype)
    except OverflowError:
        raise ValueError(f"{name} holds {max(values, key=abs)}, which is out of range") from None


def _draft_length(max_draft_tokens: int) -> int:
    if isinstance(max_draft_tokens, bool) or not isinstance(max_draft_tokens, int):
        raise TypeError(f"max_draft_tokens must be an int, not {type(max_draft_tokens).__name__}")
    if not 0 <= max_draft_tokens <= 64:
        raise ValueError(f"max_draft_tokens is {max_draft_tokens}; it must be 0 <= max_draft_tokens <= 64")
    return max_draft_tokens
