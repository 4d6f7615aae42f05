"""verl: das in its vLLM or SGLang servers, and an agent loop around verl's own that feeds what it has sampled.

Read and checked in verl 0.9.1 (vLLM 0.24): AgentLoopWorker makes an agent loop for each sample with
`hydra.utils.instantiate`, from a configuration that may name any callable, and awaits its `run`.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Awaitable, Callable
from typing import Any, Literal

import das
from das_trainers.configuration import SGLANG_VARIABLE, Configuration, vllm_speculative_config
from das_trainers.settings import process_feed

SINGLE_TURN = "verl.experimental.agent_loop.single_turn_agent_loop.SingleTurnAgentLoop"
WITH_TOOLS = "verl.experimental.agent_loop.tool_agent_loop.ToolAgentLoop"
# For actor_rollout_ref.rollout.agent.agent_loop_config_path: these names replace verl's own loops of the same name.
AGENT_LOOPS = f"""\
- name: single_turn_agent
  _target_: das_trainers.verl.agent_loop
  wraps: {SINGLE_TURN}
- name: tool_agent
  _target_: das_trainers.verl.agent_loop
  wraps: {WITH_TOOLS}
"""


def configuration(
    engine: Literal["vllm", "sglang"] = "vllm",
    *,
    num_speculative_tokens: int = 16,
    agent_loop_config_path: str | None = None,
) -> Configuration:
    """Return hydra overrides, and the environment of the servers.

    verl 0.9.1 pins SGLang 0.5.12, in which das does not draft: it supports 0.5.23. Take "vllm" there; with "sglang"
    servers refuse to start, or, where an SGLang loads no plugins, run its own n-gram speculation.

    Args:
        engine: of `actor_rollout_ref.rollout.name`.
        num_speculative_tokens: as of `vllm_speculative_config`; not for SGLang.
        agent_loop_config_path: of a file with AGENT_LOOPS, readable on every node; None: nothing is fed.

    Raises:
        TypeError, ValueError: another engine, or a bad number.
    """
    rollout = "actor_rollout_ref.rollout"
    agent = (
        () if agent_loop_config_path is None else (f"{rollout}.agent.agent_loop_config_path={agent_loop_config_path}",)
    )
    if engine == "vllm":
        speculative = vllm_speculative_config(num_speculative_tokens)
        name = f"+{rollout}.engine_kwargs.vllm.speculative_config"
        return Configuration(arguments=(*(f"{name}.{key}={value}" for key, value in speculative.items()), *agent))
    if engine != "sglang":
        raise ValueError(f"engine is {engine!r}; it must be 'vllm' or 'sglang'")
    # verl resolves arguments before SGLang loads plugins: the name DAS is unknown there. Of NGRAM's own, the draft is
    # shorter, and not a chain.
    arguments = {"algorithm": "NGRAM", "num_draft_tokens": 16, "ngram_max_bfs_breadth": 1}
    name = f"+{rollout}.engine_kwargs.sglang.speculative"
    return Configuration(
        arguments=(*(f"{name}_{key}={value}" for key, value in arguments.items()), *agent),
        environment={SGLANG_VARIABLE: '{"replace_ngram": true}'},
    )


def agent_loop(*, wraps: str = SINGLE_TURN, **arguments: Any) -> Any:
    """Return the agent loop that `wraps` names, made of verl's arguments; what it samples is fed, in validation, too.

    Requests behind the first one of a sample carry the first one's prompt key, so that later turns find what is known
    of the conversation. Feeding goes where DAS_TRAINERS says.

    Args:
        wraps: "package.module.Class" of an agent loop.
        arguments: as verl gives them; `server_manager` among them.

    Raises:
        what making the loop itself raises.
    """
    module, _, name = wraps.rpartition(".")
    server = _WithPromptKey(arguments.pop("server_manager"))
    loop = getattr(importlib.import_module(module), name)(server_manager=server, **arguments)
    run: Callable[..., Awaitable[Any]] = loop.run

    @functools.wraps(run)
    async def run_and_feed(sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        output = await run(sampling_params, **kwargs)
        with process_feed().guard("the agent loop of verl"):
            for one in output if isinstance(output, list) else [output]:
                _feed(one, kwargs, server.prompt_key)
        return output

    loop.run = run_and_feed
    return loop


def _feed(output: Any, kwargs: dict[str, Any], prompt_key: int | None) -> None:
    step = output.extra_fields.get("min_global_steps", output.extra_fields.get("global_steps"))
    sample = kwargs.get("session_id", kwargs.get("priority"))  # of verl's TransferQueue trainer, and of the other one
    process_feed().add(
        prompt_token_ids=output.prompt_ids,
        response_token_ids=output.response_ids,
        training_step=None if step is None or step < 0 else int(step),
        reward=output.reward_score,
        response_mask=output.response_mask,
        prompt_key=prompt_key,
        sample=None if sample is None else int(sample),
    )


class _WithPromptKey:
    """verl's client of the LLM servers, for one sample: each request names the prompt that the sample began with."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.prompt_key: int | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    async def generate(self, request_id: Any, *, prompt_ids: Any, sampling_params: Any, **kwargs: Any) -> Any:
        with process_feed().guard("naming a prompt in verl"):
            if self.prompt_key is None:
                self.prompt_key = das.prompt_key(prompt_ids)
            sampling_params = self._with_key(sampling_params)
        return await self._client.generate(request_id, prompt_ids=prompt_ids, sampling_params=sampling_params, **kwargs)

    def _with_key(self, sampling_params: dict[str, Any]) -> dict[str, Any]:
        engine = self._client.config.actor_rollout_ref.rollout.name
        where = {"vllm": "extra_args", "sglang": "custom_params"}.get(engine)
        if where is None:
            return sampling_params
        return {**sampling_params, where: {"das_prompt_key": self.prompt_key, **(sampling_params.get(where) or {})}}
