"""How many draft tokens are accepted, as a curve of how many are drafted, and an estimate that follows the rollouts.

A rollout of l tokens for which p draft tokens are verified accepts A(p) = k l (1 - exp(-alpha p / l)) of them: at most
the share k, and of the first ones k alpha each (DAS, arXiv 2511.13841, Eq. 3).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from das.checked_values import check_int, check_state, checked_number, checked_numbers

Numbers = npt.ArrayLike
FloatArray = npt.NDArray[np.float64]

DEFAULT_K = 0.62
DEFAULT_ALPHA = 1.43
"""Where nothing was observed. Answers of a 3B model to the AMC problems, two RL checkpoints, 16 old answers a problem,
drafts of up to 1, 2, 4, 8, 16 and 32 tokens by frequency: these two fit what was drafted and accepted per token, (.62,
.37), (1.01, .48), (1.70, .56), (3.06, .60), (5.86, .62) and (11.6, .62), to .01. Other logs have another k (.45 to
.85) and nearly the same alpha (1.5 to 1.6, by das's own drafts), which is why alpha is held more firmly."""

_FIELDS = ("weight", "num_emitted_tokens", "num_drafted_tokens", "num_accepted_tokens")
_NUM_FIELDS = len(_FIELDS)
_LEAST_K, _MOST_K = 0.01, 1.0
_ALPHAS = np.geomspace(0.25, 8.0, 161)  # 2 % apart
_HALF_WEIGHT_TOKENS = 100.0  # a rollout of so many tokens tells half as much as a very long one
_COHORT_ROLLOUTS = 128
_NUM_BINS, _BINS_AN_OCTAVE, _FIRST_BIN = 16, 2, 4  # of drafted tokens per decode step: from 0.25 to 45
_LEAST_WEIGHT = 1e-6  # of a bin that still counts
_PROMPT_WEIGHT = 4.0  # rollouts that the curve of all prompts counts for in that of one
# Standard deviations: of one rollout's share around its prompt's curve, of the curve's form from the truth, of k and of
# log(alpha) from one log to another.
_ROLLOUT_SD, _FORM_SD, _K_SD, _LOG_ALPHA_SD = 0.1, 0.02, 0.2, 0.2


def decode_steps(draft_tokens: Numbers, *, lengths: Numbers, k: Numbers, alpha: Numbers) -> FloatArray:
    """Return how many decode steps rollouts take with these drafts: l - A(p), as each step emits a token of its own.

    Args:
        draft_tokens: p, at least 0, infinity included.
        lengths: l, at least 0. k: 0..1. alpha: greater than 0. Numbers, or arrays that go together.

    Returns:
        float64. Never raises for numbers. O(numbers).
    """
    drafted, emitted, share, speed = np.broadcast_arrays(
        *(np.asarray(part, np.float64) for part in (draft_tokens, lengths, k, alpha))
    )
    per_token = np.divide(drafted, emitted, out=np.zeros(drafted.shape), where=emitted > 0)
    steps: FloatArray = emitted * (1.0 - share + share * np.exp(-speed * per_token))  # l - A(p) would cancel
    return steps


class AcceptanceEstimator:
    """k and alpha as finished rollouts show them, for all prompts together and for each.

    What one rollout shows is a point of its curve, (drafted / length, accepted / length), and rollouts that are drafted
    for in the same way scatter across the curve, not along it: a predictable one takes fewer decode steps, so it drafts
    less and accepts more. So rollouts are first summed up, 128 that finish one after the other, and sums that drafted
    about as much per decode step again: each such point is a mean, and points differ because the policy drafted
    more or less. The curve of all prompts is the likeliest given these points and the start: k from everything, alpha
    only as far as drafts of different lengths were seen. A prompt's curve has the same alpha and its own k, the
    likeliest given its rollouts, among which the curve of all prompts counts for four (by that a prompt's next rollout
    is predicted best: mostly by 2 to 4 % better than by the curve of all, on three logs).

    Budgets by price pick likely tokens, so they accept more of few drafts than caps do. While only one price was seen
    the estimate cannot know that, and k comes out too high: by .15 and .24 on two logs, at a price of .5
    (`python -m bench.bench_curve`).

    Args:
        k, alpha: the start, 0.01..1 and 0.25..8.
        memory_rollouts: of the curve of all prompts: over so many, what was seen fades to 1 / e; at least 1.
        prompt_memory_rollouts: the same of a prompt's.
        max_prompts: that are remembered, the last ones; at least 1. Each takes about 200 bytes.

    Attributes:
        k, alpha: of all prompts, as of now; 0.01..1 and 0.25..8.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, or out of range.

    Source: Eq. 3 of DAS (arXiv 2511.13841), which leaves open how its parameters are found.
    """

    __slots__ = (
        "_alphas",
        "_bins",
        "_cohort",
        "_num_in_cohort",
        "_prompt_rows",
        "_prompt_sums",
        "_start",
        "alpha",
        "k",
        "max_prompts",
        "memory_rollouts",
        "prompt_memory_rollouts",
    )

    def __init__(
        self,
        *,
        k: float = DEFAULT_K,
        alpha: float = DEFAULT_ALPHA,
        memory_rollouts: int = 1000,
        prompt_memory_rollouts: int = 32,
        max_prompts: int = 65_536,
    ) -> None:
        self._start = _start(k, "k", _LEAST_K, _MOST_K), _start(alpha, "alpha", _ALPHAS[0], _ALPHAS[-1])
        self._alphas = np.union1d(_ALPHAS, self._start[1])
        self.memory_rollouts = _at_least_1(memory_rollouts, "memory_rollouts")
        self.prompt_memory_rollouts = _at_least_1(prompt_memory_rollouts, "prompt_memory_rollouts")
        self.max_prompts = _at_least_1(max_prompts, "max_prompts")
        self.k, self.alpha = self._start
        self._bins = np.zeros((_NUM_BINS, _NUM_FIELDS))  # decayed sums, by drafted tokens per decode step
        self._cohort = np.zeros(_NUM_FIELDS)  # sums of the rollouts since the last cohort was full
        self._num_in_cohort = 0
        self._prompt_rows: dict[int, int] = {}  # key -> row; the prompt seen last comes last
        self._prompt_sums = np.zeros((16, _NUM_FIELDS))  # row 0 stays 0: prompts that are not known

    def __len__(self) -> int:
        """Return how many prompts are remembered."""
        return len(self._prompt_rows)

    def observe(
        self,
        prompt_keys: Numbers,
        *,
        num_emitted_tokens: Numbers,
        num_drafted_tokens: Numbers,
        num_accepted_tokens: Numbers,
    ) -> None:
        """Learn from finished rollouts, in the order in which they ended.

        Args:
            prompt_keys, num_emitted_tokens, num_drafted_tokens, num_accepted_tokens: one entry a rollout, as
                `FinishedRollouts` has them. Rollouts without drafts, and counts that no rollout can have, are left out.

        Raises:
            ValueError: they differ in length. Nothing changes then.

        Complexity: O(rollouts), about 5 us each, and 0.1 ms a call.
        """
        keys = np.asarray(prompt_keys).tolist()
        sums, is_good = _sums(len(keys), num_emitted_tokens, num_drafted_tokens, num_accepted_tokens)
        if not is_good.any():
            return
        for position in np.flatnonzero(is_good).tolist():
            self._observe_one(keys[position], sums[position])
        self._fit()

    def estimate(
        self,
        prompt_keys: Numbers,
        *,
        num_emitted_tokens: Numbers | None = None,
        num_drafted_tokens: Numbers | None = None,
        num_accepted_tokens: Numbers | None = None,
    ) -> tuple[FloatArray, FloatArray]:
        """Return k and alpha of each prompt, or of each running request.

        Args:
            prompt_keys: one entry a request.
            num_emitted_tokens, num_drafted_tokens, num_accepted_tokens: of each request so far, as `RunningRequests`
                has them: each counts as one more rollout of its prompt, as far as it has come. None: they do not.

        Returns:
            (k, alpha), float64 arrays, 0.01..1 and 0.25..8; never NaN.

        Raises:
            ValueError: counts that are not one a request. TypeError: some counts are given and others not.

        Complexity: O(requests), about 0.1 ms for 256.
        """
        rows = self._prompt_rows
        keys = np.asarray(prompt_keys).tolist()
        sums = self._prompt_sums[[rows.get(key, 0) for key in keys]] if keys else np.zeros((0, _NUM_FIELDS))
        counts = num_emitted_tokens, num_drafted_tokens, num_accepted_tokens
        if any(count is not None for count in counts):
            if any(count is None for count in counts):
                raise TypeError("num_emitted_tokens, num_drafted_tokens and num_accepted_tokens go together")
            own, is_good = _sums(len(keys), *counts)  # type: ignore[arg-type]  # none of them is None
            sums = sums + np.where(is_good[:, None], own, 0.0)
        weights, emitted, drafted, accepted = sums.T
        emitted = np.where(emitted > 0, emitted, 1.0)  # the others are 0 where it is
        reached = -np.expm1(-self.alpha * drafted / emitted)
        of_k = (weights * reached * accepted / emitted + _PROMPT_WEIGHT * self.k) / (
            weights * reached * reached + _PROMPT_WEIGHT
        )
        return np.clip(of_k, _LEAST_K, _MOST_K), np.full(len(keys), self.alpha)

    def state(self) -> dict[str, Any]:
        """Return what was learned, as plain numbers and lists. The start and the memories are settings, not in it."""
        return {
            "bins": self._bins.tolist(),
            "cohort": self._cohort.tolist(),
            "num_in_cohort": self._num_in_cohort,
            "prompt_keys": list(self._prompt_rows),
            "prompts": self._prompt_sums[list(self._prompt_rows.values())].tolist() if self._prompt_rows else [],
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Replace what was learned by `state`. Of more than `max_prompts` prompts, those seen last are kept.

        Raises:
            KeyError: a part is missing. TypeError: no mapping, or something else than numbers. ValueError: a wrong
            shape, numbers that no rollouts add up to, or a key twice. Nothing changes then.
        """
        check_state(state)
        bins = _checked_sums(state["bins"], "bins", (_NUM_BINS, _NUM_FIELDS))
        cohort = _checked_sums(state["cohort"], "cohort", (_NUM_FIELDS,))
        num_in_cohort = state["num_in_cohort"]
        if isinstance(num_in_cohort, bool) or not isinstance(num_in_cohort, int) or not 0 <= num_in_cohort < 1 << 62:
            raise ValueError(f"num_in_cohort is {num_in_cohort!r}; it must be an int that is at least 0")
        if (num_in_cohort > 0) != (cohort[2] > 0):
            raise ValueError(f"num_in_cohort is {num_in_cohort}, which does not go with cohort, {cohort.tolist()}")
        if not isinstance(state["prompt_keys"], (list, tuple)):
            raise TypeError(f"prompt_keys must be a list, not {type(state['prompt_keys']).__name__}")
        for key in state["prompt_keys"]:
            check_int(key, "prompt_keys, an entry,", below=1 << 64)
        keys = [int(key) for key in state["prompt_keys"]]
        if len(set(keys)) != len(keys):
            raise ValueError("prompt_keys names a prompt twice")
        prompts = np.zeros((0, _NUM_FIELDS))
        if keys:
            prompts = _checked_sums(state["prompts"], "prompts", (len(keys), _NUM_FIELDS))
        elif not isinstance(state["prompts"], (list, tuple)) or state["prompts"]:
            raise ValueError("prompts is no empty list, though prompt_keys is; they describe the same prompts")
        keys, prompts = keys[-self.max_prompts :], prompts[-self.max_prompts :]
        self._bins, self._cohort, self._num_in_cohort = bins, cohort, num_in_cohort
        self._prompt_rows = {key: row for row, key in enumerate(keys, start=1)}
        self._prompt_sums = np.concatenate([np.zeros((1, _NUM_FIELDS)), prompts, np.zeros((16, _NUM_FIELDS))])
        self._fit()

    def __repr__(self) -> str:
        return f"AcceptanceEstimator(k={self.k:.3g}, alpha={self.alpha:.3g}, {len(self)} prompts)"

    def _observe_one(self, key: int, sums: FloatArray) -> None:
        row = self._row(key)
        self._prompt_sums[row] = (1.0 - 1.0 / self.prompt_memory_rollouts) * self._prompt_sums[row] + sums
        self._cohort += sums
        self._num_in_cohort += 1
        if self._num_in_cohort < _COHORT_ROLLOUTS:
            return
        self._bins *= (1.0 - 1.0 / self.memory_rollouts) ** self._num_in_cohort
        self._bins[self._bins[:, 0] < _LEAST_WEIGHT] = 0.0
        self._bins[self._bin_of_cohort()] += self._cohort
        self._cohort[:] = 0.0
        self._num_in_cohort = 0

    def _bin_of_cohort(self) -> int:
        _, emitted, drafted, accepted = self._cohort.tolist()
        octaves = math.log2(drafted / max(1.0, emitted - accepted))
        return min(max(0, int(_BINS_AN_OCTAVE * octaves + _FIRST_BIN)), _NUM_BINS - 1)

    def _row(self, key: int) -> int:
        """Return the prompt's row, a new one or that of the prompt not seen for longest if it has none."""
        row = self._prompt_rows.pop(key, None)
        if row is None and len(self._prompt_rows) >= self.max_prompts:
            row = self._prompt_rows.pop(next(iter(self._prompt_rows)))
            self._prompt_sums[row] = 0.0
        elif row is None:
            row = len(self._prompt_rows) + 1
            if row >= len(self._prompt_sums):
                self._prompt_sums = np.concatenate([self._prompt_sums, np.zeros_like(self._prompt_sums)])
        self._prompt_rows[key] = row
        return row

    def _fit(self) -> None:
        """Find the likeliest k and alpha: for each alpha of a grid k is a quotient."""
        points = self._bins
        if self._num_in_cohort:
            points = points.copy()
            points[self._bin_of_cohort()] += self._cohort
        weights, emitted, drafted, accepted = points[points[:, 0] > 0].T
        shares = accepted / emitted
        precisions = 1.0 / (_ROLLOUT_SD**2 / weights + _FORM_SD**2)
        reached = -np.expm1(-np.outer(self._alphas, drafted / emitted))
        start_k, start_alpha = self._start
        ks = (reached @ (precisions * shares) + start_k / _K_SD**2) / (reached**2 @ precisions + 1.0 / _K_SD**2)
        ks = np.clip(ks, _LEAST_K, _MOST_K)
        unlikely = (shares - ks[:, None] * reached) ** 2 @ precisions
        unlikely += ((ks - start_k) / _K_SD) ** 2 + (np.log(self._alphas / start_alpha) / _LOG_ALPHA_SD) ** 2
        best = int(unlikely.argmin())
        self.k, self.alpha = float(ks[best]), float(self._alphas[best])


def _sums(
    num_rollouts: int, emitted: Numbers, drafted: Numbers, accepted: Numbers
) -> tuple[FloatArray, npt.NDArray[np.bool_]]:
    """Return what each rollout adds to sums, (rollouts, fields), and which of them can have happened, and drafted."""
    counts = [np.asarray(count, np.float64) for count in (emitted, drafted, accepted)]
    for name, count in zip(_FIELDS[1:], counts, strict=True):
        if count.shape != (num_rollouts,):
            raise ValueError(f"{name} has shape {count.shape}; it must have {num_rollouts} entries, one a prompt key")
    of_emitted, of_drafted, of_accepted = counts
    is_good = (of_drafted > 0) & (of_accepted >= 0) & (of_accepted <= of_drafted) & (of_accepted <= of_emitted)
    is_good &= (of_drafted < 2.0**62) & (of_emitted > 0) & (of_emitted < 2.0**62)
    weights = np.divide(of_emitted, of_emitted + _HALF_WEIGHT_TOKENS, out=np.zeros(num_rollouts), where=is_good)
    return np.stack([weights, *counts], axis=1), is_good


def _checked_sums(values: Any, name: str, shape: tuple[int, ...]) -> FloatArray:
    sums = checked_numbers(values, name, shape=shape)
    weights, emitted, drafted, accepted = np.moveaxis(sums, -1, 0)
    good = (
        (sums >= 0).all() and np.isfinite(sums).all() and (accepted <= np.minimum(drafted, emitted) * (1 + 1e-6)).all()
    )
    if not good or ((weights > 0) != (emitted > 0)).any():
        raise ValueError(f"{name} holds numbers that are no sums over rollouts")
    return sums


def _start(value: Any, name: str, least: float, most: float) -> float:
    number = checked_number(value, name)
    if not least <= number <= most:
        raise ValueError(f"{name} is {value}; it must be {least:g} <= {name} <= {most:g}")
    return number


def _at_least_1(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, not {type(value).__name__}")
    if value < 1:
        raise ValueError(f"{name} is {value}; it must be at least 1")
    return value
