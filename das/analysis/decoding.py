"""Decode steps of logged requests on one drafter: what replay and simulation share."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from das._drafts import Draft
from das.analysis.logged_request import LoggedRequest
from das.budget import BudgetPolicy
from das.drafter import Drafter, Shape
from das.metrics import AcceptanceCounters
from das.step import StepDrafts, plan_step


@dataclass(frozen=True, slots=True)
class DecodedStep:
    """What one decode step of several requests did.

    Args:
        num_emitted_tokens: of all requests.
        num_drafted_tokens: verified beside a token a request.
        num_padded_tokens: verified beside those, as all requests of a pass have one width.
        longest_draft_tokens: of one request.
        num_environment_tokens: that came from outside right after it.
        rejected: the requests whose draft was not accepted as a whole; only told where no bonus token is sampled.
    """

    num_emitted_tokens: int
    num_drafted_tokens: int
    num_padded_tokens: int
    longest_draft_tokens: int
    num_environment_tokens: int
    rejected: tuple[str, ...] = ()


class Observer(Protocol):
    """Who watches requests decode; see `das.analysis.recording`. It changes nothing, and its time is nobody's."""

    def started(self, drafter: Drafter, request: LoggedRequest) -> None:
        """A request was started."""

    def drafted(
        self,
        drafter: Drafter,
        requests: Sequence[LoggedRequest],
        drafts: StepDrafts,
        emitted: Mapping[str, list[int]],
        *,
        num_running: int,
    ) -> None:
        """Requests were drafted for, and emit that; the drafter has not taken it in yet."""

    def finished(self, request: LoggedRequest, counters: AcceptanceCounters) -> None:
        """A request has ended."""


class Decoding:
    """Logged requests that decode on one drafter, each step through `plan_step` and `extend_batch`.

    Args:
        drafter: where they run.
        policy: who may draft how much. One with a method `foretell(remaining, waiting)` hears before each decode step
            how many response tokens each request, and each waiting one in order, is still to get (lists of ints): the
            future, which only an upper bound of what policies could do may know.
        shape, widths: as of `plan_step`.
        observer: who is told of each step; None: nobody.

    Attributes:
        plan_s, extend_s: time spent on drafting, and on taking in emitted tokens.
        num_planned: requests, summed over decode steps.
    """

    def __init__(
        self,
        drafter: Drafter,
        *,
        policy: BudgetPolicy,
        shape: Shape = "chain",
        widths: Sequence[int] | None = None,
        observer: Observer | None = None,
    ) -> None:
        self.drafter = drafter
        self._observer = observer
        self._plan = partial(plan_step, drafter, policy=policy, shape=shape, widths=widths)
        self._foretell = getattr(policy, "foretell", None)
        self._before: dict[str, AcceptanceCounters] = {}  # by request id, of those that had begun elsewhere
        self.plan_s = self.extend_s = 0.0
        self.num_planned = 0

    def start(self, request: LoggedRequest) -> None:
        """Start a request where it stands; environment tokens that come next are taken in at once."""
        rollout, request_id = request.rollout, request.request_id
        self.drafter.start(
            request_id,
            prompt_token_ids=rollout.prompt_token_ids,
            prompt_key=rollout.prompt_key,
            training_step=rollout.training_step or 0,
        )
        if self._observer is not None:
            self._observer.started(self.drafter, request)
        if request.position:
            for token_ids, is_generated in request.stretches():
                self.drafter.extend(request_id, token_ids, generated=is_generated)
            self._before[request_id] = self.drafter.counters(request_id)
        self._enter_environment(request)

    def step(
        self,
        requests: Sequence[LoggedRequest],
        *,
        num_running: int,
        waiting: Sequence[LoggedRequest] = (),
        step_ms: float | None = None,
        with_bonus: bool = True,
    ) -> DecodedStep:
        """Run one decode step of the requests, none of which is done.

        Args:
            num_running, step_ms: as of `plan_step`.
            waiting: requests that wait for a place in the batch.
            with_bonus: as of `LoggedRequest.emit`.

        Complexity: O(emitted + drafted tokens).
        """
        if self._foretell is not None:
            self._foretell(*([len(r.tokens) - r.position for r in some] for some in (requests, waiting)))
        start_s = time.perf_counter()
        drafts = self._plan(
            [request.request_id for request in requests],
            num_running=num_running,
            num_waiting=len(waiting),
            step_ms=step_ms,
        )
        planned_s = time.perf_counter()
        emitted = {
            request.request_id: request.emit(draft, with_bonus=with_bonus)
            for request, draft in zip(requests, drafts.values(), strict=True)
        }
        if self._observer is not None:
            self._observer.drafted(self.drafter, requests, drafts, emitted, num_running=num_running)
        emitted_s = time.perf_counter()
        self.drafter.extend_batch(emitted)
        self.plan_s += planned_s - start_s
        self.extend_s += time.perf_counter() - emitted_s
        self.num_planned += len(requests)
        lengths = list(map(len, drafts.values()))
        num_drafted = sum(lengths)
        return DecodedStep(
            num_emitted_tokens=sum(map(len, emitted.values())),
            num_drafted_tokens=num_drafted,
            num_padded_tokens=0 if drafts.width is None else drafts.width * len(requests) - num_drafted,
            longest_draft_tokens=max(lengths, default=0),
            num_environment_tokens=sum(
                [self._enter_environment(request) for request in requests if request.position == request.pause]
            ),
            rejected=() if with_bonus else _rejected(drafts, emitted),
        )

    def finish(self, request: LoggedRequest, *, keep: bool = True) -> AcceptanceCounters:
        """End a request; its response enters the history if it is to be kept. What it started with is not counted."""
        counters = self.drafter.finish(request.request_id, reward=request.rollout.reward, keep=keep)
        counters -= self._before.pop(request.request_id, AcceptanceCounters())
        if self._observer is not None:
            self._observer.finished(request, counters)
        return counters

    def tokens_per_decode_step(self, request: LoggedRequest) -> float:
        """Return what a running request has emitted in a decode step on average."""
        return self.drafter.counters(request.request_id).tokens_per_decode_step

    def _enter_environment(self, request: LoggedRequest) -> int:
        token_ids = request.take_environment()
        if token_ids:
            self.drafter.extend(request.request_id, token_ids, generated=False)
        return len(token_ids)


def _rejected(drafts: Mapping[str, Draft], emitted: Mapping[str, list[int]]) -> tuple[str, ...]:
    """The requests that emitted another token than their draft holds there."""
    return tuple(
        request_id
        for request_id, draft in drafts.items()
        if len(draft) and emitted[request_id] != draft.draft_token_ids[: len(emitted[request_id])]
    )
