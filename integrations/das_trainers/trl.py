"""TRL: das in its vLLM, and a hook on GRPOTrainer that feeds what it has sampled.

Read and run with TRL 1.16 (vLLM 0.22 to 0.31): `GRPOTrainer._generate(prompts)` returns prompts and completions as
token ids, with a mask where tools answered. Reward functions, the documented door, see no prompt tokens.
"""

from __future__ import annotations

import functools
import inspect
import json
from typing import Any, Literal

from das_trainers.configuration import Configuration, injected_in_vllm, vllm_speculative_config
from das_trainers.feed import Feed


def configuration(
    vllm_mode: Literal["server", "colocate"] = "server", *, num_speculative_tokens: int = 16
) -> Configuration:
    """Return arguments of the server, or the environment of the trainer, which makes the engine itself.

    Args:
        vllm_mode: of GRPOConfig.
        num_speculative_tokens: as of `vllm_speculative_config`.

    Raises:
        TypeError, ValueError: another mode, or a bad number.
    """
    if vllm_mode == "server":
        speculative = json.dumps(vllm_speculative_config(num_speculative_tokens))
        return Configuration(arguments=("--speculative-config", speculative))
    if vllm_mode != "colocate":
        raise ValueError(f"vllm_mode is {vllm_mode!r}; it must be 'server' or 'colocate'")
    return Configuration(environment=injected_in_vllm(num_speculative_tokens))  # its LLM() takes no speculative_config


def attach(trainer: Any, feed: Feed) -> None:
    """Feed what a GRPOTrainer samples in training, and tell an engine of its own process the training step.

    Args:
        trainer: made, not yet training. Where its way of generating is not the one that is known, feeding is off, and
            the reason is in the log.
        feed: where it goes. On several processes each feeds its share.

    Never raises.
    """
    with feed.guard("attaching to TRL's trainer"):
        generate = trainer._generate
        if list(inspect.signature(generate).parameters) != ["prompts"]:
            raise TypeError(f"GRPOTrainer._generate takes {inspect.signature(generate)}; das knows (prompts)")
        told = -1

        @functools.wraps(generate)
        def generate_and_feed(prompts: list[Any]) -> Any:
            nonlocal told
            step = trainer.state.global_step
            is_training = trainer.model.training
            if is_training and step != told:
                told = step
                _tell_step(trainer, feed, step)
            outputs = generate(prompts)
            if is_training:
                with feed.guard("the hook on TRL's trainer"):
                    _feed(feed, outputs, step)
            return outputs

        trainer._generate = generate_and_feed


def _feed(feed: Feed, outputs: Any, step: int) -> None:
    prompts, completions, masks = outputs[:3]
    for number, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        feed.add(
            prompt_token_ids=prompt,
            response_token_ids=completion,
            training_step=step,
            response_mask=None if masks is None else masks[number][: len(completion)],
        )


def _tell_step(trainer: Any, feed: Feed, step: int) -> None:
    """Between two generations nothing runs in a colocated engine, which hears of no weight update by itself."""
    engine = getattr(getattr(trainer, "vllm_generation", None), "llm", None)
    if engine is not None and not feed.fault:
        with feed.guard("telling the training step to TRL's engine"):
            engine.collective_rpc("das_new_training_step", args=(step,))
