"""What `das doctor` says of Ray."""

from __future__ import annotations

import importlib.util
from importlib.metadata import PackageNotFoundError, version

from das_ray.settings import INSTALL_RAY

_OLDEST, _BELOW = (2, 40), (3, 0)


def checks() -> list[tuple[str, str, str]]:
    """Return (what, state, text): state is "ok", "off" or "wrong". Never raises, and imports no Ray."""
    try:
        found = version("ray") if importlib.util.find_spec("ray") else None
    except (ImportError, PackageNotFoundError, ValueError):
        found = None
    if found is None:
        return [("Ray", "off", f"not installed here; a history that workers share needs it: {INSTALL_RAY}")]
    parts = [int(part) for part in found.split(".")[:2] if part.isdecimal()]
    if not _OLDEST <= tuple(parts) < _BELOW:
        return [("Ray", "wrong", f"{found}; das-drafter[ray] allows 2.40 up to, not including, 3")]
    return [("Ray", "ok", f"{found}; an engine shares its history with the setting shared_history: ray:NAME")]
