"""Random interleaved calls on a SuffixTree and its oracle, compared after every step."""

import pytest
import strategies
from checks import CheckedTree, answers, failing_allocation
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule
from oracle import list_continuations

UNKNOWN = 10**9  # no handle or sequence id ever gets there

bad_token_ids = st.sampled_from([[-1], [0, 2**31], [0, 1, "a"], [True], [1.5], "abc", None, 7, [[1], [2]]])


class SuffixTreeMachine(RuleBasedStateMachine):
    prompts = Bundle("prompts")
    sequences = Bundle("sequences")
    closed_ids = Bundle("closed_ids")

    @initialize(target=prompts, max_order=strategies.max_orders, alphabet=strategies.alphabets)
    def start(self, max_order, alphabet):
        self.checked = CheckedTree(max_order=max_order)
        self.max_order = max_order
        self.alphabet = alphabet
        return 0  # no prompt

    def draw_word(self, data, max_size=24):
        return data.draw(strategies.words_after(self.alphabet, self.checked.texts, max_size=max_size))

    # --- what changes the tree ---

    @rule(target=prompts, data=st.data())
    def add_prompt(self, data):
        return self.checked.add_prompt(self.draw_word(data))

    @rule(data=st.data(), prompt=prompts)
    def add(self, data, prompt):
        self.checked.add(self.draw_word(data), prompt=prompt)

    @rule(target=sequences, prompt=prompts)
    def open(self, prompt):
        return self.checked.open(prompt=prompt)

    @rule(data=st.data(), sequence=sequences)
    def extend(self, data, sequence):
        self.checked.extend(sequence, self.draw_word(data, max_size=8))

    @rule(data=st.data(), first=sequences, second=sequences)
    def extend_two_in_turn(self, data, first, second):
        """One token each, the same or nearly the same ones: two sequences riding on each other's edges."""
        word = self.draw_word(data, max_size=8)
        for token in word:
            self.checked.extend(first, [token])
            self.checked.extend(second, [token])
        self.checked.extend(second, [data.draw(st.sampled_from(self.alphabet))])

    @rule(data=st.data(), follower=sequences, leader=sequences, lag=st.integers(1, 4))
    def overtake(self, data, follower, leader, lag):
        """The follower repeats the last tokens of the leader and goes on before the leader does."""
        tail = self.checked.oracle.sequences[leader].token_ids[-lag:]
        self.checked.extend(follower, [*tail, data.draw(st.sampled_from(self.alphabet))])
        self.checked.extend(leader, [data.draw(st.sampled_from(self.alphabet))])

    @rule(target=closed_ids, sequence=consumes(sequences))
    def close(self, sequence):
        return self.checked.close(sequence)

    # --- what must not change it ---

    @rule(data=st.data(), sequence=sequences, prompt=prompts, bad=bad_token_ids)
    def bad_ids(self, data, sequence, prompt, bad):
        tree, handle, sequence_id = self.checked.tree, self.checked.prompts[prompt], self.checked.sequences[sequence]
        calls = [
            lambda: tree.add_prompt(bad),
            lambda: tree.add(bad, prompt=handle),
            lambda: tree.extend(sequence_id, bad),
            lambda: tree.counts(bad),
            lambda: tree.child_counts(bad, 0),
            lambda: tree.top_child(bad),
            lambda: tree.continuations(sequence_id, bad),
        ]
        self.expect_unchanged((TypeError, ValueError), data.draw(st.sampled_from(calls)))

    @rule(data=st.data(), closed=closed_ids)
    def closed_sequence(self, data, closed):
        tree = self.checked.tree
        calls = [lambda: tree.extend(closed, [0]), lambda: tree.close(closed), lambda: tree.continuations(closed)]
        self.expect_unchanged(KeyError, data.draw(st.sampled_from(calls)))

    @rule(data=st.data())
    def unknown_handle(self, data):
        tree = self.checked.tree
        calls = [
            lambda: tree.open(prompt=UNKNOWN),
            lambda: tree.add([0], prompt=UNKNOWN),
            lambda: tree.extend(UNKNOWN, [0]),
            lambda: tree.close(UNKNOWN),
        ]
        self.expect_unchanged(KeyError, data.draw(st.sampled_from(calls)))

    def expect_unchanged(self, error, call):
        before = answers(self.checked)
        with pytest.raises(error):
            call()
        assert answers(self.checked) == before

    # --- allocations that fail: the tree is as before, or the call succeeded without them ---

    def without_memory(self, n, call):
        """Return (True, result of the call), or (False, None) when it raised MemoryError and changed nothing."""
        before = answers(self.checked)
        try:
            with failing_allocation(n):
                return True, call()
        except MemoryError:
            assert answers(self.checked) == before
            return False, None

    @rule(data=st.data(), sequence=sequences, n=st.integers(0, 3))
    def extend_without_memory(self, data, sequence, n):
        word = self.draw_word(data, max_size=64)
        self.without_memory(n, lambda: self.checked.extend(sequence, word))

    @rule(data=st.data(), prompt=prompts, n=st.integers(0, 3))
    def add_without_memory(self, data, prompt, n):
        word = self.draw_word(data)
        self.without_memory(n, lambda: self.checked.add(word, prompt=prompt))

    @rule(target=prompts, data=st.data(), n=st.integers(0, 3))
    def add_prompt_without_memory(self, data, n):
        word = self.draw_word(data)
        added, prompt = self.without_memory(n, lambda: self.checked.add_prompt(word))
        return prompt if added else multiple()

    @rule(target=sequences, prompt=prompts, n=st.integers(0, 3))
    def open_without_memory(self, prompt, n):
        opened, sequence = self.without_memory(n, lambda: self.checked.open(prompt=prompt))
        return sequence if opened else multiple()

    # --- look-ups ---

    @rule(data=st.data())
    def look_up(self, data):
        contexts = strategies.contexts(self.alphabet, self.checked.texts, max_order=self.max_order)
        self.checked.check(contexts=data.draw(st.lists(contexts, min_size=1, max_size=8)))

    @rule(data=st.data(), sequence=sequences)
    def draft(self, data, sequence):
        """Draft tokens are context only: the answer is that of separate look-ups, and nothing changes."""
        draft = self.draw_word(data)
        before = answers(self.checked)
        contexts = self.checked.oracle.last_contexts(sequence, draft)
        expected = list_continuations(self.checked.tree, contexts)
        assert self.checked.tree.continuations(self.checked.sequences[sequence], draft) == expected
        assert answers(self.checked) == before

    @invariant()
    def agrees(self):
        if hasattr(self, "checked"):
            self.checked.check()

    def teardown(self):
        """With nothing open the check is exact, for every context of the texts and both classes."""
        if hasattr(self, "checked"):
            self.checked.close_all()
            self.checked.check()


TestSuffixTreeMachine = SuffixTreeMachine.TestCase
