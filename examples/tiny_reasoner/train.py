"""Train the tiny reasoner from nothing: demonstrations, then GRPO; one to two hours on one core.

python examples/tiny_reasoner/train.py OUT [--seed 0]    needs torch, safetensors and tokenizers

OUT gets `epoch0` (before RL), `epoch2`, ..., each a model folder, and `tiny_reasoner_rollouts.jsonl.gz`, every rollout
of RL. Prompts come back each epoch, and weights change three times within one.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import random
import time
from pathlib import Path

import torch
from grpo import descend, negative_logprobs, padded, policy_step, trained
from model import Weights, load, random_weights, sample, save
from task import END, decode, demonstration, encode, random_problem, reward

DEMONSTRATION_STEPS, DEMONSTRATION_BATCH, DEMONSTRATION_RATE = 1450, 32, 3e-3
EPOCHS, PROMPTS, PROMPTS_A_STEP, SAMPLES, RL_RATE = 6, 48, 16, 8, 2e-4
SAVED_EPOCHS = (0, 2, 4, 6)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("out", type=Path)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--from-epoch0", action="store_true", help="begin with RL: OUT/epoch0 is there")
    given = options.parse_args()
    torch.manual_seed(given.seed)
    if given.from_epoch0:
        weights = load(given.out / "epoch0" / "model.safetensors")
    else:
        weights = random_weights(given.seed)
        learn_demonstrations(weights, random.Random(given.seed))
        save(weights, given.out / "epoch0")
    learn_from_rewards(weights, given.out, given.seed)


def learn_demonstrations(weights: Weights, source: random.Random) -> None:
    """Next-token prediction on demonstrations of random problems; the prompt itself is not learned."""
    optimizer = torch.optim.AdamW(trained(weights), lr=DEMONSTRATION_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    started = time.perf_counter()
    for step in range(DEMONSTRATION_STEPS):
        warm, left = min(1.0, step / 100), 0.5 * (1 + math.cos(math.pi * step / DEMONSTRATION_STEPS))
        optimizer.param_groups[0]["lr"] = DEMONSTRATION_RATE * warm * max(0.05, left)
        texts, weight_rows = [], []
        for _ in range(DEMONSTRATION_BATCH):
            problem = random_problem(source)
            prompt, response = encode(problem.prompt), [*encode(demonstration(problem, source)), END]
            texts.append(prompt + response)
            weight_rows.append([0.0] * (len(prompt) - 1) + [1.0] * len(response))
        loss = (negative_logprobs(weights, texts) * padded(weight_rows)).sum() / sum(map(sum, weight_rows))
        descend(optimizer, loss)
        if step % 100 == 0:
            print(f"demonstrations {step}: loss {loss.item():.4f}, {time.perf_counter() - started:.0f} s", flush=True)


def learn_from_rewards(weights: Weights, out: Path, seed: int) -> None:
    """GRPO (advantages normalised by prompt), one gradient step a batch of prompts, without a reference model."""
    source, generator = random.Random(f"rl {seed}"), torch.Generator().manual_seed(seed)
    problems = [random_problem(source) for _ in range(PROMPTS)]
    optimizer = torch.optim.AdamW(trained(weights), lr=RL_RATE, weight_decay=0.0)
    with (out / "tiny_reasoner_rollouts.jsonl.gz").open("wb") as file, gzip.GzipFile("", "wb", 9, file, mtime=0) as log:
        training_step = 0
        for epoch in range(EPOCHS):
            rewards: list[float] = []
            lengths: list[int] = []
            order = source.sample(range(PROMPTS), PROMPTS)
            for start in range(0, PROMPTS, PROMPTS_A_STEP):
                rows = [prompt for prompt in order[start : start + PROMPTS_A_STEP] for _ in range(SAMPLES)]
                prompts = [encode(problems[row].prompt) for row in rows]
                responses = sample(weights, prompts, generator)
                earned = [
                    reward(problems[row], decode(response)) for row, response in zip(rows, responses, strict=True)
                ]
                for at, (row, response) in enumerate(zip(rows, responses, strict=True)):
                    entry = {
                        "training_step": training_step,
                        "prompt_id": f"p{row:02}",
                        "sample": at % SAMPLES,
                        "prompt_token_ids": prompts[at],
                        "response_token_ids": response,
                        "reward": earned[at],
                    }
                    log.write(json.dumps(entry, separators=(",", ":")).encode() + b"\n")
                policy_step(
                    weights, optimizer, prompts=prompts, responses=responses, rewards=earned, num_samples=SAMPLES
                )
                training_step += 1
                rewards += earned
                lengths += map(len, responses)
            mean_length = sum(lengths) / len(lengths)
            print(f"epoch {epoch}: reward {sum(rewards) / len(rewards):.3f}, {mean_length:.1f} tokens", flush=True)
            if epoch + 1 in SAVED_EPOCHS:
                save(weights, out / f"epoch{epoch + 1}")


if __name__ == "__main__":
    main()
