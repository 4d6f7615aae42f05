"""Reading an argument may run code that calls the same drafter: that call comes first, and neither spoils the other."""

import pytest
from rollout_samples import PROMPT, filled, rollout

from das import Drafter, FixedBudget, PriceBudget, plan_step

HISTORY = [rollout([4, 5, 6, 7, 8], 0), rollout([4, 5, 9, 4, 5, 6], 0)]
NAMES = ["a", "b", "c"]


class Calls:
    """A sequence of values that makes a call when it is iterated."""

    def __init__(self, values, call):
        self.values = values
        self.call = call

    def __iter__(self):
        for position, value in enumerate(self.values):
            if position == len(self.values) - 1:
                self.call()
            yield value


def running():
    drafter = Drafter(filled(*HISTORY))
    for name in NAMES:
        drafter.start(name, prompt_token_ids=PROMPT, training_step=1)
        drafter.extend(name, [4, 5])
    plan_step(drafter, NAMES, policy=FixedBudget(4))
    drafter.extend("c", [4, 4], generated=False)
    return drafter


def everything(drafter):
    """What the drafter knows, up to the responses it has taken in."""
    names = list(drafter.request_ids())
    drafts = plan_step(drafter, names, policy=PriceBudget(min_survival=0.01))
    seen = [(name, draft.draft_token_ids, draft.survival, drafter.counters(name)) for name, draft in drafts.items()]
    seen += [drafter.confidence.hits.tolist(), drafter.confidence.misses.tolist()]
    for name in names:
        drafter.finish(name)
    (key,) = drafter.history.prompt_keys()
    seen += [(r.request_id, r.response_token_ids.tolist()) for r in drafter.history.rollouts(key)]
    drafter.history.record_for(key).tree.tree.check_invariants()
    return seen


# Calls of one drafter, with token ids for those that take some; `wrap` makes them call something while they are read.
OUTER = {
    "start": lambda drafter, wrap: drafter.start("d", prompt_token_ids=wrap(PROMPT)),
    "extend": lambda drafter, wrap: drafter.extend("a", wrap([6, 7])),
    "extend environment": lambda drafter, wrap: drafter.extend("a", wrap([6, 7]), generated=False),
    "extend_batch": lambda drafter, wrap: drafter.extend_batch({"b": [9, 4], "a": wrap([6, 7])}),
    "draft: ids": lambda drafter, wrap: drafter.draft(wrap(["b", "a"]), max_draft_tokens=[3, 3], min_survival=[0, 0]),
    "draft: caps": lambda drafter, wrap: drafter.draft(
        ["b", "a"], max_draft_tokens=wrap([3, 3]), min_survival=[0.0, 0.0]
    ),
    "plan_step: ids": lambda drafter, wrap: plan_step(drafter, wrap(["b", "a"]), policy=FixedBudget(3)),
}
INNER = {
    "start": lambda drafter: drafter.start("e", prompt_token_ids=PROMPT, training_step=1),
    "extend": lambda drafter: drafter.extend("b", list(range(100, 400))),
    "extend another kind": lambda drafter: drafter.extend("b", iter([9, 9, 9])),
    "extend_batch": lambda drafter: drafter.extend_batch({name: [8, 8, 8] for name in NAMES}),
    "extend itself": lambda drafter: drafter.extend("a", [6, 6]),
    "environment": lambda drafter: drafter.extend("b", [7, 7, 7], generated=False),
    "draft": lambda drafter: plan_step(drafter, NAMES, policy=FixedBudget(1)),
    "feedback": lambda drafter: drafter.take_feedback(),
    "finish another": lambda drafter: drafter.finish("c"),
    "close and start anew": lambda drafter: (
        drafter.close(),
        [drafter.start(name, prompt_token_ids=PROMPT, training_step=2) for name in reversed(NAMES)],
    ),
}


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("outer", OUTER)
def test_a_call_made_while_an_argument_is_read_comes_first(outer, inner):
    nested, in_turn = running(), running()
    OUTER[outer](nested, lambda values: Calls(values, lambda: INNER[inner](nested)))
    INNER[inner](in_turn)
    OUTER[outer](in_turn, lambda values: values)
    assert everything(nested) == everything(in_turn)


@pytest.mark.parametrize("outer", [name for name in OUTER if name != "start"])
def test_a_request_that_ends_while_an_argument_is_read_is_unknown(outer):
    nested, in_turn = running(), running()
    with pytest.raises(KeyError, match="request 'a' is not running"):
        OUTER[outer](nested, lambda values: Calls(values, lambda: nested.finish("a")))
    in_turn.finish("a")
    assert everything(nested) == everything(in_turn)


@pytest.mark.parametrize("outer", OUTER)
def test_an_argument_that_fails_while_it_is_read_changes_nothing(outer):
    class OwnError(ValueError):
        """Of the caller's code: it comes back as it is."""

        def __init__(self, first, second):
            super().__init__(first, second)

    def fail():
        raise OwnError(1, 2)

    drafter = running()
    with pytest.raises(OwnError):
        OUTER[outer](drafter, lambda values: Calls(values, fail))
    assert everything(drafter) == everything(running())


def test_endless_nesting_ends_in_an_error_and_not_in_a_crash():
    drafter = running()

    def again():
        drafter.extend("b", Calls([7, 8], again))

    with pytest.raises(RecursionError):
        drafter.extend("a", Calls([6, 7], again))
    assert everything(drafter) == everything(running())
