"""At temperature above 0 drafts change no distribution: chi-square of drafted against undrafted samples."""

import math
from collections import Counter
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import pytest
from engine_runs import counters, engine, runner_of

PROMPT = [3, 14, 1, 5, 9, 2, 6]
NUM_SAMPLES = 3_000
NUM_TOKENS = 4
SETTINGS: dict[str, dict[str, Any]] = {
    "T=1": {"temperature": 1.0},
    "T=0.6, top-p, top-k": {"temperature": 0.6, "top_p": 0.9, "top_k": 12},
}


@pytest.fixture(scope="module")
def undrafted_samples(tiny_model: Path) -> dict[str, list[list[int]]]:
    with engine(tiny_model, num_speculative_tokens=None, max_num_seqs=256, seed=1) as llm:
        samples = {name: sample(llm, settings) for name, settings in SETTINGS.items()}
        samples["T=0.8"] = sample(llm, {"temperature": 0.8})
        samples["T=1 again"] = sample(llm, SETTINGS["T=1"])
    return samples


def sample(llm: Any, settings: dict[str, Any]) -> list[list[int]]:
    from vllm import SamplingParams

    parameters = SamplingParams(n=100, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False, **settings)
    outputs = llm.generate([{"prompt_token_ids": PROMPT}] * (NUM_SAMPLES // 100), parameters, use_tqdm=False)
    return [list(one.token_ids) for output in outputs for one in output.outputs]


def deviation(first: list[Hashable], second: list[Hashable]) -> float:
    """By how many standard deviations two samples differ more than samples of one distribution do.

    Two-sample chi-square with rare values taken together, normal by Wilson and Hilferty.
    """
    counts, others = Counter(first), Counter(second)
    cells = [(counts[value], others[value]) for value in counts | others]
    common = [cell for cell in cells if sum(cell) >= 10]
    rare = [cell for cell in cells if sum(cell) < 10]
    if rare:
        common.append((sum(a for a, _ in rare), sum(b for _, b in rare)))
    statistic = sum((a - b) ** 2 / (a + b) for a, b in common if a + b)  # equal sample sizes
    freedom = max(1, len(common) - 1)
    return ((statistic / freedom) ** (1 / 3) - 1 + 2 / (9 * freedom)) / math.sqrt(2 / (9 * freedom))


def worst(first: list[list[int]], second: list[list[int]]) -> float:
    """The largest deviation of the tokens at each position, and of the first three together."""
    assert len(first) == len(second) == NUM_SAMPLES
    views = [[tokens[position] for tokens in first] for position in range(NUM_TOKENS)]
    others = [[tokens[position] for tokens in second] for position in range(NUM_TOKENS)]
    views.append([tuple(tokens[:3]) for tokens in first])
    others.append([tuple(tokens[:3]) for tokens in second])
    return max(deviation(a, b) for a, b in zip(views, others, strict=True))


def test_the_comparison_tells_distributions_apart(undrafted_samples: dict[str, list[list[int]]]) -> None:
    assert worst(undrafted_samples["T=1"], undrafted_samples["T=1 again"]) < 4
    assert worst(undrafted_samples["T=1"], undrafted_samples["T=0.8"]) > 6


def test_drafted_samples_are_distributed_as_undrafted_ones(
    tiny_model: Path, undrafted_samples: dict[str, list[list[int]]]
) -> None:
    """Drafts are of the same history throughout, as long as the responses, so every position is verified."""
    das = {"policy": "unlimited", "policy_options": {"max_draft_tokens": 3}, "learn_from_engine": False}
    with engine(tiny_model, num_speculative_tokens=3, das=das, max_num_seqs=256, seed=2) as llm:
        pushed = [
            {"prompt_token_ids": PROMPT, "response_token_ids": tokens, "training_step": 0}
            for tokens in undrafted_samples["T=1"][:16]
        ]
        llm.collective_rpc("das_push_rollouts", args=(pushed,))
        for name, settings in SETTINGS.items():
            before = counters(llm)["accepted"]
            samples = sample(llm, settings)
            assert counters(llm)["accepted"] - before > NUM_SAMPLES / 2, name
            assert worst(samples, undrafted_samples[name]) < 4, name
        assert runner_of(llm).drafter.fault is None
