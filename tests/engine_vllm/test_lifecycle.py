"""A das drafter through the life of an engine: RPC, aborts, weight updates, faults, limits, no plugin, injection."""

import gc
import logging
import os
from pathlib import Path
from typing import Any

import pytest
from engine_runs import Case, counters, engine, generate, runner_of, since, token_ids

import das
from das_vllm import plugin
from das_vllm.seam import check_installed

MANY = 10_000 if os.environ.get("DAS_TEST_PROFILE") == "full" else 1_000


@pytest.fixture(scope="module")
def llm(tiny_model: Path, undrafted: Any, undrafted_by_other_model: Any) -> Any:
    with engine(tiny_model) as made:
        yield made


@pytest.fixture
def few(cases: list[Case]) -> list[Case]:
    return [case for case in cases if case.name in ("plain", "long", "own key", "logprobs")]


def statistics(llm: Any) -> dict[str, Any]:
    (found,) = llm.collective_rpc("das_statistics")
    return dict(found)


def test_pushed_rollouts_are_drafted_from_in_the_first_epoch(
    llm: Any, few: list[Case], undrafted: dict[str, list[Any]]
) -> None:
    pushed = [
        {
            "prompt_token_ids": case.prompt_token_ids,
            "response_token_ids": token_ids(undrafted[case.name])[0],
            "training_step": 3,
            "reward": 1.0,
            "prompt_key": case.parameters.get("extra_args", {}).get("das_prompt_key"),
        }
        for case in few
    ]
    assert llm.collective_rpc("das_push_rollouts", args=(pushed,)) == [len(few)]
    assert [llm.collective_rpc("das_push_rollouts", args=([one],)) for one in pushed] == [[0]] * len(few)  # known
    assert llm.collective_rpc("das_new_training_step", args=(4,)) == [4]
    before = counters(llm)
    assert generate(llm, few) == {case.name: undrafted[case.name] for case in few}
    counted = since(llm, before)
    assert counted["accepted"] > 0.8 * counted["drafted"]
    assert counted["steps"] < 0.3 * max(case.parameters["max_tokens"] for case in few)
    assert llm.collective_rpc("das_flush") == [0]
    assert statistics(llm)["das_training_step"] == 4
    with pytest.raises(Exception, match="training_step is -1"):
        llm.collective_rpc("das_new_training_step", args=(-1,))


def test_policies_can_be_changed_while_the_engine_runs(
    llm: Any, few: list[Case], undrafted: dict[str, list[Any]]
) -> None:
    assert llm.collective_rpc("das_set_policy", args=("none",)) == ["NoDraft(max_draft_tokens=0, min_survival=inf)"]
    before = counters(llm)
    assert generate(llm, few) == {case.name: undrafted[case.name] for case in few}
    assert since(llm, before)["drafted"] == 0
    with pytest.raises(Exception, match="policy is 'best'"):
        llm.collective_rpc("das_set_policy", args=("best",))
    llm.collective_rpc("das_set_policy", args=("throughput", {"max_draft_tokens": 8}))


def test_requests_aborted_in_the_middle_leave_nothing_behind(
    llm: Any, few: list[Case], undrafted: dict[str, list[Any]]
) -> None:
    from vllm import SamplingParams

    inner = llm.llm_engine
    for number, case in enumerate(few):
        inner.add_request(f"r{number}", {"prompt_token_ids": case.prompt_token_ids}, SamplingParams(**case.parameters))
    for _ in range(4):
        inner.step()
    inner.abort_request(["r0", "r2"])
    finished = {}
    while inner.has_unfinished_requests():
        for output in inner.step():
            if output.finished:
                finished[output.request_id] = list(output.outputs[0].token_ids)
    expected = {f"r{n}": token_ids(undrafted[case.name])[0] for n, case in enumerate(few) if n in (1, 3)}
    assert finished == expected
    llm.collective_rpc("das_flush")
    generate(llm, few[:1])  # the worker hears of the last one with the next step
    llm.collective_rpc("das_flush")
    drafter = runner_of(llm).drafter
    assert len(drafter.tracker) <= 1  # known until the next step; running no more
    assert drafter.tracker.drafter.request_ids() == ()


def test_new_weights_are_followed_and_the_history_stays(
    llm: Any,
    few: list[Case],
    other_model: Path,
    tiny_model: Path,
    undrafted: dict[str, list[Any]],
    undrafted_by_other_model: dict[str, list[Any]],
) -> None:
    """Old drafts are refused as the new model says; each update opens a training step."""
    expected = {case.name: undrafted_by_other_model[case.name] for case in few}
    before = statistics(llm)
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(other_model)})
    assert generate(llm, few) == expected
    after = statistics(llm)
    assert after["das_training_step"] == before["das_training_step"] + 1
    assert after["das_history_num_rollouts"] >= before["das_history_num_rollouts"]
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(tiny_model)})
    assert generate(llm, few) == {case.name: undrafted[case.name] for case in few}


def test_without_the_plugin_the_runner_is_found_among_the_callers(
    llm: Any, few: list[Case], undrafted: dict[str, list[Any]]
) -> None:
    drafter = runner_of(llm).drafter
    assert drafter._engine.how == "general plugin"
    drafter._engine = None
    assert generate(llm, few) == {case.name: undrafted[case.name] for case in few}
    assert drafter._engine.how == "call stack"


def test_many_requests_leave_no_state_behind(llm: Any) -> None:
    """Memory is flat once the history is at its limit; .ci/run --full runs ten times as many."""
    history = runner_of(llm).drafter.history
    history.max_bytes = 2_000_000
    few_tokens = [
        Case(str(n), [n % 19, n // 19 % 19, n // 361 % 19], {"temperature": 0.0, "max_tokens": 5}) for n in range(MANY)
    ]
    generate(llm, few_tokens[: MANY // 2])
    gc.collect()
    before = resident_bytes()
    generate(llm, few_tokens)
    gc.collect()
    assert history.memory_bytes() <= 2_000_000
    drafter = runner_of(llm).drafter
    drafter.flush()
    assert drafter.tracker.num_running() == 0
    assert len(drafter.tracker) <= 8  # a worker hears with the next step that those of the last one are gone
    assert drafter.tracker.drafter.request_ids() == ()
    assert resident_bytes() - before < 50e6


def test_a_fault_is_said_once_and_generation_completes(
    llm: Any, few: list[Case], undrafted: dict[str, list[Any]], monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """The last test of this engine: drafting stays off."""
    calls = 0
    plan_step = das.plan_step

    def fail_later(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 3:
            raise RuntimeError("injected")
        return plan_step(*args, **kwargs)

    monkeypatch.setattr(das, "plan_step", fail_later)
    logging.getLogger("vllm").propagate = True
    with caplog.at_level(logging.ERROR, "vllm.das_vllm"):
        assert generate(llm, few) == {case.name: undrafted[case.name] for case in few}
        assert generate(llm, few) == {case.name: undrafted[case.name] for case in few}
    errors = {id(record) for record in caplog.records if record.name == "vllm.das_vllm"}  # two loggers may hand it on
    assert len(errors) == 1
    assert calls == 4
    assert statistics(llm)["das_fault"] == "RuntimeError: injected"


def test_a_history_with_no_room_at_all_is_no_fault(
    tiny_model: Path, few: list[Case], undrafted: dict[str, list[Any]]
) -> None:
    with engine(tiny_model, das={"max_history_bytes": 1}) as small:
        for _ in range(2):
            assert generate(small, few) == {case.name: undrafted[case.name] for case in few}
        assert statistics(small)["das_is_drafting"]
        assert statistics(small)["das_history_num_rollouts"] <= 1


def test_engines_without_a_speculative_config_can_be_given_das(
    tiny_model: Path, few: list[Case], undrafted: dict[str, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DAS_VLLM_CONFIG", '{"inject_num_speculative_tokens": 4, "policy": "fixed"}')
    plugin.register()
    plugin.register()
    with engine(tiny_model, num_speculative_tokens=None) as given:
        assert generate(given, few) == {case.name: undrafted[case.name] for case in few}
        assert statistics(given)["das_policy"].startswith("FixedBudget(max_draft_tokens=4")
        assert counters(given)["accepted"] > 0


@pytest.mark.parametrize("text", ['{"inject_num_speculative_tokens": 4, "policy": "best"}', '{"inject_num'])
def test_engines_that_cannot_be_given_das_as_told_do_not_start(
    text: str, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm import EngineArgs

    monkeypatch.setenv("DAS_VLLM_CONFIG", text)
    plugin.register()
    with pytest.raises(ValueError, match=r"DAS_VLLM_CONFIG(: policy is 'best'| is not valid JSON)"):
        EngineArgs(str(tiny_model), dtype="float32", max_model_len=64).create_engine_config()


def test_the_seam_check_finds_nothing_missing_here() -> None:
    found = check_installed()
    assert found
    assert [one for one in found if not one.fits] == []


def test_a_wrong_setting_is_said_before_the_engine_starts(tiny_model: Path) -> None:
    with (
        pytest.raises(Exception, match="policy is 'best'; it must be one of"),
        engine(tiny_model, das={"policy": "best"}),
    ):
        pass


def test_more_tokens_than_das_drafts_are_refused_before_the_engine_starts(tiny_model: Path) -> None:
    with (
        pytest.raises(Exception, match="num_speculative_tokens is 100; it must be 1 <= num_speculative_tokens <= 64"),
        engine(tiny_model, num_speculative_tokens=100),
    ):
        pass


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096
