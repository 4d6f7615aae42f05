"""The suffix tree of one prompt: built from the rollouts of its window, then shared by the requests that run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from das._suffix_tree import SuffixTree
from das.rollout import Rollout, TokenArray


class PromptTree:
    """One prompt's tree, and which rollouts are in it.

    Rollouts added whole are evidence of class history; prompts and requests that run, or have finished since the tree
    was built, are of class running. The tree is derived data: it can be dropped and rebuilt at any time.

    Args:
        rollouts: the prompt's window, oldest first.

    Complexity: O(tokens) to build, without the GIL for all but a few calls a rollout.
    """

    __slots__ = ("_prompts", "_usual_tokens", "included", "running_step", "tree")

    def __init__(self, rollouts: Sequence[tuple[int, Rollout]] = ()) -> None:
        num_tokens = sum([len(rollout.response_token_ids) for _, rollout in rollouts])
        self.tree = SuffixTree(num_expected_tokens=num_tokens)
        self._usual_tokens = num_tokens // max(1, len(rollouts))  # of a response
        self.included: set[int] = set()  # serial numbers of the rollouts in the tree
        self.running_step: int | None = None  # training step of the newest request that started here
        self._prompts: dict[bytes, int] = {}
        for serial, rollout in rollouts:
            self.add(serial, rollout)

    def add(self, serial: int, rollout: Rollout) -> None:
        """Index a finished rollout, unless it is in the tree."""
        if serial in self.included:
            return
        handle = self._prompt(rollout.prompt_token_ids)
        for generated, token_ids in _runs(rollout):
            if generated:
                self.tree.add(token_ids, prompt=handle)
            else:
                handle = self.tree.add_prompt(token_ids)
        self.included.add(serial)

    def open(self, prompt_token_ids: TokenArray) -> int:
        """Start a request's sequence behind its prompt and return its id in `tree`.

        Makes room for a response of usual length: here a request waits for its prompt to be read anyway, while in a
        decode step all requests wait for the one whose tree grows.
        """
        return self.tree.open(prompt=self._prompt(prompt_token_ids), num_expected_tokens=self._usual_tokens)

    def open_behind(self, token_ids: TokenArray) -> int:
        """Start a sequence behind environment tokens, which are context only, and return its id in `tree`."""
        return self.tree.open(prompt=self.tree.add_prompt(token_ids))

    def _prompt(self, token_ids: TokenArray) -> int:
        """Return the handle of a prompt, indexing it at first sight: each prompt's own text counts once."""
        name = token_ids.tobytes()
        if name not in self._prompts:
            self._prompts[name] = self.tree.add_prompt(token_ids)
        return self._prompts[name]


def _runs(rollout: Rollout) -> Iterator[tuple[bool, TokenArray]]:
    """Cut a response into stretches that the model generated and stretches that it was given."""
    mask = rollout.response_mask
    if mask is None:
        yield True, rollout.response_token_ids
        return
    bounds = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), len(mask)]
    for start, end in pairwise(bounds):
        yield bool(mask[start]), rollout.response_token_ids[start:end]
