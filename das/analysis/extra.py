"""Packages of the `analysis` extra, which not everybody has installed."""

from __future__ import annotations

import importlib
from types import ModuleType


def analysis_package(name: str, *, needed_for: str) -> ModuleType:
    """Import a package of the `analysis` extra, or raise an ImportError that names the extra."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ImportError(f"{needed_for} needs {name}: pip install 'das-drafter[analysis]'", name=name) from error
