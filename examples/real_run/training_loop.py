"""GRPO on the tiny reasoner, with rollouts from a real engine that gets the new weights after each training step.

python examples/real_run/training_loop.py --engine sglang --drafts yes --seed 0 --steps 12 --out FILE

One run of `real_run.py`, in the engine's own environment. FILE gets a JSON line a training step.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

import torch
from generation import Engine, Generation
from grpo import policy_step, trained
from model import Weights, load, save
from run_file import Step, write
from task import Problem, decode, encode, random_problem, reward

FIRST_WEIGHTS = Path(__file__).parents[1] / "tiny_reasoner" / "epoch0" / "model.safetensors"
PROMPTS, SAMPLES, RATE = 16, 8, 1e-3  # every training step is an epoch: all prompts, some samples of each
PROBLEMS_SEED = 0


def main() -> None:
    """Run one engine through all training steps."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--engine", choices=["sglang", "vllm"], required=True)
    options.add_argument("--drafts", choices=["yes", "no"], required=True)
    options.add_argument("--seed", type=int, required=True)
    options.add_argument("--steps", type=int, required=True)
    options.add_argument("--out", type=Path, required=True)
    given = options.parse_args()
    torch.set_num_threads(1)  # the same sums in the same order, whatever the machine
    weights = load(FIRST_WEIGHTS)
    with tempfile.TemporaryDirectory() as name, given.out.open("w") as out:
        folder = Path(name)
        save(weights, folder, dtype=torch.float32)
        engine = start(given.engine, folder, drafts=given.drafts == "yes", seed=given.seed)
        try:
            train(engine, weights, folder, out, given)
        finally:
            engine.close()


def start(name: str, model: Path, *, drafts: bool, seed: int) -> Engine:
    """Return an engine; the environment has one of the two."""
    if name == "sglang":
        from sglang_engine import SGLangEngine

        return SGLangEngine(model, drafts=drafts, seed=seed, max_running=PROMPTS * SAMPLES)
    from vllm_engine import VLLMEngine

    return VLLMEngine(model, drafts=drafts, seed=seed, max_running=PROMPTS * SAMPLES)


def train(engine: Engine, weights: Weights, folder: Path, out: TextIO, given: argparse.Namespace) -> None:
    """Sample, reward, update, load; a line for each round."""
    optimizer = torch.optim.AdamW(trained(weights), lr=RATE, weight_decay=0.0)
    problems = [problem for problem in training_problems() for _ in range(SAMPLES)]
    prompts = [encode(problem.prompt) for problem in problems]
    for step in range(given.steps):
        if step:
            save(weights, folder, dtype=torch.float32)
            engine.load(folder)
        found = engine.generate(prompts, request_ids=[f"step {step} response {row}" for row in range(len(prompts))])
        rewards = earned(problems, found)
        started_s = time.perf_counter()
        policy_step(
            weights, optimizer, prompts=prompts, responses=found.responses, rewards=rewards, num_samples=SAMPLES
        )
        update_s = time.perf_counter() - started_s
        done = Step(
            engine=given.engine,
            drafts=given.drafts == "yes",
            seed=given.seed,
            training_step=step,
            prompts=prompts,
            rewards=rewards,
            update_s=update_s,
            weights=fingerprint(weights),
            **asdict(found),
        )
        write(done, out)


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
