"""The fields of a log's row, checked: each function returns a value or raises a `BadRow` that names the field."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from das._token_ids import token_id_array

Row = dict[str, Any]


class BadRow(Exception):
    """A row that is no rollout, with the reason; `field` is None where the row as a whole is at fault."""

    def __init__(self, reason: str, field: str | None = None) -> None:
        super().__init__(reason)
        self.field = field


def required(row: Row, field: str) -> Any:
    """Return a field that must be there."""
    if field not in row:
        raise BadRow(f"{field} is missing; fields found: {field_names(row)}", field)
    return row[field]


def token_ids(values: Any, field: str) -> npt.NDArray[np.int32]:
    """Return a list of token ids, 0 <= id < 2**31, at least one. O(tokens)."""
    if not isinstance(values, list):
        raise BadRow(f"{field} must be a list of token ids, not {shown(values)}", field)
    try:
        ids = token_id_array(values, field)
    except TypeError:
        position = next(i for i, value in enumerate(values) if type(value) is not int)
        raise BadRow(f"{field}[{position}] is {shown(values[position])}; token ids are integers", field) from None
    except ValueError as error:
        raise BadRow(str(error), field) from None
    if len(ids) == 0:
        raise BadRow(f"{field} is empty; it must hold at least one token", field)
    return ids


def encoded(text: Any, field: str, tokenizer: Any) -> npt.NDArray[np.int32]:
    """Return the token ids of a text, at least one, without special tokens but those that the text spells out."""
    if not isinstance(text, str):
        raise BadRow(f"{field} must be text, not {shown(text)}", field)
    try:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
    except Exception as error:  # bare Exceptions of tokenizers: half a surrogate pair, a word the vocabulary lacks
        raise BadRow(f"{field} cannot be tokenised ({error}): {shown(text)}", field) from None
    return token_ids(ids, field)


def whole_number(row: Row, field: str, *, bits: int = 62) -> int | None:
    """Return an integer of so many bits (62: a training step's), without a sign; None: the field is absent or null."""
    value = row.get(field)
    if value is None:
        return None
    if type(value) is not int or not 0 <= value < 1 << bits:
        raise BadRow(f"{field} must be an integer, 0 <= {field} < 2**{bits}, not {shown(value)}", field)
    return value


def number(value: Any, field: str) -> float | None:
    """Return a finite number; None for None."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadRow(f"{field} must be a number, not {shown(value)}", field)
    try:
        finite = float(value)
    except OverflowError:  # an integer beyond the largest float
        finite = math.inf
    if not math.isfinite(finite):
        raise BadRow(f"{field} must be a finite number, not {shown(value)}", field)
    return finite


def text(row: Row, field: str) -> str | None:
    """Return a text; None where the field is absent or null."""
    value = row.get(field)
    if value is not None and not isinstance(value, str):
        raise BadRow(f"{field} must be text, not {shown(value)}", field)
    return value


def mask(values: Any, field: str, *, num_tokens: int, of: str) -> npt.NDArray[np.bool_] | None:
    """Return a list of true and false (or 1 and 0) of a given length; None for None. O(tokens).

    Args:
        values: the field.
        field: its name.
        num_tokens: how long it must be.
        of: what it has an entry for, for the message.
    """
    if values is None:
        return None
    if not isinstance(values, list):
        raise BadRow(f"{field} must be a list of true and false, not {shown(values)}", field)
    for position, value in enumerate(values):
        if type(value) not in (bool, int) or value not in (0, 1):
            raise BadRow(f"{field}[{position}] is {shown(value)}; it must be true, false, 1 or 0", field)
    if len(values) != num_tokens:
        raise BadRow(f"{field} has {len(values)} entries; it must have {num_tokens}, one a {of}", field)
    return np.array(values, dtype=np.bool_)


def field_names(fields: Iterable[str]) -> str:
    """Return names for a message, in order, shortened."""
    return ", ".join(sorted(map(str, fields)))[:200] or "none"


def shown(value: object) -> str:
    """Return a value for a message, shortened."""
    try:
        text = repr(value)
    except RecursionError:
        text = f"a {type(value).__name__} nested too deep to show"
    return text if len(text) <= 120 else f"{text[:120]}..."
