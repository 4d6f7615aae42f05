"""What `das doctor` says of vLLM."""

from __future__ import annotations

import os
from importlib.metadata import entry_points
from pathlib import Path

from das_vllm.seam import check, installed_package, installed_version
from das_vllm.settings import ENVIRONMENT_VARIABLE, read_settings


def checks() -> list[tuple[str, str, str]]:
    """Return (what, state, text): state is "ok", "off" or "wrong". Never raises, and imports no vLLM."""
    package = installed_package()
    if package is None:
        return [("vLLM", "off", "not installed here; das drafts in vLLM 0.22 to 0.33: pip install 'vllm>=0.22,<0.34'")]
    return [("vLLM", "ok", f"{installed_version()}, in {package}"), *_seam(package), _plugin(), _settings()]


def _seam(package: Path) -> list[tuple[str, str, str]]:
    rows = []
    for hook in check(package):
        if hook.fits:
            continue
        rows.append(("vLLM seam", "wrong" if hook.is_essential else "off", str(hook)))
    return rows or [("vLLM seam", "ok", "all hooks fit; V1 model runner, which vLLM takes for das by itself")]


def _plugin() -> tuple[str, str, str]:
    if not [entry for entry in entry_points(group="vllm.general_plugins") if entry.value.startswith("das_vllm.")]:
        return (
            "vLLM plugin",
            "off",
            "no entry point: das drafts without RPC methods; install das-drafter as a package",
        )
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "das" not in allowed.split(","):
        return ("vLLM plugin", "off", f"VLLM_PLUGINS is {allowed!r}: das drafts without RPC methods. Add das to it")
    return ("vLLM plugin", "ok", "binds the model runner, adds the RPC methods")


def _settings() -> tuple[str, str, str]:
    try:
        settings = read_settings(None, os.environ)
    except (TypeError, ValueError) as error:
        return ("vLLM settings", "wrong", str(error))
    source = f"{ENVIRONMENT_VARIABLE}: " if os.environ.get(ENVIRONMENT_VARIABLE) else "defaults: "
    return ("vLLM settings", "ok", source + str(settings))
