"""Where draft tokens come from: the longest context that knows them, in whose text, and no trace of having asked."""

import numpy as np
import pytest
from rollout_samples import PROMPT, draft, filled, rollout, tree_of

from das import Drafter, PriceBudget, plan_step
from das.draft_origins import TokenOrigin


def paths_of(draft):
    """The draft tokens before each draft token, on its own branch."""
    paths = []
    for token, parent in zip(draft.draft_token_ids, draft.parents, strict=True):
        paths.append([*(paths[parent] if parent >= 0 else []), token])
    return [path[:-1] for path in paths]


def random_run(*, shape, ask):
    """Two requests of one prompt, over three old rollouts; returns drafts and origins of each step, and the tree."""
    random = np.random.default_rng(3)
    history = filled(*[rollout(random.integers(0, 3, 60).tolist(), 0) for _ in range(3)])
    drafter = Drafter(history)
    responses = {name: [] for name in "ab"}
    for name in responses:
        drafter.start(name, prompt_token_ids=PROMPT, training_step=1)
    seen = []
    for _ in range(30):
        drafts = plan_step(drafter, list(responses), policy=PriceBudget(min_survival=0.05), shape=shape)
        for name, its in drafts.items() if ask else ():
            tree = tree_of(history)
            for token, path, origin in zip(its.draft_token_ids, paths_of(its), drafter.origins(name, its), strict=True):
                text = [*PROMPT, *responses[name], *path]
                longer = range(origin.order + 1, min(16, len(text)) + 1)
                counts = tree.child_counts(text[-origin.order :], token)
                assert (origin.num_running, origin.num_history) == counts != (0, 0)
                assert [tree.child_counts(text[-order:], token) for order in longer] == [(0, 0)] * len(longer)
        seen.append([(its.draft_token_ids, its.survival) for its in drafts.values()])
        emitted = {name: random.integers(0, 3, 1).tolist() for name in responses}
        drafter.extend_batch(emitted)
        for name, tokens in emitted.items():
            responses[name] += tokens
    return seen


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_it_is_the_longest_context_that_knows_the_token(shape):
    assert sum(len(tokens) for step in random_run(shape=shape, ask=True) for tokens, _ in step) > 50


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_asking_changes_nothing(shape):
    assert random_run(shape=shape, ask=True) == random_run(shape=shape, ask=False)


def test_history_running_text_and_both():
    drafter = Drafter(filled(rollout([4, 5, 6, 7], 0)))
    for name in "ab":
        drafter.start(name, prompt_token_ids=PROMPT, training_step=1)
    assert drafter.origins("a", draft(drafter, "a", 2)) == [TokenOrigin(3, 0, 1), TokenOrigin(4, 0, 1)]
    drafter.extend("b", [4, 5, 8, 9, 8, 9])
    assert drafter.origins("a", draft(drafter, "a", 1)) == [TokenOrigin(3, 1, 1)]
    drafter.extend("a", [8])
    assert drafter.origins("a", draft(drafter, "a", 1)) == [TokenOrigin(1, 1, 0)]


def test_other_prompts_text_is_named_so():
    drafter = Drafter()
    drafter.start("other", prompt_token_ids=[9], training_step=0)
    drafter.extend("other", [4, 5, 6, 4, 5, 6])
    drafter.start("a", prompt_token_ids=PROMPT, training_step=0)
    drafter.extend("a", [4])
    (origin,) = drafter.origins("a", draft(drafter, "a", 1))
    assert origin.is_common
    assert (origin.order, origin.num_history) == (1, 0)


def test_wrong_arguments_are_named():
    drafter = Drafter(filled(rollout([4, 5, 6, 7], 0)))
    drafter.start("a", prompt_token_ids=PROMPT, training_step=1)
    with pytest.raises(TypeError, match="draft must be a Draft, not list"):
        drafter.origins("a", [4])
    with pytest.raises(KeyError, match="request 'b' is not running"):
        drafter.origins("b", draft(drafter, "a", 1))
