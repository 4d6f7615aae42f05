"""The trained model of examples/tiny_reasoner through epochs of RL: answers are those without drafts."""

import json
from pathlib import Path
from typing import Any

import pytest
from engine_runs import counters, engine, since

import das
from bench.bench_vllm import MODELS, read_log, replayed, rollouts_of

CHECKPOINTS = sorted(MODELS.glob("epoch*"))
OPTIONS = {"min_survival": 0.15, "max_draft_tokens": 16}
PRICE = {"policy": "price", "policy_options": OPTIONS}


@pytest.fixture(scope="module")
def prompts(tiny_model: Path) -> list[list[int]]:
    """Sixteen problems. (`tiny_model` sets the environment, and repairs sampling on CPUs.)"""
    rows = [json.loads(line) for line in read_log(MODELS)]
    return list({row["prompt_id"]: row["prompt_token_ids"] for row in rows}.values())[:16]


def epochs(llm: Any, prompts: list[list[int]], **asked: Any) -> tuple[list[list[list[list[int]]]], list[int]]:
    """Answers of each epoch to each prompt, and engine steps of each epoch; weights change before each."""
    from vllm import SamplingParams

    parameters = SamplingParams(max_tokens=192, detokenize=False, **asked)
    answers, steps = [], []
    for checkpoint in CHECKPOINTS:
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(checkpoint)})
        before = counters(llm)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], parameters, use_tqdm=False)
        answers.append([[list(sample.token_ids) for sample in output.outputs] for output in outputs])
        steps.append(since(llm, before)["steps"])
    return answers, steps


def test_greedy_answers_of_every_epoch_are_those_without_drafts_in_fewer_steps(prompts: list[list[int]]) -> None:
    with engine(CHECKPOINTS[0], num_speculative_tokens=None, max_num_seqs=64) as llm:
        expected, steps = epochs(llm, prompts, temperature=0.0)
    assert len(expected) == 4
    assert any(expected[0][n] != expected[-1][n] for n in range(len(prompts)))  # the updates do change the model
    with engine(CHECKPOINTS[0], num_speculative_tokens=16, das=PRICE, max_num_seqs=64) as llm:
        answers, drafted_steps = epochs(llm, prompts, temperature=0.0)
    assert answers == expected
    assert sum(drafted_steps[1:]) < 0.5 * sum(steps[1:]), (steps, drafted_steps)


def test_sampled_epochs_take_the_decode_steps_that_replay_predicts(prompts: list[list[int]]) -> None:
    """Eight samples a prompt at temperature 1, in the order of the engine."""
    with engine(CHECKPOINTS[0], num_speculative_tokens=16, das=PRICE, max_num_seqs=64) as llm:
        answers, _ = epochs(llm, prompts, temperature=1.0, n=8)
        log = [rollout for epoch, each in enumerate(answers) for rollout in rollouts_of(prompts, each, epoch=epoch)]
        found = replayed(llm, log, policy=das.PriceBudget(**OPTIONS), group_size=8)
    assert found["decode_steps"] == pytest.approx(found["replayed_decode_steps"], rel=0.05), found
