"""Acceptance by replay of a rollout log: das over its prices, every peer over its own knob. Counts only, no times.

    python -m bench.bench_accept [--log FILE]
    python -m bench.bench_accept --cold FILE --group-size 16

The first samples of the first training step are history, those of the last step are replayed, all prompts at once. A
request sees its prompt, its own and its siblings' output so far, and the history: more only where a peer works so.
`--change none` replays later samples of the first step instead, `--change abrupt` those of the last in other token ids.
`lockstep`: each request drafts and extends before the next one drafts. `step`: all draft, then all extend, as engines
work. `cold` is the same without history.
"""

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import get_args

from bench.decode import C_BASE, Decode
from bench.harness import Job, Row, measure_all, median, parser, print_table
from bench.rollouts import GROUP_SIZE, HISTORY_SAMPLES, Change, EndToken, questions_of
from bench.sides import MAX_DRAFT_TOKENS, WIDTHS, create

POINTS = (1, 2, 4, 6, 8, 10, 16)
PRICES = (0.8, 0.5, 0.3, 0.15, 0.08, 0.03, 0.015, 0)
LOW_PRICES = (0.06, 0.045, 0.03, 0.015)  # where up to 64 tokens may be drafted
FACTORS = (0.125, 0.25, 0.5, 1, 2, 4)
CAPS = (1, 2, 4, 8, 16)
BATCHES = (0, 128, 16, 1)  # 0: the requests that run; else the self-tuned price is that of a batch of this size
COSTS = ("j128", "j16", "j1", "batch_cost")
OTHER_RULES = [  # each the rule without one part, and hedged
    *("das-uncalibrated", "das-longest-match", "das-one-source", "das-unforgetting", "das-no-common"),
    *("das-hedged", "das-hedged-by-request"),
]


@dataclass(frozen=True, slots=True)
class Family:
    """One rule and the knob that trades drafted for accepted tokens. `knob` is a setting, a policy or `cap`."""

    side: str
    knob: str
    values: tuple[float, ...]
    orders: tuple[str, ...] = ("lockstep", "step")  # a width is one for all that draft in a step: `step` only

    def job(self, value: float) -> Job:
        """What `create` needs for one setting of the knob."""
        if self.side.startswith("das"):
            return {"side": f"{self.side}={value:g}", "cap": MAX_DRAFT_TOKENS, "settings": {}}
        if self.knob == "cap":
            return {"side": self.side, "cap": int(value), "settings": {}}
        return {"side": self.side, "cap": MAX_DRAFT_TOKENS, "settings": {self.knob: value}}


FAMILIES = {
    family.side: family
    for family in (
        Family("das:price", "min_survival", PRICES),
        Family("das:throughput", "num_running", BATCHES),
        Family("das:fixed", "max_draft_tokens", CAPS),
        Family("das-widths:throughput", "num_running", BATCHES[:1], ("step",)),
        Family("das:width", "width", WIDTHS[1:], ("step",)),
        Family("das-tree:price", "min_survival", PRICES),
        Family("das-tree:long-price", "min_survival", LOW_PRICES),
        Family("das-tree:throughput", "num_running", BATCHES),
        Family("das-tree:fixed", "max_draft_tokens", CAPS),
        *(Family(f"{side}:price", "min_survival", PRICES) for side in OTHER_RULES),
        *(Family(f"{side}:throughput", "num_running", BATCHES) for side in OTHER_RULES),
        Family("suffix_decoding", "factor", FACTORS),
        Family("arctic", "factor", FACTORS),
        Family("arctic_depth24", "factor", FACTORS),
        Family("arctic_per_prompt", "factor", FACTORS),
        Family("prompt_lookup_2_5", "cap", CAPS),
        Family("prompt_lookup_5_5", "cap", CAPS),
        Family("naive", "cap", CAPS),
        Family("sglang_ngram_breadth1", "cap", CAPS),
        Family("sglang_ngram", "cap", CAPS),
        Family("sglang_ngram:tree", "cap", CAPS),
        Family("sglang_ngram_breadth1:tree", "cap", CAPS),
        Family("arctic:tree", "factor", FACTORS),
    )
}
DAS = "das:price"
COLD_SIDES = [DAS, "das-no-common:price", "arctic", "arctic_depth24", "arctic_per_prompt"]
TOO_SLOW = ["naive"]  # minutes a setting; name it with --sides


def measure(job: Job) -> Row:
    """One setting of one side, in one order."""
    end = EndToken() if job["end_token"] else None
    prompts = questions_of(
        job["log"], end, history_samples=job["history"], group_size=job["group_size"], change=job["change"]
    )
    prompts = prompts[: job["prompts"]]
    side = create(job["side"], cap=job["cap"], **job["settings"])
    for prompt in prompts:
        for response in prompt.history:
            side.add(prompt.key, prompt.token_ids, response)
    side.ready()
    decode = Decode(side, prompts, in_lockstep=job["order"] == "lockstep")
    while decode.num_running:
        decode.step()
    num_tokens = sum(len(target) for prompt in prompts for target in prompt.targets)
    if decode.tally.num_emitted != num_tokens:
        raise RuntimeError(f"{decode.tally.num_emitted} tokens emitted, the log has {num_tokens}")
    return {
        "settings": side.settings(),
        "num_targets": sum(len(prompt.targets) for prompt in prompts),
        "num_target_tokens": num_tokens,
        "history_samples": max(len(prompt.history) for prompt in prompts),
        **decode.tally.summary(),
    }


def jobs_of(options: argparse.Namespace) -> list[Job]:
    """Every setting of every side, in every order, with and without history."""
    common = {
        "group_size": options.group_size,
        "end_token": not options.cold,
        "change": options.change,
        "prompts": 4 if options.smoke else None,
        "log": str((options.cold or options.log).resolve()),
    }
    histories = [0] if options.cold else [options.history, *([0] if options.history and not options.smoke else [])]
    return [
        {"order": order, "history": history, "family": name, "value": value, **FAMILIES[name].job(value), **common}
        for order, history, name in product(options.orders, histories, options.sides)
        if order in FAMILIES[name].orders
        for value in FAMILIES[name].values
    ]


def print_tables(rows: list[Row]) -> None:
    """Per order and history: each setting, then each rule at equal drafted tokens and at its cheapest."""
    for order, history in sorted({(row["job"]["order"], row["job"]["history"]) for row in rows}):
        mine = [row for row in rows if (row["job"]["order"], row["job"]["history"]) == (order, history)]
        held = max(row["history_samples"] for row in mine)
        title = f"{order}, {f'history of {held} samples' if held else 'cold'}"
        families = [name for name in FAMILIES if _curve(mine, name)]
        print_table(
            f"{title}: every setting (J: cost per token at that batch size, base {C_BASE})",
            ["side", "knob", "value", "drafted/step", "tokens/step", "accepted", "J128", "J16", "J1", "batch cost"],
            [
                [name, FAMILIES[name].knob, f"{value:g}", *(_figure(mine, name, value, figure) for figure in
                 ("drafted_per_step", "tokens_per_step", "acceptance_rate", *COSTS))]
                for name in families
                for value in FAMILIES[name].values
            ],
        )  # fmt: skip
        print_table(
            f"{title}: tokens per decode step at equal drafted tokens per step, and the least costs over the knob",
            ["side", *(f"@{point}" for point in POINTS), "J128", "J16", "J1", "batch cost"],
            [
                [name, *(interpolate(_curve(mine, name), point) for point in POINTS),
                 *(min(row[cost] for row in mine if row["job"]["family"] == name) for cost in COSTS)]
                for name in families
            ],
        )  # fmt: skip
        if DAS in families:
            _print_differences(title, mine, [name for name in families if name.startswith("arctic")])


def interpolate(curve: Sequence[tuple[float, float]], drafted: float) -> float | None:
    """Tokens per step at so many drafted per step, on straight lines between measured points; None outside them."""
    for (low, below), (high, above) in pairwise(curve):
        if low <= drafted <= high:
            return below + (above - below) * (drafted - low) / (high - low) if high > low else above
    return None


def _print_differences(title: str, rows: list[Row], peers: Sequence[str]) -> None:
    """das at exactly the drafted tokens per step of each setting of Arctic."""
    curve = _curve(rows, DAS)
    lines = []
    for name in peers:
        for value in FAMILIES[name].values:
            drafted, tokens = (_figure(rows, name, value, f"{kind}_per_step") for kind in ("drafted", "tokens"))
            ours = interpolate(curve, drafted)
            lines.append([name, f"{value:g}", drafted, tokens, ours, None if ours is None else ours - tokens])
    if lines:
        header = ["side", "factor", "drafted/step", "tokens/step", "das", "das - peer"]
        print_table(f"{title}: das at each peer setting's drafted tokens", header, lines)


def _curve(rows: list[Row], family: str) -> list[tuple[float, float]]:
    """(drafted, tokens) per step of a family's settings, in order of drafted tokens."""
    return sorted(
        (_figure(rows, family, value, "drafted_per_step"), _figure(rows, family, value, "tokens_per_step"))
        for value in FAMILIES[family].values
        if any((row["job"]["family"], row["job"]["value"]) == (family, value) for row in rows)
    )


def _figure(rows: list[Row], family: str, value: float, figure: str) -> float:
    mine = [row for row in rows if (row["job"]["family"], row["job"]["value"]) == (family, value)]
    return median(mine, lambda row: row[figure])


def main() -> None:
    """Measure and print."""
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--cold", type=Path, metavar="LOG", help="a log whose first step is replayed, no history")
    options.add_argument("--group-size", type=int, default=GROUP_SIZE, help="samples of a prompt that run at once")
    options.add_argument("--history", type=int, default=HISTORY_SAMPLES, help="earlier samples, where the log has them")
    options.add_argument("--change", default="drift", choices=get_args(Change), help="of the policy after the history")
    options.add_argument("--orders", nargs="+", default=["lockstep", "step"], choices=["lockstep", "step"])
    options.add_argument("--sides", nargs="+", choices=list(FAMILIES), help=f"default: all but {', '.join(TOO_SLOW)}")
    options.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="replays at a time (%(default)s)")
    given = options.parse_args()
    given.sides = given.sides or (COLD_SIDES if given.cold else [name for name in FAMILIES if name not in TOO_SLOW])
    print_tables(measure_all("bench_accept", jobs_of(given), given, workers=given.workers))


if __name__ == "__main__":
    main()
