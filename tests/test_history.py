"""RolloutHistory: which rollouts it keeps, under which identity and for how long."""

import copy
import dataclasses
import pickle

import pytest
from rollout_samples import KEY, PROMPT, count, filled, rollout, run, stored

from das import Confidence, Drafter, HistoryStatistics, RolloutHistory, prompt_key


def steps(history, key=KEY):
    return [r.training_step for r in history.rollouts(key)]


# ---------------------------------------------------------------- identity


def test_the_same_rollout_counts_once():
    history = RolloutHistory()
    assert [history.add(rollout([4, 5], 0)) for _ in range(3)] == [True, False, False]
    assert stored(history) == [(0, [4, 5])]
    statistics = history.statistics()
    assert (statistics.num_added, statistics.num_updated, statistics.num_rollouts) == (1, 2, 1)


@pytest.mark.parametrize(
    "other",
    [
        rollout([4, 5], 1),
        rollout([4, 6], 0),
        rollout([4, 5], 0, request_id="b"),
    ],
)
def test_another_rollout_counts(other):
    """The first has a name, so that a nameless equal one is the same, and one of another name is not."""
    history = filled(rollout([4, 5], 0, request_id="a"))
    assert history.add(other)
    assert len(history.rollouts(KEY)) == 2


@pytest.mark.parametrize("numbers", [(0, 1), (1, 0), (5, 9), (9, 5)])
@pytest.mark.parametrize("order", ["abAB", "AaBb", "ABab", "aABb", "AbaB", "abBA", "aAbB", "BAba"])
def test_equal_samples_of_a_group_count_as_often_as_they_were_sampled(numbers, order):
    """Small letters: an engine that names them; capitals: a trainer that numbers them."""
    history = RolloutHistory()
    for letter in order:
        is_named = letter in "ab"
        number = numbers["ab".index(letter.lower())]
        history.add(rollout([4, 5], 0, request_id=letter) if is_named else rollout([4, 5], 0, ordinal=number))
    assert len(history.rollouts(KEY)) == 2
    for number in numbers:
        assert not history.add(rollout([4, 5], 0, ordinal=number, reward=float(number)))
    assert sorted(r.reward for r in history.rollouts(KEY)) == sorted(numbers)


def test_another_prompt_or_key_is_another_rollout():
    history = filled(rollout([4, 5], 0, request_id="a"))
    assert history.add(rollout([4, 5], 0, prompt=[9], request_id="a"))
    assert history.add(rollout([4, 5], 0, prompt_key=7, request_id="a"))
    assert [len(history.rollouts(key)) for key in (KEY, prompt_key([9]), 7)] == [1, 1, 1]


@pytest.mark.parametrize("response", [[4], [4, 5], [4, 5, 6]])
def test_a_request_id_is_known_also_where_the_trainer_cuts_the_response(response):
    history = filled(rollout([4, 5], 0, request_id="a"))
    assert not history.add(rollout(response, 0, request_id="a", reward=1.0))
    (known,) = history.rollouts(KEY)
    assert (known.response_token_ids.tolist(), known.training_step, known.reward) == ([4, 5], 0, 1.0)


def test_a_rollout_follows_its_name_to_another_step():
    history = filled(rollout([4, 5], 0, request_id="a"))
    assert not history.add(rollout([4, 5], 3, request_id="a"))
    assert [known.training_step for known in history.rollouts(KEY)] == [3]


def test_an_engine_may_count_its_requests_from_zero_again():
    history = filled(*[rollout([4, step], step, request_id="0") for step in range(3)])
    assert stored(history) == [(step, [4, step]) for step in range(3)]
    drafter = Drafter(history)
    for step in (3, 4):
        run(drafter, "0", [4, step], step=step)
    assert [r[1] for r in stored(history)][-2:] == [[4, 3], [4, 4]]
    assert not history.add(rollout([4, 4], 4, request_id="0", reward=1.0))  # the newest of that name
    assert history.rollouts(KEY)[-1].reward == 1.0


@pytest.mark.parametrize("num_drafters", [1, 2])
def test_a_reused_request_id_loses_no_rollout_and_no_reward(num_drafters):
    """An id that came back within a step, or two engines that both count from 0."""
    history = RolloutHistory()
    drafters = [Drafter(history) for _ in range(num_drafters)]
    run(drafters[0], "0", [4, 5], step=3)
    run(drafters[-1], "0", [6, 7], step=3)
    assert stored(history) == [(3, [4, 5]), (3, [6, 7])]
    for response, reward in (([4, 5], 1.0), ([6, 7], 2.0), ([4, 5], 3.0)):
        assert not history.add(rollout(response, 3, request_id="0", reward=reward))
    assert [r.reward for r in history.rollouts(KEY)] == [3.0, 2.0]


@pytest.mark.parametrize("engine_first", [True, False])
def test_an_engine_names_what_a_trainer_does_not(engine_first):
    pair = [rollout([4, 5], 2, request_id="a"), rollout([4, 5], 2, reward=0.5)]
    history = RolloutHistory()
    assert [history.add(r) for r in (pair if engine_first else pair[::-1])] == [True, False]
    (known,) = history.rollouts(KEY)
    assert (known.request_id, known.reward, known.training_step) == ("a", 0.5, 2)
    assert [history.add(r) for r in pair] == [False, False]


@pytest.mark.parametrize("names", [(None, None), ("a", "b")])
def test_equal_rollouts_keep_their_own_rewards(names):
    """Ordinals go by arrival, however often a reward is updated."""
    history = RolloutHistory()
    for ordinal, name in enumerate(names):
        history.add(rollout([4, 5], 0, ordinal=ordinal, request_id=name))
    for offset in (0.0, 10.0):
        for ordinal in (0, 1):
            assert not history.add(rollout([4, 5], 0, ordinal=ordinal, reward=ordinal + offset))
        assert [(r.request_id, r.reward) for r in history.rollouts(KEY)] == [(names[0], offset), (names[1], offset + 1)]


def test_an_update_leaves_what_it_does_not_know():
    history = filled(rollout([4, 5], 3, reward=1.0, request_id="a"))
    history.add(rollout([4, 5], 3))
    history.add(rollout([4, 5], request_id="a"))
    (known,) = history.rollouts(KEY)
    assert (known.training_step, known.reward, known.request_id) == (3, 1.0, "a")


def test_an_update_keeps_the_order_of_arrival():
    history = filled(rollout([4], 0), rollout([5], 0))
    history.add(rollout([4], 0, reward=1.0))
    assert stored(history) == [(0, [4]), (0, [5])]


def test_an_update_may_move_a_rollout_to_another_epoch():
    history = filled(rollout([4], 0, request_id="a"), rollout([5], 1), window_epochs=2)
    history.add(rollout([4], 2, request_id="a"))
    assert stored(history) == [(1, [5]), (2, [4])]
    history.add(rollout([6]))  # joins the newest epoch
    assert stored(history) == [(1, [5]), (2, [4]), (2, [6])]


def test_a_rollout_moved_out_of_the_window_is_dropped():
    history = filled(rollout([4], 5, request_id="a"), rollout([5], 5), rollout([6], 4), window_epochs=2)
    assert not history.add(rollout([4], 3, request_id="a"))
    assert stored(history) == [(4, [6]), (5, [5])]
    assert history.statistics().num_expired == 1
    assert history.statistics().num_tokens == 2


@pytest.mark.parametrize("reverse", [False, True])
def test_the_trees_count_a_rollout_once_whoever_brings_it_first(reverse):
    """The trainer hands in what the engine has just generated, before or after the engine's request ends."""
    drafter = Drafter()
    drafter.start("a", prompt_token_ids=PROMPT, training_step=0)
    drafter.extend("a", [4, 5])
    if reverse:
        drafter.history.add(rollout([4, 5], 0))
    drafter.finish("a")
    drafter.history.add(rollout([4, 5], 0))
    drafter.start("b", prompt_token_ids=PROMPT, training_step=0)
    assert len(drafter.history.rollouts(KEY)) == 1
    assert count(drafter.history, [4], 5) == 1


# ---------------------------------------------------------------- the window


def test_the_last_epochs_of_each_prompt_stay():
    other = prompt_key([9])
    history = filled(rollout([8], 0, prompt=[9]), window_epochs=2)
    for step in (0, 100, 100, 101):
        history.add(rollout([4 + len(stored(history))], step))
    assert steps(history) == [100, 100, 101]
    assert steps(history, other) == [0]  # an epoch is a step at which this prompt was sampled
    assert history.statistics().num_expired == 1


def test_late_rollouts_inside_the_window_join_their_epoch():
    history = filled(rollout([4], 3), window_epochs=2)
    assert history.add(rollout([5], 1))
    assert history.add(rollout([6], 1))
    assert history.add(rollout([7], 2))  # an epoch of its own, which pushes the oldest out
    assert stored(history) == [(2, [7]), (3, [4])]
    assert not history.add(rollout([6], 1))  # older than the window by now
    assert stored(history) == [(2, [7]), (3, [4])]
    statistics = history.statistics()
    assert (statistics.num_late, statistics.num_expired, statistics.num_added) == (1, 2, 4)


def test_a_request_that_ends_too_late_is_dropped_from_the_tree_as_well():
    drafter = Drafter(filled(rollout([8], 5), window_epochs=1))
    run(drafter, "a", [4, 5], step=4)
    assert stored(drafter.history) == [(5, [8])]
    assert drafter.history.statistics().num_late == 1
    drafter.start("b", prompt_token_ids=PROMPT, training_step=4)
    assert count(drafter.history, [4], 5) == 0


def test_expired_rollouts_leave_the_tree_at_the_next_start():
    drafter = Drafter(filled(rollout([4, 5, 6], 0), window_epochs=1))
    assert run(drafter, "a", [7, 8], step=1) == [4, 5, 6]
    assert run(drafter, "b", [7, 9], step=1) == [7, 8]
    assert count(drafter.history, [4], 5) == 0


# ---------------------------------------------------------------- training steps that nobody names


def test_nameless_steps_of_rollouts():
    history = filled(rollout([4]))
    assert steps(history) == [0]
    history.add_many([rollout([5], 7), rollout([6])])
    assert steps(history) == [0, 7, 7]


def test_a_prompt_started_again_opens_its_next_epoch():
    drafter = Drafter()
    for request_id in "ab":
        drafter.start(request_id, prompt_token_ids=PROMPT)
        drafter.extend(request_id, [4])
    drafter.finish("a")
    run(drafter, "c", [5])  # b still runs: the same epoch
    drafter.finish("b")
    assert steps(drafter.history) == [0, 0, 0]
    run(drafter, "d", [6])
    run(drafter, "e", [6], prompt=[9])
    run(drafter, "f", [7])
    assert steps(drafter.history) == [0, 0, 0, 1, 2]
    assert steps(drafter.history, prompt_key([9])) == [0]


def test_nameless_starts_follow_the_steps_that_were_named():
    drafter = Drafter()
    run(drafter, "a", [4], step=5)
    run(drafter, "b", [5])
    run(drafter, "c", [6], step=2)
    run(drafter, "d", [7])
    assert stored(drafter.history) == [(2, [6]), (5, [4]), (6, [5]), (7, [7])]


def test_the_end_of_a_request_may_name_its_step():
    drafter = Drafter()
    run(drafter, "a", [4], training_step=8)
    run(drafter, "b", [5])
    assert steps(drafter.history) == [8, 9]


# ---------------------------------------------------------------- statistics and errors


def test_statistics_of_a_small_life():
    assert dataclasses.astuple(RolloutHistory().statistics()) == (0,) * 16
    drafter = Drafter(filled(rollout([4, 5], 0), rollout([4, 5], 0), rollout([6], 1), window_epochs=1))
    history = drafter.history
    history.add(rollout([7, 7, 7], 0))
    history.prepare([KEY])
    run(drafter, "a", [8, 9], step=1)
    run(drafter, "b", [8], prompt=[9])
    statistics = history.statistics()
    assert statistics == HistoryStatistics(
        num_prompts=2, num_rollouts=3, num_tokens=4, num_trees=2, rollout_bytes=statistics.rollout_bytes,
        tree_bytes=statistics.tree_bytes, common_bytes=statistics.common_bytes, num_added=4, num_updated=1,
        num_late=1, num_expired=1,
        num_builds_ahead=1, num_builds_on_start=1,
    )  # fmt: skip
    assert history.prompt_keys() == (KEY, prompt_key([9]))


def test_unknown_prompts():
    history = RolloutHistory()
    assert history.rollouts(5) == ()
    history.prepare([5])
    history.maintain()
    assert history.statistics() == HistoryStatistics()


@pytest.mark.parametrize("name", ["window_epochs", "max_bytes", "num_threads"])
@pytest.mark.parametrize(("bad", "error"), [(0, ValueError), (-1, ValueError), (1.5, TypeError), ("1", TypeError)])
def test_bad_settings(name, bad, error):
    with pytest.raises(error, match=f"^{name} "):
        RolloutHistory(**{name: bad})
    with pytest.raises(TypeError):
        RolloutHistory(4)


@pytest.mark.parametrize("bad", [None, [4, 5], {"response_token_ids": [4]}])
def test_only_rollouts_are_added(bad):
    history = RolloutHistory()
    with pytest.raises(TypeError, match="rollout must be a Rollout, not "):
        history.add(bad)
    with pytest.raises(TypeError, match="rollout must be a Rollout, not "):
        history.add_many([rollout([4], 0), bad])
    assert stored(history) == [(0, [4])]


def test_add_many_counts_the_new_ones():
    assert RolloutHistory().add_many(rollout([i // 2], 0) for i in range(6)) == 3
    defaults = RolloutHistory()
    assert (defaults.window_epochs, defaults.max_bytes) == (4, 8 << 30)


@pytest.mark.parametrize("copied", [pickle.dumps, copy.copy, copy.deepcopy])
def test_what_runs_in_one_process_cannot_be_copied_and_says_what_to_keep(copied):
    history = filled(rollout([4, 5], 0), rollout([6], 1))
    drafter = Drafter(history)
    with pytest.raises(TypeError, match=r"a RolloutHistory cannot be pickled or copied: .*; das\.save_state keeps"):
        copied(history)
    with pytest.raises(TypeError, match=r"a Drafter cannot be pickled or copied: .*; das\.save_state keeps"):
        copied(drafter)
    advised = RolloutHistory()
    for key in history.prompt_keys():
        advised.add_many(pickle.loads(pickle.dumps(history.rollouts(key))))
    assert stored(advised) == stored(history)
    confidence = Confidence()
    confidence.load_state(pickle.loads(pickle.dumps(drafter.confidence.state())))
    Drafter(advised, confidence=confidence).start("a", prompt_token_ids=PROMPT)


def test_an_id_that_two_rollouts_were_given_later_leaves_with_both():
    history = filled(
        *(rollout(response, 1) for response in ([5], [4])),
        *(rollout(response, 1, request_id="c") for response in ([4], [5])),
        rollout([7], 2),
        window_epochs=1,
    )
    assert stored(history) == [(2, [7])]
    history.add(rollout([5], 2, request_id="c"))
    assert stored(history) == [(2, [7]), (2, [5])]
