"""Who ends first: policies in simulated regimes, each at the setting that hindsight finds best for it.

    python -m bench.bench_regimes [--log FILE] [--regimes at_once ...] [--policies fixed ...] [--latency PRESET]

A regime is a file in `bench/regimes`. The log's first training step is history, samples of its last one are generated;
a seed draws these samples and the order of the prompts. The figure is how long training waits for rollouts: the
makespan where training is synchronous. It is simulated time by a latency model, so runs repeat exactly.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
import tomllib
from dataclasses import replace
from typing import Any

import das
from bench.harness import ROOT, Job, Row, measure_all, parser, print_table
from bench.policies import DEFAULT, FAMILIES
from das.analysis import read_log
from das.analysis.simulate import simulate
from das.latency_presets import LATENCY_PRESETS

REGIMES = {path.stem: path for path in sorted((ROOT / "bench" / "regimes").glob("*.toml"))}


def regime_of(name: str) -> dict[str, Any]:
    """Read a regime's file."""
    return tomllib.loads(REGIMES[name].read_text())


def cut(
    rollouts: list[das.Rollout], *, seed: int, history_samples: int, group_size: int, num_batches: int
) -> tuple[list[das.Rollout], list[das.Rollout]]:
    """Return history, as of step 0, and what is to be generated, batch by batch, as of steps 1, 2 and so on.

    Raises:
        ValueError: the log has one training step only, or too few samples in the last one.
    """
    steps: dict[int, dict[int, list[das.Rollout]]] = {}
    for rollout in rollouts:
        steps.setdefault(rollout.training_step or 0, {}).setdefault(rollout.key, []).append(rollout)
    first, last = min(steps), max(steps)
    if first == last:
        raise ValueError("the log has one training step; the first one is history for the last")
    draw = random.Random(seed)
    prompts = draw.sample(list(steps[last]), len(steps[last]))
    history, targets = [], []
    for key in prompts:
        known, new = steps[first].get(key, []), steps[last][key]
        if len(new) < group_size * num_batches:
            raise ValueError(f"a prompt has {len(new)} samples in the last step; {group_size * num_batches} are needed")
        history += [replace(r, training_step=0) for r in draw.sample(known, min(history_samples, len(known)))]
        targets.append(draw.sample(new, group_size * num_batches))
    batches = [
        replace(r, training_step=1 + number)
        for number in range(num_batches)
        for samples in targets
        for r in samples[number * group_size : (number + 1) * group_size]
    ]
    return history, batches


def measure(job: Job) -> Row:
    """One setting of one policy in one regime, on one seed's samples."""
    regime = regime_of(job["regime"])
    latency = das.LatencyModel(**regime["latency"])
    if job["latency"]:
        latency = LATENCY_PRESETS[job["latency"]].fit.latency
    history, log = cut(
        [record.rollout for record in read_log(job["log"])],
        seed=job["seed"],
        **{name: regime[name] for name in ("history_samples", "group_size", "num_batches")},
    )
    family = FAMILIES[job["policy"]]
    projection = simulate(
        log,
        history=history,
        policy=lambda: family.make(job["setting"], latency=latency),
        latency=latency,
        group_size=regime["group_size"],
        num_workers=regime["num_workers"],
        max_running=regime.get("max_running"),
        assignment=regime["assignment"],
        lag=regime["lag"],
        train_s=regime["train_s"],
    )
    found = projection.as_dict()
    for schedule in (found["with_drafts"], found["without_drafts"]):
        del schedule["num_running"]
    return {
        "waited_s": projection.with_drafts.exposed_generation_s,
        "off_waited_s": projection.without_drafts.exposed_generation_s,
        **found,
    }


def jobs_of(options: argparse.Namespace, *, seeds: range) -> list[Job]:
    """Every setting of every policy, in every regime, on the samples of these seeds."""
    return [
        {
            "regime": regime,
            "policy": policy,
            "setting": setting,
            "seed": seed,
            "latency": options.latency,
            "log": str(options.log.resolve()),
        }
        for regime in options.regimes
        for policy in options.policies
        for setting in FAMILIES[policy].settings
        for seed in seeds
    ]


def promising(rows: list[Row], jobs: list[Job], *, within: float) -> list[Job]:
    """Those jobs whose setting took at most 1 + `within` of what its policy's best one took in that regime's rows."""

    def setting(job: Job) -> tuple[Any, ...]:
        return job["regime"], job["policy"], job["setting"]

    waited_s = {setting(row["job"]): row["waited_s"] for row in rows}
    least_s: dict[tuple[Any, ...], float] = {}
    for (regime, policy, _), seconds in waited_s.items():
        least_s[regime, policy] = min(seconds, least_s.get((regime, policy), math.inf))
    return [
        job
        for job in jobs
        if waited_s.get(setting(job), math.inf) <= (1.0 + within) * least_s.get(setting(job)[:2], 0.0)
    ]


def print_regime(regime: str, rows: list[Row]) -> None:
    """A line a policy, at its best setting over all seeds together; then each against the best competitor."""
    seeds = sorted({row["job"]["seed"] for row in rows})
    off = {row["job"]["seed"]: row["off_waited_s"] for row in rows}
    best = {name: setting for name in FAMILIES if (setting := _best_setting(rows, name))}
    competitors = [figures for name, (_, figures) in best.items() if not FAMILIES[name].is_ceiling]
    least = min(_ratio(figures, off) for figures in competitors) if competitors else 1.0
    print_table(
        f"{regime_of(regime)['title']} ({regime}): time that training waits, over {len(seeds)} seeds",
        ["policy", "best setting", "seconds", "of no drafting", "lowest", "highest", "of the best", "share of gain"],
        [
            [
                f"{name} *" if FAMILIES[name].is_ceiling else name,
                "-" if setting is None else f"{setting:g}" if isinstance(setting, (int, float)) else setting,
                statistics.mean(figures.values()),
                _ratio(figures, off),
                min(figures[seed] / off[seed] for seed in figures),
                max(figures[seed] / off[seed] for seed in figures),
                _ratio(figures, off) / least,
                _share_of_gain(name, best, off),
            ]
            for name, (setting, figures) in sorted(best.items(), key=lambda item: _ratio(item[1][1], off))
        ],
    )


def _best_setting(rows: list[Row], policy: str) -> tuple[Any, dict[int, float]] | None:
    """The setting with the lowest mean, and its figure on each seed."""
    by_setting: dict[Any, dict[int, float]] = {}
    for row in rows:
        if row["job"]["policy"] == policy:
            by_setting.setdefault(row["job"]["setting"], {})[row["job"]["seed"]] = row["waited_s"]
    if not by_setting:
        return None
    most = max(map(len, by_setting.values()))  # settings that were given up were measured on one seed
    whole = {setting: figures for setting, figures in by_setting.items() if len(figures) == most}
    return min(whole.items(), key=lambda item: statistics.mean(item[1].values()))


def _ratio(figures: dict[int, float], off: dict[int, float]) -> float:
    """Mean over seeds of the time against no drafting."""
    return statistics.mean(figures[seed] / off[seed] for seed in figures)


def _share_of_gain(name: str, best: dict[str, tuple[Any, dict[int, float]]], off: dict[int, float]) -> float | None:
    """How much of what the best ceiling gains over no drafting a policy gains."""
    ceilings = [_ratio(figures, off) for other, (_, figures) in best.items() if FAMILIES[other].is_ceiling]
    if not ceilings or min(ceilings) >= 1.0:
        return None
    return (1.0 - _ratio(best[name][1], off)) / (1.0 - min(ceilings))


def main() -> None:
    """Measure and print."""
    options = parser(__doc__.split("\n", 1)[0])
    options.add_argument("--regimes", nargs="+", choices=REGIMES, default=list(REGIMES))
    options.add_argument("--policies", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    options.add_argument("--seeds", type=int, default=5, help="how many draws of samples (%(default)s)")
    options.add_argument(
        "--within", type=float, help="other seeds only for settings that are so close to the best on the first, as 0.02"
    )
    options.add_argument("--latency", choices=LATENCY_PRESETS, help="a preset instead of the regimes' own")
    options.add_argument("--workers", type=int, default=os.cpu_count(), help="processes at once (%(default)s)")
    chosen = options.parse_args()
    if chosen.smoke:
        chosen.seeds, chosen.policies = 1, [DEFAULT, "fixed", "oracle"]
    first = jobs_of(chosen, seeds=range(1 if chosen.within is not None else chosen.seeds))
    rows = measure_all("bench_regimes", first, chosen, workers=chosen.workers)
    if chosen.within is not None:
        others = promising(rows, jobs_of(chosen, seeds=range(1, chosen.seeds)), within=chosen.within)
        rows += measure_all("bench_regimes", others, chosen, workers=chosen.workers)
    for regime in chosen.regimes:
        if mine := [row for row in rows if row["job"]["regime"] == regime]:
            print_regime(regime, mine)
    print("\n* knows the lengths, also of requests that wait")


if __name__ == "__main__":
    main()
