"""A logged rollout as a request whose future is the log, and the batches that a log is generated in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from das._drafts import Draft, DraftTree
from das.analysis.conversations import turn_numbers
from das.rollout import Rollout


class LoggedRequest:
    """A request that emits what was logged, whatever is drafted.

    A draft is accepted as far as it equals the log. Stretches of generated and of environment tokens alternate; a
    request pauses at the end of each.

    Args:
        request_id: unique to it.
        rollout: what it emits.

    Attributes:
        tokens: the whole response.
        position: tokens of it that are out.
        pause: where the current stretch of generated tokens ends.

    Complexity: O(tokens) memory.
    """

    __slots__ = ("_pauses", "_starts_generated", "pause", "position", "request_id", "rollout", "tokens")

    def __init__(self, request_id: str, rollout: Rollout) -> None:
        self.request_id = request_id
        self.rollout = rollout
        self.tokens: list[int] = rollout.response_token_ids.tolist()
        self.position = 0
        mask = rollout.response_mask
        changes = () if mask is None else np.flatnonzero(np.diff(mask)) + 1
        self._pauses = [*(int(change) for change in changes), len(self.tokens)]
        self._starts_generated = mask is None or bool(mask[0])
        self.pause = self._pauses[0] if self._starts_generated else 0

    def is_done(self) -> bool:
        """Return whether the whole response is out."""
        return self.position == len(self.tokens)

    def num_context_tokens(self) -> int:
        """Return what its next pass reads: prompt and response so far."""
        return len(self.rollout.prompt_token_ids) + self.position

    def num_context_tokens_without_drafts(self) -> int:
        """Return the sum over its generated tokens of what stands before each."""
        mask = self.rollout.response_mask
        positions = np.arange(len(self.tokens)) if mask is None else np.flatnonzero(mask)
        return len(positions) * len(self.rollout.prompt_token_ids) + int(positions.sum())

    def emit(self, draft: Draft, *, with_bonus: bool = True) -> list[int]:
        """Return what the engine emits for a draft, and move on: the accepted path, and the token sampled after it.

        Args:
            draft: a chain or a tree, drafted from here.
            with_bonus: False: no token is sampled after a draft that was accepted as a whole.

        Complexity: O(accepted) for a chain, O(draft) for a tree.
        """
        tokens, start, pause = self.tokens, self.position, self.pause
        accepted = start
        if isinstance(draft, DraftTree):
            last = -1
            for node, (token, parent) in enumerate(zip(draft.draft_token_ids, draft.parents, strict=True)):
                if parent == last and accepted < pause and token == tokens[accepted]:
                    accepted, last = accepted + 1, node
        elif len(draft):
            for token in draft.draft_token_ids:
                if accepted == pause or token != tokens[accepted]:
                    break
                accepted += 1
        if accepted < pause and (with_bonus or accepted - start < len(draft) or not len(draft)):
            accepted += 1
        self.position = accepted
        return tokens[start:accepted]

    def take_environment(self) -> list[int]:
        """Return the environment tokens that come next, and move past them; none where generated ones come next."""
        if self.position < self.pause or self.is_done():
            return []
        start = self.position
        self.position, self.pause = [*(pause for pause in self._pauses if pause > start), len(self.tokens)][:2]
        return self.tokens[start : self.position]

    def stretches(self) -> Iterator[tuple[list[int], bool]]:
        """Yield the stretches of what is out: their tokens, and whether they were generated."""
        start, is_generated = 0, self._starts_generated
        for pause in self._pauses:
            if start < self.position:
                yield self.tokens[start : min(pause, self.position)], is_generated
            start, is_generated = pause, not is_generated

    def copy(self, request_id: str) -> LoggedRequest:
        """Return a request of another name that stands where this one stands."""
        other = LoggedRequest(request_id, self.rollout)
        other.position, other.pause = self.position, self.pause
        return other


@dataclass(frozen=True, slots=True)
class LoggedBatch:
    """What a training step generates together.

    Args:
        training_step: of its rollouts; None: the log names none.
        group: which group of samples of that step, from 0.
        rollouts: by prompt, in order of appearance.
        turn: of their conversations, from 0: turns that are rollouts of their own start when the one before has ended.
    """

    training_step: int | None
    group: int
    rollouts: tuple[Rollout, ...]
    turn: int = 0


def logged_batches(log: Iterable[Rollout], *, group_size: int) -> list[LoggedBatch]:
    """Cut a log into generation batches, in order of training step: `group_size` samples of each of its prompts.

    Where a rollout's prompt begins with another one's of the same key and training step, it is a later turn: its text
    tells how that one went on, so it comes in a later batch.

    Raises:
        TypeError, ValueError: group_size is no int >= 1, or the log is empty.

    Complexity: O(rollouts), and as `turn_numbers` where a key has several prompts.
    """
    if isinstance(group_size, bool) or not isinstance(group_size, int):
        raise TypeError(f"group_size must be an int, not {type(group_size).__name__}")
    if group_size < 1:
        raise ValueError(f"group_size is {group_size}; it must be at least 1")
    steps: dict[int | None, dict[int, list[Rollout]]] = {}
    for rollout in log:
        steps.setdefault(rollout.training_step, {}).setdefault(rollout.key, []).append(rollout)
    if not steps:
        raise ValueError("log is empty; there is nothing to replay")
    batches = []
    for training_step in sorted(steps, key=lambda step: -1 if step is None else step):
        turns: dict[int, dict[int, list[Rollout]]] = {}
        for key, samples in steps[training_step].items():
            for turn, rollout in zip(turn_numbers(samples), samples, strict=True):
                turns.setdefault(turn, {}).setdefault(key, []).append(rollout)
        group = 0
        for turn in sorted(turns):
            by_prompt = list(turns[turn].values())
            for first in range(0, max(map(len, by_prompt)), group_size):
                rollouts = [rollout for samples in by_prompt for rollout in samples[first : first + group_size]]
                batches.append(LoggedBatch(training_step, group, tuple(rollouts), turn))
                group += 1
    return batches


def num_generated_tokens(rollout: Rollout) -> int:
    """Return how many tokens of a response were generated. O(tokens) where it has a mask."""
    mask = rollout.response_mask
    return len(rollout.response_token_ids) if mask is None else int(mask.sum())
