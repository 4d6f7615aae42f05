"""What trainers call in the workers: `llm.collective_rpc("das_statistics")`, one answer a rank.

The general plugin puts these functions on vLLM's WorkerBase, so the one slot of `worker_extension_cls` stays free.
Arguments and answers are plain values, which any executor can carry. A worker whose engine does not draft with das
answers None. So does one where drafting is off after a fault, which `das_fault` tells, but for `das_flush` and
`das_statistics`. A bad argument raises, at the caller; nothing else does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import das
from das.rollout import rollouts_of_fields
from das_vllm.proposer import DasProposer
from das_vllm.request_tracker import prompt_key_of


def das_push_rollouts(worker: Any, rollouts: Sequence[Mapping[str, Any]]) -> int | None:
    """Take finished rollouts into the history, from a trainer or another engine; return how many were new.

    None also once drafting is off.

    Args:
        rollouts: the fields of `das.Rollout` as plain values: at least `prompt_token_ids` and `response_token_ids`;
            `prompt_key` (an int, or the text that requests name as `das_prompt_key`), `training_step`, `reward`,
            `request_id`, `response_mask`. Trees of their prompts are built in the background.

    Raises:
        TypeError: no sequence. ValueError: no rollout, or a token that the model does not have; it says which rollout,
        from 0. None of them is taken in then.
    """
    proposer = _proposer(worker)
    if proposer is None or not proposer.is_drafting:
        return None
    return proposer.add_rollouts(rollouts_of_fields(rollouts))


def das_new_training_step(worker: Any, training_step: int) -> int | None:
    """Say that the policy's weights are of a new version: requests that start from now on belong to it.

    Returns:
        the step; None also once drafting is off.
    """
    proposer = _proposer(worker)
    if proposer is None or not proposer.is_drafting:
        return None
    return proposer.new_training_step(training_step)


def das_prepare(worker: Any, prompts: Sequence[int | str | Sequence[int]]) -> int | None:
    """Say which prompts come next: trees are built in the background, and other engines' rollouts of them fetched.

    Args:
        prompts: of each, its token ids, or the key (an int or a text) that its requests name.

    Returns:
        how many different prompts that were; None also once drafting is off.
    """
    proposer = _proposer(worker)
    if proposer is None or not proposer.is_drafting:
        return None
    keys = {_key_of_prompt(prompt) for prompt in prompts}
    proposer.prepare(sorted(keys))
    return len(keys)


def das_set_policy(worker: Any, policy: str, policy_options: Mapping[str, Any] | None = None) -> str | None:
    """Draft by another policy from now on; arguments as the settings of these names.

    Returns:
        what is in force; None also once drafting is off.
    """
    proposer = _proposer(worker)
    if proposer is None or not proposer.is_drafting:
        return None
    return proposer.set_policy(
        replace(proposer.settings, policy=policy, policy_options={} if policy_options is None else policy_options)
    )


def das_flush(worker: Any) -> int | None:
    """Finish requests that left the engine since its last step; return how many still run."""
    proposer = _proposer(worker)
    return None if proposer is None else proposer.flush()


def das_statistics(worker: Any) -> dict[str, Any] | None:
    """Return counters and gauges by name; see `das_vllm.statistics`."""
    proposer = _proposer(worker)
    return None if proposer is None else proposer.statistics()


def das_save_state(worker: Any, path: str) -> dict[str, Any] | None:
    """Save history, confidence and policy to a directory, only what changed since the last save to it.

    Args:
        path: of the directory, where this worker runs; "{data_parallel_rank}" in it stands for that number, as every
            replica needs one of its own. The first tensor-parallel rank saves, the others answer None.

    Returns:
        what was saved, by the names of `das.SaveSummary`; None also once drafting is off: what was learned is gone
        then, nothing is saved, and the log says so.
    """
    proposer = _proposer(worker)
    return None if proposer is None else proposer.save_state(path)


def das_load_state(worker: Any, path: str) -> dict[str, Any] | None:
    """Take in what `das_save_state` has saved; return how many rollouts, and whether the policy's state was taken in.

    It is where the policy is of the class that was saved. Rollouts that are known already stay. None also once drafting
    is off.

    Raises:
        as `das.load_state`; ValueError: a token that the model does not have. Nothing changes then.
    """
    proposer = _proposer(worker)
    return proposer.load_state(path) if proposer is not None and proposer.is_drafting else None


WORKER_METHODS = (
    das_push_rollouts,
    das_new_training_step,
    das_prepare,
    das_set_policy,
    das_save_state,
    das_load_state,
    das_flush,
    das_statistics,
)


def _proposer(worker: Any) -> DasProposer | None:
    drafter = getattr(getattr(worker, "model_runner", None), "drafter", None)
    return drafter if isinstance(drafter, DasProposer) else None


def _key_of_prompt(prompt: int | str | Sequence[int]) -> int:
    named = prompt_key_of({"das_prompt_key": prompt})
    if named is not None:
        return named
    if isinstance(prompt, (int, str)):
        raise ValueError(f"prompts holds {prompt!r}; a key must be 0 <= key < 2**64")
    return das.prompt_key(prompt)
