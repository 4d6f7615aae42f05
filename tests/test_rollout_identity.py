"""An engine that learns from what it generates, and a trainer that pushes the same rollouts: one copy, one tree."""

from itertools import product

from hypothesis import given
from hypothesis import strategies as st
from rollout_samples import KEY, PROMPT, draft, rollout, tree_of

from das import Drafter, RolloutHistory

TOKENS = (4, 5, 6)
CONTEXTS = [context for order in (1, 2, 3) for context in product(TOKENS, repeat=order)]

responses = st.lists(st.sampled_from(TOKENS), min_size=1, max_size=5)
groups = st.lists(responses, min_size=1, max_size=4)  # the samples of a prompt at one training step; some are equal
epochs = st.lists(groups, min_size=1, max_size=4)


class Run:
    """Training on one prompt, whose samples an engine learns, a trainer pushes, or both.

    Args:
        steps: the trainer's step of each epoch.
        is_told: the engine knows them; else das counts the prompt's epochs.
        window_epochs: of the history.
    """

    def __init__(self, steps, *, is_told, window_epochs):
        self.steps, self.is_told = steps, is_told
        self.history = RolloutHistory(window_epochs=window_epochs)
        self.drafter = Drafter(self.history)

    def epoch(self, epoch, group, calls):
        """Generate a group, and let the engine end its requests and the trainer push, in the order of `calls`.

        A call is (who, sample).
        """
        if any(who == "engine" for who, _ in calls):
            for sample in range(len(group)):
                self.drafter.start(
                    f"{epoch}-{sample}",
                    prompt_token_ids=PROMPT,
                    training_step=self.steps[epoch] if self.is_told else None,
                )
        for who, sample in calls:
            if who == "engine":
                self.drafter.extend(f"{epoch}-{sample}", group[sample])
                self.drafter.finish(f"{epoch}-{sample}")
            else:
                self.history.add(rollout(group[sample], self.steps[epoch], ordinal=sample, reward=float(sample)))

    def window(self):
        """The responses of each epoch, oldest first, each with its step."""
        found = {}
        for known in self.history.rollouts(KEY):
            found.setdefault(known.training_step, []).append(known.response_token_ids.tolist())
        return list(found.items())

    def counts(self):
        """What the tree of a request that starts now has counted after each context."""
        drafter = self.probe()
        tree = tree_of(self.history)
        found = {context: [sum(tree.child_counts(context, token)) for token in TOKENS] for context in CONTEXTS}
        drafter.close()
        return found

    def drafts(self):
        """What is drafted behind each context."""
        found = {}
        for context in CONTEXTS[:12]:
            drafter = self.probe()
            drafter.extend("probe", context)
            found[context] = draft(drafter, "probe", 6)
            drafter.close()
        return {context: (one.draft_token_ids, one.survival) for context, one in found.items()}

    def probe(self):
        drafter = Drafter(self.history)
        drafter.start("probe", prompt_token_ids=PROMPT, training_step=self.steps[-1] + 1)
        return drafter


def merged(data, first, second):
    """Some interleaving of two sequences of calls, each in its own order."""
    turns = data.draw(st.permutations([0] * len(first) + [1] * len(second)))
    rest = [list(first), list(second)]
    return [rest[turn].pop(0) for turn in turns]


def runs(data, groups_of_epochs, *, is_told, is_shuffled=False, window_epochs=3):
    """The same training three times: the engine alone, the trainer alone, and both together."""
    gaps = data.draw(st.lists(st.integers(1, 50), min_size=len(groups_of_epochs), max_size=len(groups_of_epochs)))
    steps = [sum(gaps[: epoch + 1]) for epoch in range(len(gaps))]
    engine, trainer, both = (Run(steps, is_told=is_told, window_epochs=window_epochs) for _ in range(3))
    for epoch, group in enumerate(groups_of_epochs):
        ends = data.draw(st.permutations(range(len(group))))
        pushes = data.draw(st.permutations(ends)) if is_shuffled else ends
        ended, pushed = [("engine", sample) for sample in ends], [("trainer", sample) for sample in pushes]
        again = data.draw(st.lists(st.sampled_from(pushed), max_size=2))  # a trainer that says it twice
        engine.epoch(epoch, group, ended)
        trainer.epoch(epoch, group, pushed)
        both.epoch(epoch, group, merged(data, ended, pushed) + again)
    return engine, trainer, both


def sorted_window(run):
    return [(step, sorted(group)) for step, group in run.window()]


@given(st.data(), epochs, st.booleans())
def test_engine_and_trainer_together_leave_the_tree_of_either_alone(data, groups_of_epochs, is_told):
    engine, trainer, both = runs(data, groups_of_epochs, is_told=is_told)
    assert both.window() == trainer.window()
    assert [group for _, group in engine.window()] == [group for _, group in both.window()]
    if is_told:
        assert engine.window() == both.window()
    assert {r.reward for r in both.history.rollouts(KEY)} == {r.reward for r in trainer.history.rollouts(KEY)}
    assert engine.counts() == trainer.counts() == both.counts()
    assert engine.drafts() == trainer.drafts() == both.drafts()


@given(st.data(), epochs, st.booleans())
def test_whoever_comes_in_whatever_order_counts_once(data, groups_of_epochs, is_told):
    """Samples that end and arrive in other orders: ties may go to another token, but every count is the same.

    Where das counts the epochs and the window is full, what the trainer says of one that the engine is still at may
    be taken for one epoch more, and the oldest leaves the window early.
    """
    window_epochs = 3 if is_told else 5
    engine, trainer, both = runs(data, groups_of_epochs, is_told=is_told, is_shuffled=True, window_epochs=window_epochs)
    assert sorted_window(both) == sorted_window(trainer)
    assert engine.counts() == trainer.counts() == both.counts()


def test_a_trainer_that_says_the_step_says_it_for_the_whole_epoch():
    """One rollout is pushed before the others have ended: those that das counted move along, and so do these."""
    history = RolloutHistory()
    drafter = Drafter(history)
    for name in "abc":
        drafter.start(name, prompt_token_ids=PROMPT)
    for name, token in (("a", 4), ("b", 5)):
        drafter.extend(name, [token])
        drafter.finish(name)
    assert not history.add(rollout([4], 120))
    drafter.extend("c", [6])
    drafter.finish("c")
    assert [(r.training_step, r.request_id) for r in history.rollouts(KEY)] == [(120, "a"), (120, "b"), (120, "c")]
    drafter.start("d", prompt_token_ids=PROMPT)  # the next epoch comes after it
    drafter.extend("d", [4])
    drafter.finish("d")
    assert history.rollouts(KEY)[-1].training_step == 121


def test_what_another_engine_has_said_before_is_not_claimed_by_a_later_epoch():
    history = RolloutHistory()
    history.add(rollout([4], 60))  # of another engine: this one never generated it
    drafter = Drafter(history)
    drafter.start("a", prompt_token_ids=PROMPT)
    drafter.extend("a", [4])
    drafter.finish("a")
    assert len(history.rollouts(KEY)) == 1  # in the epoch of 60, as far as das can tell
    drafter.start("b", prompt_token_ids=PROMPT)
    drafter.extend("b", [4])
    drafter.finish("b")
    assert [r.training_step for r in history.rollouts(KEY)] == [60, 61]


def finished(history, *names_and_responses):
    """Run requests side by side, without saying their step."""
    drafter = Drafter(history)
    for name, _ in names_and_responses:
        drafter.start(name, prompt_token_ids=PROMPT)
    for name, response in names_and_responses:
        drafter.extend(name, response)
        drafter.finish(name)


def test_das_counts_on_from_the_newest_step_so_an_older_one_is_another_epoch():
    history = RolloutHistory()
    finished(history, ("a", [9]))
    assert not history.add(rollout([9], 4))
    finished(history, ("b", [4]))
    assert history.add(rollout([4], 2))  # late, and of another engine
    assert [r.training_step for r in history.rollouts(KEY)] == [2, 4, 5]


def test_an_epoch_whose_step_was_told_stays_there():
    """Also where das' count happened to be right."""
    history = RolloutHistory()
    finished(history, ("a", [4]), ("b", [4]))
    assert not history.add(rollout([4], 0))
    assert history.add(rollout([4], 3))  # of another engine; one of the first two still has no number
    assert [r.training_step for r in history.rollouts(KEY)] == [0, 0, 3]
