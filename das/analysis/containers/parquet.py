"""Rows of a Parquet file: as many columns as are read, a page and a row of Python values at a time."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from das.analysis.containers.numbered_rows import NumberedRows
from das.analysis.extra import analysis_package
from das.analysis.fields import BadRow, Row

_BATCH_ROWS = 64
# With the defaults of pyarrow (pre_buffer, and no buffer size), the whole column of a row group is in memory at once.
_READING = {"buffer_size": 1 << 20, "pre_buffer": False}


def parquet_rows(file: Path, *, columns: Collection[str], report: Callable[[int], None]) -> NumberedRows:
    """Yield number and fields of each row.

    Args:
        file: the file.
        columns: the columns to read, as far as there are any; if there is none, one row of all names without values.
        report: is called with the bytes read so far.

    Complexity: O(bytes read) time; 64 rows in memory as Arrow arrays, one as Python values.
    """
    pyarrow = analysis_package("pyarrow", needed_for="a Parquet log")
    parquet = analysis_package("pyarrow.parquet", needed_for="a Parquet log")
    size_bytes, num_rows = file.stat().st_size, 0
    with open(file, "rb") as raw:
        try:
            table = parquet.ParquetFile(raw, **_READING)
            total_rows = max(1, table.metadata.num_rows)  # 0 in a damaged file that holds rows all the same
            names = table.schema_arrow.names
            chosen = [name for name in names if name in columns]
            if not chosen:
                yield 1, dict.fromkeys(names)
                return
            for batch in table.iter_batches(batch_size=_BATCH_ROWS, columns=chosen):
                for position in range(batch.num_rows):
                    num_rows += 1
                    yield num_rows, _row(batch, position)
                report(min(size_bytes, size_bytes * num_rows // total_rows))
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:  # the last: the name of a column
            yield num_rows + 1, BadRow(f"not readable as Parquet from here on: {error}")


def _row(batch: Any, position: int) -> Row | BadRow:
    try:
        row: Row = batch.slice(position, 1).to_pylist()[0]
    except (ValueError, OverflowError) as error:  # text that is not UTF-8; a date or duration that Python lacks
        return BadRow(f"a column cannot be decoded: {error}")
    return row
