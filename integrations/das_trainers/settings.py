"""The feed of a process whose hooks a trainer finds by name: from the environment variable DAS_TRAINERS."""

from __future__ import annotations

import functools
import importlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from das_trainers.feed import Feed, Sink
from das_trainers.rollout_log import RolloutLog

VARIABLE = "DAS_TRAINERS"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Where hooks bring rollouts.

    Args:
        log: a directory for a RolloutLog, which any number of processes may share.
        sink: "package.module:name" of something callable that takes nothing and returns a sink, an object with
            `add_many(rollouts)`.
        as_turns: as in Feed.

    Raises:
        TypeError, ValueError: a setting of the wrong kind, or neither log nor sink.
    """

    log: str | None = None
    sink: str | None = None
    as_turns: bool = False

    def __post_init__(self) -> None:
        for name in ("log", "sink"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and value):
                raise TypeError(f"{name} must be a text, not {value!r}")
        if not isinstance(self.as_turns, bool):
            raise TypeError(f"as_turns must be true or false, not {self.as_turns!r}")
        if self.sink is not None and not all(self.sink.partition(":")):
            raise ValueError(f"sink is {self.sink!r}; it must be 'package.module:name'")
        if self.log is None and self.sink is None:
            raise ValueError("neither log nor sink is set: rollouts would go nowhere")

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Settings:
        """Return the settings of DAS_TRAINERS: a JSON object, or the path of a file that holds one.

        Raises:
            ValueError: unset, unreadable, no JSON object, an unknown setting, or one that is refused; it names the
            variable.
        """
        text = environment.get(VARIABLE, "").strip()
        try:
            if text and not text.startswith("{"):
                text = Path(text).read_text(encoding="utf-8")
            values: Any = json.loads(text) if text else {}
            if not isinstance(values, dict):
                raise ValueError(f"it holds a {type(values).__name__}; it must be a JSON object")
            known = [field.name for field in fields(cls)]
            unknown = sorted(values.keys() - set(known))
            if unknown:
                raise ValueError(f"it names {', '.join(unknown)}; known are {', '.join(known)}")
            return cls(**values)
        except (OSError, TypeError, ValueError) as error:
            raise ValueError(f"{VARIABLE}: {error}") from error

    def make_feed(self) -> Feed:
        """Return a new feed. Raises what making its sinks raises."""
        sinks: list[Sink] = []
        if self.log is not None:
            sinks.append(RolloutLog(self.log))
        if self.sink is not None:
            module, _, name = self.sink.partition(":")
            sinks.append(getattr(importlib.import_module(module), name)())
        return Feed(*sinks, as_turns=self.as_turns)


@functools.cache
def process_feed() -> Feed:
    """Return the feed of this process, as DAS_TRAINERS says; never raises.

    Where the settings are wrong the feed is off, and the reason is in the log.
    """
    try:
        return Settings.from_environment(os.environ).make_feed()
    except Exception as error:
        feed = Feed()
        feed.switch_off("the settings", error)
        return feed
