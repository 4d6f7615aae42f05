"""What requests of prompts without history emit, in one tree for all of them: a weak hint where nothing else is known.

In the first epoch a prompt's own tree holds little more than the request's own output. What others write meanwhile, to
other questions but by the same policy and in the same format, then still says something. Once a prompt has rollouts of
its own, other prompts' text brings nothing, so it is neither kept for nor shown to such a request.
"""

from __future__ import annotations

from das._suffix_tree import MAX_ORDER
from das.prompt_tree import PromptTree
from das.rollout import TokenArray


class CommonText:
    """The tree that requests of prompts without history share; replaced by an empty one when it is full.

    Args:
        max_tokens: when the tree holds so many, new requests get the next one. 0: there is none.
    """

    __slots__ = ("_max_tokens", "_trees")

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._trees: list[PromptTree] = []  # the last takes new requests; those before it still have running ones

    def tree_for_start(self) -> PromptTree | None:
        """Return the tree that a request joins which starts now."""
        if self._max_tokens == 0:
            return None
        if not self._trees or self._trees[-1].tree.num_tokens >= self._max_tokens:
            self._trees = [tree for tree in self._trees if tree.tree.num_open_sequences]
            self._trees.append(PromptTree())
        return self._trees[-1]

    def memory_bytes(self) -> int:
        """Return the bytes of the trees. Complexity: O(trees), mostly one."""
        return sum([tree.tree.memory_bytes() for tree in self._trees])

    def drop_idle(self) -> None:
        """Forget what no running request draws on."""
        self._trees = [tree for tree in self._trees if tree.tree.num_open_sequences]


def context_of(prompt_token_ids: TokenArray) -> TokenArray:
    """Return the end of a prompt that serves as context; the rest of it is no evidence for other prompts."""
    return prompt_token_ids[-MAX_ORDER:]
