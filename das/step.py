"""plan_step: the one place where budget meets draft. Replay and both engines call it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from das._live_requests import Draft
from das.budget import BudgetPolicy
from das.drafter import Drafter
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
) -> dict[str, Draft]:
    """Draft for the requests of one decode step, each under the budget that the policy gives it now.

    The policy first hears how the drafts since the last call fared. Engine limits are applied before drafts are
    recorded, so a clipped token is never counted as drafted. Called again without `extend`, it replaces the pending
    drafts, whose predictions are not scored.

    Args:
        request_ids: running requests, each at most once.
        policy: see `das.budget`.
        num_running: requests in the engine's batch now, where that is more than the ids given.
        max_draft_tokens: the engine's own limits, by request; None: none.
        max_batch_draft_tokens: the engine's limit for the step; the least likely tokens are cut. None: none.
        step_ms: how long the last decode step took, for policies that learn the latency; None: not measured.

    Returns:
        {request_id: Draft} in the order given; an empty draft is an ordinary answer.

    Raises:
        KeyError: unknown request. ValueError: a request named twice, or a negative limit. Nothing changes then.

    Complexity: O(drafted tokens), whatever the history holds.
    """
    if max_batch_draft_tokens is not None:
        check_int(max_batch_draft_tokens, "max_batch_draft_tokens", below=1 << 62)
    if max_draft_tokens and min(max_draft_tokens.values()) < 0:
        raise ValueError(f"max_draft_tokens holds {min(max_draft_tokens.values())}; a limit is at least 0")
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
        )


def _within_limits(
    request_ids: Sequence[str], caps: npt.NDArray[np.int64], limits: Mapping[str, int] | None
) -> npt.NDArray[np.int64]:
    """Lower the policy's caps to the engine's limits; a request the engine does not name keeps its cap."""
    if not limits:
        return caps
    by_request = [limits.get(request_id, int(cap)) for request_id, cap in zip(request_ids, caps, strict=True)]
    return np.minimum(caps, np.array(by_request, np.int64))
