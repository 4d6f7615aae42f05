"""What a reader must know about the log format of a trainer, and what it finds in a row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from das.analysis.fields import BadRow, Row
from das.rollout import Rollout


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ParsedRow:
    """What one row says; the conversation it belongs to is not known yet, nor, mostly, the rollout's ordinal.

    Args: as of `das.analysis.logs.LogRecord`; `sample` is None where the row does not say.
        names_key: the row says which prompt key the rollout has, and so to which conversation it belongs.
        has_ordinal: the row says which ordinal the rollout has; else equal responses are counted.
    """

    rollout: Rollout
    names_key: bool = False
    has_ordinal: bool = False
    sample: int | None = None
    prompt_id: str | None = None
    truncated: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LogFormat:
    """How one trainer writes rollouts down.

    Args:
        name: as `--format` takes it.
        trainer: whose format it is, for messages.
        fields: all fields that are read; others need not be loaded.
        fits: whether a row's fields are those of the format; of several that fit, the first in the registry counts.
        parse: what a row says: called with the row, its file and, for text formats, the tokenizer; raises `BadRow`.
        is_text: the log holds text, which must be tokenised again.
    """

    name: str
    trainer: str
    fields: tuple[str, ...]
    fits: Callable[[Row], bool]
    parse: Callable[[Row, Path, Any], ParsedRow]
    is_text: bool = False


def having_any(*fields: str) -> Callable[[Row], bool]:
    """Return a `fits` for rows that have at least one of some fields: one that is missing gets an error of its own."""
    return lambda row: not row.keys().isdisjoint(fields)


def having_all(*fields: str) -> Callable[[Row], bool]:
    """Return a `fits` for rows that have all of some fields."""
    return lambda row: row.keys() >= set(fields)


def split_sequence(
    ids: npt.NDArray[np.int32], generated: npt.NDArray[np.bool_], field: str
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.bool_] | None]:
    """Cut a sequence before its first generated token.

    Args:
        ids: prompt and response.
        generated: as long; true where the model spoke.
        field: the name of the mask, for messages.

    Returns:
        prompt, response, and which tokens of the response were generated (None: all).

    Raises:
        BadRow: nothing was generated, or there is no prompt.

    Complexity: O(tokens).
    """
    start = int(generated.argmax())
    if not generated[start]:
        raise BadRow(f"{field} marks no token as generated", field)
    if start == 0:
        raise BadRow(f"{field} marks the first token as generated, so there is no prompt", field)
    response_mask = generated[start:]
    return ids[:start], ids[start:], None if response_mask.all() else response_mask
