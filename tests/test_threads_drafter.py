"""One history shared by two drafters and a trainer, each on its own thread: nothing raises, is lost or torn."""

import random
import sys
import threading
import time

import pytest
from rollout_samples import count, rollout, tree_of
from thread_runs import run_threads

from das import AcceptanceCounters, Drafter, PriceBudget, RolloutHistory, plan_step

KEYS = (10, 11, 12)
NUM_ROUNDS, GROUP = 48, 4


@pytest.fixture(autouse=True)
def switch_often():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


def response(name, round_, i):
    """Text of a request: mostly that of its siblings, with letters of its own."""
    rng = random.Random(round_)
    text = [rng.randrange(6) for _ in range(30)]
    random.Random(f"{name} {i}").shuffle(text[10:15])
    return [*text, 100 + i]


def generate(drafter, name):
    """What an engine does: groups of requests, step by step, a new training step every round."""
    for round_ in range(NUM_ROUNDS):
        key = KEYS[round_ % len(KEYS)]
        texts = {f"{name}-{round_}-{i}": response(name, round_, i) for i in range(GROUP)}
        for request_id in texts:
            drafter.start(request_id, prompt_token_ids=[key], prompt_key=key, training_step=round_ // len(KEYS))
        done = dict.fromkeys(texts, 0)
        while running := [request_id for request_id in texts if done[request_id] < len(texts[request_id])]:
            drafts = plan_step(drafter, running, policy=PriceBudget(min_survival=0.05))
            for request_id in running:
                text, position = texts[request_id], done[request_id]
                accepted = 0
                for token in drafts[request_id].draft_token_ids:
                    if text[position + accepted : position + accepted + 1] != [token]:
                        break
                    accepted += 1
                drafter.extend(request_id, text[position : position + accepted + 1])
                done[request_id] = min(position + accepted + 1, len(text))
            drafter.maintain(max_us=50)
        for request_id in texts:
            drafter.finish(request_id, reward=1.0)


def test_two_drafters_and_a_trainer_share_a_history():
    history = RolloutHistory(window_epochs=NUM_ROUNDS, num_threads=2)
    drafters = [Drafter(history), Drafter(history)]
    done = threading.Event()
    num_given = 0

    def train():
        """Adds rollouts of its own, prepares trees and reads, until the drafters are done."""
        nonlocal num_given
        while not done.is_set() or num_given == 0:
            for key in KEYS:
                history.add(rollout([num_given % 6, 200], 0, prompt=[key], prompt_key=key, request_id=f"t{num_given}"))
            num_given += 1
            history.prepare(KEYS)
            statistics = history.statistics()
            assert statistics.rollout_bytes + statistics.tree_bytes >= 0
            assert statistics.num_rollouts >= len(history.rollouts(KEYS[0]))
            assert set(history.prompt_keys()) <= set(KEYS)
            assert history.memory_bytes() > 0
            time.sleep(0.002)

    def generate_all():
        try:
            run_threads(*(lambda i=i: generate(drafters[i], f"d{i}") for i in range(2)))
        finally:
            done.set()

    run_threads(generate_all, train)
    num_generated = 2 * NUM_ROUNDS * GROUP
    statistics = history.statistics()
    assert statistics.num_added == statistics.num_rollouts == num_generated + len(KEYS) * num_given
    assert (statistics.num_updated, statistics.num_late, statistics.num_expired) == (0, 0, 0)
    assert statistics.num_tokens == 31 * num_generated + 2 * len(KEYS) * num_given
    stored = {r.request_id: r.response_token_ids.tolist() for key in KEYS for r in history.rollouts(key)}
    for name in ("d0", "d1"):
        for round_ in range(NUM_ROUNDS):
            for i in range(GROUP):
                assert stored[f"{name}-{round_}-{i}"] == response(name, round_, i)
    total = sum((drafter.counters() for drafter in drafters), AcceptanceCounters())
    assert total.num_emitted_tokens == 31 * num_generated
    assert 0 < total.num_accepted_tokens <= total.num_drafted_tokens
    last = Drafter(history)
    for key in KEYS:
        last.start(str(key), prompt_token_ids=[key], prompt_key=key, training_step=NUM_ROUNDS)
        tree_of(history, key).check_invariants()
        assert count(history, [key], 200, key=key) == 0
        num_tokens = sum(len(r.response_token_ids) for r in history.rollouts(key))
        assert sum(tree_of(history, key).counts([])) == num_tokens + 1  # the prompt's own
        assert sum(count(history, [token], 200, key=key) for token in range(6)) == num_given


def test_one_drafter_on_two_threads():
    """Requests of one drafter started, drafted for and finished by two threads."""
    drafter = Drafter(RolloutHistory(window_epochs=NUM_ROUNDS, max_bytes=200_000))
    run_threads(*(lambda name=name: generate(drafter, name) for name in "ab"))
    assert drafter.request_ids() == ()
    assert drafter.counters().num_emitted_tokens == 31 * 2 * NUM_ROUNDS * GROUP
    assert drafter.history.memory_bytes() <= 200_000
    assert drafter.history.statistics().num_added == 2 * NUM_ROUNDS * GROUP
