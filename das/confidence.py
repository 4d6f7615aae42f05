"""How likely a draft token is to be accepted, learned online from verification feedback."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

from das._draft import CELL_MEMORY, CELLS_SHAPE, HISTOGRAM_SHAPE
from das.reliability import Reliability, reliability_of

Cells = npt.NDArray[np.float64]
_MAX_COUNT = 2.0**62  # sums of such stay finite


class Confidence:
    """Hit rates of past predictions, by source and by bin of the blended probability's logit.

    A prediction with blended probability P in a cell of `hits` and `misses` is taken to be accepted with probability
    (hits + 4 P) / (hits + misses + 4): without evidence the blend is believed, so the first step needs no warm-up.
    Only predictions whose context was verified teach a cell. Each one first multiplies the hits and misses of its cell
    by 1 - 1 / 2000, so a cell remembers about its last 2,000 predictions, and the sum of its counts stays below
    that: what was learned of a policy that was replaced fades as fast as the new one teaches. Cells that are not
    used keep what they know. The batch kernel updates the arrays in place.

    Attributes:
        hits, misses: float64, (4, 24). Rows, by who ever continued the last token so: running text, history, both,
            other prompts only. Columns: the logit of P on [-4, 4], from unlikely to likely; the outer ones hold what
            lies beyond.
        histogram: float64, (1024, 3), of the calibrated probabilities on [0, 1] of all predictions that taught a cell
            since `reset_reliability`: how many, how many came true, the sum of the probabilities. It forgets nothing,
            is no part of `state`, and drafting does not read it.

    Complexity: 26 kB, whatever the history.
    """

    __slots__ = ("histogram", "hits", "misses")

    def __init__(self) -> None:
        self.hits: Cells = np.zeros(CELLS_SHAPE)
        self.misses: Cells = np.zeros(CELLS_SHAPE)
        self.histogram: npt.NDArray[np.float64] = np.zeros(HISTOGRAM_SHAPE)

    def state(self) -> dict[str, Cells]:
        """Return a copy of what was learned, as plain arrays: "hits" and "misses"."""
        return {"hits": self.hits.copy(), "misses": self.misses.copy()}

    def load_state(self, state: Mapping[str, npt.ArrayLike]) -> None:
        """Replace what was learned by `state`.

        Raises:
            KeyError: an array is missing. ValueError: wrong shape, or a count that is not 0 <= count < 2**62.
            Nothing changes then.
        """
        hits, misses = _checked(state)
        self.hits[:] = hits
        self.misses[:] = misses

    def merge(self, states: Iterable[Mapping[str, npt.ArrayLike]]) -> None:
        """Replace what was learned by what several workers learned: their own `state`s, in any order.

        Counts of the same cell are added. Where the sum is more than a cell remembers (2,000 predictions), hits and
        misses are scaled down to that, so what comes next teaches the merged cell as fast as any other. Full cells
        thus become the mean of the workers' rates. Predictions that several states hold in common, as after all
        started from one merged state, are counted once for each; in a full cell that makes no difference.

        Args:
            states: at least one. What this object learned is replaced as well: to keep it, give its `state()`, too.

        Raises:
            ValueError: no states. KeyError, ValueError: as `load_state`, naming the position. Nothing changes then.

        Complexity: O(states). Sums are made in order of size, so the order of the states changes no bit.
        """
        checked = []
        for position, state in enumerate(states):
            try:
                checked.append(_checked(state))
            except (KeyError, ValueError) as error:
                raise type(error)(f"states[{position}]: {error.args[0]}") from None
        if not checked:
            raise ValueError("states is empty; it must hold at least one state")
        hits, misses = np.sort(np.stack(checked), axis=0).sum(axis=0)
        scale = CELL_MEMORY / np.maximum(hits + misses, CELL_MEMORY)
        self.hits[:] = scale * hits
        self.misses[:] = scale * misses

    def reset(self) -> None:
        """Forget everything that was learned; the histogram stays."""
        self.hits[:] = 0.0
        self.misses[:] = 0.0

    def reliability(self, *, num_bins: int = 15) -> Reliability:
        """Return how the probabilities used in drafting compare with what came true, since `reset_reliability`.

        Args:
            num_bins: of the diagram, each with as many predictions; >= 1.

        Raises:
            ValueError: fewer than one bin.

        Complexity: O(1). See `das.reliability`.
        """
        return reliability_of(self.histogram, num_bins=num_bins)

    def reset_reliability(self) -> None:
        """Begin a new histogram; what was learned stays."""
        self.histogram[:] = 0.0


def _checked(state: Mapping[str, npt.ArrayLike]) -> tuple[Cells, Cells]:
    return _cells(state["hits"], "hits"), _cells(state["misses"], "misses")


def _cells(array: npt.ArrayLike, name: str) -> Cells:
    cells = np.asarray(array, dtype=np.float64)
    if cells.shape != CELLS_SHAPE:
        raise ValueError(f"{name} has shape {cells.shape}; it must be {CELLS_SHAPE}")
    if not ((cells >= 0).all() and (cells < _MAX_COUNT).all()):
        raise ValueError(f"{name} holds a count that is not 0 <= count < 2**62")
    return cells
