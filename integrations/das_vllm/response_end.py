"""Where vLLM's scheduler ends a response: the runner shows a drafter the tokens behind that, too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ResponseEnd:
    """When a response ends: vLLM's `check_stop`, on what a worker knows.

    `min_tokens` needs no rule: before so many, the sampler offers no token that ends a response.
    Stop strings are not among it: the front end finds them in text, and a worker sees their request vanish.

    Args:
        max_tokens: of the response; what the model's context leaves is taken in.
        stop_token_ids: tokens that end it, the end of sequence included unless that is to be ignored.
    """

    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()

    @classmethod
    def of(cls, sampling_params: Any, *, num_prompt_tokens: int, max_model_len: int) -> ResponseEnd:
        """Return the end of a request with vLLM's SamplingParams; None: one whose parameters are not known."""
        room = max(0, max_model_len - num_prompt_tokens)
        if sampling_params is None:
            return cls(room)
        stops = set(getattr(sampling_params, "stop_token_ids", None) or ())
        end_of_sequence = getattr(sampling_params, "eos_token_id", None)  # None where ignore_eos is set
        if end_of_sequence is not None:
            stops.add(end_of_sequence)
        max_tokens = getattr(sampling_params, "max_tokens", None)
        return cls(
            room if max_tokens is None else min(room, max_tokens),
            frozenset(stops),
        )

    def cut(self, num_before: int, token_ids: Sequence[int]) -> tuple[Sequence[int], bool]:
        """Return what of the tokens behind the first `num_before` belongs to the response, and whether it ended."""
        for position, token in enumerate(token_ids, 1):
            if token in self.stop_token_ids or num_before + position >= self.max_tokens:
                return token_ids[:position], True
        return token_ids, False
