"""SuffixDecoding's published rule (arXiv 2411.04975) in plain Python: slow, short, and a check on the replay itself.

For every length of a match between the end of the context and an earlier text, follow the most frequent continuation:
each token's probability is its share of the occurrences, a path ends at `factor * match length` tokens, at the cap, or
where the product of shares falls below `min_prob`. The path with the largest sum of products is the draft. There are
two sources: the request's own prompt and output, and everything else of its prompt (earlier rollouts, siblings).

No tree is built: an index lists the occurrences of every token, and longer matches filter that list.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from platform import python_version

Occurrence = tuple[list[int], int]
"""A text and the position of the token that follows the match."""
Index = defaultdict[int, list[Occurrence]]
"""Token -> where it occurs with a visible next token, oldest first."""


@dataclass(slots=True)
class _Request:
    tokens: list[int]
    own: Index
    shared: Index


@dataclass(slots=True)
class _Path:
    score: float = 0.0
    match_length: int = 0
    tokens: list[int] = field(default_factory=list)

    def beats(self, other: "_Path") -> bool:
        """Whether this path is the better draft; ties go to the longer match."""
        return (self.score, self.match_length) > (other.score, other.match_length)


class SuffixDecoding:
    """The reference implementation; one index a prompt, so other prompts are not visible."""

    def __init__(self, name: str, max_match_tokens: int = 64, factor: float = 1.0, min_prob: float = 0.1) -> None:
        self.name = name
        self._max_match_tokens = max_match_tokens
        self._factor = factor
        self._min_prob = min_prob
        self._prompts: defaultdict[int, Index] = defaultdict(_new_index)
        self._requests: dict[str, _Request] = {}

    def applied_settings(self) -> dict[str, object]:
        """The settings in force."""
        return {
            "max_match_tokens": self._max_match_tokens,
            "factor": self._factor,
            "min_prob": self._min_prob,
            "scope": "one index per prompt; own text and the other texts apart",
            "python": python_version(),
        }

    def add(self, prompt_key: int, prompt_token_ids: Sequence[int], response_token_ids: Sequence[int]) -> None:
        """Index one finished rollout; its prompt is context only."""
        tokens = [*prompt_token_ids, *response_token_ids]
        _append(self._prompts[prompt_key], tokens, max(1, len(prompt_token_ids)))

    def start(self, request_id: str, prompt_key: int, prompt_token_ids: Sequence[int]) -> None:
        """Begin a request; its prompt can be copied from by this request alone."""
        tokens = list(prompt_token_ids)
        own = _new_index()
        _append(own, tokens, 1)
        self._requests[request_id] = _Request(tokens, own, self._prompts[prompt_key])

    def draft(self, request_id: str, max_draft_tokens: int) -> list[int]:
        """Propose the better of both sources' best paths."""
        request = self._requests[request_id]
        context = request.tokens
        if not context:
            return []
        last = context[-1]
        own = request.own[last][::-1]
        others = [occurrence for occurrence in reversed(request.shared[last]) if occurrence[0] is not context]
        best = self._best_path(own, context, max_draft_tokens)
        other = self._best_path(others, context, max_draft_tokens)
        return (other if other.beats(best) else best).tokens

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Append emitted tokens; siblings see them at once."""
        request = self._requests[request_id]
        first = max(1, len(request.tokens))
        request.tokens.extend(token_ids)
        _append(request.own, request.tokens, first)
        _append(request.shared, request.tokens, first)

    def finish(self, request_id: str) -> None:
        """End a request; its response stays visible."""
        del self._requests[request_id]

    def memory_bytes(self) -> None:
        """Not estimated."""

    def _best_path(self, occurrences: list[Occurrence], context: list[int], max_draft_tokens: int) -> _Path:
        """The best path over all match lengths; `occurrences` of the last token, latest first."""
        best = _Path()
        longest = min(self._max_match_tokens, len(context))
        length = 1
        while occurrences:
            longer = _filter(occurrences, context, length) if length < longest else []
            # Equal lists continue alike and the longer match may draft more: the shorter one cannot win.
            if len(longer) < len(occurrences):
                path = self._follow(occurrences, length, max_draft_tokens)
                if path.beats(best):
                    best = path
            occurrences = longer
            length += 1
        return best

    def _follow(self, occurrences: list[Occurrence], match_length: int, max_draft_tokens: int) -> _Path:
        """The greedy path by shares of the occurrences."""
        path = _Path(match_length=match_length)
        probability = 1.0
        for ahead in range(min(max_draft_tokens, int(self._factor * match_length + 1e-6))):
            counts: dict[int, int] = {}
            total = 0
            for text, position in occurrences:
                if position + ahead < len(text):
                    token = text[position + ahead]
                    counts[token] = counts.get(token, 0) + 1
                    total += 1
            if not total:
                break
            token = max(counts, key=counts.__getitem__)  # the first of equals: the latest occurrence
            probability *= counts[token] / total
            if probability < self._min_prob:
                break
            path.tokens.append(token)
            path.score += probability
            if total < len(occurrences) or len(counts) > 1:
                occurrences = [
                    (text, position)
                    for text, position in occurrences
                    if position + ahead < len(text) and text[position + ahead] == token
                ]
        return path


def _new_index() -> Index:
    return defaultdict(list)


def _append(index: Index, tokens: list[int], first: int) -> None:
    """Enter the occurrences whose next token is `tokens[first:]`."""
    for position in range(first, len(tokens)):
        index[tokens[position - 1]].append((tokens, position))


def _filter(occurrences: list[Occurrence], context: list[int], length: int) -> list[Occurrence]:
    """Those of the matches of `length` tokens that match one token more."""
    wanted = context[-1 - length]
    back = length + 1
    return [(text, position) for text, position in occurrences if position >= back and text[position - back] == wanted]
