"""What every command that reads logs shares: its options, reading with a progress bar, bad rows, and `--json`."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.progress import DownloadColumn

from das.analysis.logs import LogError, LogRecord, read_logs
from das.commands.terminal import progress_bar

_Command = TypeVar("_Command", bound=Callable[..., Any])
_BAD_ROWS_SHOWN = 5


def log_options(command: _Command) -> _Command:
    """Give a command the parameters logs, tokenizer, skip_bad and as_json."""
    path = click.Path(path_type=Path)
    options = [
        click.argument("logs", metavar="LOG...", nargs=-1, required=True, type=path),
        click.option("--tokenizer", metavar="FILE", type=path, help="tokenizer.json of the policy, for text logs."),
        click.option("--skip-bad", is_flag=True, help="Leave out rows that are no rollout; say how many."),
        click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table."),
    ]
    return reduce(lambda decorated, option: option(decorated), reversed(options), command)


@dataclass(slots=True)
class BadRows:
    """The rows left out by --skip-bad."""

    count: int = 0
    first: list[str] = field(default_factory=list)

    def add(self, error: LogError) -> None:
        """Count a row; keep the message of the first few."""
        self.count += 1
        if len(self.first) < _BAD_ROWS_SHOWN:
            self.first.append(str(error))

    def warn(self) -> None:
        """Say what was left out."""
        for message in self.first:
            warnings.warn(f"skipped {message}", stacklevel=2)
        if self.count > len(self.first):
            warnings.warn(f"skipped {self.count} bad rows in all", stacklevel=2)


@contextmanager
def reading(
    logs: Sequence[Path], *, tokenizer: Path | None, skip_bad: bool, bad_rows: BadRows
) -> Iterator[Iterator[LogRecord]]:
    """Open logs the way every command does: with a progress bar, and bad rows counted into `bad_rows`."""
    with progress_bar("reading", DownloadColumn()) as progress:
        yield read_logs(logs, tokenizer=tokenizer, skip_bad=skip_bad, on_bad=bad_rows.add, progress=progress)


def print_json(figures: dict[str, Any], *, logs: Sequence[Path], partial: bool, bad_rows: BadRows) -> None:
    """Print one object: what was read, and the figures."""
    extent = {"logs": [str(log) for log in logs], "partial": partial, "num_bad_rows": bad_rows.count}
    click.echo(json.dumps(extent | figures))
