"""Keeps das' drafter in step with the engine's requests: which run, what each has emitted, which have ended."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import das
from das_sglang import engine_request

_STEPS_BETWEEN_SWEEPS = 256


@dataclass(slots=True)
class _Live:
    """What the drafter knows of one request.

    Args:
        request: SGLang's own; gone once SGLang has dropped it.
        training_step: at its start.
        num_known: response tokens that the drafter has.
        stop_token_ids, max_new_tokens: where it will end.
        has_ended: its last token is known; SGLang may still run a step or two of it.
        last_step: the last decode step that it took part in.
    """

    request: weakref.ref[Any]
    training_step: int
    num_known: int
    stop_token_ids: frozenset[int]
    max_new_tokens: int
    has_ended: bool
    last_step: int


class LiveRequests:
    """The requests of the engine that a drafter knows.

    Args:
        drafter: whose requests are named as SGLang names them.
    """

    def __init__(self, drafter: das.Drafter) -> None:
        self._drafter = drafter
        self._live: dict[str, _Live] = {}
        self._step = 0

    def __len__(self) -> int:
        return len(self._live)

    def keys_of(self, requests: Iterable[Any]) -> set[int]:
        """Return the keys of these requests' prompts."""
        return {self._key_of(request) for request in requests}

    def advance(
        self, requests: Sequence[Any], unprocessed: Sequence[Sequence[int]], *, training_step: int
    ) -> dict[str, int]:
        """Take in what the requests of the next decode step have emitted.

        Args:
            requests: of the step, each at most once.
            unprocessed: of each, tokens that it has emitted and SGLang has not yet put into its `output_ids`.
            training_step: of requests that are new.

        Returns:
            {request id: most tokens worth drafting} of those that have not ended.

        Complexity: O(new tokens), and O(prompt) for new requests.
        """
        self._step += 1
        emitted: dict[str, list[int]] = {}
        unscored: dict[str, int] = {}
        limits: dict[str, int] = {}
        for request, tail in zip(requests, unprocessed, strict=True):
            num_total = len(request.output_ids) + len(tail)
            live = self._live.get(request.rid)
            if live is None or live.request() is not request or live.num_known > num_total:
                if engine_request.has_finished(request):  # the batch still runs a step of it
                    continue
                live = self._start(request, training_step)
            if live.has_ended:
                continue
            new = _tokens_from(live.num_known, request.output_ids, tail)
            new = new[: _length_to_the_end(new, live.stop_token_ids, live.max_new_tokens - live.num_known)]
            if new:
                emitted[request.rid] = new
                live.num_known += len(new)
                live.has_ended = live.num_known >= live.max_new_tokens or new[-1] in live.stop_token_ids
                if live.last_step != self._step - 1:  # its last draft went down with the step that retracted it
                    unscored[request.rid] = 0
            live.last_step = self._step
            if not live.has_ended:
                is_exact = engine_request.may_draft(request, num_response_tokens=live.num_known)
                limits[request.rid] = live.max_new_tokens - live.num_known - 1 if is_exact else 0
        self._drafter.extend_batch(emitted, num_verified_draft_tokens=unscored)
        if self._step % _STEPS_BETWEEN_SWEEPS == 0:
            self.sweep()
        return limits

    def finish(self, rid: str) -> das.AcceptanceCounters | None:
        """SGLang has ended a request: its response, up to the end that the user sees, enters the history.

        Returns:
            its counters; None: the drafter does not know it (it ended with its first token).
        """
        live = self._live.pop(rid, None)
        if live is None:
            return None
        request = live.request()
        if request is None or engine_request.was_aborted(request):
            return self._drafter.finish(rid, keep=False)
        response = list(request.output_ids_through_stop)
        if live.num_known <= len(response):
            if live.num_known < len(response):
                self._drafter.extend(rid, response[live.num_known :])
            return self._drafter.finish(rid)
        # The drafter has seen more than the user: an end that only text tells, as stop strings do.
        return self._finish_shortened(request, response, live.training_step)

    def sweep(self) -> None:
        """Forget requests that SGLang dropped without a word, as it does with those aborted while they wait."""
        for rid in [rid for rid, live in self._live.items() if live.request() is None]:
            self._forget(rid)

    def _start(self, request: Any, training_step: int) -> _Live:
        if request.rid in self._live:  # the id came back, or SGLang took back tokens
            self._forget(request.rid)
        prompt = engine_request.prompt_token_ids(request)
        most = engine_request.max_new_tokens(request)
        self._drafter.start(
            request.rid,
            prompt_token_ids=prompt,
            prompt_key=engine_request.prompt_key(request),
            training_step=training_step,
            max_total_tokens=len(prompt) + most,
        )
        live = _Live(
            request=weakref.ref(request),
            training_step=training_step,
            num_known=0,
            stop_token_ids=engine_request.stop_token_ids(request),
            max_new_tokens=most,
            has_ended=False,
            last_step=self._step - 1,
        )
        self._live[request.rid] = live
        return live

    def _forget(self, rid: str) -> None:
        del self._live[rid]
        self._drafter.finish(rid, keep=False)

    def _finish_shortened(self, request: Any, response: list[int], training_step: int) -> das.AcceptanceCounters:
        counters = self._drafter.finish(request.rid, keep=False)
        if response:
            self._drafter.history.add(
                das.Rollout(
                    prompt_token_ids=np.array(engine_request.prompt_token_ids(request), np.int32),
                    response_token_ids=np.array(response, np.int32),
                    training_step=training_step,
                    request_id=request.rid,
                    prompt_key=engine_request.prompt_key(request),
                )
            )
        return counters

    def _key_of(self, request: Any) -> int:
        key = engine_request.prompt_key(request)
        return das.prompt_key(engine_request.prompt_token_ids(request)) if key is None else key


def _tokens_from(start: int, processed: Sequence[int], tail: Sequence[int]) -> list[int]:
    """Return `processed + tail` from a position on, without copying what comes before it."""
    if start >= len(processed):
        return list(tail[start - len(processed) :])
    return [*processed[start:], *tail]


def _length_to_the_end(tokens: Sequence[int], stop_token_ids: frozenset[int], limit: int) -> int:
    """Return how many of the tokens belong to the response: up to the limit, and to the first that ends it."""
    if stop_token_ids:
        for position, token in enumerate(tokens[:limit]):
            if token in stop_token_ids:
                return position + 1
    return min(len(tokens), limit)
