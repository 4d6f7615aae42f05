"""Lengths as they come in training: steps that are not over, slots refilled at once, policies that change, a log."""

import collections
import heapq
from pathlib import Path

import numpy as np
import pytest

from das import LengthClasses, LengthModel
from das.analysis import read_log

AMC = Path(__file__).parent.parent / "examples" / "amc23_rollouts.jsonl.gz"
AT = np.array([100, 200, 400, 800, 1600])


def lognormal(rng, size, *, median=400.0, sigma=0.6):
    return np.maximum(1, np.exp(rng.normal(np.log(median), sigma, size))).astype(np.int64)


TRUTH = np.sort(lognormal(np.random.default_rng(1), 200_000))


def told(model, lengths, keys=None):
    model.observe_finished(np.zeros(len(lengths), np.uint64) if keys is None else keys, lengths)


def share_longer(model, at=AT):
    """P(length > at) of a request of an unknown prompt that starts now."""
    start = model.forecast(np.full(len(at), 99, np.uint64), np.zeros(len(at), np.int64))
    return start.survival(at)


def true_share_longer(at=AT):
    return 1 - np.searchsorted(TRUTH, at, side="right") / len(TRUTH)


def worst_error(model):
    return np.abs(share_longer(model) - true_share_longer()).max()


def rolled_out(model, rng, *, num_steps, per_step, share_of_last, with_running=False):
    """Synchronous training steps: the rollouts of a step end in order of their lengths. Stop in the last one."""
    for step in range(num_steps):
        lengths = np.sort(lognormal(rng, per_step))
        ended = lengths[: round(per_step * share_of_last)] if step == num_steps - 1 else lengths
        for part in np.array_split(ended, 16):
            told(model, part)
        if with_running and len(ended):
            model.observe_running(np.full(per_step - len(ended), ended[-1]))


@pytest.mark.parametrize("share_of_last", [0.1, 0.5, 0.9, 1.0])
def test_a_window_of_whole_steps_is_unbiased_in_the_middle_of_a_step(share_of_last):
    """It has lost as many short rollouts of its oldest step as have ended of the present one."""
    model = LengthModel(window_rollouts=4 * 320)
    rolled_out(model, np.random.default_rng(2), num_steps=9, per_step=320, share_of_last=share_of_last)
    assert worst_error(model) < 0.04


def test_a_window_of_part_of_a_step_is_biased_by_where_it_ends():
    """Why `window_rollouts` asks for a step at least: the last 200 of 1,000 are its longest."""
    model = LengthModel(window_rollouts=200)
    rolled_out(model, np.random.default_rng(2), num_steps=2, per_step=1000, share_of_last=1.0)
    assert worst_error(model) > 0.4


@pytest.mark.parametrize("share_of_last", [0.3, 0.6, 0.9])
def test_running_requests_correct_the_first_step(share_of_last):
    """Only short rollouts have ended; those that run are known to be longer."""
    errors = {}
    for with_running in (False, True):
        model = LengthModel()
        rolled_out(
            model, np.random.default_rng(3), num_steps=1, per_step=320, share_of_last=share_of_last,
            with_running=with_running,
        )  # fmt: skip
        reached = np.quantile(TRUTH, share_of_last)  # beyond, nobody can know
        at = np.quantile(TRUTH, np.linspace(0.1, share_of_last, 5)).round()
        errors[with_running] = np.abs(share_longer(model, at) - true_share_longer(at)).max()
        if with_running:
            late = model.forecast(np.array([99], np.uint64), np.array([int(reached)]))
            assert late.expected_remaining_tokens()[0] > 100
    assert errors[True] < 0.05
    assert errors[False] > errors[True] + 0.05


def test_slots_that_are_refilled_at_once_are_unbiased():
    """80 slots; each gets the next request when its own ends. Ends come in another order than starts."""
    rng, model = np.random.default_rng(4), LengthModel(window_rollouts=1000)
    lengths = lognormal(rng, 6000)
    slots = [(int(length), int(length)) for length in lengths[:80]]
    heapq.heapify(slots)
    errors, ended = [], []
    for length in lengths[80:].tolist():
        ended.append(heapq.heapreplace(slots, (slots[0][0] + length, length))[1])
        if len(ended) % 100 == 0:
            told(model, ended[-100:])
            errors.append(worst_error(model))
    assert len(errors) > 50
    assert np.mean(errors[10:]) < 0.03


def test_thresholds_follow_lengths_that_shift():
    """From 400 tokens down to 220 in 300 steps of 32 rollouts, then up to 350."""
    rng = np.random.default_rng(5)
    classes, errors = LengthClasses(LengthModel(window_rollouts=640)), []
    for median in np.concatenate([np.geomspace(400, 220, 300), np.geomspace(220, 350, 300)]):
        told(classes, np.sort(lognormal(rng, 32, median=median)))
        medium, long = classes.thresholds()
        errors.append((medium / median - 1, long / (median * np.exp(0.6 * 0.8416)) - 1))
    settled = np.abs(errors[40:])
    assert settled.mean(axis=0).max() < 0.05
    assert settled.max() < 0.25


def test_a_sudden_shift_is_forgotten_with_the_window():
    rng, model = np.random.default_rng(6), LengthModel(window_rollouts=640)
    told(model, lognormal(rng, 2000))
    told(model, lognormal(rng, 640, median=200))
    assert model.quantile(0.5) == pytest.approx(200, rel=0.1)
    assert LengthModel().quantile(0.5) > 400


# ---------------------------------------------------------------- a real log


@pytest.fixture(scope="module")
def amc():
    """Prompt keys and lengths of the example log's two training steps, shortest first, in groups of 8 samples."""
    samples = collections.defaultdict(list)
    for record in read_log(AMC):
        rollout = record.rollout
        samples[rollout.training_step, rollout.key].append(len(rollout.response_token_ids))
    steps = []
    for step, part in [(400, 0), (400, 4), (800, 0), (800, 4)]:
        pairs = [(n, key) for (of, key), lengths in samples.items() if of == step for n in lengths[part : part + 4]]
        lengths, keys = zip(*sorted(pairs), strict=True)
        steps.append((np.array(keys, np.uint64), np.array(lengths)))
    return steps


def test_amc_lengths_lie_where_forecast(amc):
    """Learn half of step 400, forecast the other half: as many lie within its quantiles as these say."""
    (keys, lengths), (new_keys, new_lengths) = amc[:2]
    model = LengthModel()
    told(model, lengths, keys)
    for so_far in (0, 300, 600):
        running = new_lengths > so_far
        forecast = model.forecast(new_keys[running], np.full(running.sum(), so_far))
        for probability in (0.25, 0.5, 0.75):
            within = (new_lengths[running] <= forecast.quantile(probability)).mean()
            assert within == pytest.approx(probability, abs=0.15)
        remaining = new_lengths[running] - so_far
        assert forecast.expected_remaining_tokens().mean() == pytest.approx(remaining.mean(), rel=0.3)


def test_amc_prompts_own_lengths_tell_more_than_those_of_all(amc):
    """Even four rollouts each, which count as a fifth of the forecast."""
    (keys, lengths), (new_keys, new_lengths) = amc[:2]
    errors = {}
    for shrinkage in (16.0, 1e9):
        model = LengthModel(shrinkage_rollouts=shrinkage)
        told(model, lengths, keys)
        forecast = model.forecast(new_keys, np.zeros(len(new_keys), np.int64))
        errors[shrinkage] = np.abs(forecast.quantile(0.5) - new_lengths).mean()
    assert errors[16.0] < 0.97 * errors[1e9]


def test_amc_thresholds_follow_the_second_checkpoint(amc):
    """Its median is lower by 13 %, its 0.8 quantile by 23 %."""
    classes, thresholds = LengthClasses(LengthModel(window_rollouts=320)), []
    for keys, lengths in amc:
        told(classes, lengths, keys)
        thresholds.append(classes.thresholds())
    for before, after, share in zip(thresholds[1], thresholds[3], (0.5, 0.8), strict=True):
        expected = [np.quantile(np.concatenate([amc[i][1], amc[i + 1][1]]), share) for i in (0, 2)]
        assert before == pytest.approx(expected[0], rel=0.06)
        assert after == pytest.approx(expected[1], rel=0.06)
        assert after < 0.95 * before
