"""What anybody would write first: scan the prompt's texts for the context's longest suffix, take what followed most."""

from collections import defaultdict
from collections.abc import Sequence
from platform import python_version

Text = tuple[list[int], int]
"""Token ids, and the first position that counts as a continuation (a shared prompt is context only)."""


class Naive:
    """Plain scanning, token by token, always up to the cap."""

    def __init__(self, name: str, max_match_tokens: int = 16) -> None:
        self.name = name
        self._max_match_tokens = max_match_tokens
        self._texts: defaultdict[int, list[Text]] = defaultdict(list)
        self._requests: dict[str, tuple[list[int], int, int]] = {}

    def applied_settings(self) -> dict[str, object]:
        """The settings in force."""
        return {
            "max_match_tokens": self._max_match_tokens,
            "scope": "texts of one prompt",
            "python": python_version(),
        }

    def add(self, prompt_key: int, prompt_token_ids: Sequence[int], response_token_ids: Sequence[int]) -> None:
        """Keep the text; the prompt's tail is context."""
        tail = list(prompt_token_ids[-self._max_match_tokens :])
        self._texts[prompt_key].append(([*tail, *response_token_ids], max(1, len(tail))))

    def start(self, request_id: str, prompt_key: int, prompt_token_ids: Sequence[int]) -> None:
        """Begin a request; siblings see its output, not its copy of the prompt."""
        tokens = list(prompt_token_ids)
        self._requests[request_id] = tokens, prompt_key, max(1, len(tokens))
        self._texts[prompt_key].append((tokens, max(1, len(tokens))))

    def draft(self, request_id: str, max_draft_tokens: int) -> list[int]:
        """Scan once for every drafted token."""
        tokens, prompt_key, first = self._requests[request_id]
        texts = [*self._texts[prompt_key], (tokens[:first], 1)]  # the prompt counts once
        context = tokens[-self._max_match_tokens :]
        drafted: list[int] = []
        while context and len(drafted) < max_draft_tokens:
            token = _most_frequent(texts, context)
            if token is None:
                break
            drafted.append(token)
            context = [*context, token][-self._max_match_tokens :]
        return drafted

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Append emitted tokens."""
        self._requests[request_id][0].extend(token_ids)

    def finish(self, request_id: str) -> None:
        """End a request; its text stays."""
        del self._requests[request_id]

    def memory_bytes(self) -> None:
        """Not estimated."""


def _most_frequent(texts: list[Text], context: list[int]) -> int | None:
    """The token seen most often after the longest match; the latest of equals in the order of the texts."""
    longest = 1
    counts: dict[int, int] = {}
    for text, first in texts:
        position = first - 1
        while True:
            try:
                position = text.index(context[-1], position, len(text) - 1) + 1
            except ValueError:
                break
            length = 1
            limit = min(len(context), position)
            while length < limit and text[position - 1 - length] == context[-1 - length]:
                length += 1
            if length > longest:
                longest = length
                counts = {}
            if length == longest:
                counts[text[position]] = counts.pop(text[position], 0) + 1
    return max(reversed(counts), key=counts.__getitem__, default=None)
