"""One engine of a simulation: a queue, a batch that refills, and a clock that a latency model moves."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Literal, Protocol, get_args

from das.analysis.decoding import DecodedStep
from das.analysis.logged_request import LoggedRequest
from das.latency import LatencyModel
from das.metrics import AcceptanceCounters

Execution = Literal["coupled", "decoupled", "fastest-of-n"]


def check_execution(execution: Execution) -> None:
    """Raise ValueError for what is no execution."""
    if execution not in get_args(Execution):
        raise ValueError(f"execution is {execution!r}; it must be one of {', '.join(get_args(Execution))}")


class Decodes(Protocol):
    """How a worker's requests decode: `das.analysis.decoding.Decoding`, or `Undrafted`."""

    def start(self, request: LoggedRequest) -> None: ...
    def step(
        self,
        requests: Sequence[LoggedRequest],
        *,
        num_running: int,
        waiting: Sequence[LoggedRequest] = (),
        step_ms: float | None = None,
        with_bonus: bool = True,
    ) -> DecodedStep: ...
    def finish(self, request: LoggedRequest, *, keep: bool = True) -> AcceptanceCounters: ...
    def tokens_per_decode_step(self, request: LoggedRequest) -> float: ...


class Undrafted:
    """Requests that decode in an engine without speculation, one token a step."""

    def start(self, request: LoggedRequest) -> None:
        """Start a request."""
        request.take_environment()

    def step(
        self,
        requests: Sequence[LoggedRequest],
        *,
        num_running: int,
        waiting: Sequence[LoggedRequest] = (),
        step_ms: float | None = None,
        with_bonus: bool = True,
    ) -> DecodedStep:
        """Run one decode step of the requests, none of which is done. O(requests)."""
        num_environment = 0
        for request in requests:
            request.position += 1
            if request.position == request.pause:
                num_environment += len(request.take_environment())
        return DecodedStep(len(requests), 0, 0, 0, num_environment)

    def finish(self, request: LoggedRequest, *, keep: bool = True) -> AcceptanceCounters:
        """End a request."""
        num_tokens = sum(len(tokens) for tokens, is_generated in request.stretches() if is_generated)
        return AcceptanceCounters(num_decode_steps=num_tokens, num_emitted_tokens=num_tokens)

    def tokens_per_decode_step(self, request: LoggedRequest) -> float:
        """Return 1."""
        return 1.0


class Worker:
    """One engine: it admits waiting requests while it has room, and decodes all that run, one pass after the other.

    In decoupled execution a drafter on hardware of its own drafts the next window while this one is verified. A window
    that is accepted as a whole emits just that, as the next one goes on from there; where a token is rejected, what was
    drafted ahead is void, and the request sits out one pass while the drafter starts anew. A pass takes as long as the
    slower of the two. Taken as given: the window drafted ahead is what the drafter would draft once it knows all that
    was emitted before, and the hardware for it costs nothing.

    Args:
        decodes: how its requests decode; with `Undrafted`, speculation is switched off.
        queue: requests that wait for a place, in order; workers may share one.
        latency: what a pass takes.
        max_running: requests that run at once; None: no limit.
        is_decoupled: drafter and verifier run side by side.
        draft_token_ms: for a drafter that takes turns with the passes: of one more draft token, for all requests
            together; 0: it does not hold up the passes.

    Attributes:
        active: requests that run.
        clock_ms: when its last pass ended.
        busy_ms, num_forwards, num_verified_tokens, num_padded_tokens, num_emitted_tokens: of all passes.

    Source: decoupled speculation: SpecActor (arXiv 2511.16193).
    """

    def __init__(
        self,
        decodes: Decodes,
        *,
        queue: deque[LoggedRequest],
        latency: LatencyModel,
        max_running: int | None,
        is_decoupled: bool = False,
        draft_token_ms: float = 0.0,
    ) -> None:
        self.decodes = decodes
        self.queue = queue
        self.active: list[LoggedRequest] = []
        self.clock_ms = 0.0
        self.busy_ms = 0.0
        self.num_forwards = self.num_verified_tokens = self.num_padded_tokens = self.num_emitted_tokens = 0
        self._latency = latency
        self._speculates = not isinstance(decodes, Undrafted)
        self._max_running = max_running
        self._is_decoupled = is_decoupled
        self._draft_token_ms = draft_token_ms
        self._step_ms: float | None = None
        self._num_context = 0  # tokens, of all active requests
        self._draft_ms = 0.0  # of the last drafts
        self._sitting_out: frozenset[str] = frozenset()  # request ids

    def admit(self) -> list[LoggedRequest]:
        """Start requests from the queue while there is room, and return them; some may be done at once."""
        room = len(self.queue) if self._max_running is None else self._max_running - len(self.active)
        started = [self.queue.popleft() for _ in range(min(room, len(self.queue)))]
        for request in started:
            self._start(request)
        return started

    def admit_copy(self, request: LoggedRequest) -> None:
        """Start a request that has begun elsewhere; a pass computes its context anew."""
        self._start(request)
        self._pass(request.num_context_tokens(), num_context_tokens=0)

    def step(self) -> list[LoggedRequest]:
        """Run one decode step of the active requests, and return those that are done, which it keeps no more."""
        ready = self.active
        if self._sitting_out:
            ready = [request for request in self.active if request.request_id not in self._sitting_out]
            self._sitting_out = frozenset()
        if not ready:  # nobody to verify while the drafter starts anew
            self._spend(self._draft_ms)
            return []
        context = self._num_context if len(ready) == len(self.active) else _num_context_tokens(ready)
        decoded = self.decodes.step(
            ready,
            num_running=len(ready),
            waiting=self.queue,
            step_ms=self._step_ms,
            with_bonus=not self._is_decoupled,
        )
        num_tokens = len(ready) + decoded.num_drafted_tokens + decoded.num_padded_tokens
        self.num_padded_tokens += decoded.num_padded_tokens
        self._draft_ms = self._draft_token_ms * decoded.longest_draft_tokens
        self._pass(num_tokens, num_context_tokens=context, draft_ms=self._draft_ms)
        self.num_emitted_tokens += decoded.num_emitted_tokens
        self._num_context += decoded.num_emitted_tokens + decoded.num_environment_tokens
        if self._is_decoupled:
            self._sitting_out = frozenset(decoded.rejected)
        done = [request for request in ready if request.position == len(request.tokens)]
        if done:
            self._remove(done)
        return done

    def cancel(self, request: LoggedRequest, *, now_ms: float) -> None:
        """Forget a request that runs here or ends with the pass in progress; that goes on, for nothing if it is all."""
        if not request.is_done():
            self._remove([request])
        if not self.active:
            self.busy_ms -= max(0.0, self.clock_ms - now_ms)

    def _start(self, request: LoggedRequest) -> None:
        self.decodes.start(request)
        if not request.is_done():
            self.active.append(request)
            self._num_context += request.num_context_tokens()

    def _remove(self, requests: list[LoggedRequest]) -> None:
        gone = {request.request_id for request in requests}
        self.active = [request for request in self.active if request.request_id not in gone]
        self._num_context -= _num_context_tokens(requests)

    def _pass(self, num_tokens: int, *, num_context_tokens: int, draft_ms: float = 0.0) -> None:
        pass_ms: float = self._latency.step_ms(
            num_tokens, num_context_tokens=num_context_tokens, speculating=self._speculates
        )
        self.num_forwards += 1
        self.num_verified_tokens += num_tokens
        self._step_ms = pass_ms
        self._spend(max(pass_ms, draft_ms) if self._is_decoupled else pass_ms + draft_ms)

    def _spend(self, time_ms: float) -> None:
        self.busy_ms += time_ms
        self.clock_ms += time_ms


def _num_context_tokens(requests: Sequence[LoggedRequest]) -> int:
    return sum([request.num_context_tokens() for request in requests])
