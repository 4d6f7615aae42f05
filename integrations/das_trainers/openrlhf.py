"""OpenRLHF: das in its vLLM engines, and an agent executor around another one that feeds what it has sampled.

Read and checked in OpenRLHF 0.11.2 (vLLM 0.29): the file of `--train.agent_func_path` defines `AgentExecutor`; its
`execute` runs beside the engine, in the Ray actor that holds it.
"""

from __future__ import annotations

from typing import Any

import das
from das_trainers.configuration import Configuration, injected_in_vllm
from das_trainers.settings import process_feed


def configuration(*, num_speculative_tokens: int = 16, agent_func_path: str | None = None) -> Configuration:
    """Return arguments, and the environment of the engines' actors: OpenRLHF hands vLLM no speculative_config.

    Args:
        num_speculative_tokens: as of `vllm_speculative_config`.
        agent_func_path: of a file that defines `AgentExecutor = das_trainers.openrlhf.feeding(...)`; None: nothing is
            fed.

    Raises:
        TypeError, ValueError: a bad number.
    """
    arguments = () if agent_func_path is None else ("--train.agent_func_path", agent_func_path)
    return Configuration(arguments=arguments, environment=injected_in_vllm(num_speculative_tokens))


def feeding(executor_class: type, **arguments: Any) -> type:
    """Return a subclass of an agent executor that is made without arguments; what it samples is fed.

    Requests behind the first one of a sample carry the first one's prompt key. Feeding goes where DAS_TRAINERS says.

    Args:
        executor_class: a subclass of OpenRLHF's AgentExecutorBase, as SingleTurnAgentExecutor.
        arguments: of its constructor: `remote_rm_url`, `agent_instance_cls`.
    """

    class AgentExecutor(executor_class):  # type: ignore[misc]  # any class at all
        def __init__(self) -> None:
            super().__init__(**arguments)

        async def execute(self, *, llm_engine: Any, **kwargs: Any) -> Any:
            engine = _WithPromptKey(llm_engine)
            output = await super().execute(llm_engine=engine, **kwargs)
            with process_feed().guard("the agent executor of OpenRLHF"):
                _feed(output, engine.prompt_key)
            return output

    return AgentExecutor


def _feed(output: dict[str, Any], prompt_key: int | None) -> None:
    ranges = [(int(start), int(end)) for start, end in output["action_ranges"]]
    if not ranges:  # no room to generate anything
        return
    token_ids = output["observation_tokens"]
    start, end = ranges[0][0], ranges[-1][1]
    mask = [False] * (end - start)
    for first, last in ranges:
        mask[first - start : last - start] = [True] * (last - first)
    reward = output.get("reward")
    process_feed().add(
        prompt_token_ids=token_ids[:start],
        response_token_ids=token_ids[start:end],
        reward=None if reward is None else float(reward),
        response_mask=None if len(ranges) == 1 else mask,
        prompt_key=prompt_key,
    )


class _WithPromptKey:
    """OpenRLHF's engine, for one sample: each request names the prompt that the sample began with."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.prompt_key: int | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, prompt_token_ids: Any, sampling_params: Any, **kwargs: Any) -> Any:
        with process_feed().guard("naming a prompt in OpenRLHF"):
            if self.prompt_key is None:
                self.prompt_key = das.prompt_key(prompt_token_ids)
            named = {"das_prompt_key": self.prompt_key}
            sampling_params.extra_args = named | (sampling_params.extra_args or {})  # executors give each a copy
        return await self._engine.generate(prompt_token_ids, sampling_params, **kwargs)
