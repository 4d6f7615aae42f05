"""plan_step(widths=...): one verify width for the whole batch, chosen by expected cost; replay counts the padding."""

import re

import numpy as np
import pytest
import strategies
from hypothesis import given
from hypothesis import strategies as st
from rollout_samples import PROMPT, filled, rollout

from das import Drafter, FixedBudget, LatencyEstimator, LatencyModel, NoDraft, PriceBudget, ThroughputBudget, plan_step
from das.analysis.replay import Replay, replay

LONG = list(range(100, 200))
WIDTHS = (0, 3, 7, 15)
all_widths = st.lists(st.integers(0, 16), min_size=1, max_size=5, unique=True).map(sorted)
latencies = st.builds(LatencyModel, c_base_ms=st.sampled_from([0.5, 5.0, 50.0]), c_tok_ms=st.sampled_from([0.01, 1.0]))


def crowd(*names):
    drafter = Drafter(filled(rollout(LONG, 0)))
    for name in names:
        drafter.start(name, prompt_token_ids=PROMPT, training_step=1)
    return drafter


@st.composite
def scenes(draw):
    """A drafter with up to four requests on a prompt that has a history."""
    alphabet = draw(strategies.alphabets)
    texts = draw(st.lists(strategies.words(alphabet), min_size=1, max_size=4))
    drafter = Drafter(filled(*(rollout(text, 0, ordinal=n) for n, text in enumerate(texts))))
    names = list("abcd"[: draw(st.integers(1, 4))])
    for name in names:
        drafter.start(name, prompt_token_ids=PROMPT, training_step=1)
        drafter.extend(name, draw(strategies.words_after(alphabet, texts)))
    return drafter, names


@given(st.data())
def test_the_width_costs_least_per_expected_token(data):
    drafter, names = data.draw(scenes())
    widths, latency = data.draw(all_widths), data.draw(latencies)
    shape = data.draw(st.sampled_from(["chain", "tree"]))
    num_running = len(names) + data.draw(st.sampled_from([0, 3, 60]))
    policy = ThroughputBudget(latency=latency)
    price = min(0.1, policy.budgets(drafter.running(names, num_running=num_running))[1][0])
    longest = drafter.draft(
        names, max_draft_tokens=[min(16, widths[-1])] * len(names), min_survival=[price] * len(names), shape=shape
    )

    def cost(width):
        survival = sum(sum(one.survival[:width]) for one in longest.values())
        pass_ms = latency.c_base_ms + latency.c_tok_ms * num_running * (1 + width)
        return pass_ms / (num_running * (1 + survival / len(names)))

    drafts = plan_step(drafter, names, policy=policy, num_running=num_running, shape=shape, widths=widths)
    assert drafts.width in widths
    assert cost(drafts.width) == pytest.approx(min(map(cost, widths)))
    for name in names:
        assert drafts[name].draft_token_ids == longest[name].draft_token_ids[: drafts.width]
        assert drafts[name].parents == longest[name].parents[: drafts.width]
        drafter.extend(name, [1])
        assert drafter.counters(name).num_drafted_tokens == len(drafts[name])


@given(st.data())
def test_without_a_latency_the_width_holds_the_longest_draft(data):
    drafter, names = data.draw(scenes())
    widths = data.draw(all_widths)
    policy = data.draw(st.sampled_from([FixedBudget(5), PriceBudget(min_survival=0.3), NoDraft()]))
    free = plan_step(drafter, names, policy=policy)
    assert free.width is None
    drafts = plan_step(drafter, names, policy=policy, widths=widths)
    longest = max(map(len, free.values()))
    assert drafts.width == min((width for width in widths if width >= longest), default=widths[-1])
    for name in names:
        assert drafts[name].draft_token_ids == free[name].draft_token_ids[: drafts.width]


def test_nobody_runs():
    assert plan_step(crowd(), [], policy=ThroughputBudget(), widths=WIDTHS) == {}
    assert plan_step(crowd(), [], policy=ThroughputBudget(), widths=WIDTHS).width == 0
    assert plan_step(crowd(), [], policy=FixedBudget(), widths=(2, 4)).width == 2


@pytest.mark.parametrize(
    ("limit", "width", "lengths"), [(None, 15, 15), (30, 15, 15), (29, 7, 7), (6, 3, 3), (5, 0, 0)]
)
def test_padding_takes_its_part_of_the_batch_limit(limit, width, lengths):
    drafter = crowd("a", "b")
    policy = FixedBudget(20)
    drafts = plan_step(drafter, ["a", "b"], policy=policy, widths=WIDTHS, max_batch_draft_tokens=limit)
    assert (drafts.width, [len(one) for one in drafts.values()]) == (width, [lengths] * 2)
    cut = plan_step(drafter, ["a", "b"], policy=policy, widths=(3, 7), max_batch_draft_tokens=2)
    assert (cut.width, sum(map(len, cut.values()))) == (3, 2)  # the engine can verify no less


def test_limits_of_a_request_leave_padding():
    drafter = crowd("a", "b")
    policy = ThroughputBudget(latency=LatencyModel(c_base_ms=1000.0, c_tok_ms=0.001))
    drafts = plan_step(drafter, ["a", "b"], policy=policy, widths=WIDTHS, max_draft_tokens={"a": 1})
    assert (drafts.width, len(drafts["a"]), len(drafts["b"])) == (15, 1, 15)


def test_width_0_learns_what_acceptance_to_expect():
    drafter = crowd("a")
    policy = ThroughputBudget(latency=LatencyModel(c_base_ms=0.0, c_tok_ms=1.0))
    assert plan_step(drafter, ["a"], policy=policy, widths=(0,)).width == 0
    drafter.extend("a", LONG[:1])
    assert (drafter.confidence.hits.sum(), drafter.counters("a").num_drafted_tokens) == (1, 0)


def test_the_latency_is_learned_from_what_was_verified():
    """A pass of two requests at width 3 has eight tokens, whatever of them is padding."""
    heard = []

    class Recorder(LatencyEstimator):
        def observe(self, num_tokens, num_context_tokens, step_ms):
            heard.append((num_tokens, step_ms))

    drafter = crowd("a", "b")
    policy = ThroughputBudget(latency=Recorder(LatencyModel(c_base_ms=5.0, c_tok_ms=0.025)))
    plan_step(drafter, ["a", "b"], policy=policy, widths=(3,), max_draft_tokens={"a": 1})
    drafter.extend_batch({"a": LONG[:1], "b": LONG[:1]})
    plan_step(drafter, ["a", "b"], policy=policy, step_ms=7.0)
    assert heard == [(8, 7.0)]
    drafts = plan_step(drafter, ["a", "b"], policy=policy)  # each at its own length
    drafter.extend_batch({"a": LONG[1:2], "b": LONG[1:2]})
    plan_step(drafter, ["a", "b"], policy=policy, step_ms=6.0)
    assert heard[1:] == [(2 + sum(map(len, drafts.values())), 6.0)]


BAD_WIDTHS = [
    ((), ValueError, "widths is empty; it must name at least one width"),
    (7, TypeError, "widths must be a sequence of ints, not int"),
    ("07", TypeError, "widths must be a sequence of ints, not str"),
    ({0, 7}, TypeError, "widths must be a sequence of ints, not set"),
    ((0, 2.0), TypeError, r"widths\[1\] is 2.0, of type float; it must hold ints"),
    ((True,), TypeError, r"widths\[0\] is True, of type bool; it must hold ints"),
    ((0, 65), ValueError, r"widths\[1\] is 65; it must be 0 <= width <= 64"),
    ((-1, 3), ValueError, r"widths\[0\] is -1; it must be 0 <= width <= 64"),
    ((3, 0), ValueError, r"widths\[1\] is 0 after 3; widths must ascend"),
    ((3, 3), ValueError, r"widths\[1\] is 3 after 3; widths must ascend"),
]


@pytest.mark.parametrize(("widths", "error", "message"), BAD_WIDTHS)
def test_bad_widths_change_nothing(widths, error, message):
    drafter = crowd("a")
    plan_step(drafter, ["a"], policy=FixedBudget(4))
    with pytest.raises(error, match=f"^{message}$"):
        plan_step(drafter, ["a"], policy=FixedBudget(2), widths=widths)
    with pytest.raises(error, match=f"^{message}$"):
        Replay([rollout(LONG, 0)], widths=widths)
    drafter.extend("a", LONG[:5])
    assert drafter.counters("a").num_accepted_tokens == 4


@pytest.mark.parametrize("width", [4, None, True, "7", 7.0, np.float64(7)])
def test_a_policy_with_a_width_of_its_own_is_told(width):
    class Stubborn(FixedBudget):
        def choose_width(self, requests, expected_accepted, widths):
            return width

    drafter = crowd("a")
    with pytest.raises(ValueError, match=re.escape(f"the policy's width is {width!r}; it must be one of (1, 7)")):
        plan_step(drafter, ["a"], policy=Stubborn(8), widths=(1, 7))
    drafter.extend("a", LONG[:2])  # no draft is pending
    assert drafter.counters("a").num_drafted_tokens == 0


@pytest.mark.parametrize(
    ("width", "error"),
    [
        *((width, ValueError) for width in (-1, -5, 1 << 40, 1 << 63)),
        *((width, TypeError) for width in (1.5, "x", None, True)),
    ],
)
def test_a_width_that_is_none_leaves_no_drafts(width, error):
    drafter = crowd("a")
    with pytest.raises(error, match="width"):
        drafter.draft(["a"], max_draft_tokens=[8], min_survival=[0.0], choose_width=lambda expected: width)
    drafter.extend("a", LONG[:2])
    assert drafter.counters("a").num_drafted_tokens == 0


def test_a_width_may_be_a_numpy_integer():
    drafter = crowd("a")
    drafts = drafter.draft(["a"], max_draft_tokens=[8], min_survival=[0.0], choose_width=lambda expected: np.int64(3))
    assert len(drafts["a"]) == 3


# ---------------------------------------------------------------- replay


def test_replay_counts_padding():
    """What is verified beside the drafts, to three tokens a request and step."""
    log = [rollout(LONG[:8], 0), rollout(LONG[:8], 1), rollout([7], 1)]
    result = replay(log, policy=FixedBudget(2), widths=(0, 3))
    told = result.as_dict()
    assert told["settings"]["widths"] == [0, 3]
    warm = result.batches[1]
    drafted = sum(counters.num_drafted_tokens for counters in warm.requests)
    steps = sum(counters.num_decode_steps for counters in warm.requests)
    assert warm.num_padded_tokens == 3 * steps - drafted
    assert told["total"]["num_padded_tokens"] == sum(batch.num_padded_tokens for batch in result.batches)
    assert replay(log, policy=FixedBudget(2)).as_dict()["total"]["num_padded_tokens"] == 0
    with pytest.raises(ValueError, match="widths goes with order 'step', where requests share a pass, not with"):
        replay(log, widths=(0, 3), order="lockstep")


def test_caps_beyond_the_widths_are_cut_and_prices_above_1_draft_nothing():
    class Off(ThroughputBudget):
        def budgets(self, requests):
            return np.full(len(requests), 64), np.full(len(requests), np.inf)

    drafter = crowd("a")
    drafts = plan_step(drafter, ["a"], policy=Off(), widths=(0, 7))
    assert (drafts.width, len(drafts["a"])) == (0, 0)
