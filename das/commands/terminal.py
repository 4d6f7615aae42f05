"""How commands look: tables and notes on stdout, progress bars on stderr where that is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

_PIPE_COLUMNS = 160  # a pipe or file has no width of its own; no table needs more


@contextmanager
def progress_bar(label: str, *amount: ProgressColumn) -> Iterator[Callable[[int, int], None] | None]:
    """Show a progress bar until the block ends.

    Args:
        label: what is going on.
        amount: columns that say how much is done.

    Returns:
        a function to call with (done, total); None where stderr is no terminal.
    """
    if not sys.stderr.isatty():
        yield None
        return
    columns = TextColumn("{task.description}"), BarColumn(), *amount, TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total or None)


def new_table(*, partial: bool, show_footer: bool, caption: str | None = None) -> Table:
    """Return an empty table in the style of all commands, headed as partial where Ctrl-C ended the command."""
    return Table(
        title="PARTIAL: stopped before the end of the log" if partial else None,
        caption=caption,
        box=SIMPLE,
        show_edge=False,
        padding=0,  # with this and no edge, 80 columns are enough
        pad_edge=False,
        show_footer=show_footer,
    )


def print_table(table: Table, *notes: str) -> None:
    """Print a table and lines of text below it, as wide as the terminal, or in full where stdout is none."""
    console = Console() if sys.stdout.isatty() else Console(width=_PIPE_COLUMNS)
    console.print(table)
    for note in notes:
        console.print(note, markup=False, highlight=False)
