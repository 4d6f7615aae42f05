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

from das.checked_values import check_int, check_state, checked_number

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
KeyArray = npt.NDArray[np.uint64]
_INT64, _FLOAT64 = np.dtype(np.int64), np.dtype(np.float64)
_REQUEST_ARRAYS = dict.fromkeys(
    (
        "num_response_tokens",
        "request_numbers",
        "num_prompt_tokens",
        "num_decode_steps",
        "num_drafted_tokens",
        "num_accepted_tokens",
        "num_emitted_tokens",
    ),
    np.dtype(np.int64),
) | {"prompt_keys": np.dtype(np.uint64)}


@dataclass(frozen=True, slots=True)
class RunningRequests:
    """What a policy is told about the requests of one decode step, as arrays with one entry a request.

    Args:
        request_numbers: which request each is, int64: unique to it, in order of start.
        prompt_keys: which prompt each answers, uint64.
        num_prompt_tokens, num_response_tokens: lengths so far, int64.
        num_decode_steps, num_drafted_tokens, num_accepted_tokens, num_emitted_tokens: the request's so far, int64.
        num_running: requests in the engine's batch now, at least as many as there are entries.
        num_waiting: requests that wait for a place in the batch.

    Raises:
        TypeError: something else than an array of that dtype. ValueError: its values do not lie in one row, one after
        another, or are not one a request; or a number is out of range.
    """

    request_numbers: IntArray
    prompt_keys: KeyArray
    num_prompt_tokens: IntArray
    num_response_tokens: IntArray
    num_decode_steps: IntArray
    num_drafted_tokens: IntArray
    num_accepted_tokens: IntArray
    num_emitted_tokens: IntArray
    num_running: int
    num_waiting: int = 0

    def __post_init__(self) -> None:
        lengths = self.num_response_tokens
        num_requests = len(lengths) if isinstance(lengths, np.ndarray) and lengths.ndim else 0
        for name, dtype in _REQUEST_ARRAYS.items():
            _check_request_array(getattr(self, name), name, dtype, num_requests=num_requests)
        for name in ("num_running", "num_waiting"):
            check_int(getattr(self, name), name, below=1 << 62)
        if self.num_running < num_requests:
            raise ValueError(
                f"num_running is {self.num_running}; it must be at least the number of entries, {num_requests}"
            )

    def __len__(self) -> int:
        return len(self.num_response_tokens)


class DescribedRequests(RunningRequests):
    """What a drafter tells of its requests: made in each decode step, of arrays that need no check."""

    __slots__ = ()

    def __post_init__(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class FinishedRollouts:
    """Rollouts that entered the history, as arrays with one entry a rollout, in order of their arrival.

    Args:
        prompt_keys: which prompt each answers, uint64.
        num_response_tokens: their lengths, int64.
        num_decode_steps, num_drafted_tokens, num_accepted_tokens, num_emitted_tokens: of the request that generated
            it, int64; all 0 where no request of this drafter did.
    """

    prompt_keys: KeyArray
    num_response_tokens: IntArray
    num_decode_steps: IntArray
    num_drafted_tokens: IntArray
    num_accepted_tokens: IntArray
    num_emitted_tokens: IntArray

    def __len__(self) -> int:
        return len(self.num_response_tokens)


def finished_rollouts(rows: Sequence[Sequence[int]]) -> FinishedRollouts:
    """Return rows of (prompt key, response tokens, decode steps, drafted, accepted, emitted) as arrays."""
    if not rows:
        return _NONE_FINISHED
    keys, *figures = zip(*rows, strict=True)
    return FinishedRollouts(np.array(keys, np.uint64), *(np.array(column, np.int64) for column in figures))


_NONE_FINISHED = FinishedRollouts(np.empty(0, np.uint64), *[np.empty(0, np.int64) for _ in range(5)])


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


def same_caps(num_requests: int, cap: int) -> IntArray:
    """Return one cap for all, int64. Half the time of `np.full`, which counts where one request runs. O(requests)."""
    caps = np.empty(num_requests, np.int64)
    caps.fill(cap)
    return caps


def same_prices(num_requests: int, price: float) -> FloatArray:
    """Return one price for all, float64, as `same_caps`."""
    prices = np.empty(num_requests, np.float64)
    prices.fill(price)
    return prices


class BudgetPolicy(Protocol):
    """The methods `plan_step` calls. Nothing to inherit from. What they raise, `plan_step` raises.

    A policy may have two more. `choose_width`, as `ThroughputBudget` has it, is for engines that verify one width for
    all. `observe_finished(finished: FinishedRollouts)` hears which rollouts entered the history since the last step.
    """

    def budgets(self, requests: RunningRequests) -> tuple[IntArray, FloatArray]:
        """Return how far each request may draft in this decode step, and from which chance on.

        Args:
            requests: those that draft, in the order of `plan_step`'s request_ids.

        Returns:
            caps (int64, 0 to 64 draft tokens) and prices (float64, >= 0), one entry a request: drafting goes on while
            all tokens of the draft together are accepted with at least the price as probability. Above 1: no draft.
        """
        ...

    def observe(self, drafted: IntArray, accepted: IntArray, *, step_ms: float | None = None) -> None:
        """Take note of what was verified since the last call, before `budgets` is asked.

        Args:
            drafted, accepted: tokens (int64), one entry a request and decode step that has ended, in the order in which
                the drafter heard of them (`Drafter.extend`); 0 <= accepted <= drafted. Empty: only the time is new.
            step_ms: what the last decode step took; None: not measured. It may be no sensible time (NaN, negative).
        """
        ...

    def state(self) -> dict[str, Any]:
        """Return what was learned as plain values that JSON can hold, for `das.save_state`."""
        ...

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from what `state` of such a policy returned.

        Raises:
            TypeError, ValueError: it is no such state; nothing has changed then.
        """
        ...


class StatelessPolicy:
    """What policies have in common that learn nothing which outlives running requests."""

    __slots__ = ()

    def observe(self, drafted: IntArray, accepted: IntArray, *, step_ms: float | None = None) -> None:
        """Take note of verified drafts: `budgets` sees each request's own counters, so nothing is. Never raises."""

    def state(self) -> dict[str, Any]:
        """Return what was learned: nothing."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Accept the state of such a policy, which is empty. Raises TypeError: no mapping."""
        check_state(state)


class _ConstantBudget(StatelessPolicy):
    """The same cap and price for every request, whatever happens."""

    __slots__ = ("max_draft_tokens", "min_survival")

    def __init__(self, max_draft_tokens: int, min_survival: float) -> None:
        self.max_draft_tokens = max_draft_tokens
        self.min_survival = min_survival

    def budgets(self, requests: RunningRequests) -> tuple[IntArray, FloatArray]:
        """Return caps (int64, tokens) and prices (float64), one entry a request. Never raises. O(requests)."""
        return same_caps(len(requests), self.max_draft_tokens), same_prices(len(requests), self.min_survival)

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
        super().__init__(check_draft_length(max_draft_tokens), 0.0)


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
        super().__init__(check_draft_length(max_draft_tokens), check_min_survival(min_survival))


class NoDraft(_ConstantBudget):
    """Draft nothing: the baseline, and the off switch. Nothing is looked up either."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(0, math.inf)


def _check_request_array(values: Any, name: str, dtype: np.dtype[Any], *, num_requests: int) -> None:
    found = f"of {values.dtype}" if isinstance(values, np.ndarray) else type(values).__name__
    if not isinstance(values, np.ndarray) or values.dtype != dtype:
        raise TypeError(f"{name} must be an array of {dtype}, not {found}")
    if values.shape != (num_requests,):
        raise ValueError(f"{name} has shape {values.shape}; it must be {(num_requests,)}, one entry a request")
    if not values.flags.c_contiguous:
        raise ValueError(f"{name} has strides {values.strides}; its entries must follow each other in memory")


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
            raise TypeError(f"{name}[{position}] is {value!r}, of type {type(value).__name__}; it must hold {plural}")
    try:
        return np.array(values, dtype)
    except OverflowError:
        raise ValueError(f"{name} holds {max(values, key=abs)}, which is out of range") from None


def check_draft_length(num_tokens: int, name: str = "max_draft_tokens") -> int:
    if isinstance(num_tokens, bool) or not isinstance(num_tokens, int):
        raise TypeError(f"{name} must be an int, not {type(num_tokens).__name__}")
    if not 0 <= num_tokens <= 64:
        raise ValueError(f"{name} is {num_tokens}; it must be 0 <= {name} <= 64")
    return num_tokens


def check_min_survival(min_survival: float) -> float:
    number = checked_number(min_survival, "min_survival")
    if not 0.0 <= number <= 1.0:
        raise ValueError(f"min_survival is {min_survival}; it must be 0 <= min_survival <= 1")
    return number
