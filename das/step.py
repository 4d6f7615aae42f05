"""plan_step: the one place where budget meets draft. Replay and both engines call it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from das._drafts import Draft
from das.budget import BudgetPolicy, IntArray, caps_array
from das.drafter import NO_LIMIT, Drafter, Shape, check_shape
from das.rollout import check_int


def plan_step(
    drafter: Drafter,
    request_ids: Sequence[str],
    *,
    policy: BudgetPolicy,
    num_running: int | None = None,
    max_draft_tokens: Mapping[str, int] | None = None,
    max_batch_draft_tokens: int | None = None,
    step_ms: float | None = None,
    shape: Shape = "chain",
) -> dict[str, Draft]:
    """Draft for the requests of one decode step, each under the budget that the policy gives it now.

    The policy first hears how the drafts since the last call fared. Engine limits are applied before drafts are
    recorded, so a clipped token is never counted as drafted. Called again without `extend`, it replaces the pending
    drafts, whose predictions are not scored.

    Args:
        request_ids: running requests, each at most once.
        policy: see `das.budget`.
        num_running: requests in the engine's batch now, where that is more than the ids given.
        max_draft_tokens: the engine's own limits, by request; None: none. A request not named has none; the limit of a
            request that `request_ids` does not name is checked and ignored.
        max_batch_draft_tokens: the engine's limit for the step; the least likely tokens are cut. None: none.
        step_ms: how long the last decode step took, for policies that learn the latency; None: not measured.
        shape: "chain", or "tree" for engines that verify trees: DraftTrees, with several tokens at one position where
            the second-best is likelier than one more token at the end. Caps and limits count all tokens of a tree;
            `extend` takes the emitted tokens, and finds the accepted path itself.

    Returns:
        {request_id: Draft} in the order given, of DraftTrees if asked for; an empty draft is an ordinary answer.

    Raises:
        KeyError: unknown request. TypeError: no drafter, no policy, or a limit that is no int. ValueError: a request
        named twice, a negative limit, or another shape. Nothing changes then. TypeError, ValueError: the policy's caps
        and prices are not one int and one number a request, or out of range; the policy has heard how its drafts fared
        then.

    Complexity: O(drafted tokens), whatever the history holds.
    """
    if not isinstance(drafter, Drafter):
        raise TypeError(f"drafter must be a Drafter, not {type(drafter).__name__}")
    _check_policy(policy)
    check_shape(shape)
    if max_batch_draft_tokens is not None:
        check_int(max_batch_draft_tokens, "max_batch_draft_tokens", below=NO_LIMIT)
    if max_draft_tokens is not None:
        _check_limits(max_draft_tokens)
    request_ids = list(request_ids)
    with drafter.history.lock:  # no request may end between the budget and the draft
        running = drafter.running(request_ids, num_running=num_running)
        drafted, accepted = drafter.take_feedback()
        if len(drafted) or step_ms is not None:
            policy.observe(drafted, accepted, step_ms=step_ms)
        caps, prices = policy.budgets(running)
        return drafter.draft(
            request_ids,
            max_draft_tokens=_within_limits(request_ids, caps, max_draft_tokens),
            min_survival=prices,
            max_batch_draft_tokens=max_batch_draft_tokens,
            shape=shape,
        )


def _check_policy(policy: Any) -> None:
    methods = ("budgets", "observe")
    if isinstance(policy, type) or not all(callable(getattr(policy, name, None)) for name in methods):
        shown = f"the class {policy.__name__}" if isinstance(policy, type) else type(policy).__name__
        raise TypeError(f"policy must be a budget policy, an object with budgets and observe (das.budget), not {shown}")


def _check_limits(limits: Mapping[str, int]) -> None:
    if not isinstance(limits, Mapping):
        raise TypeError(f"max_draft_tokens must be a mapping from request_id to an int, not {type(limits).__name__}")
    for request_id, limit in limits.items():
        if type(limit) is not int or not 0 <= limit < NO_LIMIT:
            check_int(limit, f"max_draft_tokens[{request_id!r}]", below=NO_LIMIT)


def _within_limits(request_ids: Sequence[str], caps: Any, limits: Mapping[str, int] | None) -> IntArray:
    """Lower the policy's caps to the engine's limits; a request the engine does not name keeps its cap."""
    if not limits:
        return caps_array(caps, num_requests=len(request_ids))
    by_request = [limits.get(request_id, NO_LIMIT) for request_id in request_ids]
    return np.minimum(caps_array(caps, num_requests=len(request_ids)), np.array(by_request, np.int64))
