"""SGLang engines that share their history by a service in Ray, told by one line of their settings.

Each joins the cluster by its address, in the process of its scheduler. docs/ray.md says what is tested.
"""

import asyncio
import json
import os

import pytest
from history_service import NAME, documented_statistics, history_service, wait_until
from sglang_engines import call, engine, generate, num_passes, statistics, tokens_of, trained_model

import das
from bench import tiny_llama

pytestmark = pytest.mark.sglang

PROMPTS = tiny_llama.prompts(16)
GREEDY = {"temperature": 0, "max_new_tokens": 48, "ignore_eos": True}
SHARED = {"policy": "fixed:7", "widths": [0, 1, 3, 7], "shared_history": f"ray:{NAME}"}


@pytest.fixture(scope="module")
def expected(request):
    """Answers without speculation, by prompt."""
    with engine(trained_model(request.config.cache)) as running:
        return dict(zip(map(tuple, PROMPTS), tokens_of(generate(running, PROMPTS, GREEDY)), strict=True))


@pytest.fixture(scope="module")
def service(expected, tmp_path_factory):
    with history_service(tmp_path_factory.mktemp("history")) as running:
        yield running


@pytest.fixture(scope="module")
def engines(request, service):
    """Two of them, at once."""
    model = trained_model(request.config.cache)
    das_on = {"settings": SHARED, "speculative_algorithm": "DAS"}
    with engine(model, **das_on) as first, engine(model, **das_on) as second:
        yield first, second


def shared(running):
    return statistics(running)["shared_history"]


def prepared(running, prompts, num_rollouts):
    """Announce prompts, and wait until so many rollouts of them have come."""
    before = shared(running)["num_received_rollouts"]
    call(running, "das_prepare", prompts=json.dumps(prompts))
    wait_until(lambda: shared(running)["num_received_rollouts"] == before + num_rollouts)


def publish(service, prompts, expected):
    """As another worker, tell what it has seen of these."""
    service.ask(
        "publish",
        [
            das.Rollout(
                prompt_token_ids=prompt,
                response_token_ids=expected[tuple(prompt)],
                training_step=0,
                request_id=f"other-{prompt}",
            )
            for prompt in prompts
        ],
    )


def answers_to(prompts, expected):
    return [expected[tuple(prompt)] for prompt in prompts]


def test_an_engine_drafts_from_its_first_steps_what_another_worker_saw(service, engines, expected):
    first, _ = engines
    prompts = PROMPTS[:4]
    publish(service, prompts, expected)
    prepared(first, prompts, len(prompts))
    answers = generate(first, prompts, GREEDY | {"max_new_tokens": 9})  # the first token, seven drafted, one behind
    assert tokens_of(answers) == [answer[:9] for answer in answers_to(prompts, expected)]
    assert num_passes(answers) == [1] * len(prompts)
    answers = generate(first, prompts, GREEDY)
    assert tokens_of(answers) == answers_to(prompts, expected)
    assert max(num_passes(answers)) <= 8  # of 47 tokens


def test_what_an_engine_generates_arrives_and_the_next_engine_drafts_it(service, engines, expected):
    first, second = engines
    prompts = PROMPTS[4:8]
    cold = generate(first, prompts, GREEDY)
    assert tokens_of(cold) == answers_to(prompts, expected)
    assert service.ask("known", prompts, len(prompts)) == [[answer] for answer in answers_to(prompts, expected)]
    prepared(second, prompts, len(prompts))
    warm = generate(second, prompts, GREEDY)
    assert tokens_of(warm) == tokens_of(cold)
    assert sum(num_passes(warm)) < sum(num_passes(cold)) / 1.5


def test_two_engines_that_run_the_same_prompt_tell_each_other_as_they_go(engines, expected):
    prompts = PROMPTS[8:9] * 8

    async def run():
        asked = [one.async_generate(input_ids=prompts, sampling_params=GREEDY) for one in engines]
        return await asyncio.gather(*asked)

    for _ in range(5):  # one may be done before the other has begun
        for answers in engines[0].loop.run_until_complete(run()):
            assert tokens_of(answers) == answers_to(prompts, expected)
        if max(shared(one)["num_installed_pieces"] for one in engines) > 0:
            return
    raise AssertionError("no piece has come")


def test_an_engine_outlives_the_service_and_shares_again_when_it_returns(service, engines, expected):
    first, _ = engines
    prompts = PROMPTS[9:13]
    long = GREEDY | {"max_new_tokens": 100}

    async def run():
        task = asyncio.ensure_future(first.async_generate(input_ids=prompts, sampling_params=long))
        await asyncio.sleep(0.1)
        num_stopped = await first.loop.run_in_executor(None, service.ask, "stop")
        return num_stopped, task.done(), await task

    num_stopped, was_done, answers = first.loop.run_until_complete(run())
    assert (num_stopped, was_done) == (2, False)
    assert [answer[:48] for answer in tokens_of(answers)] == answers_to(prompts, expected)
    wait_until(lambda: shared(first)["state"].startswith("alone: shard"), what="it is not alone")
    assert statistics(first)["state"] == "drafting"
    assert shared(first)["num_failures"] > 0
    service.ask("start")
    wait_until(lambda: shared(first)["state"] == "sharing", what="it does not share again")
    assert service.ask("known", prompts, len(prompts)) == [[answer] for answer in tokens_of(answers)]
    service.ask("kill")  # Ray starts the shards again
    assert tokens_of(generate(first, prompts, GREEDY)) == answers_to(prompts, expected)
    found = service.ask("known", prompts, 2 * len(prompts))
    assert found == [sorted(pair) for pair in zip(answers_to(prompts, expected), tokens_of(answers), strict=True)]


def test_the_statistics_are_those_that_the_documentation_names(engines):
    found = shared(engines[0])
    assert [name for name in documented_statistics() if name not in found] == []
    assert found["state"] == "sharing"
    assert found["num_published_rollouts"] > 0
    assert 0.0 < found["publish_lag_ms_median"] <= found["publish_lag_ms_max"]
    assert found["exchange_cpu_s"] > 0.0


@pytest.mark.slow
def test_two_ranks_draft_what_the_first_of_them_is_told(request, service, expected):
    cores = sorted(os.sched_getaffinity(0))
    prompts = PROMPTS[13:]
    publish(service, prompts, expected)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_CPU_OMP_THREADS_BIND", f"{cores[0]}|{cores[-1]}")
        model = trained_model(request.config.cache)
        with engine(model, settings=SHARED, speculative_algorithm="DAS", tp_size=2) as ranks:
            prepared(ranks, prompts, len(prompts))
            answers = generate(ranks, prompts, GREEDY)
            assert tokens_of(answers) == answers_to(prompts, expected)
            assert max(num_passes(answers)) < 47 / 2  # it is handed on at every eighth step
            assert shared(ranks)["num_installed_rollouts"] == len(prompts)
            assert statistics(ranks)["state"] == "drafting"
