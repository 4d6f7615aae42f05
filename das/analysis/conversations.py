"""Which prompts are later turns of a conversation, in logs that hold one row a turn."""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Sequence

from das.rollout import Rollout, TokenArray


class PromptPrefixes:
    """A number for each of some prompts, and of those that a prompt begins with, the number of the longest.

    Complexity: about 200 bytes a prompt, however long it is.
    """

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, bytes], int] = {}  # by length and digest
        self._lengths: list[int] = []  # that prompts have, ascending, each once

    def __setitem__(self, prompt: TokenArray, number: int) -> None:
        length = len(prompt)
        self._numbers[length, _digest(prompt)] = number
        place = bisect_left(self._lengths, length)
        if place == len(self._lengths) or self._lengths[place] != length:
            self._lengths.insert(place, length)

    def get(self, prompt: TokenArray) -> int | None:
        """Return the prompt's own number; None: it has none. O(prompt)."""
        return self._numbers.get((len(prompt), _digest(prompt)))

    def of_longest_prefix(self, prompt: TokenArray) -> int | None:
        """Return the number of the longest other prompt that this one begins with. O(prompt + different lengths)."""
        number, start, read = None, 0, hashlib.blake2b(digest_size=16)
        for length in self._lengths[: bisect_left(self._lengths, len(prompt))]:
            read.update(prompt[start:length].tobytes())
            number, start = self._numbers.get((length, read.digest()), number), length
        return number


def _digest(prompt: TokenArray) -> bytes:
    return hashlib.blake2b(prompt.tobytes(), digest_size=16).digest()


class Conversations:
    """The conversations of a log, by the prompts that they began with.

    A later turn's prompt is the prompt before it and what was said since. With the key of the first turn it finds what
    is known of the conversation. Prompts that come later in the log are not known yet.
    """

    def __init__(self) -> None:
        self._keys = PromptPrefixes()

    def key(self, rollout: Rollout) -> int:
        """Return the key of the longest known prompt that the rollout's prompt begins with; else its own.

        Args:
            rollout: one whose key is the hash of its prompt.

        Complexity: O(prompt) for prompts seen before, else as `PromptPrefixes.of_longest_prefix`.
        """
        prompt = rollout.prompt_token_ids
        key = self._keys.get(prompt)
        if key is None:
            longest = self._keys.of_longest_prefix(prompt)
            key = self._keys[prompt] = rollout.key if longest is None else longest
        return key


def turn_numbers(rollouts: Sequence[Rollout]) -> list[int]:
    """Return for each rollout of a conversation and training step how many turns come before it.

    That is, how many of the others' prompts its own begins with, equal ones counted once.

    Complexity: O(tokens of the prompts + prompts x different lengths).
    """
    if len({len(rollout.prompt_token_ids) for rollout in rollouts}) == 1:
        return [0] * len(rollouts)
    turns = PromptPrefixes()
    for prompt in sorted((rollout.prompt_token_ids for rollout in rollouts), key=len):
        before = turns.of_longest_prefix(prompt)  # it begins with all the others that the prompt begins with
        turns[prompt] = 0 if before is None else before + 1
    return [turns.get(rollout.prompt_token_ids) or 0 for rollout in rollouts]
