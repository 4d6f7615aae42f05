"""What the runs show: identity, groups with a gradient, what a replay predicts, whether two sets of curves differ."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from generation import LONGEST_DRAFT, MIN_SURVIVAL, WIDTHS
from run_file import Run

import das
from bench.bench_sglang import replayed

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a replay says about one training step: as in `generation.Generation`."""

    num_decode_steps: int
    makespan_passes: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two sets of reward curves, compared by permutation.

    Args:
        difference: of the mean rewards over all training steps, second less first.
        p_mean: share of the ways to deal the runs out into two sets of these sizes in which that is at least as great.
        greatest_gap: between the mean curves, at the training step where they are farthest apart.
        p_gap: share of the dealings in which their own greatest gap is at least that.
        band: half the width of the band around one mean curve in which the other one lies, at every training step at
            once, in 95 % of the dealings.
        num_dealings: in how many ways the runs can be dealt out; all are tried.
    """

    difference: float
    p_mean: float
    greatest_gap: float
    p_gap: float
    band: float
    num_dealings: int


def first_difference(one: Run, other: Run) -> str:
    """Return where two runs part: in tokens, rewards or weights; "" if nowhere."""
    for ours, theirs in zip(one, other, strict=True):
        for name in ("prompts", "responses", "rewards", "weights"):
            if getattr(ours, name) != getattr(theirs, name):
                return f"{name} of training step {ours.training_step}"
    return ""


def shares_with_gradient(run: Run) -> list[float]:
    """Return, of each training step, the share of prompts whose samples differ in reward: others teach nothing."""
    shares = []
    for step in run:
        groups: dict[tuple[int, ...], set[float]] = {}
        for prompt, reward in zip(step.prompts, step.rewards, strict=True):
            groups.setdefault(tuple(prompt), set()).add(reward)
        shares.append(sum(len(rewards) > 1 for rewards in groups.values()) / len(groups))
    return shares


def predictions(run: Run) -> list[Prediction]:
    """Replay the rollouts of a run with the policy and the widths that its engine drafted with, in engine order."""
    result = replayed(
        run[0].prompts,
        [step.responses for step in run],
        policy=das.PriceBudget(min_survival=MIN_SURVIVAL, max_draft_tokens=LONGEST_DRAFT),
        shape="chain",
        widths=WIDTHS if run[0].engine == "sglang" else None,
    )
    return [
        Prediction(sum(counters.num_decode_steps for counters in batch.requests), batch.num_batch_steps)
        for batch in result.batches
    ]


def reward_curves(runs: Sequence[Run]) -> FloatArray:
    """Return mean rewards, [runs, training steps]."""
    return np.array([[step.mean_reward for step in run] for run in runs])


def compare(first: FloatArray, second: FloatArray) -> Comparison:
    """Compare curves, [runs, training steps] each, by trying every way to deal the runs out (Fisher's exact test).

    Without an effect of the sets, every dealing is as likely as the one seen, whatever the rewards' distribution.
    Complexity: O(C(runs, runs of the first) * runs * steps): 252 dealings of 5 and 5 runs.
    """
    curves = np.concatenate([first, second])
    seen = second.mean(0) - first.mean(0)
    dealings = [list(dealt) for dealt in itertools.combinations(range(len(curves)), len(first))]
    of_first = curves[dealings].sum(1)
    gaps = (curves.sum(0) - of_first) / len(second) - of_first / len(first)  # [dealings, training steps]
    differences, greatest = np.abs(gaps.mean(1)), np.abs(gaps).max(1)
    rounding = 1e-12
    return Comparison(
        difference=float(seen.mean()),
        p_mean=float(np.mean(differences >= abs(seen.mean()) - rounding)),
        greatest_gap=float(np.abs(seen).max()),
        p_gap=float(np.mean(greatest >= np.abs(seen).max() - rounding)),
        band=float(np.quantile(greatest, 0.95, method="higher")),
        num_dealings=len(dealings),
    )


def num_inside(curves: FloatArray, band: FloatArray) -> int:
    """Return at how many training steps the mean of some curves lies within the lowest and the highest of others."""
    mean = curves.mean(0)
    return int(((band.min(0) <= mean) & (mean <= band.max(0))).sum())
