"""Nested values, as policies' states are, as JSON can hold them: the arrays among them lie beside, under names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from das.checked_file import Array

_IN_ARRAY = "$array"  # the key of a dictionary that stands for an array


def packed(value: Any, name: str, arrays: dict[str, Array]) -> Any:
    """Return a value as JSON can hold it; arrays in it go to `arrays`, under names that tell where they were.

    Args:
        value: dictionaries with str keys, lists, numbers, str, None, and arrays of numbers of at most two dimensions.
        name: of the value, for errors and arrays.

    Raises:
        TypeError: something else is in it.
    """
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf" and value.dtype.itemsize <= 8 and value.ndim <= 2:
        arrays[name] = value.copy()
        return {_IN_ARRAY: name}
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return value.item()
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str) or key == _IN_ARRAY:
                raise TypeError(f"{name} has the key {key!r}; it must be a str, and not {_IN_ARRAY!r}")
        return {key: packed(item, f"{name}.{key}", arrays) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [packed(item, f"{name}[{position}]", arrays) for position, item in enumerate(value)]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(
        f"{name} is of type {type(value).__name__}; a policy's state must consist of dictionaries with str keys, "
        "lists, numbers, str, None, and arrays of numbers of at most two dimensions"
    )


def unpacked(value: Any, arrays: Mapping[str, Array]) -> Any:
    """Return the value that `packed` was given. Raises KeyError where an array is missing."""
    if isinstance(value, dict):
        if value.keys() == {_IN_ARRAY}:
            return arrays[value[_IN_ARRAY]].copy()
        return {key: unpacked(item, arrays) for key, item in value.items()}
    if isinstance(value, list):
        return [unpacked(item, arrays) for item in value]
    return value
