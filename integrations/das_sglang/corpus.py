"""SGLang's endpoints for external corpora, as a way to push a prompt's rollouts over HTTP."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

import das
from das.rollout import named_prompt_key
from das_sglang.drafting import Drafting


class PushedText:
    """Has the methods of SGLang's `NgramCorpus` that its worker calls, apart from drafting.

    The id of a corpus is the name of a prompt, as in `custom_params["das_prompt_key"]`; its documents are responses to
    it. They need not be complete: requests that name the prompt draw on them.

    Args:
        drafting: whose history the rollouts enter.
        num_ranks: of the tensor-parallel group. SGLang reads a corpus in a thread of each rank, which end at different
            steps; ranks would then draft differently, so several are refused.
    """

    def __init__(self, drafting: Drafting, *, num_ranks: int = 1) -> None:
        self._drafting = drafting
        self._num_ranks = num_ranks
        self._loaded: dict[str, list[das.Rollout]] = {}
        self._num_tokens: dict[str, int] = {}

    def load_external_corpus_named(self, corpus_id: str, token_chunks: Sequence[Sequence[int]]) -> int:
        """Read documents, in a thread of SGLang's, and return the number of their tokens; nothing sees them yet.

        Raises:
            ValueError: several ranks, no document of at least two tokens, or a token beyond the vocabulary.
        """
        if self._num_ranks > 1:
            raise ValueError("corpora go with one rank; with tensor parallelism, push by collective_rpc('das_push')")
        key = named_prompt_key(corpus_id)
        rollouts = [
            das.Rollout(prompt_token_ids=chunk[:1], response_token_ids=chunk[1:], prompt_key=key, ordinal=number)
            for number, chunk in enumerate(np.array(chunk, np.int32) for chunk in token_chunks)
            if len(chunk) > 1
        ]
        if not rollouts:
            raise ValueError(f"corpus {corpus_id!r} has no document of at least two tokens")
        self._drafting.check_rollouts(rollouts)
        self._loaded[corpus_id] = rollouts
        return sum(len(chunk) for chunk in token_chunks)

    def commit_external_corpus_load(self, corpus_id: str, loaded_token_count: int) -> None:
        """Let requests that start from now on see what was read; SGLang's scheduler calls it between steps."""
        self._drafting.add_rollouts(self._loaded.pop(corpus_id))
        self._num_tokens[corpus_id] = self._num_tokens.get(corpus_id, 0) + loaded_token_count

    def remove_external_corpus(self, corpus_id: str) -> None:
        """Raise ValueError: rollouts leave the history by age, not by name."""
        raise ValueError("das keeps the last window_epochs of a prompt; there is nothing to remove by name")

    def list_external_corpora(self) -> dict[str, int]:
        """Return how many tokens came under each name."""
        return dict(self._num_tokens)

    def erase_match_state(self, request_ids: Sequence[str]) -> None:
        """Requests left the batch, for good or retracted; das hears of their end elsewhere."""
