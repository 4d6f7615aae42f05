"""What is known of one prompt: the rollouts of its window, by epoch, and its tree while that is in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from das.prompt_tree import PromptTree
from das.rollout import Rollout, TokenArray, with_changes

# What bookkeeping costs beside token ids (bench/bench_state.py measures it): of a rollout, the Rollout, an array header
# and dictionary entries; of a prompt with rollouts, its record with the dictionaries, and an array header.
ROLLOUT_OVERHEAD_BYTES = 800
PROMPT_OVERHEAD_BYTES = 1600


class OpenRequest(Protocol):
    """A request that is running in the prompt's tree."""

    def open_in(self, tree: PromptTree) -> int: ...
    def move_to(self, tree: PromptTree, sequence: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Addition:
    """What adding a rollout did: its serial number if it was new, else whether it was known or too late.

    `rollout` is the one that is stored now, with its training step; None: it was too late.
    """

    serial: int | None = None
    rollout: Rollout | None = None
    is_update: bool = False
    is_late: bool = False
    num_expired: int = 0


@dataclass(frozen=True, slots=True)
class PromptWindow:
    """What is stored of a prompt: all that outlives its requests.

    Args:
        prompt_key: 0 <= key < 2**64.
        rollouts: at least one, oldest epoch first, in order of arrival within an epoch; each with its training step.
        current_step: the newest training step that a request of the prompt started at, or a rollout came from.
        has_finished: a request of that step has finished, so the next one may open the next epoch.
    """

    prompt_key: int
    rollouts: tuple[Rollout, ...]
    current_step: int
    has_finished: bool


class PromptRecord:
    """The window of one prompt.

    `version` changes whenever rollouts left the window, so a tree built from an older version holds too much.
    `is_saved` says whether the history's last save, or the state it was loaded from, holds all of this as it is.
    """

    __slots__ = (
        "_by_request_id",
        "_by_response_hash",
        "_counted_steps",
        "_epochs",
        "_is_tainted",
        "_next_serial",
        "_numbered",
        "_prompt",
        "_told_steps",
        "_tree_bytes",
        "_window_epochs",
        "current_step",
        "has_finished",
        "is_saved",
        "num_tokens",
        "open_requests",
        "rollout_bytes",
        "tree",
        "version",
    )

    def __init__(self, window_epochs: int) -> None:
        self.tree: PromptTree | None = None
        self.version = 0
        self.current_step = 0
        self.has_finished = False  # a request of the current step has finished
        self.is_saved = False
        self.open_requests: dict[OpenRequest, None] = {}  # in order of their start
        self.rollout_bytes = 0
        self.num_tokens = 0
        self._window_epochs = window_epochs
        self._epochs: dict[int, dict[int, Rollout]] = {}  # training step -> serial number -> rollout
        self._by_request_id: dict[str, int] = {}  # -> serial number
        self._by_response_hash: dict[int, tuple[int, ...]] = {}  # -> serial numbers, of any training step
        self._next_serial = 0
        self._numbered: set[int] = set()  # serial numbers of named rollouts that go by the ordinal 0, too
        self._counted_steps: set[int] = set()  # epochs whose step is das' own count
        self._told_steps: dict[int, int] = {}  # counted step -> what it turned out to be, newest last
        self._is_tainted = False  # the tree holds rollouts that it should not
        self._prompt: TokenArray | None = None
        self._tree_bytes = 0

    def __len__(self) -> int:
        return sum(len(epoch) for epoch in self._epochs.values())

    def window(self) -> list[tuple[int, Rollout]]:
        """Return (serial number, rollout), oldest epoch first, in order of arrival within an epoch."""
        return [item for step in sorted(self._epochs) for item in self._epochs[step].items()]

    def step_of_new_request(self, training_step: int | None) -> int:
        """Return the training step of a request that starts now, and make it the current one if it is newer.

        Where nobody supplies a step, a prompt started again after all its requests finished opens its next epoch.
        """
        if training_step is None:
            opens_next = self.has_finished and not self.open_requests
            training_step = self.current_step + int(opens_next)
        if training_step > self.current_step:
            self.current_step = training_step
            self.has_finished = False
            self.is_saved = False
        return training_step

    def note_finished(self) -> None:
        """A request of the prompt has finished: once no other runs, the next one opens an epoch."""
        self.is_saved &= self.has_finished
        self.has_finished = True

    def add(self, rollout: Rollout, *, is_step_counted: bool = False) -> Addition:
        """Take in a rollout: new, known, or too late.

        Args:
            is_step_counted: its training step is das' own count of the prompt's epochs, not what anybody said.
        """
        is_step_counted = is_step_counted or rollout.training_step is None
        step = self.current_step if rollout.training_step is None else rollout.training_step
        if is_step_counted:
            step = self._told_steps.get(step, step)
        else:
            self._counted_steps.discard(step)
        known = self._find_named(rollout, step)
        if known is not None:
            return self._update(*known, rollout, new_step=known[0] if rollout.training_step is None else step)
        known = self._find_equal(rollout, step, is_step_counted=is_step_counted)
        if known is not None:
            step = self._tell_step(known[0], step, is_step_counted=is_step_counted)
            return self._update(step, known[1], rollout, new_step=step)
        if len(self._epochs) >= self._window_epochs and step < min(self._epochs):
            return Addition(is_late=True)
        if is_step_counted and step not in self._epochs:
            self._counted_steps.add(step)
        serial = self._next_serial
        self._next_serial += 1
        new = with_changes(rollout, training_step=step)
        self._insert(step, serial, new)
        self.current_step = max(self.current_step, step)
        return Addition(serial=serial, rollout=new, num_expired=self._expire())

    def oldest_step(self) -> int:
        """Return the training step of the oldest epoch; there must be one. O(window_epochs)."""
        return min(self._epochs)

    def drop_oldest_epoch(self) -> int:
        """Forget the rollouts of the oldest epoch and return how many there were; there must be an epoch."""
        oldest = self.oldest_step()
        serials = list(self._epochs[oldest])
        for serial in serials:
            self._is_tainted |= self.tree is not None and serial in self.tree.included
            self._remove(oldest, serial)
        self.version += 1
        return len(serials)

    def stored(self, prompt_key: int) -> PromptWindow:
        """Return what to save of a prompt that has rollouts."""
        rollouts = tuple([rollout for _, rollout in self.window()])
        return PromptWindow(prompt_key, rollouts, self.current_step, self.has_finished)

    def restore(self, window: PromptWindow) -> int:
        """Take in a saved window, as it was where nothing is known yet, else by `add`; return how many expired."""
        if self._epochs:
            return sum([self.add(rollout).num_expired for rollout in window.rollouts])
        for rollout in window.rollouts:
            assert rollout.training_step is not None  # as PromptWindow says
            self._insert(rollout.training_step, self._next_serial, rollout)
            self._next_serial += 1
        if window.current_step >= self.current_step:
            self.current_step, self.has_finished = window.current_step, window.has_finished
        return self._expire()

    def needs_build(self) -> bool:
        """Whether the next request would have to wait for a tree to be built."""
        return bool(self._epochs) and (self.tree is None or self._is_tainted or self.tree.running_step is not None)

    def is_stale(self, training_step: int) -> bool:
        """Whether the tree holds rollouts that left the window, or counts an older step's requests as running."""
        running_step = self.tree.running_step if self.tree else None
        return self._is_tainted or (running_step is not None and training_step > running_step)

    def install(self, tree: PromptTree) -> None:
        """Replace the tree; open requests move over. Where one finds no memory, all stay where they are."""
        opened = [(request, request.open_in(tree)) for request in list(self.open_requests)]
        self.tree = tree
        self._is_tainted = False
        for request, sequence in opened:
            if request in self.open_requests:
                request.move_to(tree, sequence)
            else:  # its drafter was collected meanwhile
                tree.tree.close(sequence)

    def drop_tree(self) -> None:
        """Forget the tree; only while no request is open."""
        self.tree = None
        self._is_tainted = False

    def forget_running(self) -> None:
        """The tree holds tokens of a request that shall not count, or not twice: the next request has it built anew."""
        self._is_tainted = self.tree is not None

    def measure_tree(self) -> int:
        """Return by how many bytes the tree has grown since the last call."""
        before = self._tree_bytes
        self._tree_bytes = self.tree.tree.memory_bytes() if self.tree else 0
        return self._tree_bytes - before

    def _find_named(self, rollout: Rollout, step: int) -> tuple[int, int] | None:
        """Return (training step, serial number) of the stored rollout of this one's request_id, if any."""
        serial = self._by_request_id.get(rollout.request_id) if rollout.request_id is not None else None
        if serial is not None:
            known = self._step_of(serial), serial
            if self._is_same(known, rollout, step):
                return known  # else an engine that counts its requests from 0 again, or another engine
        named = [same for same in self._equal_in(rollout, step) if same[2].request_id == rollout.request_id is not None]
        return named[0][:2] if named else None

    def _find_equal(self, rollout: Rollout, step: int, *, is_step_counted: bool) -> tuple[int, int] | None:
        """Return (training step, serial number) of the stored rollout of the same text that this one is, if any.

        Engines name what they generate, trainers number it. A number finds its own rollout, or the first with a name
        and no number yet; a name finds the first with a number and no name yet. So there are as many equal rollouts as
        names, or as numbers, whichever are more, whoever comes first. Where a step is das' count, the other may say
        another one: not a lower one, as das counts on from the newest it knows.
        """
        found = self._equal_in(rollout, step)
        if rollout.request_id is None:
            numbered = [same for same in found if self._has_number(same) and same[2].ordinal == rollout.ordinal]
            if numbered:
                return numbered[0][:2]
            others = [other for other in self._counted_steps if other < step or rollout.training_step is None]
        else:
            others = [other for other in self._epochs if other > step] if is_step_counted else []
        found += [same for other in sorted(set(others) - {step}) for same in self._equal_in(rollout, other)]
        if rollout.request_id is None:
            found = [same for same in found if not self._has_number(same)]
        else:
            found = [same for same in found if same[2].request_id is None and rollout.ordinal in (0, same[2].ordinal)]
        return found[0][:2] if found else None

    def _equal_in(self, rollout: Rollout, step: int) -> list[tuple[int, int, Rollout]]:
        """Return (training step, serial number, rollout) of what an epoch holds with the same response."""
        epoch = self._epochs.get(step, {})
        serials = self._by_response_hash.get(rollout.response_hash, ())
        return [(step, serial, epoch[serial]) for serial in serials if serial in epoch]

    def _has_number(self, known: tuple[int, int, Rollout]) -> bool:
        """Whether a trainer, or a log, has numbered this rollout: all without a name are."""
        _, serial, rollout = known
        return rollout.request_id is None or rollout.ordinal > 0 or serial in self._numbered

    def _tell_step(self, known_step: int, step: int, *, is_step_counted: bool) -> int:
        """Return the step of a rollout that is stored at one step and comes with another, if one of them is counted.

        All of a counted epoch was sampled at one step, so it moves to the one that was told, as will what still runs.
        """
        if known_step == step or (is_step_counted and known_step in self._counted_steps):
            return known_step  # nobody told either
        counted, told = (step, known_step) if is_step_counted else (known_step, step)
        self._told_steps[counted] = told
        if len(self._told_steps) > self._window_epochs:
            del self._told_steps[next(iter(self._told_steps))]
        self._counted_steps.discard(counted)
        moved = {serial: with_changes(one, training_step=told) for serial, one in self._epochs.pop(counted, {}).items()}
        self._epochs[told] = dict(sorted((self._epochs.get(told, {}) | moved).items()))  # in order of arrival
        self.current_step = max(self.current_step, told)
        self.is_saved = False
        return told

    def _step_of(self, serial: int) -> int:
        """Return the epoch that a stored rollout is in. O(window_epochs), which costs less than a tuple a rollout."""
        return next(step for step, epoch in self._epochs.items() if serial in epoch)

    def _is_same(self, known: tuple[int, int], rollout: Rollout, step: int) -> bool:
        """Whether a rollout of a known request_id is the known one: at its step also where one was cut shorter."""
        stored = self._epochs[known[0]][known[1]]
        if stored.response_hash == rollout.response_hash:
            return True
        length = min(len(stored.response_token_ids), len(rollout.response_token_ids))
        return known[0] == step and np.array_equal(
            stored.response_token_ids[:length], rollout.response_token_ids[:length]
        )

    def _update(self, step: int, serial: int, rollout: Rollout, *, new_step: int) -> Addition:
        known = self._epochs[step][serial]
        has_number = self._has_number((step, serial, known)) or rollout.request_id is None
        updated = with_changes(
            known,
            training_step=new_step,
            reward=known.reward if rollout.reward is None else rollout.reward,
            request_id=known.request_id or rollout.request_id,
            ordinal=rollout.ordinal if rollout.request_id is None else known.ordinal,
        )
        if new_step == step:  # in place, so that equal ones stay in order of arrival
            self.is_saved = False
            self._epochs[step][serial] = updated
            if updated.request_id is not None:
                self._by_request_id[updated.request_id] = serial
            num_expired = 0
        else:
            self._remove(step, serial)
            self._insert(new_step, serial, updated)
            self.current_step = max(self.current_step, new_step)
            num_expired = self._expire()
        if has_number and updated.request_id is not None and updated.ordinal == 0:
            self._numbered.add(serial)
        return Addition(is_update=True, rollout=updated, num_expired=num_expired)

    def _insert(self, step: int, serial: int, rollout: Rollout) -> None:
        self.is_saved = False
        rollout = self._share_prompt(rollout)
        self._epochs.setdefault(step, {})[serial] = rollout
        self._by_response_hash[rollout.response_hash] = (
            *self._by_response_hash.get(rollout.response_hash, ()),
            serial,
        )
        if rollout.request_id is not None:
            self._by_request_id[rollout.request_id] = serial
        self.rollout_bytes += self._bytes_of(rollout)
        self.num_tokens += len(rollout.response_token_ids)

    def _remove(self, step: int, serial: int) -> None:
        self.is_saved = False
        rollout = self._epochs[step].pop(serial)
        self._numbered.discard(serial)
        if not self._epochs[step]:
            del self._epochs[step]
            self._counted_steps.discard(step)
        same = tuple([other for other in self._by_response_hash[rollout.response_hash] if other != serial])
        if same:
            self._by_response_hash[rollout.response_hash] = same
        else:
            del self._by_response_hash[rollout.response_hash]
        if rollout.request_id is not None and self._by_request_id.get(rollout.request_id) == serial:
            del self._by_request_id[rollout.request_id]
        self.rollout_bytes -= self._bytes_of(rollout)
        self.num_tokens -= len(rollout.response_token_ids)
        if not self._epochs and self._prompt is not None:
            self.rollout_bytes -= self._prompt.nbytes + PROMPT_OVERHEAD_BYTES
            self._prompt = None

    def _expire(self) -> int:
        num_expired = 0
        while len(self._epochs) > self._window_epochs:
            num_expired += self.drop_oldest_epoch()
        return num_expired

    def _share_prompt(self, rollout: Rollout) -> Rollout:
        """Let the rollouts of one prompt hold one array of its token ids."""
        if self._prompt is None:
            self._prompt = rollout.prompt_token_ids
            self.rollout_bytes += self._prompt.nbytes + PROMPT_OVERHEAD_BYTES
        elif rollout.prompt_token_ids is not self._prompt and np.array_equal(self._prompt, rollout.prompt_token_ids):
            return with_changes(rollout, prompt_token_ids=self._prompt)
        return rollout

    def _bytes_of(self, rollout: Rollout) -> int:
        prompt_bytes = 0 if rollout.prompt_token_ids is self._prompt else rollout.prompt_token_ids.nbytes
        mask_bytes = 0 if rollout.response_mask is None else rollout.response_mask.nbytes
        return prompt_bytes + rollout.response_token_ids.nbytes + mask_bytes + ROLLOUT_OVERHEAD_BYTES
