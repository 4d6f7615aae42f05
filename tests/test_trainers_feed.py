"""Feed, its sinks and its settings: nothing is lost, nothing is raised into the trainer, nothing makes it wait."""

import json
import logging
import os
import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout_samples import KEY, PROMPT, rollout, stored

from das import Drafter, Rollout, RolloutHistory
from das.analysis import read_log
from das_trainers import Feed, FeedStatistics, RolloutLog
from das_trainers.settings import VARIABLE, Settings, process_feed
from das_trainers.turns import turns_of


class Slow:
    """A sink that takes nothing before it is let go."""

    def __init__(self):
        self.go = threading.Event()
        self.taken = []

    def add_many(self, rollouts):
        assert self.go.wait(30)
        self.taken += rollouts


class Broken:
    def add_many(self, rollouts):
        raise OSError("disk full")


def add(feed, response, **fields):
    feed.add(prompt_token_ids=PROMPT, response_token_ids=response, **fields)


def test_what_is_fed_arrives_in_order_in_every_sink(tmp_path):
    history, log = RolloutHistory(), RolloutLog(tmp_path)
    feed = Feed(history, log)
    for token in range(500):
        add(feed, [4, token], training_step=token // 300, reward=0.5, response_mask=[1, 0])
    assert feed.flush()
    assert stored(history) == [(token // 300, [4, token]) for token in range(500)]
    log.close()
    records = [record.rollout for record in read_log(tmp_path)]
    assert [r.response_token_ids.tolist() for r in records] == [[4, token] for token in range(500)]
    assert {(r.reward, tuple(r.response_mask.tolist())) for r in records} == {(0.5, (True, False))}
    assert feed.statistics() == FeedStatistics(num_taken_in=500, num_fed=500)


def test_the_trainer_may_change_its_lists_afterwards():
    history = RolloutHistory()
    feed = Feed(history)
    prompt, response = list(PROMPT), np.array([4, 5], np.int32)
    feed.add(prompt_token_ids=prompt, response_token_ids=response)
    prompt += [9]
    response[:] = 0
    assert feed.flush()
    assert stored(history) == [(0, [4, 5])]


def test_a_sample_that_comes_again_brings_its_reward_and_one_without_number_is_another():
    history = RolloutHistory()
    feed = Feed(history)
    for sample in (3, 8):
        add(feed, [4, 5], training_step=1, sample=sample)
    add(feed, [4, 5], training_step=1, sample=8, reward=1.0)
    add(feed, [4, 5], training_step=1)
    assert feed.flush()
    assert [r.reward for r in history.rollouts(KEY)] == [None, 1.0, None]


def test_a_name_of_a_prompt_is_what_engines_make_of_it():
    history = RolloutHistory()
    feed = Feed(history)
    add(feed, [4], prompt_key="problem 17")
    add(feed, [5], prompt_key=17)
    assert feed.flush()
    from das.rollout import named_prompt_key

    assert set(history.prompt_keys()) == {17, named_prompt_key("problem 17")}


def test_a_sink_that_is_too_slow_loses_rollouts_and_says_so_once(caplog):
    sink = Slow()
    feed = Feed(sink, max_queued_tokens=5 * (len(PROMPT) + 1))
    for token in range(20):
        add(feed, [token])
        time.sleep(0.001)  # let the thread take the first
    assert feed.statistics().num_dropped >= 14
    sink.go.set()
    assert feed.flush()
    statistics = feed.statistics()
    assert statistics.num_taken_in + statistics.num_dropped == 20
    assert statistics.num_taken_in == statistics.num_fed == len(sink.taken)
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_hooks_do_not_wait_for_sinks():
    sink = Slow()
    feed = Feed(sink)
    started_s = time.perf_counter()
    for _ in range(100):
        add(feed, [4] * 1000)
    assert time.perf_counter() - started_s < 5  # the sink would take 30 s and fail
    assert not feed.flush(timeout_s=0.01)
    sink.go.set()
    assert feed.flush()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"response_token_ids": 5}, "a hook: TypeError"),
        ({"response_token_ids": [-1]}, "a rollout that is none: ValueError"),
        ({"response_token_ids": [4], "response_mask": [1, 1]}, "a rollout that is none: ValueError"),
        ({"response_token_ids": [4], "training_step": -1}, "a rollout that is none: ValueError"),
    ],
)
def test_a_fault_switches_feeding_off_and_is_said_once(fields, reason, caplog):
    history = RolloutHistory()
    feed = Feed(history)
    for _ in range(3):
        feed.add(prompt_token_ids=PROMPT, **fields)
        feed.flush()
    add(feed, [4])
    assert not feed.flush()
    assert reason in feed.statistics().fault
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert not history.prompt_keys()


def test_a_sink_that_fails_does_not_fail_the_trainer(caplog):
    feed = Feed(Broken())
    add(feed, [4])
    feed.flush()
    add(feed, [5])
    assert "OSError: disk full" in feed.statistics().fault
    assert len(caplog.records) == 1


def test_a_guard_lets_only_exits_through(caplog):
    feed = Feed()
    with feed.guard("a test"):
        raise KeyError("x")
    assert feed.fault == "a test: KeyError: 'x'"
    with pytest.raises(KeyboardInterrupt), feed.guard("a test"):
        raise KeyboardInterrupt


def test_samples_without_tokens_are_counted_and_left_out():
    feed = Feed(RolloutHistory())
    add(feed, [])
    feed.add(prompt_token_ids=[], response_token_ids=[1])
    assert feed.flush()
    assert feed.statistics() == FeedStatistics(num_empty=2)


def test_a_closed_feed_begins_again_when_something_comes():
    history = RolloutHistory()
    feed = Feed(history)
    for token in (4, 5):
        add(feed, [token], training_step=0)
        feed.close()
    assert stored(history) == [(0, [4]), (0, [5])]


def test_a_forked_process_feeds_for_itself(tmp_path):
    """As trainers' data loaders and launchers fork: nothing is written twice, and both go on."""
    log = RolloutLog(tmp_path)
    feed = Feed(log)
    add(feed, [4])
    assert feed.flush()
    child = os.fork()
    if not child:
        add(feed, [5])
        os._exit(0 if feed.flush(timeout_s=60) else 1)
    add(feed, [6])
    assert feed.flush()
    assert os.waitpid(child, 0)[1] == 0
    assert sorted(r.rollout.response_token_ids.tolist() for r in read_log(tmp_path)) == [[4], [5], [6]]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_log_that_is_full_goes_on_in_the_next_file(tmp_path):
    log = RolloutLog(tmp_path, max_file_bytes=100)
    assert (
        log.add_many([rollout([4, 5], step, request_id=f"r{step}", prompt_key=7, ordinal=step) for step in range(5)])
        == 5
    )
    log.close()
    assert len(list(tmp_path.iterdir())) == 5
    records = [record.rollout for record in read_log(tmp_path)]
    assert [(r.training_step, r.request_id, r.key) for r in records] == [(step, f"r{step}", 7) for step in range(5)]
    with pytest.raises(ValueError, match="max_file_bytes is 0"):
        RolloutLog(tmp_path, max_file_bytes=0)


# ---------------------------------------------------------------- turns

stretches = st.lists(
    st.tuples(st.booleans(), st.lists(st.integers(0, 9), min_size=1, max_size=4)), min_size=1, max_size=6
)


@given(stretches)
def test_turns_are_what_the_model_wrote_each_behind_all_before_it(pieces):
    response = [token for _, tokens in pieces for token in tokens]
    mask = [written for written, tokens in pieces for _ in tokens]
    whole = rollout(response, 3, response_mask=mask, reward=1.0, ordinal=6)
    written = [token for token, is_written in zip(response, mask, strict=True) if is_written]
    turns = turns_of(whole)
    assert [token for turn in turns for token in turn.response_token_ids.tolist()] == written
    text = PROMPT + response
    ends = [len(turn.prompt_token_ids) + len(turn.response_token_ids) for turn in turns]
    assert ends == sorted(ends)
    for turn, end in zip(turns, ends, strict=True):
        assert turn.prompt_token_ids.tolist() + turn.response_token_ids.tolist() == text[:end]
        assert end == len(text) or not mask[end - len(PROMPT)]
        assert (turn.key, turn.training_step, turn.reward, turn.ordinal) == (KEY, 3, 1.0, 6)


@given(st.permutations(["e0", "e1", "t"]))
def test_an_engine_that_learns_turns_and_a_trainer_that_pushes_conversations_leave_one_copy(order):
    """The engine's requests name the key of the first prompt, and the feed cuts what it is given."""
    history = RolloutHistory()
    drafter = Drafter(history)
    feed = Feed(history, as_turns=True)
    texts = {"e0": (PROMPT, [4, 5]), "e1": ([*PROMPT, 4, 5, 8, 8], [6])}
    for name in order:
        if name == "t":
            add(feed, [4, 5, 8, 8, 6], training_step=2, response_mask=[1, 1, 0, 0, 1], sample=1)
            assert feed.flush()
            continue
        prompt, response = texts[name]
        drafter.start(name, prompt_token_ids=prompt, prompt_key=KEY, training_step=2)
        drafter.extend(name, response)
        drafter.finish(name)
    assert sorted(stored(history)) == [(2, [4, 5]), (2, [6])]


# ---------------------------------------------------------------- settings


def test_a_feed_from_the_environment(tmp_path, monkeypatch):
    settings = tmp_path / "settings.json"
    settings.write_text(json.dumps({"log": str(tmp_path / "log"), "sink": f"{__name__}:Broken"}))
    assert Settings.from_environment({VARIABLE: str(settings)}).sink == f"{__name__}:Broken"
    monkeypatch.setenv(VARIABLE, json.dumps({"log": str(tmp_path / "log"), "as_turns": True}))
    process_feed.cache_clear()
    try:
        add(process_feed(), [4, 8, 5], response_mask=[1, 0, 1])
        assert process_feed().flush()
    finally:
        process_feed.cache_clear()
    assert [r.rollout.response_token_ids.tolist() for r in read_log(tmp_path / "log")] == [[4], [5]]


def test_a_sink_is_made_by_its_name(caplog):
    feed = Settings(sink=f"{__name__}:Broken").make_feed()
    add(feed, [4])
    feed.flush()
    assert "disk full" in feed.fault


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "neither log nor sink is set"),
        ("{}", "neither log nor sink is set"),
        ('{"log": 5}', "log must be a text, not 5"),
        ('{"sink": "das.rollout"}', "sink is 'das.rollout'; it must be 'package.module:name'"),
        ('{"log": "d", "as_turns": 1}', "as_turns must be true or false, not 1"),
        ('{"path": "d"}', "it names path; known are log, sink, as_turns"),
        ("[", "No such file or directory"),
        ("{", "Expecting property name"),
    ],
)
def test_wrong_settings_name_the_variable_and_the_rule(text, reason, monkeypatch, caplog):
    with pytest.raises(ValueError, match=VARIABLE) as error:
        Settings.from_environment({VARIABLE: text})
    assert reason in str(error.value)
    monkeypatch.setenv(VARIABLE, text)
    process_feed.cache_clear()
    try:
        assert process_feed().fault.startswith("the settings: ValueError")
        add(process_feed(), [4])  # and the trainer goes on
    finally:
        process_feed.cache_clear()
    assert [record.levelno for record in caplog.records] == [logging.ERROR]


def test_rows_hold_what_a_rollout_has():
    from das_trainers.rollout_log import row_of

    whole = rollout([4, 5], 3, reward=1.0, request_id="a", prompt_key=9, response_mask=[True, False], ordinal=2)
    again = Rollout(**row_of(whole))
    assert row_of(again) == row_of(whole)
    assert "reward" not in row_of(rollout([4]))
