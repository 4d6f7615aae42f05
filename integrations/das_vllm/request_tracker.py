"""Which requests run, and what each of them emitted: from the rows of an engine step to calls of a das Drafter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import das
from das.checked_values import check_int
from das.metrics import RequestMeans
from das.rollout import named_prompt_key
from das_vllm.engine_rows import EngineRows, NewRequest
from das_vllm.response_end import ResponseEnd


@dataclass(slots=True)
class _Tracked:
    """A request between first sight and its removal from the engine's table.

    `state` is the engine's own object: where it is another one, the id was used again.
    """

    state: Any
    num_prompt_tokens: int
    prompt_key: int
    end: ResponseEnd
    num_response_tokens: int = 0
    num_pending_draft_tokens: int = 0
    is_drafting: bool = True  # it runs in the drafter; False: its response ended, or it has no prompt of token ids


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What an engine step brought.

    Args:
        request_ids: requests that can draft now, in order of their rows.
        rows: the row of each.
        num_in_batch: rows whose response goes on, those still in prefill included.
        is_pure_decode: every request of the step was planned by the step before: its time says what a pass costs.
    """

    request_ids: list[str]
    rows: list[int]
    num_in_batch: int
    is_pure_decode: bool


class RequestTracker:
    """Starts, extends and finishes the requests of an engine in a Drafter.

    A request is known by the engine's own id, never by its row. It ends where vLLM's stop rule ends its response, at
    once, or (aborts and stop strings, which a worker cannot tell apart) when it leaves the engine's table. Being absent
    from a step ends nothing: it may be preempted.

    Args:
        drafter: where they run.
        learn: whether responses enter the history.
    """

    def __init__(self, drafter: das.Drafter, *, learn: bool) -> None:
        self.drafter = drafter
        self.training_step: int | None = None  # of requests that start from now on
        self.newest_step = 0  # of rollouts in the history, as far as it was noted
        self.counts: Counter[str] = Counter()
        self.means = RequestMeans()
        self._learn = learn
        self._tracked: dict[str, _Tracked] = {}

    def take_in(
        self, engine: EngineRows, sampled_token_ids: Sequence[Sequence[int]], num_tokens: Any, token_ids: Any
    ) -> StepOutcome:
        """Take in an engine step.

        Args:
            engine: the rows.
            sampled_token_ids: of each row, accepted draft tokens and the one after them; empty in chunked prefill.
            num_tokens: of each row, prompt and response with these; int32 array.
            token_ids: [rows, max_model_len], int32 array.

        Complexity: O(requests + tokens).
        """
        self.drop_gone(engine.requests)
        emitted: dict[str, Any] = {}
        verified: dict[str, int] = {}
        drafting: list[str] = []
        rows: list[int] = []
        is_pure_decode = True
        num_in_batch = 0
        for row, (request_id, sampled) in enumerate(zip(engine.request_ids(), sampled_token_ids, strict=False)):
            if not sampled:  # no token yet: in prefill, or computed again after preemption
                num_in_batch += 1
                is_pure_decode = False
                continue
            request = self._tracked.get(request_id)
            if request is None:
                request = self._start(request_id, engine.describe(request_id))
                is_pure_decode = False
            if not request.is_drafting:
                continue
            length = int(num_tokens[row])
            known = request.num_prompt_tokens + request.num_response_tokens
            if length <= known:  # its prompt was replaced in place, or the engine took tokens back
                self._abandon(request_id)
                continue
            tokens = sampled if length == known + len(sampled) else token_ids[row, known:length]
            response_tokens, has_ended = request.end.cut(request.num_response_tokens, tokens)
            num_verified = 0
            if request.num_pending_draft_tokens:
                num_verified = min(engine.num_scheduled_draft_tokens(row), request.num_pending_draft_tokens)
            emitted[request_id] = response_tokens
            verified[request_id] = num_verified
            request.num_response_tokens += len(response_tokens)
            request.num_pending_draft_tokens = 0
            if has_ended:
                self._count_past_end(num_verified, len(tokens), len(response_tokens))
                request.is_drafting = False
            else:
                drafting.append(request_id)
                rows.append(row)
        self.drafter.extend_batch(emitted, num_verified_draft_tokens=verified)
        for request_id in emitted:
            if not self._tracked[request_id].is_drafting:
                self._finish(request_id)
        return StepOutcome(drafting, rows, num_in_batch + len(drafting), is_pure_decode)

    def note_drafts(self, drafts: Mapping[str, das.Draft]) -> None:
        """Remember how many draft tokens each request has pending."""
        for request_id, draft in drafts.items():
            self._tracked[request_id].num_pending_draft_tokens = len(draft)

    def room(self, request_id: str) -> int:
        """Return how many draft tokens fit before the response must end, the one after them counted."""
        request = self._tracked[request_id]
        return max(0, request.end.max_tokens - request.num_response_tokens - 1)

    def drop_gone(self, requests: Any) -> None:
        """Finish the requests that left the engine's table. O(requests)."""
        get = requests.get
        for request_id in [name for name, request in self._tracked.items() if get(name) is not request.state]:
            if self._tracked[request_id].is_drafting:
                self._finish(request_id)
            del self._tracked[request_id]

    def begin_step(self, training_step: int | None) -> int:
        """Let requests that start from now on belong to a training step; None: to the one after the newest known.

        Raises:
            TypeError, ValueError: no int, or out of range.
        """
        if training_step is None:
            training_step = self.newest_step + 1
        check_int(training_step, "training_step", below=1 << 62)
        self.newest_step = max(self.newest_step, training_step)
        self.training_step = training_step
        return training_step

    def note_step(self, prompt_key: int) -> None:
        """Learn from a prompt's newest rollout which training steps there are. O(rollouts of the prompt)."""
        for rollout in self.drafter.history.rollouts(prompt_key)[-1:]:
            self.newest_step = max(self.newest_step, rollout.training_step or 0)

    def num_running(self) -> int:
        """Return how many requests are still being generated. O(requests)."""
        return sum(request.is_drafting for request in self._tracked.values())

    def __len__(self) -> int:
        """Return how many requests are known: those that the engine is about to remove, too."""
        return len(self._tracked)

    def _start(self, request_id: str, new: NewRequest) -> _Tracked:
        prompt = new.prompt_token_ids
        key = _key_of(prompt, new.extra_args)
        request = _Tracked(new.state, len(prompt or ()), key or 0, new.end)
        if not prompt:  # embeddings: no text to look for
            request.is_drafting = False
            self.counts["num_requests_without_prompt"] += 1
        else:
            self.drafter.start(
                request_id,
                prompt_token_ids=prompt,
                prompt_key=key,
                training_step=self.training_step,
            )
            self.counts["num_requests_started"] += 1
        self._tracked[request_id] = request
        return request

    def _abandon(self, request_id: str) -> None:
        """Draft no more for a request that is not what it was; it stays known until it leaves the engine's table."""
        self._tracked[request_id].is_drafting = False
        self.drafter.finish(request_id, keep=False)
        self.counts["num_requests_abandoned"] += 1

    def _finish(self, request_id: str) -> None:
        self.means.add(self.drafter.finish(request_id, keep=self._learn))
        self.counts["num_requests_finished"] += 1
        if self.training_step is None:  # nobody says which step it is: das counts the prompt's epochs
            self.note_step(self._tracked[request_id].prompt_key)

    def _count_past_end(self, num_verified: int, num_emitted: int, num_kept: int) -> None:
        """vLLM counts as accepted what it verified behind the end of a response; das does not."""
        if num_verified:
            self.counts["num_accepted_past_end"] += (num_emitted - 1) - min(num_kept, num_emitted - 1)


def key_of_request(prompt_token_ids: Sequence[int] | None, sampling_params: Any) -> int | None:
    """Return the prompt key of a request that vLLM schedules; None: it has no prompt of token ids."""
    return _key_of(prompt_token_ids, getattr(sampling_params, "extra_args", None)) if prompt_token_ids else None


def _key_of(prompt_token_ids: Sequence[int] | None, extra_args: Any) -> int | None:
    key = prompt_key_of(extra_args)
    return das.prompt_key(prompt_token_ids) if key is None and prompt_token_ids else key


def prompt_key_of(extra_args: Any) -> int | None:
    """Return the key that a request's `extra_args["das_prompt_key"]` names: an int as it is, a text by its hash.

    None: it names none, and the prompt's token ids make the key. Anything else than an int of 0..2**64-1 or a text is
    taken as none: a request must not fail for it.
    """
    key = extra_args.get("das_prompt_key") if isinstance(extra_args, Mapping) else None
    is_key = isinstance(key, str) or (isinstance(key, int) and not isinstance(key, bool) and 0 <= key < 1 << 64)
    return named_prompt_key(key) if is_key else None
