"""What `das doctor` says of SGLang: what is installed, whether it fits, what is set, what is off and why."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.metadata import entry_points

from das_sglang import compatibility
from das_sglang.settings import VARIABLE, Settings


@dataclass(frozen=True, slots=True)
class Check:
    """One row.

    Args:
        name: what was checked.
        ok: whether it is as it should be.
        detail: what was found.
        remedy: what to do where it is not ok; else empty.
    """

    name: str
    ok: bool
    detail: str
    remedy: str = ""

    def row(self) -> tuple[str, str, str]:
        """Return (what, state, text), as `das doctor` prints it."""
        text = f"{self.detail}: {self.remedy}" if self.remedy else self.detail
        return self.name, "ok" if self.ok else "wrong", text


def checks() -> list[tuple[str, str, str]]:
    """Return (what, state, text): state is "ok", "off" or "wrong". Never raises, and imports no SGLang."""
    if compatibility.installed_version() is None:
        return [("SGLang", "off", "not installed here; das drafts in SGLang 0.5.23: pip install sglang==0.5.23")]
    return [check.row() for check in environment_checks()]


def environment_checks() -> list[Check]:
    """Return the checks of an environment that has SGLang, in the order in which failing ones should be repaired."""
    version = compatibility.installed_version() or "unknown"
    return [_version(version), _seams(version), _entry_point(), _selection(), _settings()]


def _version(version: str) -> Check:
    tested = ", ".join(compatibility.TESTED)
    if compatibility.is_in_range(version):
        return Check("SGLang", True, f"{version} (tested with {tested})")
    return Check("SGLang", False, f"{version}, outside of what das-drafter[sglang] allows", f"use {tested}")


def _seams(version: str) -> Check:
    missing = compatibility.problems()
    total = len(compatibility.SEAMS)
    if not missing:
        return Check("SGLang: what das builds on", True, f"all {total} functions and classes are there")
    detail = f"{version} lacks {len(missing)} of {total}: {'; '.join(missing)}"
    return Check("SGLang: what das builds on", False, detail, f"use SGLang {', '.join(compatibility.TESTED)}")


def _entry_point() -> Check:
    name = "SGLang: plugin"
    if "das" in {point.name for point in entry_points(group="sglang.srt.plugins")}:
        return Check(name, True, "found by its entry point; select it with --speculative-algorithm DAS")
    return Check(
        name, False, "no entry point", "install das-drafter with pip; a source folder on the path is not enough"
    )


def _selection() -> Check:
    """SGLang's own way to leave plugins out."""
    name, allowed = "SGLang: SGLANG_PLUGINS", os.environ.get("SGLANG_PLUGINS", "")
    if not allowed.strip() or "das" in [part.strip() for part in allowed.split(",")]:
        return Check(name, True, f"is {allowed!r}" if allowed else "not set, so every plugin is loaded")
    return Check(name, False, f"is {allowed!r} and leaves das out", "add das to it, or unset it")


def _settings() -> Check:
    name = f"SGLang: {VARIABLE}"
    try:
        settings = Settings.from_environment(os.environ)
    except ValueError as error:
        return Check(name, False, str(error), "correct it, or unset it for the defaults")
    is_set = "" if os.environ.get(VARIABLE) else "not set, so defaults: "
    return Check(name, True, f"{is_set}{settings}")
