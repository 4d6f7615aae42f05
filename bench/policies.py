"""The policies that `bench_regimes` compares: one line each, with the settings that hindsight may choose from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

import das
from das.budget import BudgetPolicy, FloatArray, IntArray

Setting = float | str | None


class ThresholdBudget(das.FixedBudget):
    """Draft eight tokens where at most so many requests run, nothing above: speculation as a switch.

    Source: the rule that TLT (arXiv 2511.16665) publishes, on at 32 or fewer.
    """

    def __init__(self, most_running: int) -> None:
        super().__init__(8)
        self._most_running = most_running

    def budgets(self, requests: das.RunningRequests) -> tuple[IntArray, FloatArray]:
        """Caps and prices of a fixed budget, or nothing."""
        caps, prices = super().budgets(requests)
        return (caps, prices) if requests.num_running <= self._most_running else (0 * caps, prices)


class OracleBudget(das.ThroughputBudget):
    """The makespan optimum at token level, told how long each running and each waiting request will be: a ceiling.

    Requests that wait are dealt to the places in order, each to the one that ends first by the lengths; so every place
    has a chain of L tokens to go. With A(p) = k L (1 - exp(-alpha p / L)) accepted of p drafted tokens, a place that is
    to need N passes drafts down to survival s = alpha (k - 1 + N / L), at which a pass less costs it c_tok (1 / s - 1)
    more. N is where that, over all places, is what a pass costs. No place drafts less than throughput makes worth while
    as long as requests wait.

    Args:
        k, alpha: of the acceptance curve.

    Source: DAS (arXiv 2511.13841), Eq. 3 to 9, corrected as DESIGN section 8 has it.
    """

    def __init__(self, *, latency: das.LatencyModel, k: float = 0.62, alpha: float = 1.43) -> None:
        super().__init__(latency=latency)
        self._k, self._alpha = k, alpha
        self._chains = np.empty(0)
        self._has_queue = False

    def foretell(self, remaining: Sequence[int], waiting: Sequence[int]) -> None:
        """Hear how many tokens each request is still to get; see `das.analysis.decoding.Decoding`."""
        chains = np.array(remaining, np.float64)
        for length in waiting:
            chains[chains.argmin()] += length
        self._chains, self._has_queue = chains, bool(waiting)

    def budgets(self, requests: das.RunningRequests) -> tuple[IntArray, FloatArray]:
        """Caps and prices; above 1 where drafting is of no use."""
        caps, throughput = super().budgets(requests)
        num_context_tokens = int(requests.num_prompt_tokens.sum() + requests.num_response_tokens.sum())
        pass_ms = self.latency.step_ms(0, num_context_tokens=num_context_tokens)
        chains, c_tok_ms = self._chains, max(self.latency.c_tok_ms, 1e-9)
        low, high = float(chains.max()) * (1.0 - self._k), float(chains.max())
        for _ in range(30):
            num_passes = 0.5 * (low + high)
            survival = self._survival(num_passes)
            spent_ms = c_tok_ms * np.maximum(0.0, 1.0 / survival - 1.0)[num_passes < chains].sum()
            low, high = (low, num_passes) if spent_ms < pass_ms else (num_passes, high)
        prices = np.where(high < chains, np.minimum(1.0, self._survival(high)), 1.0)
        return caps, np.minimum(prices, throughput) if self._has_queue else prices

    def _survival(self, num_passes: float) -> FloatArray:
        return np.maximum(1e-6, self._alpha * (self._k - 1.0 + num_passes / self._chains))

    def __repr__(self) -> str:
        return f"OracleBudget(latency={self.latency}, k={self._k:g}, alpha={self._alpha:g})"


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


DEFAULT = "throughput"  # of plan_step's callers: what is held against the others
FAMILIES: dict[str, Family] = {
    "throughput": Family(lambda _, latency: das.ThroughputBudget(latency=latency)),
    "fixed": Family(lambda cap, latency: das.FixedBudget(int(cap)), (1, 2, 3, 4, 6, 8, 16)),
    "price": Family(lambda price, latency: das.PriceBudget(min_survival=price), (0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.8)),
    "threshold": Family(lambda running, latency: ThresholdBudget(int(running)), (8, 16, 32, 64, 128)),
    "unlimited": Family(lambda _, latency: das.UnlimitedBudget()),
    "oracle": Family(lambda _, latency: OracleBudget(latency=latency), is_ceiling=True),
}
