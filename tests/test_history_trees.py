"""RolloutHistory: when its trees are built, installed, rebuilt and dropped, and what is in them."""

import gc
import os
import signal
import time
from concurrent.futures import Future
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest
from rollout_samples import KEY, PROMPT, count, draft, filled, rollout, run, stored, tree_of

from das import Drafter, RolloutHistory, prompt_key
from das.prompt_record import PROMPT_OVERHEAD_BYTES, ROLLOUT_OVERHEAD_BYTES

# ---------------------------------------------------------------- the byte limit


def three_prompts(max_bytes=1 << 30):
    """Prompts 1, 2, 3, used in this order, each with a tree, and no text in common; and the drafter."""
    drafter = Drafter(RolloutHistory(max_bytes=max_bytes, max_common_tokens=0))
    for prompt in (1, 2, 3):
        run(drafter, f"r{prompt}", list(range(100 * prompt, 100 * prompt + 60)), prompt=[prompt])
    return drafter


def held(history):
    """Which of the prompts 1, 2, 3 have rollouts, and which a tree."""
    kept = [prompt for prompt in (1, 2, 3) if history.rollouts(prompt_key([prompt]))]
    return kept, [prompt for prompt in kept if history.record_for(prompt_key([prompt])).tree is not None]


def test_memory_bytes_agrees_with_a_recount():
    drafter = three_prompts()
    history = drafter.history
    history.add(rollout(range(50), 3, prompt=[1], response_mask=[True] * 49 + [False]))
    history.add(rollout(range(9), 3, prompt=[1], reward=2.0))
    history.add(rollout(range(9), 3, prompt=[1], reward=3.0))
    keys = [prompt_key([prompt]) for prompt in (1, 2, 3)]
    rollouts = [r for key in keys for r in history.rollouts(key)]
    rollout_bytes = sum(r.response_token_ids.nbytes + ROLLOUT_OVERHEAD_BYTES for r in rollouts) + 50  # the mask
    rollout_bytes += 3 * (4 + PROMPT_OVERHEAD_BYTES)  # prompts of one token
    tree_bytes = sum(tree_of(history, key).memory_bytes() for key in keys)
    statistics = history.statistics()
    assert (statistics.rollout_bytes, statistics.tree_bytes) == (rollout_bytes, tree_bytes)
    assert history.memory_bytes() == rollout_bytes + tree_bytes
    assert len(rollouts) == 5


def test_a_start_makes_room_for_a_usual_response():
    drafter = Drafter()
    for seed in range(4):
        drafter.history.add(rollout(np.random.default_rng(seed).integers(0, 60, 400), 1))
    for name in "abcd":
        drafter.start(name, prompt_token_ids=PROMPT, training_step=2)
    before = tree_of(drafter.history, KEY).memory_bytes()
    for seed, name in enumerate("abcd", 4):
        drafter.extend(name, np.random.default_rng(seed).integers(0, 60, 250))
    assert tree_of(drafter.history, KEY).memory_bytes() == before


def test_a_rollout_that_moves_to_another_step_costs_what_it_did():
    history = filled(rollout([4], 0, request_id="a"))
    before = history.memory_bytes()
    history.add(rollout([4], 3, request_id="a"))
    assert stored(history) == [(3, [4])]
    assert history.memory_bytes() == before


def test_a_prompt_of_its_own_counts_where_it_is_not_shared():
    """Two prompts under one key of the caller's."""
    first = rollout([4], 0, prompt_key=7)
    shared, other = (filled(first, rollout([5], 0, prompt_key=7, prompt=p)) for p in (PROMPT, [9] * 30))
    assert other.memory_bytes() - shared.memory_bytes() == 4 * 30


def test_the_least_recently_used_prompts_lose_their_tree_first_then_their_rollouts():
    whole = three_prompts().history.statistics()
    assert whole.num_evicted_trees == whole.num_evicted_rollouts == 0
    tree, one = whole.tree_bytes // 3, whole.rollout_bytes // 3
    expected = {
        3 * one + 3 * tree: ([1, 2, 3], [1, 2, 3]),
        3 * one + 3 * tree - 1: ([1, 2, 3], [2, 3]),
        3 * one + 2 * tree - 1: ([1, 2, 3], [3]),
        3 * one + tree - 1: ([1, 2, 3], []),
        3 * one - 1: ([2, 3], []),
        2 * one - 1: ([3], []),
        one - 1: ([], []),
    }
    for max_bytes, kept in expected.items():
        history = three_prompts(max_bytes).history
        assert held(history) == kept, f"at {max_bytes} bytes"
        assert history.memory_bytes() <= max_bytes
        assert history.statistics().num_rollouts == len(kept[0]) == 3 - history.statistics().num_evicted_rollouts


def test_a_start_makes_a_prompt_the_most_recently_used():
    drafter = three_prompts()
    run(drafter, "again", [7], prompt=[1])
    assert drafter.history.prompt_keys() == tuple(prompt_key([prompt]) for prompt in (2, 3, 1))


def test_prompts_with_open_requests_keep_tree_and_rollouts():
    drafter = three_prompts(max_bytes := three_prompts().history.memory_bytes())
    drafter.start("open", prompt_token_ids=[1])
    before = draft(drafter, "open").draft_token_ids
    for i in range(8):  # of another prompt, larger than the limit together
        drafter.history.add(rollout(range(max_bytes // 16), i, prompt=[4 + i]))
    assert held(drafter.history) == ([1], [1])
    assert draft(drafter, "open").draft_token_ids == before == list(range(100, 116))
    drafter.finish("open", keep=False)
    drafter.history.add(rollout(range(max_bytes // 4 - 200), 9, prompt=[4]))  # and it fits alone
    assert held(drafter.history) == ([], [])
    assert drafter.history.memory_bytes() <= max_bytes


def test_an_evicted_tree_is_built_again():
    drafter = three_prompts(three_prompts().history.memory_bytes() - 1)
    assert held(drafter.history) == ([1, 2, 3], [2, 3])
    assert run(drafter, "again", [7], prompt=[1]) == list(range(100, 116))


# ---------------------------------------------------------------- the background


class LateFuture(Future):
    """Not done until somebody waits for it."""

    def __init__(self, function, arguments):
        super().__init__()
        self.work = lambda: function(*arguments)

    def result(self, timeout=None):
        if not self.done():
            self.set_result(self.work())
        return super().result(timeout)


class SlowPool:
    def __init__(self, *arguments, **settings):
        pass

    def submit(self, function, *arguments):
        return LateFuture(function, arguments)


class FastPool(SlowPool):
    def submit(self, function, *arguments):
        future = LateFuture(function, arguments)
        future.result()
        return future


def test_a_start_uses_what_was_prepared():
    history = filled(rollout([4, 5], 0), rollout([7], 0, prompt=[9]))
    history.prepare([KEY, prompt_key([9]), 12345])
    history.prepare([KEY])  # under way already
    drafter = Drafter(history)
    assert run(drafter, "a", [4, 6], step=1) == [4, 5]
    assert run(drafter, "b", [8], prompt=[10]) == []
    statistics = history.statistics()
    assert (statistics.num_builds_ahead, statistics.num_builds_on_start, statistics.num_trees) == (1, 1, 2)


def test_a_prepared_tree_that_lacks_rollouts_is_completed_and_one_with_too_many_is_built_again():
    for step, ahead in ((0, 1), (1, 0)):
        history = filled(rollout([4, 5], 0), window_epochs=1)
        history.prepare([KEY])
        history.add(rollout([4, 6], step))
        drafter = Drafter(history)
        drafter.start("a", prompt_token_ids=PROMPT, training_step=2)
        assert (count(history, [4], 5), count(history, [4], 6)) == (ahead, 1)
        assert history.statistics().num_builds_ahead == ahead


def test_maintain_drops_what_was_built_in_vain(monkeypatch):
    monkeypatch.setattr("das.history.ThreadPoolExecutor", FastPool)
    history = filled(rollout([4, 5], 0), rollout([6], 0, prompt=[9]), window_epochs=1)
    history.prepare([KEY, prompt_key([9])])
    history.add(rollout([7], 1))  # the first prompt's window has moved on
    history.maintain(max_us=0)
    history.maintain()
    drafter = Drafter(history)
    drafter.start("a", prompt_token_ids=PROMPT, training_step=2)
    drafter.start("b", prompt_token_ids=[9], training_step=2)
    assert (history.statistics().num_builds_ahead, history.statistics().num_builds_on_start) == (1, 1)


def test_builds_that_would_not_fit_are_not_ordered(monkeypatch):
    monkeypatch.setattr("das.history.ThreadPoolExecutor", FastPool)
    history = filled(*[rollout([4] * 1000, 0, prompt=[number]) for number in range(10)], max_bytes=300_000)
    history.prepare(history.prompt_keys())
    drafter = Drafter(history)
    for number in range(10):
        drafter.start(f"r{number}", prompt_token_ids=[number], training_step=1)
    statistics = history.statistics()
    assert 1 <= statistics.num_builds_ahead <= 3
    assert statistics.num_builds_ahead + statistics.num_builds_on_start == 10


def test_a_forked_process_builds_its_own_trees():
    history = filled(rollout([4, 5, 6] * 300, 0), rollout([6], 0, prompt=[9]))
    history.prepare([KEY])
    child = os.fork()
    if child == 0:
        history.prepare([prompt_key([9])])
        Drafter(history).start("a", prompt_token_ids=PROMPT, training_step=1)
        Drafter(history).start("b", prompt_token_ids=[9], training_step=1)
        os._exit(0)
    end_s = time.monotonic() + 60
    while (status := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < end_s:
        time.sleep(0.01)
    if status == (0, 0):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert status[1] == 0
    assert status[0] == child


def test_a_dropped_drafter_lets_go_of_its_requests():
    history = filled(rollout([4, 5], 0))
    drafter = Drafter(history)
    drafter.start("a", prompt_token_ids=PROMPT, training_step=1)
    assert history.record_for(KEY).open_requests
    del drafter
    history.statistics()
    assert not history.record_for(KEY).open_requests


def test_drafters_collected_in_the_middle_of_any_change():
    """Each is in a cycle with what drives it, as engines are, and requests of it run when the collector comes."""
    random = Random(0)
    history = RolloutHistory(max_bytes=12_000)
    thresholds = gc.get_threshold()
    try:
        for step in range(150):
            engine = SimpleNamespace(drafter=Drafter(history))
            engine.drives = engine
            gc.set_threshold(1)
            for name in "abc":
                engine.drafter.start(name, prompt_token_ids=[random.randrange(30)] * 4, training_step=step)
            engine.drafter.extend_batch({"a": [1, 2, 3], "b": [1, 2, 4]})
            engine.drafter.finish("b")
            response = [random.randrange(9) for _ in range(30)]
            history.add(rollout(response, step, prompt=[random.randrange(30)] * 4))
            gc.set_threshold(*thresholds)
    finally:
        gc.set_threshold(*thresholds)
    del engine
    gc.collect()
    found = history.statistics()
    records = history._prompts.values()
    assert not any(record.open_requests for record in records)
    assert found.num_evicted_rollouts > 0
    assert found.num_rollouts == sum(len(record) for record in records)
    assert found.num_trees == sum(record.tree is not None for record in records)
    assert found.tree_bytes == sum(record.tree.tree.memory_bytes() for record in records if record.tree)
    assert found.rollout_bytes == sum(record.rollout_bytes for record in records)


def test_room_for_responses_is_bounded_by_what_the_tree_holds():
    history = filled(*(rollout(np.arange(2000) + key, 0, prompt=[key]) for key in range(10)), max_bytes=3_000_000)
    history.add(rollout(np.arange(4000), 0, prompt=[99]))
    drafter = Drafter(history)
    for number in range(16):
        drafter.start(str(number), prompt_token_ids=[99], training_step=1)
    assert history.statistics().num_evicted_rollouts == 0
    before = history.memory_bytes()
    for number in range(16, 64):
        drafter.start(str(number), prompt_token_ids=[99], training_step=1)
    assert history.memory_bytes() < 1.5 * before


def test_discarded_builds_are_never_built():
    history = RolloutHistory()
    for number in range(50):
        history.add(rollout([1, 2, 3] * 2000, prompt=[number]))
    history.prepare(prompt_key([number]) for number in range(50))
    history.discard_builds()
    history.discard_builds()  # there is nothing left
    Drafter(history).start("r", prompt_token_ids=[40])
    assert (history.statistics().num_builds_ahead, history.statistics().num_builds_on_start) == (0, 1)


def test_maintain_builds_nothing(monkeypatch):
    """A prepared tree that holds too much by now is of no use; building another would not be O(1)."""
    monkeypatch.setattr("das.history.ThreadPoolExecutor", FastPool)
    history = filled(rollout([4, 5], 0), window_epochs=1)
    history.prepare([KEY])
    history.add(rollout([4, 6], 1))
    history.maintain()
    assert (history.statistics().num_builds_ahead, history.statistics().num_builds_on_start) == (0, 0)
    assert run(Drafter(history), "a", [7], step=1) == [4, 6]


@pytest.mark.parametrize("next_step", [0, 1])
@pytest.mark.parametrize("maintain", [False, True])
def test_drafts_do_not_depend_on_how_fast_the_background_is(monkeypatch, maintain, next_step):
    answers = []
    for pool in (SlowPool, FastPool):
        monkeypatch.setattr("das.history.ThreadPoolExecutor", pool)
        drafter = Drafter(filled(rollout([4, 5, 6], 0)))
        drafter.confidence.hits[:] = np.arange(96).reshape(4, 24)  # every source answers differently
        run(drafter, "a", [4, 5, 7], step=0)
        drafter.history.prepare([KEY])
        if maintain:
            drafter.maintain(max_us=1e6)
        drafter.start("b", prompt_token_ids=PROMPT, training_step=next_step)
        answer = draft(drafter, "b")
        answers.append((answer.draft_token_ids, answer.survival))
    assert answers[0] == answers[1]


# ---------------------------------------------------------------- open requests and rebuilt trees


def test_a_running_request_moves_to_the_tree_of_a_newer_step():
    drafter = Drafter(filled(rollout([4, 5, 6, 7, 8], 0), window_epochs=2))
    drafter.start("old", prompt_token_ids=PROMPT, training_step=1)
    drafter.extend("old", [4, 5])
    before = drafter.history.record_for(KEY).tree
    assert draft(drafter, "old").draft_token_ids == [6, 7, 8]
    drafter.start("new", prompt_token_ids=PROMPT, training_step=2)
    assert drafter.history.record_for(KEY).tree is not before
    drafter.extend("old", [6, 9])  # the pending draft survives the move
    assert (drafter.counters("old").num_drafted_tokens, drafter.counters("old").num_accepted_tokens) == (3, 1)
    drafter.extend("old", [4, 5, 6])
    assert draft(drafter, "old").draft_token_ids[0] in (7, 9)
    drafter.finish("old")
    assert stored(drafter.history) == [(0, [4, 5, 6, 7, 8]), (1, [4, 5, 6, 9, 4, 5, 6])]
    counted = [count(drafter.history, *pair) for pair in (([4], 5), ([5, 6], 9), (PROMPT, 4))]
    assert counted == [3, 1, 2]
    drafter.finish("new")
    assert run(drafter, "next", [4], step=2)[:2] == [4, 5]


def test_a_forgotten_request_leaves_no_trace_after_the_next_start():
    drafter = Drafter(filled(rollout([4, 5], 0)))
    run(drafter, "a", [7, 8], step=0, keep=False)
    assert stored(drafter.history) == [(0, [4, 5])]
    drafter.start("b", prompt_token_ids=PROMPT, training_step=0)
    assert (count(drafter.history, [7], 8), count(drafter.history, [4], 5)) == (0, 1)
    fresh = Drafter(filled(rollout([4, 5], 0)))
    fresh.start("b", prompt_token_ids=PROMPT, training_step=0)
    assert draft(drafter, "b") == draft(fresh, "b")
    tree, fresh_tree = tree_of(drafter.history), tree_of(fresh.history)
    assert (tree.num_tokens, tree.num_nodes) == (fresh_tree.num_tokens, fresh_tree.num_nodes)


def test_a_request_without_a_token_is_no_rollout():
    drafter = Drafter()
    drafter.start("a", prompt_token_ids=PROMPT)
    drafter.finish("a", reward=1.0)
    assert stored(drafter.history) == []
    assert drafter.history.statistics().num_added == 0
