"""How likely a draft token is to be accepted, learned online from verification feedback."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

from das._draft import CELL_MEMORY, CELLS_SHAPE, HISTOGRAM_SHAPE, HISTORY_MEMORY
from das.checked_values import check_state, checked_numbers
from das.reliability import Reliability, reliability_of
from das.worker_states import checked_states

Cells = npt.NDArray[np.float64]
_SHAPES: dict[str, tuple[int, ...]] = {"hits": CELLS_SHAPE, "misses": CELLS_SHAPE, "explained": (2,)}
_MAX_COUNT = 2.0**62  # sums of such stay finite


class Confidence:
    """Hit rates of past predictions, by source and by bin of the blended probability's logit.

    A prediction with blended probability P in a cell of `hits` and `misses` is taken to be accepted with probability
    (hits + 4 P) / (hits + misses + 4): without evidence the blend is believed, so the first step needs no warm-up.
    Only predictions whose context was verified teach a cell. Each one first multiplies the hits and misses of its cell
    by 1 - 1 / 2000, so a cell remembers about its last 2,000 predictions, and the sum of its counts stays below
    that: what was learned of a policy that was replaced fades as fast as the new one teaches. Cells that are not
    used keep what they know. The batch kernel updates the arrays in place.

    Beside that it counts whether prompts' histories explain what is emitted at all. Of real rollouts they explain half
    and more; where it is less than one in 16, the policy was replaced, and prompts are treated as if they had none.

    Attributes:
        hits, misses: float64, (4, 24). Rows, by who ever continued the last token so: running text, history, both,
            other prompts only. Columns: the logit of P on [-4, 4], from unlikely to likely; the outer ones hold what
            lies beyond.
        explained: float64, (2,), of the latest 256 or so scored predictions for requests whose prompt has a history:
            how many came true and were known to the history, and how many not. A trust of 8 predictions is added.
        histogram: float64, (1024, 3), of the calibrated probabilities on [0, 1] of all predictions that taught a cell
            since `reset_reliability`: how many, how many came true, the sum of the probabilities. It forgets nothing,
            is no part of `state`, and drafting does not read it.

    Complexity: 26 kB, whatever the history.
    """

    __slots__ = ("explained", "histogram", "hits", "misses")

    def __init__(self) -> None:
        self.hits: Cells = np.zeros(CELLS_SHAPE)
        self.misses: Cells = np.zeros(CELLS_SHAPE)
        self.explained: Cells = np.zeros(2)
        self.histogram: npt.NDArray[np.float64] = np.zeros(HISTOGRAM_SHAPE)

    def __copy__(self) -> Confidence:
        """Return a confidence that learns for itself from here on; a drafter writes into the arrays of its own."""
        copied = type(self)()
        copied._set(self.state())
        copied.histogram[:] = self.histogram
        return copied

    def state(self) -> dict[str, Cells]:
        """Return a copy of what was learned, as plain arrays: "hits", "misses" and "explained"."""
        return {name: getattr(self, name).copy() for name in _SHAPES}

    def load_state(self, state: Mapping[str, npt.ArrayLike]) -> None:
        """Replace what was learned by `state`.

        Raises:
            KeyError: an array is missing. TypeError: no mapping, or an array of something else than numbers.
            ValueError: wrong shape, or a count that is not 0 <= count < 2**62. Nothing changes then.
        """
        check_state(state)
        self._set(_checked(state))

    def merge(self, states: Iterable[Mapping[str, npt.ArrayLike]]) -> None:
        """Replace what was learned by what several workers learned: their own `state`s, in any order.

        Counts of the same cell are added. Where the sum is more than a cell remembers (2,000 predictions; what was
        explained: 256), hits and misses are scaled down to that, so what comes next teaches the merged cell as fast as
        any other. Full cells thus become the mean of the workers' rates. Predictions that several states hold in
        common, as after all started from one merged state, are counted once for each; in a full cell that makes no
        difference.

        Args:
            states: at least one. What this object learned is replaced as well: to keep it, give its `state()`, too.

        Raises:
            TypeError, ValueError: no states. KeyError, TypeError, ValueError: as `load_state`, naming the position.
            Nothing changes then.

        Complexity: O(states). Sums are made in order of size, so the order of the states changes no bit.
        """
        checked = checked_states(states, _checked)
        sums = {name: np.sort(np.stack([state[name] for state in checked]), axis=0).sum(axis=0) for name in _SHAPES}
        scale = CELL_MEMORY / np.maximum(sums["hits"] + sums["misses"], CELL_MEMORY)
        explained = sums["explained"] * (HISTORY_MEMORY / max(sums["explained"].sum(), HISTORY_MEMORY))
        self._set({"hits": scale * sums["hits"], "misses": scale * sums["misses"], "explained": explained})

    def reset(self) -> None:
        """Forget everything that was learned; the histogram stays."""
        self._set({name: np.zeros(shape) for name, shape in _SHAPES.items()})

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

    def _set(self, state: Mapping[str, Cells]) -> None:
        """In place: the batch kernel holds on to the arrays."""
        for name in _SHAPES:
            getattr(self, name)[:] = state[name]


def _checked(state: Mapping[str, npt.ArrayLike]) -> dict[str, Cells]:
    return {name: _counts(state[name], name) for name in _SHAPES}


def _counts(array: npt.ArrayLike, name: str) -> Cells:
    cells = checked_numbers(array, name, shape=_SHAPES[name])
    if not ((cells >= 0).all() and (cells < _MAX_COUNT).all()):
        raise ValueError(f"{name} holds a count that is not 0 <= count < 2**62")
    return cells
