"""The prompts of a log, from those that gain most to those that gain least."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from das.analysis.recording import FinishedRequest
from das.analysis.report.parts import Figure, Table, figure, percent, ratio, short
from das.metrics import AcceptanceCounters

_MOST_ROWS = 10  # of the best, and of the worst
_MOST_POINTS = 2000


@dataclass(frozen=True, slots=True)
class _Prompt:
    """What one prompt's requests did."""

    name: str
    num_rollouts: int
    counters: AcceptanceCounters
    reward: float | None

    @property
    def mean_tokens(self) -> float:
        return self.counters.num_emitted_tokens / self.num_rollouts


def prompts_of(
    ended: Sequence[FinishedRequest], *, names: Mapping[int, str]
) -> tuple[Figure, tuple[tuple[str, Table], ...]]:
    """Return all prompts as points, and tables of the best and the worst.

    Args:
        ended: requests, at least one of which has generated a token.
        names: of prompts, by key, where the log has them.
    """
    by_key: dict[int, list[FinishedRequest]] = {}
    for request in ended:
        by_key.setdefault(request.rollout.key, []).append(request)
    prompts = [_prompt(names.get(key, f"{key:016x}"), requests) for key, requests in by_key.items()]
    prompts = [prompt for prompt in prompts if prompt.counters.num_decode_steps]
    prompts.sort(key=lambda prompt: -prompt.counters.tokens_per_decode_step)
    best, worst = prompts[0], prompts[-1]
    shown = prompts[:: 1 + (len(prompts) - 1) // _MOST_POINTS]
    num_rows = min(_MOST_ROWS, (len(prompts) + 1) // 2)
    tables = [("All prompts, the best first" if len(prompts) <= 2 * num_rows else "The best", prompts[:num_rows])]
    if len(prompts) > 2 * num_rows:
        tables.append(("The worst", prompts[: -num_rows - 1 : -1]))
    else:
        tables = [(tables[0][0], prompts)]
    points = figure(
        "prompts",
        "Every prompt",
        f"From {worst.counters.tokens_per_decode_step:.2f} to {best.counters.tokens_per_decode_step:.2f} tokens per "
        f"decode step over {len(prompts):,} prompts.",
        traces=[
            {
                "type": "scatter",
                "mode": "markers",
                "name": "prompts",
                "x": short(prompt.mean_tokens for prompt in shown),
                "y": short(prompt.counters.tokens_per_decode_step for prompt in shown),
                "text": [_plain(prompt.name) for prompt in shown],
                "marker": {"color": "@das", "size": 9, "opacity": 0.75},
                "hovertemplate": "<b>%{text}</b><br>%{x:.0f} tokens each<br>%{y:.2f} per decode step<extra></extra>",
            }
        ],
        x={"title": "mean response, tokens", "rangemode": "tozero"},
        y={"title": "tokens per decode step", "rangemode": "tozero"},
        table=_table(shown),
        is_wide=True,
    )
    return points, tuple((title, _table(some)) for title, some in tables)


def _prompt(name: str, requests: Sequence[FinishedRequest]) -> _Prompt:
    rewards = [request.rollout.reward for request in requests if request.rollout.reward is not None]
    return _Prompt(
        name=name,
        num_rollouts=len(requests),
        counters=sum((request.counters for request in requests), AcceptanceCounters()),
        reward=ratio(sum(rewards), len(rewards)) if rewards else None,
    )


def _table(prompts: Sequence[_Prompt]) -> Table:
    return Table(
        headings=("prompt", "rollouts", "mean tokens", "tokens per decode step", "drafted", "accepted", "mean reward"),
        rows=tuple(
            (
                prompt.name,
                f"{prompt.num_rollouts:,}",
                f"{prompt.mean_tokens:,.0f}",
                f"{prompt.counters.tokens_per_decode_step:.2f}",
                f"{prompt.counters.drafted_per_decode_step:.2f}",
                percent(prompt.counters.draft_acceptance_rate) if prompt.counters.num_drafted_tokens else "-",
                "-" if prompt.reward is None else f"{prompt.reward:.2f}",
            )
            for prompt in prompts
        ),
    )


def _plain(name: str) -> str:
    """A name that plotly.js shows as it is: it takes some tags for markup."""
    return name.replace("&", "&amp;").replace("<", "&lt;")
