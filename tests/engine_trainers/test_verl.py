"""verl's real agent loops, made by hydra as its workers make them, with `agent_loop` around them."""

import ast
import asyncio
import importlib.util
import inspect
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest

from das import AcceptanceCounters, prompt_key, summarise
from das.analysis import read_log
from das_trainers.settings import process_feed
from das_trainers.verl import AGENT_LOOPS, configuration

verl_loops = pytest.importorskip(
    "verl.experimental.agent_loop.agent_loop", reason="the trainers' environment is not there"
)
ROLLOUT = {"name": "vllm", "prompt_length": 64, "response_length": 64, "full_determinism": False}


class Client:
    """In place of verl's client of its servers: answers from the tiny model, in verl's own TokenOutput."""

    def __init__(self, engine, config):
        self.engine, self.config = engine, config

    async def generate(self, request_id, *, prompt_ids, sampling_params, **_):
        from verl.workers.rollout.replica import TokenOutput

        response = self.engine.sample(prompt_ids, sampling_params)
        return TokenOutput(token_ids=response, extra_fields={"global_steps": 7, "min_global_steps": 6})


class LoopWithTool(verl_loops.AgentLoopBase):
    """Asks twice, with a tool's answer in between, by verl's own merging of tokens."""

    async def run(self, sampling_params, **kwargs):
        prompt = [7, 0, 3]
        first = (await self.server_manager.generate("r", prompt_ids=prompt, sampling_params=sampling_params)).token_ids
        context = [*prompt, *first, 12, 13]
        second = await self.server_manager.generate("r", prompt_ids=context, sampling_params=sampling_params)
        mask = [1] * len(first) + [0, 0] + [1] * len(second.token_ids)
        return verl_loops.AgentLoopOutput(
            prompt_ids=prompt,
            response_ids=[*first, 12, 13, *second.token_ids],
            response_mask=mask,
            reward_score=0.5,
            metrics=verl_loops.AgentLoopMetrics(),
            extra_fields=second.extra_fields,
        )


@pytest.fixture
def engine(model_folder):
    from sampling import Engine

    return Engine(model_folder)


def made(target, engine, tokenizer, *, rollout):
    """An agent loop, made with what AgentLoopWorker passes to hydra."""
    import hydra
    from omegaconf import OmegaConf

    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}, "data": {}})
    return hydra.utils.instantiate(
        config=target,
        trainer_config=verl_loops.DictConfigWrap(config=config),
        server_manager=Client(engine, config),
        tokenizer=tokenizer,
        processor=None,
        hf_model_type="llama",
        dataset_cls=None,
        data_config=verl_loops.DictConfigWrap(config.data),
        tools=verl_loops.ToolListWrap([]),
    )


def run(target, engine, tokenizer, *, rollout=ROLLOUT, **kwargs):
    """Run one sample as a worker does: loops are made inside its event loop."""

    async def make_and_run():
        return await made(target, engine, tokenizer, rollout=rollout).run({"temperature": 1.0}, **kwargs)

    output = asyncio.run(make_and_run())
    process_feed().flush()
    return output


def loops_of_file():
    from omegaconf import OmegaConf

    return {entry.name: entry for entry in OmegaConf.create(AGENT_LOOPS)}


def test_the_version_that_was_read():
    assert version("verl").startswith("0.9.")


def test_single_turns_are_fed_as_sampled(engine, tokenizer, fed_log):
    target = loops_of_file()["single_turn_agent"]
    messages = [{"role": "user", "content": "07 03 05>26:"}]
    outputs = [run(target, engine, tokenizer, raw_prompt=messages, priority=priority) for priority in (0, 5)]
    records = [record.rollout for record in read_log(fed_log)]
    assert [(r.prompt_token_ids.tolist(), r.response_token_ids.tolist()) for r in records] == [
        (prompt, response) for prompt, response, _ in engine.requests
    ]
    assert [output.response_ids for output in outputs] == [response for _, response, _ in engine.requests]
    assert {(r.training_step, r.key) for r in records} == {(6, prompt_key(engine.requests[0][0]))}
    for prompt, _, parameters in engine.requests:
        assert parameters == {"temperature": 1.0, "extra_args": {"das_prompt_key": prompt_key(prompt)}}


@pytest.mark.parametrize(("name", "where"), [("vllm", "extra_args"), ("sglang", "custom_params")])
def test_later_turns_carry_the_key_of_the_first_and_what_tools_said_is_masked(name, where, engine, tokenizer, fed_log):
    target = {"_target_": "das_trainers.verl.agent_loop", "wraps": f"{__name__}.LoopWithTool"}
    output = run(target, engine, tokenizer, rollout=ROLLOUT | {"name": name}, session_id=3)
    (record,) = [record.rollout for record in read_log(fed_log)]
    assert record.response_token_ids.tolist() == output.response_ids
    assert record.response_mask.tolist() == [bool(value) for value in output.response_mask]
    assert (record.reward, record.training_step) == (0.5, 6)
    keys = {parameters[where]["das_prompt_key"] for _, _, parameters in engine.requests}
    assert keys == {record.key} == {prompt_key([7, 0, 3])}


def test_a_hook_that_fails_does_not_fail_the_loop(engine, tokenizer, fed_log, caplog):
    target = {"_target_": "das_trainers.verl.agent_loop", "wraps": f"{__name__}.LoopWithTool"}
    output = run(target, engine, tokenizer, session_id="no number")
    assert output.response_ids
    assert "the agent loop of verl" in process_feed().fault


def test_the_file_names_verls_own_loops_by_their_names():
    import verl.experimental.agent_loop.single_turn_agent_loop
    import verl.experimental.agent_loop.tool_agent_loop  # noqa: F401  # both register themselves

    for name, entry in loops_of_file().items():
        assert verl_loops._agent_loop_registry[name]["_target_"] == entry.wraps


def test_workers_make_loops_from_configurations_and_await_run():
    source = inspect.getsource(verl_loops.AgentLoopWorker._run_agent_loop)
    call = next(
        n
        for n in ast.walk(ast.parse(source.lstrip()))
        if isinstance(n, ast.Call) and ast.unparse(n.func) == "hydra.utils.instantiate"
    )
    assert {"config", "server_manager"} <= {keyword.arg for keyword in call.keywords}
    assert "await agent_loop.run(sampling_params, **kwargs)" in source


def test_the_servers_clients_take_what_ours_passes_on():
    from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient

    for client in (LLMServerClient, FullyAsyncLLMServerClient):
        generate = inspect.signature(inspect.unwrap(client.generate))
        generate.bind(None, "r", prompt_ids=[1], sampling_params={}, image_data=None, priority=0)


def source_of(*path):
    return Path(importlib.util.find_spec("verl").submodule_search_locations[0], *path).read_text()


def test_engine_kwargs_and_sampling_parameters_go_on_as_they_are():
    """The modules import vLLM and SGLang, which are not in this environment: they are read, not run."""
    vllm = source_of("workers", "rollout", "vllm_rollout", "vllm_async_server.py")
    assert "**engine_kwargs" in vllm
    assert "SamplingParams(max_tokens=max_tokens, **sampling_params)" in vllm
    sglang = source_of("workers", "rollout", "sglang_rollout", "async_sglang_server.py")
    assert "**engine_kwargs" in sglang
    assert '"sampling_params": sampling_params' in sglang
    assert all(
        "engine_kwargs" in argument for engine in ("vllm", "sglang") for argument in configuration(engine).arguments
    )


def test_metrics_are_request_means_where_requests_without_drafts_count_as_zero():
    """verl's own function on das' counters; das leaves such requests out of these two means, and says so."""
    from verl.trainer.ppo.ray_trainer import compute_spec_decode_metrics

    names = (
        "num_decode_steps",
        "num_verification_steps",
        "num_drafted_tokens",
        "num_accepted_tokens",
        "num_emitted_tokens",
    )
    rows = [(10, 8, 20, 15, 25), (4, 4, 8, 2, 6), (5, 0, 0, 0, 5)]
    requests = [AcceptanceCounters(**dict(zip(names, row, strict=True))) for row in rows]
    theirs = compute_spec_decode_metrics(
        [c.num_drafted_tokens for c in requests],
        [c.num_accepted_tokens for c in requests],
        [c.num_verification_steps for c in requests],
    )
    ours = summarise(requests)
    share = 2 / 3  # of requests that drafted
    assert theirs["rollout/spec_accept_rate"] == pytest.approx(share * ours["request_mean_draft_acceptance_rate"])
    assert theirs["rollout/spec_accept_length"] == pytest.approx(share * ours["request_mean_mean_acceptance_length"])
    assert SimpleNamespace(**ours).draft_acceptance_rate == pytest.approx(17 / 28)  # token-weighted
