"""The text that prompts without history share: who joins it, what it changes, when it ends, what it costs."""

import pytest
from rollout_samples import draft, filled, rollout, run

from das import Drafter, Rollout, RolloutHistory, prompt_key
from das.common_text import CommonText

TEXT = list(range(100, 130))


def started(drafter, request_id, prompt, emitted=()):
    drafter.start(request_id, prompt_token_ids=prompt)
    if emitted:
        drafter.extend(request_id, emitted)
    return request_id


def drafted(drafter, request_id):
    return draft(drafter, request_id).draft_token_ids


def test_a_prompt_without_history_sees_what_others_emit_right_now():
    drafter = Drafter()
    started(drafter, "a", [1, 2], [3, *TEXT])
    started(drafter, "b", [7, 8], [9, *TEXT[:3]])
    assert drafted(drafter, "b")[:5] == TEXT[3:8]
    assert drafter.confidence.hits.sum() == 0
    drafter.extend("b", [TEXT[3], TEXT[4], 5])
    assert drafter.confidence.hits[:3].sum() == 0, "only other prompts ever continued so"
    assert drafter.confidence.hits[3].sum() == pytest.approx(2, rel=1e-3)
    assert drafter.confidence.misses[3].sum() == pytest.approx(1, rel=1e-3)


def test_it_is_off_at_zero_tokens():
    drafter = Drafter(RolloutHistory(max_common_tokens=0))
    started(drafter, "a", [1, 2], [3, *TEXT])
    started(drafter, "b", [7, 8], [9, *TEXT[:3]])
    assert drafted(drafter, "b") == []
    assert drafter.history.statistics().common_bytes == 0


def test_a_prompt_with_history_neither_sees_nor_feeds_it():
    drafter = Drafter(filled(rollout([50, 51], 0, prompt=[7, 8])))
    started(drafter, "a", [1, 2], [3, *TEXT])
    started(drafter, "b", [7, 8], [9, *TEXT[:3]])
    assert drafted(drafter, "b") == []
    drafter.extend("b", [60, 61, 62])
    started(drafter, "c", [4, 4], [60, 61])
    assert drafted(drafter, "c") == []


def test_own_text_weighs_more_than_that_of_others():
    drafter = Drafter()
    for name in "abcd":
        started(drafter, name, [ord(name)], [40, 41, 42, 200 + ord(name)])  # after 40 41, all the others say 42
    started(drafter, "own", [9], [40, 41, 43, 5, 40, 41, 43, 5, 40, 41])
    assert drafted(drafter, "own")[0] == 43
    started(drafter, "new", [8], [40, 41])
    assert drafted(drafter, "new")[0] == 42


def test_the_end_of_the_prompt_is_context_and_its_inside_is_no_evidence():
    drafter = Drafter()
    started(drafter, "a", [30, 31, *range(16), 5, 6], TEXT)
    started(drafter, "b", [5, 6])
    assert drafted(drafter, "b")[:3] == TEXT[:3]
    started(drafter, "c", [30])
    assert drafted(drafter, "c") == []


def test_environment_tokens_are_context_for_others_too():
    drafter = Drafter()
    for name, prompt in (("a", [1]), ("b", [2])):
        started(drafter, name, [*prompt], [3])
        drafter.extend(name, [70, 71, 72], generated=False)
        if name == "a":
            drafter.extend(name, TEXT)
    assert drafted(drafter, "b")[:3] == TEXT[:3]


def test_finished_text_stays_and_requests_leave_cleanly():
    drafter = Drafter()
    assert run(drafter, "a", [3, *TEXT], prompt=[1]) == []
    started(drafter, "b", [2], [3])
    assert drafted(drafter, "b")[:3] == TEXT[:3]
    drafter.finish("b", keep=False)
    (tree,) = drafter.history._common._trees
    assert tree.tree.num_open_sequences == 0
    tree.tree.check_invariants()


def test_a_full_tree_is_followed_by_an_empty_one():
    drafter = Drafter(RolloutHistory(max_common_tokens=20))
    started(drafter, "a", [1], [3, *TEXT])
    started(drafter, "b", [2], [3])  # joins the next tree
    assert drafted(drafter, "b") == []
    drafter.extend("a", [80, 81, 82])  # goes on in its own
    assert drafted(drafter, "a") == []
    common = drafter.history._common
    assert len(common._trees) == 2
    drafter.finish("a")
    drafter.extend("b", TEXT)
    started(drafter, "c", [4])
    assert len(common._trees) == 2, "the first is gone with its last request"
    assert drafter.history.statistics().common_bytes == sum(tree.tree.memory_bytes() for tree in common._trees)


def test_it_is_the_first_to_go_when_memory_runs_short():
    drafter = Drafter()
    run(drafter, "a", [3, *TEXT], prompt=[1])
    history = drafter.history
    assert history.statistics().common_bytes > 0
    history.max_bytes = history.memory_bytes() - 1
    history.add(Rollout(prompt_token_ids=[9], response_token_ids=[9]))
    assert history.statistics().common_bytes == 0
    assert history.statistics().num_evicted_trees == 0
    started(drafter, "b", [2], [3])
    assert drafted(drafter, "b") == [], "and begins anew"
    assert len(history.rollouts(prompt_key([1]))) == 1


def test_running_requests_keep_it():
    drafter = Drafter()
    started(drafter, "a", [1], [3, *TEXT])
    started(drafter, "b", [2], [3])
    drafter.history.max_bytes = 1
    drafter.history.add(Rollout(prompt_token_ids=[9], response_token_ids=[9]))
    assert drafted(drafter, "b")[:3] == TEXT[:3]


def test_a_rebuilt_prompt_tree_leaves_the_common_text_alone():
    drafter = Drafter()
    started(drafter, "a", [1], [3, *TEXT])
    drafter.start("b", prompt_token_ids=[2], training_step=1)
    drafter.history.add(rollout([8, 8], 1, prompt=[2]))
    drafter.start("c", prompt_token_ids=[2], training_step=2)  # "b" moves to a new tree
    drafter.extend("b", [3])
    assert drafted(drafter, "b")[:3] == TEXT[:3]
    drafter.finish("b")


@pytest.mark.parametrize(("bad", "error"), [(-1, ValueError), (1.5, TypeError), ("1", TypeError), (True, TypeError)])
def test_bad_limits(bad, error):
    with pytest.raises(error, match=r"^max_common_tokens "):
        RolloutHistory(max_common_tokens=bad)


def test_an_unused_one_holds_nothing():
    assert CommonText(100).memory_bytes() == 0


# ---------------------------------------------------------------- prompts whose history explains nothing

OLD, STALE = [3, 4, 5, 6, 7, 8] * 3, [500, 501, 502, 503] * 20  # STALE: what a history of OLD knows nothing of


def with_stale_history(**settings):
    """A drafter of which a request has emitted text that no prompt's history explains, and is still running."""
    drafter = Drafter(filled(*(rollout(OLD, 0, prompt=prompt) for prompt in ([1], [2])), **settings))
    drafter.start("old", prompt_token_ids=[1], training_step=1)
    for _ in range(5):
        for token in STALE:
            draft(drafter, "old", 0)
            drafter.extend("old", [token])
    return drafter


def common_tokens(drafter):
    return sum(tree.tree.num_tokens for tree in drafter.history._common._trees)


def test_histories_that_explain_what_comes_leave_the_common_text_alone():
    drafter = Drafter(filled(rollout(OLD, 0, prompt=[1])))
    drafter.start("a", prompt_token_ids=[1], training_step=1)
    for _ in range(20):
        for token in OLD:
            draft(drafter, "a", 0)
            drafter.extend("a", [token])
    draft(drafter, "a")
    explained, unexplained = drafter.confidence.explained
    assert explained > 150
    assert unexplained < 10
    assert drafter.history.statistics().common_bytes == 0


def test_requests_whose_history_explains_nothing_join_with_what_they_have_emitted():
    drafter = with_stale_history()
    assert drafter.confidence.explained.tolist() == [0.0, pytest.approx(256, rel=0.3)]
    assert common_tokens(drafter) > 0
    drafter.start("new", prompt_token_ids=[2], training_step=1)
    drafter.extend("new", [3, *STALE[:2]])
    assert drafted(drafter, "new")[:5] == STALE[2:7], "of the other prompt's request, from before it joined, too"


def test_running_requests_join_at_the_next_draft_and_environment_tokens_are_context():
    drafter = Drafter(filled(*(rollout(OLD, 0, prompt=prompt) for prompt in ([1], [2]))))
    for name, prompt in (("a", [1]), ("b", [2])):
        drafter.start(name, prompt_token_ids=prompt, training_step=1)
    drafter.extend("a", TEXT)
    drafter.extend("a", [70, 71, 72], generated=False)
    drafter.extend("a", [80, 81, 82, 83])
    drafter.extend("b", [9])
    drafter.extend("b", [70, 71, 72], generated=False)
    assert 80 not in drafted(drafter, "b")
    drafter.confidence.load_state({**drafter.confidence.state(), "explained": [0.0, 256.0]})
    assert drafted(drafter, "b")[:3] == [80, 81, 82]
    drafter.extend("a", [90, 91, 92, 93])
    drafter.extend("b", [90, 91])
    assert drafted(drafter, "b")[:2] == [92, 93], "both go on in it"
    drafter.extend("b", [60], generated=False)
    for name in "ab":
        drafter.finish(name)
    (tree,) = drafter.history._common._trees
    assert tree.tree.num_open_sequences == 0
    tree.tree.check_invariants()


def test_a_history_that_explains_again_is_enough_again():
    drafter = with_stale_history()
    drafter.finish("old")
    history = drafter.history
    history.add(rollout(STALE, 2, prompt=[2]))
    for number in range(2):
        drafter.start(f"{number}", prompt_token_ids=[2], training_step=3)
        for token in STALE:
            draft(drafter, f"{number}", 0)
            drafter.extend(f"{number}", [token])
        before = common_tokens(drafter)
        drafter.finish(f"{number}")
    assert drafter.confidence.explained[0] > 50
    drafter.start("c", prompt_token_ids=[2], training_step=3)
    drafter.extend("c", STALE)
    assert common_tokens(drafter) == before, "nothing was added to it"


def test_a_stale_history_changes_nothing_where_the_common_text_is_off():
    drafter = with_stale_history(max_common_tokens=0)
    assert drafter.confidence.explained[1] > 200
    assert drafter.history.statistics().common_bytes == 0
