"""How likely a draft token is to be accepted, learned online from verification feedback."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from das._draft import CELLS_SHAPE


class Confidence:
    """Hit rates of past predictions, by source and by bin of the blended probability's logit.

    The sources: who ever continued the last token so. Rows: running text, history, both, other prompts only.

    A prediction with blended probability P in a cell of `hits` and `misses` is taken to be accepted with probability
    (hits + 4 P) / (hits + misses + 4): without evidence the blend is believed. Only predictions whose context was
    verified teach a cell. The batch kernel updates the arrays in place.

    Complexity: 192 numbers, whatever the history.
    """

    __slots__ = ("hits", "misses")

    def __init__(self) -> None:
        self.hits: npt.NDArray[np.float64] = np.zeros(CELLS_SHAPE)
        self.misses: npt.NDArray[np.float64] = np.zeros(CELLS_SHAPE)

    def state(self) -> dict[str, npt.NDArray[np.float64]]:
        """Return a copy of what was learned, as plain arrays."""
        return {"hits": self.hits.copy(), "misses": self.misses.copy()}

    def load_state(self, state: dict[str, npt.NDArray[np.float64]]) -> None:
        """Replace what was learned by `state`.

        Raises:
            KeyError: an array is missing. ValueError: wrong shape, or a count that is negative or not finite.
            Nothing changes then.
        """
        checked = {name: _cells(state[name], name) for name in ("hits", "misses")}
        self.hits[:] = checked["hits"]
        self.misses[:] = checked["misses"]

    def reset(self) -> None:
        """Forget everything."""
        self.hits[:] = 0.0
        self.misses[:] = 0.0


def _cells(array: npt.NDArray[np.float64], name: str) -> npt.NDArray[np.float64]:
    cells = np.asarray(array, dtype=np.float64)
    if cells.shape != CELLS_SHAPE:
        raise ValueError(f"{name} has shape {cells.shape}; it must be {CELLS_SHAPE}")
    if not (np.isfinite(cells).all() and (cells >= 0).all()):
        raise ValueError(f"{name} holds a negative or non-finite count")
    return cells
