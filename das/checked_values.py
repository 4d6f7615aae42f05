"""Checks of settings and of what a state holds: numbers, arrays of numbers, and the mapping they come in.

Python's own errors do not fit there: they name no argument, and an int beyond a float raises OverflowError.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

_Floats = npt.NDArray[np.float64]


def check_int(value: Any, name: str, *, below: int) -> None:
    """Raise TypeError or ValueError unless `value` is an int (bool excluded) with 0 <= value < below."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} must be an int, not {type(value).__name__}")
    if not 0 <= value < below:
        raise ValueError(f"{name} is {value}; it must be 0 <= {name} < 2**{below.bit_length() - 1}")


def check_state(state: Any, name: str = "state") -> None:
    """Raise TypeError unless `state` is a mapping, as `state()` returns it."""
    if not isinstance(state, Mapping):
        raise TypeError(f"{name} must be a mapping, not {type(state).__name__}")


def checked_number(value: Any, name: str) -> float:
    """Return a number, numpy's or Python's, as a float; an int beyond a float becomes an infinity.

    Raises:
        TypeError: no number; a bool is none.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TypeError(f"{name} must be a number, not {type(value).__name__}")
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def checked_numbers(values: Any, name: str, *, shape: tuple[int | None, ...]) -> _Floats:
    """Return numbers as a new float64 array; ints beyond a float become infinities.

    Args:
        values: an array, or nested sequences.
        shape: that it must have; None: any length.

    Raises:
        TypeError: something in it is no number, or a bool or a complex one. ValueError: another shape.

    Complexity: O(numbers), in Python for arrays of objects only.
    """
    try:
        array = np.asarray(values)
    except ValueError:  # rows of different lengths
        raise ValueError(f"{name} has rows of different lengths; its shape must be {_shown(shape)}") from None
    if array.dtype.kind not in "iufO":
        raise TypeError(f"{name} must hold numbers, not {array.dtype}")
    if array.dtype.kind == "O":
        numbers = [checked_number(value, f"{name}, an entry," if array.ndim else name) for value in array.flat]
        array = np.array(numbers, np.float64).reshape(array.shape)
    if array.ndim != len(shape) or any(
        asked not in (None, found) for asked, found in zip(shape, array.shape, strict=True)
    ):
        raise ValueError(f"{name} has shape {array.shape}; it must be {_shown(shape)}")
    with np.errstate(over="ignore"):  # of a longer float
        return np.array(array, np.float64)


def _shown(shape: tuple[int | None, ...]) -> str:
    return str(tuple("any" if length is None else length for length in shape)).replace("'", "")
