"""Packages of the `analysis` extra, which not everybody has installed."""

from __future__ import annotations

import importlib
from types import ModuleType


def analysis_package(name: str, *, needed_for: str) -> ModuleType:
    """Import a package (or module) of the `analysis` extra, or raise an ImportError that says how to get it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ImportError(lacking(name.partition(".")[0], needed_for=needed_for), name=name) from error


def lacking(package: str, *, needed_for: str) -> str:
    """Return what to say where a package is missing: it is to be had however das was installed."""
    return (
        f"{needed_for} needs {package}: pip install {package} (das with its extra 'analysis' brings all such packages)"
    )
