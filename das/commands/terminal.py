"""How commands look: tables and notes on stdout, progress bars on stderr where that is a terminal."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import click
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

_PIPE_COLUMNS = 160  # a pipe or file has no width of its own; no table needs more


def print_json(value: Any, *, indent: int | None = None) -> None:
    """Print a value as JSON; what is not finite, which JSON has no word for, becomes null."""
    click.echo(json.dumps(_finite(value), indent=indent, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def progress_bar(label: str, *amount: ProgressColumn) -> Iterator[Callable[[int, int], None] | None]:
    """Show a progress bar until the block ends.

    Args:
        label: what is going on.
        amount: columns that say how much is done.

    Returns:
        a function to call with (done, total); None where stderr is no terminal.
    """
    if sys.stderr is None or not sys.stderr.isatty():
        yield None
        return
    columns = TextColumn("{task.description}"), BarColumn(), *amount, TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total or None)


def print_table(
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    *notes: str,
    total: Sequence[str] | None = None,
    drop_first: Sequence[str] = (),
    partial: bool = False,
    caption: str | None = None,
) -> None:
    """Print a table and lines of text below it, as wide as the terminal, or in full where stdout is none.

    Args:
        headings, rows, total: one entry a column; the total is left out where there is a single row. None: no total.
        notes: stand below the table.
        drop_first: headings of the columns that a terminal too narrow for all does without, the first one first.
        partial: Ctrl-C ended the command, and the table says so.
        caption: stands right below the table.
    """
    console = Console() if sys.stdout.isatty() else Console(width=_PIPE_COLUMNS)
    shown = list(range(len(headings)))
    left_out: list[str] = []
    while True:
        table = Table(
            title="PARTIAL: stopped before the end of the log" if partial else None,
            caption=caption,
            box=SIMPLE,
            show_edge=False,
            padding=0,  # with this and no edge, 80 columns are enough
            pad_edge=False,
            show_footer=total is not None and len(rows) > 1,
        )
        for column in shown:  # a figure that does not fit even so goes on in the next line: none is ever cut
            table.add_column(
                headings[column],
                footer=total[column] if total is not None else "",
                justify="right",
                vertical="bottom",
                overflow="fold",
            )
        for row in rows:
            table.add_row(*(row[column] for column in shown))
        if len(left_out) == len(drop_first) or _width(console, table) <= console.width:
            break
        left_out.append(drop_first[len(left_out)])
        shown.remove(headings.index(left_out[-1]))
    console.print(table)
    if left_out:
        names = ", ".join(" ".join(heading.split()) for heading in left_out)
        notes = (f"Left out, as the terminal has {console.width} columns: {names}. --json prints all.", *notes)
    for note in notes:
        console.print(note, markup=False, highlight=False)


def _width(console: Console, table: Table) -> int:
    """How wide the table is where it has all the room it wants."""
    return console.measure(table, options=console.options.update(max_width=10_000)).maximum
