"""The reliability diagram: by hand, and against the definition over single predictions."""

import json
from dataclasses import astuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from das.reliability import reliability_of


def histogram(predictions, num_rows=1024):
    """What the kernel counts for [(probability, came true)]."""
    figures = np.zeros((num_rows, 3))
    for probability, came_true in predictions:
        figures[min(int(probability * num_rows), num_rows - 1)] += 1, came_true, probability
    return figures


def test_by_hand():
    """Three of .2 of which one came true, three of .8 of which two did."""
    measured = reliability_of(
        histogram([(0.2, i == 0) for i in range(3)] + [(0.8, i > 0) for i in range(3)]), num_bins=2
    )
    assert [astuple(bar) for bar in measured.bins] == [
        pytest.approx((3, 0.2, 1 / 3)),
        pytest.approx((3, 0.8, 2 / 3)),
    ]
    assert measured.num_predictions == 6
    assert measured.expected_calibration_error == pytest.approx(1 / 3 - 0.2)
    assert measured.brier_score == pytest.approx((2 * 0.2**2 + 0.8**2) / 3)
    assert (measured.base_rate, measured.base_rate_brier_score) == (0.5, 0.25)
    assert measured.base_rate_expected_calibration_error == 0


def test_nothing_was_predicted():
    measured = reliability_of(np.zeros((1024, 3)))
    assert (measured.num_predictions, measured.bins, measured.expected_calibration_error) == (0, (), 0.0)
    assert json.loads(json.dumps(measured.as_dict()))["bins"] == []


def test_always_the_base_rate_is_calibrated_and_of_no_use():
    measured = reliability_of(histogram([(0.25, i % 4 == 0) for i in range(400)]))
    assert measured.expected_calibration_error == pytest.approx(0)
    assert measured.brier_score == pytest.approx(measured.base_rate_brier_score)
    assert len(measured.bins) == 15


def test_a_single_bin_cannot_see_errors_that_cancel():
    predictions = [(0.1, True), (0.9, False)] * 50
    assert reliability_of(histogram(predictions), num_bins=1).expected_calibration_error == pytest.approx(0)
    assert reliability_of(histogram(predictions), num_bins=2).expected_calibration_error == pytest.approx(0.9)


@pytest.mark.parametrize("num_bins", [0, -1])
def test_at_least_one_bin(num_bins):
    with pytest.raises(ValueError, match=f"num_bins is {num_bins}; it must be at least 1"):
        reliability_of(np.zeros((1024, 3)), num_bins=num_bins)


@given(st.lists(st.tuples(st.integers(0, 1023), st.booleans()), min_size=1, max_size=40), st.integers(1, 8))
def test_the_definition_over_single_predictions(drawn, num_bins):
    """Every prediction counted num_bins times, so that bins come out even; of one row, all count as its mean."""
    rows = {row: [hit for other, hit in drawn if other == row] for row, _ in drawn}
    singles = [((row + 0.5) / 1024, np.mean(rows[row])) for row, _ in sorted(drawn) for _ in range(num_bins)]
    predicted, observed = np.array(singles).reshape(num_bins, -1, 2).mean(axis=1).T
    measured = reliability_of(histogram([((row + 0.5) / 1024, hit) for row, hit in drawn]), num_bins=num_bins)
    assert [bar.predicted for bar in measured.bins] == pytest.approx(predicted)
    assert [bar.observed for bar in measured.bins] == pytest.approx(observed)
    assert measured.expected_calibration_error == pytest.approx(np.mean(abs(predicted - observed)))
    assert measured.brier_score == pytest.approx(np.mean([((row + 0.5) / 1024 - hit) ** 2 for row, hit in drawn]))
