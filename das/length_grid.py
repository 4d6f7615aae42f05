"""The bins in which lengths are counted, and what can be read off counts: a share between edges, a mean, a quantile.

There are 76 bins, four an octave, with whole edges: 0, 1, ... 8, 10, 12, 14, 16, 20, ... 2**20. Usual limits of a
response (512, 1,536, 2,048, 8,192) are edges, so that lengths piled up at a limit stay below it. Inside a bin all
lengths count as equally likely.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
Positions = npt.NDArray[np.intp]  # of bins, of rows

LENGTH_EDGES = np.array(
    [0, 1, 2, 3, *((4 + quarter) << octave for octave in range(18) for quarter in range(4)), 1 << 20], np.int64
)
"""Bin b holds the lengths with LENGTH_EDGES[b] < length <= LENGTH_EDGES[b + 1]; the last one also all longer ones."""
LENGTH_EDGES.flags.writeable = False

NUM_BINS = len(LENGTH_EDGES) - 1
EDGES = LENGTH_EDGES.astype(np.float64)
WIDTHS = np.diff(EDGES)
MIDDLES = (EDGES[:-1] + EDGES[1:]) / 2  # of the bins
_LATEST = int(LENGTH_EDGES[-2])


def bins_of_lengths(num_tokens: IntArray) -> Positions:
    """Return the bin of each final length; 0 counts as 1."""
    return np.minimum(np.maximum(np.searchsorted(LENGTH_EDGES, num_tokens) - 1, 0), NUM_BINS - 1)


def within_grid(num_response_tokens: npt.NDArray[Any]) -> IntArray:
    """Return where running requests are: those below 0 at 0, those beyond the grid where its last bin starts."""
    within: IntArray = np.minimum(np.maximum(num_response_tokens, 0), _LATEST).astype(np.int64)
    return within


def bins_reached(num_tokens: npt.NDArray[Any]) -> Positions:
    """Return the bin in which requests of so many tokens, >= 0, are."""
    return np.minimum(np.searchsorted(LENGTH_EDGES, num_tokens, side="right") - 1, NUM_BINS - 1)


def longer_than(num_tokens: npt.NDArray[Any], above: npt.NDArray[Any], rows: Positions) -> FloatArray:
    """Return how many rollouts are longer than so many tokens.

    Args:
        num_tokens: >= 0; any shape.
        above: rollouts longer than each of LENGTH_EDGES, [rows, edges].
        rows: which of them to look at; of a shape that goes with `num_tokens`.

    Never raises for finite numbers. O(numbers).
    """
    bins = bins_reached(num_tokens)
    return between(above[rows, bins], above[rows, bins + 1], bins, num_tokens)


def between(before: FloatArray, after: FloatArray, bins: Positions, at: npt.NDArray[Any]) -> FloatArray:
    """Return the value at `at`, from those at the edges of the bins that this is in."""
    share = np.minimum((at - EDGES[bins]) / WIDTHS[bins], 1.0)
    value: FloatArray = before + np.subtract(after, before, dtype=np.float64) * share
    return value


def length_exceeded_by(num_rollouts: FloatArray, above: FloatArray) -> FloatArray:
    """Return for each row of rollouts above each edge the length that so many of them exceed."""
    bins = np.maximum(np.count_nonzero(above > num_rollouts[:, None], axis=1) - 1, 0)  # where all do: the start
    rows = np.arange(len(above))
    before, after = above[rows, bins], above[rows, bins + 1]
    tokens: FloatArray = EDGES[bins] + (before - num_rollouts) / (before - after) * WIDTHS[bins]
    return tokens
