"""Drafter: requests start, grow, are drafted for and finish; what is counted, what is learned, what is refused."""

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout_samples import KEY, PROMPT, count, draft, filled, rollout, run, scored, stored, tree_of

from das import AcceptanceCounters, Confidence, Drafter, RolloutHistory, prompt_key

LOOP = [4, 5, 6, 7, 8, 9]


def started(*history, request_id="a", **settings):
    """A drafter with one request on a prompt that has been answered before."""
    drafter = Drafter(filled(*(history or [rollout(LOOP, 0)])))
    drafter.start(request_id, prompt_token_ids=PROMPT, training_step=1, **settings)
    return drafter


# ---------------------------------------------------------------- what is drafted


def test_a_new_request_drafts_from_the_history():
    drafter = started()
    assert draft(drafter, "a").draft_token_ids == LOOP
    assert draft(drafter, "a", max_draft_tokens=2).draft_token_ids == LOOP[:2]
    assert draft(drafter, "a", max_draft_tokens=0).draft_token_ids == []
    drafter.extend("a", [4, 5])
    assert draft(drafter, "a").draft_token_ids == LOOP[2:]


def test_siblings_and_own_tokens_are_visible_at_once():
    drafter = Drafter()
    for request_id in "ab":
        drafter.start(request_id, prompt_token_ids=PROMPT)
    assert draft(drafter, "b").draft_token_ids == []
    drafter.extend("a", LOOP)
    assert draft(drafter, "b").draft_token_ids == LOOP
    drafter.extend("b", [50, 51, 52, 50])
    assert draft(drafter, "b", max_draft_tokens=2).draft_token_ids == [51, 52]


def test_other_prompts_are_not_visible():
    drafter = started()
    drafter.start("b", prompt_token_ids=PROMPT, prompt_key=7)
    drafter.start("c", prompt_token_ids=[9, *PROMPT])
    assert draft(drafter, "b").draft_token_ids == draft(drafter, "c").draft_token_ids == []
    drafter.extend("b", [4, 5])
    assert draft(drafter, "b").draft_token_ids == []


def test_a_batch_is_drafted_in_the_order_asked_for():
    drafter = started()
    drafter.start("b", prompt_token_ids=[9])
    drafts = drafter.draft(["b", "a"], max_draft_tokens=[3, 3], min_survival=[0.0, 0.0])
    assert [(name, one.draft_token_ids) for name, one in drafts.items()] == [("b", []), ("a", [4, 5, 6])]
    assert drafter.draft([], max_draft_tokens=[], min_survival=[]) == {}
    arrays = {"max_draft_tokens": np.array([64]), "min_survival": np.zeros(1)}
    assert drafter.draft(["a"], **arrays)["a"].draft_token_ids == LOOP


def test_a_draft_is_a_value():
    drafter = started()
    first, again, shorter = draft(drafter, "a"), draft(drafter, "a"), draft(drafter, "a", max_draft_tokens=2)
    assert first == again != shorter
    assert (len(first), len(shorter), hash(first) == hash(again)) == (6, 2, True)
    assert first != LOOP
    first.draft_token_ids.append(1)
    first.survival.append(2.0)
    assert (first.draft_token_ids, len(first.survival)) == (LOOP, 6)
    assert repr(shorter).startswith("Draft(draft_token_ids=[4, 5], survival=[0.")
    with pytest.raises(AttributeError):
        first.survival = []
    with pytest.raises(TypeError, match="send its draft_token_ids"):
        pickle.dumps(first)


# ---------------------------------------------------------------- what is scored


def test_a_decode_step_is_counted_and_scored():
    drafter = started()
    draft(drafter, "a", max_draft_tokens=4)
    drafter.extend("a", [4, 5, 0])
    assert drafter.counters("a") == AcceptanceCounters(1, 1, 4, 2, 3)
    assert scored(drafter.confidence) == (2, 1)
    drafter.extend("a", [4])  # no draft pending
    assert drafter.counters("a") == AcceptanceCounters(2, 1, 4, 2, 4)
    assert scored(drafter.confidence) == (2, 1)
    drafted, accepted = drafter.take_feedback()
    assert (drafted.tolist(), accepted.tolist(), drafted.dtype, accepted.dtype) == ([4, 0], [2, 0], np.int64, np.int64)
    assert [len(part) for part in drafter.take_feedback()] == [0, 0]


def test_a_new_draft_replaces_the_pending_one_unscored():
    drafter = started()
    draft(drafter, "a")
    assert len(draft(drafter, "a", max_draft_tokens=1)) == 1
    assert scored(drafter.confidence) == (0, 0)
    drafter.extend("a", LOOP)
    assert drafter.counters("a") == AcceptanceCounters(1, 1, 1, 1, 6)
    assert scored(drafter.confidence) == (2, 0)  # the token drafted and the one that followed it


def test_a_prediction_that_was_not_drafted_is_scored():
    drafter = started()
    assert len(draft(drafter, "a", max_draft_tokens=0)) == 0
    drafter.extend("a", [4])
    assert len(draft(drafter, "a", min_survival=1.0)) == 0
    drafter.extend("a", [0])
    assert scored(drafter.confidence) == (1, 1)
    assert drafter.counters("a") == AcceptanceCounters(2, 0, 0, 0, 2)


def test_a_price_above_one_asks_for_nothing():
    drafter = started()
    assert len(draft(drafter, "a", min_survival=np.inf)) == 0
    drafter.extend("a", [4])
    assert scored(drafter.confidence) == (0, 0)


@pytest.mark.parametrize(
    ("verified", "emitted", "counters", "hits"),
    [
        (None, [4, 5, 6, 7, 8], (1, 1, 4, 4, 5), (5, 0)),
        (4, [4, 5, 6, 7, 8], (1, 1, 4, 4, 5), (5, 0)),
        (2, [4, 5, 6], (1, 1, 2, 2, 3), (3, 0)),  # the bonus answers the first prediction that was not verified
        (2, [4, 5, 0], (1, 1, 2, 2, 3), (2, 1)),
        (2, [4, 0], (1, 1, 2, 1, 2), (1, 1)),
        (0, [4], (1, 0, 0, 0, 1), (1, 0)),
        (None, [4, 5], (1, 1, 4, 2, 2), (2, 0)),  # the engine stopped at the end of the text
    ],
)
def test_only_what_was_verified_counts(verified, emitted, counters, hits):
    drafter = started()
    draft(drafter, "a", max_draft_tokens=4)
    drafter.extend("a", emitted, num_verified_draft_tokens=verified)
    assert drafter.counters("a") == AcceptanceCounters(*counters)
    assert scored(drafter.confidence) == hits


@pytest.mark.parametrize("generated", [True, False])
@pytest.mark.parametrize("nothing", [[], (), np.array([], np.int32)])
def test_no_tokens_change_nothing(nothing, generated):
    drafter = started()
    draft(drafter, "a", max_draft_tokens=4)
    drafter.extend("a", nothing, generated=generated)
    assert drafter.counters("a") == AcceptanceCounters()
    drafter.extend("a", [4, 5, 0])
    assert drafter.counters("a") == AcceptanceCounters(1, 1, 4, 2, 3)
    assert len(drafter.take_feedback()[0]) == 1
    drafter.finish("a")
    assert drafter.history.rollouts(KEY)[-1].response_mask is None


def test_learned_confidence_is_used():
    confidence = Confidence()
    drafter = Drafter(filled(rollout(LOOP, 0)), confidence=confidence)
    assert drafter.confidence is confidence
    drafter.start("a", prompt_token_ids=PROMPT)
    confidence.misses[:] = 1e9
    assert draft(drafter, "a", min_survival=1e-6).draft_token_ids == []
    confidence.load_state({**confidence.state(), "hits": confidence.misses, "misses": np.zeros((4, 24))})
    assert draft(drafter, "a", min_survival=0.999).draft_token_ids == LOOP


def test_counters_of_one_and_of_all():
    drafter = started()
    drafter.start("b", prompt_token_ids=[9])
    drafter.extend("b", [4, 4])
    draft(drafter, "a", max_draft_tokens=2)
    drafter.extend("a", [4, 5, 6])
    assert drafter.counters() == AcceptanceCounters(2, 1, 2, 2, 5)
    assert drafter.finish("a") == AcceptanceCounters(1, 1, 2, 2, 3)
    assert drafter.counters() == AcceptanceCounters(2, 1, 2, 2, 5)
    assert drafter.request_ids() == ("b",)
    drafter.start("a", prompt_token_ids=[9])  # the name is free again
    assert drafter.counters("a") == AcceptanceCounters()
    assert drafter.request_ids() == ("b", "a")


# ---------------------------------------------------------------- environment tokens

TOOL = [70, 71, 72]


def tool_rollout():
    """Generated 4 5, a tool's answer, generated 6 7."""
    return rollout([4, 5, *TOOL, 6, 7], 0, response_mask=[True] * 2 + [False] * 3 + [True] * 2)


def test_environment_tokens_are_context_and_no_decode_step():
    drafter = started(tool_rollout())
    drafter.extend("a", [4, 5])
    drafter.extend("a", TOOL[:2], generated=False)
    drafter.extend("a", TOOL[2:], generated=False)
    assert drafter.counters("a") == AcceptanceCounters(1, 0, 0, 0, 2)
    assert draft(drafter, "a").draft_token_ids == [6, 7]
    drafter.extend("a", [6, 0])
    assert drafter.finish("a") == AcceptanceCounters(2, 1, 2, 1, 4)
    assert stored(drafter.history)[-1] == (1, [4, 5, *TOOL, 6, 0])
    assert drafter.history.rollouts(KEY)[-1].response_mask.tolist() == [True] * 2 + [False] * 3 + [True] * 2


@pytest.mark.parametrize("from_history", [True, False])
def test_no_draft_runs_from_generated_text_into_environment_text(from_history):
    drafter = Drafter(filled(tool_rollout()) if from_history else None)
    if not from_history:
        drafter.start("sibling", prompt_token_ids=PROMPT, training_step=1)
        drafter.extend("sibling", [4, 5])
        drafter.extend("sibling", TOOL, generated=False)
        drafter.extend("sibling", [6, 7])
    drafter.start("a", prompt_token_ids=PROMPT, training_step=1)
    assert draft(drafter, "a").draft_token_ids == [4, 5]
    drafter.extend("a", [4, 5])
    assert draft(drafter, "a").draft_token_ids == []
    assert (count(drafter.history, [5], 70), count(drafter.history, [72], 6)) == (0, 1)


def test_environment_tokens_drop_the_pending_draft_unscored():
    drafter = started()
    draft(drafter, "a")
    drafter.extend("a", TOOL, generated=False)
    assert draft(drafter, "a").draft_token_ids == []
    drafter.extend("a", [4])
    assert drafter.counters("a") == AcceptanceCounters(1, 0, 0, 0, 1)
    assert scored(drafter.confidence) == (0, 0)


@pytest.mark.parametrize(
    "pieces",
    [
        [(False, [1]), (True, [4])],
        [(True, [4]), (False, [1, 2])],
        [(False, [1, 2])],
        [(True, [4]), (True, [5]), (False, [1]), (False, [2]), (True, [6])],
        [(False, [1]), (True, [4]), (False, [2]), (True, [5, 6]), (False, [3])],
    ],
)
def test_the_stored_mask_tells_who_wrote_what(pieces):
    drafter = Drafter()
    drafter.start("a", prompt_token_ids=PROMPT)
    for generated, token_ids in pieces:
        drafter.extend("a", token_ids, generated=generated)
    assert drafter.finish("a").num_decode_steps == sum(generated for generated, _ in pieces)
    (known,) = drafter.history.rollouts(KEY)
    assert known.response_token_ids.tolist() == [token for _, token_ids in pieces for token in token_ids]
    assert known.response_mask.tolist() == [generated for generated, token_ids in pieces for _ in token_ids]


@pytest.mark.parametrize("is_last", [True, False])
def test_environment_tokens_survive_a_new_tree(is_last):
    drafter = started(tool_rollout())
    drafter.extend("a", [4, 5])
    drafter.extend("a", TOOL, generated=False)
    if not is_last:
        drafter.extend("a", [6])
    drafter.start("b", prompt_token_ids=PROMPT, training_step=2)
    assert draft(drafter, "a").draft_token_ids == ([6, 7] if is_last else [7])
    drafter.extend("a", [8])
    drafter.finish("a")
    assert stored(drafter.history)[-1] == (1, [4, 5, *TOOL, *([] if is_last else [6]), 8])
    assert [count(drafter.history, [5], 70), count(drafter.history, [4], 5)] == [0, 2]


# ---------------------------------------------------------------- limits


@given(st.integers(0, 12), st.integers(1, 5), st.integers(0, 64))
def test_drafts_never_run_past_max_total_tokens(max_total_tokens, num_emitted, cap):
    drafter = started(rollout(range(100, 130), 0), max_total_tokens=max_total_tokens)
    drafter.extend("a", range(100, 100 + num_emitted))
    room = max_total_tokens - len(PROMPT) - num_emitted  # the bonus takes one
    assert len(draft(drafter, "a", max_draft_tokens=cap)) == min(cap, max(0, room - 1))


def test_a_batch_limit_cuts_the_least_likely_tokens():
    drafter = started(*(rollout([4, 5, 6, 7 + i], 0, ordinal=i) for i in range(3)), rollout(LOOP, 0))
    drafter.start("b", prompt_token_ids=PROMPT, training_step=1)
    drafter.extend("b", [4])
    ask = {"max_draft_tokens": [16, 16], "min_survival": [0.0, 0.0]}
    whole = drafter.draft(["a", "b"], **ask)
    ranked = sorted((p, name) for name, one in whole.items() for p in one.survival)
    for limit in range(len(ranked) + 2):
        cut = drafter.draft(["a", "b"], **ask, max_batch_draft_tokens=limit)
        kept = ranked[max(0, len(ranked) - limit) :]
        for name in "ab":
            num_kept = sum(other == name for _, other in kept)
            assert cut[name].draft_token_ids == whole[name].draft_token_ids[:num_kept]
            assert cut[name].survival == whole[name].survival[:num_kept]
    drafter.draft(["a", "b"], **ask, max_batch_draft_tokens=1)
    drafter.extend("a", [4, 5, 6])
    drafter.extend("b", [5, 6])
    assert sum(drafter.take_feedback()[0]) == 1  # what was cut is not counted as drafted


# ---------------------------------------------------------------- the same calls, the same drafts


def many_requests():
    """Twenty requests that all continue differently, moved to a new tree: the latest is the tie's winner."""
    drafter = Drafter(filled(rollout(LOOP, 0)))
    for i in range(20):
        drafter.start(f"r{i}", prompt_token_ids=PROMPT, training_step=1)
        drafter.extend(f"r{i}", [4, 5, 6, 50 + i, 5])
    drafter.start("last", prompt_token_ids=PROMPT, training_step=2)
    drafter.extend("last", [8])
    drafts = drafter.draft(drafter.request_ids(), max_draft_tokens=[16] * 21, min_survival=[0.0] * 21)
    return [(one.draft_token_ids, one.survival) for one in drafts.values()]


def test_two_drafters_given_the_same_calls_draft_the_same():
    expected = many_requests()
    rubbish = [object() for _ in range(1001)]  # other addresses
    assert [many_requests() for _ in range(10)] == [expected] * 10
    del rubbish


# ---------------------------------------------------------------- defaults


def test_defaults():
    drafter = Drafter()
    assert isinstance(drafter.history, RolloutHistory)
    assert (drafter.history.window_epochs, scored(drafter.confidence)) == (4, (0, 0))
    run(drafter, "a", LOOP)
    (known,) = drafter.history.rollouts(prompt_key(PROMPT))
    assert (known.request_id, known.training_step, known.reward, known.response_mask) == ("a", 0, None, None)
    run(drafter, "b", [4], reward=1, training_step=3)
    assert [(r.training_step, r.reward) for r in drafter.history.rollouts(KEY)] == [(0, None), (3, 1.0)]
    drafter.maintain()
    assert tree_of(drafter.history).num_open_sequences == 0
    requests = Drafter().running([])
    assert (len(requests), requests.num_running) == (0, 0)


def test_what_a_policy_is_told():
    drafter = started()
    drafter.start("b", prompt_token_ids=[9], prompt_key=2**64 - 1)
    drafter.extend("a", [4, 5])
    drafter.extend("a", [4], generated=False)
    requests = drafter.running(["b", "a"])
    assert requests.num_prompt_tokens.tolist() == [1, 3]
    assert requests.num_response_tokens.tolist() == [0, 3]
    assert requests.prompt_keys.tolist() == [2**64 - 1, KEY]
    assert [drafter.running(["a"], num_running=n).num_running for n in (None, 0, 1, 7)] == [1, 1, 1, 7]
