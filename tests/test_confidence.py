"""Confidence: what is learned can be taken out, put back, merged and forgotten; a bad state changes nothing."""

import copy

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout_samples import PROMPT, draft, filled, rollout, scored

from das import Confidence, Drafter

SHAPE, MEMORY, HISTORY_MEMORY = (4, 24), 2000, 256


def cells(hits, misses, explained=(0.0, 0.0)):
    """A state whose cells all hold the same."""
    return {"hits": np.full(SHAPE, hits), "misses": np.full(SHAPE, misses), "explained": np.array(explained)}


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
    return all(np.array_equal(one.state()[name], other.state()[name]) for name in ("hits", "misses", "explained"))


def test_a_new_one_knows_nothing():
    confidence = Confidence()
    assert (confidence.hits.shape, confidence.misses.shape) == (SHAPE, SHAPE)
    assert confidence.hits.sum() == confidence.misses.sum() == confidence.explained.sum() == 0


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


@pytest.mark.parametrize("copy_of", [copy.copy, copy.deepcopy])
def test_a_copy_learns_for_itself(copy_of):
    confidence = learned()
    copied = copy_of(confidence)
    assert same(copied, confidence)
    assert np.array_equal(copied.histogram, confidence.histogram)
    copied.reset()
    copied.reset_reliability()
    assert same(confidence, learned())
    assert np.array_equal(confidence.histogram, learned().histogram)


BAD_STATES = pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"hits": np.ones((24, 3))}, ValueError, r"hits has shape \(24, 3\); it must be \(4, 24\)"),
        ({"misses": np.ones(96)}, ValueError, r"misses has shape \(96,\); it must be \(4, 24\)"),
        ({"misses": 1.0}, ValueError, r"misses has shape \(\); it must be \(4, 24\)"),
        ({"misses": -np.ones(SHAPE)}, ValueError, "misses holds a count that is not 0 <= count < 2"),
        ({"hits": np.full(SHAPE, np.nan)}, ValueError, "hits holds a count that is not 0 <= count < 2"),
        ({"misses": np.full(SHAPE, np.inf)}, ValueError, "misses holds a count that is not 0 <= count < 2"),
        ({"explained": np.ones(3)}, ValueError, r"explained has shape \(3,\); it must be \(2,\)"),
        ({"explained": [1.0, -1.0]}, ValueError, "explained holds a count that is not 0 <= count < 2"),
        ({"explained": None}, KeyError, "explained"),
        ({"misses": None}, KeyError, "misses"),
        ({"hits": None}, KeyError, "hits"),
        ({"hits": np.full(SHAPE, 2.0**62)}, ValueError, "hits holds a count that is not 0 <= count < 2"),
    ],
)


@BAD_STATES
def test_a_bad_state_changes_nothing(changes, error, message):
    confidence = learned()
    state = {**cells(1.0, 1.0), **changes}
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
    confidence.load_state(cells(0.0, 100.0))
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
    assert scored(confidence) == (4, 0)


# ---------------------------------------------------------------- forgetting


def test_a_full_cell_forgets_as_much_as_it_learns():
    confidence = Confidence()
    confidence.load_state(cells(1500.0, 500.0))
    drafter = Drafter(filled(rollout([4, 5, 6], 0)), confidence=confidence)
    drafter.start("a", prompt_token_ids=PROMPT, training_step=1)
    draft(drafter, "a", 0)
    drafter.extend("a", [9])
    (row, column) = np.argwhere(confidence.hits != 1500.0)[0]
    assert confidence.hits[row, column] == pytest.approx(1500 - 1500 / MEMORY, abs=1e-9)
    assert confidence.misses[row, column] == pytest.approx(500 - 500 / MEMORY + 1, abs=1e-9)
    assert (confidence.hits != 1500.0).sum() == (confidence.misses != 500.0).sum() == 1, "the other cells keep theirs"


def test_a_cell_that_was_always_right_is_believed_less_after_two_thousand_misses():
    """What it knew is forgotten as fast as the new is learned: e to the power of -1 of it is left, whatever it was."""
    rates = []
    for loaded in (MEMORY, 1e9):
        confidence = Confidence()
        confidence.load_state(cells(loaded, 0.0))
        drafter = Drafter(filled(rollout([4, 5, 6], 0), max_common_tokens=0), confidence=confidence)
        for number in range(MEMORY):
            drafter.start(f"{number}", prompt_token_ids=PROMPT, training_step=1)
            draft(drafter, f"{number}", 0)
            drafter.extend(f"{number}", [9])
            drafter.finish(f"{number}", keep=False)
        learned = np.argmax(confidence.misses)
        hits, misses = confidence.hits.flat[learned], confidence.misses.flat[learned]
        assert misses == pytest.approx(MEMORY * (1 - np.exp(-1)), rel=1e-3)
        rates.append(hits / (hits + misses))
    assert rates[0] == pytest.approx(np.exp(-1), rel=1e-3)
    assert rates[1] > 0.99, "more than a cell remembers was loaded: it takes longer"


# ---------------------------------------------------------------- what several workers learned

counts = st.lists(st.sampled_from([0.0, 0.1, 1.0, 7.0, 1999.0, 2000.0, 1e9]), min_size=2, max_size=2)


@st.composite
def states(draw):
    """A state with a few kinds of cells."""
    hits, misses = np.resize(draw(st.lists(counts, min_size=1, max_size=5)), (96, 2)).T
    return {"hits": hits.reshape(SHAPE), "misses": misses.reshape(SHAPE), "explained": np.array(draw(counts))}


def merged(some):
    confidence = Confidence()
    confidence.merge(some)
    return confidence


def test_the_merge_of_one_is_that_one():
    confidence = learned()
    assert same(merged([confidence.state()]), confidence)


@given(st.lists(states(), min_size=1, max_size=4), st.randoms())
def test_laws_of_merging(some, order):
    confidence = merged(some)
    hits, misses = (np.sum([state[name] for state in some], axis=0) for name in ("hits", "misses"))
    total, kept = hits + misses, confidence.hits + confidence.misses
    explained = np.sum([state["explained"] for state in some], axis=0)
    np.testing.assert_allclose(confidence.explained.sum(), min(explained.sum(), HISTORY_MEMORY))
    np.testing.assert_allclose(confidence.explained * explained.sum(), explained * confidence.explained.sum())
    np.testing.assert_allclose(kept, np.minimum(total, MEMORY))
    np.testing.assert_allclose(confidence.hits * total, hits * kept)  # the rate is that of all workers together
    order.shuffle(some)
    assert same(merged(iter(some)), confidence), "the order changes no bit"
    is_full = kept.max() > MEMORY - 1e-6 or confidence.explained.sum() > HISTORY_MEMORY - 1e-6
    assert same(merged([confidence.state()]), confidence) or is_full
    full = {name: np.where(kept < MEMORY - 1e-6, 0.0, getattr(confidence, name)) for name in ("hits", "misses")}
    full["explained"] = confidence.explained
    again = merged([full] * 3)
    np.testing.assert_allclose(again.hits, full["hits"])  # workers that start from one full state end with it
    np.testing.assert_allclose(again.misses, full["misses"])


def test_merging_replaces_what_was_learned_and_only_that():
    confidence = learned()
    histogram = confidence.histogram.copy()
    confidence.merge([cells(3.0, 1.0, explained=(5.0, 7.0))] * 2)
    assert confidence.hits.min() == confidence.hits.max() == 6.0
    assert confidence.misses.min() == confidence.misses.max() == 2.0
    assert confidence.explained.tolist() == [10.0, 14.0]
    assert np.array_equal(confidence.histogram, histogram)


@BAD_STATES
def test_a_bad_state_among_others_changes_nothing(changes, error, message):
    confidence = learned()
    state = {**cells(1.0, 1.0), **changes}
    state = {name: array for name, array in state.items() if array is not None}
    with pytest.raises(error, match=rf"states\[1\]: {message}"):
        confidence.merge([learned().state(), state])
    with pytest.raises(ValueError, match="states is empty; it must hold at least one state"):
        confidence.merge([])
    assert same(confidence, learned())


# ---------------------------------------------------------------- reliability


def test_probabilities_and_outcomes_are_counted():
    """LOOP of the history is drafted; the survivals tell the probabilities that were predicted."""
    confidence = Confidence()
    drafter = Drafter(filled(rollout([4, 5, 6, 7], 0)), confidence=confidence)
    drafter.start("a", prompt_token_ids=PROMPT, training_step=1)
    first, second, third = draft(drafter, "a", 3).survival
    drafter.extend("a", [4, 5, 9])
    rates = [first, second / first, third / second]  # the last one is the miss
    expected = np.zeros((1024, 3))
    for rate, was_hit in zip(rates, (True, True, False), strict=True):
        expected[int(np.float32(rate) * 1024)] += 1, was_hit, rate
    np.testing.assert_allclose(confidence.histogram, expected, atol=1e-6)
    measured = confidence.reliability(num_bins=3)
    assert (measured.num_predictions, measured.base_rate) == (3, pytest.approx(2 / 3))
    assert sorted(bar.predicted for bar in measured.bins) == pytest.approx(sorted(rates), abs=1e-6)


def test_the_histogram_is_reset_apart_from_what_is_learned():
    confidence = learned()
    state, num_scored = confidence.state(), sum(scored(confidence))
    assert num_scored > 0
    assert state.keys() == {"hits", "misses", "explained"}
    confidence.reset_reliability()
    assert confidence.histogram.sum() == 0
    assert confidence.reliability().num_predictions == 0
    assert same(confidence, learned())
    confidence = learned()
    confidence.reset()
    confidence.load_state(state)
    assert sum(scored(confidence)) == num_scored


@pytest.mark.parametrize("wrong", [np.nan, -5.0, np.inf, -np.inf, 1e308])
def test_cells_filled_with_nonsense_stay_inside_the_histogram(wrong):
    """The arrays are plain: whatever somebody writes into them, no prediction is counted outside."""
    confidence = Confidence()
    drafter = Drafter(filled(rollout([4, 5, 6, 7], 0)), confidence=confidence)
    confidence.hits[:] = wrong
    drafter.start("a", prompt_token_ids=PROMPT, training_step=1)
    draft(drafter, "a", 3)
    drafter.extend("a", [4, 9])
    assert 1 <= confidence.histogram[:, 0].sum() <= 2
