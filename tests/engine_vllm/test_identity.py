"""Drafts change nothing: float32, eager, greedy outputs are those of an engine without drafting, byte by byte."""

from pathlib import Path
from typing import Any

import pytest
from engine_runs import Case, counters, engine, generate, runner_of, since, token_ids

ENGINES: dict[str, dict[str, Any]] = {
    "in process": {},
    "chunked prefill and prefix caching": {
        "max_num_batched_tokens": 24,
        "enable_chunked_prefill": True,
        "enable_prefix_caching": True,
    },
    "preemption": {"num_gpu_blocks_override": 5, "block_size": 128},
    "longest drafts": {
        "num_speculative_tokens": 64,
        "das": {"policy": "unlimited", "policy_options": {"max_draft_tokens": 64}},
    },
}


@pytest.mark.parametrize("name", ENGINES)
def test_outputs_are_those_without_drafting(
    name: str, tiny_model: Path, cases: list[Case], undrafted: dict[str, list[Any]]
) -> None:
    with engine(tiny_model, **ENGINES[name]) as llm:
        steps = []
        for _ in range(3):
            before = counters(llm)
            drafted = generate(llm, cases)
            for case in cases:
                assert drafted[case.name] == undrafted[case.name], case.name
            counted = since(llm, before)
            steps.append(counted["steps"])
        (statistics,) = llm.collective_rpc("das_statistics")
        assert statistics["das_is_drafting"], statistics["das_fault"]
        # The second epoch drafts from the first; in passes over 24 tokens, eight requests share what prefill leaves.
        assert steps[1] < (0.8 if "max_num_batched_tokens" in ENGINES[name] else 0.6) * steps[0], steps
        total = counters(llm)
        assert total["accepted"] > 0
        if name == "preemption":
            assert total["preemptions"] > 0
        check_counts(statistics, total)


def test_near_the_model_s_limit_nothing_is_verified_in_vain(
    tiny_model: Path, cases: list[Case], undrafted: dict[str, list[Any]]
) -> None:
    """vLLM alone stops drafting for all there, and verifies K zeros a request instead."""
    from vllm import __version__

    limit = 64
    # With so low a limit, the CPU build of 0.27.1 returns other tokens from the second run on without drafts, too.
    num_epochs = 1 if __version__.startswith("0.27.") else 3
    short = [case for case in cases if case.name in ("plain", "long", "logprobs", "allowed")]
    with engine(tiny_model, num_speculative_tokens=32, max_model_len=limit) as llm:
        for epoch in range(3):
            drafted = generate(llm, short)
            for case in short if epoch < num_epochs else ():
                (tokens,), (reference,) = token_ids(drafted[case.name]), token_ids(undrafted[case.name])
                assert tokens == reference[: limit - len(case.prompt_token_ids)], case.name
        (statistics,) = llm.collective_rpc("das_statistics")
        assert junk(statistics, counters(llm)) == 0

        runner = runner_of(llm)  # as without das: the runner's own limit is in force again
        runner.drafter._engine.lift_drafter_limit = lambda: None
        runner.effective_drafter_max_model_len = runner.max_model_len
        generate(llm, short)
        (statistics,) = llm.collective_rpc("das_statistics")
        assert junk(statistics, counters(llm)) > 0


def test_engine_core_and_two_tensor_parallel_workers_in_processes_of_their_own(
    tiny_model: Path, cases: list[Case], undrafted: dict[str, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drafts of the first rank are used; the other keeps no history."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    with engine(tiny_model, tensor_parallel_size=2, distributed_executor_backend="mp") as llm:
        greedy = [case for case in cases if case.parameters["temperature"] == 0.0]  # the repair is of this process
        for _ in range(2):
            drafted = generate(llm, greedy)
            differing = [c.name for c in greedy if token_ids(drafted[c.name]) != token_ids(undrafted[c.name])]
            assert differing == []
        first, second = llm.collective_rpc("das_statistics")
        check_counts(first, counters(llm))
        assert first["das_num_accepted_tokens"] > 0
        assert (second["das_is_drafting"], second["das_history_num_rollouts"]) == (False, 0)
        rollouts = [{"prompt_token_ids": [1, 2], "response_token_ids": [3, 4, 5], "prompt_key": "x", "reward": 1.0}]
        assert llm.collective_rpc("das_push_rollouts", args=(rollouts,)) == [1, None]


def check_counts(statistics: dict[str, Any], counted: dict[str, int]) -> None:
    """das counts what vLLM counts."""
    assert statistics["das_num_verification_steps"] == counted["drafts"]
    assert statistics["das_num_drafted_tokens"] == counted["drafted"]
    assert statistics["das_num_accepted_tokens"] == counted["accepted"]


def junk(statistics: dict[str, Any], counted: dict[str, int]) -> int:
    """Tokens that vLLM verified and das had not drafted."""
    drafted: int = statistics["das_num_drafted_tokens"]
    return counted["drafted"] - drafted
