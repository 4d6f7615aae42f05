"""What a recording takes down is what the replay counts, and watching changes nothing."""

import numpy as np
import pytest
from rollout_samples import PROMPT, rollout

from das import FixedBudget, LatencyModel
from das.analysis.generation_time import generation_time
from das.analysis.recording import Recording
from das.analysis.replay import Replay, replay
from das.analysis.report.times import batch_times
from das.analysis.simulate import simulate


def random_log(*, num_steps=2, with_masks=False):
    """Rollouts that resemble each other: stretches of a few texts, of two prompts."""
    random = np.random.default_rng(5)
    texts = random.integers(0, 9, (4, 30)).tolist()
    log = []
    for step in range(num_steps):
        for number in range(12):
            tokens = [token for text in random.integers(0, 4, 1 + number % 4) for token in texts[text]]
            mask = random.random(len(tokens)) < 0.8 if with_masks else None
            fields = {"response_mask": mask} if with_masks else {}
            log.append(rollout(tokens, step, prompt=[*PROMPT, number % 2], reward=float(number % 3), **fields))
    return log


@pytest.fixture(scope="module", params=["chain", "tree", "widths", "lockstep", "masks"])
def watched(request):
    """A replay, and the recording that watched it."""
    log = random_log(with_masks=request.param == "masks")
    settings = {"group_size": 3, "policy": FixedBudget(6)}
    if request.param == "tree":
        settings["shape"] = "tree"
    elif request.param == "widths":
        settings["widths"] = (0, 3, 6)
    elif request.param == "lockstep":
        settings["order"] = "lockstep"
    recording = Recording(log)
    run = Replay(log, observer=recording, **settings)
    run.run()
    unwatched = replay(log, **settings)
    return run.result(), recording, unwatched


def test_watching_changes_nothing(watched):
    result, _, unwatched = watched
    assert result.batches == unwatched.batches


def test_positions_add_up_to_the_counters(watched):
    result, recording, _ = watched
    drafted, accepted = recording.by_position()
    assert drafted.sum() == result.counters.num_drafted_tokens > 0
    assert accepted.sum() == result.counters.num_accepted_tokens > 0
    assert (accepted <= drafted).all()
    assert (np.diff(accepted) <= 0).all()


def test_ended_requests_are_the_replays_batch_by_batch(watched):
    result, recording, _ = watched
    for number, batch in enumerate(result.batches):
        assert tuple(ended.counters for ended in recording.ended if ended.batch == number) == batch.requests
        steps = {ended.rollout.training_step for ended in recording.ended if ended.batch == number}
        assert steps == {batch.training_step}


def test_reliability_is_the_replays(watched):
    result, recording, _ = watched
    assert recording.reliability() == result.reliability


@pytest.mark.parametrize("c_kv_ms", [0.0, 0.01])
def test_passes_take_the_time_that_the_counters_take(watched, c_kv_ms):
    result, recording, _ = watched
    latency = LatencyModel(c_base_ms=3.0, c_tok_ms=0.5, c_kv_ms=c_kv_ms, c_engine_ms=0.25)
    times = batch_times(recording.ended, recording.batch_passes(), latency=latency)
    assert len(times) == len(result.batches)
    for its, batch in zip(times, result.batches, strict=True):
        expected = generation_time([batch], latency)
        assert its.with_drafts_s[-1] == pytest.approx(expected.with_drafts_s)
        assert its.without_drafts_s[-1] == pytest.approx(expected.without_drafts_s)
        assert len(its.with_drafts) == batch.num_batch_steps


def test_traces_hold_every_token_of_a_request(watched):
    result, recording, _ = watched
    assert recording.sampled_share == 1.0
    assert len(recording.traced) == len(recording.ended)
    drafted = accepted = 0
    for request in recording.traced:
        position = 0
        tokens = request.finished.rollout.response_token_ids.tolist()
        for step in request.steps:
            assert step.position >= position  # environment tokens lie between steps
            position = step.position + step.num_emitted_tokens
            right = [token.token_id for token in step.draft if token.is_accepted]
            assert right == tokens[step.position : step.position + len(right)]
            assert len(right) <= step.num_emitted_tokens <= len(right) + 1
            assert all(token.origin is not None for token in step.draft)
            drafted += len(step.draft)
            accepted += len(right)
    assert (drafted, accepted) == (result.counters.num_drafted_tokens, result.counters.num_accepted_tokens)


def test_a_long_log_is_sampled_by_request(monkeypatch):
    monkeypatch.setattr("das.analysis.recording.SAMPLED_TOKENS", 900)
    log = [rollout([1, 2, 3] * 3, step) for step in range(200)]
    recording = Recording(log)
    assert recording.sampled_share == 0.5
    run = Replay(log, observer=recording, policy=FixedBudget(2), window_epochs=1)
    run.run()
    assert len(recording.traced) == pytest.approx(100, abs=5)
    assert len(recording.ended) == 200


def test_a_simulation_is_recorded_too_without_the_copies_of_a_race():
    log = random_log()
    plain = simulate(log, policy=FixedBudget(6), num_workers=2)
    recording = Recording(log)
    assert simulate(log, policy=FixedBudget(6), num_workers=2, observer=recording).with_drafts == plain.with_drafts
    assert sum(ended.num_tokens for ended in recording.ended) == plain.with_drafts.counters.num_emitted_tokens
    racing = Recording(log)
    simulate(log, policy=FixedBudget(6), num_workers=2, execution="fastest-of-n", observer=racing)
    assert len(racing.ended) == len(log)
