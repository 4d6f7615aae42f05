"""The log formats of trainers, and which of them a row has."""

from __future__ import annotations

from das.analysis.fields import BadRow, Row, field_names
from das.analysis.formats.log_format import LogFormat, ParsedRow
from das.analysis.formats.pair_logs import DAS, OPEN_INSTRUCT
from das.analysis.formats.sequence_logs import NEMO_RL, PRIME_RL, SLIME
from das.analysis.formats.text_logs import AREAL, OPENRLHF, TRL, VERL

# In order of detection: where a row fits several, the first one counts.
FORMATS = {one.name: one for one in (DAS, OPEN_INSTRUCT, SLIME, NEMO_RL, PRIME_RL, VERL, OPENRLHF, AREAL, TRL)}

__all__ = ["FORMATS", "LogFormat", "ParsedRow", "format_of", "unrecognised"]


def format_of(row: Row) -> LogFormat | None:
    """Return the format that a row has by the names of its fields; None: none that is known. O(formats)."""
    return next((one for one in FORMATS.values() if one.fits(row)), None)


def unrecognised(row: Row) -> BadRow:
    """Return the error of a row whose fields fit no format."""
    return BadRow(
        f"the fields fit no known format ({', '.join(FORMATS)}), --format forces one; fields found: {field_names(row)}"
    )
