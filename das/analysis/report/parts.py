"""What a report is made of: figures with a table each, tables, sections; and how numbers look in it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

Trace = dict[str, Any]  # of plotly.js; a text "@name" is a colour of the page's theme


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of text under headings; the first column names the row, numbers stand in the others."""

    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One of several sets of curves that a figure can show; label: what the reader picks it by."""

    label: str
    traces: tuple[Trace, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A plot with what it says in words and in numbers.

    Args:
        name: unique in the report: its anchor.
        title, summary: plain text; the summary says what is to be seen, and is the plot's text alternative.
        choices: what can be shown, the first one first; one, where there is nothing to pick.
        layout: of plotly.js, beside the theme's.
        table: the numbers.
        is_wide: takes the page's whole width.
    """

    name: str
    title: str
    summary: str
    choices: tuple[Choice, ...]
    layout: dict[str, Any]
    table: Table
    is_wide: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A part of the report, in its order: figures, tables with a title, and ready HTML, whose texts are escaped."""

    name: str
    title: str
    text: str
    figures: tuple[Figure, ...] = ()
    tables: tuple[tuple[str, Table], ...] = ()
    html: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """What comes first.

    Args:
        verdict: the answer, in a sentence.
        is_gain: whether it is worth switching on.
        text: what that means.
        figures: name, value and explanation of the most important numbers.
        assumptions: what the answer rests on, a sentence each.
    """

    verdict: str
    is_gain: bool
    text: str
    figures: tuple[tuple[str, str, str], ...]
    assumptions: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A whole report; notes: how it was made, a sentence each."""

    title: str
    subtitle: str
    is_partial: bool
    headline: Headline
    sections: tuple[Section, ...]
    notes: tuple[str, ...] = field(default=())


def figure(
    name: str,
    title: str,
    summary: str,
    *,
    traces: Sequence[Trace] = (),
    choices: Sequence[Choice] = (),
    x: dict[str, Any] | str,
    y: dict[str, Any] | str,
    table: Table,
    is_wide: bool = False,
    **layout: Any,
) -> Figure:
    """Return a figure of some traces, or of choices; an axis is its title, or settings with one."""
    return Figure(
        name=name,
        title=title,
        summary=summary,
        choices=tuple(choices) or (Choice(label="", traces=tuple(traces)),),
        layout={"xaxis": _axis(x), "yaxis": _axis(y), **layout},
        table=table,
        is_wide=is_wide,
    )


def curve(name: str, x: Iterable[Any], y: Iterable[float], *, colour: str, dash: str = "solid", **more: Any) -> Trace:
    """Return a line; curves differ in colour and in dash, markers are asked for by `mode` and `symbol`."""
    symbol = more.pop("symbol", "circle")
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": short(x),
        "y": short(y),
        "line": {"color": f"@{colour}", "dash": dash, "width": 2.5} | more.pop("line", {}),
        "marker": {"color": f"@{colour}", "symbol": symbol, "size": 8},
        **more,
    }


def bars(name: str, x: Iterable[Any], y: Iterable[float], *, colour: str, pattern: str = "", **more: Any) -> Trace:
    """Return bars; beside their colour they have a pattern."""
    return {
        "type": "bar",
        "name": name,
        "x": short(x),
        "y": short(y),
        "marker": {
            "color": f"@{colour}",
            "line": {"color": f"@{colour}", "width": 1},
            "pattern": {"shape": pattern, "fillmode": "overlay", "fgcolor": "@paper", "solidity": 0.25},
        },
        **more,
    }


def short(values: Iterable[Any]) -> list[Any]:
    """Return values for a plot: numbers to five digits, which no eye tells from the exact ones."""
    return [value if isinstance(value, str) else float(f"{value:.5g}") for value in values]


def percent(share: float) -> str:
    """Return a share as text."""
    return f"{share:.1%}"


def ratio(numerator: float, denominator: float) -> float:
    """Return a ratio; 0 where nothing was counted."""
    return numerator / denominator if denominator else 0.0


def seconds(time_s: float) -> str:
    """Return a time as text, to the digits that matter."""
    return f"{time_s:,.0f} s" if time_s >= 100 else f"{time_s:.3g} s"


def _axis(axis: dict[str, Any] | str) -> dict[str, Any]:
    settings = {"title": axis} if isinstance(axis, str) else dict(axis)
    return settings | {"title": {"text": settings["title"]}}
