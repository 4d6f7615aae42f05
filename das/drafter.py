"""Drafter: requests start, grow by what the engine emits, are drafted for, and finish into the history."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NoReturn, get_args

import numpy as np

from das._draft_tree import MAX_CHILDREN_OF_NODE
from das._drafts import Draft, DraftBatch, drafts_of, expected_accepted
from das._live_requests import EmittedTokens, LiveRequests
from das._rule import Rule
from das._suffix_tree import MAX_ORDER
from das._token_ids import token_id_array
from das.budget import DescribedRequests, FinishedRollouts, RunningRequests, caps_array, finished_rollouts, prices_array
from das.checked_values import check_int
from das.confidence import Confidence
from das.draft_origins import TokenOrigin, origins_of
from das.hedge import Hedge
from das.history import RolloutHistory
from das.live_request import LiveRequest
from das.metrics import AcceptanceCounters
from das.prompt_record import PromptRecord
from das.prompt_tree import PromptTree
from das.rollout import Rollout, TokenIds
from das.rollout import prompt_key as key_of_prompt

NO_LIMIT = 1 << 62
Shape = Literal["chain", "tree"]
_SHAPES = get_args(Shape)


class Drafter:
    """Drafts the next tokens of running requests from their prompt's tree, and feeds that tree with what they emit.

    Args:
        history: where the rollouts of earlier epochs are, and where finished ones go. None: a new RolloutHistory().
        confidence: what is learned about acceptance. None: a new Confidence().
        hedge: drafts come from a mixture of nine blends, weighed as `das.hedge` says. None: from one.

    Raises:
        TypeError: an argument is something else.

    Thread safety: each call holds the history's lock; drafting releases the GIL. Arguments are read before the lock is
    taken: a call made by the iteration of another call's token ids comes before that one.
    """

    def __init__(
        self,
        history: RolloutHistory | None = None,
        *,
        confidence: Confidence | None = None,
        hedge: Hedge | None = None,
    ) -> None:
        if history is not None and not isinstance(history, RolloutHistory):
            raise TypeError(f"history must be a RolloutHistory or None, not {type(history).__name__}")
        if confidence is not None and not isinstance(confidence, Confidence):
            raise TypeError(f"confidence must be a Confidence or None, not {type(confidence).__name__}")
        if hedge is not None and not isinstance(hedge, Hedge):
            raise TypeError(f"hedge must be a Hedge or None, not {type(hedge).__name__}")
        self.history = RolloutHistory() if history is None else history
        self.confidence = Confidence() if confidence is None else confidence
        self.hedge = hedge
        learned = self.confidence
        rule = Rule(learned.hits, learned.misses, learned.histogram, learned.explained)
        if hedge is not None:
            hedge.apply_to(rule)
        self._table = LiveRequests(rule)
        self._requests: dict[str, LiveRequest] = {}
        self._row_of: dict[str, int] = {}  # of each request in the table, which looks them up for a whole batch
        self._with_environment: dict[str, LiveRequest] = {}  # requests that have had environment tokens
        self._finished = AcceptanceCounters()
        self._num_finished_heard = 0
        self._in_environment: dict[
            str, None
        ] = {}  # in order: requests whose trailing environment tokens the tree has not seen

    def start(
        self,
        request_id: str,
        *,
        prompt_token_ids: TokenIds,
        prompt_key: int | None = None,
        training_step: int | None = None,
        max_total_tokens: int | None = None,
    ) -> None:
        """Take in a request that the engine starts now.

        Args:
            request_id: not in use by a running request.
            prompt_token_ids: at least one token id.
            prompt_key: the caller's own key of the prompt; None: the hash of its token ids.
            training_step: version of the policy, and the epoch the response will belong to. None: a prompt started
                again after all its requests finished opens its next epoch. Where requests of a prompt always overlap
                that moment never comes: all its responses then belong to one epoch, the window never moves, and the
                prompt's memory grows until `max_bytes`. Such callers (asynchronous training, an engine that is never
                idle) pass `training_step`.
            max_total_tokens: prompt and response together; drafts never run past it. None: no limit.

        Raises:
            TypeError, ValueError: naming the argument, the rule and the value. Nothing changes then.

        Complexity: O(prompt), beside building the prompt's tree where `RolloutHistory.prepare` has not done so.
        """
        if not isinstance(request_id, str):
            raise TypeError(f"request_id must be a str, not {type(request_id).__name__}")
        prompt = token_id_array(prompt_token_ids, "prompt_token_ids")
        key = key_of_prompt(prompt) if prompt_key is None else prompt_key
        check_int(key, "prompt_key", below=1 << 64)
        if training_step is not None:
            check_int(training_step, "training_step", below=1 << 62)
            training_step = int(training_step)
        if max_total_tokens is not None:
            check_int(max_total_tokens, "max_total_tokens", below=1 << 62)
        if len(prompt) == 0:
            raise ValueError("prompt_token_ids is empty; it must hold at least one token id")
        with self.history.lock:
            if request_id in self._requests:
                raise ValueError(f"request_id {request_id!r} is already running")
            self.history.close_dropped()
            record = self.history.record_for(key)
            step = record.step_of_new_request(training_step)
            request = LiveRequest(
                prompt,
                key,
                record,
                step,
                NO_LIMIT if max_total_tokens is None else max_total_tokens,
                is_step_counted=training_step is None,
            )
            tree = self.history.tree_for(key, step)
            request.enter(tree, self._table, self._common_tree_for(record))
            record.open_requests[request] = None
            self._requests[request_id] = request
            self._row_of[request_id] = request.row

    def extend(
        self,
        request_id: str,
        token_ids: TokenIds,
        *,
        num_verified_draft_tokens: int | None = None,
        generated: bool = True,
    ) -> None:
        """Tell what the engine emitted for a request: the accepted draft tokens and the bonus token.

        The pending draft's predictions are scored against it, as far as they were verified, and dropped.

        Args:
            token_ids: the tokens of one decode step; none at all changes nothing.
            num_verified_draft_tokens: how many tokens of the pending draft the engine verified; None: all.
            generated: False for environment or tool tokens: context only, not counted as a decode step.

        Raises:
            KeyError: unknown request. TypeError, ValueError: not token ids, more verified than drafted, or `generated`
            no bool. Nothing changes then. MemoryError: the request is as before, but environment tokens noted so far
            are a text of their own then, which those noted later do not continue.

        Complexity: O(tokens), at most 17 tree steps a token, whatever the history holds.
        """
        if generated is not True and not isinstance(generated, (bool, np.bool_)):
            raise TypeError(f"generated must be a bool, not {type(generated).__name__}")
        emitted = EmittedTokens([request_id], [token_ids], [num_verified_draft_tokens])
        with self.history.lock:
            if not generated:
                request = self._request(request_id)
                request.note_environment(emitted)
                self._in_environment[request_id] = None
                if request.runs:  # none, where there was no token
                    self._with_environment[request_id] = request
                return
            self._extend([request_id], emitted)

    def extend_batch(
        self,
        token_ids: Mapping[str, TokenIds],
        *,
        num_verified_draft_tokens: Mapping[str, int] | None = None,
    ) -> None:
        """Tell what the engine emitted in one decode step, for many requests: `extend` for each, in order, but faster.

        Args:
            token_ids: the tokens of each request.
            num_verified_draft_tokens: how many tokens of its pending draft the engine verified; a request not named,
                or None: all of it. Requests that `token_ids` does not name are ignored.

        Raises:
            KeyError: unknown request. TypeError, ValueError: as `extend`, naming the request. Nothing changes then.
            MemoryError: requests before the one that found no memory have been extended.

        Complexity: O(tokens).
        """
        verified = {} if num_verified_draft_tokens is None else num_verified_draft_tokens
        for name, argument in (("token_ids", token_ids), ("num_verified_draft_tokens", verified)):
            if not isinstance(argument, Mapping):
                raise TypeError(f"{name} must be a mapping from request_id, not {type(argument).__name__}")
        request_ids = list(token_ids)
        num_verified = [verified.get(name) for name in request_ids] if verified else None
        emitted = EmittedTokens(request_ids, list(token_ids.values()), num_verified)
        with self.history.lock:
            self._extend(request_ids, emitted)

    def draft(
        self,
        request_ids: Sequence[str],
        *,
        max_draft_tokens: Sequence[int] | np.ndarray,
        min_survival: Sequence[float] | np.ndarray,
        max_batch_draft_tokens: int | None = None,
        shape: Shape = "chain",
        max_children: int = MAX_CHILDREN_OF_NODE,
        choose_width: Callable[[list[float]], int] | None = None,
    ) -> dict[str, Draft]:
        """Draft for requests under given caps and prices. `plan_step` is the usual way in.

        Args:
            request_ids: running requests, each at most once.
            max_draft_tokens: one cap a request, 0..64 tokens; int64 arrays are read fastest.
            min_survival: one price a request, any number (inf: draft nothing); float64 arrays are read fastest.
            max_batch_draft_tokens: limit for the sum; the least likely tokens are cut. None: no limit.
            shape: "chain", or "tree" for engines that verify trees: DraftTrees, whose caps count all tokens.
            max_children: of a tree, the most tokens that follow one, 1..4.
            choose_width: to how many tokens all drafts are cut, in view of what is expected: it is told how many
                requests should accept their draft token j, for each j. None: they are not cut. If it raises, they are
                empty.

        Returns:
            one Draft a request, in the order given. It replaces the request's pending draft.

        Raises:
            KeyError: unknown request. TypeError: a cap that is no int (a bool or a float is none), a price that is no
            number. ValueError: a request named twice, a cap out of range, a price that is NaN, not one cap and one
            price a request, or another shape. Nothing changes then.

        Complexity: O(drafted tokens), one native call without the GIL, whatever the history holds.
        """
        check_shape(shape)
        check_int(max_children, "max_children", below=NO_LIMIT)
        if not 1 <= max_children <= MAX_CHILDREN_OF_NODE:
            raise ValueError(f"max_children is {max_children}; it must be 1 <= max_children <= {MAX_CHILDREN_OF_NODE}")
        if max_batch_draft_tokens is not None:
            check_int(max_batch_draft_tokens, "max_batch_draft_tokens", below=1 << 62)
        request_ids = list(request_ids)
        caps = caps_array(max_draft_tokens, num_requests=len(request_ids))
        prices = prices_array(min_survival, num_requests=len(request_ids))
        with self.history.lock:
            rows = self._table.rows_of(self._row_of, request_ids)
            if self._in_environment or self._lacks_common_text():
                self._table.check_budgets(caps, prices)  # before anything changes
                self._enter_environment()
                self._join_common()
            batch: DraftBatch = self._table.draft(
                rows, caps, prices, max_children=max_children if shape == "tree" else 0
            )
            if choose_width is not None:
                width = 0
                try:
                    chosen = choose_width(expected_accepted(batch))
                    check_int(chosen, "width", below=1 << 31)
                    width = int(chosen)
                finally:
                    self._table.cut(rows, batch, width)
            if max_batch_draft_tokens is not None:
                self._table.clip(rows, batch, max_batch_draft_tokens)
            return drafts_of(request_ids, batch)

    def origins(self, request_id: str, draft: Draft) -> list[TokenOrigin | None]:
        """Return where the tokens of a request's draft were seen before, as long as nothing was extended since.

        For people and reports: it reads the trees once more, and changes nothing.

        Args:
            draft: what `plan_step` returned for the request.

        Returns:
            an entry a draft token: the longest context behind which it was seen, and in whose text; None where no tree
            knows it.

        Raises:
            KeyError: unknown request. TypeError: no Draft.

        Complexity: O(response + draft tokens squared).
        """
        if not isinstance(draft, Draft):
            raise TypeError(f"draft must be a Draft, not {type(draft).__name__}")
        with self.history.lock:
            request = self._request(request_id)
            trees = [(request.tree.tree, request.sequence)]
            if request.common is not None:
                trees.append((request.common.tree, request.common_sequence))
            text = [*request.prompt[-MAX_ORDER:].tolist(), *self._table.response(request.row)[-MAX_ORDER:].tolist()]
            return origins_of(draft, text=text[-MAX_ORDER:], trees=trees)

    def running(
        self, request_ids: Sequence[str], *, num_running: int | None = None, num_waiting: int = 0
    ) -> RunningRequests:
        """Return what a budget policy needs to know of these requests.

        Raises:
            KeyError: unknown request. TypeError, ValueError: a request named twice, or a bad number.

        Complexity: O(requests).
        """
        if num_running is not None:
            check_int(num_running, "num_running", below=1 << 62)
        check_int(num_waiting, "num_waiting", below=1 << 62)
        request_ids = list(request_ids)
        with self.history.lock:
            keys, figures = self._table.describe(self._table.rows_of(self._row_of, request_ids))
        numbers, num_prompt, num_response, num_steps, num_drafted, num_accepted, num_emitted = figures
        return DescribedRequests(
            request_numbers=numbers,
            prompt_keys=keys,
            num_prompt_tokens=num_prompt,
            num_response_tokens=num_response,
            num_decode_steps=num_steps,
            num_drafted_tokens=num_drafted,
            num_accepted_tokens=num_accepted,
            num_emitted_tokens=num_emitted,
            num_running=max(len(keys), num_running or 0),
            num_waiting=num_waiting,
        )

    def take_feedback(self) -> tuple[np.ndarray, np.ndarray]:
        """Return (drafted, accepted) of the decode steps since the last call, int64, in order of `extend`."""
        with self.history.lock:
            return self._table.take_feedback()

    def take_finished(self) -> FinishedRollouts:
        """Return the rollouts that entered the history since the last call, whoever added them.

        Of more than 65,536 the last ones. Complexity: O(rollouts returned).
        """
        with self.history.lock:
            self._num_finished_heard, rollouts = self.history.finished_since(self._num_finished_heard)
        return finished_rollouts(rollouts)

    def finish(
        self, request_id: str, *, reward: float | None = None, training_step: int | None = None, keep: bool = True
    ) -> AcceptanceCounters:
        """End a request: its response enters the history.

        Args:
            reward: of the rollout; None: not known (yet: adding it to the history later updates it).
            training_step: replaces the one the request started with.
            keep: False: the response enters no history, for one that was aborted. Where prompts without history share
                their text, it stays in that.

        Returns:
            the request's counters.

        Raises:
            KeyError: unknown request. TypeError, ValueError: a bad reward or step. Nothing changes then.

        Complexity: O(response).
        """
        with self.history.lock:
            request = self._request(request_id)
            if training_step is not None:
                check_int(training_step, "training_step", below=1 << 62)
            Rollout(prompt_token_ids=request.prompt[:1], response_token_ids=request.prompt[:1], reward=reward)
            counters = AcceptanceCounters(*self._table.counters(request.row))
            response, mask = request.response()
            rollout = None
            if keep and len(response):
                rollout = Rollout(
                    prompt_token_ids=request.prompt,
                    response_token_ids=response,
                    training_step=request.training_step if training_step is None else training_step,
                    reward=reward,
                    request_id=request_id,
                    prompt_key=request.key,
                    response_mask=mask,
                )
            request.leave()  # from here on nothing can fail
            del self._requests[request_id]
            del self._row_of[request_id]
            self._in_environment.pop(request_id, None)
            self._with_environment.pop(request_id, None)
            request.record.open_requests.pop(request, None)
            request.record.note_finished()
            self._finished += counters
            is_step_counted = request.is_step_counted and training_step is None
            self.history.finish(request.key, request.tree, rollout, counters, is_step_counted=is_step_counted)
            return counters

    def close(self) -> None:
        """Forget all running requests, as `finish(keep=False)` does.

        A drafter that is dropped is closed as well, with the next call that starts a request or looks at the history.
        """
        with self.history.lock:
            for request_id in list(self._requests):
                self.finish(request_id, keep=False)

    def __del__(self) -> None:
        # Here the history may be in the middle of any change, in this thread too: the collector comes as it likes.
        if getattr(self, "_requests", None):  # none: its constructor raised, or nothing runs
            self.history.close_later(self)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Drafter cannot be pickled or copied: its requests run in one process; das.save_state keeps what it "
            "knows on disk, or keep confidence.state() and the rollouts of its history"
        )

    def maintain(self, *, max_us: float = 500.0) -> None:
        """Spend up to `max_us` on housekeeping beside the device's work; see `RolloutHistory.maintain`."""
        self.history.maintain(max_us=max_us)

    def request_ids(self) -> tuple[str, ...]:
        """Return the running requests, in order of their start. O(requests)."""
        with self.history.lock:
            return tuple(self._requests)

    def running_rollout(self, request_id: str, *, start: int = 0) -> Rollout | None:
        """Return what a running request has generated so far, as a rollout; None: nothing since `start`.

        Args:
            start: tokens of the response to leave out, from its beginning.

        Raises:
            KeyError: unknown request. TypeError, ValueError: a bad start.

        Complexity: O(prompt + response).
        """
        check_int(start, "start", below=1 << 31)
        with self.history.lock:
            request = self._request(request_id)
            if self._table.num_response_tokens(request.row) <= start:
                return None
            response, mask = request.response()
            return Rollout(
                prompt_token_ids=request.prompt,
                response_token_ids=response[start:],
                training_step=request.training_step,
                request_id=request_id,
                prompt_key=request.key,
                response_mask=None if mask is None else mask[start:],
            )

    def counters(self, request_id: str | None = None) -> AcceptanceCounters:
        """Return a running request's counters, or (None) the sums over all requests, finished ones included.

        Raises:
            KeyError: unknown request.

        Complexity: O(running requests).
        """
        with self.history.lock:
            if request_id is not None:
                return AcceptanceCounters(*self._table.counters(self._request(request_id).row))
            running = (AcceptanceCounters(*self._table.counters(r.row)) for r in self._requests.values())
            return sum(running, self._finished)

    def _extend(self, request_ids: list[str], emitted: EmittedTokens) -> None:
        rows = self._table.rows_of(self._row_of, request_ids)
        if self._in_environment and emitted.num_tokens:
            self._table.check_verified(rows, emitted)  # before anything changes
            self._enter_environment()
        try:
            self._table.extend(rows, emitted)
        finally:  # also of those before one that found no memory
            if self._with_environment:
                for request_id in request_ids:
                    if request_id in self._with_environment:
                        self._with_environment[request_id].count_generated()

    def _request(self, request_id: str) -> LiveRequest:
        request = self._requests.get(request_id)
        if request is None:
            raise KeyError(f"request {request_id!r} is not running")
        return request

    def _enter_environment(self) -> None:
        for request_id in self._in_environment:
            self._requests[request_id].enter_environment()
        self._in_environment.clear()

    def _common_tree_for(self, record: PromptRecord) -> PromptTree | None:
        return self.history.common_tree_for(record, history_explains_nothing=self._table.history_explains_nothing)

    def _lacks_common_text(self) -> bool:
        """Whether running requests have a history, of no use, and do not draw on the common text."""
        return self._table.num_alone > 0 and self._table.history_explains_nothing and self.history.max_common_tokens > 0

    def _join_common(self) -> None:
        if self._lacks_common_text():
            for request in self._requests.values():
                common = self._common_tree_for(request.record) if request.common is None else None
                if common is not None:
                    request.join_common(common)


def check_shape(shape: Shape) -> None:
    """Raise ValueError for what is no shape of drafts."""
    if shape not in _SHAPES:
        raise ValueError(f"shape is {shape!r}; it must be 'chain' or 'tree'")
