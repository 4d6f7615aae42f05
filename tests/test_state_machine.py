"""Random calls on a history, its saved state and a model of both: add, save, crash while saving, compact, restart."""

import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from rollout_samples import rollout, run
from state_samples import contents

from das import Drafter, RolloutHistory, compact_state, load_state, save_state
from das import state_directory as directory_module

PROMPTS = ([1], [2], [1, 2])
texts = st.lists(st.integers(0, 3), min_size=1, max_size=5)
prompts = st.sampled_from(PROMPTS)
steps = st.one_of(st.none(), st.integers(0, 4))
names = st.one_of(st.none(), st.sampled_from("abc"))


class Crash(BaseException):
    """The process ends here."""


@contextmanager
def crash_at(number):
    """End the process before its number-th change of the disk: nothing of what it would do then is done."""
    left = [number]

    def counting(call):
        def counted(*arguments, **options):
            left[0] -= 1
            if left[0] < 0:
                raise Crash
            return call(*arguments, **options)

        return counted

    originals = {name: getattr(os, name) for name in ("fsync", "replace", "unlink")}
    try:
        for name, call in originals.items():
            setattr(os, name, counting((lambda _: None) if name == "fsync" else call))
        yield
    finally:
        for name, call in originals.items():
            setattr(os, name, call)


class StateMachine(RuleBasedStateMachine):
    @initialize(window_epochs=st.integers(1, 3), max_segments=st.integers(1, 4))
    def create(self, window_epochs, max_segments):
        self.folder = Path(tempfile.mkdtemp(prefix="das_state_"))
        self.path = self.folder / "state"
        self.usual_max_segments = directory_module._MAX_SEGMENTS
        directory_module._MAX_SEGMENTS = max_segments
        self.window_epochs = window_epochs
        self.drafter = Drafter(RolloutHistory(window_epochs=window_epochs))
        self.saved = None  # contents of the last save that returned
        self.num_requests = 0

    def teardown(self):
        if hasattr(self, "folder"):
            directory_module._MAX_SEGMENTS = self.usual_max_segments
            shutil.rmtree(self.folder)

    @rule(prompt=prompts, response=texts, step=steps, name=names, ordinal=st.integers(0, 1))
    def add(self, prompt, response, step, name, ordinal):
        self.drafter.history.add(rollout(response, step, prompt=prompt, request_id=name, ordinal=ordinal))

    @rule(prompt=prompts, response=texts, step=steps, name=names, masked=st.booleans())
    def add_more_of_it(self, prompt, response, step, name, masked):
        mask = [not masked, *[True] * (len(response) - 1)]
        fields = {"reward": float(len(response)), "response_mask": mask, "prompt_key": 7}
        self.drafter.history.add(rollout(response, step, prompt=prompt, request_id=name, **fields))

    @rule(prompt=prompts, response=texts, keep=st.booleans())
    def run_a_request(self, prompt, response, keep):
        run(self.drafter, f"request-{self.num_requests}", response, prompt=prompt, keep=keep)
        self.num_requests += 1

    @rule(limit=st.integers(0, 8000))
    def forget_by_a_limit(self, limit):
        history = self.drafter.history
        usual, history.max_bytes = history.max_bytes, max(1, limit)
        history.add(rollout([1], prompt=[1]))
        history.max_bytes = usual

    @rule()
    def save(self):
        with crash_at(1000):
            save_state(self.path, drafter=self.drafter)
        self.saved = contents(self.drafter.history)

    @rule(number=st.integers(0, 6), restarts=st.booleans())
    def crash_while_saving(self, number, restarts):
        try:
            with crash_at(number):
                save_state(self.path, drafter=self.drafter)
        except Crash:
            pass
        else:
            self.saved = contents(self.drafter.history)
        after, found = contents(self.drafter.history), self.loaded()
        assert found in (self.saved, after)  # never a part of it
        self.saved = found
        if restarts:
            self.restart()

    @rule(number=st.one_of(st.integers(0, 6), st.just(1000)))
    def compact(self, number):
        if self.saved is not None:
            try:
                with crash_at(number):
                    compact_state(self.path)
            except Crash:
                pass

    @rule()
    def restart(self):
        self.drafter = Drafter(RolloutHistory(window_epochs=self.window_epochs))
        if self.saved is not None:
            load_state(self.path, drafter=self.drafter)

    def loaded(self):
        history = RolloutHistory(window_epochs=self.window_epochs)
        try:
            load_state(self.path, history=history)
        except FileNotFoundError:
            return None
        return contents(history)

    @invariant()
    def the_directory_holds_the_last_save(self):
        if hasattr(self, "folder"):
            assert self.loaded() == self.saved


TestState = StateMachine.TestCase
