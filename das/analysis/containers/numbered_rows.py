"""What every container yields, and how big a row may be."""

from __future__ import annotations

from collections.abc import Iterator

from das.analysis.fields import BadRow, Row

NumberedRows = Iterator[tuple[int, Row | BadRow]]

MAX_ROW_BYTES = 64 << 20  # a million tokens with logprobs take 20 MB; without a bound, junk is read whole
