"""Rollouts as Arrow tables and Parquet files, with the columns that `read_logs` reads: what is written is a log."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from das.analysis.extra import analysis_package
from das.analysis.fields import BadRow
from das.analysis.formats.pair_logs import DAS
from das.file_errors import naming_file
from das.rollout import Rollout

_BATCH_ROLLOUTS = 1024  # 4 MB of 1 k tokens each
_NO_FILE = Path()  # whose name might say more about a row


def rollout_table(rollouts: Iterable[Rollout]) -> Any:
    """Return rollouts as a pyarrow.Table.

    Args:
        rollouts: any; their order stays.

    Returns:
        columns prompt_token_ids, response_token_ids (lists of int32), training_step (int64), reward (float64),
        request_id (text; half a surrogate pair becomes "?"), prompt_key (uint64), response_mask (lists of bool); null:
        not known. An ordinal is not written: readers count equal responses.

    Raises:
        ImportError: pyarrow, of the `analysis` extra, is missing.

    Complexity: O(tokens).
    """
    pyarrow = analysis_package("pyarrow", needed_for="an Arrow table")
    kept = list(rollouts)
    columns = {
        "prompt_token_ids": _lists(pyarrow, [rollout.prompt_token_ids for rollout in kept]),
        "response_token_ids": _lists(pyarrow, [rollout.response_token_ids for rollout in kept]),
        "training_step": pyarrow.array([rollout.training_step for rollout in kept], pyarrow.int64()),
        "reward": pyarrow.array([rollout.reward for rollout in kept], pyarrow.float64()),
        "request_id": pyarrow.array([_text(rollout.request_id) for rollout in kept], pyarrow.string()),
        "prompt_key": pyarrow.array([rollout.key for rollout in kept], pyarrow.uint64()),
        "response_mask": pyarrow.array([rollout.response_mask for rollout in kept], pyarrow.list_(pyarrow.bool_())),
    }
    return pyarrow.table(columns)


def write_parquet(path: str | os.PathLike[str], rollouts: Iterable[Rollout]) -> int:
    """Write rollouts to a Parquet file, that is there in full or not at all, and return how many there were.

    Raises:
        ImportError: as `rollout_table`. OSError: as the system says, or the path is that of something else than a file
        (a folder, a device); what was there before stays.

    Complexity: O(tokens) time; 1,024 rollouts in memory.
    """
    parquet = analysis_package("pyarrow.parquet", needed_for="a Parquet file")
    target, source, num_written = Path(path), iter(rollouts), 0
    if target.is_symlink():
        target = Path(os.path.realpath(target))  # a link stays one
    if target.exists() and not target.is_file():
        raise FileExistsError(errno.EEXIST, "is there, and no file that could be replaced", str(path))
    temporary = target.with_name(f"{target.name}.tmp")
    try:
        batch = list(islice(source, _BATCH_ROLLOUTS))
        table = rollout_table(batch)
        with naming_file(temporary), open(temporary, "wb") as file, parquet.ParquetWriter(file, table.schema) as writer:
            while batch:
                writer.write_table(table)
                num_written += len(batch)
                batch = list(islice(source, _BATCH_ROLLOUTS))
                table = rollout_table(batch)
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return num_written


def rollouts_of_table(table: Any) -> Iterator[Rollout]:
    """Return the rollouts of a pyarrow.Table with the columns of `rollout_table`, of which the first two must be there.

    Raises:
        ValueError: while iterating, naming the row, for one that is no rollout.

    Complexity: O(tokens) time; a record batch in memory.
    """
    number = 0
    for batch in table.to_batches(max_chunksize=64):
        for row in batch.to_pylist():
            try:
                yield DAS.parse(row, _NO_FILE, None).rollout
            except BadRow as error:
                raise ValueError(f"row {number}: {error}") from error
            number += 1


def _lists(pyarrow: Any, texts: list[Any]) -> Any:
    """Return texts as an array of lists of int32; their tokens are copied once."""
    ends = np.cumsum([0, *map(len, texts)], dtype=np.int32)
    tokens = np.concatenate([np.zeros(0, np.int32), *texts])
    return pyarrow.ListArray.from_arrays(pyarrow.array(ends), pyarrow.array(tokens))


def _text(request_id: str | None) -> str | None:
    return None if request_id is None else request_id.encode("utf-8", "replace").decode()
