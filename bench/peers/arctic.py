"""ArcticInference's suffix decoding, driven through its own Python cache with its own defaults.

`draft` and `extend` are its public calls, with the context as a contiguous int32 array, as vLLM passes it. `add` goes
to the global tree alone: its public calls would fill a request's local tree too, and throw that away.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from platform import python_version

import numpy as np
from arctic_inference.suffix_decoding import SuffixDecodingCache, SuffixDecodingDraft
from numpy.typing import NDArray


@dataclass(slots=True)
class _Request:
    cache: SuffixDecodingCache
    tokens: NDArray[np.int32]
    length: int


class Arctic:
    """One cache for all prompts, as it ships; or one cache a prompt."""

    def __init__(
        self,
        name: str,
        max_tree_depth: int = 64,
        max_cached_requests: int = -1,
        factor: float = 1.0,
        min_prob: float = 0.1,
        per_prompt: bool = False,
    ) -> None:
        self.name = name
        self._max_tree_depth = max_tree_depth
        self._max_cached_requests = max_cached_requests
        self._factor = factor
        self._min_prob = min_prob
        self._per_prompt = per_prompt
        self._caches: dict[int, SuffixDecodingCache] = {}
        self._requests: dict[str, _Request] = {}
        self._num_added = 0

    def applied_settings(self) -> dict[str, object]:
        """The settings in force."""
        return {
            "max_tree_depth": self._max_tree_depth,
            "max_cached_requests": self._max_cached_requests,
            "max_spec_factor": self._factor,
            "min_token_prob": self._min_prob,
            "scope": "one cache per prompt" if self._per_prompt else "one cache for all prompts",
            "add": "global tree only",
            "arctic_inference": version("arctic_inference"),
            "numpy": np.__version__,
            "python": python_version(),
        }

    def add(self, prompt_key: int, prompt_token_ids: Sequence[int], response_token_ids: Sequence[int]) -> None:
        """Index a response in the global tree; it keeps no prompts of other requests."""
        cache = self._cache(prompt_key)
        self._num_added += 1
        sequence = cache._generate_seq_id(f"history-{self._num_added}")
        cache._global_tree.extend_ndarray(sequence, np.asarray(response_token_ids, dtype=np.int32))

    def start(self, request_id: str, prompt_key: int, prompt_token_ids: Sequence[int]) -> None:
        """Begin a request; its prompt enters a local tree."""
        cache = self._cache(prompt_key)
        prompt = np.asarray(prompt_token_ids, dtype=np.int32)
        cache.start_request(request_id, prompt)
        tokens = np.empty(max(64, 2 * len(prompt)), dtype=np.int32)
        tokens[: len(prompt)] = prompt
        self._requests[request_id] = _Request(cache, tokens, len(prompt))

    def draft(self, request_id: str, max_draft_tokens: int) -> list[int]:
        """Its path mode."""
        drafted: list[int] = self._speculate(request_id, max_draft_tokens, False).token_ids
        return drafted

    def draft_tree(self, request_id: str, max_draft_tokens: int) -> tuple[list[int], list[int]]:
        """Its tree mode; vLLM uses the path mode."""
        draft = self._speculate(request_id, max_draft_tokens, True)
        return draft.token_ids, draft.parents

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Append emitted tokens to the local and the global tree."""
        request = self._requests[request_id]
        request.cache.add_active_response(request_id, token_ids)
        end = request.length + len(token_ids)
        if end > len(request.tokens):
            request.tokens = np.concatenate([request.tokens, np.empty(end, dtype=np.int32)])
        request.tokens[request.length : end] = token_ids
        request.length = end

    def finish(self, request_id: str) -> None:
        """End a request; its response stays in the global tree."""
        self._requests.pop(request_id).cache.stop_request(request_id)

    def memory_bytes(self) -> int:
        """Its own estimate, over all trees."""
        return sum(
            tree.estimate_memory()
            for cache in self._caches.values()
            for tree in (cache._global_tree, *cache._local_trees.values())
        )

    def _cache(self, prompt_key: int) -> SuffixDecodingCache:
        key = prompt_key if self._per_prompt else 0
        if key not in self._caches:
            self._caches[key] = SuffixDecodingCache(self._max_tree_depth, self._max_cached_requests)
        return self._caches[key]

    def _speculate(self, request_id: str, max_draft_tokens: int, use_tree: bool) -> SuffixDecodingDraft:
        request = self._requests[request_id]
        context = request.tokens[max(0, request.length - self._max_tree_depth) : request.length]
        return request.cache.speculate(
            request_id,
            context,
            max_spec_tokens=max_draft_tokens,
            max_spec_factor=self._factor,
            min_token_prob=self._min_prob,
            use_tree_spec=use_tree,
        )
