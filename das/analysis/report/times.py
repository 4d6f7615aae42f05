"""Figures of lengths and time: the long tail, and how a batch empties with drafts and without."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from das.analysis.projection import Schedule
from das.analysis.recording import FinishedRequest, Passes
from das.analysis.report.acceptance import named_batches
from das.analysis.report.parts import Choice, Figure, Table, bars, curve, figure, percent, seconds
from das.latency import LatencyModel
from das.reliability import Figures

_MOST_BATCHES = 12  # that a reader may pick from
_MOST_CURVES = 4  # of lengths, by epoch
_NUM_POINTS = 200  # of a curve
_STYLES = (("das", "solid"), ("orange", "dash"), ("green", "dashdot"), ("purple", "dot"))
_FEW = 0.1  # of a batch's requests
_CUT_OFF = 0.01  # share of rollouts that would hardly have the same length by chance


@dataclass(frozen=True, slots=True)
class BatchTimes:
    """How many requests of one batch ran at which time; times_s: when each pass began, and the end of the last one."""

    name: str
    with_drafts: Figures
    with_drafts_s: Figures
    without_drafts: Figures
    without_drafts_s: Figures

    @property
    def speedup(self) -> float:
        """Time without drafts / time with them."""
        return float(self.without_drafts_s[-1] / self.with_drafts_s[-1])


def batch_times(
    ended: Sequence[FinishedRequest], passes: Sequence[Passes], *, latency: LatencyModel
) -> list[BatchTimes]:
    """Return how each whole batch emptied, by a latency model; the same sums as `das.analysis.generation_time`.

    Args:
        ended: of all batches, which follow one another.
        passes: of each batch.
        latency: what a pass takes.

    Complexity: O(tokens).
    """
    times = []
    for (name, requests), its in zip(named_batches(ended), passes, strict=False):
        if not len(its.num_running) or its.num_running[0] != len(requests):
            continue  # stopped in the middle, or none of its tokens was generated
        tokens = its.num_running + its.num_drafted_tokens + its.num_padded_tokens
        with_ms = latency.step_ms(tokens, num_context_tokens=its.num_context_tokens)
        without, context = _undrafted(requests)
        without_ms = latency.step_ms(without, num_context_tokens=context, speculating=False)
        times.append(BatchTimes(name, its.num_running, _starts(with_ms), without, _starts(without_ms)))
    return times


def running_of(times: Sequence[BatchTimes]) -> Figure:
    """Return the requests running over time, of a typical batch; others can be picked."""
    shown = sorted(np.linspace(0, len(times) - 1, min(len(times), _MOST_BATCHES)).astype(int).tolist())
    typical = sorted(range(len(times)), key=lambda i: times[i].speedup)[len(times) // 2]
    order = [typical, *(i for i in shown if i != typical)]
    batch = times[typical]
    few_with, few_without = (
        _time_of_few(batch.with_drafts, batch.with_drafts_s),
        _time_of_few(batch.without_drafts, batch.without_drafts_s),
    )
    end_s, end_without_s = batch.with_drafts_s[-1], batch.without_drafts_s[-1]
    return figure(
        "running",
        "A batch empties",
        f"In a typical batch, {batch.name}, the last request ends after {seconds(end_s)} with drafts instead of "
        f"{seconds(end_without_s)}. Without drafts, at most a tenth of the requests run in {percent(few_without)} of "
        f"the time, with drafts in {percent(few_with)}: there forwards are nearly empty, and drafts cost little.",
        choices=[
            Choice(
                label=f"{times[i].name}{' (typical)' if i == typical else ''}: {times[i].speedup:.2f} times as fast",
                traces=(
                    _running("without drafts", times[i].without_drafts, times[i].without_drafts_s, "off", "dash"),
                    _running("with das", times[i].with_drafts, times[i].with_drafts_s, "das", "solid"),
                ),
            )
            for i in order
        ],
        x={"title": "seconds, by the latency model", "rangemode": "tozero"},
        y={"title": "requests running", "rangemode": "tozero"},
        table=Table(
            headings=("batch", "requests", "seconds with drafts", "without", "times as fast", "forwards", "without"),
            rows=tuple(
                (
                    batch.name,
                    f"{batch.with_drafts[0]:,.0f}",
                    f"{batch.with_drafts_s[-1]:,.2f}",
                    f"{batch.without_drafts_s[-1]:,.2f}",
                    f"{batch.speedup:.2f}",
                    f"{len(batch.with_drafts):,}",
                    f"{len(batch.without_drafts):,}",
                )
                for batch in times
            ),
        ),
        is_wide=True,
    )


def running_under(schedules: Sequence[tuple[str, Schedule]]) -> Figure:
    """Return the requests running over time under several policies; the first is speculation switched off.

    Args:
        schedules: each under its name; those behind the second one are shown when the reader asks for them.
    """
    (_, off), (best_name, best) = schedules[:2]
    traces = []
    for number, (name, schedule) in enumerate(schedules):
        width_s = schedule.duration_s / max(1, len(schedule.num_running))
        colour, dash = ("off", "dash") if number == 0 else _STYLES[(number - 1) % len(_STYLES)]
        times_s = [width_s * (i + 0.5) for i in range(len(schedule.num_running))]
        trace = curve(
            f"{name}: {seconds(schedule.makespan_s)}", times_s, schedule.num_running, colour=colour, dash=dash
        )
        traces.append(trace | ({} if number < 2 else {"visible": "legendonly"}))
    return figure(
        "running",
        "Requests running over time",
        f"Speculation off takes {seconds(off.makespan_s)}, {best_name} {seconds(best.makespan_s)}. Means over equal "
        "slices of time, all workers together; other policies appear when their name is chosen.",
        traces=traces,
        x={"title": "seconds, by the latency model", "rangemode": "tozero"},
        y={"title": "requests running", "rangemode": "tozero"},
        table=Table(
            headings=("policy", "makespan, s", "until training ended, s", "busy"),
            rows=tuple(
                (name, f"{its.makespan_s:,.1f}", f"{its.duration_s:,.1f}", percent(its.utilisation))
                for name, its in schedules
            ),
        ),
        is_wide=True,
    )


def lengths_of(ended: Sequence[FinishedRequest]) -> Figure:
    """Return how long the responses are."""
    lengths = np.array([request.num_tokens for request in ended])
    edges = np.unique(np.linspace(0, lengths.max() + 1, 41).astype(int))
    counts, _ = np.histogram(lengths, edges)
    names = [(low + high - 1) / 2 for low, high in pairwise(edges)]
    p50, p90, p99 = (int(p) for p in np.percentile(lengths, (50, 90, 99), method="inverted_cdf"))
    at_limit = float((lengths == lengths.max()).mean())
    cut = f" {percent(at_limit)} are exactly so long: probably cut off at a limit." if at_limit >= _CUT_OFF else ""
    return figure(
        "lengths",
        "How long the responses are",
        f"Half of them have at most {p50:,} tokens, one in ten more than {p90:,}, one in a hundred more than {p99:,}; "
        f"the longest has {lengths.max():,}.{cut}",
        traces=[
            bars("rollouts", names, counts, colour="das", hovertemplate="about %{x:.0f} tokens: %{y}<extra></extra>")
        ],
        x={"title": "generated tokens", "rangemode": "tozero"},
        y="rollouts",
        bargap=0.05,
        table=Table(
            headings=("tokens", "rollouts"),
            rows=tuple(
                (f"{low:,} to {high - 1:,}", f"{count:,}")
                for low, high, count in zip(edges[:-1], edges[1:], counts, strict=True)
                if count
            ),
        ),
    )


def tail_of(ended: Sequence[FinishedRequest]) -> Figure:
    """Return which share of the rollouts is at least so long, by epoch."""
    steps: dict[int | None, list[int]] = {}
    for request in ended:
        steps.setdefault(request.rollout.training_step, []).append(request.num_tokens)
    names = sorted(steps, key=lambda step: -1 if step is None else step)
    shown = sorted({names[i] for i in np.linspace(0, len(names) - 1, _MOST_CURVES).astype(int)}, key=names.index)
    longest = sorted((length for lengths in steps.values() for length in lengths), reverse=True)
    tenth = longest[: max(1, len(longest) // 10)]
    return figure(
        "tail",
        "The long tail",
        f"The longest tenth of the rollouts has {percent(sum(tenth) / sum(longest))} of all tokens: the batch waits "
        "for them. The curve is the share of rollouts that would still be running after so many decode steps without "
        "drafts.",
        traces=[
            curve(
                "all" if step is None else f"training step {step}",
                *_survival(np.array(steps[step])),
                colour=_STYLES[number % len(_STYLES)][0],
                dash=_STYLES[number % len(_STYLES)][1],
                line={"shape": "hv"},
            )
            for number, step in enumerate(shown)
        ],
        x={"title": "generated tokens", "rangemode": "tozero"},
        y={"title": "share at least as long", "type": "log", "tickformat": ".3~%"},
        table=Table(
            headings=("training step", "rollouts", "mean tokens", "median", "90% have at most", "99%", "longest"),
            rows=tuple(
                (
                    "-" if step is None else str(step),
                    f"{len(steps[step]):,}",
                    f"{np.mean(steps[step]):,.0f}",
                    *(f"{np.percentile(steps[step], p, method='inverted_cdf'):,.0f}" for p in (50, 90, 99)),
                    f"{max(steps[step]):,}",
                )
                for step in names
            ),
        ),
    )


def _undrafted(requests: Sequence[FinishedRequest]) -> tuple[Figures, Figures]:
    """Return how many requests run in each pass at one token a pass, and the tokens that those read."""
    longest = max(request.num_tokens for request in requests)
    running, context = np.zeros(longest), np.zeros(longest)
    for request in requests:
        mask = request.rollout.response_mask
        positions = np.arange(request.num_tokens) if mask is None else np.flatnonzero(mask)
        running[: len(positions)] += 1
        context[: len(positions)] += len(request.rollout.prompt_token_ids) + positions
    return running, context


def _starts(pass_ms: Figures) -> Figures:
    return np.concatenate([[0.0], np.cumsum(pass_ms)]) / 1e3


def _time_of_few(num_running: Figures, times_s: Figures) -> float:
    """Share of the time in which a tenth of the requests at most runs."""
    is_few = num_running <= max(1.0, _FEW * num_running[0])
    return float(np.diff(times_s)[is_few].sum() / times_s[-1])


def _running(name: str, num_running: Figures, times_s: Figures, colour: str, dash: str) -> dict[str, object]:
    changed = np.flatnonzero(np.diff(num_running)) + 1
    points = np.unique(np.concatenate([[0], changed, [len(num_running) - 1]]))
    points = points[np.unique(np.linspace(0, len(points) - 1, _NUM_POINTS).astype(int))]
    x = [*times_s[points].tolist(), float(times_s[-1])]
    y = [*num_running[points].tolist(), 0.0]
    return curve(name, x, y, colour=colour, dash=dash, line={"shape": "hv"})


def _survival(lengths: Figures) -> tuple[list[float], list[float]]:
    """Return lengths, and the share of rollouts at least as long as each; denser where few are left."""
    left = np.unique(np.geomspace(1, len(lengths), _NUM_POINTS).astype(int))[::-1]
    return [0.0, *np.sort(lengths)[len(lengths) - left].tolist()], [1.0, *(left / len(lengths)).tolist()]
