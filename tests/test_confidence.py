"""Confidence: what is learned can be taken out, put back and forgotten; a bad state changes nothing."""

import numpy as np
import pytest
from rollout_samples import PROMPT, draft, filled, rollout

from das import Confidence, Drafter

SHAPE = (4, 24)


def learned():
    """A confidence that has seen a few steps."""
    confidence = Confidence()
    drafter = Drafter(filled(rollout([4, 5, 6, 4, 5, 7], 0)), confidence=confidence)
    drafter.start("a", prompt_token_ids=PROMPT, training_step=1)
    for emitted in ([4, 5, 6], [4, 5, 6], [4, 9]):
        draft(drafter, "a")
        drafter.extend("a", emitted)
    assert confidence.hits.sum() > 0
    assert confidence.misses.sum() > 0
    return confidence


def same(one, other):
    return np.array_equal(one.hits, other.hits) and np.array_equal(one.misses, other.misses)


def test_a_new_one_knows_nothing():
    confidence = Confidence()
    assert (confidence.hits.shape, confidence.misses.shape) == (SHAPE, SHAPE)
    assert confidence.hits.sum() == confidence.misses.sum() == 0


def test_state_round_trip():
    confidence, copy = learned(), Confidence()
    state = confidence.state()
    copy.load_state(state)
    assert same(copy, confidence)
    state["hits"][:] = 7.0  # a copy on both sides
    assert same(copy, confidence)
    assert confidence.hits.max() < 7.0
    copy.load_state({name: array.tolist() for name, array in confidence.state().items()})  # what JSON gives back
    assert same(copy, confidence)
    copy.load_state(Confidence().state())
    assert same(copy, Confidence())


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"hits": np.ones((24, 3))}, ValueError, r"hits has shape \(24, 3\); it must be \(4, 24\)"),
        ({"misses": np.ones(96)}, ValueError, r"misses has shape \(96,\); it must be \(4, 24\)"),
        ({"misses": 1.0}, ValueError, r"misses has shape \(\); it must be \(4, 24\)"),
        ({"misses": -np.ones(SHAPE)}, ValueError, "misses holds a negative or non-finite count"),
        ({"hits": np.full(SHAPE, np.nan)}, ValueError, "hits holds a negative or non-finite count"),
        ({"misses": np.full(SHAPE, np.inf)}, ValueError, "misses holds a negative or non-finite count"),
        ({"misses": None}, KeyError, "misses"),
        ({"hits": None}, KeyError, "hits"),
    ],
)
def test_a_bad_state_changes_nothing(changes, error, message):
    confidence = learned()
    state = {"hits": np.ones(SHAPE), "misses": np.ones(SHAPE), **changes}
    with pytest.raises(error, match=message):
        confidence.load_state({name: array for name, array in state.items() if array is not None})
    assert same(confidence, learned())


def test_a_loaded_or_reset_state_is_what_a_running_drafter_uses():
    confidence = learned()
    drafter = Drafter(filled(rollout([4], 0)), confidence=confidence)
    drafter.start("a", prompt_token_ids=PROMPT, training_step=1)
    confidence.reset()
    assert same(confidence, Confidence())
    fresh = draft(drafter, "a").survival
    confidence.load_state({"hits": np.zeros(SHAPE), "misses": np.full(SHAPE, 100.0)})
    assert draft(drafter, "a").survival[0] < fresh[0] / 10
    confidence.reset()
    assert draft(drafter, "a").survival == fresh


def test_two_drafters_may_share_what_is_learned():
    confidence = Confidence()
    for request_id in "ab":
        drafter = Drafter(filled(rollout([4, 5], 0)), confidence=confidence)
        drafter.start(request_id, prompt_token_ids=PROMPT, training_step=1)
        draft(drafter, request_id)
        drafter.extend(request_id, [4, 5])
    assert confidence.hits.sum() == 4
