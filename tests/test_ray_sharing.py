"""Workers that share their history: what one generates the others draft from, whatever the service does meanwhile."""

import logging
import threading
import time
from collections import deque

import numpy as np
import pytest
from history_shards import ShardsHere, Worker, pull_message, settle
from rollout_samples import draft, rollout

import das
from das_ray import SharedHistory, SharedHistorySettings
from das_ray.delta import Delta
from das_ray.exchange import ServiceError
from das_ray.installer import Installer
from das_ray.messages import MessageError, Piece, piece_name
from das_ray.running_texts import KEPT_S, RunningTexts

PROMPT, KEY = [1, 2, 3], das.prompt_key([1, 2, 3])
TEXT = np.random.default_rng(0).integers(0, 50, 80).tolist()


@pytest.fixture
def shards(tmp_path):
    shards = ShardsHere(tmp_path)
    yield shards
    shards.close()


@pytest.fixture
def worker(shards):
    """Makes workers of these shards, and ends them."""
    made = []

    def make(**settings):
        made.append(Worker(settings.pop("connect", lambda: shards), **settings))
        return made[-1]

    yield make
    for one in made:
        one.shared.close()


def test_running_text_of_one_worker_is_drafted_by_another_and_counts_once_when_it_ends(worker):
    first, second = worker(), worker()
    first.start("a", prompt=PROMPT)
    second.start("b", prompt=PROMPT)
    first.drafter.extend("a", TEXT[:40])
    settle(first, second, until=lambda: len(second.shared._installer))
    second.drafter.extend("b", TEXT[:6])
    assert draft(second.drafter, "b", 8).draft_token_ids == TEXT[6:14]
    first.drafter.extend("a", TEXT[40:60])
    settle(first, second)
    first.drafter.extend("a", TEXT[60:])
    first.drafter.finish("a", reward=1.0)
    settle(first, second, until=lambda: second.responses(PROMPT))
    assert second.responses(PROMPT) == [TEXT]
    assert len(second.shared._installer) == 0
    tree = second.history.record_for(KEY).tree
    assert tree.tree.num_open_sequences == 1  # its own request
    (known,) = second.history.rollouts(KEY)
    assert (known.request_id, known.reward, known.training_step) == ("a", 1.0, 0)
    # The trainer pushes the same rollout to both: one copy, and the tree stays as it is.
    for one in (first, second):
        assert not one.history.add(rollout(TEXT, 0, request_id="a", reward=2.0))
    settle(first, second)
    assert second.history.record_for(KEY).tree is tree
    assert sum(tree.tree.child_counts(TEXT[20:24], TEXT[24])) == 1


def test_a_tree_with_followed_text_is_that_of_one_process(worker):
    """Same rollouts, same requests: what a worker has of another's request is what a sibling's would be."""
    first, second = worker(), worker()
    alone = das.Drafter(das.RolloutHistory())
    for request_id, owner in (("a", first.drafter), ("b", second.drafter), ("a", alone), ("b", alone)):
        owner.start(request_id, prompt_token_ids=PROMPT, training_step=0)
    for start in range(0, 60, 20):
        for owner in (first.drafter, alone):
            owner.extend("a", TEXT[start : start + 20])
        settle(first, second, until=lambda end=start + 20: _followed_tokens(second) == end)
        drafts = []
        for owner in (second.drafter, alone):
            owner.extend("b", TEXT[start + 3 : start + 9])
            drafts.append(draft(owner, "b").draft_token_ids)
        assert drafts[0] == drafts[1] != []
    for owner in (first.drafter, alone):
        owner.finish("a")
    settle(first, second, until=lambda: second.responses(PROMPT))
    trees = [history.record_for(KEY).tree.tree for history in (second.history, alone.history)]
    for start in range(55):
        context, token = TEXT[start : start + 3], TEXT[start + 3]
        assert trees[0].child_counts(context, token) == trees[1].child_counts(context, token)


def _followed_tokens(worker):
    return sum(followed.num_tokens for followed in worker.shared._installer._followed.values())


def test_what_others_finished_is_there_before_an_announced_prompt_starts(worker):
    first, second = worker(), worker()
    for n in range(3):
        first.history.add(rollout([n, *TEXT], 0, request_id=f"r{n}"))
    settle(first)
    second.shared.announce([KEY])
    settle(second, until=lambda: len(second.responses(PROMPT)) == 3)
    second.start("b", prompt=PROMPT, step=1)
    statistics = second.history.statistics()
    assert (statistics.num_builds_ahead, statistics.num_builds_on_start) == (1, 0)
    second.drafter.extend("b", TEXT[:4])
    assert draft(second.drafter, "b", 6).draft_token_ids == TEXT[4:10]
    settle(first, second)
    assert first.shared.statistics()["num_received_rollouts"] == 0  # nobody is told of its own


def test_a_finished_rollout_is_drafted_from_by_requests_that_run_already(worker):
    first, second = worker(), worker()
    second.start("b", prompt=PROMPT, step=1)
    first.history.add(rollout(TEXT, 1, request_id="r"))
    settle(first, second, until=lambda: second.responses(PROMPT))
    second.drafter.extend("b", TEXT[:4])
    assert draft(second.drafter, "b", 6).draft_token_ids == TEXT[4:10]


def test_out_of_step_nothing_changes_under_a_running_request(worker):
    first, second = worker(in_step=False), worker(in_step=False)
    first.start("a", prompt=PROMPT, step=1)
    second.start("b", prompt=PROMPT, step=1)
    first.drafter.extend("a", TEXT[:40])
    first.history.add(rollout(TEXT, 1, request_id="r"))
    settle(first, second, until=lambda: second.responses(PROMPT))
    second.drafter.extend("b", TEXT[:4])
    assert draft(second.drafter, "b", 6).draft_token_ids == []
    second.start("c", prompt=PROMPT, step=1)
    second.drafter.extend("c", TEXT[:4])
    assert draft(second.drafter, "c", 6).draft_token_ids == TEXT[4:10]
    assert first.shared.statistics()["num_published_pieces"] == 0


def test_a_request_that_is_aborted_is_followed_no_more(worker, shards):
    first, second = worker(), worker()
    for name, one in (("a", first), ("b", second)):
        one.start(name, prompt=PROMPT)
        one.drafter.extend(name, TEXT[:10])
    settle(first, second, until=lambda: len(first.shared._installer) and len(second.shared._installer))
    first.drafter.finish("a", keep=False)
    with shards._lock:
        for shard in shards.shards:  # a minute passes
            shard._running._clock = lambda: time.monotonic() + 2 * KEPT_S
    settle(second, until=lambda: len(second.shared._installer) == 0)
    assert second.responses(PROMPT) == []
    second.history.record_for(KEY).tree.tree.check_invariants()


def test_nobody_is_followed_for_a_prompt_that_runs_here_no_more(worker):
    first, second = worker(), worker()
    for name, one in (("a", first), ("b", second)):
        one.start(name, prompt=PROMPT)
        one.drafter.extend(name, TEXT[:10])
    settle(first, second, until=lambda: len(first.shared._installer) and len(second.shared._installer))
    second.drafter.finish("b")
    settle(second, until=lambda: len(second.shared._installer) == 0)
    assert second.history.record_for(KEY).open_requests == {}
    settle(first, until=lambda: len(first.responses(PROMPT)) == 1)
    first.drafter.extend("a", TEXT[10:])
    first.drafter.finish("a")
    settle(first)
    second.shared.announce([KEY])
    settle(second, until=lambda: sorted(map(len, second.responses(PROMPT))) == [10, 80])


# ---------------------------------------------------------------- faults


def test_a_shard_that_dies_and_returns_loses_nothing(worker, shards, caplog):
    first, second = worker(), worker()
    prompts = [[n] for n in range(8)]
    with caplog.at_level(logging.WARNING, logger="das"):
        for round_number in range(3):
            for n, prompt in enumerate(prompts):
                first.history.add(rollout([round_number, *TEXT], 0, prompt=prompt, request_id=f"{round_number}-{n}"))
            if round_number == 0:
                settle(first)
                shards.kill(0)
            if round_number == 1:
                first.start("a", prompt=PROMPT)
                first.drafter.extend("a", TEXT[:10])
                assert draft(first.drafter, "a") is not None  # it goes on
                settle(first)
                assert first.shared.statistics()["state"] == "alone: shard 0 is dead"
                shards.revive(0)
    settle(first, until=lambda: first.shared.statistics()["num_published_rollouts"] == 24)
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"], caplog.text
    assert "shard 0 is dead" in caplog.records[0].message
    second.shared.announce([das.prompt_key(prompt) for prompt in prompts])
    settle(second, until=lambda: second.history.statistics().num_rollouts == 24)
    assert all(len(second.responses(prompt)) == 3 for prompt in prompts)
    assert first.shared.statistics()["state"] == "sharing"


def test_a_publish_whose_acknowledgement_is_lost_does_not_count_twice(worker, shards):
    lost = iter([True, True, False])

    class Losing:
        num_shards = shards.num_shards

        def call(self, calls):
            answers = shards.call(calls)
            if any(method == "publish" for method, _ in calls.values()) and next(lost, False):
                return {shard: ServiceError("the answer went astray") for shard in answers}
            return answers

    first = worker(connect=Losing)
    first.history.add(rollout(TEXT, 0, request_id="r"))
    settle(first, until=lambda: first.shared.statistics()["num_published_rollouts"] == 1)
    assert first.shared.statistics()["num_retries"] == 2
    stores = [shard._store for shard in shards.shards]
    assert sum(store.num_rollouts for store in stores) == 1
    assert sum(store.counts["num_known"] for store in stores) == 2


def test_a_service_that_is_missing_is_reported_once_and_drafting_goes_on(worker, caplog):
    def connect():
        raise ServiceError("there is no service")

    with caplog.at_level(logging.INFO, logger="das"):
        alone = worker(connect=connect)
        alone.start("a", prompt=PROMPT)
        for _ in range(5):
            alone.drafter.extend("a", TEXT)
            alone.shared.between_steps()
            alone.shared.announce([KEY])
            assert draft(alone.drafter, "a") is not None
            time.sleep(0.05)
        alone.drafter.finish("a")
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "the shared history ray:test cannot be used: there is no service" in caplog.text
    assert alone.shared.statistics()["state"] == "alone: there is no service"
    assert alone.shared.statistics()["num_queued_rollouts"] == 1
    assert len(alone.responses(PROMPT)) == 1


def test_a_full_queue_drops_what_waited_longest_and_nothing_here(worker):
    def connect():
        raise ServiceError("not now")

    alone = worker(connect=connect, max_queue_bytes=1 << 20)
    text = list(range(10_000))
    for n in range(60):
        alone.history.add(rollout([n, *text], 0, request_id=str(n)))
    statistics = alone.shared.statistics()
    assert statistics["num_queued_bytes"] <= 1 << 20
    assert statistics["num_dropped_rollouts"] == 60 - statistics["num_queued_rollouts"] > 20
    queued = [one.request_id for one, _, _ in alone.shared._outbox._rollouts]
    assert queued == [str(n) for n in range(60 - len(queued), 60)]
    assert len(alone.responses(PROMPT)) == 60
    alone.start("a", prompt=[9])
    alone.drafter.extend("a", TEXT)
    alone.shared.between_steps()
    assert alone.shared.statistics()["num_delayed_pieces"] == 1


def test_a_slow_service_makes_no_step_wait(worker, shards):
    """A call that is answered only when the steps are over: a step that waited would be there when it returns."""
    calling, steps_over, answers = threading.Event(), threading.Event(), []

    class Slow:
        num_shards = shards.num_shards

        def call(self, calls_by_shard):
            calling.set()
            answers.append((threading.current_thread().name, steps_over.wait(30)))
            return shards.call(calls_by_shard)

    slow = worker(connect=Slow)
    slow.start("a", prompt=PROMPT)
    for n in range(40):
        slow.history.add(rollout([n, *TEXT], 0, request_id=f"r{n}"))
        slow.drafter.extend("a", TEXT[:2])
        slow.shared.announce([KEY])
        slow.shared.between_steps()
        assert calling.wait(30)
    assert not answers
    steps_over.set()
    settle(slow)
    assert set(answers) == {("das-ray-exchange", True)}


def test_a_fault_switches_sharing_off_once_and_nothing_else(worker, monkeypatch, caplog):
    first, second = worker(), worker()

    def fail(*_, **__):
        raise RuntimeError("broken")

    monkeypatch.setattr(second.shared._installer, "run", fail)
    second.start("b", prompt=PROMPT)
    second.drafter.extend("b", TEXT[:4])
    with caplog.at_level(logging.ERROR, logger="das"):
        for _ in range(3):
            second.shared.between_steps()
    assert len(caplog.records) == 1
    assert second.shared.statistics()["state"] == "off: RuntimeError: broken"
    assert draft(second.drafter, "b") is not None
    second.drafter.finish("b")
    assert second.responses(PROMPT) == [TEXT[:4]]
    first.shared.between_steps()


def test_rollouts_with_tokens_that_the_model_lacks_are_left_out():
    history = das.RolloutHistory()
    installer = Installer(history, vocabulary_size=50)
    installer.add(Delta("s", 1, 1, [rollout([49], 0), rollout([50], 0), rollout([1], 0, prompt=[50])], [], []))
    installer.run(max_tokens=1000)
    assert [len(history.rollouts(key)) for key in history.prompt_keys()] == [1]
    assert installer.counts["num_foreign_rollouts"] == 2


def test_a_long_delta_is_spread_over_steps():
    history = das.RolloutHistory()
    drafter = das.Drafter(history)
    drafter.start("a", prompt_token_ids=PROMPT, training_step=0)
    installer = Installer(history)
    installer.add(Delta("s", 1, 1, [rollout([n] * 300, 0, request_id=str(n)) for n in range(10)], [], []))
    lengths = []
    while installer._queue:
        installer.run(max_tokens=1000)
        lengths.append(len(history.rollouts(KEY)))
    assert lengths == [4, 8, 10]


# ---------------------------------------------------------------- ranks


def test_ranks_that_hear_of_the_same_broadcasts_draft_the_same(worker, shards):
    """One rank talks to the service; the others take in what it hands on, at the same steps."""
    first = worker()
    handed_on = deque()
    ranks = []
    for rank in range(2):
        drafter = das.Drafter(das.RolloutHistory())
        policy = das.PriceBudget(min_survival=0.15)
        shared = SharedHistory(
            SharedHistorySettings(service="ray:test", pull_interval_ms=10, piece_tokens=1),
            drafter=drafter,
            policy=lambda policy=policy: policy,
            broadcast=(lambda m: handed_on.append(m) or m) if rank == 0 else (lambda m: handed_on.popleft()),
            is_first_rank=rank == 0,
            connect=lambda: shards,
        )
        ranks.append((drafter, shared))
    for name, one in (("a", first.drafter), *((f"b{n}", drafter) for n in range(2) for drafter, _ in ranks)):
        one.start(name, prompt_token_ids=PROMPT, training_step=0)
    seen = set()
    for position in range(0, 60, 8):
        first.drafter.extend("a", TEXT[position : position + 8])
        settle(first)
        for _ in range(8):
            drafts = []
            for drafter, shared in ranks:
                shared.between_steps()
                drafts.append([draft(drafter, f"b{n}", 4).draft_token_ids for n in range(2)])
            assert drafts[0] == drafts[1]
        for drafter, _ in ranks:
            drafter.extend_batch({"b0": TEXT[position : position + 2], "b1": TEXT[position + 20 : position + 22]})
        seen.add(str(drafts[0]))
    assert len(seen) > 3
    statistics = [shared.statistics() for _, shared in ranks]
    assert statistics[0]["num_installed_pieces"] == statistics[1]["num_installed_pieces"] > 5
    ranks[0][1].close()
    ranks[1][1].close()


def test_a_new_worker_begins_with_what_all_have_learned(worker):
    first, second = (worker(policy=das.ThroughputBudget()) for _ in range(2))
    for n, one in enumerate((first, second)):
        one.policy.tokens_per_decode_step = 2.0 + n
        one.drafter.confidence.hits[1, 5] = 100.0 * (1 + n)
        one.start("x", prompt=PROMPT)
        for _ in range(5 + n):
            one.drafter.extend("x", [7])
        one.shared.share_learned()
        settle(one)
    third = worker(policy=das.ThroughputBudget())
    settle(third, until=lambda: third.shared.counts["num_learned_taken"])
    assert third.drafter.confidence.hits[1, 5] == 300.0
    assert third.policy.tokens_per_decode_step == 3.0  # of the one with more decode steps


# ---------------------------------------------------------------- shards


def test_a_pull_that_makes_no_sense_is_refused(shards):
    good = pull_message([KEY])
    assert Delta.from_bytes(shards.shards[0].pull(good)).is_empty
    for bad in (b"", good[:-1], "x", pull_message([KEY], [0, 0]), pull_message([KEY], worker="a/b")):
        with pytest.raises(MessageError):
            shards.shards[0].pull(bad)


def test_an_answer_has_a_limit_and_says_how_far_it_went(tmp_path, monkeypatch):
    monkeypatch.setattr("das_ray.shard._MAX_DELTA_BYTES", 10_000)
    shards = ShardsHere(tmp_path, num_shards=1)
    one, other = Worker(lambda: shards), Worker(lambda: shards)
    prompts = [[n] for n in range(40)]
    for prompt in prompts:
        one.history.add(rollout([*prompt, *range(300)], 0, prompt=prompt, request_id="r"))
    settle(one)
    keys = [das.prompt_key(prompt) for prompt in prompts]
    assert Delta.from_bytes(shards.shards[0].pull(pull_message(keys))).num_answered == 9
    other.shared.announce(keys)
    settle(other, until=lambda: other.history.statistics().num_rollouts == 40)
    for worker in (one, other):
        worker.shared.close()
    shards.close()


def test_what_a_worker_knows_of_a_store_that_is_lost_counts_no_more(worker, shards, tmp_path):
    first, second = worker(), worker()
    for n in range(3):
        first.history.add(rollout([n, *TEXT], 0, request_id=f"r{n}"))
        settle(first)
    second.shared.announce([KEY])
    settle(second, until=lambda: len(second.responses(PROMPT)) == 3)
    for index in range(2):
        shards.kill(index)
        (tmp_path / f"shard-{index}").rename(tmp_path / f"lost-{index}")
        shards.revive(index)
    third = worker()
    third.history.add(rollout(TEXT, 0, request_id="new"))
    settle(third)
    second.shared.announce([KEY])
    settle(second, until=lambda: len(second.responses(PROMPT)) == 4)


def piece(start, end, *, worker="w", request_id="a"):
    return Piece(worker, start, rollout(TEXT[start:end], 0, request_id=request_id))


def test_running_texts_grow_piece_by_piece_and_are_forgotten():
    now = [0.0]
    texts = RunningTexts(max_tokens=100, clock=lambda: now[0])
    assert texts.add(piece(0, 10))
    assert texts.add(piece(10, 15))
    assert texts.add(piece(10, 15))  # again: its acknowledgement was lost
    assert texts.add(piece(12, 20))
    assert not texts.add(piece(30, 40))  # one is missing
    assert not texts.add(piece(5, 9, request_id="b"))
    assert texts.num_tokens == 20
    (name,) = {piece(0, 1).name}
    assert name == piece_name("w", rollout([1], 0, request_id="a"))
    for known in (0, 7, 19):
        (found,) = texts.of_prompt(KEY, {name: known}, worker="other")
        assert (found.start, found.rollout.response_token_ids.tolist()) == (known, TEXT[known:20])
        assert found.rollout.response_hash == rollout(TEXT[known:20]).response_hash
    assert texts.of_prompt(KEY, {name: 20}, worker="other") == []
    assert texts.of_prompt(KEY, {}, worker="w") == []
    assert texts.add(piece(0, 30, request_id="b"))
    assert texts.add(piece(0, 75, request_id="c"))  # beyond 100 tokens: the oldest goes
    assert (texts.gone([name]), texts.num_tokens, len(texts)) == ([name], 75, 1)
    now[0] = KEPT_S + 1
    assert texts.of_prompt(KEY, {}, worker="other") == []
    assert (texts.num_tokens, len(texts)) == (0, 0)
