"""Indexing: nanoseconds and resident bytes per token, and what loops, long and many rollouts cost.

    python -m bench.bench_tree [--full] [--log FILE]

`index` adds the history of many prompts: das one tree a prompt, peers as they work. Resident memory is that of a fresh
process, after minus before. `shape` adds unusual text in bulk, and decodes it live; the same with ordinary text is the
measure. Every measurement checks what it built.
"""

import argparse
from collections.abc import Callable
from itertools import product
from typing import Any

from bench.harness import Job, Row, measure_all, median, parser, print_table
from bench.indexing import DAS, index
from bench.rollouts import prompts_of_size
from bench.shapes import SHAPES, TOKENS, USUAL, measure_shape

SIDES = [DAS, "arctic", "arctic_depth24", "sglang_ngram", "naive"]
SHAPE_SIDES = [DAS, "arctic", "arctic_depth24"]
NAIVE_TOKENS = 100_000  # it appends to a list: nothing to see at larger sizes
SMOKE_TOKENS = 4_000


def measure(job: Job) -> Row:
    """One side, one workload."""
    if job["kind"] == "shape":
        return measure_shape(job)
    return index(job["side"], prompts_of_size(job["log"], num_tokens=job["tokens"]))


def jobs_of(options: argparse.Namespace) -> list[Job]:
    """Every side at every size and shape."""
    common = {"log": str(options.log.resolve())}
    return [
        {"kind": "index", "side": side, "tokens": tokens, **common}
        for tokens, side in product(options.tokens, SIDES)
        if side in options.sides and (side != "naive" or tokens <= NAIVE_TOKENS)
    ] + [
        {"kind": "shape", "side": side, "shape": shape,
         "tokens": min(TOKENS[shape], SMOKE_TOKENS) if options.smoke else TOKENS[shape], **common}
        for shape, side in product(SHAPES, SHAPE_SIDES)
        if side in options.sides
    ]  # fmt: skip


def print_tables(rows: list[Row]) -> None:
    """One table a size, one a shape's kind of work."""
    for tokens in sorted({row["job"]["tokens"] for row in rows if row["job"]["kind"] == "index"}):
        cell = {"kind": "index", "tokens": tokens}
        print_table(
            f"index, {tokens:,} tokens (bars for das: 400 ns, 72 bytes; arctic / das: 6 in time, 5 in memory)",
            ["side", "ns/token", "/ das", "resident bytes/token", "/ das", "own estimate"],
            [
                [
                    side,
                    *_against(rows, side, DAS, lambda row: row["ns_per_token"], cell),
                    *_against(rows, side, DAS, lambda row: row["bytes_per_token"], cell),
                    _estimate(_of(rows, {**cell, "side": side})),
                ]
                for side in SIDES
                if _of(rows, {**cell, "side": side})
            ],
        )
    for side in SHAPE_SIDES:
        lines = [_shape_line(rows, side, shape) for shape in SHAPES if _of(rows, {"side": side, "shape": shape})]
        if lines:
            print_table(
                f"shapes, {side}: bulk add, and live extend + draft (bar for das: 3 times the usual)",
                ["shape", "add ns/token", "/ usual", "live us/emitted", "/ usual", "us/(emitted+drafted)", "/ usual",
                 "us/step", "2nd half / 1st", "bytes/token"],
                lines,
            )  # fmt: skip


def _shape_line(rows: list[Row], side: str, shape: str) -> list[object]:
    mine = _of(rows, {"side": side, "shape": shape})
    figures = [
        lambda row: row["bulk"]["ns_per_token"],
        lambda row: row["live"]["us_per_emitted_token"],
        lambda row: row["live"]["us_per_drafted_or_emitted_token"],
    ]
    usual = {"side": side, "shape": USUAL}
    compared = [
        value
        for figure in figures
        for value in (median(mine, figure), median(mine, figure) / median(_of(rows, usual), figure))
    ]
    return [
        shape,
        *compared,
        median(mine, lambda row: row["live"]["us_per_step"]),
        median(mine, lambda row: row["live"]["second_half_over_first"]),
        median(mine, lambda row: row["bulk"]["bytes_per_token"]),
    ]


def _against(
    rows: list[Row], side: str, base: str, figure: Callable[[Row], float], cell: dict[str, Any]
) -> tuple[float, float]:
    """A figure of a side, and how many times that of the base it is."""
    value = median(_of(rows, {**cell, "side": side}), figure)
    return value, value / median(_of(rows, {**cell, "side": base}), figure)


def _estimate(rows: list[Row]) -> float | None:
    """The side's own estimate of its memory, per token."""
    known = [row for row in rows if row["own_estimate_bytes"] is not None]
    return median(known, lambda row: row["own_estimate_bytes"] / row["num_tokens"]) if known else None


def _of(rows: list[Row], job: dict[str, Any]) -> list[Row]:
    """The rows whose job says all this."""
    return [row for row in rows if all(row["job"].get(name) == value for name, value in job.items())]


def main() -> None:
    """Measure and print."""
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--sides", nargs="+", default=SIDES, choices=SIDES)
    options.add_argument("--tokens", nargs="+", type=int, help="indexed tokens instead of 100,000 and 1,000,000")
    given = options.parse_args()
    if given.smoke:
        given.tokens = given.tokens or [20_000]
    given.tokens = given.tokens or [100_000, 1_000_000, *([10_000_000] if given.full else [])]
    print_tables(measure_all("bench_tree", jobs_of(given), given))


if __name__ == "__main__":
    main()
