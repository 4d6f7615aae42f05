"""The rollouts that stand in for a paper's: two checkpoints of an RL run, the older one as history of the newer one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import das
from bench.bench_regimes import cut
from das.analysis import read_log
from das.analysis.projection import Projection
from das.analysis.simulate import Policy, simulate

HISTORY_SAMPLES = 16  # of a prompt; as many as there are


@dataclass(frozen=True, slots=True)
class LoggedStep:
    """What is generated, batch by batch, and what was generated before.

    Args:
        history: rollouts of the older checkpoint.
        batches: rollouts of the newer one, as of training steps 1, 2 and so on; by prompt within each.
        group_size: samples of a prompt in a batch.
    """

    history: tuple[das.Rollout, ...]
    batches: tuple[das.Rollout, ...]
    group_size: int

    def simulate(self, policy: Policy, *, latency: das.LatencyModel, **engines: Any) -> Projection:
        """Simulate the generation of the batches; `engines` as of `das.analysis.simulate.simulate`."""
        return simulate(
            self.batches, history=self.history, policy=policy, latency=latency, group_size=self.group_size, **engines
        )


@dataclass(frozen=True, slots=True)
class Log:
    """A log of two or more training steps.

    Args:
        rollouts: of the prompts in use.
        seed: of the draw of samples, and of the order of prompts.
    """

    rollouts: tuple[das.Rollout, ...]
    seed: int

    def step(self, *, num_batches: int = 1, num_samples: int = 8) -> LoggedStep:
        """Draw `num_samples` samples of each prompt of the last training step, for so many batches."""
        group_size = num_samples // num_batches
        history, batches = cut(
            list(self.rollouts),
            seed=self.seed,
            history_samples=HISTORY_SAMPLES,
            group_size=group_size,
            num_batches=num_batches,
        )
        return LoggedStep(tuple(history), tuple(batches), group_size)


def read(path: Path, *, seed: int = 0, num_prompts: int | None = None) -> Log:
    """Read a log, or its first `num_prompts` prompts."""
    rollouts = [record.rollout for record in read_log(path)]
    kept = set(list(dict.fromkeys(rollout.key for rollout in rollouts))[:num_prompts])
    return Log(tuple(rollout for rollout in rollouts if rollout.key in kept), seed)
