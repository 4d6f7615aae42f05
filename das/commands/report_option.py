"""The `--html` option: where the report goes, checked before anything takes long."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from das.analysis.logs import load_tokenizer
from das.analysis.report import Decode
from das.commands.parameter_types import FilePath
from das.file_errors import naming_file

_Command = TypeVar("_Command", bound=Callable[..., Any])


def html_option(command: _Command) -> _Command:
    """Give a command the parameter html."""
    return click.option(
        "--html",
        metavar="FILE",
        type=FilePath(dir_okay=False),
        callback=lambda context, option, path: _checked(path),
        help="Write a report with figures, one file that opens in a browser without a network.",
    )(command)


def decoder(tokenizer: Path | None) -> Decode | None:
    """Return what turns a token id into its text, where the user has named a tokenizer.json."""
    if tokenizer is None:
        return None
    its = load_tokenizer(tokenizer, needed_for="token text in a report")
    return lambda token_id: str(its.decode([token_id], skip_special_tokens=False))


def write_report(path: Path, page: str) -> str:
    """Write a report, and return a sentence that says so."""
    with naming_file(path):
        path.write_text(page, encoding="utf-8")
    return f"Report: {path} ({path.stat().st_size / 1e6:.1f} MB), for a browser."


def _checked(path: Path | None) -> Path | None:
    """Refuse what could not be written once all is replayed."""
    if path is None:
        return None
    if not path.parent.is_dir():
        raise click.BadParameter(f"{path.parent} is no directory.")
    return path
