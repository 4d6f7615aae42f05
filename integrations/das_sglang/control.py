"""What trainers can ask of a running engine: methods for `Engine.collective_rpc`, and das' part of `/server_info`.

SGLang calls attributes of its scheduler by name, on every rank, with plain values. So the methods live there; they are
put there by a worker of das, and only then.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import das
from das.checked_values import check_int
from das.rollout import named_prompt_key, rollouts_of_fields
from das_sglang.drafting import Drafting

_T = TypeVar("_T")
_FIELDS = {field.name for field in fields(das.Rollout) if field.init}
_INTERNAL_STATE = "sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController"


def install() -> None:
    """Give SGLang's scheduler class the methods below. Doing it again changes nothing."""
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if getattr(Scheduler, "das_push", None) is das_push:
        return
    for method in METHODS:
        setattr(Scheduler, method.__name__, method)
    HookRegistry.register(f"{_INTERNAL_STATE}._add_speculative", _add_statistics, HookType.AFTER)
    HookRegistry.apply_hooks()


def das_push(scheduler: Any, rollouts: str = "", path: str = "") -> None:
    """Take rollouts into the history.

    Args:
        rollouts: a JSON array of objects with the fields of `das.Rollout`; `prompt_key` may be a name.
        path: of a file with such an object in each line, as logs of format `das` have, that every rank can read; other
            fields are ignored. Equal rollouts are one, unless their `ordinal` tells them apart.

    Raises:
        TypeError, ValueError: no JSON, or no rollout; it names the first that is none. None is taken then, on any rank.
    """
    drafting = _drafting(scheduler)

    def read() -> tuple[list[das.Rollout], object]:
        found = _parsed(rollouts, path)
        drafting.check_rollouts(found)
        return found, [(one.key, one.response_hash, one.training_step) for one in found]

    drafting.add_rollouts(_alike_on_all_ranks(scheduler, read))


def das_new_training_step(scheduler: Any, training_step: int) -> None:
    """Say which training step the engine's weights belong to; a lower one than it is at changes nothing.

    Raises:
        TypeError, ValueError: no int, or a negative one.
    """
    check_int(training_step, "training_step", below=1 << 62)
    _drafting(scheduler).training_step.raise_to(training_step)


def das_prepare(scheduler: Any, prompts: str) -> None:
    """Say which prompts come next: trees are built in the background, and other engines' rollouts of them fetched.

    Args:
        prompts: a JSON array; of each prompt its token ids, or the key (an int or a name) that its requests give.

    Raises:
        TypeError, ValueError: no JSON array, or something else in it.
    """
    items = json.loads(prompts)
    if not isinstance(items, list):
        raise ValueError(f"prompts holds a {type(items).__name__}; it must be a JSON array")
    keys = [das.prompt_key(item) if isinstance(item, list) else named_prompt_key(item) for item in items]
    _drafting(scheduler).prepare(keys)


def das_configure(scheduler: Any, **changes: Any) -> None:
    """Change `policy`, `shape`, `widths` ("0,3,7") or `noise_seed` (-1: none) of the running engine.

    Raises what `Drafting.configure` raises.
    """
    if changes.get("noise_seed") == -1:
        changes["noise_seed"] = None
    if isinstance(changes.get("widths"), str):
        changes["widths"] = tuple(int(width) for width in changes["widths"].split(","))
    _drafting(scheduler).configure(**changes)


def das_forget(scheduler: Any) -> None:
    """Begin anew: an empty history, nothing learned, and drafting on if a fault had switched it off."""
    _drafting(scheduler).forget()


def das_save_state(scheduler: Any, path: str) -> None:
    """Save history, confidence and policy to a directory, only what changed since the last save; from the first rank.

    Raises what `das.save_state` raises. The directory holds the state before then.
    """
    if _is_first_rank():
        _drafting(scheduler).save(path)


def das_load_state(scheduler: Any, path: str) -> None:
    """Take in what `das_save_state` has saved, on every rank, which must all see the directory.

    The policy's state is taken in where the policy is of the class that was saved.

    Raises:
        ValueError: as `das.load_state`, or a token is not in the model's vocabulary. Nothing changes then, on any rank.
    """
    drafting = _drafting(scheduler)

    def read() -> tuple[das.SavedState, object]:
        saved = drafting.read_state(path)
        return saved, saved.save_id

    drafting.restore(_alike_on_all_ranks(scheduler, read))


def das_statistics(scheduler: Any, path: str) -> None:
    """Write the statistics as JSON, from the first rank; `/server_info` has them, too."""
    if _is_first_rank():
        Path(path).write_text(json.dumps(_drafting(scheduler).statistics()), encoding="utf-8")


METHODS: tuple[Callable[..., None], ...] = (
    *(das_push, das_new_training_step, das_prepare, das_configure, das_forget),
    *(das_save_state, das_load_state, das_statistics),
)


def _alike_on_all_ranks(scheduler: Any, read: Callable[[], tuple[_T, object]]) -> _T:
    """Read what all ranks take in, or none: ranks that draft from different histories wait for each other forever.

    Args:
        read: returns what was read, and what tells it from other contents.

    Raises:
        what `read` raises; ValueError: it raised on another rank, or returned something else there.
    """
    found, mark, problem = None, None, None
    try:
        found, mark = read()
    except Exception as error:
        problem = error
    group = scheduler.tp_group
    if group.world_size > 1:
        told = group.all_gather_object((None if problem is None else str(problem), mark))
        for rank, (text, other) in enumerate(told):
            if problem is None and text is not None:
                problem = ValueError(f"rank {rank}: {text}")
            elif problem is None and other != mark:
                problem = ValueError(f"rank {rank} reads something else there; all ranks must see the same files")
    if problem is not None:
        raise problem
    return found  # type: ignore[return-value]  # read() has not raised


def _is_first_rank() -> bool:
    from sglang.srt.runtime_context import get_parallel

    return bool(get_parallel().tp_rank == 0)


def _add_statistics(result: Any, controller: Any, state: dict[str, Any]) -> None:
    """After SGLang has told of its speculation: tell of das'."""
    drafting = getattr(controller.scheduler.draft_worker, "drafting", None)
    if drafting is not None:
        state["das"] = drafting.statistics()


def _drafting(scheduler: Any) -> Drafting:
    drafting = getattr(scheduler.draft_worker, "drafting", None)
    if not isinstance(drafting, Drafting):
        raise ValueError("this engine does not draft with das: start it with --speculative-algorithm DAS")
    return drafting


def _parsed(rollouts: str, path: str) -> list[das.Rollout]:
    if bool(rollouts) == bool(path):
        raise ValueError("give either rollouts or path")
    if rollouts:
        items = json.loads(rollouts)
        if not isinstance(items, list):
            raise ValueError(f"rollouts holds a {type(items).__name__}; it must be a JSON array")
    else:
        items = [_row(line) for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]
    return rollouts_of_fields(items)


def _row(line: str) -> Any:
    """A line of a log: other fields are ignored there, and null is as if it were not there."""
    row = json.loads(line)
    if isinstance(row, dict):
        return {name: value for name, value in row.items() if name in _FIELDS and value is not None}
    return row
