"""Published policies that adapt draft lengths while requests run: baselines to compare with."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from das.budget import BudgetPolicy, FloatArray, IntArray, RunningRequests, StatelessPolicy, check_draft_length
from das.checked_values import check_state, checked_number, checked_numbers
from das.latency import DEFAULT_LATENCY, LatencyModel


def AdaptiveBudget(name: str, **settings: Any) -> BudgetPolicy:
    """Return a published policy that adapts draft lengths while requests run.

    Args:
        name: "aimd": specRL's, `AimdBudget`. "beg-mab": TLT's bandit, `BanditBudget`. "goodput": TurboSpec's,
            `GoodputBudget`. "batch-threshold": `BatchThresholdBudget`.
        settings: keywords of that class; all have defaults.

    Returns:
        the policy: draft lengths only, at price 0. It has `budgets`, `observe`, `state` and `load_state`.

    Raises:
        ValueError: another name, or a setting out of range. TypeError: a setting that the policy has not, or of the
        wrong kind.
    """
    if name not in ADAPTIVE_BUDGETS:
        raise ValueError(f"name is {name!r}; it must be one of {', '.join(ADAPTIVE_BUDGETS)}")
    return ADAPTIVE_BUDGETS[name](**settings)


class AimdBudget(StatelessPolicy):
    """Of each request, double the draft length when a whole draft was accepted, else halve it.

    "A whole draft": as many tokens as the length is. A draft that was shorter, or none, halves it too, to 1 at least.
    Lengths of the last 65,536 requests started are remembered; one that runs longer than that starts again.

    Args:
        max_draft_tokens: 0..64, the longest draft.
        first_draft_tokens: 1..64, that a request starts with, unless the longest is shorter.

    Raises:
        TypeError, ValueError: not an int, or out of range.

    Source: specRL (He-Jingkai/specRL, commit 6d542d2), the code of RhymeRL (arXiv 2508.18588): from 2, up to 16.
    """

    __slots__ = ("_accepted", "_lengths", "_numbers", "_steps", "first_draft_tokens", "max_draft_tokens")

    def __init__(self, *, max_draft_tokens: int = 16, first_draft_tokens: int = 2) -> None:
        self.max_draft_tokens = check_draft_length(max_draft_tokens)
        self.first_draft_tokens = _at_least_1(check_draft_length(first_draft_tokens), "first_draft_tokens")
        # A ring, by request number: whose the entry is, its length, and its counters when it was last asked about.
        self._numbers = np.full(_RING_REQUESTS, -1, np.int64)
        self._lengths, self._steps, self._accepted = np.zeros((3, _RING_REQUESTS), np.int64)

    def budgets(self, requests: RunningRequests) -> tuple[IntArray, FloatArray]:
        """Return caps (int64, tokens) and prices (float64, 0), one entry a request. Never raises. O(requests)."""
        numbers = requests.request_numbers
        rows = numbers & (_RING_REQUESTS - 1)
        is_known = self._numbers[rows] == numbers
        lengths = np.where(is_known, self._lengths[rows], self.first_draft_tokens)
        is_new_step = is_known & (requests.num_decode_steps > self._steps[rows])
        was_whole = requests.num_accepted_tokens - self._accepted[rows] >= lengths
        lengths = np.where(is_new_step, np.where(was_whole, 2 * lengths, np.maximum(1, lengths // 2)), lengths)
        lengths = np.minimum(lengths, self.max_draft_tokens)
        self._numbers[rows], self._lengths[rows] = numbers, lengths
        self._steps[rows], self._accepted[rows] = requests.num_decode_steps, requests.num_accepted_tokens
        return lengths, np.zeros(len(lengths))

    def __repr__(self) -> str:
        return _shown("aimd", self, "max_draft_tokens", "first_draft_tokens")


class BatchThresholdBudget(StatelessPolicy):
    """Draft a fixed number of tokens while few requests run, nothing while more do.

    Args:
        max_running: the most requests at which anything is drafted, at least 0.
        max_draft_tokens: 0..64.

    Raises:
        TypeError, ValueError: not an int, or out of range.

    Source: the switch of TLT (arXiv 2511.16665; mit-han-lab/fastrl, commit bce3df7): up to 32 running requests.
    """

    __slots__ = ("max_draft_tokens", "max_running")

    def __init__(self, *, max_running: int = 32, max_draft_tokens: int = 8) -> None:
        self.max_running = _check_count(max_running, "max_running")
        self.max_draft_tokens = check_draft_length(max_draft_tokens)

    def budgets(self, requests: RunningRequests) -> tuple[IntArray, FloatArray]:
        """Return caps (int64, tokens) and prices (float64, 0), one entry a request. Never raises. O(requests)."""
        return _uniform(self.max_draft_tokens if requests.num_running <= self.max_running else 0, requests)

    def __repr__(self) -> str:
        return _shown("batch-threshold", self, "max_running", "max_draft_tokens")


class GoodputBudget:
    """For the whole batch, draft as many tokens as promise the most emitted tokens per time.

    If each draft token is accepted with probability a, given that those before it were, a draft of n tokens emits
    (1 - a^(n+1)) / (1 - a). The best n is that with the most of these per predicted millisecond. a is the share of
    accepted tokens among those that were decided: accepted, or the first that was not. It remembers about 2,000 of
    them, and leans to the start with the weight of 20, so after some hundred passes without drafts it comes back and
    tries. Where the start itself promises nothing, at large batches, nothing is ever drafted, and nothing learned.

    Args:
        latency: what a pass costs. None: `das.latency.DEFAULT_LATENCY`.
        max_draft_tokens: 0..64.
        first_acceptance: the start, 0..1.

    Attributes:
        acceptance: a, as of now.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, or out of range.

    Source: TurboSpec, first SmartSpec (arXiv 2406.14066): goodput by the acceptance rate and a linear latency model.
    The return to the start is ours: it has nothing of the kind in the form that we know.
    """

    __slots__ = ("_accepted", "_decided", "first_acceptance", "latency", "max_draft_tokens")

    def __init__(
        self, *, latency: LatencyModel | None = None, max_draft_tokens: int = 16, first_acceptance: float = 0.7
    ) -> None:
        self.latency = _check_latency(latency)
        self.max_draft_tokens = check_draft_length(max_draft_tokens)
        self.first_acceptance = _check_share(first_acceptance, "first_acceptance")
        self._accepted = self._decided = 0.0  # decayed counts

    @property
    def acceptance(self) -> float:
        """Share of decided draft tokens that were accepted, 0..1."""
        return (self._accepted + _START_WEIGHT * self.first_acceptance) / (self._decided + _START_WEIGHT)

    def budgets(self, requests: RunningRequests) -> tuple[IntArray, FloatArray]:
        """Return caps (int64, tokens) and prices (float64, 0), one entry a request.

        Never raises. Complexity: O(requests + max_draft_tokens).
        """
        num_running = max(1, requests.num_running)
        lengths = np.arange(self.max_draft_tokens + 1)
        emitted = np.cumsum(self.acceptance**lengths)
        times_ms = self.latency.step_ms(
            num_running * (1 + lengths), num_context_tokens=_context(self.latency, requests)
        )
        return _uniform(int(np.argmax(emitted / times_ms)), requests)

    def observe(self, drafted: IntArray, accepted: IntArray, *, step_ms: float | None = None) -> None:
        """Learn from the decode steps of the last pass.

        Args:
            drafted, accepted: tokens of each decode step.
            step_ms: ignored: predictions go by `latency`.

        Raises:
            ValueError: drafted and accepted differ in length. Nothing changes then.

        Complexity: O(steps).
        """
        _check_steps(drafted, accepted)
        num_accepted = float(np.sum(accepted))
        num_decided = num_accepted + float(np.count_nonzero(np.less(accepted, drafted)))
        keep = _KEEP_A_PASS * _KEEP_A_TOKEN**num_decided
        self._accepted = keep * self._accepted + num_accepted
        self._decided = keep * self._decided + num_decided

    def state(self) -> dict[str, Any]:
        """Return what was learned, as plain numbers."""
        return {"accepted": self._accepted, "decided": self._decided}

    def load_state(self, state: dict[str, Any]) -> None:
        """Replace what was learned by `state`.

        Raises:
            KeyError: a part is missing. TypeError, ValueError: no mapping, no numbers, or not 0 <= accepted <= decided
            < infinity. Nothing changes then.
        """
        check_state(state)
        accepted, decided = (checked_number(state[name], name) for name in ("accepted", "decided"))
        if not 0 <= accepted <= decided < math.inf:
            raise ValueError(
                f"accepted is {accepted}, decided {decided}; it must be 0 <= accepted <= decided < infinity"
            )
        self._accepted, self._decided = accepted, decided

    def __repr__(self) -> str:
        return _shown("goodput", self, "latency", "max_draft_tokens", "first_acceptance")


class BanditBudget:
    """For the whole batch, the draft length that emitted the most tokens per time lately, at batches of such a size.

    Each bucket of batch sizes has its own record of rewards, tokens emitted per millisecond, of every length. Usually
    the length with the greatest median reward is taken, one never tried first of all; now and then any of them. The
    time is the measured one, or else what the latency model says of the pass. TLT ties numbers of verified tokens to
    buckets and lets the bandit choose among tree shapes; here each bucket chooses among all lengths. In small batches
    the median of rewards is not their mean: where most drafts fail at once, it finds no use in the others.

    Args:
        draft_lengths: to choose from, 0..64 each, all different; at least one.
        first_of_bucket: the smallest batch size of each bucket, ascending, from 1.
        exploration: share of choices that are random, 0..1.
        window: rewards remembered for each length and bucket, at least 1.
        max_running: the most requests at which anything is drafted, at least 0.
        latency: for times that were not measured. None: `das.latency.DEFAULT_LATENCY`.
        seed: of the random choices, at least 0.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, or out of range.

    Source: BEG-MAB of TLT (arXiv 2511.16665; mit-han-lab/fastrl, commit bce3df7): buckets from 1, 2, 5 and 21,
    exploration .1, window 1,000, off above 32.
    """

    __slots__ = (
        "_num_choices",
        "_open_step",
        "_rewards",
        "draft_lengths",
        "exploration",
        "first_of_bucket",
        "latency",
        "max_running",
        "seed",
        "window",
    )

    def __init__(
        self,
        *,
        draft_lengths: Sequence[int] = (2, 4, 8, 16),
        first_of_bucket: Sequence[int] = (1, 2, 5, 21),
        exploration: float = 0.1,
        window: int = 1000,
        max_running: int = 32,
        latency: LatencyModel | None = None,
        seed: int = 0,
    ) -> None:
        self.draft_lengths = tuple(check_draft_length(length) for length in draft_lengths)
        if not self.draft_lengths or len(set(self.draft_lengths)) < len(self.draft_lengths):
            raise ValueError(f"draft_lengths is {draft_lengths}; it must hold at least one length, each once")
        self.first_of_bucket = tuple(_check_count(first, "first_of_bucket") for first in first_of_bucket)
        if self.first_of_bucket[:1] != (1,) or any(np.diff(self.first_of_bucket) <= 0):
            raise ValueError(f"first_of_bucket is {first_of_bucket}; it must ascend from 1")
        self.exploration = _check_share(exploration, "exploration")
        self.window = _at_least_1(_check_count(window, "window"), "window")
        self.max_running = _check_count(max_running, "max_running")
        self.latency = _check_latency(latency)
        self.seed = _check_count(seed, "seed")
        self._rewards = [[_Rewards(self.window) for _ in self.draft_lengths] for _ in self.first_of_bucket]
        self._num_choices = 0
        self._open_step: tuple[int, int, int, float] | None = None  # bucket, arm, running requests, tokens of context

    def budgets(self, requests: RunningRequests) -> tuple[IntArray, FloatArray]:
        """Return caps (int64, tokens) and prices (float64, 0), one entry a request.

        Never raises. Complexity: O(requests + lengths).
        """
        num_running = max(1, requests.num_running)
        self._open_step = None
        if num_running > self.max_running:
            return _uniform(0, requests)
        bucket = bisect_right(self.first_of_bucket, num_running) - 1
        arm = self._choose(self._rewards[bucket])
        self._open_step = bucket, arm, num_running, _context(self.latency, requests)
        return _uniform(self.draft_lengths[arm], requests)

    def observe(self, drafted: IntArray, accepted: IntArray, *, step_ms: float | None = None) -> None:
        """Note what the last choice was worth.

        Args:
            drafted, accepted: tokens of each decode step since.
            step_ms: of the pass; None, or not a positive number: not measured. Give every rank of a tensor-parallel
                engine the same times, or their drafts differ.

        Raises:
            ValueError: drafted and accepted differ in length. Nothing changes then.

        Complexity: O(steps + window) for a copy of some kilobytes.
        """
        _check_steps(drafted, accepted)
        if not len(drafted) or self._open_step is None:
            return
        bucket, arm, num_running, num_context_tokens = self._open_step
        self._open_step = None
        if step_ms is None or not 0 < step_ms < math.inf:
            num_tokens = num_running * (1.0 + float(np.mean(drafted)))
            step_ms = float(self.latency.step_ms(num_tokens, num_context_tokens=num_context_tokens))
        self._rewards[bucket][arm].add(num_running * (1.0 + float(np.mean(accepted))) / step_ms)

    def state(self) -> dict[str, Any]:
        """Return what was learned, as plain numbers and lists."""
        return {
            "num_choices": self._num_choices,
            "rewards": [[list(rewards.in_order) for rewards in bucket] for bucket in self._rewards],
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Replace what was learned by `state`, of a policy with as many buckets and lengths.

        Raises:
            KeyError: a part is missing. TypeError, ValueError: no mapping, a wrong shape, or rewards that are no
            positive numbers. Nothing changes then.
        """
        check_state(state)
        num_choices = _check_count(state["num_choices"], "num_choices")
        buckets = state["rewards"]
        shape = [len(self.draft_lengths)] * len(self.first_of_bucket)
        if not isinstance(buckets, (list, tuple)) or [_num_lists(bucket) for bucket in buckets] != shape:
            raise ValueError("rewards has another shape; it must have a list a bucket, of a list a draft length")
        loaded = [[_Rewards(self.window) for _ in bucket] for bucket in self._rewards]
        for of_bucket, given in zip(loaded, buckets, strict=True):
            for rewards, values in zip(of_bucket, given, strict=True):
                numbers = checked_numbers(values, "rewards", shape=(None,)).tolist()
                if not all(0 < number < math.inf for number in numbers):
                    raise ValueError("rewards holds a value that is not a positive number")
                for number in numbers:
                    rewards.add(number)
        self._rewards, self._num_choices, self._open_step = loaded, num_choices, None

    def __repr__(self) -> str:
        settings = ("draft_lengths", "first_of_bucket", "exploration", "window", "max_running", "latency", "seed")
        return _shown("beg-mab", self, *settings)

    def _choose(self, arms: list[_Rewards]) -> int:
        self._num_choices += 1
        # A generator for each choice, so that the state is a number, and a choice depends on nothing else.
        random = np.random.default_rng((self.seed, self._num_choices))
        if random.random() < self.exploration:
            return int(random.integers(len(arms)))
        return max(range(len(arms)), key=lambda arm: arms[arm].median())


class _Rewards:
    """The last rewards of one length in one bucket, and their median."""

    __slots__ = ("_ascending", "in_order")

    def __init__(self, window: int) -> None:
        self.in_order: deque[float] = deque(maxlen=window)
        self._ascending: list[float] = []

    def add(self, reward: float) -> None:
        if len(self.in_order) == self.in_order.maxlen:
            del self._ascending[bisect_left(self._ascending, self.in_order[0])]
        self.in_order.append(reward)
        insort(self._ascending, reward)

    def median(self) -> float:
        """Return the median; infinity if there are none, so that everything is tried."""
        if not self._ascending:
            return math.inf
        half, is_odd = divmod(len(self._ascending), 2)
        return self._ascending[half] if is_odd else 0.5 * (self._ascending[half - 1] + self._ascending[half])


ADAPTIVE_BUDGETS: dict[str, Callable[..., BudgetPolicy]] = {
    "aimd": AimdBudget,
    "beg-mab": BanditBudget,
    "goodput": GoodputBudget,
    "batch-threshold": BatchThresholdBudget,
}
"""What `AdaptiveBudget` makes, by name."""

_RING_REQUESTS = 1 << 16
_KEEP_A_TOKEN, _KEEP_A_PASS = 0.9995, 0.995  # of what was seen before
_START_WEIGHT = 20.0  # decided tokens


def _uniform(length: int, requests: RunningRequests) -> tuple[IntArray, FloatArray]:
    return np.full(len(requests), length, np.int64), np.zeros(len(requests))


def _context(latency: LatencyModel, requests: RunningRequests) -> float:
    """Return the tokens of context of the whole batch, those that are not told of counted like the others."""
    if latency.c_kv_ms == 0 or not len(requests):
        return 0.0
    num_tokens = int(requests.num_prompt_tokens.sum() + requests.num_response_tokens.sum())
    return num_tokens * max(1, requests.num_running) / len(requests)


def _check_steps(drafted: IntArray, accepted: IntArray) -> None:
    if len(drafted) != len(accepted):
        raise ValueError(f"drafted has {len(drafted)} entries, accepted {len(accepted)}; they describe the same steps")


def _check_latency(latency: LatencyModel | None) -> LatencyModel:
    if latency is not None and not isinstance(latency, LatencyModel):
        raise TypeError(f"latency must be a LatencyModel, not {type(latency).__name__}")
    return DEFAULT_LATENCY if latency is None else latency


def _check_count(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, not {type(value).__name__}")
    if not 0 <= value < 1 << 62:
        raise ValueError(f"{name} is {value}; it must be 0 <= {name} < 2**62")
    return value


def _at_least_1(value: int, name: str) -> int:
    if value < 1:
        raise ValueError(f"{name} is {value}; it must be at least 1")
    return value


def _check_share(value: Any, name: str) -> float:
    share = checked_number(value, name)
    if not 0 <= share <= 1:
        raise ValueError(f"{name} is {value}; it must be 0 <= {name} <= 1")
    return share


def _num_lists(bucket: Any) -> int | None:
    """Return of how many lists a bucket of a state consists; None: it is no list."""
    return len(bucket) if isinstance(bucket, (list, tuple)) else None


def _shown(name: str, policy: BudgetPolicy, *settings: str) -> str:
    return f"AdaptiveBudget({name!r}, {', '.join(f'{setting}={getattr(policy, setting)!r}' for setting in settings)})"
