"""How an engine is told to draft with das, in the words of each trainer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

VLLM_VARIABLE = "DAS_VLLM_CONFIG"
SGLANG_VARIABLE = "DAS_SGLANG"


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """What to add to a trainer's own configuration.

    Args:
        arguments: of its command line.
        environment: variables of the processes that run engines; das' own settings may go into the same ones.
        settings: for its configuration file, nested as there.
    """

    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)


def vllm_speculative_config(num_speculative_tokens: int = 16) -> dict[str, Any]:
    """Return vLLM's `speculative_config` for das.

    Args:
        num_speculative_tokens: most that is ever drafted for a request in a step, 1..64.

    Raises:
        TypeError, ValueError: no int, or out of range.
    """
    if isinstance(num_speculative_tokens, bool) or not isinstance(num_speculative_tokens, int):
        raise TypeError(f"num_speculative_tokens must be an int, not {type(num_speculative_tokens).__name__}")
    if not 1 <= num_speculative_tokens <= 64:
        raise ValueError(f"num_speculative_tokens is {num_speculative_tokens}; it must be 1..64")
    return {
        "method": "custom_class",
        "model": "das_vllm.DasProposer",
        "num_speculative_tokens": num_speculative_tokens,
    }


def injected_in_vllm(num_speculative_tokens: int = 16) -> dict[str, str]:
    """Return the environment that gives das to every vLLM engine made without a speculative_config.

    For trainers that hand none on. Raises: as `vllm_speculative_config`.
    """
    injected = vllm_speculative_config(num_speculative_tokens)["num_speculative_tokens"]
    return {VLLM_VARIABLE: json.dumps({"inject_num_speculative_tokens": injected})}
