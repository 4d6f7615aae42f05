"""How long a forward pass takes: the model, its fit to measured steps, and an estimate that follows the running engine.

A pass over n tokens takes t = c_base + c_tok n milliseconds (DAS, arXiv 2511.13841, Eq. 1), here with two optional
terms: c_kv for each token of context that is read, and c_engine for each pass of an engine in which speculation is on.
Errors are relative throughout, so that short passes count as much as long ones.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from das.checked_values import check_state, checked_number, checked_numbers

FloatArray = npt.NDArray[np.float64]
Numbers = Sequence[float] | npt.NDArray[Any]
_Vector = list[float]  # of the three fitted terms: base, token, token of context
_Matrix = list[list[float]]

_MOST_TOKENS = 1 << 48
_LEAST_MS, _MOST_MS = 1e-6, 1e9
_COEFFICIENTS = ("c_base_ms", "c_tok_ms", "c_kv_ms", "c_engine_ms")
_PAIRS = ((0, 1), (0, 2), (1, 2))
_SINGULAR = 1e-10  # determinant of a matrix with diagonal 1 whose terms cannot be told apart
_COUNTS = ("num_observed", "num_ignored", "num_outliers")
_RECENT_STEPS = 64
_USUAL_DEVIATION = math.log(2.0)  # no step that is off by less than a factor of two is an outlier
_LEAST_STEPS = 8  # before so many steps nothing is an outlier
_LEANING = 0.01  # weight of the start: of a step that is off by 100 %


def _coefficient(value: Any, name: str) -> float:
    number = checked_number(value, name)
    if not 0 <= number <= _MOST_MS:
        raise ValueError(f"{name} is {value}; it must be 0 <= {name} <= {_MOST_MS:g}")
    return number


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyModel:
    """Milliseconds of one forward pass, as a linear function of the tokens it computes.

    Args:
        c_base_ms: of every pass, mostly reading the weights.
        c_tok_ms: of every token computed: one a request, and its draft tokens.
        c_kv_ms: of every token of context, summed over the batch.
        c_engine_ms: of every pass once speculation is switched on, whether or not anything is drafted.

    Raises:
        TypeError, ValueError: not a number, not 0 <= value <= 1e9, or c_base_ms and c_tok_ms both 0.
    """

    c_base_ms: float
    c_tok_ms: float
    c_kv_ms: float = 0.0
    c_engine_ms: float = 0.0

    def __post_init__(self) -> None:
        for name in _COEFFICIENTS:
            object.__setattr__(self, name, _coefficient(getattr(self, name), name))
        if self.c_base_ms == self.c_tok_ms == 0:
            raise ValueError("c_base_ms and c_tok_ms are both 0; one must be greater, or no pass takes any time")

    def step_ms(self, num_tokens: Any, *, num_context_tokens: Any = 0, speculating: bool = True) -> Any:
        """Return the time of a pass.

        Args:
            num_tokens: computed in the pass, one a request and its draft tokens; a number or an array.
            num_context_tokens: that these read, summed over the batch; a number or an array.
            speculating: whether speculation is switched on in the engine.

        Returns:
            milliseconds, float or float64 array. Never raises for numbers. O(numbers).
        """
        base_ms = self.c_base_ms + (self.c_engine_ms if speculating else 0.0)
        return base_ms + self.c_tok_ms * num_tokens + self.c_kv_ms * num_context_tokens

    def speedup(
        self,
        num_running: int,
        *,
        tokens_per_decode_step: float,
        drafted_per_decode_step: float,
        num_context_tokens: float = 0,
    ) -> float:
        """Return time per token without speculation / with it: at 1 or less the engine is better off without.

        Args:
            num_running: requests in the batch, at least 1.
            tokens_per_decode_step: emitted per request and step, at least 1.
            drafted_per_decode_step: drafted per request and step, at least 0.
            num_context_tokens: of the whole batch.

        Returns:
            a positive number; c_engine_ms is paid only with speculation. O(1).

        Raises:
            ValueError: an argument is out of range.
        """
        least = {"num_running": 1, "tokens_per_decode_step": 1, "drafted_per_decode_step": 0, "num_context_tokens": 0}
        values = (num_running, tokens_per_decode_step, drafted_per_decode_step, num_context_tokens)
        for (name, at_least), value in zip(least.items(), values, strict=True):
            if not at_least <= value < math.inf:
                raise ValueError(f"{name} is {value}; it must be {at_least} <= {name} < infinity")
        num_tokens = num_running * (1 + drafted_per_decode_step)
        without_ms = self.step_ms(num_running, num_context_tokens=num_context_tokens, speculating=False)
        with_ms = self.step_ms(num_tokens, num_context_tokens=num_context_tokens)
        return float(tokens_per_decode_step * without_ms / with_ms)


DEFAULT_LATENCY = LatencyModel(c_base_ms=5.0, c_tok_ms=0.025)
"""Where nothing was measured. Budgets read only the ratio, 200 tokens: the three public sweeps of 7B, 8B and 14B models
on an A100 give 197 to 200, and DAS's Fig. 8 (7B on an H100) about 300."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyFit:
    """A fitted model, and how far its predictions are from the steps that it was fitted to.

    Args:
        latency: the model.
        num_steps: that it was fitted to.
        mean_relative_error, median_relative_error, p90_relative_error: of |predicted - measured| / measured; 0.05: 5 %.
    """

    latency: LatencyModel
    num_steps: int
    mean_relative_error: float
    median_relative_error: float
    p90_relative_error: float


def fit_latency(num_tokens: Numbers, step_ms: Numbers, *, num_context_tokens: Numbers | None = None) -> LatencyFit:
    """Fit the model to measured passes: least squares of relative errors, no coefficient below 0.

    c_engine_ms stays 0: steps measured with speculation on have it in their c_base_ms.

    Args:
        num_tokens: computed in each pass, greater than 0.
        step_ms: of each pass, greater than 0.
        num_context_tokens: of each pass, at least 0, summed over its batch. None: c_kv_ms stays 0.

    Returns:
        the model and its errors.

    Raises:
        ValueError: lengths differ, a number out of range (its position is named), or fewer than two different
            num_tokens: base and token cannot be told apart then; or nothing but the context seems to take time.

    Complexity: O(steps).
    """
    tokens, times = _measured(num_tokens, "num_tokens"), _measured(step_ms, "step_ms")
    context = None if num_context_tokens is None else _measured(num_context_tokens, "num_context_tokens", least=0.0)
    if len(tokens) != len(times) or (context is not None and len(context) != len(times)):
        raise ValueError("num_tokens, step_ms and num_context_tokens differ in length; they describe the same steps")
    if len(tokens) == 0 or tokens.min() == tokens.max():
        raise ValueError("num_tokens holds fewer than two different values; base and token cannot be told apart then")
    known_context = np.zeros(len(times)) if context is None else context  # a term of zeros is left out
    rows = np.stack([np.ones(len(times)), tokens, known_context]) / times
    base, tok, kv = _least_non_negative((rows @ rows.T).tolist(), rows.sum(axis=1).tolist())
    if base == tok == 0:
        raise ValueError("step_ms depends on num_context_tokens alone; a model needs base or token, so fit without it")
    latency = LatencyModel(c_base_ms=base, c_tok_ms=tok, c_kv_ms=kv)
    predicted = latency.step_ms(tokens, num_context_tokens=known_context)
    errors = np.abs(predicted - times) / times
    return LatencyFit(
        latency=latency,
        num_steps=len(times),
        mean_relative_error=float(errors.mean()),
        median_relative_error=float(np.median(errors)),
        p90_relative_error=float(np.quantile(errors, 0.9)),
    )


class LatencyEstimator:
    """A latency model that follows the steps of a running engine: recursive least squares with forgetting.

    What a step says fades over `memory_steps` steps. Coefficients are never negative, and what steps do not tell (base
    and token apart, where all have the same size) stays in proportion to the model it started from. A time that is not
    a positive finite number is left out and counted; so is one that is off by more than a factor of two, and by more
    than six median deviations, from what the last 64 steps make usual. A lasting change is usual after half of those.

    Args:
        start: the model before the first step, and what estimates lean to: at least a nanosecond for a pass of one
            token. Its c_engine_ms is not estimated but stays.
        memory_steps: at least 1.

    Attributes:
        latency: the model as of now.
        num_observed, num_outliers, num_ignored: steps learned from, unusual ones, and those with a number out of range.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, or out of range.

    Source: exponentially weighted recursive least squares in information form (Ljung, System Identification, 11.2);
    sums of products instead of an inverse, so that nothing drifts.
    """

    __slots__ = (
        "_gram",
        "_moment",
        "_recent",
        "_start",
        "latency",
        "memory_steps",
        "num_ignored",
        "num_observed",
        "num_outliers",
    )

    def __init__(self, start: LatencyModel = DEFAULT_LATENCY, *, memory_steps: int = 1000) -> None:
        if not isinstance(start, LatencyModel):
            raise TypeError(f"start must be a LatencyModel, not {type(start).__name__}")
        if start.step_ms(1, speculating=False) < _LEAST_MS:
            raise ValueError(f"start is {start}; it must take at least {_LEAST_MS:g} ms for a pass of one token")
        if isinstance(memory_steps, bool) or not isinstance(memory_steps, int):
            raise TypeError(f"memory_steps must be an int, not {type(memory_steps).__name__}")
        if memory_steps < 1:
            raise ValueError(f"memory_steps is {memory_steps}; it must be at least 1")
        self._start = start
        self.memory_steps = memory_steps
        self._gram: _Matrix = [[0.0] * 3 for _ in range(3)]  # decayed sums of products of relative rows
        self._moment: _Vector = [0.0] * 3
        self._recent: deque[float] = deque(maxlen=_RECENT_STEPS)  # log(measured / predicted before it was seen)
        self.latency = start
        self.num_observed = self.num_ignored = self.num_outliers = 0

    def observe(self, num_tokens: float, num_context_tokens: float, step_ms: float) -> None:
        """Learn from one step.

        Args:
            num_tokens: computed in the pass; at least 1.
            num_context_tokens: read in it, summed over the batch; 0: not known.
            step_ms: what it took, speculation switched on.

        Never raises for numbers: where one is out of range or not finite, the step is counted in `num_ignored`.

        Complexity: O(1), 20 to 60 us.
        """
        time_ms = step_ms - self._start.c_engine_ms
        is_plausible = (
            1 <= num_tokens < _MOST_TOKENS
            and 0 <= num_context_tokens < _MOST_TOKENS
            and _LEAST_MS <= time_ms <= _MOST_MS
        )
        if not is_plausible:  # NaN included
            self.num_ignored += 1
            return
        num_tokens, num_context_tokens, time_ms = float(num_tokens), float(num_context_tokens), float(time_ms)
        predicted_ms = self.latency.step_ms(num_tokens, num_context_tokens=num_context_tokens, speculating=False)
        predicted_ms = max(predicted_ms, _LEAST_MS)
        deviation = math.log(time_ms / predicted_ms)
        is_outlier = self._is_outlier(deviation)
        self._recent.append(deviation)
        if is_outlier:
            self.num_outliers += 1
            return
        self.num_observed += 1
        # A clock that says almost 0 must not weigh infinitely.
        weight = 1.0 / max(time_ms, 0.5 * predicted_ms)
        row = (weight, num_tokens * weight, num_context_tokens * weight)
        keep = 1.0 - 1.0 / self.memory_steps
        for i in range(3):
            self._moment[i] = keep * self._moment[i] + row[i] * time_ms * weight
            for j in range(3):
                self._gram[i][j] = keep * self._gram[i][j] + row[i] * row[j]
        self.latency = self._estimate()

    def prediction_error(self) -> tuple[float, float]:
        """Return (median, p90) of |predicted - measured| / measured over the last 64 steps; (0, 0) before the first.

        Each step was predicted before it was seen; outliers are included. O(1).
        """
        errors = sorted(abs(math.expm1(-deviation)) for deviation in self._recent)
        if not errors:
            return 0.0, 0.0
        return errors[(len(errors) - 1) // 2], errors[-(-9 * len(errors) // 10) - 1]

    def state(self) -> dict[str, Any]:
        """Return what was learned, as plain numbers and lists. The start and the memory are settings, not in it."""
        return {
            "gram": [list(row) for row in self._gram],
            "moment": list(self._moment),
            "recent": list(self._recent),
            **{name: getattr(self, name) for name in _COUNTS},
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Replace what was learned by `state`.

        Raises:
            KeyError: a part is missing. TypeError: no mapping, or something else than numbers. ValueError: wrong shape,
            negative or not finite, or sums that do not belong together. Nothing changes then.
        """
        check_state(state)
        gram = _numbers(state["gram"], "gram", (3, 3), least=0.0)
        moment = _numbers(state["moment"], "moment", (3,), least=0.0)
        recent = _numbers(state["recent"], "recent", (None,))
        counts = {name: int(_numbers(state[name], name, (), least=0.0)) for name in _COUNTS}
        if ((gram.diagonal() > 0) != (moment > 0)).any() or (moment[0] > 0) != (moment[1] > 0):
            raise ValueError("gram and moment do not belong together: one tells of steps that the other has not seen")
        before = self._gram, self._moment
        self._gram, self._moment = gram.tolist(), moment.tolist()
        try:
            latency = self._estimate() if self._moment[0] > 0 else self._start
        except BaseException as error:
            self._gram, self._moment = before
            if isinstance(error, (ValueError, ArithmeticError)):
                raise ValueError(f"gram and moment fit no latency model: {error}") from None
            raise
        self.latency = latency
        self._recent = deque(recent.tolist(), maxlen=_RECENT_STEPS)
        for name, count in counts.items():
            setattr(self, name, count)

    def __repr__(self) -> str:
        return f"LatencyEstimator({self.latency!r}, memory_steps={self.memory_steps})"

    def _is_outlier(self, deviation: float) -> bool:
        if len(self._recent) < _LEAST_STEPS:
            return False
        usual = _median(self._recent)
        if abs(deviation - usual) <= _USUAL_DEVIATION:
            return False
        return abs(deviation - usual) > 6.0 * _median([abs(recent - usual) for recent in self._recent])

    def _estimate(self) -> LatencyModel:
        """Solve the sums, leaning to the start at the level of what was measured.

        The start's proportions are kept with the weight of `_LEANING` steps of 100 % error: enough to decide what the
        steps leave open, nothing against what they say.
        """
        start = [self._start.c_base_ms, self._start.c_tok_ms, self._start.c_kv_ms]
        level = _dot(start, self._moment) / _dot(start, [_dot(row, start) for row in self._gram])
        base, tok, kv = (level * c for c in start)
        tok_scale = max(tok, base / 1000.0)  # how far a term may be expected from where it starts
        scales = [max(base, tok), tok_scale, max(kv, tok_scale / 2000.0)]
        gram = [[scales[i] * scales[j] * self._gram[i][j] + _LEANING * (i == j) for j in range(3)] for i in range(3)]
        moment = [scales[i] * self._moment[i] + _LEANING * level * start[i] / scales[i] for i in range(3)]
        found = [scale * c for scale, c in zip(scales, _least_non_negative(gram, moment), strict=True)]
        base, tok, kv = (min(c, _MOST_MS) for c in found)
        if base + tok < _LEAST_MS:
            base = _LEAST_MS  # only context seems to cost anything: no model, but no reason to fail either
        return LatencyModel(c_base_ms=base, c_tok_ms=tok, c_kv_ms=kv, c_engine_ms=self._start.c_engine_ms)


def _least_non_negative(gram: _Matrix, moment: _Vector) -> _Vector:
    """Return the x >= 0 that minimises x'Gx - 2m'x for three terms: the best non-negative solution of any of them.

    The optimum solves the equations of the terms that are not 0 in it (Lawson and Hanson 1974, ch. 23); three terms
    have few enough subsets to try all. Those whose terms cannot be told apart are left out; a term of zeros gets 0.
    """
    scales = [math.sqrt(gram[i][i]) or 1.0 for i in range(3)]
    m = [moment[i] / scales[i] for i in range(3)]
    a, b, c = (gram[i][j] / (scales[i] * scales[j]) for i, j in _PAIRS)  # the diagonal is 1 now
    determinant = 1.0 + 2.0 * a * b * c - a * a - b * b - c * c
    best = [0.0, 0.0, 0.0]
    if determinant > _SINGULAR:
        best = [
            ((1 - c * c) * m[0] + (b * c - a) * m[1] + (a * c - b) * m[2]) / determinant,
            ((b * c - a) * m[0] + (1 - b * b) * m[1] + (a * b - c) * m[2]) / determinant,
            ((a * c - b) * m[0] + (a * b - c) * m[1] + (1 - a * a) * m[2]) / determinant,
        ]
    if determinant <= _SINGULAR or min(best) < 0:
        best_value = 0.0
        for solution in _solutions_of_two_or_one(m, (a, b, c)):
            value = _dot(solution, m)
            if min(solution) >= 0 and value > best_value * (1 + 1e-9):  # of equals, the first
                best, best_value = solution, value
    return [x / scale for x, scale in zip(best, scales, strict=True)]


def _solutions_of_two_or_one(m: _Vector, off_diagonal: tuple[float, float, float]) -> Iterator[_Vector]:
    """Return what solves the equations of each pair of terms, and of each term alone; the others are 0."""
    for (i, j), product in zip(_PAIRS, off_diagonal, strict=True):
        determinant = 1.0 - product * product
        if determinant > _SINGULAR:
            solution = [0.0, 0.0, 0.0]
            solution[i] = (m[i] - product * m[j]) / determinant
            solution[j] = (m[j] - product * m[i]) / determinant
            yield solution
    yield from ([m[i] if i == j else 0.0 for i in range(3)] for j in range(3))


def _dot(one: Sequence[float], other: Sequence[float]) -> float:
    return one[0] * other[0] + one[1] * other[1] + one[2] * other[2]


def _median(values: Sequence[float] | deque[float]) -> float:
    return sorted(values)[len(values) // 2]


def _measured(values: Numbers, name: str, *, least: float | None = None) -> FloatArray:
    """Return measurements as an array: greater than 0, or at least `least`."""
    array = np.asarray(values, np.float64)
    if array.ndim != 1:
        raise ValueError(f"{name} has {array.ndim} dimensions; it must have 1")
    good = np.isfinite(array) & (array > 0 if least is None else array >= least)
    if not good.all():
        position = int(np.argmin(good))
        rule = "greater than 0" if least is None else f"at least {least:g}"
        raise ValueError(f"{name}[{position}] is {array[position]}; it must be finite and {rule}")
    return array


def _numbers(values: Any, name: str, shape: tuple[int | None, ...], *, least: float = -math.inf) -> FloatArray:
    """Return part of a state as an array of that shape."""
    array = checked_numbers(values, name, shape=shape)
    if not (np.isfinite(array).all() and (array >= least).all()):
        raise ValueError(f"{name} holds a negative or non-finite number")
    return array
