"""Every call that the drafter and plan_step refuse: the error says what is wrong, and nothing has changed."""

from collections import Counter

import numpy as np
import pytest
from rollout_samples import KEY, PROMPT, filled, rollout, tree_of

from das import Confidence, Drafter, FixedBudget, RolloutHistory, plan_step, prompt_key

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
        self.has_environment = has_environment
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
            self.drafter.extend("b", [6], generated=False)
            self.draft(["a"], [2])
            self.drafter.extend("a", [9, 4], generated=False)  # this the tree has not seen yet
        else:
            self.draft(["a"], [2])

    def draft(self, names, caps, prices=None, **limits):
        prices = [0.0] * len(names) if prices is None else prices
        return self.drafter.draft(names, max_draft_tokens=caps, min_survival=prices, **limits)

    def plan(self, names, **limits):
        return plan_step(self.drafter, names, policy=self.policy, **limits)

    def future(self):
        """What the scene leads to: every answer from here on, and all that was learned and stored."""
        drafter = self.drafter
        if self.has_environment:  # continues the text of the environment so far, unless the tree has that already
            drafter.extend("a", [5, 6], generated=False)
        seen = [drafter.request_ids(), drafter.history.statistics(), drafter.history.prompt_keys()]
        drafter.extend("b", [6, 7, 8])  # scores b's draft of the last plan_step
        seen += [drafter.counters("a"), drafter.counters("b"), drafter.counters()]
        drafter.extend("a", [6, 9, 4])
        seen += [(name, one.draft_token_ids, one.survival) for name, one in self.plan(["b", "a"]).items()]
        seen += [tree_of(drafter.history).counts(context) for context in ([9, 4, 5], [4, 5, 6], [5, 6])]
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


def batch(token_ids, verified=None):
    return lambda scene: scene.drafter.extend_batch(token_ids, num_verified_draft_tokens=verified)


def draft(*arguments, **limits):
    return lambda scene: scene.draft(*arguments, **limits)


def finish(name="a", **options):
    return lambda scene: scene.drafter.finish(name, **options)


def prepare(prompt_keys):
    return lambda scene: scene.drafter.history.prepare(prompt_keys)


def maintain(max_us):
    return lambda scene: scene.drafter.history.maintain(max_us=max_us)


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
    "extend: generated": (extend("a", [4], generated="no"), TypeError, "generated must be a bool, not str"),
    "extend: generated 1": (extend("a", [4], generated=1), TypeError, "generated must be a bool, not int"),
    "environment: verified": (
        extend("a", [4], generated=False, num_verified_draft_tokens="x"),
        TypeError,
        "num_verified_draft_tokens must be an int, not str",
    ),
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
    "plan_step: no ids": (plan(None), TypeError, "request_ids must be a sequence of str, not NoneType"),
    "plan_step: text": (plan("a"), TypeError, "request_ids must be a sequence of str, not str"),
    "plan_step: number": (plan(5), TypeError, "request_ids must be a sequence of str, not int"),
    "plan_step: list in ids": (plan(["b", ["a"]]), TypeError, r"request_ids\[1\] must be a str, not list"),
    "prepare: number": (prepare(5), TypeError, "prompt_keys must be an iterable of ints, not int"),
    "prepare: text": (prepare("abc"), TypeError, "prompt_keys must be an iterable of ints, not str"),
    "prepare: key": (prepare([KEY, "k"]), TypeError, r"prompt_keys\[1\] must be an int, not str"),
    "prepare: range": (prepare([KEY, -1]), ValueError, r"prompt_keys\[1\] is -1; it must be 0 <="),
    "maintain: text": (maintain("x"), TypeError, "max_us must be a number, not str"),
    "maintain: NaN": (maintain(np.nan), ValueError, "max_us is nan; it must be at least 0"),
    "maintain: negative": (maintain(-1), ValueError, "max_us is -1; it must be at least 0"),
    "plan_step: twice": (plan(["b", "b"]), ValueError, TWICE),
    "plan_step: limit": (
        plan(["b"], max_draft_tokens={"b": -2}),
        ValueError,
        r"max_draft_tokens\['b'\] is -2; it must",
    ),
    "plan_step: batch": (plan(["b"], max_batch_draft_tokens=-3), ValueError, "max_batch_draft_tokens is -3; it must"),
}
for number in (-1, 3, 2**70):
    message = f"num_verified_draft_tokens is {number}; the pending draft has "
    BAD_CALLS[f"extend: {number} verified"] = (extend("a", [4], num_verified_draft_tokens=number), ValueError, message)


for name, tokens in {
    "set": {4, 5},
    "frozenset": frozenset([4]),
    "dict": {4: 5},
    "keys": {4: 5}.keys(),
    "counter": Counter([4]),
}.items():
    message = f"token_ids must be a sequence of token ids; a {type(tokens).__name__} does not say their order"
    BAD_CALLS[f"start: {name}"] = (start(prompt_token_ids=tokens), TypeError, f"prompt_{message}")
    BAD_CALLS[f"extend: {name}"] = (extend("a", tokens), TypeError, message)
    BAD_CALLS[f"environment: {name}"] = (note("a", tokens), TypeError, message)
    BAD_CALLS[f"batch: {name}"] = (batch({"b": [1], "a": tokens}), TypeError, f"request 'a': {message}")
for name, (a, verified, error, message) in {
    "id": ([4, -1], None, ValueError, r"request 'a': token_ids\[1\] is -1; token ids are 0 <="),
    "type": ([4.0], None, TypeError, r"request 'a': token_ids\[0\] is a float"),
    "array": (np.array([1, -4]), None, ValueError, r"request 'a': token_ids\[1\] is -4"),
    "text": ("45", None, TypeError, "request 'a': token_ids must hold token ids"),
    "no sequence": (5, None, TypeError, "request 'a': token_ids must be a sequence of token ids, not int"),
    "verified": ([4], {"a": 99}, ValueError, "request 'a': num_verified_draft_tokens is 99; the pending"),
    "negative": ([4], {"a": -1}, ValueError, "request 'a': num_verified_draft_tokens is -1; the pending"),
    "verified type": ([4], {"a": True}, TypeError, "request 'a': num_verified_draft_tokens must be an int, not bool"),
    "verified of none": ([], {"a": 99}, ValueError, "request 'a': num_verified_draft_tokens is 99; the pending"),
    "list": ([4], [1], TypeError, "num_verified_draft_tokens must be a mapping from request_id, not list"),
}.items():
    BAD_CALLS[f"batch: {name}"] = (batch({"b": [6], "a": a}, verified), error, message)
BAD_CALLS["batch: no mapping"] = (batch([[4]]), TypeError, "token_ids must be a mapping from request_id, not list")
BAD_CALLS["batch: unknown"] = (batch({"a": [4], "x": [4]}), KeyError, UNKNOWN)
for name, (caps, error, message) in {
    "float": ([3, 2.0], TypeError, r"max_draft_tokens\[1\] is 2\.0, of type float; it must hold ints"),
    "text": ([3, "2"], TypeError, r"max_draft_tokens\[1\] is '2', of type str; it must hold ints"),
    "bool": ([True, 3], TypeError, r"max_draft_tokens\[0\] is True, of type bool; it must hold ints"),
    "None": ([3, None], TypeError, r"max_draft_tokens\[1\] is None, of type NoneType; it must hold ints"),
    "nested": ([[3], [3]], TypeError, r"max_draft_tokens\[0\] is \[3\], of type list; it must hold ints"),
    "huge": ([3, 2**70], ValueError, f"max_draft_tokens holds {2**70}, which is out of range"),
    "unsigned": (np.array([3, 2**63], np.uint64), ValueError, f"max_draft_tokens holds {2**63}, which is out of"),
    "float array": (
        np.array([3.0, 2.5]),
        TypeError,
        r"max_draft_tokens\[0\] is 3\.0, of type float; it must",
    ),
    "bool array": (np.array([True, False]), TypeError, r"max_draft_tokens\[0\] is True, of type bool"),
    "object array": (np.array([3, "2"], object), TypeError, r"max_draft_tokens\[1\] is '2', of type str"),
    "matrix": (np.array([[3, 2]]), ValueError, "max_draft_tokens has 2 dimensions; it must have one"),
    "number": (3, TypeError, "max_draft_tokens must be a sequence of ints, one a request, not int"),
    "whole text": ("33", TypeError, "max_draft_tokens must be a sequence of ints, one a request, not str"),
    "set": ({3, 4}, TypeError, "max_draft_tokens must be a sequence of ints, one a request, not set"),
    "dict": ({"a": 3, "b": 4}, TypeError, "max_draft_tokens must be a sequence of ints, one a request, not dict"),
    "short": ([3], ValueError, "max_draft_tokens has 1 entries; it must have 2, one a request"),
    "long array": (np.array([3, 3, 3]), ValueError, "max_draft_tokens has 3 entries; it must have 2, one a request"),
}.items():
    BAD_CALLS[f"draft: caps {name}"] = (draft(["b", "a"], caps), error, message)
for name, (prices, error, message) in {
    "text": ([0.5, "0"], TypeError, r"min_survival\[1\] is '0', of type str; it must hold numbers"),
    "bool": ([False, 0.5], TypeError, r"min_survival\[0\] is False, of type bool; it must hold numbers"),
    "complex": (np.array([0.5, 1j]), TypeError, r"min_survival\[0\] is \(0\.5\+0j\), of type complex"),
    "huge": ([0.5, 10**400], ValueError, "min_survival holds 10+, which is out of range"),
    "nan": ([0.5, np.nan], ValueError, r"min_survival\[1\] is nan; it must be a number"),
    "nan array": (np.array([np.nan, 0.5]), ValueError, r"min_survival\[0\] is nan; it must be a number"),
    "nan float32": (np.array([0.5, np.nan], np.float32), ValueError, r"min_survival\[1\] is nan; it must be"),
    "number": (0.5, TypeError, "min_survival must be a sequence of numbers, one a request, not float"),
    "short array": (np.array([0.5]), ValueError, "min_survival has 1 entries; it must have 2, one a request"),
}.items():
    BAD_CALLS[f"draft: prices {name}"] = (draft(["b", "a"], [3, 3], prices), error, message)
for name, (limits, error, message) in {
    "float": ({"a": 3, "b": 2.0}, TypeError, r"max_draft_tokens\['b'\] must be an int, not float"),
    "bool": ({"b": True}, TypeError, r"max_draft_tokens\['b'\] must be an int, not bool"),
    "text": ({"b": "2"}, TypeError, r"max_draft_tokens\['b'\] must be an int, not str"),
    "None": ({"b": None}, TypeError, r"max_draft_tokens\['b'\] must be an int, not NoneType"),
    "of another": ({"a": 2.5}, TypeError, r"max_draft_tokens\['a'\] must be an int, not float"),
    "huge": ({"b": 2**70}, ValueError, r"max_draft_tokens\['b'\] is 1180591620717411303424; it must be 0 <="),
    "list": ([3], TypeError, "max_draft_tokens must be a mapping from request_id to an int, not list"),
    "number": (0, TypeError, "max_draft_tokens must be a mapping from request_id to an int, not int"),
}.items():
    BAD_CALLS[f"plan_step: limit {name}"] = (plan(["b"], max_draft_tokens=limits), error, message)
for number, error in ((2.0, TypeError), ("2", TypeError), (True, TypeError), (-1, ValueError)):
    BAD_CALLS[f"plan_step: {number!r} running"] = (plan(["b"], num_running=number), error, "num_running ")


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


def name_of(wrong):
    return (
        wrong.__name__ if callable(wrong) else type(wrong).__name__
    )  # a repr with an address differs between processes


@pytest.mark.parametrize(
    "wrong",
    [42, "x", [], object(), RolloutHistory, Confidence],
    ids=name_of,
)
def test_a_drafter_of_something_else_is_refused(wrong):
    name = type(wrong).__name__
    with pytest.raises(TypeError, match=f"history must be a RolloutHistory or None, not {name}"):
        Drafter(wrong)
    with pytest.raises(TypeError, match=f"confidence must be a Confidence or None, not {name}"):
        Drafter(confidence=wrong)
    with pytest.raises(TypeError, match=f"drafter must be a Drafter, not {name}"):
        plan_step(wrong, [], policy=FixedBudget())


class Deaf:
    """No policy: it cannot be told how drafts fared."""

    def budgets(self, requests):
        raise AssertionError("asked although it is no policy")


@pytest.mark.parametrize(
    "wrong",
    [None, "x", 8, {}, Deaf(), FixedBudget, print],
    ids=name_of,
)
def test_a_policy_that_is_none_is_refused_and_nothing_changes(wrong):
    scene = Scene(has_environment=True)
    shown = "the class FixedBudget" if wrong is FixedBudget else type(wrong).__name__
    with pytest.raises(TypeError, match=rf"policy must be a budget policy, .* \(das\.budget\), not {shown}"):
        plan_step(scene.drafter, ["a"], policy=wrong)
    assert scene.future() == Scene(has_environment=True).future()


class Hoarse(Listener):
    """Hears, and then fails."""

    def observe(self, drafted, accepted, *, step_ms=None):
        super().observe(drafted, accepted, step_ms=step_ms)
        raise RuntimeError("hoarse")


def test_what_a_policy_failed_to_hear_is_not_told_again():
    scene, policy = Scene(has_environment=False), Hoarse()
    with pytest.raises(RuntimeError, match="hoarse"):
        plan_step(scene.drafter, ["a"], policy=policy)
    assert len(policy.heard) == 1
    scene.drafter.extend("b", [6])  # the pending drafts are as they were
    plan_step(scene.drafter, ["a"], policy=scene.policy)
    assert len(scene.policy.heard[-1][0]) == 1


class Careless(FixedBudget):
    """Gives whatever it was made of."""

    def __init__(self, caps, prices):
        super().__init__()
        self.given = caps, prices

    def budgets(self, requests):
        return self.given


@pytest.mark.parametrize("limits", [None, {"a": 2}])
@pytest.mark.parametrize(
    ("caps", "prices", "error", "message"),
    [
        ([2.5, 3], [0.0, 0.0], TypeError, r"max_draft_tokens\[0\] is 2\.5"),
        (np.array([2.0, 3.0]), [0.0, 0.0], TypeError, r"max_draft_tokens\[0\] is 2\.0"),
        ([2], [0.0, 0.0], ValueError, "max_draft_tokens has 1 entries; it must have 2"),
        ([2, 3], [0.0, np.nan], ValueError, r"min_survival\[1\] is nan"),
        ([2, 3], None, TypeError, "min_survival must be a sequence of numbers"),
    ],
)
def test_a_policy_that_gives_nonsense_is_told(caps, prices, error, message, limits):
    drafter = Scene(has_environment=False).drafter
    with pytest.raises(error, match=message):
        plan_step(drafter, ["a", "b"], policy=Careless(caps, prices), max_draft_tokens=limits)


def test_caps_and_prices_of_every_honest_kind_draft_the_same():
    def drafted(caps, prices):
        drafts = Scene(has_environment=False).draft(["b", "a"], caps, prices)
        return [(one.draft_token_ids, one.survival) for one in drafts.values()]

    expected = drafted([3, 1], [0.0, 0.25])
    assert [len(tokens) for tokens, _ in expected] == [3, 1]
    for caps in (
        (3, 1),
        iter([3, 1]),
        [np.int8(3), np.uint64(1)],
        np.array([3, 1]),
        np.array([3, 1], np.uint8),
        np.array([3, 1], ">i8"),
        np.array([3, 9, 1, 9])[::2],
        np.array([3, 1], object),
    ):
        assert drafted(caps, [0.0, 0.25]) == expected
    for prices in (
        (0, 0.25),
        [np.float32(0), np.float64(0.25)],
        np.array([0.0, 0.25]),
        np.array([0.0, 0.25], np.float32),
        np.array([0.0, 9, 0.25, 9])[::2],
    ):
        assert drafted([3, 1], prices) == expected
    empty = Scene(has_environment=False)
    assert empty.draft([], np.array([]), np.array([])) == {}  # a policy's array of no requests has no dtype to speak of


def test_a_limit_of_a_request_that_is_not_asked_for_is_ignored():
    policy = FixedBudget(4)
    with_limits = plan_step(
        Scene(has_environment=False).drafter, ["b"], policy=policy, max_draft_tokens={"a": 0, "gone": 0, "b": 2}
    )
    assert len(with_limits["b"]) == 2


def test_nothing_emitted_changes_nothing_behind_environment_tokens():
    for call in (extend("a", []), batch({"b": [], "a": ()}), batch({})):
        scene = Scene(has_environment=True)
        call(scene)
        assert scene.future() == Scene(has_environment=True).future()
