"""Rollouts with tool output, as the requests that an engine saw."""

from __future__ import annotations

import numpy as np

from das.rollout import Rollout


def turns_of(rollout: Rollout) -> list[Rollout]:
    """Return one rollout for each stretch that the model wrote: its prompt is everything before it.

    An engine that learns from what it generates learns these, under the key of the conversation's first prompt where
    requests name it (`das_prompt_key`). A rollout without a mask is the only turn of its own.

    Complexity: O(turns x tokens).
    """
    mask = rollout.response_mask
    if mask is None or mask.all():
        return [rollout]
    bounds = np.flatnonzero(np.diff(mask, prepend=False, append=False))  # starts and ends, in turn
    return [
        Rollout(
            prompt_token_ids=np.concatenate([rollout.prompt_token_ids, rollout.response_token_ids[:start]]),
            response_token_ids=rollout.response_token_ids[start:end],
            training_step=rollout.training_step,
            reward=rollout.reward,
            prompt_key=rollout.key,
            ordinal=rollout.ordinal,
        )
        for start, end in bounds.reshape(-1, 2)
    ]
