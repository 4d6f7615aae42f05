"""What can be set, from one environment variable: SGLang hands no options of their own to plugins."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import das
from das._draft import MAX_DRAFT_TOKENS
from das.checked_values import check_int
from das.latency import DEFAULT_LATENCY
from das.step import check_widths
from das_ray.settings import SharedHistorySettings, read_shared_history

VARIABLE = "DAS_SGLANG"
DEFAULT_POLICY = "throughput"
Latency = das.LatencyModel | das.LatencyEstimator

# What makes each policy, from its argument (None: not given), the latency and the longest draft.
_POLICIES: dict[str, Callable[[str | None, Latency, int], das.BudgetPolicy]] = {
    "throughput": lambda _, latency, longest: das.ThroughputBudget(latency=latency, max_draft_tokens=longest),
    "price": lambda price, _, longest: das.PriceBudget(min_survival=_price(price), max_draft_tokens=longest),
    "fixed": lambda length, _, longest: das.FixedBudget(_length(length, longest)),
    "none": lambda *_: das.NoDraft(),
}
_WITH_ARGUMENT = ("price", "fixed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the plugin does; every field has a default.

    Args:
        policy: "throughput", "price:P" with 0 <= P <= 1, "fixed:N" with 0 <= N <= the greatest width, or "none"; see
            `das.budget`.
        shape: of the drafts, "chain" or "tree".
        widths: draft tokens a request that a decode step may verify, ascending; the policy picks one for each step.
        window_epochs, max_bytes: of the history.
        latency_ms: what a pass costs, and each token in it; None: learned from the steps, where one rank decides alone.
        noise_seed: samples are keyed by (seed, request id, position), and equal with and without drafts; None: they are
            as random as SGLang's.
        replace_ngram: the algorithm NGRAM is das, for those who cannot name DAS.
        shared_history: "ray:NAME", or a table with more (see das_ray.settings): the history is shared with the other
            engines of that service. None: it is this engine's own.

    Raises:
        TypeError, ValueError: a field of the wrong kind, or out of range.
    """

    policy: str = DEFAULT_POLICY
    shape: str = "chain"
    widths: tuple[int, ...] = (0, 3, 7, 15)
    window_epochs: int = 4
    max_bytes: int = 8 << 30
    latency_ms: tuple[float, float] | None = None
    noise_seed: int | None = None
    replace_ngram: bool = False
    shared_history: SharedHistorySettings | None = None

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "widths", check_widths(self.widths))
        if self.widths[-1] == 0:
            raise ValueError("widths is (0,); it must name a width above 0. To draft nothing, set policy to 'none'")
        if self.shape not in ("chain", "tree"):
            raise ValueError(f"shape is {self.shape!r}; it must be 'chain' or 'tree'")
        if not isinstance(self.replace_ngram, bool):
            raise TypeError(f"replace_ngram must be true or false, not {self.replace_ngram!r}")
        if self.noise_seed is not None:
            check_int(self.noise_seed, "noise_seed", below=1 << 63)
        if self.latency_ms is not None:
            put(self, "latency_ms", _latency_ms(self.latency_ms))
        put(self, "shared_history", read_shared_history(self.shared_history))
        self.make_history()
        self.make_policy(learns_latency=True)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Settings:
        """Return the settings of `DAS_SGLANG`: a JSON object, or the path of a file that holds one. Unset: defaults.

        Raises:
            ValueError: unreadable, no JSON object, an unknown field, or a field that is refused; it names the variable.
        """
        values = _read(environment)
        try:
            unknown = sorted(values.keys() - {field.name for field in fields(cls)})
            if unknown:
                known = ", ".join(field.name for field in fields(cls))
                raise ValueError(f"it names {', '.join(unknown)}; known are {known}")
            return cls(**values)
        except (OverflowError, TypeError, ValueError) as error:
            raise ValueError(f"{VARIABLE}: {error}") from error

    def as_dict(self) -> dict[str, Any]:
        """Return the settings as plain values, as the log and `/server_info` show them."""
        shared = self.shared_history
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return values | {"shared_history": None if shared is None else asdict(shared)}

    def within(self, num_draft_tokens: int | None) -> Settings:
        """Return the settings of an engine that was given `--speculative-num-draft-tokens`; see `widths_within`.

        Raises:
            ValueError: as `widths_within`, or the policy drafts more than the greatest width that is left.
        """
        try:
            return replace(self, widths=self.widths_within(num_draft_tokens))
        except ValueError as error:
            raise ValueError(f"with --speculative-num-draft-tokens {num_draft_tokens}, {error}") from error

    def widths_within(self, num_draft_tokens: int | None) -> tuple[int, ...]:
        """Return the widths of an engine that was given `--speculative-num-draft-tokens` N.

        N counts the token before the draft, so N - 1 becomes the greatest width, also where all that are set are
        smaller; of those, the ones below it stay. None: as set.

        Raises:
            ValueError: no room for a draft, or for one of more than 64 tokens.
        """
        if num_draft_tokens is None:
            return self.widths
        if not 2 <= num_draft_tokens <= 1 + MAX_DRAFT_TOKENS:
            raise ValueError(f"N is {num_draft_tokens}; it must be 2 to {1 + MAX_DRAFT_TOKENS}")
        longest = num_draft_tokens - 1
        return check_widths((*(width for width in self.widths if width < longest), longest))

    def make_history(self) -> das.RolloutHistory:
        """Return a new history."""
        return das.RolloutHistory(window_epochs=self.window_epochs, max_bytes=self.max_bytes)

    def make_policy(self, *, learns_latency: bool) -> das.BudgetPolicy:
        """Return a new policy.

        Args:
            learns_latency: False where several ranks must draft the same, as each measures other times.

        Raises:
            TypeError, ValueError: an unknown policy, or an argument that it refuses.
        """
        latency: Latency = DEFAULT_LATENCY
        if self.latency_ms is not None:
            latency = das.LatencyModel(c_base_ms=self.latency_ms[0], c_tok_ms=self.latency_ms[1])
        elif learns_latency:
            latency = das.LatencyEstimator()
        if not isinstance(self.policy, str):
            raise TypeError(f"policy must be a string, not {type(self.policy).__name__}")
        name, colon, argument = self.policy.partition(":")
        if name not in _POLICIES or (colon and not (argument and name in _WITH_ARGUMENT)):
            raise ValueError(f"policy is {self.policy!r}; it must be throughput, price:P, fixed:N or none")
        return _POLICIES[name](argument if colon else None, latency, self.widths[-1])


def wants_ngram(environment: Mapping[str, str]) -> bool:
    """Return whether `DAS_SGLANG` asks for `replace_ngram`, or may have: it is unreadable, or has an unknown name.

    Wrong values of others do not matter. Never raises.
    """
    try:
        values = _read(environment)
    except ValueError:
        return True
    is_known = values.keys() <= {field.name for field in fields(Settings)}
    return not is_known or values.get("replace_ngram") not in (None, False)


def _read(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields that `DAS_SGLANG` gives, unchecked. Raises ValueError, which names the variable."""
    text = environment.get(VARIABLE, "").strip()
    if not text:
        return {}
    try:
        values = json.loads(text if text.startswith("{") else Path(text).read_text(encoding="utf-8"))
    except (OSError, RecursionError, ValueError) as error:
        raise ValueError(f"{VARIABLE}: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{VARIABLE}: it holds a {type(values).__name__}; it must be a JSON object")
    return values


def _price(argument: str | None) -> float:
    if argument is None:
        return 0.15
    try:
        price = float(argument)
    except ValueError:
        price = math.nan
    if not 0 <= price <= 1:
        raise ValueError(f"policy is 'price:{argument}'; P must be a number, 0 <= P <= 1")
    return price


def _length(argument: str | None, longest: int) -> int:
    if argument is None:
        return longest
    if not re.fullmatch("[0-9]{1,4}", argument) or int(argument) > longest:
        raise ValueError(
            f"policy is 'fixed:{argument}'; N must be an int, 0 <= N <= {longest}, which is the greatest of widths"
        )
    return int(argument)


def _latency_ms(value: Any) -> tuple[float, float]:
    rule = f"latency_ms is {value!r}; it must hold two numbers, the ms of a pass and of a token in it"
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise ValueError(rule)
    try:
        das.LatencyModel(c_base_ms=value[0], c_tok_ms=value[1])
    except (TypeError, ValueError) as error:
        raise ValueError(f"{rule}: of these, {error}") from error
    return value[0], value[1]
