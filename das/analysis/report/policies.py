"""Figures of policies side by side: what each drafts, and how long the log then takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from das.analysis.projection import Projection, Schedule
from das.analysis.report.parts import Figure, Table, curve, figure, percent

_SYMBOLS = (
    "circle-open",
    "circle",
    "square",
    "diamond",
    "cross",
    "x",
    "triangle-up",
    "triangle-down",
    "star",
    "hexagon",
)


@dataclass(frozen=True, slots=True)
class Compared:
    """One of the policies or settings that were simulated on a log; name: what tells it from the others."""

    name: str
    projection: Projection


def pareto_of(compared: Sequence[Compared]) -> Figure:
    """Return makespan against drafted tokens: who ends earlier drafting no more, nobody beats.

    Args:
        compared: in order of makespan, at least one.
    """
    off = compared[0].projection.without_drafts
    points = [(0.0, off.makespan_s, "off"), *((_drafted(c), c.projection.makespan_s, c.name) for c in compared)]
    best = _frontier(points)
    fastest = compared[0]
    return figure(
        "pareto",
        "Which policy is worth its drafts",
        f"Earliest ends {fastest.name}, which drafts {_drafted(fastest):.2f} tokens per decode step. Policies on the "
        "line (blue) are not beaten: nothing else here ends as early with as few drafts.",
        traces=[
            curve("not beaten", [x for x, *_ in best], [y for _, y, _ in best], colour="das", hoverinfo="skip"),
            *(
                curve(
                    name,
                    [drafted],
                    [makespan_s],
                    colour="das" if (drafted, makespan_s, name) in best else "orange",
                    mode="markers",
                    symbol=_SYMBOLS[number % len(_SYMBOLS)],
                    hovertemplate="%{x:.2f} drafted per decode step<br>%{y:.4g} s",
                )
                for number, (drafted, makespan_s, name) in enumerate(points)
            ),
        ],
        x={"title": "drafted tokens per decode step", "rangemode": "tozero"},
        y={"title": "makespan, seconds", "rangemode": "tozero"},
        table=table_of(compared),
        is_wide=True,
    )


def table_of(compared: Sequence[Compared]) -> Table:
    """Return a row a policy, and one of speculation switched off."""
    off = compared[0].projection.without_drafts
    schedules = [*((c.name, c.projection.with_drafts) for c in compared), ("off", off)]
    return Table(
        headings=(
            "policy",
            "makespan, s",
            "times as fast",
            "forwards",
            "tokens per decode step",
            "drafted",
            "accepted",
        ),
        rows=tuple(
            (
                name,
                f"{its.makespan_s:,.1f}",
                f"{off.makespan_s / its.makespan_s:.3f}" if its.makespan_s else "-",
                f"{_forwards(its):,}",
                f"{its.counters.tokens_per_decode_step:.2f}",
                f"{its.counters.drafted_per_decode_step:.2f}",
                percent(its.counters.draft_acceptance_rate) if its.counters.num_drafted_tokens else "-",
            )
            for name, its in schedules
        ),
    )


def _forwards(schedule: Schedule) -> int:
    return sum(worker.num_forwards for worker in schedule.workers)


def _drafted(compared: Compared) -> float:
    return compared.projection.with_drafts.counters.drafted_per_decode_step


def _frontier(points: Sequence[tuple[float, float, str]]) -> list[tuple[float, float, str]]:
    """The points that none beats in both respects, in order of drafted tokens."""
    best: list[tuple[float, float, str]] = []
    for point in sorted(points):
        if not best or point[1] < best[-1][1]:
            best.append(point)
    return best
