"""NeMo-RL (arXiv 2604.26779): longer drafts that lose, step times by Amdahl's law, lag 1, and the 235B projection.

python -m bench.papers.nemo_rl [--log FILE]
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import das
from bench.papers.comparison import Claim, Comparison, Section, run
from bench.papers.logged_step import Log, LoggedStep
from das.analysis.projection import Projection, Schedule, amdahl_speedup
from das.latency_presets import latency_preset

LATENCY = latency_preset("qwen2.5-7b-a100").fit.latency
PLACES = (16, 80, None)  # requests that run at once; None: all
LENGTHS = (3, 5, 7)
NAMES = ("Zero", "Think")
ACCEPTED = {3: (3.32, 2.77), 5: (4.35, 3.23), 7: (5.06, 3.48)}  # tokens a round: Zero, Think
SPEEDUP = {3: (1.77, 1.53), 5: (1.44, 0.84), 7: (1.21, 0.71)}
PROJECTED = {3: (3.0, 2.72), 7: (5.0, 4.07)}  # 235B on 512 GPUs: tokens a round, rollout speedup
NUM_BATCHES = 8  # of one sample a prompt, with lag 1
NUM_TRIES = 5  # to find how long training takes; each halves the error
EXPOSED_S, STEP_S, EXPOSED_AFTER_S, STEP_AFTER_S = 10.4, 75.0, 0.6, 60.5


@dataclass(frozen=True, slots=True)
class StepTimes:
    """A training step of the paper: seconds without and with drafts, and of generation in it."""

    step_s: float
    step_after_s: float
    generation_s: float
    generation_after_s: float


STEPS = {"Think": StepTimes(185.3, 137.4, 133.6, 87.0), "Zero": StepTimes(151.2, 107.5, 100.0, 56.6)}


def length_section(step: LoggedStep) -> Section:
    """Drafts of 3, 5 and 7 tokens, and das's price, by the number of requests that run."""
    fixed = {places: {k: _project(step, das.FixedBudget(k), places) for k in LENGTHS} for places in PLACES}
    priced = {places: _project(step, das.LengthAwareBudget(latency=LATENCY), places) for places in PLACES}
    unlimited = _project(step, das.UnlimitedBudget(), None)
    figures = []
    for k in LENGTHS:
        figures += [
            Comparison(f"k = {k}: tokens a round, {name}", _accepted(fixed[None][k]), paper, "k ablation")
            for name, paper in zip(NAMES, ACCEPTED[k], strict=True)
        ]
    for k in LENGTHS:
        figures += [
            Comparison(
                f"k = {k}: generation speedup, {_running(places)}",
                fixed[places][k].speedup,
                _pair(SPEEDUP[k]),
                "the same",
            )
            for places in PLACES
        ]
    figures += [
        Comparison("n-gram: tokens a round; ours: no limit", _accepted(unlimited), "2.47, 2.05", "n-gram baseline"),
        Comparison("n-gram: generation speedup; ours: no limit", unlimited.speedup, "0.7, 0.5", "the same"),
        *[
            Comparison(f"das's price: generation speedup, {_running(places)}", projection.speedup)
            for places, projection in priced.items()
        ],
    ]
    accepted = {places: [_accepted(fixed[places][k]) for k in LENGTHS] for places in PLACES}
    speedups = {places: [fixed[places][k].speedup for k in LENGTHS] for places in PLACES}
    return Section(
        "Longer drafts accept more and end later",
        "drafts of das of k tokens, Qwen2.5-7B on an A100; requests that wait take the places of those that end.",
        tuple(figures),
        (
            Claim("tokens a round rise with k, always", all(some == sorted(some) for some in accepted.values())),
            Claim(
                "speed falls with k where 80 or more requests run",
                all(speedups[places] == sorted(speedups[places], reverse=True) for places in PLACES[1:]),
            ),
            Claim(
                "k = 3 and k = 7 are further apart the more requests run",
                _is_sorted([some[0] / some[-1] for some in speedups.values()]),
            ),
            Claim("drafts without a limit are slower than none where all requests run", unlimited.speedup < 1),
            Claim(
                "das's price is faster than each k at each size",
                all(priced[places].speedup > max(speedups[places]) for places in PLACES),
            ),
        ),
        "the paper's drafter is EAGLE-3, a network: more of its tokens are accepted, and each takes a pass of its own, "
        "which das's do not. So its speed falls faster with k than with ours at the same batch; the sign is the same.",
    )


def cost_section() -> Section:
    """What a draft token costs, by tokens a round T and speedup S: S = T / (1 + k z)."""
    cost = {
        (name, k): _token_cost(ACCEPTED[k][column], SPEEDUP[k][column], k)
        for column, name in enumerate(NAMES)
        for k in LENGTHS
    }
    large = {k: _token_cost(accepted, speedup, k) for k, (accepted, speedup) in PROJECTED.items()}
    figures = [
        Comparison(
            f"Qwen3-8B {name}, k = {k}; ours: 80 running", _line_cost(80), value, "from T and S of the k ablation"
        )
        for (name, k), value in cost.items()
    ]
    figures += [
        Comparison(f"Qwen3-235B, k = {k}; ours: 7 running", _line_cost(7), value, "from T and S of the projection")
        for k, value in large.items()
    ]
    return Section(
        "One draft token more, in passes",
        "the share of a pass by the A100 line, without context, at batches where it comes near the paper's: z in S = "
        "T / (1 + k z).",
        tuple(figures),
        (
            Claim(
                "what 8B measured, our A100 would pay at some batch from 70 to 300",
                all(_line_cost(70) < z < _line_cost(300) for z in cost.values()),
            ),
            Claim(
                "projected for 235B: one twentieth of a pass or less, the same for k = 3 and 7",
                all(z < 0.05 for z in large.values()),
            ),
        ),
        "theirs holds the drafter's own passes, ours verification alone. The projection's tokens are ten times "
        "cheaper than the measured ones: its inputs besides T and S (latencies, batch per engine) are not public.",
    )


def amdahl_section() -> Section:
    """Step times from generation times, S <= 1 / (R / alpha + 1 - R)."""
    figures, misses = [], []
    for name, times in STEPS.items():
        share, faster = times.generation_s / times.step_s, times.generation_s / times.generation_after_s
        bound = amdahl_speedup(faster, generation_share=share)
        figures += [
            Comparison(f"{name}: step with drafts, s", times.step_s / bound, times.step_after_s, "step-time table"),
            Comparison(f"{name}: step speedup", bound, times.step_s / times.step_after_s, "1.35 and 1.41 there"),
        ]
        misses.append(times.step_s / bound / times.step_after_s - 1)
    share = _share(PROJECTED[3][1], 1.70)
    large = amdahl_speedup(PROJECTED[7][1], generation_share=share)
    wide = amdahl_speedup(3.5, generation_share=share)
    figures += [
        Comparison(f"235B, 512 GPUs, k = 7: step speedup from R = {share:.2f} of k = 3", large, 1.96, "projection"),
        Comparison("235B, 2,048 GPUs, lag 2: step speedup from the same R", wide, 2.5, "projection, about"),
        Comparison("235B, 2,048 GPUs, lag 2: R that 3.5 and 2.5 imply", _share(3.5, 2.5)),
    ]
    return Section(
        "Step times by Amdahl's law",
        "R and alpha from the paper's generation times; for 235B, R from k = 3 (2.72 x rollout, 1.70 x step).",
        tuple(figures),
        (
            Claim("the bound predicts both steps within 1 %", all(abs(miss) < 0.01 for miss in misses)),
            Claim("one R explains both lengths of the 235B projection within 1 %", abs(large / 1.96 - 1) < 0.01),
            Claim("it does not explain lag 2: there waiting, not generating, is what shrinks", wide < 0.9 * 2.5),
        ),
        "outside generation the paper's steps with drafts took 1.3 s (Think) and .3 s (Zero) less than without, so "
        "both end slightly before the bound.",
    )


def lag_section(log: Log) -> Section:
    """Generation one training step ahead, trained on as slowly as leaves the paper's share exposed."""
    step = log.step(num_batches=NUM_BATCHES)
    engines = {"latency": LATENCY, "lag": 1, "max_running": len(step.batches) // NUM_BATCHES}
    train_s = _train_s(step, engines)
    projection = step.simulate(das.LengthAwareBudget(latency=LATENCY), train_s=train_s, **engines)
    off, on = _per_step(projection.without_drafts), _per_step(projection.with_drafts)
    speedup = off[0] / on[0]
    most = STEP_S / (STEP_S - EXPOSED_S)
    return Section(
        "Asynchronous, lag 1",
        f"{NUM_BATCHES} batches of {engines['max_running']} requests, of which the first two fill the pipeline and "
        "are left out; training takes so long that generation without drafts is exposed for the paper's share of a "
        "step.",
        (
            Comparison(
                "exposed generation without drafts, of a step", off[1] / off[0], EXPOSED_S / STEP_S, "lag-1 table"
            ),
            Comparison(
                "exposed generation with drafts, of a step", on[1] / on[0], EXPOSED_AFTER_S / STEP_AFTER_S, "the same"
            ),
            Comparison("step speedup", speedup, STEP_S / STEP_AFTER_S, "the same"),
            Comparison(
                "step speedup, if nothing else becomes faster, at most",
                off[0] / (off[0] - off[1]),
                most,
                "75 s less 10.4",
            ),
        ),
        (
            Claim("with drafts hardly any generation is exposed (2 % of a step at most)", on[1] <= 0.02 * on[0]),
            Claim(
                "the step gains what was exposed, within 5 %", abs(speedup / (off[0] / (off[0] - off[1])) - 1) < 0.05
            ),
        ),
        f"of the paper's 14.5 s only 9.8 are exposed generation, which alone would bring {most:.2f}; the rest must "
        "come from elsewhere. In the simulation training takes as long beside generation as without.",
    )


def _train_s(step: LoggedStep, engines: dict[str, Any]) -> float:
    """How long training takes where generation without drafts is exposed for the paper's share of a step."""
    train_s = 0.0
    for _ in range(NUM_TRIES):  # with what is too little, generation waits less, and the other way round
        off = replace(step, history=()).simulate(das.NoDraft(), train_s=train_s, **engines).without_drafts
        train_s = (1 - EXPOSED_S / STEP_S) * _per_step(off)[0]
    return train_s


def sections(log: Log) -> list[Section]:
    """All that is reproduced of the paper."""
    return [length_section(log.step()), cost_section(), amdahl_section(), lag_section(log)]


def _project(step: LoggedStep, policy: das.budget.BudgetPolicy, places: int | None) -> Projection:
    return step.simulate(policy, latency=LATENCY, max_running=places)


def _accepted(projection: Projection) -> float:
    return projection.with_drafts.counters.mean_acceptance_length


def _running(places: int | None) -> str:
    return "all running" if places is None else f"{places} running"


def _pair(values: tuple[float, float]) -> str:
    return ", ".join(f"{value:g}" for value in values)


def _is_sorted(values: list[float]) -> bool:
    return values == sorted(values)


def _token_cost(accepted: float, speedup: float, k: int) -> float:
    return (accepted / speedup - 1) / k


def _line_cost(num_running: int) -> float:
    """Of a draft token for each of so many requests, in passes without drafts."""
    return LATENCY.c_tok_ms * num_running / LATENCY.step_ms(num_running)


def _share(generation_speedup: float, step_speedup: float) -> float:
    """The share R of generation with which Amdahl's law gives that step speedup."""
    return (1 - 1 / step_speedup) / (1 - 1 / generation_speedup)


def _per_step(schedule: Schedule) -> tuple[float, float]:
    """Seconds of a training step, and of generation exposed in it: means over those after the pipeline is full."""
    first, *later = schedule.batches[1:]
    duration_s = later[-1].trained_s - first.trained_s
    return duration_s / len(later), math.fsum(batch.exposed_generation_s for batch in later) / len(later)


if __name__ == "__main__":
    run(__doc__, sections)
