"""Takes in what other workers sent, between two decode steps: finished rollouts, and the text of running ones."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

import das
from das.rollout import Rollout
from das_ray.delta import Delta
from das_ray.messages import Piece


@dataclass(slots=True)
class _Followed:
    """A request of another worker, as it runs in the followers' drafter."""

    request_id: str
    key: int
    num_tokens: int


class Installer:
    """Installs deltas in a history, in order, a bounded number of tokens at a time.

    A running request of another worker is followed where requests of its prompt run here: it is a request of a second
    drafter of the same history, which never drafts. So its text is to siblings here what a sibling's is in one process,
    and when it ends it enters the history with its tokens in the tree already. Other finished rollouts enter the
    history, and the tree of their prompt too if that is in use.

    Args:
        history: of the worker.
        in_step: False: pieces are ignored, and running requests do not see what came since they started.
        vocabulary_size: of the model; what holds other tokens is left out, as an engine fails on them.
    """

    def __init__(self, history: das.RolloutHistory, *, in_step: bool = True, vocabulary_size: int = 1 << 31) -> None:
        self.counts: Counter[str] = Counter()
        self.is_installing = False
        self._history = history
        self._in_step = in_step
        self._vocabulary_size = vocabulary_size
        self._followers = das.Drafter(history)
        self._followed: dict[int, _Followed] = {}
        self._name_of: dict[str, int] = {}  # by request_id, which is what the followers' drafter knows
        self._queue: deque[Iterator[int]] = deque()
        self._keys_to_prepare: dict[int, None] = {}

    def add(self, delta: Delta) -> None:
        """Queue a delta."""
        self._queue.append(self._steps(delta))

    def run(self, *, max_tokens: int) -> None:
        """Install what is queued, until so many tokens were: at most one rollout beyond. O(tokens)."""
        if not self._queue:
            return
        self.is_installing = True
        try:
            num_tokens = 0
            while self._queue and num_tokens < max_tokens:
                done = next(self._queue[0], None)
                if done is None:
                    self._queue.popleft()
                    self._history.prepare(self._keys_to_prepare)
                    self._keys_to_prepare.clear()
                else:
                    num_tokens += done
        finally:
            self.is_installing = False

    def close(self) -> None:
        """Follow nobody any more."""
        self._queue.clear()
        self._followers.close()
        self._followed.clear()
        self._name_of.clear()

    def __len__(self) -> int:
        """Return how many running requests of others are followed."""
        return len(self._followed)

    # ---------------------------------------------------------------- inside

    def _steps(self, delta: Delta) -> Iterator[int]:
        """Do it, and yield after each rollout or piece how many tokens went into trees."""
        for rollout in delta.rollouts:
            yield self._install(rollout)
        for piece in delta.pieces if self._in_step else ():
            yield self._extend(piece)
        for name in delta.gone:
            if name in self._followed:
                self._drop(name)
                yield 0

    def _install(self, rollout: Rollout) -> int:
        assert rollout.training_step is not None  # of every rollout in a message
        if self._is_foreign(rollout):
            return 0
        name = self._follower_of(rollout)
        num_new = len(rollout.response_token_ids)
        if name is not None:
            followed = self._forget(name)
            rest = rollout.response_token_ids[followed.num_tokens :]
            self._followers.extend(followed.request_id, rest)
            self._followers.finish(followed.request_id, reward=rollout.reward, training_step=rollout.training_step)
            self.counts["num_installed_rollouts"] += 1
            return len(rest)
        self.counts["num_installed_rollouts"] += self._history.add(rollout)
        if not self._history.may_join(rollout.key, 0):  # nothing of the prompt runs here
            self._keys_to_prepare[rollout.key] = None
            return 0
        if not self._in_step or not self._history.may_join(rollout.key, rollout.training_step):
            return 0  # the next request to start will see it
        self._history.show(rollout.key)
        return num_new

    def _follower_of(self, rollout: Rollout) -> int | None:
        """Return the name of the followed request that ended as this rollout."""
        name = self._name_of.get(rollout.request_id or "")
        if name is None or self._followed[name].key != rollout.key or rollout.response_mask is not None:
            return None
        text = self._followers.running_rollout(self._followed[name].request_id)
        begun = () if text is None else text.response_token_ids
        return name if np.array_equal(begun, rollout.response_token_ids[: len(begun)]) else None

    def _extend(self, piece: Piece) -> int:
        rollout, name = piece.rollout, piece.name
        assert rollout.training_step is not None  # as in every message
        assert rollout.request_id is not None
        if self._is_foreign(rollout):
            return 0
        followed = self._followed.get(name)
        if followed is not None and piece.start != followed.num_tokens:
            self._drop(name)
            followed = None
        if followed is None:
            is_taken = rollout.request_id in self._name_of  # by another engine that counts from 0
            if piece.start > 0 or is_taken or not self._history.may_join(rollout.key, rollout.training_step):
                self.counts["num_ignored_pieces"] += 1
                return 0
            self._followers.start(
                rollout.request_id,
                prompt_token_ids=rollout.prompt_token_ids,
                prompt_key=rollout.key,
                training_step=rollout.training_step,
            )
            followed = self._followed[name] = _Followed(rollout.request_id, rollout.key, 0)
            self._name_of[rollout.request_id] = name
        self._followers.extend(followed.request_id, rollout.response_token_ids)
        followed.num_tokens = piece.end
        self.counts["num_installed_pieces"] += 1
        return len(rollout.response_token_ids)

    def _is_foreign(self, rollout: Rollout) -> bool:
        greatest = max(int(rollout.prompt_token_ids.max()), int(rollout.response_token_ids.max()))
        self.counts["num_foreign_rollouts"] += greatest >= self._vocabulary_size
        return greatest >= self._vocabulary_size

    def _drop(self, name: int) -> None:
        self._followers.finish(self._forget(name).request_id, keep=False)

    def _forget(self, name: int) -> _Followed:
        followed = self._followed.pop(name)
        del self._name_of[followed.request_id]
        return followed
