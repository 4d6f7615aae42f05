"""What a user can set, where from, and what is wrong with it: `additional_config["das"]` or DAS_VLLM_CONFIG."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol

import das
from das.checked_values import check_int
from das.latency import DEFAULT_LATENCY
from das.latency_presets import LATENCY_PRESETS
from das_ray.settings import SharedHistorySettings, read_shared_history

ENVIRONMENT_VARIABLE = "DAS_VLLM_CONFIG"
MOST_DRAFT_TOKENS = 64  # of das; vLLM's rejection sampler stops at 128
_INJECTED = "inject_num_speculative_tokens"
_OF_OTHER_KINDS = ("latency", "lengths", "classes")  # arguments of policies that JSON cannot say; latency is a setting


class CappedPolicy(das.BudgetPolicy, Protocol):
    """A policy that says how many tokens it drafts for a request at most."""

    @property
    def max_draft_tokens(self) -> int: ...


DEFAULT_POLICY = "length-aware"  # the one place that says which policy drafts where nobody names one
POLICIES: dict[str, Callable[..., CappedPolicy]] = {
    "length-aware": das.LengthAwareBudget,
    "throughput": das.ThroughputBudget,
    "price": das.PriceBudget,
    "fixed": das.FixedBudget,
    "unlimited": das.UnlimitedBudget,
    "class": das.LengthClassBudget,
    "none": das.NoDraft,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How das drafts in an engine.

    Args:
        policy: a name of `POLICIES`.
        policy_options: the policy's own arguments that are numbers, as `{"min_survival": 0.15}`. `max_draft_tokens`,
            where a policy takes it, is what the engine verifies if it is left out, whatever the policy's own default.
        latency: what a pass costs: a name of `das latency list`, or [c_base_ms, c_tok_ms, c_kv_ms, c_engine_ms], of
            which the last two may be left out. None: learned from the engine's own steps.
        window_epochs: epochs of each prompt that the history keeps, >= 1.
        max_history_bytes: limit of the history, > 0.
        deterministic: no clock decides what is drafted. Always so under `external_launcher`, where each rank schedules
            for itself and all must draft the same.
        learn_from_engine: finished requests enter the history. False: only what `das_push_rollouts` brings does.
        shared_history: "ray:NAME", or a table with more (see das_ray.settings): the history is shared with the other
            engines of that service. None: it is this engine's own.
        inject_num_speculative_tokens: give this das drafter, with so many tokens, to every engine of this process that
            was made without a speculative_config: for trainers that offer no way in. None: inject nothing. Read from
            the environment variable only.

    Raises:
        TypeError, ValueError: naming the setting, the rule and the value.
    """

    policy: str = DEFAULT_POLICY
    policy_options: Mapping[str, Any] = field(default_factory=dict)
    latency: str | tuple[float, ...] | None = None
    window_epochs: int = 4
    max_history_bytes: int = 8 << 30
    deterministic: bool = False
    learn_from_engine: bool = True
    shared_history: SharedHistorySettings | None = None
    inject_num_speculative_tokens: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.policy_options, Mapping):
            raise TypeError(f"policy_options must be a mapping, not {type(self.policy_options).__name__}")
        object.__setattr__(self, "policy_options", dict(self.policy_options))
        for name in ("deterministic", "learn_from_engine"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be true or false, not {getattr(self, name)!r}")
        if isinstance(self.latency, list):
            object.__setattr__(self, "latency", tuple(self.latency))
        object.__setattr__(self, "shared_history", read_shared_history(self.shared_history))
        if self.shared_history is not None and self.deterministic:
            raise ValueError("deterministic is true; with shared_history, clocks decide when what others sent arrives")
        if self.inject_num_speculative_tokens is not None:
            check_num_speculative_tokens(self.inject_num_speculative_tokens, _INJECTED)
        check_int(self.max_history_bytes, "max_history_bytes", below=1 << 62)
        if self.max_history_bytes == 0:
            raise ValueError("max_history_bytes is 0; it must be at least 1")
        self.latency_model()  # policies that use none would let a wrong one pass
        self.make_policy(MOST_DRAFT_TOKENS)
        self.make_history()

    def make_history(self) -> das.RolloutHistory:
        """Return a new history of these settings."""
        return das.RolloutHistory(window_epochs=self.window_epochs, max_bytes=self.max_history_bytes)

    def make_policy(self, num_speculative_tokens: int, *, can_learn_latency: bool = True) -> CappedPolicy:
        """Return a new policy of these settings.

        Args:
            num_speculative_tokens: that the engine verifies of a request at most, 1..64.
            can_learn_latency: False: where no latency is set, draft by das' default for it instead of by clocks.
        """
        if not isinstance(self.policy, str):
            raise TypeError(f"policy must be a string, not {type(self.policy).__name__}")
        if self.policy not in POLICIES:
            raise ValueError(f"policy is {self.policy!r}; it must be one of {', '.join(POLICIES)}")
        make = POLICIES[self.policy]
        accepted = [name for name in inspect.signature(make).parameters if name not in _OF_OTHER_KINDS]
        unknown = [name for name in self.policy_options if name not in accepted]
        if unknown:
            takes = ", ".join(accepted) if accepted else "none"
            raise ValueError(f"policy_options has {unknown[0]!r}; the options of {self.policy!r} are: {takes}")
        options = dict(self.policy_options)
        if "max_draft_tokens" in accepted:
            options.setdefault("max_draft_tokens", num_speculative_tokens)
        if "latency" in inspect.signature(make).parameters:
            options["latency"] = self.latency_model() or (None if can_learn_latency else DEFAULT_LATENCY)
        return make(**options)

    def latency_model(self) -> das.LatencyModel | None:
        """Return the latency to draft by; None: it is learned from the engine's steps."""
        if isinstance(self.latency, str):
            if self.latency not in LATENCY_PRESETS:
                known = ", ".join(LATENCY_PRESETS)
                raise ValueError(f"latency is {self.latency!r}, which is no preset; there are: {known}")
            return LATENCY_PRESETS[self.latency].fit.latency
        if self.latency is None:
            return None
        names = ("c_base_ms", "c_tok_ms", "c_kv_ms", "c_engine_ms")
        if not isinstance(self.latency, tuple) or not 2 <= len(self.latency) <= 4:
            raise ValueError(f"latency is {self.latency!r}; it must be a preset or 2 to 4 of {', '.join(names)}")
        return das.LatencyModel(**dict(zip(names, self.latency, strict=False)))

    def __str__(self) -> str:
        return json.dumps({name: _plain(value) for name, value in asdict(self).items()})


def read_settings(additional_config: Any, environment: Mapping[str, str]) -> Settings:
    """Return the settings of an engine.

    Args:
        additional_config: vLLM's; its entry "das" takes precedence, name by name.
        environment: DAS_VLLM_CONFIG is JSON, or the path of a JSON file.

    Raises:
        TypeError, ValueError: naming where the setting came from, its name, the rule and the value.
    """
    merged: dict[str, Any] = {}
    given = additional_config.get("das", {}) if isinstance(additional_config, Mapping) else {}
    for source, values in (
        (ENVIRONMENT_VARIABLE, _from_environment(environment)),
        ('additional_config["das"]', given),
    ):
        if not isinstance(values, Mapping):
            raise TypeError(f"{source} must be a mapping of settings, not {type(values).__name__}")
        known = [setting.name for setting in fields(Settings)]
        for name in values:
            if name not in known:
                raise ValueError(f"{source} has {name!r}, which is no setting; there are: {', '.join(known)}")
        if values is given and values.get(_INJECTED) is not None:  # whoever can say this can say speculative_config
            raise ValueError(
                f"{source} has {_INJECTED}, which is read from {ENVIRONMENT_VARIABLE} only; pass speculative_config to "
                "the engine instead"
            )
        try:
            merged |= values
            Settings(**merged)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{source}: {error}") from None
    return Settings(**merged)


def may_inject(environment: Mapping[str, str]) -> bool:
    """Return whether DAS_VLLM_CONFIG asks to inject das, or cannot be read so far that it would tell; never raises."""
    try:
        values = _from_environment(environment)
    except ValueError:
        return True
    return not isinstance(values, Mapping) or values.get(_INJECTED) is not None


def _from_environment(environment: Mapping[str, str]) -> Any:
    text = environment.get(ENVIRONMENT_VARIABLE, "").strip()
    if not text:
        return {}
    if not text.startswith("{"):
        try:
            text = Path(text).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{ENVIRONMENT_VARIABLE} is neither JSON nor a file that can be read: {error}") from None
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # no JSON, a number of too many digits, or nested too deep
        raise ValueError(f"{ENVIRONMENT_VARIABLE} is not valid JSON: {error}") from None


def check_num_speculative_tokens(value: Any, name: str = "num_speculative_tokens") -> None:
    """Raise TypeError or ValueError unless an engine can verify so many tokens of das' drafts: an int of 1..64."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, not {type(value).__name__}")
    if not 1 <= value <= MOST_DRAFT_TOKENS:
        raise ValueError(f"{name} is {value}; it must be 1 <= {name} <= {MOST_DRAFT_TOKENS}")


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else value
