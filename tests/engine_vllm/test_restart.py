"""What an engine has learned goes through a restart, over RPC: saved by one engine, loaded by the next."""

from pathlib import Path
from typing import Any

import pytest
from engine_runs import Case, counters, engine, generate, recorded_drafts, since
from state_samples import unreadable_copies

NO_CLOCK = {"deterministic": True}  # the default policy, whose latency would differ between two engines


@pytest.fixture(scope="module")
def few(cases: list[Case]) -> list[Case]:
    return [case for case in cases if case.name in ("plain", "long", "own key", "logprobs")]


@pytest.fixture(scope="module")
def expected(few: list[Case], undrafted: dict[str, list[Any]]) -> dict[str, list[Any]]:
    return {case.name: undrafted[case.name] for case in few}


@pytest.fixture(scope="module")
def saved(
    tiny_model: Path, few: list[Case], expected: dict[str, list[Any]], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any], list[list[list[int]]]]:
    """A state, what was said of it, and what the engine that saved it drafted afterwards."""
    folder = tmp_path_factory.mktemp("saved") / "replica {data_parallel_rank}"
    with engine(tiny_model, das=NO_CLOCK) as llm:
        llm.collective_rpc("das_new_training_step", args=(3,))
        assert generate(llm, few) == expected
        (summary,) = llm.collective_rpc("das_save_state", args=(str(folder),))
        llm.collective_rpc("das_new_training_step", args=(4,))
        with recorded_drafts(llm) as drafts:
            assert generate(llm, few) == expected
    return folder.with_name("replica 0"), summary, drafts


def test_a_restarted_engine_drafts_what_it_would_have_drafted(
    tiny_model: Path, few: list[Case], expected: dict[str, list[Any]], saved: Any
) -> None:
    path, summary, drafts_without_restart = saved
    assert summary["num_rollouts"] == len(few)
    with engine(tiny_model, das=NO_CLOCK) as restarted:
        (loaded,) = restarted.collective_rpc("das_load_state", args=(str(path),))
        assert loaded == {"num_rollouts": len(few), "is_policy_restored": True}
        assert restarted.collective_rpc("das_new_training_step", args=(4,)) == [4]
        with recorded_drafts(restarted) as drafts:
            assert generate(restarted, few) == expected
        assert drafts == drafts_without_restart
        assert sum(len(draft) for step in drafts[:3] for draft in step) > 2 * len(few)  # from the first steps on
        (again,) = restarted.collective_rpc("das_save_state", args=(str(path.with_name("again")),))
        assert again["num_rollouts"] == 2 * len(few)


def test_a_damaged_state_is_refused_and_the_engine_goes_on_with_what_it_has(
    tiny_model: Path, few: list[Case], expected: dict[str, list[Any]], saved: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over RPC into a process of its own: the caller hears of it, once, and the engine lives."""
    path, *_ = saved
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    with engine(tiny_model, das=NO_CLOCK) as llm:
        assert generate(llm, few) == expected
        (before,) = llm.collective_rpc("das_statistics")
        for folder, name in unreadable_copies(path):
            with pytest.raises(Exception, match=name):
                llm.collective_rpc("das_load_state", args=(str(folder),))
        (after,) = llm.collective_rpc("das_statistics")
        assert (after["das_is_drafting"], after["das_fault"]) == (True, "")
        assert after["das_history_num_rollouts"] == before["das_history_num_rollouts"]
        counted = counters(llm)
        assert generate(llm, few) == expected
        assert since(llm, counted)["accepted"] > 0
