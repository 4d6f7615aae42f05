"""A stand-in for vLLM's V1 model runner and scheduler: what das reads of them, and what happens to requests there.

For tests where vLLM is not installed; tests/engine_vllm runs the same proposer in the real one.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from das_vllm import DasProposer

VOCABULARY_SIZE = 1_000


@dataclass(eq=False)
class RequestState:
    """vLLM's CachedRequestState, as far as das reads it, and the text that the model is going to write."""

    prompt_token_ids: list[int] | None
    sampling_params: Any
    text: list[int] = field(default_factory=list)
    num_emitted: int = 0
    draft: list[int] = field(default_factory=list)


def parameters(**given: Any) -> SimpleNamespace:
    """SamplingParams as far as das reads them."""
    return SimpleNamespace(
        **({"max_tokens": None, "stop_token_ids": None, "eos_token_id": None, "extra_args": None} | given)
    )


class Runner:
    """Requests in rows that move, one engine step at a time; verification is greedy against each request's text."""

    def __init__(
        self, *, max_model_len: int = 100, num_speculative_tokens: int = 4, seed: int = 0, **config: Any
    ) -> None:
        self.max_model_len = max_model_len
        self.requests: dict[str, RequestState] = {}
        self.input_batch = SimpleNamespace(req_ids=[], spec_token_ids=[])
        self.effective_drafter_max_model_len = max_model_len
        self.num_verified = 0  # as vLLM counts: all that was scheduled, all behind the end too
        self.num_accepted = 0
        self._source = random.Random(seed)
        self.drafter = DasProposer(vllm_config(num_speculative_tokens=num_speculative_tokens, **config))
        self.drafter.bind(self, how="test")

    def add(self, request_id: str, prompt: list[int] | None, text: list[int], **asked: Any) -> None:
        """A request that will write `text` as far as it is let."""
        self.requests[request_id] = RequestState(prompt, parameters(**asked), text)

    def remove(self, request_id: str) -> None:
        """It finished or was aborted: its state goes with the next step."""
        del self.requests[request_id]

    def step(
        self, *, scheduled: list[str] | None = None, prefill: tuple[str, ...] = (), cut_drafts_to: int = 64
    ) -> None:
        """Run an engine step: requests in it verify their drafts, and get new ones.

        Args:
            scheduled: the others are preempted or wait; None: all.
            prefill: of these, those that get no token yet.
            cut_drafts_to: what the scheduler leaves of each draft.
        """
        rows = list(self.requests) if scheduled is None else list(scheduled)
        self._source.shuffle(rows)
        token_ids = np.full((len(rows), self.max_model_len + 80), 999, np.int32)
        num_tokens = np.zeros(len(rows), np.int32)
        sampled: list[list[int]] = []
        self.input_batch.req_ids, self.input_batch.spec_token_ids = rows, []
        for row, request_id in enumerate(rows):
            state = self.requests[request_id]
            prompt = state.prompt_token_ids or []
            verified = [] if request_id in prefill else state.draft[:cut_drafts_to]
            new = [] if request_id in prefill else self._emit(state, verified)
            text = prompt + state.text[: state.num_emitted]
            token_ids[row, : len(text)] = text
            num_tokens[row] = len(text)
            sampled.append(new)
            self.input_batch.spec_token_ids.append(verified)
        drafts = self.drafter.propose(sampled, num_tokens, token_ids, slot_mappings=None)
        assert len(drafts) == len(rows)
        for request_id, draft in zip(rows, drafts, strict=True):
            self.requests[request_id].draft = draft

    def _emit(self, state: RequestState, verified: list[int]) -> list[int]:
        rest = state.text[state.num_emitted :]
        accepted = 0
        while accepted < len(verified) and accepted + 1 < len(rest) and verified[accepted] == rest[accepted]:
            accepted += 1
        self.num_verified += len(verified)
        self.num_accepted += accepted
        state.num_emitted += accepted + 1
        return rest[: accepted + 1]


def vllm_config(
    *, num_speculative_tokens: int = 4, das: Mapping[str, Any] | None = None, tp: int = 1, rank: int = 0,
    backend: str = "uni", max_num_batched_tokens: int = 2048,
) -> SimpleNamespace:  # fmt: skip
    """VllmConfig as far as das reads it."""
    return SimpleNamespace(
        model_config=SimpleNamespace(get_vocab_size=lambda: VOCABULARY_SIZE),
        additional_config={"das": dict(das or {})},
        speculative_config=SimpleNamespace(num_speculative_tokens=num_speculative_tokens),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=max_num_batched_tokens),
        parallel_config=SimpleNamespace(tensor_parallel_size=tp, rank=rank, distributed_executor_backend=backend),
    )
