"""Every call that the drafter and plan_step refuse: the error says what is wrong, and nothing has changed."""

import numpy as np
import pytest
from rollout_samples import KEY, PROMPT, filled, rollout

from das import Drafter, FixedBudget, plan_step, prompt_key

HISTORY = [rollout([4, 5, 6, 7, 8], 0), rollout([4, 5, 9, 4, 5, 6], 0)]


class Listener(FixedBudget):
    """Remembers what it was told."""

    def __init__(self):
        super().__init__(4)
        self.heard = []

    def observe(self, drafted, accepted, *, step_ms=None):
        self.heard.append((drafted.tolist(), accepted.tolist(), step_ms))


class Scene:
    """Two running requests with pending drafts, one of them perhaps behind environment tokens, and a policy."""

    def __init__(self, *, has_environment):
        self.drafter = Drafter(filled(*HISTORY))
        self.policy = Listener()
        for name in "ab":
            self.drafter.start(name, prompt_token_ids=PROMPT, training_step=1, max_total_tokens=100)
            self.drafter.extend(name, [4, 5])
        plan_step(self.drafter, ["a"], policy=self.policy)
        self.drafter.extend("a", [6, 7, 9, 4])
        plan_step(self.drafter, ["a", "b"], policy=self.policy)
        self.drafter.extend("a", [5, 6])
        if has_environment:
            self.drafter.extend("a", [4, 5], generated=False)
        self.draft(["a"], [2])

    def draft(self, names, caps, prices=None, **limits):
        prices = [0.0] * len(names) if prices is None else prices
        return self.drafter.draft(names, max_draft_tokens=caps, min_survival=prices, **limits)

    def plan(self, names, **limits):
        return plan_step(self.drafter, names, policy=self.policy, **limits)

    def future(self):
        """What the scene leads to: every answer from here on, and all that was learned and stored."""
        drafter = self.drafter
        seen = [drafter.request_ids(), drafter.history.statistics(), drafter.history.prompt_keys()]
        drafter.extend("b", [6, 7, 8])  # scores b's draft of the last plan_step
        seen += [drafter.counters("a"), drafter.counters("b"), drafter.counters()]
        drafter.extend("a", [6, 9, 4])
        seen += [(name, one.draft_token_ids, one.survival) for name, one in self.plan(["b", "a"]).items()]
        seen += [self.policy.heard, drafter.finish("a", reward=1.0), drafter.finish("b")]
        for key in (KEY, prompt_key([9])):
            for r in drafter.history.rollouts(key):
                mask = None if r.response_mask is None else r.response_mask.tolist()
                seen += [(r.request_id, r.training_step, r.reward, r.response_token_ids.tolist(), mask)]
        return [*seen, drafter.confidence.hits.tolist(), drafter.confidence.misses.tolist()]


def start(name="c", **changes):
    return lambda scene: scene.drafter.start(name, **{"prompt_token_ids": [9], **changes})


def extend(name, token_ids, **options):
    return lambda scene: scene.drafter.extend(name, token_ids, **options)


def note(name, token_ids):
    return extend(name, token_ids, generated=False)


def draft(*arguments, **limits):
    return lambda scene: scene.draft(*arguments, **limits)


def finish(name="a", **options):
    return lambda scene: scene.drafter.finish(name, **options)


def plan(*arguments, **limits):
    return lambda scene: scene.plan(*arguments, **limits)


UNKNOWN = "request 'x' is not running"
TWICE = "request_ids names a request twice"

BAD_CALLS = {
    "start: running": (start("a"), ValueError, "request_id 'a' is already running"),
    "start: name": (start(5), TypeError, "request_id must be a str, not int"),
    "start: no prompt": (start(prompt_token_ids=[]), ValueError, "prompt_token_ids is empty; it must hold at least"),
    "start: id": (start(prompt_token_ids=[1, -2]), ValueError, r"prompt_token_ids\[1\] is -2; token ids are 0 <="),
    "start: text": (start(prompt_token_ids="ab"), TypeError, "prompt_token_ids must hold token ids"),
    "start: key": (start(prompt_key=2**64), ValueError, "prompt_key is 18446744073709551616; it must be 0 <="),
    "start: key type": (start(prompt_key="k"), TypeError, "prompt_key must be an int, not str"),
    "start: step": (start(training_step=-1), ValueError, "training_step is -1; it must be 0 <="),
    "start: step type": (start(training_step=1.0), TypeError, "training_step must be an int, not float"),
    "start: limit": (start(max_total_tokens=-1), ValueError, "max_total_tokens is -1; it must be 0 <="),
    "start: limit type": (start(max_total_tokens="1"), TypeError, "max_total_tokens must be an int, not str"),
    "extend: unknown": (extend("x", [4]), KeyError, UNKNOWN),
    "extend: id": (extend("a", [4, 2**31]), ValueError, r"token_ids\[1\] is 2147483648;"),
    "extend: type": (extend("a", [4.0]), TypeError, r"token_ids\[0\] is a float"),
    "extend: text": (extend("a", "45"), TypeError, "token_ids must hold token ids"),
    "extend: verified type": (extend("a", [4], num_verified_draft_tokens="1"), TypeError, ""),
    "environment: unknown": (note("x", [4]), KeyError, UNKNOWN),
    "environment: id": (note("a", [4, -1]), ValueError, r"token_ids\[1\] is -1;"),
    "environment: id of the first": (note("b", [-1]), ValueError, r"token_ids\[0\] is -1;"),
    "draft: unknown": (draft(["a", "x"], [3, 3]), KeyError, UNKNOWN),
    "draft: twice": (draft(["b", "a", "b"], [3] * 3), ValueError, TWICE),
    "draft: cap": (draft(["b", "a"], [3, 65]), ValueError, "max_draft_tokens.*65"),
    "draft: negative cap": (draft(["b", "a"], [3, -1]), ValueError, "max_draft_tokens.*-1"),
    "draft: caps": (draft(["b", "a"], []), ValueError, "max_draft_tokens"),
    "draft: prices": (draft(["b", "a"], [3, 3], [0.0]), ValueError, "min_survival"),
    "draft: batch": (draft(["b"], [3], max_batch_draft_tokens=-1), ValueError, "max_batch_draft_tokens.*-1"),
    "finish: unknown": (finish("x"), KeyError, UNKNOWN),
    "finish: reward": (finish(reward=np.nan), ValueError, "reward is nan; it must be finite"),
    "finish: reward type": (finish(reward="1"), TypeError, "reward must be a number"),
    "finish: step": (finish(training_step=-1), ValueError, "training_step is -1; it must be 0 <="),
    "counters: unknown": (lambda scene: scene.drafter.counters("x"), KeyError, UNKNOWN),
    "running: unknown": (lambda scene: scene.drafter.running(["a", "x"]), KeyError, UNKNOWN),
    "plan_step: unknown": (plan(["b", "x"]), KeyError, UNKNOWN),
    "plan_step: twice": (plan(["b", "b"]), ValueError, TWICE),
    "plan_step: limit": (plan(["b"], max_draft_tokens={"b": -2}), ValueError, "max_draft_tokens holds -2; a limit is"),
    "plan_step: batch": (plan(["b"], max_batch_draft_tokens=-3), ValueError, "max_batch_draft_tokens is -3; it must"),
}
for number in (-1, 3, 2**70):
    message = f"num_verified_draft_tokens is {number}; the pending draft has "
    BAD_CALLS[f"extend: {number} verified"] = (extend("a", [4], num_verified_draft_tokens=number), ValueError, message)


@pytest.mark.parametrize("has_environment", [False, True])
@pytest.mark.parametrize(("call", "error", "message"), BAD_CALLS.values(), ids=BAD_CALLS)
def test_a_refused_call_changes_nothing(call, error, message, has_environment):
    scene = Scene(has_environment=has_environment)
    with pytest.raises(error, match=message or None):
        call(scene)
    assert scene.future() == Scene(has_environment=has_environment).future()


def test_most_arguments_are_keywords():
    drafter = Scene(has_environment=False).drafter
    for call in (
        lambda: drafter.start("c", [9]),
        lambda: drafter.extend("a", [4], 0),
        lambda: drafter.draft(["a"], [3], [0.0]),
        lambda: drafter.finish("a", 1.0),
        lambda: Drafter(drafter.history, drafter.confidence),
        lambda: plan_step(drafter, ["a"], FixedBudget()),
    ):
        with pytest.raises(TypeError, match="positional argument"):
            call()
