"""Later turns as rows of their own: whose key they find, when they run, and that none tells how an earlier one ends."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from log_samples import row, write
from rollout_samples import rollout

from das import LatencyModel, NoDraft, UnlimitedBudget, prompt_key
from das.analysis import read_log
from das.analysis.conversations import Conversations, PromptPrefixes, turn_numbers
from das.analysis.logged_request import logged_batches
from das.analysis.replay import replay
from das.analysis.simulate import simulate

FIRST = [1, 2]
ANSWER, SAID, SECOND_ANSWER = list(range(20, 32)), [90, 91], list(range(40, 52))  # no token twice
SECOND = [*FIRST, *ANSWER, *SAID]
THIRD = [*SECOND, *SECOND_ANSWER, *SAID]
PASSES = LatencyModel(c_base_ms=1000.0, c_tok_ms=0.0)  # a pass takes a second, whatever is in it
prompts = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), min_size=1, max_size=12)


def turn(prompt, response, step=0):
    return rollout(response, step, prompt=prompt, prompt_key=prompt_key(FIRST))


def prefixes(prompt, others):
    return [other for other in others if len(other) < len(prompt) and prompt[: len(other)] == other]


def ids(prompt):
    return rollout([0], prompt=prompt).prompt_token_ids


# Whose key.


@given(known=prompts, asked=prompts)
def test_the_longest_prefix_is_found(known, asked):
    numbers = PromptPrefixes()
    for number, prompt in enumerate(known):
        numbers[ids(prompt)] = number
    last = {tuple(prompt): number for number, prompt in enumerate(known)}
    for prompt in asked:
        longest = max(prefixes(prompt, known), key=len, default=None)
        assert numbers.of_longest_prefix(ids(prompt)) == (None if longest is None else last[tuple(longest)])
        assert numbers.get(ids(prompt)) == last.get(tuple(prompt))


@given(log=prompts)
def test_a_prompt_keeps_the_key_of_the_longest_one_known_when_it_came(log):
    conversations, keys = Conversations(), {}
    for prompt in log:
        if tuple(prompt) not in keys:
            known = prefixes(prompt, [list(other) for other in keys])
            keys[tuple(prompt)] = keys[tuple(max(known, key=len))] if known else prompt_key(prompt)
        assert conversations.key(rollout([0], prompt=prompt)) == keys[tuple(prompt)]


@given(log=prompts)
def test_turns_are_numbered_by_the_prompts_before(log):
    distinct = [list(prompt) for prompt in {tuple(prompt) for prompt in log}]
    expected = [len(prefixes(prompt, distinct)) for prompt in log]
    assert turn_numbers([rollout([0], prompt=prompt) for prompt in log]) == expected


def test_a_log_gives_later_turns_the_key_of_the_first(tmp_path: Path) -> None:
    asked = [FIRST, SECOND, [1, 3, *ANSWER], THIRD, FIRST, [1]]
    path = write(tmp_path / "log.jsonl", *[row(prompt_token_ids=prompt) for prompt in asked])
    records = list(read_log(path))
    assert [record.is_later_turn for record in records] == [False, True, False, True, False, False]
    first, other, short = prompt_key(FIRST), prompt_key([1, 3, *ANSWER]), prompt_key([1])
    assert [record.rollout.key for record in records] == [first, first, other, first, first, short]
    assert [record.rollout.prompt_token_ids.tolist() for record in records] == asked
    assert [record.rollout.ordinal for record in records] == [0, 1, 0, 2, 3, 0]  # one key, one response


# When they run.


def test_later_turns_come_in_later_batches():
    log = [
        turn(THIRD, [5]),
        turn(FIRST, [6]),
        turn(SECOND, [7]),
        turn(FIRST, [8]),
        turn(FIRST, [9]),
        turn(FIRST, [3], 1),
    ]
    log.append(rollout([4], 0, prompt=[9]))
    batches = logged_batches(log, group_size=2)
    found = [(b.training_step, b.group, b.turn, [r.response_token_ids.tolist() for r in b.rollouts]) for b in batches]
    assert found == [
        (0, 0, 0, [[6], [8], [4]]),
        (0, 1, 0, [[9]]),
        (0, 2, 1, [[7]]),
        (0, 3, 2, [[5]]),
        (1, 0, 0, [[3]]),
    ]


def test_a_later_turn_does_not_tell_how_the_one_before_goes_on():
    turns = [turn(SECOND, SECOND_ANSWER), turn(FIRST, ANSWER)]
    first, second = replay(turns, policy=UnlimitedBudget()).batches
    assert first.requests[0].num_decode_steps == len(ANSWER)  # nothing to draft from
    assert second.requests[0].num_decode_steps == len(SECOND_ANSWER)


def test_a_later_turn_finds_what_its_conversation_said_before(tmp_path: Path) -> None:
    """The second epoch's second turn differs from the first's in what came between, so its prompt is another one."""
    again = [*FIRST, *ANSWER, 92, 93]
    rows = [row(training_step=0, prompt_token_ids=FIRST, response_token_ids=ANSWER)]
    rows.append(row(training_step=0, prompt_token_ids=SECOND, response_token_ids=SECOND_ANSWER))
    rows.append(row(training_step=1, prompt_token_ids=FIRST, response_token_ids=ANSWER))
    rows.append(row(training_step=1, prompt_token_ids=again, response_token_ids=SECOND_ANSWER))
    log = [record.rollout for record in read_log(write(tmp_path / "log.jsonl", *rows))]
    steps = [batch.requests[0].num_decode_steps for batch in replay(log, policy=UnlimitedBudget()).batches]
    assert steps[:2] == [12, 12]
    assert max(steps[2:]) <= 3  # a first token without a draft, then a window of drafts that all come true


def test_training_waits_for_the_last_turn():
    turns = [turn(FIRST, ANSWER), turn(SECOND, SECOND_ANSWER), turn(FIRST, ANSWER, 1)]
    schedule = simulate(turns, policy=NoDraft(), latency=PASSES, train_s=100.0).with_drafts
    assert [batch.released_s for batch in schedule.batches] == [0.0, 12.0, 124.0]
    assert [batch.trained_s for batch in schedule.batches] == [12.0, 124.0, 236.0]
    with pytest.raises(ValueError, match="lag is 1, and turns of one conversation are rollouts of their own"):
        simulate(turns, policy=NoDraft(), latency=PASSES, lag=1)
