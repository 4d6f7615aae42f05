"""What every merge of several workers' states begins with: all of them are checked before anything changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import numpy.typing as npt

State = Mapping[str, npt.ArrayLike]
Checked = TypeVar("Checked")


def checked_states(states: Iterable[State], check: Callable[[State], Checked]) -> list[Checked]:
    """Return what `check` makes of each state.

    Raises:
        ValueError: no states. KeyError, ValueError: as `check`, naming the position.

    Complexity: O(states).
    """
    checked = []
    for position, state in enumerate(states):
        try:
            checked.append(check(state))
        except (KeyError, ValueError) as error:
            raise type(error)(f"states[{position}]: {error.args[0]}") from None
    if not checked:
        raise ValueError("states is empty; it must hold at least one state")
    return checked
