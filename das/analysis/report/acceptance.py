"""Figures of what was drafted and accepted: by batch, position, context, source and length, and how well foretold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from das.analysis.recording import FinishedRequest, Recording, TracedToken
from das.analysis.report.parts import Figure, Table, Trace, bars, curve, figure, percent, ratio
from das.draft_origins import TokenOrigin
from das.length_classes import LengthClass
from das.metrics import AcceptanceCounters
from das.reliability import Reliability

_MOST_BATCHES = 40  # a longer log gets one point a training step
_ORDERS = ((1, 1), (2, 2), (3, 3), (4, 5), (6, 7), (8, 11), (12, 15), (16, 16))  # as the drafting rule reads them
_MEDIUM_ABOVE, _LONG_ABOVE = 0.5, 0.8  # as in `das.LengthClasses`
SOURCES = {
    "running": ("this epoch", "the request's own text, its siblings', and what ended in the same epoch"),
    "history": ("earlier epochs", "finished rollouts of the same prompt"),
    "both": ("both", "this epoch and earlier ones"),
    "common": ("other prompts", "text of other prompts, where the own one has no useful history"),
}
"""Where a draft token was seen before, and what that means."""


def source_of(origin: TokenOrigin | None) -> str:
    """Return the key in SOURCES of a token's origin; of one that no tree knows, which nothing drafts, "common"."""
    if origin is None or origin.is_common:
        return "common"
    if origin.num_running and origin.num_history:
        return "both"
    return "running" if origin.num_running else "history"


def named_batches(ended: Sequence[FinishedRequest]) -> list[tuple[str, list[FinishedRequest]]]:
    """Return the requests of each batch, in order, named by its training step and, of several, its number in that."""
    batches: dict[int, list[FinishedRequest]] = {}
    for request in ended:
        batches.setdefault(request.batch, []).append(request)
    steps = [batches[number][0].rollout.training_step for number in sorted(batches)]
    seen: Counter[int | None] = Counter()
    named = []
    for step, number in zip(steps, sorted(batches), strict=True):
        name = "no step" if step is None else str(step)
        named.append((f"{name} #{seen[step]}" if steps.count(step) > 1 else name, batches[number]))
        seen[step] += 1
    return named


def by_epoch(ended: Sequence[FinishedRequest], *, batches_follow: bool) -> Figure:
    """Return tokens per decode step, and what was drafted for them, in order of time."""
    rows = named_batches(ended) if batches_follow else []
    unit = "training step # batch" if any("#" in name for name, _ in rows) else "training step"
    if not 1 < len(rows) <= _MOST_BATCHES:
        unit = "training step"
        rows = _by_step(ended)
    names = [name for name, _ in rows]
    sums = [_sum(requests) for _, requests in rows]
    tokens, drafted = zip(*((c.tokens_per_decode_step, c.drafted_per_decode_step) for c in sums), strict=True)
    first, last = tokens[0], tokens[-1]
    summary = f"Each decode step emitted {last:.2f} tokens"
    if len(rows) > 1:
        summary = f"From {first:.2f} tokens per decode step at first to {last:.2f} in the end"
    return figure(
        "epochs",
        "Tokens per decode step, epoch by epoch",
        f"{summary}; without drafts it is 1. What is drafted beside that has to be verified.",
        traces=[
            curve("tokens per decode step", names, tokens, colour="das", mode="lines+markers"),
            curve("drafted tokens per decode step", names, drafted, colour="orange", dash="dash", symbol="diamond")
            | {"mode": "lines+markers"},
            curve("without drafts", names, [1.0] * len(names), colour="off", dash="dot"),
        ],
        x={"title": unit, "type": "category"},
        y={"title": "tokens", "rangemode": "tozero"},
        table=Table(
            headings=(unit, "rollouts", "tokens", "tokens per decode step", "drafted per decode step", "accepted"),
            rows=tuple(
                (name, f"{len(requests):,}", f"{total.num_emitted_tokens:,}", *_rates(total))
                for (name, requests), total in zip(rows, sums, strict=True)
            ),
        ),
    )


def by_position(recording: Recording) -> Figure:
    """Return how many draft tokens were verified, and accepted, at each position of a draft."""
    drafted, accepted = recording.by_position()
    positions = [str(1 + position) for position in range(len(drafted))]
    rates = [ratio(a, d) for a, d in zip(accepted, drafted, strict=True)]
    share = 100.0 / max(1.0, sum(drafted))
    summary = "Nothing was drafted."
    if positions:
        summary = f"The first token of a draft is accepted {percent(rates[0])} of the time"
        summary += f", the last, at position {positions[-1]}, {percent(rates[-1])}" if len(rates) > 1 else ""
        summary += ": a token counts only if all before it were right, and later ones are drafted only where likely."
    return figure(
        "positions",
        "Acceptance by position in the draft",
        summary,
        traces=_drafted_and_accepted(positions, share * drafted, share * accepted, rates),
        x={"title": "position in the draft", "type": "category"},
        y="% of drafted tokens",
        barmode="overlay",
        table=_rate_table("position", positions, drafted, accepted),
    )


def by_order(tokens: Iterable[TracedToken], *, sampled_share: float) -> Figure:
    """Return the same by the longest context behind which a draft token was seen before."""
    names = [str(low) if low == high else f"{low} to {high}" for low, high in _ORDERS]
    names[-1] += "+"
    borders = [low for low, _ in _ORDERS]
    drafted, accepted = np.zeros(len(_ORDERS)), np.zeros(len(_ORDERS))
    for token in tokens:
        if token.origin is not None:
            at = int(np.searchsorted(borders, token.origin.order, side="right")) - 1
            drafted[at] += 1
            accepted[at] += token.is_accepted
    share = 100.0 / max(1.0, sum(drafted))
    rates = [ratio(a, d) for a, d in zip(accepted, drafted, strict=True)]
    longest = percent(ratio(drafted[-1], sum(drafted)))
    return figure(
        "orders",
        "Acceptance by length of the context",
        f"The longest run of last tokens that had been followed by the drafted token before. {longest} of the draft "
        f"tokens continue text of 16 tokens and more that is known word for word. {_sampled(sampled_share)}",
        traces=_drafted_and_accepted(names, share * drafted, share * accepted, rates),
        x={"title": "tokens of context that matched", "type": "category"},
        y="% of drafted tokens",
        barmode="overlay",
        table=_rate_table("tokens of context", names, drafted, accepted),
    )


def by_source(tokens: Iterable[TracedToken], *, sampled_share: float) -> Figure:
    """Return the same by whose text the draft tokens come from."""
    counts = Counter((source_of(token.origin), token.is_accepted) for token in tokens)
    drafted = np.array([float(counts[source, True] + counts[source, False]) for source in SOURCES])
    accepted = np.array([float(counts[source, True]) for source in SOURCES])
    names = [name for name, _ in SOURCES.values()]
    rates = [ratio(a, d) for a, d in zip(accepted, drafted, strict=True)]
    share = 100.0 / max(1.0, sum(drafted))
    largest = max(SOURCES, key=lambda source: counts[source, True])
    meanings = "; ".join(f"{name}: {meaning}" for name, meaning in SOURCES.values())
    return figure(
        "sources",
        "Acceptance by source",
        f"Most accepted tokens, {percent(ratio(counts[largest, True], sum(accepted)))}, come from "
        f"{SOURCES[largest][0]}. {meanings[0].upper()}{meanings[1:]}. {_sampled(sampled_share)}",
        traces=_drafted_and_accepted(names, share * drafted, share * accepted, rates),
        x={"title": "who continued the longest matching context so", "type": "category"},
        y="% of drafted tokens",
        barmode="overlay",
        table=_rate_table("source", names, drafted, accepted),
    )


def by_class(ended: Sequence[FinishedRequest]) -> Figure:
    """Return what short, medium and long responses gained."""
    lengths = np.array([request.num_tokens for request in ended])
    medium, long = np.quantile(lengths, (_MEDIUM_ABOVE, _LONG_ABOVE), method="inverted_cdf").tolist()
    classes = np.searchsorted([medium, long], lengths, side="left")  # longer than the threshold
    members = [[ended[i] for i in np.flatnonzero(classes == number).tolist()] for number in LengthClass]
    names = [number.name.capitalize() for number in LengthClass]
    sums = [_sum(requests) for requests in members]
    ranges = (f"up to {medium:,}", f"{medium + 1:,} to {long:,}", f"from {long + 1:,}")
    gained = ", ".join(
        f"{name.lower()} ones {total.tokens_per_decode_step:.2f}"
        for name, total in zip(names, sums, strict=True)
        if total.num_decode_steps
    )
    labels = [f"{name}<br>{tokens} tokens" for name, tokens in zip(names, ranges, strict=True)]
    return figure(
        "classes",
        "Short, medium and long responses",
        f"Tokens per decode step: {gained}. The long ones decide when a batch ends. Half of the responses are called "
        "short, the longest fifth long.",
        traces=[
            bars("tokens per decode step", labels, [c.tokens_per_decode_step for c in sums], colour="das"),
            bars(
                "drafted per decode step",
                labels,
                [c.drafted_per_decode_step for c in sums],
                colour="orange",
                pattern="/",
            ),
        ],
        x={"title": "", "type": "category"},
        y="tokens",
        barmode="group",
        table=Table(
            headings=("class", "tokens", "rollouts", "of all tokens", "per decode step", "drafted", "accepted"),
            rows=tuple(
                (
                    name,
                    tokens,
                    f"{len(requests):,}",
                    percent(ratio(total.num_emitted_tokens, int(lengths.sum()))),
                    *_rates(total),
                )
                for name, tokens, requests, total in zip(names, ranges, members, sums, strict=True)
            ),
        ),
    )


def reliability(measured: Reliability) -> Figure:
    """Return predicted against observed acceptance."""
    predicted = [bar.predicted for bar in measured.bins]
    observed = [bar.observed for bar in measured.bins]
    return figure(
        "reliability",
        "Can the predicted probabilities be trusted?",
        f"On the diagonal they are right. They are off by {measured.expected_calibration_error:.3f} on average, over "
        f"{measured.num_predictions:,} verified predictions in {len(measured.bins)} groups of equal size; Brier score "
        f"{measured.brier_score:.3f}, of always saying the base rate {measured.base_rate_brier_score:.3f}.",
        traces=[
            curve("perfect", [0, 1], [0, 1], colour="off", dash="dot"),
            curve("das", predicted, observed, colour="das", mode="lines+markers"),
        ],
        x={"title": "predicted probability of acceptance", "range": [0, 1]},
        y={"title": "share that was accepted", "range": [0, 1.02]},
        table=Table(
            headings=("predicted", "accepted", "predictions"),
            rows=tuple((f"{b.predicted:.3f}", f"{b.observed:.3f}", f"{b.num_predictions:,.0f}") for b in measured.bins),
        ),
    )


def _by_step(ended: Sequence[FinishedRequest]) -> list[tuple[str, list[FinishedRequest]]]:
    steps: dict[int | None, list[FinishedRequest]] = {}
    for request in ended:
        steps.setdefault(request.rollout.training_step, []).append(request)
    order = sorted(steps, key=lambda step: -1 if step is None else step)
    return [("no step" if step is None else str(step), steps[step]) for step in order]


def _sum(requests: Iterable[FinishedRequest]) -> AcceptanceCounters:
    return sum((request.counters for request in requests), AcceptanceCounters())


def _rates(counters: AcceptanceCounters) -> tuple[str, str, str]:
    return (
        f"{counters.tokens_per_decode_step:.2f}",
        f"{counters.drafted_per_decode_step:.2f}",
        percent(counters.draft_acceptance_rate) if counters.num_drafted_tokens else "-",
    )


def _drafted_and_accepted(
    names: Sequence[str], drafted: Iterable[float], accepted: Iterable[float], rates: Sequence[float]
) -> list[Trace]:
    """Bars of what was drafted, and before them of what was accepted of it."""
    texts = [f"{100 * rate:.0f}%" for rate in rates]
    hover = "%{x}: %{y:.2f}% of all drafted tokens"
    return [
        bars("drafted", names, drafted, colour="pale", text=texts, textposition="outside", cliponaxis=False)
        | {"hovertemplate": f"{hover}, of which %{{text}} accepted<extra></extra>"},
        bars("accepted", names, accepted, colour="das", hovertemplate=f"{hover} accepted<extra></extra>"),
    ]


def _rate_table(what: str, names: Sequence[str], drafted: Iterable[float], accepted: Iterable[float]) -> Table:
    return Table(
        headings=(what, "drafted tokens", "accepted", "acceptance rate"),
        rows=tuple(
            (name, f"{d:,.0f}", f"{a:,.0f}", percent(a / d) if d else "-")
            for name, d, a in zip(names, drafted, accepted, strict=True)
        ),
    )


def _sampled(share: float) -> str:
    return "Looked up for all requests." if share >= 1 else f"Looked up for {percent(share)} of the requests."
