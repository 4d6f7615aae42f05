"""vLLM's n-gram rule: copy what followed the earliest occurrence of the context's longest n-gram, own text only.

An implementation of the rule of vLLM 0.33.0, not its code. vLLM searches the whole context at every proposal (numba);
here a table from n-gram to first position grows with the text, so acceptance is comparable and time is not.
"""

from collections.abc import Sequence
from platform import python_version


class PromptLookup:
    """n-grams of `min_tokens` to `max_tokens`, the longest that occurred before wins."""

    def __init__(self, name: str, min_tokens: int = 5, max_tokens: int = 5) -> None:
        self.name = name
        self._min_tokens = min_tokens
        self._max_tokens = max_tokens
        self._requests: dict[str, tuple[list[int], dict[tuple[int, ...], int]]] = {}

    def applied_settings(self) -> dict[str, object]:
        """The settings in force."""
        return {
            "min_tokens": self._min_tokens,
            "max_tokens": self._max_tokens,
            "scope": "own prompt and output",
            "rule": "vLLM 0.33.0, own implementation",
            "python": python_version(),
        }

    def add(self, prompt_key: int, prompt_token_ids: Sequence[int], response_token_ids: Sequence[int]) -> None:
        """No history in this rule."""

    def start(self, request_id: str, prompt_key: int, prompt_token_ids: Sequence[int]) -> None:
        """Begin a request."""
        self._requests[request_id] = [], {}
        self.extend(request_id, prompt_token_ids)

    def draft(self, request_id: str, max_draft_tokens: int) -> list[int]:
        """Copy on from the earliest occurrence."""
        tokens, first_positions = self._requests[request_id]
        for length in range(min(self._max_tokens, len(tokens)), self._min_tokens - 1, -1):
            position = first_positions.get(tuple(tokens[-length:]))
            if position is not None:
                return tokens[position : position + max_draft_tokens]
        return []

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Append tokens, and enter the n-grams that now have a next token."""
        tokens, first_positions = self._requests[request_id]
        begin = len(tokens)
        tokens.extend(token_ids)
        for position in range(begin, len(tokens)):
            for length in range(self._min_tokens, min(self._max_tokens, position) + 1):
                first_positions.setdefault(tuple(tokens[position - length : position]), position)

    def finish(self, request_id: str) -> None:
        """End a request and forget its text."""
        del self._requests[request_id]

    def memory_bytes(self) -> None:
        """Not estimated."""
