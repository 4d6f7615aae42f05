"""What requests that still run have generated so far, on any worker: in a shard's memory only, for a minute."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable

import numpy as np

from das.rollout import TokenArray, hash_token_ids, with_changes
from das_ray.messages import Piece

KEPT_S = 60.0  # a request that is not heard of for so long has gone with its worker


class _Running:
    __slots__ = ("first", "heard_s", "num_tokens", "texts", "worker")

    def __init__(self, piece: Piece, now_s: float) -> None:
        self.worker = piece.worker
        self.first = piece.rollout  # with the prompt
        self.texts: list[TokenArray] = [piece.rollout.response_token_ids]
        self.num_tokens = piece.end
        self.heard_s = now_s

    def from_token(self, start: int) -> Piece | None:
        """Return what comes after so many tokens; None: nothing."""
        if start >= self.num_tokens:
            return None
        if len(self.texts) > 1:
            self.texts = [np.concatenate(self.texts)]
        tokens = self.texts[0][start:]
        prompt = self.first.prompt_token_ids if start == 0 else self.first.prompt_token_ids[-1:]
        changes = {"prompt_token_ids": prompt, "response_token_ids": tokens, "response_hash": hash_token_ids(tokens)}
        return Piece(self.worker, start, with_changes(self.first, **changes))


class RunningTexts:
    """Requests that run on any worker, by name; the one not heard of for longest first.

    Args:
        max_tokens: of all of them together; beyond it, those not heard of for longest are forgotten.
        clock: seconds, monotonic.
    """

    def __init__(self, *, max_tokens: int = 16 << 20, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_tokens = max_tokens
        self._clock = clock
        self._running: OrderedDict[int, _Running] = OrderedDict()
        self._by_key: dict[int, dict[int, None]] = {}
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._running)

    def add(self, piece: Piece) -> bool:
        """Take in a piece; return False where the one before it is missing, so that all has to come again."""
        name, now_s = piece.name, self._clock()
        running = self._running.get(name)
        if piece.start == 0:
            self.forget([name])
            running = self._running[name] = _Running(piece, now_s)
            self._by_key.setdefault(piece.rollout.key, {})[name] = None
            self.num_tokens += piece.end
        elif running is None or piece.start > running.num_tokens:
            return False
        else:
            new = piece.rollout.response_token_ids[running.num_tokens - piece.start :]  # a piece may come twice
            if len(new):
                running.texts.append(new)
                running.num_tokens += len(new)
                self.num_tokens += len(new)
            running.heard_s = now_s
            self._running.move_to_end(name)
        self._forget_old(now_s)
        return True

    def of_prompt(self, prompt_key: int, known: dict[int, int], *, worker: str) -> list[Piece]:
        """Return what other workers' requests of a prompt have generated beyond what is `known`: tokens, by name."""
        self._forget_old(self._clock())
        found = []
        for name in self._by_key.get(prompt_key, ()):
            running = self._running[name]
            piece = running.from_token(known.get(name, 0)) if running.worker != worker else None
            if piece is not None:
                found.append(piece)
        return found

    def gone(self, names: Iterable[int]) -> list[int]:
        """Return which of these run no more."""
        return [name for name in names if name not in self._running]

    def forget(self, names: Iterable[int]) -> None:
        """These requests have ended; unknown ones are ignored."""
        for name in names:
            running = self._running.pop(name, None)
            if running is not None:
                self.num_tokens -= running.num_tokens
                of_prompt = self._by_key[running.first.key]
                del of_prompt[name]
                if not of_prompt:
                    del self._by_key[running.first.key]

    def _forget_old(self, now_s: float) -> None:
        while self._running:
            name, oldest = next(iter(self._running.items()))
            if oldest.heard_s >= now_s - KEPT_S and (self.num_tokens <= self._max_tokens or len(self._running) == 1):
                break
            self.forget([name])
