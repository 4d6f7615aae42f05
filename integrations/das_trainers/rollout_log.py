"""Rollouts as JSON lines with token ids: exact where trainers write text, and readable for every `das` command."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

from das.rollout import Rollout


class RolloutLog:
    """Appends rollouts to files of its own in a directory, in the format `das` of docs/logs.md.

    Several processes may write to one directory. `das replay DIR`, `das state import` and SGLang's `das_push(path=...)`
    take the files.

    Args:
        directory: made if it is not there.
        max_file_bytes: a file that has reached this is followed by the next one, >= 1.

    Raises:
        OSError: the directory cannot be made. ValueError: max_file_bytes is below 1.
    """

    def __init__(self, directory: str | os.PathLike[str], *, max_file_bytes: int = 256 << 20) -> None:
        if max_file_bytes < 1:
            raise ValueError(f"max_file_bytes is {max_file_bytes}; it must be at least 1")
        self._directory = Path(directory)
        self._directory.mkdir(parents=True, exist_ok=True)
        self._max_file_bytes = max_file_bytes
        self._file: IO[str] | None = None
        self._num_files = 0
        self._pid = os.getpid()

    def add_many(self, rollouts: Iterable[Rollout]) -> int:
        """Write rollouts, hand them to the operating system, and return how many they were. Raises: OSError."""
        num_rollouts = 0
        for rollout in rollouts:
            self._open_file().write(json.dumps(row_of(rollout), separators=(",", ":")) + "\n")
            num_rollouts += 1
        if self._file is not None:
            self._file.flush()
        return num_rollouts

    def close(self) -> None:
        """Close the file that is being written; the next rollout begins another one."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open_file(self) -> IO[str]:
        if self._pid != os.getpid():  # forked: the file is the other process'
            self._pid, self._file = os.getpid(), None
        if self._file is not None and self._file.tell() >= self._max_file_bytes:
            self.close()
        if self._file is None:
            # Numbers in names sort as numbers: by start, then process, then order.
            name = f"rollouts-{time.time_ns() // 1_000_000}-{os.getpid()}-{self._num_files}.jsonl"
            self._file = (self._directory / name).open("x", encoding="ascii")
            self._num_files += 1
        return self._file


def row_of(rollout: Rollout) -> dict[str, Any]:
    """Return the fields of a rollout as plain values; those that are None are left out."""
    fields: dict[str, Any] = {
        "prompt_token_ids": rollout.prompt_token_ids.tolist(),
        "response_token_ids": rollout.response_token_ids.tolist(),
        "training_step": rollout.training_step,
        "reward": rollout.reward,
        "request_id": rollout.request_id,
        "prompt_key": rollout.prompt_key,
        "response_mask": None if rollout.response_mask is None else rollout.response_mask.tolist(),
        "ordinal": rollout.ordinal,
    }
    return {name: value for name, value in fields.items() if value is not None}
