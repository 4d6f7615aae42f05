"""OpenRLHF's real executors, with `feeding` around them; the engine beside them samples from a tiny model."""

import ast
import asyncio
import importlib.util
import inspect
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest

from das import prompt_key
from das.analysis import read_log
from das_trainers.openrlhf import configuration, feeding
from das_trainers.settings import process_feed

agent = pytest.importorskip("openrlhf.utils.agent", reason="the trainers' environment is not there")
PROMPT = "07 03 05>26:"


def engine_source():
    """vllm_engine.py imports vLLM, which is not in this environment: it is read, not run."""
    spec = importlib.util.find_spec("openrlhf")
    return ast.parse(Path(spec.submodule_search_locations[0], "trainer", "ray", "vllm_engine.py").read_text())


def execute(executor, engine, tokenizer):
    parameters = SimpleNamespace(max_tokens=24, logprobs=None, extra_args=None)
    arguments = {"prompt": PROMPT, "label": "26", "sampling_params": parameters, "max_length": 96, "images": None}
    output = asyncio.run(executor.execute(hf_tokenizer=tokenizer, llm_engine=engine, **arguments))
    process_feed().flush()
    return output


@pytest.fixture
def engine(model_folder):
    from sampling import OpenRLHFEngine

    return OpenRLHFEngine(model_folder)


def test_the_version_that_was_read():
    assert version("openrlhf").startswith("0.11.")


def test_single_turns_are_fed_as_sampled(engine, tokenizer, fed_log):
    executor = feeding(agent.SingleTurnAgentExecutor)()
    assert isinstance(executor, agent.AgentExecutorBase)
    outputs = [execute(executor, engine, tokenizer) for _ in range(3)]
    records = [record.rollout for record in read_log(fed_log)]
    assert [(r.prompt_token_ids.tolist(), r.response_token_ids.tolist()) for r in records] == [
        (prompt, response) for prompt, response, _ in engine.requests
    ]
    assert {r.response_mask is None for r in records} == {True}
    assert [output["observation_tokens"] for output in outputs] == [p + r for p, r, _ in engine.requests]
    assert {named["das_prompt_key"] for _, _, named in engine.requests} == {prompt_key(tokenizer(PROMPT)["input_ids"])}


def test_later_turns_carry_the_key_of_the_first_and_what_tools_said_is_masked(engine, tokenizer, fed_log):
    import torch

    class Instance(agent.AgentInstanceBase):
        def __init__(self):
            self.turns = 0

        async def step(self, states, **_):
            self.turns += 1
            return {
                "rewards": torch.tensor(1.0),
                "environment_feedback": "" if self.turns == 2 else "12+3=15?",
                "done": self.turns == 2,
            }

    executor = feeding(agent.MultiTurnAgentExecutor, agent_instance_cls=Instance)()
    execute(executor, engine, tokenizer)
    (record,) = [record.rollout for record in read_log(fed_log)]
    (first, said, _), (second, answered, _) = engine.requests
    feedback = tokenizer("12+3=15?")["input_ids"]
    assert second == first + said + feedback
    assert record.prompt_token_ids.tolist() == first
    assert record.response_token_ids.tolist() == said + feedback + answered
    assert record.response_mask.tolist() == [True] * len(said) + [False] * len(feedback) + [True] * len(answered)
    assert record.reward == 2.0
    assert {named["das_prompt_key"] for _, _, named in engine.requests} == {record.key} == {prompt_key(first)}


def test_a_hook_that_fails_does_not_fail_the_executor(engine, tokenizer, fed_log, caplog):
    class Executor(agent.SingleTurnAgentExecutor):
        async def execute(self, **arguments):
            output = await super().execute(**arguments)
            return output | {"action_ranges": None}

    output = execute(feeding(Executor)(), engine, tokenizer)
    assert output["observation_tokens"]
    assert "the agent executor of OpenRLHF" in process_feed().fault


def test_the_actor_calls_executors_by_keyword_and_its_engine_as_ours_passes_on():
    calls = [
        n
        for n in ast.walk(engine_source())
        if isinstance(n, ast.Call) and ast.unparse(n.func) == "self.executor.execute"
    ]
    assert calls
    for call in calls:
        assert not call.args
        assert "llm_engine" in {keyword.arg for keyword in call.keywords}
    (generate,) = [n for n in ast.walk(engine_source()) if isinstance(n, ast.AsyncFunctionDef) and n.name == "generate"]
    assert [a.arg for a in generate.args.args] == ["self", "prompt_token_ids", "sampling_params", "multi_modal_data"]
    assert list(inspect.signature(agent.AgentExecutorBase.execute).parameters)[-2:] == ["llm_engine", "images"]


def test_a_file_of_three_lines_is_what_openrlhf_loads(tmp_path, fed_log):
    """`_load_agent_executor`, taken out of the module that imports vLLM, loads it and makes it without arguments."""
    (load,) = [n for n in engine_source().body if getattr(n, "name", "") == "_load_agent_executor"]
    scope = {"AgentExecutorBase": agent.AgentExecutorBase}
    exec(compile(ast.Module([load], []), "vllm_engine", "exec"), scope)
    file = tmp_path / "das_agent.py"
    file.write_text(
        "from openrlhf.utils.agent import SingleTurnAgentExecutor\n"
        "from das_trainers.openrlhf import feeding\n"
        "AgentExecutor = feeding(SingleTurnAgentExecutor, remote_rm_url='http://localhost/score')\n"
    )
    assert scope["_load_agent_executor"](str(file)).reward_endpoints == ["http://localhost/score"]


def test_openrlhf_hands_no_speculative_config_on_and_takes_the_argument():
    """Else the environment would not be needed, and the argument would be refused."""
    assert "speculative" not in ast.unparse(engine_source())
    source = Path(
        importlib.util.find_spec("openrlhf").submodule_search_locations[0], "cli", "train_ppo_ray.py"
    ).read_text()
    (flag, _) = configuration(agent_func_path="a.py").arguments
    assert f'"{flag}"' in source
