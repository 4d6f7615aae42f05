"""Files that hold rows, told apart by name: JSON lines, Parquet, torch archives."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

from das.analysis.containers.json_lines import json_rows
from das.analysis.containers.numbered_rows import NumberedRows
from das.analysis.containers.parquet import parquet_rows
from das.analysis.containers.torch_archive import torch_rows

SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet", ".pt")  # what is a log in a directory

__all__ = ["SUFFIXES", "rows_of"]


def rows_of(file: Path, *, columns: Collection[str], report: Callable[[int], None]) -> NumberedRows:
    """Yield number and fields of each row of a file, or a `BadRow`; what becomes of that is for the caller to decide.

    Args:
        file: named .parquet: Parquet; .pt: what `torch.save` wrote; else JSON lines, gzipped or not.
        columns: names of all fields that are of use; a container may leave out others.
        report: is called with the bytes read so far, of the file as it lies on disk.

    Complexity: O(bytes) time; a row in memory (`MAX_ROW_BYTES` of text at most), 64 for Parquet.
    """
    if file.name.endswith(".parquet"):
        return parquet_rows(file, columns=columns, report=report)
    if file.name.endswith(".pt"):
        return torch_rows(file, report=report)
    return json_rows(file, report=report)
