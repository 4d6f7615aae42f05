"""plan_step: the one place where budget meets draft. Replay and both engines call it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from das._draft import MAX_DRAFT_TOKENS
from das._drafts import Draft
from das.budget import BudgetPolicy, FloatArray, IntArray, RunningRequests, caps_array, prices_array
from das.checked_values import check_int
from das.drafter import NO_LIMIT, Drafter, Shape, check_shape

FILL_SURVIVAL = 0.1  # draft at least so far before a width is chosen; less likely tokens hardly move the choice


class StepDrafts(dict[str, Draft]):
    """{request_id: Draft} of one decode step.

    Attributes:
        width: draft tokens that the engine shall verify of each request, shorter drafts padded by it; None: as many as
            each draft has.
    """

    width: int | None = None


def plan_step(
    drafter: Drafter,
    request_ids: Sequence[str],
    *,
    policy: BudgetPolicy,
    num_running: int | None = None,
    num_waiting: int = 0,
    max_draft_tokens: Mapping[str, int] | None = None,
    max_batch_draft_tokens: int | None = None,
    step_ms: float | None = None,
    shape: Shape = "chain",
    widths: Sequence[int] | None = None,
) -> StepDrafts:
    """Draft for the requests of one decode step, each under the budget that the policy gives it now.

    The policy first hears how the drafts since the last call fared. Engine limits are applied before drafts are
    recorded, so a clipped token is never counted as drafted. Called again without `extend`, it replaces the pending
    drafts, whose predictions are not scored.

    Args:
        request_ids: running requests, each at most once.
        policy: see `das.budget`.
        num_running: requests in the engine's batch now, where that is more than the ids given.
        num_waiting: requests that wait for a place in the batch. While there are any, policies that know of lengths
            care less about which request ends last.
        max_draft_tokens: the engine's own limits, by request; None: none. A request not named has none; the limit of a
            request that `request_ids` does not name is checked and ignored.
        max_batch_draft_tokens: the engine's limit for the step; the least likely tokens are cut. None: none.
        step_ms: how long the last decode step took, for policies that learn the latency; None: not measured.
        shape: "chain", or "tree" for engines that verify trees: DraftTrees, with several tokens at one position where
            the second-best is likelier than one more token at the end. Caps and limits count all tokens of a tree;
            `extend` takes the emitted tokens, and finds the accepted path itself.
        widths: for engines that verify one width for the whole batch: the draft tokens a request that they can verify,
            0..64 each, ascending. The policy's `choose_width` picks one: the result's `width`. Prices
            above 0.1 are lowered to that before, since padding costs as much as drafting. A policy without keeps its
            prices, and gets the smallest width that holds its longest draft. Drafts are cut to the width before they
            are recorded, and padding never counts as drafted. Of `max_batch_draft_tokens`, padding takes its part: a
            width beyond it is not chosen unless it is the smallest. None: each draft is verified at its own length.

    Returns:
        {request_id: Draft} in the order given, of DraftTrees if asked for; an empty draft is an ordinary answer. The
        dictionary has an attribute `width`.

    Raises:
        KeyError: unknown request. TypeError: no drafter, no policy, request_ids that are no sequence of str, a limit
        that is no int, a time that is no number.
        ValueError: a request named twice, a negative limit, another shape, or bad widths. Nothing changes then.
        TypeError, ValueError: the policy's caps and prices are not one int and one number a request, or out of range,
        or its width is none of `widths`; the policy has heard how its drafts fared then, and in the last case the
        pending drafts are empty.
        Whatever `policy` raises: what its `observe` or `observe_finished` was told then, it is not told again. Feedback
        of the step, or the rollouts that finished, are lost to it; drafts and the history are as before.

    Complexity: O(drafted tokens), whatever the history holds.
    """
    if not isinstance(drafter, Drafter):
        raise TypeError(f"drafter must be a Drafter, not {type(drafter).__name__}")
    _check_policy(policy)
    if not isinstance(request_ids, (list, tuple)):
        _check_sequence(request_ids)
    check_shape(shape)
    if max_batch_draft_tokens is not None:
        check_int(max_batch_draft_tokens, "max_batch_draft_tokens", below=NO_LIMIT)
    if max_draft_tokens is not None:
        _check_limits(max_draft_tokens)
    if step_ms is not None:
        step_ms = _milliseconds(step_ms)
    choice = None if widths is None else _WidthChoice(policy, check_widths(widths), max_batch_draft_tokens)
    hears_finished = hasattr(policy, "observe_finished")
    request_ids = list(request_ids)
    with drafter.history.lock:  # no request may end between the budget and the draft
        try:
            running = drafter.running(request_ids, num_running=num_running, num_waiting=num_waiting)
        except TypeError:
            _check_ids(request_ids)  # an id that cannot be looked up
            raise
        drafted, accepted = drafter.take_feedback()
        if len(drafted) or step_ms is not None:
            policy.observe(drafted, accepted, step_ms=step_ms)
        if hears_finished:
            finished = drafter.take_finished()
            if len(finished):
                policy.observe_finished(finished)  # type: ignore[attr-defined]  # an optional method
        caps, prices = policy.budgets(running)
        caps = _within_limits(request_ids, caps, max_draft_tokens)
        if choice is not None:
            caps, prices = choice.budgets(running, caps, prices)
        drafts = StepDrafts(
            drafter.draft(
                request_ids,
                max_draft_tokens=caps,
                min_survival=prices,
                max_batch_draft_tokens=max_batch_draft_tokens,
                shape=shape,
                choose_width=choice,
            )
        )
        drafts.width = None if choice is None else choice.width
        return drafts


class _WidthChoice:
    """Which of the widths a decode step is verified at.

    Args:
        widths: ascending.
        max_batch_draft_tokens: the engine's limit, padding included; None: none.
    """

    def __init__(self, policy: BudgetPolicy, widths: tuple[int, ...], max_batch_draft_tokens: int | None) -> None:
        self._choose = getattr(policy, "choose_width", None)
        self._widths = widths
        self._max_tokens = max_batch_draft_tokens
        self.width: int | None = None

    def budgets(self, running: RunningRequests, caps: IntArray, prices: Any) -> tuple[IntArray, FloatArray]:
        """Take note of the step, and return caps and prices to draft at before the width is known."""
        prices = prices_array(prices, num_requests=len(running))
        if self._max_tokens is not None:
            fitting = tuple(width for width in self._widths if width * len(running) <= self._max_tokens)
            self._widths = fitting or self._widths[:1]
        self._running = running
        caps = np.where(caps > self._widths[-1], self._widths[-1], caps)
        if self._choose is not None:  # a price above 1 is an off switch, and stays one
            prices = np.where(prices > FILL_SURVIVAL, np.where(prices > 1.0, prices, FILL_SURVIVAL), prices)
        return caps, prices

    def __call__(self, expected_accepted: list[float]) -> int:
        """Return the width, and remember it."""
        if self._choose is None:
            longest = sum(expected > 0.0 for expected in expected_accepted)
            width = next((width for width in self._widths if width >= longest), self._widths[-1])
        else:
            chosen = self._choose(self._running, expected_accepted, self._widths)
            is_int = isinstance(chosen, (int, np.integer)) and not isinstance(chosen, bool)
            if not is_int or chosen not in self._widths:
                raise ValueError(f"the policy's width is {chosen!r}; it must be one of {self._widths}")
            width = int(chosen)
        self.width = width
        return width


def check_widths(widths: Sequence[int]) -> tuple[int, ...]:
    """Return the widths as a tuple.

    Raises:
        TypeError: no sequence of ints. ValueError: none at all, one out of 0..64, or not in ascending order.
    """
    if isinstance(widths, (str, bytes, Mapping)) or not isinstance(widths, Sequence):
        raise TypeError(f"widths must be a sequence of ints, not {type(widths).__name__}")
    if not widths:
        raise ValueError("widths is empty; it must name at least one width")
    for position, width in enumerate(widths):
        if isinstance(width, bool) or not isinstance(width, int):
            raise TypeError(f"widths[{position}] is {width!r}, of type {type(width).__name__}; it must hold ints")
        if not 0 <= width <= MAX_DRAFT_TOKENS:
            raise ValueError(f"widths[{position}] is {width}; it must be 0 <= width <= {MAX_DRAFT_TOKENS}")
        if position and width <= widths[position - 1]:
            raise ValueError(f"widths[{position}] is {width} after {widths[position - 1]}; widths must ascend")
    return tuple(widths)


def _milliseconds(step_ms: Any) -> float:
    """A measured time; one that is no time (NaN, negative, beyond a float) is for the policy to ignore and to count."""
    if isinstance(step_ms, bool) or not isinstance(step_ms, (int, float, np.integer, np.floating)):
        raise TypeError(f"step_ms must be a number or None, not {type(step_ms).__name__}")
    try:
        return float(step_ms)
    except OverflowError:
        return math.inf


def _check_policy(policy: Any) -> None:
    methods = ("budgets", "observe")
    if isinstance(policy, type) or not all(callable(getattr(policy, name, None)) for name in methods):
        shown = f"the class {policy.__name__}" if isinstance(policy, type) else type(policy).__name__
        raise TypeError(f"policy must be a budget policy, an object with budgets and observe (das.budget), not {shown}")


def _check_sequence(request_ids: Any) -> None:
    if isinstance(request_ids, (str, bytes)) or not isinstance(request_ids, Iterable):
        raise TypeError(f"request_ids must be a sequence of str, not {type(request_ids).__name__}")


def _check_ids(request_ids: list[str]) -> None:
    for position, request_id in enumerate(request_ids):
        if not isinstance(request_id, str):
            raise TypeError(f"request_ids[{position}] must be a str, not {type(request_id).__name__}") from None


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
