"""What DasProposer does with an engine's steps: identity, ends, preemption, limits, faults, ranks."""

import logging
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm_runner import Runner, vllm_config

import das
from das_vllm import DasProposer
from das_vllm.request_tracker import prompt_key_of
from das_vllm.response_end import ResponseEnd

PROMPT = [1, 2, 3]
TEXT = [10, 11, 12, 13, 14, 15, 16, 17, 18, 19] * 3
FIXED = {"policy": "fixed", "policy_options": {"max_draft_tokens": 4}}


def run(runner: Runner, request_id: str) -> int:
    """Step until the engine would end a request, remove it, and return the steps."""
    steps = 0
    state = runner.requests[request_id]
    end = ResponseEnd.of(
        state.sampling_params, num_prompt_tokens=len(state.prompt_token_ids or ()), max_model_len=runner.max_model_len
    )
    while not end.cut(0, state.text[: state.num_emitted])[1]:
        runner.step()
        steps += 1
    runner.remove(request_id)
    return steps


def responses(runner: Runner, prompt: list[int] = PROMPT) -> list[list[int]]:
    return [r.response_token_ids.tolist() for r in runner.drafter.history.rollouts(das.prompt_key(prompt))]


def test_the_second_time_it_drafts_what_it_saw_the_first_time() -> None:
    runner = Runner(das=FIXED)
    runner.add("a", PROMPT, TEXT, max_tokens=20)
    first = run(runner, "a")
    runner.add("b", PROMPT, TEXT, max_tokens=20)
    second = run(runner, "b")
    assert second == 4 + 1  # a token at first sight, then five a step
    assert second < first
    assert responses(runner) == [TEXT[:20]] * 2


@pytest.mark.parametrize("asked", [{"max_tokens": 7}, {"stop_token_ids": [16]}, {"eos_token_id": 16}])
def test_history_ends_where_the_response_does(asked: dict[str, Any]) -> None:
    """The runner shows tokens behind that end: it verifies whole drafts."""
    runner = Runner(das=FIXED, num_speculative_tokens=4)
    for request_id in ("a", "b", "c"):
        runner.add(request_id, PROMPT, TEXT, **asked)
        run(runner, request_id)
    runner.step()
    assert responses(runner) == [TEXT[:7]] * 3
    statistics = runner.drafter.statistics()
    assert statistics["das_num_requests_tracked"] == 0
    assert statistics["das_num_accepted_tokens"] == runner.num_accepted
    assert statistics["das_num_drafted_tokens"] == runner.num_verified


def test_means_over_requests_are_those_of_das(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Runner(das=FIXED)
    counters = []
    finish = runner.drafter.tracker.drafter.finish
    monkeypatch.setattr(
        runner.drafter.tracker.drafter, "finish", lambda *a, **k: counters.append(finish(*a, **k)) or counters[-1]
    )
    for request_id, max_tokens in (("a", 1), ("b", 20), ("c", 13)):
        runner.add(request_id, PROMPT, TEXT, max_tokens=max_tokens)
        run(runner, request_id)
    expected, found = das.summarise(counters), runner.drafter.statistics()
    for name in (name for name in expected if name.startswith("request_mean_")):
        assert found[f"das_{name}"] == pytest.approx(expected[name]), name
    assert found["das_drafted_per_decode_step"] == expected["drafted_per_decode_step"] > 0


def test_a_model_that_is_full_ends_a_response() -> None:
    runner = Runner(das=FIXED, max_model_len=12)
    for request_id in ("a", "b"):
        runner.add(request_id, PROMPT, TEXT)
        run(runner, request_id)
    assert responses(runner) == [TEXT[:9]] * 2
    assert runner.effective_drafter_max_model_len > 1 << 50


def test_requests_absent_from_a_step_go_on_later_and_cut_drafts_count_as_cut() -> None:
    runner = Runner(das=FIXED)
    runner.add("a", PROMPT, TEXT, max_tokens=20)
    run(runner, "a")
    runner.add("b", PROMPT, TEXT, max_tokens=20)
    runner.add("c", PROMPT, TEXT, max_tokens=20)
    runner.step()
    runner.step(scheduled=["b"], cut_drafts_to=2)
    runner.requests["c"].draft = []  # preempted: its draft is never verified, its text is computed again
    runner.step(prefill=("c",))
    runner.step(cut_drafts_to=0)
    run(runner, "b")
    run(runner, "c")
    runner.step()
    assert responses(runner) == [TEXT[:20]] * 3
    statistics = runner.drafter.statistics()
    assert statistics["das_num_drafted_tokens"] == runner.num_verified
    assert statistics["das_num_accepted_tokens"] == runner.num_accepted
    assert statistics["das_num_requests_finished"] == 3


def test_an_aborted_request_enters_the_history_as_far_as_it_came() -> None:
    runner = Runner(das=FIXED)
    runner.add("a", PROMPT, TEXT)
    runner.step()
    runner.step()
    runner.remove("a")
    assert runner.drafter.flush() == 0
    assert responses(runner) == [TEXT[:2]]


def test_an_id_that_is_used_again_is_another_request() -> None:
    runner = Runner(das=FIXED)
    runner.add("a", PROMPT, TEXT)
    runner.step()
    runner.add("a", [7, 8], TEXT[3:], max_tokens=5)
    run(runner, "a")
    runner.step()
    assert responses(runner) == [TEXT[:1]]
    assert responses(runner, [7, 8]) == [TEXT[3:8]]


def test_a_request_that_shrinks_is_drafted_for_no_more() -> None:
    runner = Runner(das=FIXED)
    runner.add("a", PROMPT, TEXT)
    runner.step()
    runner.step()
    runner.requests["a"].num_emitted = 0
    runner.step()
    assert runner.requests["a"].draft == []
    statistics = runner.drafter.statistics()
    assert (statistics["das_is_drafting"], statistics["das_num_requests_abandoned"]) == (True, 1)


def test_prompts_without_token_ids_are_left_alone() -> None:
    runner = Runner(das=FIXED)
    runner.add("a", None, TEXT)
    runner.step()
    runner.step()
    assert runner.requests["a"].draft == []
    assert runner.drafter.statistics()["das_num_requests_without_prompt"] == 1


def test_requests_name_their_prompt() -> None:
    runner = Runner(das=FIXED)
    for prompt, key in ((PROMPT, 17), ([9, 9], 17), ([5], "p"), ([6], "p")):
        request_id = f"{prompt} {key}"
        runner.add(request_id, prompt, TEXT, max_tokens=10, extra_args={"das_prompt_key": key})
        run(runner, request_id)
    assert len(runner.drafter.history.rollouts(17)) == 2
    assert len(runner.drafter.history.rollouts(prompt_key_of({"das_prompt_key": "p"}) or 0)) == 2


@pytest.mark.parametrize("key", [-1, 1 << 64, 1.5, True, None, [1]])
def test_a_key_that_is_none_leaves_the_prompt_its_own(key: Any) -> None:
    assert prompt_key_of({"das_prompt_key": key}) is None
    assert prompt_key_of("no mapping") is None


def test_drafts_fit_the_engine_s_step() -> None:
    runner = Runner(das=FIXED, max_num_batched_tokens=10)
    runner.add("a", PROMPT, TEXT, max_tokens=20)
    run(runner, "a")
    for request_id in "bcde":
        runner.add(request_id, PROMPT, TEXT)
    for _ in range(4):
        runner.step()
        assert sum(1 + len(state.draft) for state in runner.requests.values()) <= 10
    assert any(state.draft for state in runner.requests.values())


@pytest.mark.parametrize("place", ["plan", "take in"])
def test_the_first_fault_is_said_once_and_the_engine_goes_on(
    place: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise MemoryError("injected")

    runner = Runner(das=FIXED)
    runner.add("a", PROMPT, TEXT, max_tokens=20)
    run(runner, "a")
    runner.add("b", PROMPT, TEXT, max_tokens=20)
    runner.step()
    assert runner.requests["b"].draft
    if place == "plan":
        monkeypatch.setattr(das, "plan_step", fail)
    else:
        monkeypatch.setattr(runner.drafter.tracker, "take_in", fail)
    with caplog.at_level(logging.ERROR, "vllm.das_vllm"):
        assert run(runner, "b") > 1
    (record,) = caplog.records
    assert "MemoryError: injected" in record.getMessage()
    assert record.exc_info is not None
    statistics = runner.drafter.statistics()
    assert (statistics["das_is_drafting"], statistics["das_fault"]) == (False, "MemoryError: injected")
    assert statistics["das_history_num_rollouts"] == 0  # its memory is given back


def test_a_runner_that_does_not_fit_switches_drafting_off() -> None:
    proposer = DasProposer(vllm_config())
    assert proposer.propose([[1], []], None, None) == [[], []]  # nobody has bound a runner, none is among the callers
    assert "no model runner" in str(proposer.fault)


def test_the_runner_is_found_among_the_callers() -> None:
    runner = Runner(das=FIXED)
    runner.drafter._engine = None
    runner.add("a", PROMPT, TEXT, max_tokens=20)
    run(runner, "a")
    assert runner.drafter.fault is None
    assert runner.drafter._engine.how == "call stack"


@pytest.mark.parametrize(
    ("backend", "rank", "drafts"), [("mp", 0, True), ("mp", 1, False), ("external_launcher", 1, True)]
)
def test_ranks_whose_drafts_nobody_reads_keep_nothing(backend: str, rank: int, drafts: bool) -> None:
    runner = Runner(das=FIXED, tp=2, rank=rank, backend=backend)
    runner.add("a", PROMPT, TEXT, max_tokens=20)
    run(runner, "a")
    assert (runner.drafter.statistics()["das_num_requests_started"] == 1) is drafts


def test_deterministic_ranks_read_no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    plan_step = das.plan_step
    monkeypatch.setattr(
        das, "plan_step", lambda *args, **kwargs: asked.append(kwargs["step_ms"]) or plan_step(*args, **kwargs)
    )
    for runner, timed in (
        (Runner(), True),
        (Runner(backend="external_launcher"), False),
        (Runner(das={"deterministic": True}), False),
    ):
        runner.add("a", PROMPT, TEXT, max_tokens=20)
        asked.clear()
        run(runner, "a")
        assert any(step_ms is not None for step_ms in asked) is timed


def test_training_steps_come_from_the_trainer_or_from_weight_updates() -> None:
    runner = Runner(das=FIXED)
    for request_id in ("a", "b"):  # nobody says: das counts the prompt's epochs
        runner.add(request_id, PROMPT, TEXT, max_tokens=5)
        run(runner, request_id)
        runner.drafter.flush()
    assert [r.training_step for r in runner.drafter.history.rollouts(das.prompt_key(PROMPT))] == [0, 1]
    runner.drafter.weights_changed()
    assert runner.drafter.tracker.training_step == 2
    assert runner.drafter.new_training_step(40) == 40
    runner.drafter.weights_changed()
    runner.add("c", PROMPT, TEXT, max_tokens=5)
    run(runner, "c")
    assert [r.training_step for r in runner.drafter.history.rollouts(das.prompt_key(PROMPT))] == [0, 1, 41]
    with pytest.raises(ValueError, match="training_step is -1"):
        runner.drafter.new_training_step(-1)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 3),  # which prompt
            st.lists(st.integers(0, 3), min_size=12, max_size=24),  # what the model writes
            st.integers(1, 12),  # max_tokens
            st.sampled_from([None, 0, 3]),  # end of sequence
        ),
        min_size=1,
        max_size=8,
    ),
    st.integers(0, 1 << 32),
)
def test_whatever_the_scheduler_does_history_holds_what_users_got(requests: Any, seed: int) -> None:
    """Arrivals, preemptions, chunked prefill, cut drafts: nothing lost, nothing twice, nothing behind the end."""
    source = random.Random(seed)
    runner = Runner(das=FIXED, num_speculative_tokens=3, max_model_len=20)
    waiting = list(enumerate(requests))
    expected: list[tuple[int, list[int]]] = []
    running: dict[str, Any] = {}
    for _ in range(400):
        if waiting and (not running or source.random() < 0.5):
            number, (prompt, text, max_tokens, end) = waiting.pop()
            runner.add(str(number), [prompt, 9], text, max_tokens=max_tokens, eos_token_id=end)
            running[str(number)] = prompt
        scheduled = [name for name in running if source.random() < 0.8]
        runner.step(
            scheduled=scheduled,
            prefill=tuple(name for name in scheduled if source.random() < 0.2),
            cut_drafts_to=source.choice([0, 1, 64]),
        )
        for name in list(running):
            state = runner.requests[name]
            assert len(state.draft) <= 3
            end = ResponseEnd.of(state.sampling_params, num_prompt_tokens=2, max_model_len=20)
            response, is_over = end.cut(0, state.text[: state.num_emitted])
            assert is_over or state.num_emitted + len(state.draft) < end.max_tokens
            if is_over:
                expected.append((running.pop(name), list(response)))
                runner.remove(name)
        if not waiting and not running:
            break
    runner.step()
    assert runner.drafter.fault is None
    assert len(runner.drafter.tracker) == 0
    assert runner.drafter.tracker.drafter.request_ids() == ()
    for prompt in range(4):
        kept = sorted(responses(runner, [prompt, 9]))
        sent = sorted(response for other, response in expected if other == prompt)
        if len(sent) <= 4:  # the window drops old epochs
            assert kept == sent
    statistics = runner.drafter.statistics()
    assert statistics["das_num_drafted_tokens"] == runner.num_verified
    assert statistics["das_num_accepted_tokens"] == runner.num_accepted


@pytest.mark.parametrize("number", [0, 65, 100])
def test_more_tokens_than_das_drafts_are_refused(number: int) -> None:
    rule = "it must be 1 <= num_speculative_tokens <= 64"
    with pytest.raises(ValueError, match=f"^num_speculative_tokens is {number}; {rule}$"):
        DasProposer(vllm_config(num_speculative_tokens=number))
    with pytest.raises(TypeError, match=r"^num_speculative_tokens must be an int, not float$"):
        DasProposer(vllm_config(num_speculative_tokens=number + 0.5))  # type: ignore[arg-type]


def test_a_long_text_is_drafted_as_far_as_the_engine_verifies() -> None:
    text = list(range(100, 170))
    for policy in ("fixed", "unlimited"):
        runner = Runner(das={"policy": policy}, num_speculative_tokens=32)
        for request_id in ("a", "b"):
            runner.add(request_id, PROMPT, text, max_tokens=60)
            run(runner, request_id)
        runner.add("c", PROMPT, text, max_tokens=60)
        runner.step()
        assert runner.requests["c"].draft == text[1:33]


@pytest.mark.parametrize(
    ("options", "longest"),
    [
        ({}, 32),
        ({"policy": "fixed"}, 32),
        ({"policy_options": {"max_draft_tokens": 12}}, 12),
        ({"policy_options": {"max_draft_tokens": 48}}, 32),
        ({"policy": "class"}, 16),
        ({"policy": "class", "policy_options": {"long": 24}}, 24),
        ({"policy": "none"}, 0),
    ],
)
def test_the_log_says_how_far_the_policy_goes(
    options: dict[str, Any], longest: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "vllm.das_vllm"):
        DasProposer(vllm_config(num_speculative_tokens=32, das=options))
    assert f"drafts up to {longest} tokens a request and step" in caplog.records[0].getMessage()
