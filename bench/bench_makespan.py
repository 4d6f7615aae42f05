"""How soon one batch ends under each policy: passes over a replayed log, timed by a latency model.

    python -m bench.bench_makespan [--log FILE] [--orders lockstep step] [--latency PRESET] [--running 320]

The replay of `bench_accept`: history from the first training step, a batch of samples of the last one. `--running`
limits how many run at once: 1 is a request after the other. Fixed settings are chosen in hindsight. Without a preset a
pass costs as much as 200 tokens, and nothing is paid for context. Simulated time: runs repeat exactly.
"""

import argparse
import os
from itertools import product

import das
from bench.decode import C_BASE, Decode
from bench.harness import Job, Row, measure_all, parser, print_table
from bench.policies import DEFAULT, FAMILIES
from bench.rollouts import GROUP_SIZE, HISTORY_SAMPLES, EndToken, questions_of
from bench.sides import Das
from das.latency_presets import LATENCY_PRESETS

NO_DRAFTS = "off"
POLICIES = [NO_DRAFTS, *(name for name, family in FAMILIES.items() if not family.is_ceiling)]


def measure(job: Job) -> Row:
    """One setting of one policy, in one order."""
    preset = LATENCY_PRESETS[job["latency"]].fit.latency if job["latency"] else None
    latency = preset or das.LatencyModel(c_base_ms=C_BASE, c_tok_ms=1.0)
    prompts = questions_of(job["log"], EndToken(), history_samples=HISTORY_SAMPLES, group_size=GROUP_SIZE)
    prompts = prompts[: job["prompts"]]
    is_off = job["policy"] == NO_DRAFTS
    side = Das(das.NoDraft() if is_off else FAMILIES[job["policy"]].make(job["setting"], latency=latency))
    for prompt in prompts:
        for response in prompt.history:
            side.add(prompt.key, prompt.token_ids, response)
    side.ready()
    decode = Decode(side, prompts, max_running=job["max_running"], in_lockstep=job["order"] == "lockstep")
    makespan_ms = 0.0
    while decode.num_running:
        num_context_tokens, before = decode.num_context_tokens, decode.tally.num_verified
        decode.step()
        makespan_ms += latency.step_ms(
            decode.tally.num_verified - before, num_context_tokens=num_context_tokens, speculating=not is_off
        )
    return {"settings": side.settings(), "makespan_ms": makespan_ms, **decode.tally.summary()}


def jobs_of(options: argparse.Namespace) -> list[Job]:
    """Every setting of every policy, in every order."""
    return [
        {
            "order": order,
            "policy": policy,
            "setting": setting,
            "latency": options.latency,
            "max_running": options.running,
            "prompts": 4 if options.smoke else None,
            "log": str(options.log.resolve()),
        }
        for order, policy in product(options.orders, dict.fromkeys([NO_DRAFTS, *options.policies]))
        for setting in (FAMILIES[policy].settings if policy in FAMILIES else (None,))
    ]


def print_makespans(rows: list[Row]) -> None:
    """A line a policy, at its best setting; the last column holds the default against it."""
    for order in dict.fromkeys(row["job"]["order"] for row in rows):
        best: dict[str, Row] = {}
        for row in sorted(
            (row for row in rows if row["job"]["order"] == order and "makespan_ms" in row),
            key=lambda row: float(row["makespan_ms"]),
        ):
            best.setdefault(row["job"]["policy"], row)
        if NO_DRAFTS not in best:
            continue
        off_ms = best[NO_DRAFTS]["makespan_ms"]
        default_ms = best[DEFAULT]["makespan_ms"] if DEFAULT in best else None
        print_table(
            f"{order}: makespan of the batch",
            [
                "policy",
                "best setting",
                "s",
                "of no drafting",
                "passes",
                "tokens/step",
                "drafted/step",
                "default / this",
            ],
            [
                [
                    name,
                    "-" if row["job"]["setting"] is None else f"{row['job']['setting']:g}",
                    row["makespan_ms"] / 1000.0,
                    row["makespan_ms"] / off_ms,
                    row["num_passes"],
                    row["tokens_per_step"],
                    row["drafted_per_step"],
                    default_ms and default_ms / row["makespan_ms"],
                ]
                for name, row in best.items()
            ],
        )


def main() -> None:
    """Measure and print."""
    options = parser(__doc__.split("\n", 1)[0])
    options.add_argument("--orders", nargs="+", choices=["lockstep", "step"], default=["lockstep", "step"])
    options.add_argument("--policies", nargs="+", choices=POLICIES, default=POLICIES)
    options.add_argument("--running", type=int, help="requests that run at once; the whole batch, if not given")
    options.add_argument("--latency", choices=LATENCY_PRESETS, help="a fit of a measured sweep")
    options.add_argument("--workers", type=int, default=os.cpu_count(), help="processes at once (%(default)s)")
    chosen = options.parse_args()
    if chosen.smoke:
        chosen.policies = [DEFAULT, "fixed"]
    print_makespans(measure_all("bench_makespan", jobs_of(chosen), chosen, workers=chosen.workers))


if __name__ == "__main__":
    main()
