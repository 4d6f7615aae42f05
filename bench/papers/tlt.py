"""TLT (arXiv 2511.16665): how drafting pays less the more requests run, and where it should be off.

python -m bench.papers.tlt [--log FILE]
"""

from __future__ import annotations

import math

import das
from bench.papers.comparison import Claim, Comparison, Section, run
from bench.papers.logged_step import Log
from das.latency_presets import latency_preset
from das.metrics import AcceptanceCounters

LATENCY = latency_preset("qwen2.5-7b-a100").fit.latency
WINDOWS = (2, 4, 8, 16)
FEW, MANY = 1, 32  # requests that run; the paper drafts up to the second
PAPER = {FEW: 3.62, MANY: 1.70}
SOURCE = "speculation by batch, second-hand"


def sections(log: Log) -> list[Section]:
    """Speedup of fixed windows while so many requests run, and the batch at which it is gone."""
    step = log.step()
    counters = {
        window: step.simulate(das.FixedBudget(window), latency=LATENCY).with_drafts.counters for window in WINDOWS
    }
    speedup = {running: {w: _speedup(counters[w], running) for w in WINDOWS} for running in (FEW, MANY)}
    best = {running: max(by_window.values()) for running, by_window in speedup.items()}
    least = {w: _break_even(counters[w]) for w in WINDOWS}
    figures = [
        Comparison(f"w = {w}, {running} running: speedup", value)
        for running, by_window in speedup.items()
        for w, value in by_window.items()
    ]
    figures += [
        Comparison(f"best window, {running} running: speedup", best[running], PAPER[running], SOURCE)
        for running in (FEW, MANY)
    ]
    figures.append(
        Comparison(f"{FEW} running over {MANY} running", best[FEW] / best[MANY], PAPER[FEW] / PAPER[MANY], SOURCE)
    )
    figures += [
        Comparison(f"w = {w}: drafting pays up to how many running", least[w], MANY, "the paper's switch")
        for w in WINDOWS
    ]
    return [
        Section(
            "Speedup by batch",
            "what fixed windows of das's drafts accept in the log, times the A100 line, context left out.",
            tuple(figures),
            (
                Claim(
                    "drafting pays less at 32 than at 1, at each window",
                    all(speedup[MANY][w] < speedup[FEW][w] for w in WINDOWS),
                ),
                Claim(
                    "the longer the window, the sooner drafting stops to pay",
                    list(least.values()) == sorted(least.values(), reverse=True),
                ),
                Claim(
                    "16 tokens stop to pay near the paper's 32 (within a factor of 1.5)",
                    MANY / 1.5 < least[16] < MANY * 1.5,
                ),
            ),
            "TLT drafts trees from a trained network, which accept more. No one batch is the right switch: it "
            "follows from what is drafted and accepted, so das has a price and no switch.",
        )
    ]


def _speedup(counters: AcceptanceCounters, num_running: int) -> float:
    return LATENCY.speedup(
        num_running,
        tokens_per_decode_step=counters.tokens_per_decode_step,
        drafted_per_decode_step=counters.drafted_per_decode_step,
    )


def _break_even(counters: AcceptanceCounters) -> float:
    """Return the batch at which drafting takes as long as it saves; infinity where a draft token is worth its cost."""
    gained = counters.tokens_per_decode_step - 1
    lost = counters.drafted_per_decode_step - gained
    return LATENCY.c_base_ms / LATENCY.c_tok_ms * gained / lost if lost > 0 else math.inf


if __name__ == "__main__":
    run(__doc__, sections)
