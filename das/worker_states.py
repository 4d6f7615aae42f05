"""What every merge of several workers' states begins with: all of them are checked before anything changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import numpy.typing as npt

from das.checked_values import check_state

State = Mapping[str, npt.ArrayLike]
Checked = TypeVar("Checked")


def checked_states(states: Iterable[State], check: Callable[[State], Checked]) -> list[Checked]:
    """Return what `check` makes of each state.

    Raises:
        TypeError: nothing to iterate over, or a state that is no mapping. ValueError: no states. KeyError, TypeError,
        ValueError: as `check`. Of a state, the position is named.

    Complexity: O(states).
    """
    if not isinstance(states, Iterable):
        raise TypeError(f"states must be an iterable of states, not {type(states).__name__}")
    checked = []
    for position, state in enumerate(states):
        try:
            check_state(state)
            checked.append(check(state))
        except (KeyError, TypeError, ValueError) as error:
            raise type(error)(f"states[{position}]: {error.args[0]}") from None
    if not checked:
        raise ValueError("states is empty; it must hold at least one state")
    return checked
