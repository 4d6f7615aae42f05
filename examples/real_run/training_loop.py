"""GRPO on the tiny reasoner, with rollouts from a real engine that gets the new weights after each training step.

python examples/real_run/training_loop.py --engine sglang --drafts yes --seeds 0 --steps 12 --out out/real_run

What `real_run.py` starts, in the engine's own environment. Each seed gets an engine of its own, and a file in the
folder, with a JSON line a training step.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from generation import Engine, Generation
from grpo import policy_step, trained
from model import Weights, load, save
from run_file import Step, path_of, write
from task import Problem, decode, encode, random_problem, reward

FIRST_WEIGHTS = Path(__file__).parents[1] / "tiny_reasoner" / "epoch0" / "model.safetensors"
PROMPTS, SAMPLES, RATE = 12, 12, 5e-4  # every training step is an epoch: all prompts, some samples of each
PROBLEMS_SEED = 0


def main() -> None:
    """Run one engine through all training steps, seed after seed."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--engine", choices=["sglang", "vllm"], required=True)
    options.add_argument("--drafts", choices=["yes", "no"], required=True)
    options.add_argument("--seeds", type=int, nargs="+", required=True)
    options.add_argument("--steps", type=int, required=True)
    options.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    given = options.parse_args()
    torch.set_num_threads(1)  # the same sums in the same order, whatever the machine
    drafts = given.drafts == "yes"
    for seed in given.seeds:
        run(given.engine, drafts=drafts, seed=seed, num_steps=given.steps, folder=given.out)


def run(engine_name: str, *, drafts: bool, seed: int, num_steps: int, folder: Path) -> None:
    """Train from the first weights on with a new engine, and write the run's file."""
    weights = load(FIRST_WEIGHTS)
    path = path_of(folder, engine=engine_name, drafts=drafts, seed=seed)
    with tempfile.TemporaryDirectory() as name, path.open("w") as out:
        model = Path(name)
        save(weights, model, dtype=torch.float32)
        engine = start(engine_name, model, drafts=drafts, seed=seed)
        try:
            for trained_step in train(engine, weights, model, num_steps=num_steps):
                write(Step(engine=engine_name, drafts=drafts, seed=seed, **trained_step), out)
        finally:
            engine.close()


def start(name: str, model: Path, *, drafts: bool, seed: int) -> Engine:
    """Return an engine; the environment has one of the two."""
    if name == "sglang":
        from sglang_engine import SGLangEngine

        return SGLangEngine(model, drafts=drafts, seed=seed, max_running=PROMPTS * SAMPLES)
    from vllm_engine import VLLMEngine

    return VLLMEngine(model, drafts=drafts, seed=seed, max_running=PROMPTS * SAMPLES)


def train(engine: Engine, weights: Weights, model: Path, *, num_steps: int) -> Iterator[dict[str, Any]]:
    """Sample, reward, update, load; yield the fields of each training step but those that name the run."""
    optimizer = torch.optim.AdamW(trained(weights), lr=RATE, weight_decay=0.0)
    problems = [problem for problem in training_problems() for _ in range(SAMPLES)]
    prompts = [encode(problem.prompt) for problem in problems]
    for training_step in range(num_steps):
        if training_step:
            save(weights, model, dtype=torch.float32)
            engine.load(model)
        request_ids = [f"step {training_step} response {row}" for row in range(len(prompts))]
        found = engine.generate(prompts, request_ids=request_ids)
        rewards = earned(problems, found)
        started_s = time.perf_counter()
        policy_step(
            weights, optimizer, prompts=prompts, responses=found.responses, rewards=rewards, num_samples=SAMPLES
        )
        yield {
            "training_step": training_step,
            "prompts": prompts,
            "rewards": rewards,
            "update_s": time.perf_counter() - started_s,
            "weights": fingerprint(weights),
            **asdict(found),
        }


def training_problems() -> list[Problem]:
    """Return the problems: the same in every run."""
    source = random.Random(PROBLEMS_SEED)
    return [random_problem(source) for _ in range(PROMPTS)]


def earned(problems: list[Problem], found: Generation) -> list[float]:
    """Return the reward of each response."""
    return [reward(problem, decode(response)) for problem, response in zip(problems, found.responses, strict=True)]


def fingerprint(weights: Weights) -> str:
    """Return a hash of all bits of the weights."""
    digest = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        digest.update(name.encode() + tensor.detach().numpy().tobytes())
    return digest.hexdigest()


if __name__ == "__main__":
    main()
