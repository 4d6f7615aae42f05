"""What das reads of vLLM's model runner, all in one place: which row of a step is which request, and what it got."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from das_vllm.response_end import ResponseEnd

NO_DRAFTER_LIMIT = 1 << 60
_MOST_FRAMES = 12


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request at first sight.

    Args:
        state: the engine's own object for it.
        prompt_token_ids: its prompt; None where it is not made of token ids.
        end: when its response ends.
        extra_args: the user's own arguments.
    """

    state: Any
    prompt_token_ids: Sequence[int] | None
    end: ResponseEnd
    extra_args: Any


class EngineRows:
    """The persistent batch of a V1 model runner, as its drafter sees it after each engine step.

    Args:
        runner: has `input_batch` (rows), `requests` (all that the engine has not finished, preempted ones included)
            and `max_model_len`.
        how: how it was found, for the log.
    """

    def __init__(self, runner: Any, *, how: str) -> None:
        self._runner = runner
        self.how = how

    @property
    def requests(self) -> Any:
        """The engine's unfinished requests: a mapping from request id."""
        return self._runner.requests

    def request_ids(self) -> Sequence[str]:
        """Return the request of each row. Rows move between steps; ids do not."""
        ids: Sequence[str] = self._runner.input_batch.req_ids
        return ids

    def num_scheduled_draft_tokens(self, row: int) -> int:
        """Return how many draft tokens of a row were verified in this step: the scheduler may have cut its draft.

        Places that a grammar refused are filled with -1, and count as cut.
        """
        return sum(token >= 0 for token in self._runner.input_batch.spec_token_ids[row])

    def describe(self, request_id: str) -> NewRequest:
        """Return what there is to know of a request that runs."""
        state = self._runner.requests[request_id]
        prompt = state.prompt_token_ids
        if getattr(state, "prompt_embeds", None) is not None:
            prompt = None
        parameters = state.sampling_params
        end = ResponseEnd.of(parameters, num_prompt_tokens=len(prompt or ()), max_model_len=self._runner.max_model_len)
        return NewRequest(state, prompt, end, getattr(parameters, "extra_args", None))

    def lift_drafter_limit(self) -> None:
        """Keep the runner from skipping the drafter, and scheduling junk drafts for all, near `max_model_len`.

        It does so once the longest request plus K tokens exceeds this limit, which is meant for draft models with a
        shorter context. das cuts each draft to its own request's room instead. The runner sets the limit again when
        it changes `max_model_len`, so this is called every step.
        """
        self._runner.effective_drafter_max_model_len = NO_DRAFTER_LIMIT


def is_runner(candidate: Any) -> bool:
    """Whether an object has what das reads of a model runner."""
    return hasattr(candidate, "input_batch") and hasattr(candidate, "requests") and hasattr(candidate, "max_model_len")


def runner_from_stack() -> Any:
    """Return the model runner among the callers, or None: for processes in which no plugin has bound it."""
    for frame in _callers():
        candidate = frame.f_locals.get("self")
        if candidate is not None and is_runner(candidate):
            return candidate
    return None


def _callers() -> Iterator[Any]:
    frame = sys._getframe(2)
    for _ in range(_MOST_FRAMES):
        if frame is None:
            return
        yield frame
        frame = frame.f_back  # type: ignore[assignment]
