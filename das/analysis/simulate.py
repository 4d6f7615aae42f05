"""Simulate how long engines take to generate a log: batches that refill, workers, training beside generation.

A simulation of discrete events. The drafter is real: each worker has one, drafts through `plan_step` and emits what was
logged (`das.analysis.replay` says why that estimates acceptance without bias). Only the clock is simulated: a pass
takes what a latency model says.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from das.analysis.decoding import Decoding, Observer
from das.analysis.events import Assignment, Events, check_assignment
from das.analysis.logged_request import logged_batches
from das.analysis.projection import Projection
from das.analysis.worker import Execution, Undrafted, check_execution
from das.budget import BudgetPolicy, UnlimitedBudget
from das.checked_values import check_int
from das.drafter import Drafter, Shape, check_shape
from das.history import RolloutHistory
from das.latency import DEFAULT_LATENCY, LatencyModel
from das.length_budget import LengthAwareBudget
from das.rollout import Rollout
from das.step import check_widths

Policy = BudgetPolicy | Callable[[], BudgetPolicy]

WORKERS_BELOW = 1 << 20
MOST_TIME = 1e9  # of what is given in seconds or milliseconds


def simulate(
    log: Iterable[Rollout],
    *,
    policy: Policy | None = None,
    latency: LatencyModel = DEFAULT_LATENCY,
    group_size: int = 8,
    num_workers: int = 1,
    max_running: int | None = None,
    assignment: Assignment = "prompt",
    lag: int = 0,
    train_s: float = 0.0,
    execution: Execution = "coupled",
    draft_token_ms: float = 0.0,
    racing_policy: Policy | None = None,
    history: Iterable[Rollout] = (),
    window_epochs: int = 4,
    max_bytes: int = 8 << 30,
    shape: Shape = "chain",
    widths: Sequence[int] | None = None,
    observer: Observer | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Projection:
    """Simulate the generation of a log with drafts and without, and the training steps after its batches.

    A batch holds `group_size` samples of each prompt of a training step, as in `das.analysis.replay`; its requests are
    dealt to the workers in order. A worker starts waiting requests while it has room and decodes all that run, one pass
    after the other. Each worker has a drafter, a history and a policy of its own. Siblings on one worker see each
    other's tokens as they come; what the others generated, a worker learns when the batch has ended.

    Batch t can start once the training step on batch t - 1 - lag has ended, and is trained on once all of it, and the
    training step before, are done. At lag 0 training is synchronous: generation waits while it runs. Else requests of
    several batches run together.

    Not simulated: prefill of prompts, limits of KV memory, preemption, time spent in environments, and weights that
    change while a request runs.

    Args:
        log: rollouts, in file order; without a training step they count as step 0.
        policy: who may draft how much: makes one for each worker, or is copied for each. None: LengthAwareBudget of
            this latency.
        latency: what a pass takes; without drafts, c_engine is not paid.
        group_size: samples of a prompt in a batch, >= 1.
        num_workers: engines, >= 1.
        max_running: requests that run at once on a worker, >= 1; None: all it has.
        assignment: of a batch's requests to workers. "prompt": as many prompts to each, in order, samples together.
            "round-robin": request by request. "longest-first": the longest first, each to the worker with fewest tokens
            so far, by the logged lengths, which nobody knows beforehand. "shared-queue": whoever has room takes the
            next.
        lag: training steps that generation may run ahead, >= 0.
        train_s: what a training step takes beside generation, >= 0.
        execution: "coupled": a pass verifies what was drafted before it. "decoupled": the drafter runs ahead on
            hardware of its own, as `das.analysis.worker.Worker` says. "fastest-of-n": coupled, and a worker that has
            nothing left to do runs a copy of another one's request, the one with the fewest tokens per decode step;
            who ends first wins. A copy starts with a pass over its context; it emits what was logged, as the original
            does, whereas samples of an engine would part ways. With lag 0 only.
        draft_token_ms: of a drafter that computes on the device: of one more draft token, for all requests together.
            Coupled passes wait for the longest draft, decoupled ones run beside it. 0: drafting costs no time, as
            that of das, which is measured instead: Projection.plan_s.
        racing_policy: of copies in "fastest-of-n"; None: UnlimitedBudget().
        history: rollouts that all workers know before the first batch.
        window_epochs, max_bytes: of the histories.
        shape, widths: as of `plan_step`; decoupled execution knows chains of any length only.
        observer: who is told of each step of the run with drafts, copies of requests left out; None: nobody.
        progress: is called with (tokens done, tokens in all).

    Returns:
        the projection.

    Raises:
        TypeError, ValueError: an argument of the wrong kind or out of range, or an empty log.

    Complexity: O(decode steps) time; the log stays in memory.
    """
    batches = logged_batches(log, group_size=group_size)
    if lag and any(batch.turn for batch in batches):
        raise ValueError(f"lag is {lag}, and turns of one conversation are rollouts of their own; these need lag 0")
    _check_engines(num_workers=num_workers, max_running=max_running, lag=lag, latency=latency)
    _check_times(train_s=train_s, draft_token_ms=draft_token_ms)
    check_assignment(assignment)
    check_execution(execution)
    check_shape(shape)
    widths = None if widths is None else check_widths(widths)
    is_racing, is_decoupled = execution == "fastest-of-n", execution == "decoupled"
    if is_decoupled and (shape != "chain" or widths is not None):
        raise ValueError("execution is 'decoupled'; it goes with shape 'chain' and without widths")
    if is_racing and lag:
        raise ValueError(f"execution is 'fastest-of-n' and lag {lag}; idle workers race with lag 0 only")
    policies = _policies(LengthAwareBudget(latency=latency) if policy is None else policy, num_workers)
    racing = _policies(UnlimitedBudget() if racing_policy is None else racing_policy, num_workers)
    known = list(history)
    drafters = [_drafter(known, window_epochs=window_epochs, max_bytes=max_bytes) for _ in range(num_workers)]
    decodings, racers = (
        [
            Decoding(drafter, policy=own, shape=shape, widths=widths, observer=watching)
            for drafter, own in zip(drafters, some, strict=True)
        ]
        for some, watching in ((policies, observer), (racing, None))
    )
    settings: dict[str, Any] = {
        "policy": repr(policies[0]),
        "latency": repr(latency),
        "group_size": group_size,
        "num_workers": num_workers,
        "max_running": max_running,
        "assignment": assignment,
        "lag": lag,
        "train_s": train_s,
        "execution": execution,
        "draft_token_ms": draft_token_ms,
        "racing_policy": repr(racing[0]) if is_racing else None,
        "shape": shape,
        "widths": None if widths is None else list(widths),
        "window_epochs": window_epochs,
        "max_bytes": max_bytes,
        "num_rollouts": sum(len(batch.rollouts) for batch in batches),
        "num_known_rollouts": len(known),
    }
    common: dict[str, Any] = {
        "latency": latency,
        "max_running": max_running,
        "assignment": assignment,
        "lag": lag,
        "train_ms": 1e3 * train_s,
    }
    events = Events(
        batches,
        decodings,
        racers=racers if is_racing else None,
        is_decoupled=is_decoupled,
        draft_token_ms=draft_token_ms,
        **common,
    )
    with_drafts = events.run(progress=progress)
    return Projection(
        settings=settings,
        with_drafts=with_drafts,
        without_drafts=Events(batches, [Undrafted() for _ in range(num_workers)], **common).run(),
        plan_s=sum(decoding.plan_s for decoding in (*decodings, *racers)),
        extend_s=sum(decoding.extend_s for decoding in (*decodings, *racers)),
        num_planned=sum(decoding.num_planned for decoding in (*decodings, *racers)),
    )


def _policies(policy: Policy, number: int) -> list[BudgetPolicy]:
    """One policy a worker: made anew, or copied."""
    make: Any = policy if isinstance(policy, type) or not hasattr(policy, "budgets") else partial(copy.deepcopy, policy)
    if not callable(make):
        raise TypeError(f"policy must be a budget policy, or make one, not {type(policy).__name__}")
    return [make() for _ in range(number)]


def _drafter(known: list[Rollout], *, window_epochs: int, max_bytes: int) -> Drafter:
    history = RolloutHistory(window_epochs=window_epochs, max_bytes=max_bytes)
    history.add_many(known)
    return Drafter(history)


def _check_engines(*, num_workers: int, max_running: int | None, lag: int, latency: Any) -> None:
    check_int(num_workers, "num_workers", below=WORKERS_BELOW)
    if max_running is not None:
        check_int(max_running, "max_running", below=1 << 62)
    if num_workers == 0 or max_running == 0:
        raise ValueError("num_workers or max_running is 0; each must be at least 1")
    check_int(lag, "lag", below=1 << 62)
    if not isinstance(latency, LatencyModel):
        raise TypeError(f"latency must be a LatencyModel, not {type(latency).__name__}")


def _check_times(**times: Any) -> None:
    for name, value in times.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{name} must be a number, not {type(value).__name__}")
        if not 0.0 <= value <= MOST_TIME:
            raise ValueError(f"{name} is {value}; it must be 0 <= {name} <= 1e9")
