"""Replay: it emits the log whatever is drafted, counts what the pencil counts, and never looks ahead."""

import json
import random
from collections import Counter
from dataclasses import fields
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout_logs import logs
from rollout_samples import KEY, rollout, stored

from das import (
    AcceptanceCounters,
    Drafter,
    FixedBudget,
    LengthAwareBudget,
    NoDraft,
    PriceBudget,
    ThroughputBudget,
    UnlimitedBudget,
    prompt_key,
)
from das.analysis import read_log
from das.analysis.replay import Replay, replay

EXAMPLE = Path(__file__).parent.parent / "examples" / "amc23_rollouts.jsonl.gz"
TWENTY = list(range(100, 120))  # no token twice
ORDERS = ["step", "lockstep"]
POLICIES = [FixedBudget(3), PriceBudget(), UnlimitedBudget(), NoDraft(), ThroughputBudget(), LengthAwareBudget()]


def counters_of(result):
    """Each batch's counters of requests, in the order of their end."""
    return [batch.requests for batch in result.batches]


def num_generated(log):
    return sum(len(r.response_token_ids) if r.response_mask is None else int(r.response_mask.sum()) for r in log)


def as_tuple(r):
    """A rollout as it must come back; a mask that is all True says nothing."""
    mask = None if r.response_mask is None or r.response_mask.all() else r.response_mask.tolist()
    return r.training_step or 0, r.prompt_token_ids.tolist(), r.response_token_ids.tolist(), mask, r.reward


# ---------------------------------------------------------------- what is emitted


@given(log=logs(max_rollouts=6), group_size=st.integers(1, 3))
def test_the_log_is_emitted_whatever_is_drafted(log, group_size):
    for policy, order, shape in product(POLICIES, ORDERS, ["chain", "tree"]):
        run = Replay(iter(log), policy=policy, order=order, group_size=group_size, shape=shape)
        run.run()
        history = run.drafter.history
        emitted = [r for key in {r.key for r in log} for r in history.rollouts(key)]
        assert sorted(map(repr, map(as_tuple, emitted))) == sorted(repr(as_tuple(r)) for r in log)
        result = run.result()
        counters = result.counters
        assert result.is_complete
        assert counters.num_emitted_tokens == num_generated(log)
        assert sum(map(len, counters_of(result))) == len(log)
        assert 0 <= counters.num_accepted_tokens <= counters.num_drafted_tokens
        assert counters.num_emitted_tokens <= counters.num_accepted_tokens + counters.num_decode_steps
        if isinstance(policy, NoDraft):
            assert (counters.num_drafted_tokens, counters.num_decode_steps) == (0, num_generated(log))
            assert all(batch.num_batch_steps == batch.longest_response_tokens for batch in result.batches)


@pytest.mark.parametrize("order", ORDERS)
def test_text_that_never_repeats_is_not_drafted_from_an_empty_history(order):
    log = [rollout(range(100 * i, 100 * i + 50), 0, prompt=[7000 + i]) for i in range(6)]
    counters = replay(log, policy=UnlimitedBudget(), order=order).counters
    assert counters == AcceptanceCounters(num_decode_steps=300, num_emitted_tokens=300)


# ---------------------------------------------------------------- by hand


def test_a_rollout_that_comes_back_word_for_word():
    """Twenty tokens take three steps: 8 + 1, 8 + 1, and the 2 that are left."""
    result = replay([rollout(TWENTY, 0), rollout(TWENTY, 1)], policy=FixedBudget())
    first, second = AcceptanceCounters(20, 0, 0, 0, 20), AcceptanceCounters(3, 3, 18, 18, 20)
    assert counters_of(result) == [(first,), (second,)]
    assert [batch.num_batch_steps for batch in result.batches] == [20, 3]
    assert [batch.longest_response_tokens for batch in result.batches] == [20, 20]
    total = result.as_dict()["total"]
    assert total["num_batch_steps"] == 23
    assert total["longest_response_tokens"] == 40
    assert total["draft_acceptance_rate"] == 1.0
    assert total["mean_acceptance_length"] == 1 + 18 / 3
    assert total["tokens_per_decode_step"] == 40 / 23
    assert total["request_mean_tokens_per_decode_step"] == (1 + 20 / 3) / 2
    assert result.batches[1].summary()["tokens_per_decode_step"] == 20 / 3


def test_siblings_that_draft_together_and_in_turn():
    """Two equal answers of six tokens. In step both have the same text, so neither is ahead of the other."""
    log = [rollout(TWENTY[:6], 0), rollout(TWENTY[:6], 0)]
    together, in_turn = (replay(log, policy=FixedBudget(), order=order) for order in ORDERS)
    assert counters_of(together) == [(AcceptanceCounters(6, 0, 0, 0, 6),) * 2]
    # In turn, the first emits 0, 12, 34, 5; the second drafts one token each time and emits 01, 23, 45.
    assert counters_of(in_turn) == [(AcceptanceCounters(3, 3, 3, 3, 6), AcceptanceCounters(4, 3, 3, 3, 6))]
    assert [result.batches[0].num_batch_steps for result in (together, in_turn)] == [6, 4]


def test_environment_tokens_are_given_not_decoded():
    """3 generated, 2 given, 4 generated: 7 decode steps at first, then 3 + 4 tokens as two full drafts."""
    mask = [True] * 3 + [False] * 2 + [True] * 4
    log = [rollout(TWENTY[:9], step, response_mask=mask) for step in (0, 1)]
    progress = []
    result = replay(log, progress=lambda done, total: progress.append((done, total)))
    assert counters_of(result) == [(AcceptanceCounters(7, 0, 0, 0, 7),), (AcceptanceCounters(2, 2, 7, 7, 7),)]
    assert result.batches[1].longest_response_tokens == 7
    assert progress[-1] == (14, 14)


@pytest.mark.parametrize("mask", [[False] * 4, [False, False, True, True], [True, True, False, False]])
def test_environment_tokens_at_either_end(mask):
    run = Replay([rollout([4, 5, 6, 7], 0, response_mask=mask)])
    run.run()
    (known,) = run.drafter.history.rollouts(KEY)
    assert known.response_mask.tolist() == mask
    assert run.result().counters == AcceptanceCounters(sum(mask), 0, 0, 0, sum(mask))
    assert run.result().batches[0].num_batch_steps == sum(mask)


# ---------------------------------------------------------------- batches


def test_batches_groups_and_steps():
    log = [rollout([4], step, prompt=[prompt], reward=i) for i, (step, prompt) in enumerate(
        [(7, 1), (3, 1), (3, 1), (3, 2), (None, 1), (3, 1), (3, 2), (3, 1), (3, 2), (3, 1)]
    )]  # fmt: skip
    result = replay(log, group_size=2)
    shape = [(batch.training_step, batch.group, len(batch.requests)) for batch in result.batches]
    assert shape == [(None, 0, 1), (3, 0, 4), (3, 1, 3), (3, 2, 1), (7, 0, 1)]
    assert [batch.summary()["num_requests"] for batch in result.batches] == [1, 4, 3, 1, 1]
    assert result.settings == {
        "policy": repr(LengthAwareBudget()), "group_size": 2, "order": "step", "shape": "chain", "widths": None,
        "window_epochs": 4, "max_bytes": 8 << 30, "num_rollouts": 10,
    }  # fmt: skip
    assert replay(log).settings["group_size"] == 8


def test_the_window_is_that_of_the_history():
    log = [rollout(TWENTY, 0), rollout(TWENTY[::-1], 1), rollout(TWENTY, 2)]
    accepted = [
        replay(log, policy=FixedBudget(), window_epochs=w).batches[2].requests[0].num_accepted_tokens for w in (1, 2)
    ]
    assert accepted == [0, 8 + 8 + 1]  # the first draft is the later rollout's: rejected, one token emitted


def test_the_byte_limit_is_kept():
    log = [rollout(range(i, i + 30), step, prompt=[i % 5]) for step in range(3) for i in range(20)]
    run = Replay(log, group_size=2, max_bytes=20_000, policy=UnlimitedBudget())
    run.run()
    result = run.result()
    assert result.history.num_evicted_rollouts > 0
    assert run.drafter.history.memory_bytes() <= 20_000
    assert result.counters.num_emitted_tokens == num_generated(log)
    unlimited = replay(log, group_size=2, policy=UnlimitedBudget())
    assert result.counters.num_accepted_tokens < unlimited.counters.num_accepted_tokens


# ---------------------------------------------------------------- no look into the future


@given(log=logs(max_rollouts=6), seed=st.integers(0, 1000))
def test_later_batches_change_nothing_before_them(log, seed):
    log = [rollout(r.response_token_ids, i % 3, prompt=r.prompt_token_ids) for i, r in enumerate(log)]
    rng = random.Random(seed)
    for order, cut in product(ORDERS, (1, 2)):
        past, future = [r for r in log if r.training_step < cut], [r for r in log if r.training_step >= cut]
        before = counters_of(replay(past, group_size=2, order=order))
        rng.shuffle(future)
        other = [rollout(past[0].response_token_ids, 9, prompt=r.prompt_token_ids) for r in future]
        for changed in (past + future, future + past, past + other):
            assert counters_of(replay(changed, group_size=2, order=order))[: len(before)] == before


def test_later_tokens_of_a_batch_change_nothing_before_them():
    """The first of two siblings is the same; the tail of the other comes after it has ended."""
    rng = random.Random(1)
    short = [rng.randrange(4) for _ in range(20)]
    long = [rng.randrange(4) for _ in range(100)]
    for order in ORDERS:
        answers = set()
        for tail in ([], long[60:], [9] * 30):
            result = replay([rollout(short, 0), rollout(long[:60] + tail, 0)], order=order)
            answers.add(result.batches[0].requests[0])  # the short one ends first
        assert len(answers) == 1
        assert answers.pop().num_emitted_tokens == 20


# ---------------------------------------------------------------- stopping, going on, refusing


def test_an_interrupted_replay_tells_what_it_counted():
    log = [rollout(TWENTY[: 4 + i], step) for step in range(3) for i in range(3)]
    calls = []
    whole = replay(log, progress=lambda *call: calls.append(call))
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    assert calls[-1] == (num_generated(log), num_generated(log))
    for stop in range(len(calls) - 1):

        def progress(done, total, stop=stop):
            if done >= calls[stop][0]:
                raise KeyboardInterrupt

        run = Replay(log)
        with pytest.raises(KeyboardInterrupt):
            run.run(progress=progress)
        partial = run.result()
        assert not partial.is_complete
        assert not partial.as_dict()["is_complete"]
        assert len(partial.batches) <= len(whole.batches)
        for some, all_of_them in zip(counters_of(partial), counters_of(whole), strict=False):
            assert some == all_of_them[: len(some)]
        assert partial.counters.num_emitted_tokens <= calls[stop][0]


def test_a_replay_before_its_run_has_nothing_to_tell():
    result = Replay([rollout([4], 0)]).result()
    assert (result.is_complete, result.batches, result.counters) == (False, (), AcceptanceCounters())


def test_a_replay_may_go_on_with_a_drafter():
    drafter = Drafter()
    replay([rollout(TWENTY, 0)], drafter=drafter)
    result = replay([rollout(TWENTY, 1)], policy=FixedBudget(), drafter=drafter)
    assert counters_of(result) == [(AcceptanceCounters(3, 3, 18, 18, 20),)]
    assert stored(drafter.history) == [(0, TWENTY), (1, TWENTY)]
    assert result.settings["window_epochs"] == 4


@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        ({"group_size": 0}, ValueError, "group_size is 0; it must be at least 1"),
        ({"group_size": 2.0}, TypeError, "group_size must be an int, not float"),
        ({"group_size": True}, TypeError, "group_size must be an int, not bool"),
        ({"order": "random"}, ValueError, "order is 'random'; it must be 'step' or 'lockstep'"),
        ({"shape": "bush"}, ValueError, "shape is 'bush'; it must be 'chain' or 'tree'"),
        ({"window_epochs": 0}, ValueError, "window_epochs is 0; it must be at least 1"),
        ({"max_bytes": -1}, ValueError, "max_bytes is -1; it must be"),
        ({"log": []}, ValueError, "log is empty; there is nothing to replay"),
    ],
)
def test_bad_arguments(bad, error, message):
    arguments = {"log": [rollout([4], 0)], **bad}
    for call in (replay, Replay):
        with pytest.raises(error, match=f"^{message}"):
            call(**arguments)
    with pytest.raises(TypeError, match="positional argument"):
        replay([rollout([4], 0)], FixedBudget())


def test_the_result_is_plain_json():
    result = replay([rollout(TWENTY, 0), rollout(TWENTY, 1)])
    told = json.loads(json.dumps(result.as_dict()))
    assert told["is_complete"]
    assert [batch["training_step"] for batch in told["batches"]] == [0, 1]
    assert told["history"]["num_rollouts"] == 2
    assert {field.name for field in fields(AcceptanceCounters)} <= told["total"].keys()
    assert told["plan_us"] > 0 < told["extend_us"]


# ---------------------------------------------------------------- real rollouts


def test_a_tree_accepts_where_a_chain_is_wrong():
    """Half of the time 4 followed, half of the time 5: a chain misses one of them, a tree neither."""
    log = [rollout([7, token, 8, 9], 0, prompt=[1], ordinal=n) for n, token in enumerate([4, 5, 4, 5])]
    log += [rollout([7, token, 8, 9], 1, prompt=[1]) for token in (5, 4)]
    chain, tree = (
        replay(log, policy=FixedBudget(7), shape=shape, group_size=1).batches[-2:] for shape in ("chain", "tree")
    )
    assert [batch.num_batch_steps for batch in chain] == [1, 2]
    assert [batch.num_batch_steps for batch in tree] == [1, 1]


@pytest.mark.parametrize("order", ORDERS)
def test_real_rollouts(order):
    records = list(read_log(EXAMPLE))
    few = set(list(dict.fromkeys(record.prompt_id for record in records))[:4])
    log = [record.rollout for record in records if record.prompt_id in few]
    run = Replay(log, policy=PriceBudget(min_survival=0.15), order=order)
    run.run()
    result = run.result()
    emitted = Counter(repr(as_tuple(r)) for key in {r.key for r in log} for r in run.drafter.history.rollouts(key))
    assert emitted == Counter(repr(as_tuple(r)) for r in log)
    cold, warm = (sum(batch.requests, AcceptanceCounters()) for batch in result.batches)
    assert cold.num_emitted_tokens + warm.num_emitted_tokens == num_generated(log)
    assert 1.3 < cold.tokens_per_decode_step < warm.tokens_per_decode_step
    assert warm.tokens_per_decode_step > 2
    assert warm.draft_acceptance_rate > 0.3
    assert len(log) == 2 * 8 * len({prompt_key(r.prompt_token_ids) for r in log})
