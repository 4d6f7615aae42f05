"""What a report needs to know of requests that decode, taken down while they do: one replay tells everything.

Counts by draft position, passes and finished requests are of all requests. Where draft tokens come from is looked up in
the trees once more, so it is told of a sample of the requests, enough for shares to a percent.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from das._draft import MAX_DRAFT_TOKENS
from das._drafts import Draft, DraftTree
from das.analysis.logged_request import LoggedRequest, num_generated_tokens
from das.draft_origins import TokenOrigin
from das.drafter import Drafter
from das.metrics import AcceptanceCounters
from das.reliability import Figures, Reliability, reliability_of
from das.rollout import Rollout
from das.step import StepDrafts

SAMPLED_TOKENS = 20_000  # generated ones of the requests whose drafts are looked up
_KNUTH = 2_654_435_761  # scatters consecutive numbers over 32 bits


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """One request that ended.

    Args:
        rollout: what it emitted.
        batch: number of its batch, from 0; batches follow one another, else they count as one.
        counters: of its decode steps.
    """

    rollout: Rollout
    batch: int
    counters: AcceptanceCounters

    @property
    def num_tokens(self) -> int:
        """Generated tokens of the response."""
        return self.counters.num_emitted_tokens


@dataclass(frozen=True, slots=True)
class Passes:
    """The target forwards of one batch, an array entry each: running requests, and tokens of all of them."""

    num_running: Figures
    num_drafted_tokens: Figures
    num_padded_tokens: Figures
    num_context_tokens: Figures


@dataclass(frozen=True, slots=True)
class TracedToken:
    """A draft token: its id, whether it was accepted, and where it comes from (None: no tree knows it)."""

    token_id: int
    is_accepted: bool
    origin: TokenOrigin | None


@dataclass(frozen=True, slots=True)
class TracedStep:
    """One decode step of a sampled request.

    Args:
        position: tokens of the response before it.
        draft: in order of the draft.
        num_emitted_tokens: accepted tokens and the bonus token.
    """

    position: int
    draft: tuple[TracedToken, ...]
    num_emitted_tokens: int


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """All decode steps of a sampled request that ended."""

    finished: FinishedRequest
    steps: tuple[TracedStep, ...]


class Recording:
    """Takes down what happens while requests decode: an `Observer` of `das.analysis.decoding`.

    Args:
        log: the rollouts that will be decoded, of which it counts the tokens.

    Attributes:
        ended: requests that did, in that order.
        traced: those of them that were sampled.
        sampled_share: of requests that are, 0..1.

    Complexity: about 1 us a request and decode step, and 10 us a draft token of a sampled request.
    """

    def __init__(self, log: Iterable[Rollout]) -> None:
        num_tokens = sum(map(num_generated_tokens, log))
        self.sampled_share = min(1.0, SAMPLED_TOKENS / max(1, num_tokens))
        self._chains: Counter[tuple[int, int]] = Counter()  # drafts, by tokens and accepted ones
        self._nodes: Counter[tuple[int, bool]] = Counter()  # of trees, by depth and whether they were accepted
        self.ended: list[FinishedRequest] = []
        self.traced: list[TracedRequest] = []
        self._traces: dict[str, tuple[LoggedRequest, list[TracedStep]]] = {}  # running requests that are sampled
        self._num_started = self._num_running = self._num_batches = 0
        self._passes: list[array[int]] = []  # of each batch: four counts a pass, one pass after the other
        self._pass = [0, 0, 0, 0]  # the one in progress, of which a part of the requests is known
        self._histograms: dict[int, tuple[Figures, Figures]] = {}  # of each drafter's predictions: now, and at first

    def started(self, drafter: Drafter, request: LoggedRequest) -> None:
        """As of `Observer`."""
        histogram = drafter.confidence.histogram
        if id(histogram) not in self._histograms:
            self._histograms[id(histogram)] = histogram, histogram.copy()
        if self._num_running == 0:
            self._num_batches += 1
            self._passes.append(array("q"))
        self._num_running += 1
        if self._num_started * _KNUTH % (1 << 32) < self.sampled_share * (1 << 32):
            self._traces[request.request_id] = request, []
        self._num_started += 1

    def drafted(
        self,
        drafter: Drafter,
        requests: Sequence[LoggedRequest],
        drafts: StepDrafts,
        emitted: Mapping[str, list[int]],
        *,
        num_running: int,
    ) -> None:
        """As of `Observer`."""
        num_drafted = 0
        for request, draft in zip(requests, drafts.values(), strict=True):
            if length := len(draft):
                num_drafted += length
                token_ids = emitted[request.request_id]
                if isinstance(draft, DraftTree):
                    self._nodes.update(zip(*_accepted_nodes(draft, token_ids), strict=True))
                else:
                    self._chains[length, _num_accepted(request, draft, token_ids)] += 1
        for request_id, (request, steps) in self._traces.items():
            if request_id in drafts:
                steps.append(_traced(drafter, request, drafts[request_id], emitted[request_id]))
        num_padded = 0 if drafts.width is None else drafts.width * len(requests) - num_drafted
        num_context = sum([len(request.rollout.prompt_token_ids) + request.position for request in requests])
        num_context -= sum(map(len, emitted.values()))
        counts = len(requests), num_drafted, num_padded, num_context
        self._pass = [before + now for before, now in zip(self._pass, counts, strict=True)]
        if self._pass[0] >= num_running:  # in lockstep requests come one by one
            self._passes[-1].extend(self._pass)
            self._pass = [0, 0, 0, 0]

    def finished(self, request: LoggedRequest, counters: AcceptanceCounters) -> None:
        """As of `Observer`."""
        self._num_running -= 1
        ended = FinishedRequest(request.rollout, self._num_batches - 1, counters)
        self.ended.append(ended)
        if request.request_id in self._traces:
            _, steps = self._traces.pop(request.request_id)
            self.traced.append(TracedRequest(ended, tuple(steps)))

    def by_position(self) -> tuple[Figures, Figures]:
        """Return how many draft tokens were drafted, and accepted, at each position of a draft (of a tree: depth)."""
        drafted, accepted = np.zeros(MAX_DRAFT_TOKENS + 1), np.zeros(MAX_DRAFT_TOKENS + 1)
        for (length, num_accepted), number in self._chains.items():
            drafted[:length] += number
            accepted[:num_accepted] += number
        for (depth, is_accepted), number in self._nodes.items():
            drafted[depth] += number
            accepted[depth] += number * is_accepted
        num_positions = int(np.count_nonzero(drafted))
        return drafted[:num_positions], accepted[:num_positions]

    def batch_passes(self) -> list[Passes]:
        """Return the passes of each batch, of a run in which batches follow one another on one engine."""
        return [Passes(*np.array(counts, np.float64).reshape(-1, 4).T) for counts in self._passes]

    def reliability(self) -> Reliability:
        """Return what predicted probabilities were worth, of all drafters since they were first seen."""
        return reliability_of(sum([now - at_first for now, at_first in self._histograms.values()], np.zeros((1, 3))))


def _num_accepted(request: LoggedRequest, draft: Draft, emitted: list[int]) -> int:
    """Return how many tokens of a chain were accepted: all emitted ones but the bonus token, if there is one."""
    num_emitted = len(emitted)
    if num_emitted > len(draft):
        return len(draft)
    may_lack_bonus = num_emitted == len(draft) or request.position == request.pause
    return num_emitted - (not may_lack_bonus or draft.draft_token_ids[num_emitted - 1] != emitted[-1])


def _accepted_nodes(draft: DraftTree, emitted: list[int]) -> tuple[list[int], list[bool]]:
    """Return the depth of each token of a tree, from 0, and whether it was accepted."""
    depths: list[int] = []
    is_accepted: list[bool] = []
    last = -1
    for node, (token, parent) in enumerate(zip(draft.draft_token_ids, draft.parents, strict=True)):
        depth = depths[parent] + 1 if parent >= 0 else 0
        depths.append(depth)
        is_accepted.append(parent == last and depth < len(emitted) and token == emitted[depth])
        last = node if is_accepted[-1] else last
    return depths, is_accepted


def _traced(drafter: Drafter, request: LoggedRequest, draft: Draft, emitted: list[int]) -> TracedStep:
    position = request.position - len(emitted)
    if not len(draft):
        return TracedStep(position, (), len(emitted))
    if isinstance(draft, DraftTree):
        is_accepted = _accepted_nodes(draft, emitted)[1]
    else:
        num_accepted = _num_accepted(request, draft, emitted)
        is_accepted = [number < num_accepted for number in range(len(draft))]
    origins = drafter.origins(request.request_id, draft)
    return TracedStep(position, tuple(map(TracedToken, draft.draft_token_ids, is_accepted, origins)), len(emitted))
