"""slime: das in its SGLang servers, and three functions for its command line that feed what it has sampled.

Read in slime 0.3 (2026): hooks are functions named by path. `Sample` holds prompt and response in `tokens`, of which
the last `response_length` are the response; `weight_versions` are those of the engine that wrote it.
"""

from __future__ import annotations

import json
from typing import Any

import das
from das_trainers.configuration import SGLANG_VARIABLE, Configuration
from das_trainers.settings import process_feed


def configuration(*, policy: str = "throughput", with_rewards: bool = False, with_keys: bool = False) -> Configuration:
    """Return arguments, and the environment of the rollout workers.

    slime 0.3 pins SGLang 0.5.15, in which das does not draft: it supports 0.5.23. Leave the speculative algorithm out
    there; the hooks feed without it.

    Args:
        policy: das' setting of that name in SGLang.
        with_rewards: feed rewards, too, which come later than tokens.
        with_keys: requests name their prompt: for partial rollouts, whose continued requests begin with what was
            generated before.
    """
    arguments = [
        "--sglang-speculative-algorithm",
        "DAS",
        "--rollout-sample-hook-path",
        "das_trainers.slime.sample_hook",
    ]
    if with_rewards:
        arguments += ["--custom-rollout-log-function-path", "das_trainers.slime.rollout_log"]
    if with_keys:
        arguments += ["--custom-generate-function-path", "das_trainers.slime.generate"]
    return Configuration(arguments=tuple(arguments), environment={SGLANG_VARIABLE: json.dumps({"policy": policy})})


def sample_hook(args: Any, sample: Any, *, rollout_id: int | None = None, evaluation: bool = False) -> None:
    """Feed a sample that has just been generated: `--rollout-sample-hook-path`. Never raises, changes nothing."""
    if not evaluation:
        with process_feed().guard("the sample hook of slime"):
            _feed(args, sample, rollout_id)


def rollout_log(rollout_id: int, args: Any, samples: Any, rollout_extra_metrics: Any, rollout_time: Any) -> bool:
    """Feed the samples of a rollout with their rewards: `--custom-rollout-log-function-path`. Never raises.

    Returns:
        False: slime logs as ever.
    """
    with process_feed().guard("the rollout log of slime"):
        for sample in samples:
            _feed(args, sample, rollout_id)
    return False


async def generate(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """Generate as slime does, with the prompt's key in the request: `--custom-generate-function-path`."""
    from slime.rollout import sglang_rollout

    with process_feed().guard("naming a prompt in slime"):
        num_prompt_tokens = len(sample.tokens or ()) - sample.response_length
        if num_prompt_tokens > 0:  # it was begun before; else the prompt's own tokens are its key
            key = das.prompt_key(sample.tokens[:num_prompt_tokens])
            named = {"das_prompt_key": key, **(sampling_params.get("custom_params") or {})}
            sampling_params = {**sampling_params, "custom_params": named}
    return await sglang_rollout.generate(args, sample, sampling_params)


def _feed(args: Any, sample: Any, rollout_id: int | None) -> None:
    if sample.status.value == "aborted" or not sample.response_length:
        return
    num_prompt_tokens = len(sample.tokens) - sample.response_length
    reward = sample.reward
    if isinstance(reward, dict):
        reward = reward.get(getattr(args, "reward_key", None))
    version = sample.weight_versions[0] if sample.weight_versions else None
    process_feed().add(
        prompt_token_ids=sample.tokens[:num_prompt_tokens],
        response_token_ids=sample.tokens[num_prompt_tokens:],
        training_step=int(version) if version is not None and str(version).isdecimal() else rollout_id,
        reward=None if reward is None else float(reward),
        response_mask=sample.loss_mask,
        sample=sample.index,
    )
