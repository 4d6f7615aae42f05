"""What trainers can call in the workers of an engine."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm_runner import VOCABULARY_SIZE, Runner

import das
from das.rollout import named_prompt_key
from das_vllm.request_tracker import prompt_key_of
from das_vllm.worker_methods import (
    WORKER_METHODS,
    das_flush,
    das_load_state,
    das_new_training_step,
    das_prepare,
    das_push_rollouts,
    das_save_state,
    das_set_policy,
    das_statistics,
)


def worker_of(runner: Any) -> Any:
    return SimpleNamespace(model_runner=runner)


ROLLOUT = {"prompt_token_ids": [1, 2], "response_token_ids": [3, 4, 5], "training_step": 7, "reward": 0.5}


def test_pushed_rollouts_enter_the_history_once() -> None:
    runner = Runner()
    named = ROLLOUT | {"prompt_key": "problem 17", "prompt_token_ids": [9]}
    assert das_push_rollouts(worker_of(runner), [ROLLOUT, named]) == 2
    assert das_push_rollouts(worker_of(runner), [named, ROLLOUT]) == 0
    history = runner.drafter.history
    (stored,) = history.rollouts(das.prompt_key([1, 2]))
    assert (stored.training_step, stored.reward) == (7, 0.5)
    assert len(history.rollouts(prompt_key_of({"das_prompt_key": "problem 17"}) or 0)) == 1
    runner.drafter.weights_changed()
    assert runner.drafter.tracker.training_step == 8  # behind what was pushed


def test_prompts_that_come_next_get_their_trees_ahead() -> None:
    """Named by token ids, by text or by key; what does not name a prompt is refused."""
    runner = Runner()
    history = runner.drafter.history
    named = [ROLLOUT, ROLLOUT | {"prompt_key": "problem 17"}, ROLLOUT | {"prompt_key": 5}]
    das_push_rollouts(worker_of(runner), named)
    history.discard_builds()
    das_prepare(worker_of(runner), [[1, 2], "problem 17", 5])
    for prompt in (das.prompt_key([1, 2]), named_prompt_key("problem 17"), 5):
        history.tree_for(prompt, 8)
    statistics = history.statistics()
    assert (statistics.num_builds_ahead, statistics.num_builds_on_start) == (3, 0)
    for bad in (-1, 1 << 64):
        with pytest.raises(ValueError, match=f"prompts holds {bad}; a key must be 0 <= key < 2\\*\\*64"):
            das_prepare(worker_of(runner), [bad])


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        ({"response_token_ids": []}, "rollout 1: response_token_ids is empty"),
        ({"reward": float("nan")}, "rollout 1: reward is nan"),
        ({"colour": 1}, "rollout 1: .*colour"),
        ({"prompt_key": -1}, "rollout 1: prompt_key is -1"),
        ({"response_token_ids": [3, VOCABULARY_SIZE]}, "rollout 1 holds token 1000; the model's vocabulary has 1000"),
    ],
)
def test_a_bad_rollout_raises_and_none_is_taken_in(bad: dict[str, Any], error: str) -> None:
    runner = Runner()
    with pytest.raises(ValueError, match=error):
        das_push_rollouts(worker_of(runner), [ROLLOUT, ROLLOUT | bad])
    assert runner.drafter.history.prompt_keys() == ()
    assert runner.drafter.fault is None


def test_a_restarted_engine_goes_on_where_it_stopped(tmp_path: Path) -> None:
    runner, restarted = Runner(), Runner()
    path = str(tmp_path / "replica {data_parallel_rank}")
    das_push_rollouts(worker_of(runner), [ROLLOUT])
    runner.add("a", [1, 2], [5] * 20, max_tokens=20)
    while runner.requests:
        runner.step()
        if runner.drafter.tracker.num_running() == 0:
            runner.requests.clear()
    summary = das_save_state(worker_of(runner), path)
    assert summary is not None
    assert summary["num_rollouts"] == 2
    assert [entry.name for entry in tmp_path.iterdir()] == ["replica 0"]
    assert das_load_state(worker_of(restarted), path) == {"num_rollouts": 2, "is_policy_restored": True}
    assert restarted.drafter.history.prompt_keys() == runner.drafter.history.prompt_keys()
    assert restarted.drafter.policy.state().keys() == runner.drafter.policy.state().keys()
    restarted.drafter.weights_changed()
    assert restarted.drafter.tracker.training_step == runner.drafter.tracker.newest_step + 1
    das_set_policy(worker_of(restarted), "price")
    assert das_load_state(worker_of(restarted), path) == {"num_rollouts": 2, "is_policy_restored": False}
    assert restarted.drafter.history.statistics().num_rollouts == 2
    with pytest.raises(FileNotFoundError):
        das_load_state(worker_of(restarted), str(tmp_path / "absent"))
    assert restarted.drafter.fault is None


def test_a_state_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    history = das.RolloutHistory()
    history.add(das.Rollout(prompt_token_ids=[1, 2], response_token_ids=[VOCABULARY_SIZE]))
    runner = Runner()
    das.save_state(tmp_path, drafter=das.Drafter(history), policy=runner.drafter.policy)
    with pytest.raises(ValueError, match="it holds token 1000; the model's vocabulary has 1000"):
        das_load_state(worker_of(runner), str(tmp_path))
    assert runner.drafter.history.prompt_keys() == ()
    assert runner.drafter.fault is None


def test_policies_change_at_once() -> None:
    runner = Runner(num_speculative_tokens=4)
    assert das_set_policy(worker_of(runner), "price", {"min_survival": 0.5}) == repr(runner.drafter.policy)
    assert isinstance(runner.drafter.policy, das.PriceBudget)
    before = runner.drafter.policy
    with pytest.raises(ValueError, match="policy is 'best'"):
        das_set_policy(worker_of(runner), "best")
    with pytest.raises(TypeError, match="policy_options must be a mapping, not list"):
        das_set_policy(worker_of(runner), "price", [1])  # type: ignore[arg-type]
    assert runner.drafter.policy is before
    options = {"max_draft_tokens": 2}
    das_set_policy(worker_of(runner), "fixed", options)
    options["max_draft_tokens"] = 4  # theirs
    assert runner.drafter.settings.policy_options == {"max_draft_tokens": 2}


def test_running_requests_are_counted_by_flush() -> None:
    runner = Runner()
    runner.add("a", [1, 2], [5] * 20)
    runner.add("b", [1, 2], [6] * 20, max_tokens=1)
    runner.step()
    assert das_flush(worker_of(runner)) == 1
    runner.remove("a")
    assert das_flush(worker_of(runner)) == 0


def test_statistics_are_plain_values() -> None:
    runner = Runner()
    values = das_statistics(worker_of(runner))
    assert values is not None
    assert all(name.startswith("das_") and type(value) in (int, float, str, bool) for name, value in values.items())


@pytest.mark.parametrize("method", WORKER_METHODS)
def test_an_engine_without_das_answers_none(method: Any) -> None:
    arguments: dict[str, tuple[Any, ...]] = {
        "das_push_rollouts": ([ROLLOUT],),
        "das_new_training_step": (1,),
        "das_prepare": ([[1, 2]],),
        "das_set_policy": ("none",),
        "das_save_state": ("/nowhere",),
        "das_load_state": ("/nowhere",),
    }
    for runner in (None, SimpleNamespace(), SimpleNamespace(drafter=object())):
        assert method(worker_of(runner), *arguments.get(method.__name__, ())) is None


@pytest.mark.parametrize(
    "method", [das_push_rollouts, das_new_training_step, das_prepare, das_set_policy, das_save_state, das_load_state]
)
def test_a_drafter_that_is_off_takes_nothing_in(method: Any) -> None:
    runner = Runner()
    runner.drafter.switch_off("test")
    arguments = {das_push_rollouts: [ROLLOUT], das_new_training_step: 1, das_prepare: [5], das_set_policy: "none"}
    assert method(worker_of(runner), arguments.get(method, "/nowhere")) is None
    assert runner.drafter.history.prompt_keys() == ()


def test_each_save_of_a_drafter_that_is_off_is_said_to_save_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, other = Runner(), Runner(tp=2, rank=1)
    for runner in (first, other):
        runner.drafter.switch_off("test")
    caplog.clear()
    for _ in range(2):
        assert das_save_state(worker_of(first), str(tmp_path / "state")) is None
        assert das_save_state(worker_of(other), str(tmp_path / "state")) is None  # a rank that never saves
    said = [record.getMessage() for record in caplog.records]
    assert said == [f"das: nothing was saved to {tmp_path}/state, as drafting is off: test"] * 2
    assert list(tmp_path.iterdir()) == []
