"""The policies that `bench_regimes` compares: one line each, with the settings that hindsight may choose from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

import das
from das.budget import BudgetPolicy, FloatArray, IntArray

Setting = float | str | None


class OracleBudget(das.ThroughputBudget):
    """The makespan optimum at token level, told how long each running and each waiting request will be: a ceiling.

    While requests wait, places share the work: whoever ends early takes more of it. So a place has as many tokens to go
    as its own request, or as the level L at which all places together have all the work, whichever is more. With
    A(p) = k L (1 - exp(-alpha p / L)) accepted of p drafted tokens, a place that is to need N passes drafts down to
    survival s = alpha (k - 1 + N / L), at which a pass less costs it c_tok (1 / s - 1) more. N is where that, over all
    places, is what a pass costs. How well drafts will fare is not told: lengths are longer or shorter by a factor
    exp(sigma z), z normal, and what a pass is worth is the mean over 16 such draws.

    Args:
        sigma: 0: lengths count as they are.
        k, alpha: of the acceptance curve.

    Source: DAS (arXiv 2511.13841), Eq. 3 to 9, corrected as DESIGN section 4 has it.
    """

    def __init__(self, *, latency: das.LatencyModel, sigma: float = 0.0, k: float = 0.62, alpha: float = 1.43) -> None:
        super().__init__(latency=latency)
        self._sigma, self._k, self._alpha = sigma, k, alpha
        self._normal = np.random.default_rng(0)
        self._lengths = np.empty(0)

    def foretell(self, remaining: Sequence[int], waiting: Sequence[int]) -> None:
        """Hear how many tokens each request is still to get; see `das.analysis.decoding.Decoding`."""
        lengths = np.sort(np.array(remaining, np.float64))
        work = np.cumsum(lengths) + sum(waiting)  # shared by the places with the least to do: by how many, decides
        levels = work / np.arange(1, len(lengths) + 1)
        num_sharing = int(np.argmax(np.append(lengths[1:], np.inf) >= levels))
        self._lengths = np.maximum(np.array(remaining, np.float64), levels[num_sharing])

    def budgets(self, requests: das.RunningRequests) -> tuple[IntArray, FloatArray]:
        """Caps and prices."""
        caps, _ = super().budgets(requests)
        num_context_tokens = int(requests.num_prompt_tokens.sum() + requests.num_response_tokens.sum())
        pass_ms = self.latency.step_ms(0, num_context_tokens=num_context_tokens)
        c_tok_ms = max(self.latency.c_tok_ms, 1e-9)
        draws = 16 if self._sigma else 1
        lengths = self._lengths * np.exp(self._sigma * self._normal.standard_normal((draws, len(requests))))
        high = lengths.max(axis=1, keepdims=True)
        low = high * (1.0 - self._k)
        for _ in range(14):
            num_passes = 0.5 * (low + high)
            is_dear = self._worth_ms(lengths, num_passes, c_tok_ms).sum(axis=1, keepdims=True) > pass_ms
            low, high = np.where(is_dear, num_passes, low), np.where(is_dear, high, num_passes)
        worth_ms = self._worth_ms(lengths, high, c_tok_ms).mean(axis=0)
        return caps, c_tok_ms / (c_tok_ms + worth_ms)

    def _worth_ms(self, lengths: FloatArray, num_passes: FloatArray, c_tok_ms: float) -> FloatArray:
        """What a place pays for its last pass less; nothing where it needs no more than that anyway."""
        survival = np.maximum(1e-6, self._alpha * (self._k - 1.0 + num_passes / lengths))
        return np.where(num_passes < lengths, c_tok_ms * np.maximum(0.0, 1.0 / survival - 1.0), 0.0)

    def __repr__(self) -> str:
        return f"OracleBudget(latency={self.latency}, sigma={self._sigma:g}, k={self._k:g}, alpha={self._alpha:g})"


@dataclass(frozen=True, slots=True)
class Family:
    """A policy and its settings.

    Args:
        make: makes it of a setting and the latency of the engine.
        settings: that hindsight chooses from.
        is_ceiling: it knows the future, so it is no competitor.
    """

    make: Callable[..., BudgetPolicy]
    settings: tuple[Setting, ...] = (None,)
    is_ceiling: bool = False


DEFAULT = "length-aware"  # of plan_step's callers: what is held against the others
FAMILIES: dict[str, Family] = {
    "length-aware": Family(lambda _, latency: das.LengthAwareBudget(latency=latency)),
    "throughput": Family(lambda _, latency: das.ThroughputBudget(latency=latency)),
    "fixed": Family(lambda cap, latency: das.FixedBudget(int(cap)), (1, 2, 3, 4, 6, 8, 16)),
    "price": Family(lambda price, latency: das.PriceBudget(min_survival=price), (0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.8)),
    "threshold": Family(
        lambda running, latency: das.AdaptiveBudget("batch-threshold", max_running=int(running)), (8, 16, 32, 64, 128)
    ),
    "class": Family(lambda price, latency: das.LengthClassBudget(min_survival=price), (0.0, 0.15, 0.3, 0.5)),
    "aimd": Family(lambda cap, latency: das.AdaptiveBudget("aimd", max_draft_tokens=int(cap)), (4, 8, 16)),
    "beg-mab": Family(
        lambda running, latency: das.AdaptiveBudget("beg-mab", max_running=int(running), latency=latency),
        (32, 128, 512),
    ),
    "goodput": Family(lambda _, latency: das.AdaptiveBudget("goodput", latency=latency)),
    "unlimited": Family(lambda _, latency: das.UnlimitedBudget()),
    "oracle": Family(
        lambda sigma, latency: OracleBudget(latency=latency, sigma=sigma), (0.0, 0.2, 0.4, 0.8), is_ceiling=True
    ),
}
