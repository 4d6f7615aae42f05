"""What a history of rollouts says of itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HistoryStatistics:
    """What a RolloutHistory holds and has done so far.

    Args:
        num_prompts, num_rollouts, num_tokens: what is stored; tokens of responses only.
        num_trees: prompts whose tree is in memory.
        rollout_bytes, tree_bytes: memory held by token ids and bookkeeping, and by prompts' trees.
        common_bytes: memory held by the text that prompts without history share.
        num_added, num_updated: rollouts taken in, and known ones whose reward or step was updated.
        num_restored: rollouts taken in from a saved state, which policies do not hear of.
        num_late: rollouts dropped on arrival because their epoch had left the window.
        num_expired: rollouts dropped because their epoch left the window.
        num_evicted_trees, num_evicted_rollouts: dropped to keep `max_bytes`.
        num_builds_ahead, num_builds_on_start: trees built in the background, and while a request waited.
    """

    num_prompts: int = 0
    num_rollouts: int = 0
    num_tokens: int = 0
    num_trees: int = 0
    rollout_bytes: int = 0
    tree_bytes: int = 0
    common_bytes: int = 0
    num_added: int = 0
    num_updated: int = 0
    num_restored: int = 0
    num_late: int = 0
    num_expired: int = 0
    num_evicted_trees: int = 0
    num_evicted_rollouts: int = 0
    num_builds_ahead: int = 0
    num_builds_on_start: int = 0
