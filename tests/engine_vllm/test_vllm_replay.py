"""What `das replay` predicts for rollouts is what the engine did when it wrote them."""

from pathlib import Path
from typing import Any

import pytest
from engine_runs import Case, engine, generate, token_ids

import das
from das.analysis.replay import replay


def test_decode_steps_are_those_that_replay_predicts(
    tiny_model: Path, cases: list[Case], undrafted: dict[str, list[Any]]
) -> None:
    """The first token of a response comes with the prefill, where no engine drafts: replay gets it with the prompt."""
    plain = [
        case for case in cases if case.name in ("plain", "long", "logprobs", "allowed", "repetition", "stop token")
    ]
    price = {"policy": "price", "policy_options": {"min_survival": 0.15, "max_draft_tokens": 8}}
    log = []
    with engine(tiny_model, das=price) as llm:
        for step in range(3):
            llm.collective_rpc("das_new_training_step", args=(step,))
            outputs = generate(llm, plain)
            for case in plain:
                ((first, *rest),) = token_ids(outputs[case.name])
                assert [first, *rest] == token_ids(undrafted[case.name])[0]
                log.append(
                    das.Rollout(
                        prompt_token_ids=[*case.prompt_token_ids, first],
                        response_token_ids=rest,
                        prompt_key=das.prompt_key(case.prompt_token_ids),
                        training_step=step,
                        request_id=f"{case.name} {step}",
                    )
                )
        (found,) = llm.collective_rpc("das_statistics")
    policy = das.PriceBudget(min_survival=0.15, max_draft_tokens=8)
    predicted = replay(log, policy=policy, group_size=1).counters
    assert found["das_num_decode_steps"] - len(log) == pytest.approx(predicted.num_decode_steps, rel=0.05)
    assert found["das_num_accepted_tokens"] == pytest.approx(predicted.num_accepted_tokens, rel=0.05)
