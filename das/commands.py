"""The commands of `das`: results go to stdout; errors, warnings and Ctrl-C end in `das.cli`, as exceptions."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from das.analysis.inspect import LogStatistics, LogSummary, StepSummary
from das.analysis.logs import LogError, LogRecord, read_logs

_Command = TypeVar("_Command", bound=Callable[..., Any])
_BAD_ROWS_SHOWN = 5
_PIPE_COLUMNS = 160  # a pipe or file has no width of its own; no table needs more


@click.group(context_settings={"help_option_names": ["-h", "--help"]}, invoke_without_command=True)
@click.pass_context
def das(context: click.Context) -> None:
    """Speculative decoding for RL rollouts, offline: what a rollout log holds and what drafting would bring on it."""
    if context.invoked_subcommand is None:
        raise click.UsageError("A command is missing.")


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
    with _progress_bar("reading") as progress:
        yield read_logs(logs, tokenizer=tokenizer, skip_bad=skip_bad, on_bad=bad_rows.add, progress=progress)


@contextmanager
def _progress_bar(label: str) -> Iterator[Callable[[int, int], None] | None]:
    if not sys.stderr.isatty():
        yield None
        return
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total or None)


def print_table(table: Table) -> None:
    """Print a table as wide as the terminal, or in full where stdout is none."""
    console = Console() if sys.stdout.isatty() else Console(width=_PIPE_COLUMNS)
    console.print(table)


@das.command()
@log_options
def inspect(logs: Sequence[Path], tokenizer: Path | None, skip_bad: bool, as_json: bool) -> None:
    """Say what is in a log: rollouts, prompts, lengths, rewards, by training step.

    LOG is a .jsonl, .jsonl.gz or .parquet file, or a directory of such files (verl's rollout dumps); several are read
    as one. Ctrl-C prints what was read so far.

    \b
    Keys of --json:
      logs, partial (true after Ctrl-C), num_bad_rows
      epochs_per_prompt   {mean, min, max}
      total               one summary of everything
      training_steps      one summary for each training step
    Keys of a summary:
      training_step (null: not known, or total), num_rollouts, num_prompts
      samples_per_prompt  {mean, min, max}, within a training step
      response_tokens     {sum, mean, p50, p90, p99, max}
      token_share         of the log's response tokens, 0..1
      reward_mean, truncated_share (null: the log does not say)
    """
    statistics, bad_rows, partial = LogStatistics(), BadRows(), False
    try:
        with reading(logs, tokenizer=tokenizer, skip_bad=skip_bad, bad_rows=bad_rows) as records:
            for record in records:
                statistics.add(record)
    except KeyboardInterrupt:
        partial = True
    bad_rows.warn()
    summary = statistics.summary()
    if summary is not None and as_json:
        extent = {"logs": [str(log) for log in logs], "partial": partial, "num_bad_rows": bad_rows.count}
        click.echo(json.dumps(extent | asdict(summary)))
    elif summary is not None:
        print_table(_inspect_table(summary, partial=partial))
    if partial:
        raise click.Abort


def _inspect_table(summary: LogSummary, *, partial: bool) -> Table:
    epochs = summary.epochs_per_prompt
    table = Table(
        title="PARTIAL: stopped before the end of the log" if partial else None,
        caption=f"{summary.total.response_tokens.sum:,} response tokens; a prompt comes in {epochs.mean:.4g} epochs "
        f"({epochs.min} to {epochs.max})",
        box=SIMPLE,
        show_edge=False,
        padding=(0, 1, 0, 0),  # with this and no edge, 80 columns are enough
        pad_edge=False,
        show_footer=len(summary.training_steps) > 1,
    )
    total = _inspect_cells(summary.total, "all")
    headings = ("step", "rollouts", "prompts", "samples", "mean", "p50", "p90", "p99", "max", "tokens", "reward", "cut")
    for heading, footer in zip(headings, total, strict=True):
        table.add_column(heading, footer=footer, justify="right")
    for step in summary.training_steps:
        table.add_row(*_inspect_cells(step, "-" if step.training_step is None else str(step.training_step)))
    return table


def _inspect_cells(step: StepSummary, name: str) -> tuple[str, ...]:
    samples, tokens = step.samples_per_prompt, step.response_tokens
    return (
        name,
        f"{step.num_rollouts:,}",
        f"{step.num_prompts:,}",
        f"{samples.min}" if samples.min == samples.max else f"{samples.min}-{samples.max}",
        f"{tokens.mean:.0f}",
        *(str(length) for length in (tokens.p50, tokens.p90, tokens.p99, tokens.max)),
        f"{step.token_share:.1%}",
        "-" if step.reward_mean is None else f"{step.reward_mean:.3f}",
        "-" if step.truncated_share is None else f"{step.truncated_share:.1%}",
    )
