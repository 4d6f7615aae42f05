"""Can the probabilities that drafting goes by be trusted? Predicted against observed, from a fine histogram.

Each prediction whose context was verified has a calibrated probability (that this token comes next, given that all
before it came) and an outcome. The batch kernel counts them in 1,024 bins of the probability; everything here is
computed from those counts. Measures: reliability diagram and expected calibration error with bins of equal counts
(Naeini et al. 2015; Nixon et al. 2019), Brier score (Brier 1950).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Figures = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ReliabilityBin:
    """One bar of a reliability diagram.

    Args:
        num_predictions: in it; a fraction where a border between bins cuts a bin of the fine histogram.
        predicted: mean of their probabilities, 0..1.
        observed: share of them that came true, 0..1.
    """

    num_predictions: float
    predicted: float
    observed: float


@dataclass(frozen=True, slots=True)
class Reliability:
    """What predicted probabilities were worth.

    The base rate is the measure of comparison: a predictor that says for every prediction the share that came true. It
    is perfectly calibrated and of no use, as it cannot tell one prediction from another; the Brier score sees that.

    Args:
        num_predictions: scored ones.
        bins: of equal counts, by probability, the least likely first; none where nothing was scored.
        expected_calibration_error: mean over predictions of |predicted - observed| of their bin, 0..1.
        brier_score: mean of (probability - outcome)^2, 0..1; exact to 1e-6.
        base_rate: share of all predictions that came true.
        base_rate_expected_calibration_error: of the predictor that says the base rate, known beforehand: 0, always.
        base_rate_brier_score: of the same, base_rate (1 - base_rate).
    """

    num_predictions: int
    bins: tuple[ReliabilityBin, ...]
    expected_calibration_error: float
    brier_score: float
    base_rate: float
    base_rate_expected_calibration_error: float
    base_rate_brier_score: float

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain values, for JSON."""
        return asdict(self) | {"bins": [asdict(bar) for bar in self.bins]}


def reliability_of(histogram: Figures, *, num_bins: int = 15) -> Reliability:
    """Return the reliability diagram of a histogram of predictions.

    Args:
        histogram: float64, one row a range of probabilities, the lowest first; columns: predictions, those that came
            true, sum of the probabilities. As `Confidence.histogram`, or the difference of two copies of it.
        num_bins: of the diagram, >= 1. A border inside a row cuts it in proportion.

    Raises:
        ValueError: fewer than one bin.

    Complexity: O(rows).
    """
    if num_bins < 1:
        raise ValueError(f"num_bins is {num_bins}; it must be at least 1")
    counts, hits, sums = histogram[histogram[:, 0] > 0].T
    total = float(counts.sum())
    if total == 0:
        return Reliability(0, (), 0.0, 0.0, 0.0, 0.0, 0.0)
    bins = _equal_counts(counts, hits, sums, num_bins)
    error = sum(bar.num_predictions * abs(bar.predicted - bar.observed) for bar in bins) / total
    rates = sums / counts
    base_rate = float(hits.sum()) / total
    return Reliability(
        num_predictions=round(total),
        bins=bins,
        expected_calibration_error=error,
        brier_score=float((rates * sums - 2 * rates * hits + hits).sum()) / total,
        base_rate=base_rate,
        base_rate_expected_calibration_error=0.0,
        base_rate_brier_score=base_rate * (1 - base_rate),
    )


def _equal_counts(counts: Figures, hits: Figures, sums: Figures, num_bins: int) -> tuple[ReliabilityBin, ...]:
    """Cut the predictions, in order of probability, into bins of equal counts."""
    ends = np.concatenate([[0.0], np.cumsum(counts)])
    borders = np.linspace(0.0, ends[-1], num_bins + 1)

    def inside(figures: Figures) -> Figures:
        return np.diff(np.interp(borders, ends, np.concatenate([[0.0], np.cumsum(figures)])))

    size = ends[-1] / num_bins
    return tuple(
        ReliabilityBin(float(size), float(predicted / size), float(observed / size))
        for predicted, observed in zip(inside(sums), inside(hits), strict=True)
    )
