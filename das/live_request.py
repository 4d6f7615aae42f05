"""One generation in flight: its row in the native table, and its open sequence in its prompt's tree."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np

from das._live_requests import EmittedTokens, LiveRequests
from das.common_text import context_of
from das.prompt_record import PromptRecord
from das.prompt_tree import PromptTree
from das.rollout import TokenArray

MAX_SHARED_TOKENS = 256  # of a running response that joins the common tree: all that run may join in one decode step


class LiveRequest:
    """A running request. Its tokens since the prompt lie in the native table, its evidence in the tree."""

    __slots__ = (
        "common",
        "common_sequence",
        "is_step_counted",
        "key",
        "max_total_tokens",
        "pending_environment",
        "prompt",
        "record",
        "row",
        "runs",
        "sequence",
        "table",
        "training_step",
        "tree",
    )

    def __init__(
        self,
        prompt: TokenArray,
        key: int,
        record: PromptRecord,
        training_step: int,
        max_total_tokens: int,
        *,
        is_step_counted: bool,
    ) -> None:
        self.prompt = prompt
        self.key = key
        self.record = record
        self.training_step = training_step
        self.is_step_counted = is_step_counted  # nobody said which step it is
        self.max_total_tokens = max_total_tokens
        self.runs: list[list[int]] = []  # [is generated, number of tokens], only once environment tokens came
        self.pending_environment = 0  # trailing environment tokens that the tree has not seen yet
        self.common: PromptTree | None = None  # the common tree, where it draws on that
        self.common_sequence: int
        self.tree: PromptTree
        self.sequence: int
        self.table: LiveRequests
        self.row: int

    def enter(self, tree: PromptTree, table: LiveRequests, common: PromptTree | None) -> None:
        """Open a sequence behind the prompt, another in the common tree if there is one, and take a row for them."""
        self.tree = tree
        self.table = table
        with ExitStack() as undo:
            self.sequence = tree.open(self.prompt)
            undo.callback(tree.tree.close, self.sequence)
            if common is not None:
                sequence = common.open(context_of(self.prompt))
                undo.callback(common.tree.close, sequence)
            self.row = table.add(
                tree.tree,
                self.sequence,
                num_prompt_tokens=len(self.prompt),
                max_total_tokens=self.max_total_tokens,
                prompt_key=self.key,
            )
            undo.pop_all()
        if common is not None:
            self._join(common, sequence)

    def open_in(self, tree: PromptTree) -> int:
        """Open a sequence in another tree of the same prompt, with everything generated so far, and return its id."""
        response = self.table.response(self.row)
        sequence = tree.open(self.prompt)
        position = 0
        for generated, length in self.runs or [[True, len(response)]]:
            tokens = response[position : position + length]
            position += length
            if generated:
                tree.tree.extend(sequence, tokens)
            else:
                tree.tree.close(sequence)
                sequence = tree.open_behind(tokens)
        return sequence

    def join_common(self, common: PromptTree) -> None:
        """Draw on the common tree, too, from now on, and let others draw on what was generated last."""
        response = self.table.response(self.row)
        is_generated, length = self.runs[-1] if self.runs else (True, len(response))
        num_shared = min(length, MAX_SHARED_TOKENS) if is_generated else 0
        start = len(response) - num_shared
        sequence = common.open(context_of(np.concatenate([context_of(self.prompt), response[:start]])))
        try:
            common.tree.extend(sequence, response[start:])
        except BaseException:
            common.tree.close(sequence)
            raise
        self._join(common, sequence)

    def move_to(self, tree: PromptTree, sequence: int) -> None:
        """Continue as a sequence that `open_in` has opened. Never fails."""
        self.pending_environment = 0
        self._replace(tree, sequence)

    def note_environment(self, environment: EmittedTokens) -> None:
        """Environment tokens arrived: the context from now on, but nothing that follows a generated token."""
        num_before = self.table.num_response_tokens(self.row)
        num_tokens = self.table.note(self.row, environment)
        if num_tokens == 0:
            return
        if not self.runs:
            self.runs = [[True, num_before]]
        if self.runs[-1][0]:
            self.runs.append([False, 0])
        self.runs[-1][1] += num_tokens
        self.pending_environment += num_tokens

    def enter_environment(self) -> None:
        """Give the trees the environment tokens that arrived since the last generated one."""
        if not self.pending_environment:
            return
        tokens = self.table.response(self.row)[-self.pending_environment :]
        with ExitStack() as undo:
            sequence = self.tree.open_behind(tokens)
            undo.callback(self.tree.tree.close, sequence)
            if self.common is not None:
                common_sequence = self.common.open_behind(context_of(tokens))
            undo.pop_all()
        self.tree.tree.close(self.sequence)
        self._replace(self.tree, sequence)
        if self.common is not None:
            self.common.tree.close(self.common_sequence)
            self._join(self.common, common_sequence)
        self.pending_environment = 0

    def count_generated(self) -> None:
        """Count in `runs` what the table has taken in since the last call, or the last environment token."""
        num_tokens = self.table.num_response_tokens(self.row) - sum([length for _, length in self.runs])
        if num_tokens:
            if not self.runs[-1][0]:
                self.runs.append([True, 0])
            self.runs[-1][1] += num_tokens

    def response(self) -> tuple[TokenArray, np.ndarray | None]:
        """Return the response and its mask (None: all generated)."""
        response = self.table.response(self.row)
        mask = None
        if self.runs:
            mask = np.repeat([bool(run[0]) for run in self.runs], [run[1] for run in self.runs])
        return response, mask

    def leave(self) -> None:
        """Close the sequences and give back the row."""
        self.tree.tree.close(self.sequence)
        if self.common is not None:
            self.common.tree.close(self.common_sequence)
        self.table.remove(self.row)

    def _join(self, common: PromptTree, sequence: int) -> None:
        self.common = common
        self.common_sequence = sequence
        self.table.join_common(self.row, common.tree, sequence)

    def _replace(self, tree: PromptTree, sequence: int) -> None:
        self.tree = tree
        self.sequence = sequence
        self.table.move(self.row, tree.tree, sequence)
