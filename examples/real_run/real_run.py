"""Train the tiny reasoner by GRPO on real engines, with das and without, and say what drafting changed.

    PYTHONPATH=. python examples/real_run/real_run.py --sglang .venvs/sglang/bin/python --vllm .venvs/vllm/bin/python

SGLang runs once each way, with noise keyed by the request: the two runs must be one, to the last bit of the weights.
vLLM runs with five seeds each way, whose curves must not differ by more than seeds do. Rollouts, one file a run, are
left in out/real_run; `--report` reads them again. Exits with 1 if anything that is claimed does not hold.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from findings import (
    Prediction,
    compare,
    first_difference,
    num_inside,
    predictions,
    reward_curves,
    shares_with_gradient,
)
from run_file import Run, read_runs

from bench.harness import print_table

ROOT = Path(__file__).parents[2]
FOLDERS = ("", "integrations", "examples/real_run", "examples/tiny_reasoner", "tests/sglang_stand_ins")
SGLANG_STEPS, VLLM_STEPS, VLLM_SEEDS = 12, 6, 5
CLOSE = 0.05  # of replayed to counted decode steps
RARE = 0.05  # share of dealings below which two sets of curves count as different


@dataclass(frozen=True, slots=True)
class Claim:
    """Something that must hold, and what was found."""

    text: str
    holds: bool


def main() -> int:
    """Run what is asked for, and report."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--sglang", type=Path, metavar="PYTHON", help="of an environment with SGLang; none: no SGLang")
    options.add_argument("--vllm", type=Path, metavar="PYTHON", help="of an environment with vLLM; none: no vLLM")
    options.add_argument("--steps", type=int, help=f"training steps (SGLang {SGLANG_STEPS}, vLLM {VLLM_STEPS})")
    options.add_argument("--out", type=Path, default=ROOT / "out" / "real_run", help="folder (%(default)s)")
    options.add_argument("--report", action="store_true", help="run nothing: report what is in the folder")
    given = options.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    if not given.report:
        started_s = time.perf_counter()
        if given.sglang:
            run_all("sglang", given.sglang, given.out, steps=given.steps or SGLANG_STEPS, num_seeds=1)
        if given.vllm:
            run_all("vllm", given.vllm, given.out, steps=given.steps or VLLM_STEPS, num_seeds=VLLM_SEEDS)
        print(f"all runs: {time.perf_counter() - started_s:.0f} s\n")
    claims = report(given.out)
    for claim in claims:
        print(f"{'holds ' if claim.holds else 'MISSED'}  {claim.text}")
    return 0 if claims and all(claim.holds for claim in claims) else 1


def run_all(engine: str, python: Path, out: Path, *, steps: int, num_seeds: int) -> None:
    """Run every seed both ways, one process after the other."""
    for drafts in ("no", "yes"):
        print(f"{engine}, drafts: {drafts}, {num_seeds} runs of {steps} training steps", flush=True)
        command: list[object] = [python.absolute(), "-W", "ignore", ROOT / "examples" / "real_run" / "training_loop.py"]
        command += [
            "--engine",
            engine,
            "--drafts",
            drafts,
            "--seeds",
            *range(num_seeds),
            "--steps",
            steps,
            "--out",
            out,
        ]
        log = out / f"{engine}_drafts_{drafts}.log"
        with log.open("w") as written:
            done = subprocess.run(
                list(map(str, command)), env=environment(python), stdout=written, stderr=subprocess.STDOUT
            )
        if done.returncode:
            sys.exit(f"it failed with code {done.returncode}; the end of {log}:\n{log.read_text()[-2000:]}")


def environment(python: Path) -> dict[str, str]:
    """Return the environment of a run: one thread, as threads that wait for each other on busy cores are slow."""
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(str(ROOT / folder) for folder in FOLDERS),
        "PATH": f"{python.absolute().parent}{os.pathsep}{os.environ['PATH']}",  # SGLang compiles with that one's ninja
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "SGLANG_USE_CPU_ENGINE": "1",
    }


def report(folder: Path) -> list[Claim]:
    """Print a table for each engine that ran both ways, and return what is claimed of it."""
    claims = []
    for engine, tell in (("sglang", report_sglang), ("vllm", report_vllm)):
        undrafted, drafted = (read_runs(folder, engine=engine, drafts=drafts) for drafts in (False, True))
        if undrafted and drafted:
            claims += tell(undrafted, drafted)
    return claims


def report_sglang(undrafted_runs: list[Run], drafted_runs: list[Run]) -> list[Claim]:
    """Print one line a training step; the two runs have to be the same."""
    (undrafted,), (drafted,) = undrafted_runs, drafted_runs
    shares, replayed = shares_with_gradient(drafted), predictions(drafted)
    print_table(
        "SGLang, keyed noise; decode steps of all requests, passes until the last one ended, seconds to generate",
        ["step", "reward", "groups with gradient", "tokens", "steps without", "with das", "replayed",
         "passes without", "with das", "replayed", "s without", "with das"],
        [
            [
                with_das.training_step, with_das.mean_reward, share, with_das.num_tokens, without.num_decode_steps,
                with_das.num_decode_steps, told.num_decode_steps, without.makespan_passes, with_das.makespan_passes,
                told.makespan_passes, without.makespan_s, with_das.makespan_s,
            ]
            for without, with_das, told, share in zip(undrafted, drafted, replayed, shares, strict=True)
        ],
    )  # fmt: skip
    parted = first_difference(undrafted, drafted)
    same = "SGLang: same rollouts, rewards and weights with das as without, at every training step, bit for bit"
    mean_share = sum(shares) / len(shares)
    return [
        Claim(f"{same}; they part at {parted}" if parted else same, not parted),
        Claim(f"SGLang: {mean_share:.0%} of the groups have advantages (least in a step: {min(shares):.0%})",
              mean_share >= 0.5),
        prediction_claim("SGLang", [drafted], [replayed]),
    ]  # fmt: skip


def report_vllm(undrafted: list[Run], drafted: list[Run]) -> list[Claim]:
    """Print one line a training step, means over seeds; the curves have to be alike."""
    without, with_das = reward_curves(undrafted), reward_curves(drafted)
    replayed = [predictions(run) for run in drafted]
    print_table(
        f"vLLM, {len(undrafted)} seeds; lowest and highest mean reward of a seed, and means over seeds",
        ["step", "reward without", "lowest", "highest", "with das", "lowest", "highest",
         "steps without", "with das", "replayed", "passes without", "with das", "replayed", "s without", "with das"],
        [
            [
                step,
                *(figure(curves[:, step]) for curves in (without, with_das) for figure in (np.mean, np.min, np.max)),
                *(np.mean([run[step].num_decode_steps for run in runs]) for runs in (undrafted, drafted)),
                np.mean([told[step].num_decode_steps for told in replayed]),
                *(np.mean([run[step].makespan_passes for run in runs]) for runs in (undrafted, drafted)),
                np.mean([told[step].makespan_passes for told in replayed]),
                *(np.mean([run[step].makespan_s for run in runs]) for runs in (undrafted, drafted)),
            ]
            for step in range(without.shape[1])
        ],
    )  # fmt: skip
    found = compare(without, with_das)
    print(
        f"\nBetween lowest and highest seed of the other way: the mean with das at {num_inside(with_das, without)} "
        f"and the mean without at {num_inside(without, with_das)} of {without.shape[1]} training steps. Not claimed: "
        "with five seeds, two ways that do not differ are outside somewhere more often than not."
    )
    return [
        Claim(
            f"vLLM: mean reward differs by {found.difference:+.4f}, p = {found.p_mean:.2f} "
            f"(exact permutation test, {found.num_dealings} dealings)",
            found.p_mean >= RARE,
        ),
        Claim(
            f"vLLM: the mean curves are {found.greatest_gap:.3f} apart at most, p = {found.p_gap:.2f}: each inside "
            f"the other's band of ±{found.band:.3f}, in which 95 % of the dealings stay at all training steps",
            found.p_gap >= RARE,
        ),
        prediction_claim("vLLM", drafted, replayed),
    ]


def prediction_claim(engine: str, runs: list[Run], replayed: list[list[Prediction]]) -> Claim:
    """Say how far replay is off, over all training steps and in the worst."""
    counted = [step.num_decode_steps for run in runs for step in run]
    told = [prediction.num_decode_steps for run in replayed for prediction in run]
    worst = max(abs(b / a - 1) for a, b in zip(counted, told, strict=True))
    text = (
        f"{engine}: replay predicts {sum(told)} decode steps, {sum(counted)} were taken "
        f"({sum(told) / sum(counted) - 1:+.2%}; the worst training step is {worst:.2%} off)"
    )
    return Claim(text, worst <= CLOSE)


if __name__ == "__main__":
    sys.exit(main())
