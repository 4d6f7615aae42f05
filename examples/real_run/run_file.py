"""The file of a run: a JSON line a training step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO


@dataclass(frozen=True, slots=True)
class Step:
    """A training step.

    Args:
        engine, drafts, seed, training_step: which one.
        prompts: token ids, one entry a response; the samples of a prompt follow each other.
        responses, rewards: of the weights before the update.
        num_decode_steps, makespan_passes, makespan_s: see `generation.Generation`.
        update_s: wall time of the gradient step.
        weights: a hash of the bits of all weights after the update.
    """

    engine: str
    drafts: bool
    seed: int
    training_step: int
    prompts: list[list[int]]
    responses: list[list[int]]
    rewards: list[float]
    num_decode_steps: int
    makespan_passes: int
    makespan_s: float
    update_s: float
    weights: str

    @property
    def mean_reward(self) -> float:
        """Mean over all responses."""
        return sum(self.rewards) / len(self.rewards)

    @property
    def num_tokens(self) -> int:
        """Sum over all responses."""
        return sum(map(len, self.responses))


Run = Sequence[Step]


def path_of(folder: Path, *, engine: str, drafts: bool, seed: int) -> Path:
    """Return where a run's file lies."""
    return folder / f"{engine}_{'das' if drafts else 'none'}_seed{seed}.jsonl"


def write(step: Step, file: TextIO) -> None:
    """Add a line."""
    print(json.dumps(asdict(step)), file=file, flush=True)


def read(path: Path) -> Run:
    """Return the training steps of a file."""
    return [Step(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def read_runs(folder: Path, *, engine: str, drafts: bool) -> list[Run]:
    """Return the runs of a folder, by seed."""
    runs = [
        read(path) for path in folder.glob(path_of(folder, engine=engine, drafts=drafts, seed=0).name.replace("0", "*"))
    ]
    return sorted(runs, key=lambda run: run[0].seed)
