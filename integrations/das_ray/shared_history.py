"""What an engine's adapter holds where it shares its history: three calls, none of which waits or raises."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable

import numpy as np

import das
from das.rollout import Rollout
from das_ray.delta import Delta
from das_ray.exchange import Exchange, ServiceError, Shards
from das_ray.installer import Installer
from das_ray.learned import Learned
from das_ray.messages import Piece, piece_name
from das_ray.outbox import Outbox
from das_ray.settings import INSTALL_RAY, SharedHistorySettings

logger = logging.getLogger("das")

Broadcast = Callable[[bytes], bytes]
"""Called by all ranks of a group at the same step: returns what the first rank passed."""

_MAX_INSTALLED_TOKENS = 4096  # of one step: 2 ms of tree growth
_MAX_PIECES = 32  # requests looked at in one step
_STEPS_BETWEEN_BROADCASTS = 8
_SECONDS_BETWEEN_LOOKS = 0.1  # at which requests have something to tell
_NOTHING, _DELTA, _LEARNED = b"", b"d", b"l"


class SharedHistory:
    """A worker's share in the history of all workers.

    What its drafter finishes, and what a trainer pushes to its history, is published; what others publish of the
    prompts that run here, or are announced, is taken in between decode steps. A fault switches sharing off, is logged
    once, and changes nothing else.

    Args:
        settings: which service, and how.
        drafter: of the engine.
        policy: whose state is shared beside the drafter's confidence; called when it is needed.
        broadcast: where several ranks draft, and must draft the same: see Broadcast. None: there is one.
        vocabulary_size: of the model; rollouts with other tokens are not taken in.
        is_first_rank: the rank that talks to the service; the others take in what that one broadcasts.
        connect: returns the shards; None: Ray's, by the settings.
    """

    def __init__(
        self,
        settings: SharedHistorySettings,
        *,
        drafter: das.Drafter,
        policy: Callable[[], das.BudgetPolicy],
        broadcast: Broadcast | None = None,
        vocabulary_size: int = 1 << 31,
        is_first_rank: bool = True,
        connect: Callable[[], Shards] | None = None,
    ) -> None:
        self.settings = settings
        self.worker = f"{socket.gethostname()[:60]}-{os.getpid()}-{secrets.token_hex(8)}"
        self.fault: str | None = None  # why nothing is shared any more; None: it is
        self.counts: Counter[str] = Counter()
        self._drafter = drafter
        self._policy = policy
        self._broadcast = broadcast
        self._installer = Installer(drafter.history, in_step=settings.in_step, vocabulary_size=vocabulary_size)
        self._num_steps = 0
        self._told: dict[str, int] = {}  # request -> tokens of it that went out in pieces
        self._next_look_s = 0.0
        self._to_look_at: deque[str] = deque()
        self._exchange: Exchange | None = None
        if is_first_rank:
            self._outbox = Outbox(max_bytes=settings.max_queue_bytes)
            self._exchange = Exchange(
                worker=self.worker,
                outbox=self._outbox,
                connect=connect or (lambda: _connect_to_ray(settings)),
                has_rollouts=lambda key: bool(drafter.history.rollouts(key)),
                pull_interval_s=settings.pull_interval_ms / 1e3,
                name=settings.service,
            )
            drafter.history.subscribe(self._publish)
            self._exchange.start()

    def announce(self, prompt_keys: Iterable[int]) -> None:
        """Requests of these prompts start soon: get what others know of them, and build their trees. Never raises."""
        if self._exchange is not None and self.fault is None:
            self._exchange.announce(prompt_keys)

    def between_steps(self) -> None:
        """To be called before each decode step is planned, on every rank at the same steps. Never raises.

        Complexity: O(tokens sent since), at most 4,096 and one rollout; every 100 ms O(running requests).
        """
        if self.fault is not None and self._broadcast is None:
            return
        self._num_steps += 1
        try:
            if self._broadcast is None:
                self._take_ready()
            elif self._num_steps % _STEPS_BETWEEN_BROADCASTS == 0:
                self._take_broadcast()
            self._installer.run(max_tokens=_MAX_INSTALLED_TOKENS)
            if self._exchange is not None and self.fault is None:
                self._look(self._exchange)
        except Exception as error:
            self._switch_off(error)

    def share_learned(self) -> None:
        """Tell what drafter and policy have learned, for workers that start later. Between steps; never raises."""
        if self._exchange is None or self.fault is not None:
            return
        try:
            self._exchange.put_learned(Learned.of(self.worker, self._drafter, self._policy()).to_bytes())
        except Exception as error:
            self._switch_off(error)

    def close(self, *, wait_s: float = 10.0) -> None:
        """Send what waits, and share no more; wait at most so long for it. A rank still takes part in broadcasts."""
        self.fault = self.fault or "it was closed"
        if self._exchange is not None:
            self._exchange.close(timeout_s=wait_s)
        self._installer.close()

    def flush(self, *, timeout_s: float = 30.0) -> bool:
        """Wait until what is queued now was sent; False: it took longer. Not for the thread that decodes."""
        return self._exchange is None or self._exchange.wait_round(timeout_s=timeout_s)

    def statistics(self) -> dict[str, float | int | str]:
        """Return counters and gauges, by name. Never raises."""
        values: dict[str, float | int | str] = {
            "state": "sharing" if self.fault is None else f"off: {self.fault}",
            "num_followed_requests": len(self._installer),
            **{name: self._installer.counts[name] for name in _INSTALLED},
        }
        if self._exchange is not None:
            exchange = self._exchange
            if exchange.why_alone is not None and self.fault is None:
                values["state"] = f"alone: {exchange.why_alone}"
            values |= self._outbox.statistics() | {name: exchange.counts[name] for name in _EXCHANGED}
            values["exchange_cpu_s"] = exchange.cpu_s
            lags = list(exchange.publish_lags_s)
            values["publish_lag_ms_median"] = 1e3 * float(np.median(lags)) if lags else 0.0
            values["publish_lag_ms_max"] = 1e3 * max(lags, default=0.0)
        return values

    # ---------------------------------------------------------------- inside

    def _publish(self, rollout: Rollout) -> None:
        """The history has a new or updated rollout; its lock is held."""
        if not self._installer.is_installing and self.fault is None:
            self._outbox.put(rollout)
            self._told.pop(rollout.request_id or "", None)

    def _take_ready(self) -> None:
        assert self._exchange is not None  # who has no exchange has a broadcast
        while (found := self._exchange.take_ready()) is not None:
            self._take_in(found[2])

    def _take_broadcast(self) -> None:
        """Hand on, and take in, one answer. A rank that is at fault still takes part: the others wait for it."""
        assert self._broadcast is not None
        message = _NOTHING
        if self._exchange is not None and self.fault is None and (found := self._exchange.take_ready()) is not None:
            message = (_DELTA if found[0] == "delta" else _LEARNED) + found[1]
        message = self._broadcast(message)
        if self.fault is None and message:
            kind, content = message[:1], message[1:]
            self._take_in(Delta.from_bytes(content) if kind == _DELTA else Learned.from_bytes(content))

    def _take_in(self, content: Delta | Learned) -> None:
        if isinstance(content, Delta):
            self._installer.add(content)
        elif self._drafter.counters().num_decode_steps < content.num_decode_steps:
            content.apply_to(self._drafter, self._policy())
            self.counts["num_learned_taken"] += 1

    def _look(self, exchange: Exchange) -> None:
        """See which prompts run, and which requests have something to tell: a few of them in each step."""
        now_s = time.monotonic()
        if now_s >= self._next_look_s:
            self._next_look_s = now_s + _SECONDS_BETWEEN_LOOKS
            request_ids = self._drafter.request_ids()
            running = self._drafter.running(request_ids)
            exchange.watch(frozenset(running.prompt_keys.tolist()))
            if self.settings.in_step:
                self._to_look_at = deque(self._with_news(exchange, request_ids, running.num_response_tokens.tolist()))
        pieces = []
        for _ in range(min(len(self._to_look_at), _MAX_PIECES)):
            piece = self._piece(self._to_look_at.popleft())
            if piece is not None:
                pieces.append(piece)
        if pieces:
            self._outbox.put_pieces(pieces)
            exchange.wake()

    def _with_news(self, exchange: Exchange, request_ids: Iterable[str], lengths: list[int]) -> list[str]:
        """Return the requests that have grown by a piece; forget those that have ended."""
        growth = dict(zip(request_ids, lengths, strict=True))
        self._told = {request_id: told for request_id, told in self._told.items() if request_id in growth}
        resend = exchange.take_resend()
        if resend:
            for request_id in list(self._told):
                rollout = self._drafter.running_rollout(request_id)
                if rollout is not None and piece_name(self.worker, rollout) in resend:
                    del self._told[request_id]
        if not self._outbox.has_room_for_pieces():
            return []
        least = self.settings.piece_tokens
        return [name for name, length in growth.items() if length - self._told.get(name, 0) >= least]

    def _piece(self, request_id: str) -> Piece | None:
        start = self._told.get(request_id, 0)
        try:
            rollout = self._drafter.running_rollout(request_id, start=start)
        except KeyError:  # it has ended meanwhile
            return None
        if rollout is None or rollout.response_mask is not None:  # with tools' output it is told when it has ended
            return None
        self._told[request_id] = start + len(rollout.response_token_ids)
        return Piece(self.worker, start, rollout)

    def _switch_off(self, error: Exception) -> None:
        if self.fault is None:
            self.fault = f"{type(error).__name__}: {error}"
            logger.exception("das: sharing history with other workers is off in this process; drafting goes on")
            self._installer.close()


_INSTALLED = ("num_installed_rollouts", "num_installed_pieces", "num_ignored_pieces", "num_foreign_rollouts")
_EXCHANGED = (
    *("num_published_rollouts", "num_published_pieces", "num_refused_rollouts", "num_retries", "num_failures"),
    *("num_received_rollouts", "num_sent_bytes", "num_received_bytes", "num_delayed_pulls"),
)


_is_forked_beside_ray = False


def _note_fork() -> None:
    """A process that is forked from one that has joined a cluster seems to have joined it, too, and waits for ever."""
    global _is_forked_beside_ray
    is_initialized = getattr(sys.modules.get("ray"), "is_initialized", None)
    _is_forked_beside_ray = _is_forked_beside_ray or (is_initialized is not None and is_initialized())


os.register_at_fork(after_in_child=_note_fork)


def _connect_to_ray(settings: SharedHistorySettings) -> Shards:
    if _is_forked_beside_ray:
        raise ServiceError(
            "this process was forked from one that uses Ray, so it cannot. Let engines start theirs anew (vLLM: "
            "VLLM_WORKER_MULTIPROC_METHOD=spawn)"
        )
    try:
        from das_ray.service import RayShards  # Ray takes a second to import, and need not be installed
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ServiceError(f"{error}: {INSTALL_RAY}") from None

    return RayShards(settings.name, namespace=settings.namespace, address=settings.address)
