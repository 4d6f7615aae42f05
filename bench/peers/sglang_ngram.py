"""SGLang's n-gram corpus: a trie over all prompts that proposes trees, driven as its NGRAM worker drives it.

The trie is SGLang's own C++, reached through `sglang_ngram.cc` because its shipped binding needs torch. Torch tensors,
the insert queue and the mutex are left out, which favours the peer in time. As in the worker, each step inserts the
last `max_trie_depth` tokens again and looks up with as many. SGLang inserts on a thread during the forward pass and
waits for it before the next proposal; here `extend` does it at once, so judge `draft` and `extend` apart. An earlier
rollout is inserted whole, once. SGLang always verifies the full budget, padded with token 0; the padding is dropped.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from platform import python_version

from das_bench_sglang_ngram import Corpus, node_bytes, sglang_version


@dataclass(slots=True)
class _Request:
    number: int
    tail: list[int]
    length: int


class SGLangNgram:
    """A tree peer; as a chain it follows, at each fork, the branch of the longest match."""

    def __init__(
        self,
        name: str,
        max_trie_depth: int = 18,
        min_bfs_breadth: int = 1,
        max_bfs_breadth: int = 10,
        match_type: str = "BFS",
        capacity: int = 10_000_000,
    ) -> None:
        self.name = name
        self._max_trie_depth = max_trie_depth
        self._breadths = min_bfs_breadth, max_bfs_breadth
        self._match_type = match_type
        self._capacity = capacity
        self._corpus = Corpus(capacity, max_trie_depth, min_bfs_breadth, max_bfs_breadth, match_type)
        self._requests: dict[str, _Request] = {}
        self._num_started = 0

    def applied_settings(self) -> dict[str, object]:
        """The settings in force."""
        return {
            "max_trie_depth": self._max_trie_depth,
            "min_bfs_breadth": self._breadths[0],
            "max_bfs_breadth": self._breadths[1],
            "match_type": self._match_type,
            "capacity": self._capacity,
            "scope": "one trie for all prompts",
            "padding": "dropped; SGLang verifies the full budget",
            "insertion": "in extend; SGLang overlaps it with the forward pass",
            "sglang": sglang_version,
            "python": python_version(),
        }

    def add(self, prompt_key: int, prompt_token_ids: Sequence[int], response_token_ids: Sequence[int]) -> None:
        """Insert a response with the prompt's tail before it."""
        self._corpus.insert([*prompt_token_ids[-self._max_trie_depth :], *response_token_ids])

    def start(self, request_id: str, prompt_key: int, prompt_token_ids: Sequence[int]) -> None:
        """Begin a request; SGLang inserts no prompts."""
        self._num_started += 1
        tail = list(prompt_token_ids[-self._max_trie_depth :])
        self._requests[request_id] = _Request(self._num_started, tail, len(prompt_token_ids))

    def draft(self, request_id: str, max_draft_tokens: int) -> list[int]:
        """One path of the tree. Where the tree forks this builds it once per budget: time `draft_tree`, not this."""
        tokens, parents = self.draft_tree(request_id, max_draft_tokens)
        if len(set(parents)) == len(parents):
            return tokens
        chain: list[int] = []
        for budget in range(1, len(tokens) + 1):
            tokens, parents = self.draft_tree(request_id, budget)
            end = -1
            for token in chain:
                end = next(i for i, at in enumerate(parents) if at == end and tokens[i] == token)
            chain += [token for token, at in zip(tokens, parents, strict=True) if at == end]
        return chain

    def draft_tree(self, request_id: str, max_draft_tokens: int) -> tuple[list[int], list[int]]:
        """Its tree, without padding."""
        request = self._requests[request_id]
        if not request.tail or max_draft_tokens < 1:
            return [], []
        tree: tuple[list[int], list[int]] = self._corpus.match(
            request.number, request.tail, request.length, max_draft_tokens
        )
        return tree

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Append emitted tokens and insert the tail."""
        request = self._requests[request_id]
        request.tail = [*request.tail, *token_ids][-self._max_trie_depth :]
        request.length += len(token_ids)
        self._corpus.insert(request.tail)

    def finish(self, request_id: str) -> None:
        """End a request; what it inserted stays."""
        self._corpus.erase(self._requests.pop(request_id).number)

    def memory_bytes(self) -> int:
        """The node pool it allocates at once; maps and lists inside the nodes come on top."""
        return self._capacity * int(node_bytes)
