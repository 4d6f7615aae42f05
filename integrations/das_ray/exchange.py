"""The background thread of a worker: sends what waits in the outbox, asks shards what is new, keeps the answers ready.

Nothing of it runs in the thread that decodes, and nothing of it touches a tree.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import numpy as np

from das_ray.delta import Delta
from das_ray.learned import Learned
from das_ray.messages import (
    MessageError,
    note_message,
    numbers_in,
    pieces_message,
    read_note,
    rollouts_message,
    shard_of,
)
from das_ray.outbox import Outbox, Parcel
from das_ray.shard import MAX_PROMPTS_OF_PULL

logger = logging.getLogger("das")

RETRY_S = 5.0  # between two attempts to reach a service that does not answer
_MAX_PUBLISH_BYTES = 4 << 20  # of tokens, to one shard at a time
_MAX_READY_BYTES = 64 << 20  # of answers that nobody has taken in yet
_MAX_LAGS = 4096


class ServiceError(Exception):
    """The service, or one of its shards, does not answer."""


class Shards(Protocol):
    """How shards are called. `call` calls methods of several at once: {shard: (method, arguments)}.

    An answer is bytes, or what went wrong: ServiceError (it may answer later), MessageError (it refuses).
    """

    num_shards: int

    def call(self, calls: Mapping[int, tuple[str, tuple[bytes, ...]]]) -> dict[int, bytes | Exception]: ...


class Exchange:
    """What goes on between a worker and the shards.

    Args:
        worker: this worker's name, of this process only.
        outbox: what to publish.
        connect: returns the shards; raises ServiceError. Called in the thread.
        has_rollouts: whether the worker's history has rollouts of a prompt; else all of them are asked for.
        pull_interval_s: between two looks at running prompts.
        name: of the service, for the log.
    """

    def __init__(
        self,
        *,
        worker: str,
        outbox: Outbox,
        connect: Callable[[], Shards],
        has_rollouts: Callable[[int], bool],
        pull_interval_s: float,
        name: str,
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.publish_lags_s: deque[float] = deque(maxlen=_MAX_LAGS)  # from the end of a rollout to its acknowledgement
        self.cpu_s = 0.0  # that the thread has used
        self.fault: str | None = None  # why the service is not there; None: it is, or was not asked yet
        self._has_answered = False  # the service, at any time
        self._worker, self._name = worker, name
        self._outbox = outbox
        self._connect = connect
        self._has_rollouts = has_rollouts
        self._pull_interval_s = pull_interval_s
        self._shards: Shards | None = None
        self._unacknowledged: dict[int, tuple[Parcel, bytes, bytes]] = {}
        self._learned_to_put: bytes | None = None
        self._asked_learned = False
        self._store_ids: dict[int, str] = {}
        self._known: dict[int, int] = {}  # prompt key -> version of the last answer
        self._following: dict[int, dict[int, int]] = {}  # prompt key -> name -> tokens known
        self._resend: set[int] = set()  # names whose pieces have to come from their first token again
        self._lock = threading.Lock()
        self._watched: frozenset[int] = frozenset()
        self._announced: dict[int, None] = {}
        self._ready: deque[tuple[str, bytes, Delta | Learned]] = deque()
        self._ready_bytes = 0
        self._wake = threading.Event()
        self._next_pull_s = 0.0
        self._is_closed = False
        self._rounds = threading.Condition()
        self._num_rounds = 0
        self._thread = threading.Thread(target=self._run, name="das-ray-exchange", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def close(self, *, timeout_s: float = 10.0) -> None:
        """Send what waits, if the service is there, and end the thread."""
        self._is_closed = True
        self._wake.set()
        self._thread.join(timeout_s)

    @property
    def why_alone(self) -> str | None:
        """Why nothing goes to or comes from the service now; None: it does."""
        return self.fault or (None if self._has_answered else "the service has not answered yet")

    def watch(self, prompt_keys: frozenset[int]) -> None:
        """These prompts run now: look for what is new of them in every interval."""
        with self._lock:
            self._watched = prompt_keys

    def announce(self, prompt_keys: Iterable[int]) -> None:
        """Requests of these prompts start soon: ask for what is new of them at once."""
        with self._lock:
            self._announced.update(dict.fromkeys(prompt_keys))
        self._wake.set()

    def wake(self) -> None:
        """There is something in the outbox that should go at once."""
        self._wake.set()

    def put_learned(self, message: bytes) -> None:
        """Publish what this worker has learned, in place of what it had before."""
        with self._lock:
            self._learned_to_put = message

    def take_ready(self) -> tuple[str, bytes, Delta | Learned] | None:
        """Return the next answer to take in: "delta" or "learned", its bytes, what they say; None: there is none."""
        with self._lock:
            if not self._ready:
                return None
            found = self._ready.popleft()
            self._ready_bytes -= len(found[1])
            return found

    def take_resend(self) -> set[int]:
        """Return the names of requests whose pieces have to come from their first token again."""
        with self._lock:
            resend, self._resend = self._resend, set()
            return resend

    def wait_round(self, *, timeout_s: float) -> bool:
        """Wait until the thread has looked twice from now on: what was put in has been sent. False: it took longer."""
        with self._rounds:
            goal, end_s = self._num_rounds + 2, time.monotonic() + timeout_s
            while self._num_rounds < goal and time.monotonic() < end_s:
                self._wake.set()
                self._rounds.wait(0.1)
            return self._num_rounds >= goal

    # ---------------------------------------------------------------- the thread

    def _run(self) -> None:
        while True:
            is_last = self._is_closed
            wait_s = self._pull_interval_s
            try:
                self._unfollow()
                if self._shards is None:
                    self._shards = self._connect()
                    self._recovered()
                self._round(self._shards)
            except ServiceError as error:
                self._failed(str(error))
                self._shards = None
                wait_s = RETRY_S
            except Exception as error:
                logger.debug("das: an exchange failed", exc_info=True)
                self._failed(f"{type(error).__name__}: {error}")
                wait_s = RETRY_S
            self.cpu_s = time.thread_time()
            with self._rounds:
                self._num_rounds += 1
                self._rounds.notify_all()
            if is_last:
                return
            if self.fault is None:
                self._wake.wait(wait_s)
            else:
                self._wait_for_end(wait_s)
            self._wake.clear()

    def _wait_for_end(self, wait_s: float) -> None:
        """Wait, whoever announces prompts meanwhile."""
        end_s = time.monotonic() + wait_s
        while not self._is_closed and time.monotonic() < end_s:
            time.sleep(0.05)

    def _failed(self, reason: str) -> None:
        self.counts["num_failures"] += 1
        if self.fault is None:
            logger.error(
                "das: the shared history %s cannot be used: %s. Drafting goes on with what this engine generates "
                "itself; das tries again every %g s, and says so when it is there.",
                self._name,
                reason,
                RETRY_S,
            )
        self.fault = reason

    def _recovered(self) -> None:
        if self.fault is not None:
            logger.warning("das: the shared history %s is there again", self._name)
        self.fault = None
        self._has_answered = True

    def _round(self, shards: Shards) -> None:
        answered = self._publish(shards)
        answered &= self._exchange_learned(shards)
        answered &= self._pull(shards)
        if answered:
            self._recovered()

    def _publish(self, shards: Shards) -> bool:
        """Send what waits; what a shard did not acknowledge goes to it again before anything newer."""
        parcels = self._outbox.take(
            num_shards=shards.num_shards, busy=set(self._unacknowledged), max_bytes=_MAX_PUBLISH_BYTES
        )
        for shard, parcel in parcels.items():
            rollouts = rollouts_message(parcel.rollouts, worker=self._worker) if parcel.rollouts else b""
            pieces = pieces_message(parcel.pieces, worker=self._worker) if parcel.pieces else b""
            self._unacknowledged[shard] = parcel, rollouts, pieces
        answers = shards.call({shard: ("publish", sent[1:]) for shard, sent in self._unacknowledged.items()})
        is_answered = True
        for shard, answer in answers.items():
            parcel, rollouts, pieces = self._unacknowledged[shard]
            if isinstance(answer, ServiceError):
                self.counts["num_retries"] += 1
                self._failed(str(answer))
                is_answered = False
                continue
            del self._unacknowledged[shard]
            if isinstance(answer, MessageError):
                self.counts["num_refused_rollouts"] += len(parcel.rollouts)
                logger.error("das: shard %d of %s refuses what it was sent: %s", shard, self._name, answer)
                continue
            if isinstance(answer, Exception):
                raise answer
            note = read_note(answer, "published", "published")
            with self._lock:
                self._resend.update(numbers_in(note, "resend", "published"))
            self.counts["num_published_rollouts"] += len(parcel.rollouts)
            self.counts["num_published_pieces"] += len(parcel.pieces)
            self.counts["num_sent_bytes"] += len(rollouts) + len(pieces)
            if parcel.rollouts:
                self.publish_lags_s.append(time.monotonic() - parcel.oldest_s)
        if parcels and is_answered:
            self._wake.set()  # there may be more
        return is_answered

    def _exchange_learned(self, shards: Shards) -> bool:
        """Once, ask what all have learned; and put what this worker has learned where it says so. Shard 0 keeps it."""
        if not self._asked_learned:
            answer = self._answer_of(shards, 0, "learned")
            if answer is None:
                return False
            self._asked_learned = True
            if answer:
                self._make_ready("learned", answer, Learned.from_bytes(answer))
        with self._lock:
            message, self._learned_to_put = self._learned_to_put, None
        if message is not None and self._answer_of(shards, 0, "put_learned", message) is None:
            with self._lock:
                self._learned_to_put = self._learned_to_put or message
            return False
        return True

    def _answer_of(self, shards: Shards, shard: int, method: str, *arguments: bytes) -> bytes | None:
        answer = shards.call({shard: (method, arguments)})[shard]
        if isinstance(answer, ServiceError):
            self._failed(str(answer))
            return None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _pull(self, shards: Shards) -> bool:
        """Ask for what is new of announced and of running prompts."""
        with self._lock:
            if self._ready_bytes > _MAX_READY_BYTES:
                self.counts["num_delayed_pulls"] += 1
                return True
            announced, watched = list(self._announced), self._watched
        is_due = time.monotonic() >= self._next_pull_s
        if not is_due and not announced:
            return True
        by_shard: dict[int, list[int]] = {}
        for key in {**dict.fromkeys(announced), **dict.fromkeys(sorted(watched) if is_due else ())}:
            by_shard.setdefault(shard_of(key, shards.num_shards), []).append(key)
        for key in announced:
            if key in self._known and not self._has_rollouts(key):  # they were evicted here
                del self._known[key]
        if is_due:
            self._next_pull_s = time.monotonic() + self._pull_interval_s
        asked = {shard: keys[:MAX_PROMPTS_OF_PULL] for shard, keys in by_shard.items()}
        requests = {shard: self._request(shard, keys, watched) for shard, keys in asked.items()}
        answers = shards.call({shard: ("pull", (request,)) for shard, request in requests.items()})
        is_answered = True
        for shard, answer in answers.items():
            if isinstance(answer, ServiceError):
                self._failed(str(answer))
                is_answered = False
                continue
            if isinstance(answer, Exception):
                raise answer
            self._take_answer(shard, asked[shard], answer, watched)
        return is_answered

    def _unfollow(self) -> None:
        """Have running requests dropped of prompts that run here no more."""
        with self._lock:
            watched = self._watched
        names = [name for key in self._following.keys() - watched for name in self._following.pop(key)]
        if names:
            delta = Delta(store_id="", version=0, num_answered=0, rollouts=[], pieces=[], gone=names)
            self._make_ready("delta", delta.to_bytes(), delta)

    def _request(self, shard: int, keys: list[int], watched: frozenset[int]) -> bytes:
        following = {name: length for key in keys for name, length in self._following.get(key, {}).items()}
        message = note_message(
            "pull",
            {"worker": self._worker, "store_id": self._store_ids.get(shard)},
            {
                "prompt_key": np.array(keys, np.uint64),
                "known_version": np.array([self._known.get(key, 0) for key in keys], np.uint64),
                "following": np.array(list(following), np.uint64),
                "following_length": np.array(list(following.values()), np.uint64),
            },
        )
        self.counts["num_sent_bytes"] += len(message)
        return message

    def _take_answer(self, shard: int, keys: list[int], answer: bytes, watched: frozenset[int]) -> None:
        delta = Delta.from_bytes(answer)
        self._store_ids[shard] = delta.store_id
        self.counts["num_received_bytes"] += len(answer)
        self.counts["num_received_rollouts"] += len(delta.rollouts)
        answered = keys[: delta.num_answered]
        self._known.update(dict.fromkeys(answered, delta.version))
        for piece in delta.pieces:
            if piece.rollout.key in watched:
                self._following.setdefault(piece.rollout.key, {})[piece.name] = piece.end
        gone = set(delta.gone)
        for of_prompt in self._following.values():
            for name in gone & of_prompt.keys():
                del of_prompt[name]
        with self._lock:
            for key in answered:
                self._announced.pop(key, None)
        if len(answered) < len(keys):
            self._wake.set()
        if not delta.is_empty:
            self._make_ready("delta", answer, delta)

    def _make_ready(self, kind: str, message: bytes, content: Delta | Learned) -> None:
        with self._lock:
            self._ready.append((kind, message, content))
            self._ready_bytes += len(message)
