"""Draft and extend at 1 to 256 running requests: microseconds per request and decode step, das beside its peers.

    python -m bench.bench_draft [--full] [--log FILE]

The history of an earlier training step is indexed, then responses of a later one are replayed live: every decode step
drafts for all running requests and takes in what an engine would have emitted. Where a request ends, the next starts.
Starting, finishing, verifying and the loop itself are not timed; Python's garbage collector is off.
"""

import argparse
import gc
from collections.abc import Sequence
from itertools import product
from operator import itemgetter

from bench.decode import Decode, PassTimes
from bench.harness import Job, Row, measure_all, median, parser, percentile, print_table
from bench.rollouts import GROUP_SIZE, prompts_of_size, shuffled_targets
from bench.sides import create

DAS = "das:price=0.15"
DAS_VARIANTS = [DAS, "das:price=0.5", "das:price=0.015", "das:fixed=8", "das-hedged:price=0.15"]
ARCTIC = ["arctic_depth24", "arctic"]
TREE = "sglang_ngram:tree"  # a chain of SGLang's is cut from several trees, so its time says nothing
SIDES = [*DAS_VARIANTS, *ARCTIC, "prompt_lookup_5_5", "prompt_lookup_2_5", TREE, "naive"]
BARS = {256: " (bars at 1 M: das 5 us; arctic_depth24 / das 10, arctic / das 25)"}
MAX_STEPS = {1: 3000, 32: 1500, 256: 500}
WARM_UP = {1: 200, 32: 50, 256: 20}
NAIVE_STEPS = 100


def measure(job: Job) -> Row:
    """One side at one size."""
    running, num_steps = job["running"], job["steps"]
    prompts = prompts_of_size(job["log"], num_tokens=job["tokens"], min_prompts=-(-2 * running // GROUP_SIZE))
    side = create(job["side"])
    for prompt in prompts:
        for response in prompt.history:
            side.add(prompt.key, prompt.token_ids, response)
    side.ready()
    decode = Decode(side, shuffled_targets(prompts, job["seed"]), max_running=running)
    times: list[PassTimes] = []
    gc.collect()
    gc.freeze()
    gc.disable()
    while len(times) < num_steps and decode.num_running == running:
        times.append(decode.step())
    warm = times[min(WARM_UP[running], len(times) // 2) :]
    drafts = [1e6 * step.draft_s / running for step in warm]
    extends = [1e6 * step.extend_s / running for step in warm]
    sums = [draft + extend for draft, extend in zip(drafts, extends, strict=True)]
    return {
        "settings": side.settings(),
        "num_prompts": len(prompts),
        "num_history_tokens": sum(len(response) for prompt in prompts for response in prompt.history),
        "num_timed_steps": len(warm),
        **{
            f"{phase}_us": {"p50": percentile(values, 50), "p99": percentile(values, 99), "min": min(values)}
            for phase, values in (("draft", drafts), ("extend", extends), ("sum", sums))
        },
        **decode.tally.summary(),
    }


def jobs_of(options: argparse.Namespace) -> list[Job]:
    """Every side at every size; plain scanning only at the smallest."""
    cells = list(product(options.tokens, options.running))
    smallest = min(cells)
    return [
        {
            "side": side,
            "tokens": tokens,
            "running": running,
            "steps": min(options.steps or MAX_STEPS[running], NAIVE_STEPS if side == "naive" else MAX_STEPS[1]),
            "log": str(options.log.resolve()),
            "seed": options.seed,
        }
        for (tokens, running), side in product(cells, options.sides)
        if side != "naive" or (tokens, running) == smallest
    ]


def print_tables(rows: list[Row]) -> None:
    """Times by size and side, ratios to das, and how cost grows."""
    cells = sorted({(row["job"]["tokens"], row["job"]["running"]) for row in rows})
    for tokens, running in cells:
        print_table(
            f"{tokens:,} indexed tokens, {running} running: us per request and decode step{BARS.get(running, '')}",
            ["side", "draft p50", "p99", "extend p50", "p99", "sum p50", "p99", "min", "tokens/step", "drafted/step",
             "accepted", "/ das", "min / das"],
            [_line(rows, side, tokens, running) for side in _sides(rows) if _of(rows, side, tokens, running)],
        )  # fmt: skip
    if cells:
        _print_growth(rows, cells)


def _line(rows: list[Row], side: str, tokens: int, running: int) -> list[object]:
    mine = _of(rows, side, tokens, running)
    base = _of(rows, DAS, tokens, running)
    shown = (("draft", "p50"), ("draft", "p99"), ("extend", "p50"), ("extend", "p99"), ("sum", "p50"), ("sum", "p99"))
    times = [_us(mine, phase, value) for phase, value in (*shown, ("sum", "min"))]
    counts = [median(mine, itemgetter(name)) for name in ("tokens_per_step", "drafted_per_step", "acceptance_rate")]
    ratios = [_us(mine, "sum", value) / _us(base, "sum", value) for value in ("p50", "min")]
    return [side, *times, *counts, *ratios]


def _print_growth(rows: list[Row], cells: Sequence[tuple[int, int]]) -> None:
    low, high = cells[0][0], cells[-1][0]
    if low == high:
        return
    running = sorted({running for _, running in cells})
    print_table(
        f"growth: sum p50 at {high:,} over {low:,} indexed tokens (bars for das: 2 at 1 running, 3 at 256)",
        ["side", *(f"{number} running" for number in running)],
        [
            [side, *(_us(_of(rows, side, high, number), "sum", "p50") / _us(_of(rows, side, low, number), "sum", "p50")
                     for number in running)]
            for side in _sides(rows)
        ],
    )  # fmt: skip


def _us(rows: list[Row], phase: str, value: str) -> float:
    return median(rows, lambda row: row[f"{phase}_us"][value])


def _of(rows: list[Row], side: str, tokens: int, running: int) -> list[Row]:
    cell = (side, tokens, running)
    return [row for row in rows if (row["job"]["side"], row["job"]["tokens"], row["job"]["running"]) == cell]


def _sides(rows: list[Row]) -> list[str]:
    measured = {row["job"]["side"] for row in rows}
    return [side for side in SIDES if side in measured]


def main() -> None:
    """Measure and print."""
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--sides", nargs="+", default=SIDES, choices=SIDES)
    options.add_argument("--tokens", nargs="+", type=int, help="indexed tokens instead of 100,000 and 1,000,000")
    options.add_argument("--running", nargs="+", type=int, default=[1, 32, 256], choices=[1, 32, 256])
    options.add_argument("--steps", type=int, help=f"decode steps at most; default by running requests: {MAX_STEPS}")
    given = options.parse_args()
    if given.smoke:
        given.tokens, given.running, given.steps = given.tokens or [20_000, 40_000], [1, 32], given.steps or 60
    given.tokens = given.tokens or [100_000, 1_000_000, *([10_000_000] if given.full else [])]
    rows = measure_all("bench_draft", jobs_of(given), given)
    print_tables(rows)


if __name__ == "__main__":
    main()
