"""What every command that reads logs shares: its options, reading with a progress bar, what was found, and `--json`."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce, wraps
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.progress import DownloadColumn

from das.analysis.containers import SUFFIXES
from das.analysis.formats import FORMATS
from das.analysis.logs import LogError, LogRecord, read_logs
from das.commands.parameter_types import FilePath
from das.commands.terminal import print_json, progress_bar

_Command = TypeVar("_Command", bound=Callable[..., Any])
_BAD_ROWS_SHOWN = 5
_STANDARD_INPUT = "/dev/stdin"


class LogInput:
    """The logs that a command reads, and what it has found in them so far.

    Args:
        logs: files and directories.
        tokenizer, format: as of `read_logs`.
        skip_bad: leave out bad rows, and count them.

    Attributes:
        name: of the first log, and how many more there are.
        tokenizer: as given.
        prompt_names: by prompt key, as far as rows that were read name their prompts.
    """

    def __init__(self, logs: Sequence[Path], *, tokenizer: Path | None, format: str | None, skip_bad: bool) -> None:
        self.name = logs[0].name + (f" and {len(logs) - 1} more" if len(logs) > 1 else "")
        self.tokenizer = tokenizer
        self.prompt_names: dict[int, str] = {}
        self._logs = logs
        self._options: dict[str, Any] = {"tokenizer": tokenizer, "format": format, "skip_bad": skip_bad}
        self._formats: Counter[str] = Counter()  # rows of each
        self._num_later_turns = 0
        self._num_bad = 0
        self._first_bad: list[str] = []

    def refuse_as_output(self, path: Path | None, option: str) -> None:
        """Raise BadParameter if to write to this file would overwrite a log."""
        if path is None or not path.exists():
            return
        for log in self._logs:
            is_inside = log.is_dir() and path.name.endswith(SUFFIXES) and path.resolve().is_relative_to(log.resolve())
            if is_inside or (log.exists() and path.samefile(log)):
                raise click.BadParameter(f"{path} is a log that is read; it would be overwritten.", param_hint=option)

    @contextmanager
    def records(self) -> Iterator[Iterator[LogRecord]]:
        """Open the logs, with a progress bar; an error of a row tells the option that leaves such rows out."""
        with progress_bar("reading", DownloadColumn()) as progress:
            try:
                yield self._noted(read_logs(self._logs, on_bad=self._add_bad, progress=progress, **self._options))
            except LogError as error:
                if error.is_skippable and not self._options["skip_bad"]:
                    error.args = (f"{error} (--skip-bad leaves such rows out)",)
                raise

    def warn(self, *, tokenizer_is_used: bool = False) -> None:
        """Say which bad rows were left out, and that --tokenizer was of no use.

        Args:
            tokenizer_is_used: by the command itself, whatever the log holds.
        """
        formats = [FORMATS[name] for name in self._formats if name in FORMATS]
        if self.tokenizer and self._formats and not tokenizer_is_used and not any(its.is_text for its in formats):
            warnings.warn(f"--tokenizer {self.tokenizer} was not used: the log holds token ids", stacklevel=2)
        for message in self._first_bad:
            warnings.warn(f"skipped {message}", stacklevel=2)
        if self._num_bad > len(self._first_bad):
            warnings.warn(f"skipped {self._num_bad} bad rows in all", stacklevel=2)

    def note(self) -> str:
        """Return a sentence on what was read."""
        turns = f"; rows that are later turns: {self._num_later_turns:,}" if self._num_later_turns else ""
        return f"Log format: {', '.join(self._formats)}{turns}."

    def print_json(self, figures: dict[str, Any], *, partial: bool) -> None:
        """Print one object: what was read, and the figures."""
        extent = {
            "logs": [str(log) for log in self._logs],
            "formats": dict(self._formats),
            "partial": partial,
            "num_bad_rows": self._num_bad,
            "num_later_turns": self._num_later_turns,
        }
        print_json(extent | figures)

    def _noted(self, records: Iterator[LogRecord]) -> Iterator[LogRecord]:
        for record in records:
            self._formats[record.format] += 1
            self._num_later_turns += record.is_later_turn
            if record.prompt_id is not None:
                self.prompt_names.setdefault(record.rollout.key, record.prompt_id)
            yield record

    def _add_bad(self, error: LogError) -> None:
        self._num_bad += 1
        if len(self._first_bad) < _BAD_ROWS_SHOWN:
            self._first_bad.append(str(error))


class _LogPath(FilePath):
    """A log; - is standard input."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return Path(_STANDARD_INPUT) if value == "-" else super().convert(value, param, ctx)


def log_options(command: _Command) -> _Command:
    """Give a command a `LogInput` as its first argument, made of options, and the parameter as_json."""

    @wraps(command)
    def with_input(
        *, logs: Sequence[Path], tokenizer: Path | None, format_name: str | None, skip_bad: bool, **others: Any
    ) -> Any:
        named_twice = [log for log, times in Counter(os.path.realpath(log) for log in logs).items() if times > 1]
        if named_twice:
            raise click.BadParameter(f"{named_twice[0]} is named twice; it would count twice.", param_hint="LOG")
        return command(LogInput(logs, tokenizer=tokenizer, format=format_name, skip_bad=skip_bad), **others)

    path = FilePath()
    options = [
        click.argument("logs", metavar="LOG...", nargs=-1, required=True, type=_LogPath()),
        click.option("--tokenizer", metavar="FILE", type=path, help="tokenizer.json of the policy, for text logs."),
        click.option(
            "--format",
            "format_name",
            type=click.Choice(list(FORMATS)),
            help="The trainer's log format, where it is not to be told from the fields.",
        ),
        click.option("--skip-bad", is_flag=True, help="Leave out rows that are no rollout; say how many."),
        click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table."),
    ]
    return reduce(lambda decorated, option: option(decorated), reversed(options), with_input)  # type: ignore[return-value]
