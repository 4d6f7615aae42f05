"""Engines of several processes that share their history by a service in Ray, told by one line of their settings.

One engine is started here and joins the cluster by its address; one belongs to an actor of the cluster. Both draft in
the process of their engine core. docs/ray.md says what is tested.
"""

from collections.abc import Callable, Iterator
from threading import Thread
from typing import Any

import pytest
from engine_runs import Case, token_ids
from history_service import NAME, HistoryService, documented_statistics, history_service, wait_until
from ray_engine import SharingEngine

import das

SHARED = {"policy": "fixed", "shared_history": f"ray:{NAME}"}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HistoryService]:
    with history_service(tmp_path_factory.mktemp("history")) as running:
        yield running


@pytest.fixture(scope="module")
def expected(undrafted: dict[str, list[Any]]) -> dict[str, list[int]]:
    return {name: token_ids(output)[0] for name, output in undrafted.items()}


@pytest.fixture(scope="module")
def here(service: HistoryService, tiny_model: Any, expected: Any) -> Iterator[SharingEngine]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
        made = SharingEngine(str(tiny_model), SHARED)
        yield made
        made.close()


@pytest.fixture(scope="module")
def in_actor(service: HistoryService, here: SharingEngine, tiny_model: Any) -> Iterator[Callable[..., Any]]:
    """Calls methods of an engine that an actor has."""
    service.ask("make_actor", SharingEngine, str(tiny_model), SHARED)
    yield lambda method, *arguments: service.ask("ask_actor", method, *arguments)
    service.ask("ask_actor", "close")


def named(cases: list[Case], names: tuple[str, ...]) -> list[Case]:
    return [case for case in cases if case.name in names]


def prompts_of(cases: list[Case]) -> list[list[int]]:
    return [case.prompt_token_ids for case in cases]


def test_an_engine_drafts_from_its_first_steps_what_another_worker_saw(
    service: HistoryService, here: SharingEngine, cases: list[Case], expected: Any
) -> None:
    seen = named(cases, ("plain", "logprobs", "prompt logprobs"))
    service.ask(
        "publish",
        [
            das.Rollout(
                prompt_token_ids=case.prompt_token_ids,
                response_token_ids=expected[case.name],
                training_step=0,
                request_id=f"other-{case.name}",
            )
            for case in seen
        ],
    )
    here.prepare(prompts_of(seen))
    wait_until(lambda: here.statistics()["das_shared_num_received_rollouts"] == len(seen))
    begun, counted = here.generate(seen, max_tokens=9)  # the first token, then eight drafted ones
    assert begun == [expected[case.name][:9] for case in seen]
    assert counted["steps"] <= 3, counted
    assert counted["accepted"] >= 7 * len(seen), counted
    answers, counted = here.generate(seen)
    assert answers == [expected[case.name] for case in seen]
    assert counted["steps"] < max(map(len, answers)) / 5, counted
    assert counted["accepted"] > 0.9 * counted["drafted"]


def test_what_an_engine_generates_arrives_and_the_next_engine_drafts_it(
    service: HistoryService, here: SharingEngine, in_actor: Callable[..., Any], cases: list[Case], expected: Any
) -> None:
    new = named(cases, ("presence and frequency", "repetition"))  # whose text hardly repeats itself
    answers, cold = here.generate(new)
    assert service.ask("known", prompts_of(new), len(new)) == [[answer] for answer in answers]
    in_actor("prepare", prompts_of(new))
    received = "das_shared_num_received_rollouts"
    wait_until(lambda: in_actor("statistics")[received] == len(new))
    assert answers == [expected[case.name] for case in new]
    others, warm = in_actor("generate", new)
    assert others == answers
    assert warm["steps"] < cold["steps"] / 2, (cold, warm)


def test_two_engines_that_run_the_same_prompt_tell_each_other_as_they_go(
    service: HistoryService, here: SharingEngine, in_actor: Callable[..., Any], cases: list[Case], expected: Any
) -> None:
    """Without drafts, as they run longer then. One may be done before the other has begun: they try a few times."""
    (case,) = named(cases, ("long",))
    installed = "das_shared_num_installed_pieces"
    here.set_policy("none")
    in_actor("set_policy", "none")
    for _ in range(5):
        answers: list[Any] = []
        other = Thread(target=lambda into=answers: into.extend(in_actor("generate", [case] * 8)))
        other.start()
        own, _ = here.generate([case] * 8)
        other.join()
        assert own == answers[0] == [expected["long"]] * 8
        if max(here.statistics()[installed], in_actor("statistics")[installed]) > 0:
            break
    else:
        raise AssertionError("no piece has come")
    here.set_policy("fixed")
    in_actor("set_policy", "fixed")


def test_an_engine_outlives_the_service_and_shares_again_when_it_returns(
    service: HistoryService, here: SharingEngine, cases: list[Case], expected: Any
) -> None:
    from vllm import SamplingParams

    new = named(cases, ("at least", "allowed", "end of sequence"))
    inner, answers = here.llm.llm_engine, {}
    for case in new:
        inner.add_request(case.name, {"prompt_token_ids": case.prompt_token_ids}, SamplingParams(**case.parameters))
    num_steps = 0
    while inner.has_unfinished_requests():
        for output in inner.step():
            if output.finished:
                answers[output.request_id] = list(output.outputs[0].token_ids)
        num_steps += 1
        if num_steps == 3:
            assert len(answers) < len(new)
            assert service.ask("stop") == 2
    assert answers == {case.name: expected[case.name] for case in new}
    here.generate(new[:1], max_tokens=2)  # a step later the ended ones are published
    wait_until(lambda: here.statistics()["das_shared_state"].startswith("alone: shard"), what="it is not alone")
    told = here.statistics()
    assert told["das_is_drafting"]
    assert told["das_shared_num_failures"] > 0
    service.ask("start")
    wait_until(lambda: here.statistics()["das_shared_state"] == "sharing", what="it does not share again")
    found = service.ask("known", prompts_of(new), len(new) + 1)
    assert [expected[case.name] in responses for case, responses in zip(new, found, strict=True)] == [True] * len(new)
    service.ask("kill")  # Ray starts the shards again
    answers_again, _ = here.generate(new)
    assert answers_again == [expected[case.name] for case in new]
    assert len(service.ask("known", prompts_of(new), 2 * len(new) + 1)) == len(new)


def test_the_statistics_are_those_that_the_documentation_names(here: SharingEngine) -> None:
    found = here.statistics()
    assert [name for name in documented_statistics() if f"das_shared_{name}" not in found] == []
    assert found["das_shared_state"] == "sharing"
    assert found["das_shared_num_published_rollouts"] > 0
    assert 0.0 < found["das_shared_publish_lag_ms_median"] <= found["das_shared_publish_lag_ms_max"]
    assert found["das_shared_exchange_cpu_s"] > 0.0
