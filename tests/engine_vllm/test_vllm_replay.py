"""What `das replay` predicts for rollouts is what the engine did when it wrote them."""

from pathlib import Path
from typing import Any

import pytest
from engine_runs import Case, engine, generate, token_ids

import das
from bench.bench_vllm import replayed, rollouts_of


def test_decode_steps_are_those_that_replay_predicts(
    tiny_model: Path, cases: list[Case], undrafted: dict[str, list[Any]]
) -> None:
    plain = [
        case for case in cases if case.name in ("plain", "long", "logprobs", "allowed", "repetition", "stop token")
    ]
    options = {"min_survival": 0.15, "max_draft_tokens": 8}
    log = []
    with engine(tiny_model, das={"policy": "price", "policy_options": options}) as llm:
        for epoch in range(3):
            llm.collective_rpc("das_new_training_step", args=(epoch,))
            responses = [token_ids(output) for output in generate(llm, plain).values()]
            assert responses == [token_ids(undrafted[case.name]) for case in plain]
            log += rollouts_of([case.prompt_token_ids for case in plain], responses, epoch=epoch)
        found = replayed(llm, log, policy=das.PriceBudget(**options), group_size=1)
    for name in ("decode_steps", "accepted"):
        assert found[name] == pytest.approx(found[f"replayed_{name}"], rel=0.05), found
