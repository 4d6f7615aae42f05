"""Is generation ever slower with das than without? Every log, the default policy, three latencies.

A pass over n tokens takes c_base + c_tok n; the ratio of the two decides what drafting can bring. Nothing is paid for
having speculation switched on (c_engine 0), so what is lost is lost to drafts that fail. Simulated time: runs repeat
exactly.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import das
from bench.harness import Job, Row, measure_all, parser, print_table
from bench.hostile_logs import ADVERSARIAL, synthetic_log
from das.analysis import read_log
from das.analysis.simulate import simulate

RATIOS = (20.0, 200.0, 1000.0)  # c_base / c_tok
MOST = 1.02  # of the makespan without drafts
NUM_WORST = 5  # synthetic logs shown


def measure(job: Job) -> Row:
    """One log at one latency."""
    name, latency = job["log"], das.LatencyModel(c_base_ms=job["ratio"], c_tok_ms=1.0)
    log = rollouts_of(name)
    projection = simulate(log, latency=latency, group_size=job["group_size"])
    counters = projection.with_drafts.counters
    return {
        "makespan_ratio": projection.makespan_s / projection.without_drafts.makespan_s,
        "verdict": projection.verdict,
        "num_requests": len(log),
        "num_tokens": counters.num_emitted_tokens,
        "tokens_per_decode_step": counters.tokens_per_decode_step,
        "drafted_per_decode_step": counters.drafted_per_decode_step,
    }


def rollouts_of(name: Any) -> list[das.Rollout]:
    """The log of a seed, of an adversary's name, or of a path."""
    if isinstance(name, int):
        return synthetic_log(name)
    return ADVERSARIAL[name]() if name in ADVERSARIAL else [record.rollout for record in read_log(Path(name))]


def jobs_of(options: argparse.Namespace) -> list[Job]:
    """Every log at every latency; groups of 8 samples, and whole training steps of synthetic logs."""
    named = [*(str(path.resolve()) for path in [options.log, *options.logs]), *ADVERSARIAL]
    return [
        {"log": log, "ratio": ratio, "group_size": 16 if isinstance(log, int) else 8}
        for log in [*named, *range(options.seeds)]
        for ratio in RATIOS
    ]


def print_losses(rows: list[Row]) -> None:
    """Named logs, then the synthetic ones together and the worst of them."""
    named = [row for row in rows if isinstance(row["job"]["log"], str)]
    synthetic = [row for row in rows if isinstance(row["job"]["log"], int)]
    worst = sorted(synthetic, key=lambda row: -row["makespan_ratio"])[:NUM_WORST]
    print_table(
        "Makespan with the default policy, of that without drafts",
        ["log", "c_base / c_tok", "requests", "tokens", "of no drafting", "tokens a step", "drafted", "verdict"],
        [
            [
                _name(row["job"]["log"]),
                row["job"]["ratio"],
                row["num_requests"],
                row["num_tokens"],
                row["makespan_ratio"],
                row["tokens_per_decode_step"],
                row["drafted_per_decode_step"],
                row["verdict"],
            ]
            for row in [*named, *worst]
        ],
    )
    if synthetic:
        ratios = sorted(row["makespan_ratio"] for row in synthetic)
        seeds = len({row["job"]["log"] for row in synthetic})
        print(f"\n{seeds} synthetic logs at {len(RATIOS)} latencies: median {ratios[len(ratios) // 2]:.3f}")
    print(f"{sum(row['makespan_ratio'] > MOST for row in rows)} of {len(rows)} above {MOST}")


def _name(log: str | int) -> str:
    return f"synthetic {log}" if isinstance(log, int) else Path(log).name


def main() -> None:
    """Measure and print."""
    options = parser(__doc__.split("\n", 1)[0])
    options.add_argument("--logs", type=Path, nargs="+", default=[], help="more logs")
    options.add_argument("--seeds", type=int, default=200, help="synthetic logs (%(default)s)")
    options.add_argument("--workers", type=int, default=os.cpu_count(), help="processes at once (%(default)s)")
    chosen = options.parse_args()
    if chosen.smoke:
        chosen.seeds = 2
    print_losses(measure_all("bench_losses", jobs_of(chosen), chosen, workers=chosen.workers))


if __name__ == "__main__":
    main()
