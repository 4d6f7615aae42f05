"""How long rollouts get: what finished ones say about how much a running one has left.

Lengths are counted in the bins of `das.length_grid`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from das._length_counts import LengthCounts, longer_than_each, tokens_beyond_each
from das.checked_values import check_state, checked_number
from das.length_grid import (
    EDGES,
    MIDDLES,
    NUM_BINS,
    WIDTHS,
    FloatArray,
    IntArray,
    bins_reached,
    length_exceeded_by,
    longer_than,
    within_grid,
)

KeyArray = npt.NDArray[np.uint64]
_Bytes = npt.NDArray[np.uint8]

_LONGEST = int(EDGES[-1])  # beyond it, an int64 may not hold what a uint64 does
_START_TOKENS = 1024.0  # mean length of the unseen rollout before any has ended


class LengthForecast:
    """What is known of the final lengths of running requests, as of one decode step. Made by `LengthModel.forecast`.

    All methods are probabilities or expectations given that the request has got as far as it has and still runs.

    Attributes:
        num_response_tokens: of each request so far, int64 [requests], within the grid.
    """

    __slots__ = ("_above", "_reached", "num_response_tokens")

    def __init__(self, so_far: IntArray, above: FloatArray) -> None:
        self.num_response_tokens = so_far
        # Rollouts longer than each edge: of the request's prompt, and of all at the weight they have beside them.
        self._above = above
        self._reached = self._longer_than(so_far)  # of these, that got so far

    def __len__(self) -> int:
        return len(self.num_response_tokens)

    def survival_at_edges(self) -> FloatArray:
        """Return the probability that each final length exceeds each of LENGTH_EDGES, float64 [requests, 77].

        1 up to the tokens a request has, never rising, 0 at the last edge. O(result), about 50 us for 256 requests.
        """
        survival = self._above / self._reached[:, None]
        return np.minimum(survival, 1.0, out=survival)

    def remaining_distribution(self) -> FloatArray:
        """Return the probability of each bin of final lengths, float64 [requests, 76]; rows sum to 1. O(result)."""
        survival = self.survival_at_edges()
        return survival[:, :-1] - survival[:, 1:]

    def survival(self, num_tokens: Any) -> FloatArray:
        """Return the probability that each final length exceeds `num_tokens`.

        Args:
            num_tokens: a number, or an array with one entry a request; 1 is returned for what has been reached.

        Returns:
            float64 [requests]. Never raises for finite numbers. O(requests).
        """
        at = np.maximum(num_tokens, self.num_response_tokens)
        return self._longer_than(at) / self._reached

    def remaining_survival(self, num_more_tokens: Any) -> FloatArray:
        """Return the probability that each request goes on for more than so many tokens.

        Args:
            num_more_tokens: horizons, [horizons].

        Returns:
            float64 [requests, horizons]; 1 for horizons of 0 and less. Never raises for finite numbers. O(result).
        """
        more = np.maximum(np.asarray(num_more_tokens, np.float64), 0.0)
        at: FloatArray = np.add(self.num_response_tokens[:, None], more, dtype=np.float64)
        return longer_than_each(self._above, at) / self._reached[:, None]

    def expected_remaining_tokens(self) -> FloatArray:
        """Return how many tokens each request is expected to emit yet, float64 [requests], >= 1.

        The sum of P(length > x) over all whole x from the tokens so far on. O(requests x bins).
        """
        return tokens_beyond_each(self._above, self.num_response_tokens) / self._reached + 0.5

    def quantile(self, probability: float) -> FloatArray:
        """Return the final length that each request stays within with this probability.

        Args:
            probability: 0 < probability < 1.

        Returns:
            tokens, float64 [requests], more than the tokens so far.

        Raises:
            ValueError: a probability out of range.

        Complexity: O(requests x bins).
        """
        left_over = (1.0 - _checked_probability(probability)) * self._reached
        return length_exceeded_by(left_over, self._above)

    def _longer_than(self, at: npt.NDArray[Any]) -> FloatArray:
        """Return how many rollouts, of each request's prompt and overall, are longer than `at` [requests]."""
        return longer_than_each(self._above, at.astype(np.float64).reshape(-1, 1)).reshape(-1)


class LengthModel:
    """Learns the lengths of finished rollouts, per prompt and overall, and forecasts those of running requests.

    A prompt's histogram of its last rollouts is shrunk to that of the last rollouts of all prompts, which counts as
    `shrinkage_rollouts` more; a forecast is that distribution given that the request has got so far. The overall one
    contains one rollout that nobody has seen: with survival (1 + x / mean)^-2, whose expected remaining length is its
    mean and as much again as has passed. Its mean is that of the window, and 1,024 tokens before any rollout ended. So
    there is an answer from the first step on, and for requests longer than all before.

    **Rollouts that have not finished.** Short ones finish first. A request is compared only with what got as far as it
    did, so those that ended earlier do not bias it; what counts is the window as a whole. It lacks what still runs, but
    also drops the oldest first, in order of their ends: while training steps of one size follow one another, as many
    short rollouts of the oldest step are gone as have ended of the current one, and a window of whole steps is
    unbiased. Before it has been filled once, `observe_running` lets running requests count as rollouts longer than
    what they have (Kaplan-Meier).

    Args:
        window_rollouts: finished rollouts of all prompts that count, >= 1; at least those of a training step, or the
            window depends on where in the step it is looked at.
        prompt_window_rollouts: of one prompt, 1..255.
        max_prompts: prompts kept, those whose last rollout is longest ago go first. About 250 bytes each.
        shrinkage_rollouts: how many rollouts the overall histogram counts as beside the prompt's own, > 0.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, or out of range.

    Thread safety: none of its own; the policy that owns it is asked and told by one thread.

    Source: the length-aware budgets of DAS (arXiv 2511.13841, section 4.2.3), which names no estimator; Kaplan and
    Meier 1958 for running requests; Lomax 1954 for the tail.
    """

    def __init__(
        self,
        *,
        window_rollouts: int = 2048,
        prompt_window_rollouts: int = 32,
        max_prompts: int = 16384,
        shrinkage_rollouts: float = 16.0,
    ) -> None:
        self.window_rollouts = _setting(window_rollouts, "window_rollouts", most=1 << 24)
        self.prompt_window_rollouts = _setting(prompt_window_rollouts, "prompt_window_rollouts", most=255)
        self.max_prompts = _setting(max_prompts, "max_prompts", most=1 << 24)
        self.shrinkage_rollouts = _positive(shrinkage_rollouts, "shrinkage_rollouts")
        self._forget()

    def _forget(self) -> None:
        self._counts = LengthCounts(self.window_rollouts, self.prompt_window_rollouts, self.max_prompts)
        self._passing = np.zeros(NUM_BINS)  # running requests beyond each bin, and a share of those inside
        self._overall: FloatArray | None = None

    @property
    def num_rollouts(self) -> int:
        """Finished rollouts in the window."""
        return self._counts.num_rollouts

    @property
    def num_prompts(self) -> int:
        """Prompts kept."""
        return self._counts.num_prompts

    def observe_finished(self, prompt_keys: KeyArray, num_response_tokens: IntArray) -> None:
        """Learn from finished rollouts, in order of their ends.

        Args:
            prompt_keys: which prompt each answers, uint64.
            num_response_tokens: their lengths, int64. Those beyond the grid count as its last bin.

        Raises:
            TypeError, ValueError: not one-dimensional arrays of ints, or of different lengths. Nothing changes then.

        Complexity: O(rollouts x bins), some 0.3 us each.
        """
        keys, lengths = parallel_arrays(prompt_keys, num_response_tokens)
        self._counts.observe(_as_keys(keys), np.ascontiguousarray(np.minimum(lengths, _LONGEST), np.int64))
        self._overall = None

    def observe_running(self, num_response_tokens: IntArray) -> None:
        """Take note of all requests that run now, instead of those noted before. No effect once the window is full.

        To be told again after rollouts have ended: until then these count twice.

        Args:
            num_response_tokens: of each so far, int64.

        Raises:
            TypeError, ValueError: not a one-dimensional array of ints.

        Complexity: O(requests + bins).
        """
        so_far = within_grid(int_array(num_response_tokens, "num_response_tokens"))
        if self._is_full:
            return
        bins = bins_reached(so_far)
        reached = np.bincount(bins, minlength=NUM_BINS)
        inside = np.bincount(bins, (so_far - EDGES[bins]) / WIDTHS[bins], minlength=NUM_BINS)
        self._passing = np.asarray(len(so_far) - np.cumsum(reached) + inside, np.float64)
        self._overall = None

    def forecast(self, prompt_keys: KeyArray, num_response_tokens: IntArray) -> LengthForecast:
        """Return what is known of the final lengths of running requests.

        Args:
            prompt_keys: which prompt each answers, uint64.
            num_response_tokens: of each so far, int64; below 0 counts as 0, beyond the grid as its last bin's start.

        Raises:
            TypeError, ValueError: not one-dimensional arrays of ints, or of different lengths.

        Complexity: O(requests), about 30 us for 256.
        """
        keys, lengths = parallel_arrays(prompt_keys, num_response_tokens)
        so_far = within_grid(lengths)
        overall = self.shrinkage_rollouts * self._estimate()
        return LengthForecast(so_far, self._counts.of_prompts(_as_keys(keys), overall))

    def survival_at_edges(self) -> FloatArray:
        """Return the share of all rollouts longer than each of LENGTH_EDGES, float64 [77]: from 1 to 0, never rising.

        O(bins) after something was observed.
        """
        return self._estimate().copy()

    def quantile(self, probability: float) -> float:
        """Return the length, in tokens, that this share of all rollouts stays within. O(bins).

        Raises:
            ValueError: not 0 < probability < 1.
        """
        left_over = np.array([1.0 - _checked_probability(probability)])
        return float(length_exceeded_by(left_over, self._estimate()[None])[0])

    def prompt_rollouts_longer_than(self, num_tokens: FloatArray, *, prompt_keys: KeyArray) -> FloatArray:
        """Return how many of each prompt's last rollouts are longer than so many tokens; 0 of prompts not known.

        Args:
            num_tokens: >= 0, [thresholds].
            prompt_keys: uint64 [requests].

        Returns:
            float64 [requests, thresholds]; fractions, as lengths are known by their bin. O(result).
        """
        rows = self._counts.rows_of(_as_keys(int_array(prompt_keys, "prompt_keys", np.uint64)))
        return longer_than(np.asarray(num_tokens), self._counts.above, rows[:, None])

    def state(self) -> dict[str, Any]:
        """Return what was learned, as arrays: bins of the window, and of each prompt. Settings are not in it.

        Of the prompts in order of their last rollout: `prompt_keys` (uint64), `prompt_num_rollouts` (int64), and
        `prompt_bins` (uint8), those of one prompt after another, the oldest first. Running requests are not in it.
        """
        keys, counts, bins = self._counts.prompts()
        window = self._counts.window()
        return {"window": window, "prompt_keys": keys, "prompt_num_rollouts": counts, "prompt_bins": bins}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Replace what was learned by `state`; of more than the settings allow, what is latest.

        Raises:
            KeyError: a part is missing. TypeError, ValueError: no mapping, not arrays of ints, a bin that does not
            exist, a prompt named twice, or counts that do not fit. Nothing changes then.
        """
        check_state(state)
        keys = int_array(state["prompt_keys"], "prompt_keys", np.uint64)
        names = ("window", "prompt_num_rollouts", "prompt_bins")
        window, counts, bins = (int_array(state[name], name) for name in names)
        check_range(window, "window", below=NUM_BINS)
        check_range(bins, "prompt_bins", below=NUM_BINS)
        is_possible = (
            len(keys) == len(counts) and ((counts >= 1) & (counts <= len(bins))).all()
        )  # no sum overflows then
        if not is_possible or int(counts.sum()) != len(bins):
            raise ValueError("prompt_keys, prompt_num_rollouts and prompt_bins do not belong together")
        if len(np.unique(keys)) != len(keys):
            raise ValueError("prompt_keys names a prompt twice")
        of_prompts = _as_keys(np.repeat(keys, counts.astype(np.int64)))
        loaded = LengthCounts(self.window_rollouts, self.prompt_window_rollouts, self.max_prompts)
        loaded.load(window.astype(np.uint8), of_prompts, bins.astype(np.uint8))
        self._forget()
        self._counts = loaded

    def __repr__(self) -> str:
        settings = ("window_rollouts", "prompt_window_rollouts", "max_prompts", "shrinkage_rollouts")
        return f"LengthModel({', '.join(f'{name}={getattr(self, name):g}' for name in settings)})"

    @property
    def _is_full(self) -> bool:
        return self._counts.num_rollouts == self.window_rollouts

    def _estimate(self) -> FloatArray:
        """Return of all rollouts the share longer than each edge.

        It is a product over bins: of those that enter one, how many leave it.
        """
        if self._overall is None:
            histogram = self._counts.histogram
            mean = (_START_TOKENS + float(histogram @ MIDDLES)) / (1 + self._counts.num_rollouts)
            unseen = 1.0 / np.square(1.0 + EDGES / mean)
            unseen[-1] = 0.0
            ending = histogram + unseen[:-1] - unseen[1:]
            entering = np.cumsum(ending[::-1])[::-1]
            if not self._is_full:
                entering = entering + self._passing
            above = np.ones(NUM_BINS + 1)
            np.cumprod(1.0 - ending / entering, out=above[1:])
            self._overall = above
        return self._overall


def _checked_probability(probability: float) -> float:
    if not 0.0 < probability < 1.0:
        raise ValueError(f"probability is {probability}; it must be 0 < probability < 1")
    return probability


def parallel_arrays(prompt_keys: Any, num_response_tokens: Any) -> tuple[KeyArray, IntArray]:
    """Return keys and lengths, or raise TypeError or ValueError unless they are arrays of ints of one length."""
    keys = int_array(prompt_keys, "prompt_keys", np.uint64)
    lengths = int_array(num_response_tokens, "num_response_tokens")
    if len(keys) != len(lengths):
        raise ValueError(
            f"prompt_keys has {len(keys)} entries, num_response_tokens {len(lengths)}; they describe the same rollouts"
        )
    return keys, lengths


def _as_keys(keys: npt.NDArray[Any]) -> KeyArray:
    return np.ascontiguousarray(keys, np.uint64)


def int_array(values: Any, name: str, dtype: type[np.integer[Any]] = np.int64) -> npt.NDArray[Any]:
    """Return values as an array, of `dtype` where they are none yet.

    Raises:
        TypeError: not ints. ValueError: not one-dimensional, or beyond the dtype.
    """
    array = values if isinstance(values, np.ndarray) else np.array(values, object)  # keys beyond 2**63 stay ints
    if array.ndim != 1:
        raise ValueError(f"{name} has {array.ndim} dimensions; it must have one, with an entry a rollout")
    if array.dtype.kind in "iu":
        return array
    for value in array.tolist():
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
            raise TypeError(f"{name} holds {value!r}, of type {type(value).__name__}; it must hold ints")
    try:
        return array.astype(dtype)
    except OverflowError:
        raise ValueError(f"{name} holds an int beyond {np.dtype(dtype).name}") from None


def check_range(array: npt.NDArray[Any], name: str, *, below: int) -> None:
    """Raise ValueError unless all entries are 0 <= entry < below."""
    if len(array) and not 0 <= array.min() <= array.max() < below:
        raise ValueError(f"{name} holds {array.min()} to {array.max()}; it must be 0 <= entry < {below}")


def _setting(value: Any, name: str, *, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, not {type(value).__name__}")
    if not 1 <= value <= most:
        raise ValueError(f"{name} is {value}; it must be 1 <= {name} <= {most}")
    return value


def _positive(value: Any, name: str) -> float:
    number = checked_number(value, name)
    if not 0 < number < math.inf:
        raise ValueError(f"{name} is {value}; it must be 0 < {name} < infinity")
    return number
