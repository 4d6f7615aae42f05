"""The one line by which an engine shares its history: "ray:NAME", or a table where that is not enough."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

INSTALL_RAY = "pip install 'ray>=2.40,<3'"

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,100}")
_FORM = '"ray:NAME", of the service that `python -m das_ray start NAME` started'


def check_name(name: str, label: str) -> None:
    """Raise a TypeError or ValueError unless a service or a namespace may be called so, here and in Ray."""
    if not isinstance(name, str):
        raise TypeError(f"{label} must be a str, not {type(name).__name__}")
    if not _NAME.fullmatch(name):
        raise ValueError(f"{label} is {name!r}; it must be 1 to 100 letters, digits, _, . or -")


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedHistorySettings:
    """Which history service an engine uses, and how.

    Args:
        service: "ray:NAME".
        namespace: of Ray, in which the service is.
        address: of the Ray cluster; None: the one this process belongs to, or RAY_ADDRESS, or the one on this machine.
        in_step: pieces of running rollouts go out, and what others send is taken in between decode steps. False: only
            finished rollouts go out, and what comes is taken in when no request of the prompt runs here.
        pull_interval_ms: between two looks for what is new of running prompts, >= 10.
        piece_tokens: a running request tells when it has so many more tokens, >= 1.
        max_queue_bytes: of rollouts that wait to be published; beyond it the oldest are not shared. >= 1 MiB.

    Raises:
        TypeError, ValueError: naming the setting, the rule and the value.
    """

    service: str
    namespace: str = "das"
    address: str | None = None
    in_step: bool = True
    pull_interval_ms: int = 200
    piece_tokens: int = 8
    max_queue_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        if not isinstance(self.service, str):
            raise TypeError(f"service must be a str, not {type(self.service).__name__}")
        if not self.service.startswith("ray:"):
            raise ValueError(f"service is {self.service!r}; it must be {_FORM}")
        check_name(self.name, "the NAME of service")
        check_name(self.namespace, "namespace")
        if self.address is not None and not isinstance(self.address, str):
            raise TypeError(f"address must be a str or null, not {type(self.address).__name__}")
        if not isinstance(self.in_step, bool):
            raise TypeError(f"in_step must be true or false, not {self.in_step!r}")
        for name, least in (("pull_interval_ms", 10), ("piece_tokens", 1), ("max_queue_bytes", 1 << 20)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} must be an int, not {type(value).__name__}")
            if value < least:
                raise ValueError(f"{name} is {value}; it must be at least {least}")

    @property
    def name(self) -> str:
        """The service's name."""
        return self.service.removeprefix("ray:")


def read_shared_history(value: Any) -> SharedHistorySettings | None:
    """Return the settings that an engine's `shared_history` means; None: its history is its own.

    Args:
        value: None, "ray:NAME", or a mapping of the fields of SharedHistorySettings.

    Raises:
        TypeError, ValueError: naming the setting, the rule and the value.
    """
    if value is None or isinstance(value, SharedHistorySettings):
        return value
    if isinstance(value, str):
        value = {"service": value}
    if not isinstance(value, Mapping):
        raise TypeError(f"shared_history must be {_FORM}, or a table with it; not {type(value).__name__}")
    known = [field.name for field in fields(SharedHistorySettings)]
    unknown = [name for name in value if name not in known]
    if unknown:
        raise ValueError(f"shared_history has {unknown[0]!r}, which is no setting; there are: {', '.join(known)}")
    if "service" not in value:
        raise ValueError(f"shared_history has no service; it must be {_FORM}")
    try:
        return SharedHistorySettings(**value)
    except (TypeError, ValueError) as error:
        raise type(error)(f"shared_history: {error}") from None
