"""Readers for rollouts on disk: token-id logs (JSON lines, Parquet), verl's text dumps, and saved states of das."""

from __future__ import annotations

import dataclasses
import os
import re
import stat
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from das.analysis._log_rows import (
    TEXT_FIELDS,
    TOKEN_ID_FIELDS,
    BadRow,
    ParsedRow,
    Row,
    analysis_package,
    json_rows,
    parquet_rows,
    text_row,
    token_id_row,
    unrecognised,
)
from das.checked_file import StateError
from das.rollout import Rollout
from das.state import load_state
from das.state_directory import HEAD_NAME

LogPath = str | os.PathLike[str]
_DIRECTORY_SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")


class LogError(ValueError):
    """A log that cannot be read, or a row in it that is no rollout.

    Attributes: `path` of the file (or directory), `line` (1-based; row number in Parquet; None: the file as a whole),
    `field` (None: the row as a whole). The message names them, the rule and the value.
    """

    def __init__(
        self, message: str, *, path: str | None = None, line: int | None = None, field: str | None = None
    ) -> None:
        super().__init__(message)
        self.path = path
        self.line = line
        self.field = field


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LogRecord:
    """One row of a log.

    Args:
        rollout: the sampled response and its prompt.
        sample: which sample of its prompt and training step; counted in order of appearance where the log is silent.
        location: file:line it was read from (file:row for Parquet).
        prompt_id: the trainer's own name of the prompt; None: not in the log. The prompt key does not depend on it.
        truncated: the response was cut at the length limit; None: the log does not say.
    """

    rollout: Rollout
    sample: int
    location: str
    prompt_id: str | None = None
    truncated: bool | None = None


def read_log(
    path: LogPath,
    *,
    tokenizer: LogPath | None = None,
    skip_bad: bool = False,
    on_bad: Callable[[LogError], None] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[LogRecord]:
    """Stream the records of one log, in file order; see `read_logs`.

    Args:
        path: a file, a directory of dumps, or a saved state.
        tokenizer, skip_bad, on_bad, progress: as in `read_logs`.

    Returns:
        an iterator of records.

    Raises:
        as `read_logs`.

    Complexity: as `read_logs`.
    """
    return read_logs([path], tokenizer=tokenizer, skip_bad=skip_bad, on_bad=on_bad, progress=progress)


def read_logs(
    paths: Sequence[LogPath],
    *,
    tokenizer: LogPath | None = None,
    skip_bad: bool = False,
    on_bad: Callable[[LogError], None] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[LogRecord]:
    """Stream the records of several logs, one log after the other, each in file order.

    A name ending in .parquet is read as Parquet, in .gz as gzipped JSON lines, anything else as JSON lines. The fields
    of a file's first row decide what it holds: `prompt_token_ids` and `response_token_ids` (optional: training_step,
    reward, prompt_id, prompt_key, sample, request_id, response_mask, truncated), or verl's `input` and `output`
    (optional: step, score). Other fields are ignored; an optional field that is null counts as absent, and
    training_step then is None.

    Args:
        paths: at least one file or directory (its .jsonl, .jsonl.gz and .parquet files; numbers in names sort as
            numbers), or state that `das.save_state` has written (prompt by prompt, oldest epoch first). Equal responses
            to one prompt and training step count on (`Rollout.ordinal`) across all of them.
        tokenizer: a tokenizer.json, for text logs; prompt and response are encoded apart, without special tokens.
        skip_bad: leave rows out that are no rollout, instead of raising.
        on_bad: called with the error of each row (or cut-off rest of a file) left out.
        progress: called with (bytes read, bytes in all), compressed size; pipes count as 0.

    Returns:
        an iterator of records. Text logs add one UserWarning: encoding text again can shift tokens.

    Raises:
        FileNotFoundError: no such log or tokenizer. LogError: a bad row; a log without a single usable row, even with
        `skip_bad`; a text log without tokenizer. ImportError: a package of the `analysis` extra is missing.
        TypeError, ValueError: `paths` is a single path, or empty. Problems with the paths are raised by the call
        itself, the others while iterating.

    Complexity: O(bytes) time; one row in memory (64 for Parquet) and about 100 bytes for each row read so far.
    """
    if isinstance(paths, str | os.PathLike):
        raise TypeError(f"paths must be a sequence of paths, not the single path {str(paths)!r}; use read_log for it")
    if not paths:
        raise ValueError("paths is empty; it must name at least one log")
    if tokenizer is not None and not Path(tokenizer).is_file():
        raise FileNotFoundError(f"{tokenizer}: no such tokenizer file")
    logs = [(str(path), log_files(path)) for path in paths]
    reader = _LogReader(logs, tokenizer=tokenizer, skip_bad=skip_bad, on_bad=on_bad, progress=progress)
    return reader.records()


def log_files(path: LogPath) -> list[Path]:
    """Return the files of a log: the file itself, or the logs in a directory, numbers in names sorted as numbers.

    Args:
        path: a file, or a directory; hidden files and folders inside it are left out. A saved state counts as one.

    Returns:
        at least one path.

    Raises:
        FileNotFoundError: no such file or directory. LogError: a directory without logs.

    Complexity: O(n log n) for n directory entries.
    """
    log = Path(path)
    if not log.exists():
        raise FileNotFoundError(f"{log}: no such log file or directory")
    if not log.is_dir() or _is_state(log):
        return [log]
    entries = (entry for entry in log.iterdir() if entry.name.endswith(_DIRECTORY_SUFFIXES) and entry.is_file())
    files = sorted((entry for entry in entries if not entry.name.startswith(".")), key=_numeric_order)
    if not files:
        raise LogError(f"{log}: the directory holds no logs ({', '.join(_DIRECTORY_SUFFIXES)})", path=str(log))
    return files


def _is_state(log: Path) -> bool:
    return (log / HEAD_NAME).exists()


def _numeric_order(path: Path) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", path.name)]


class _LogReader:
    """One call of `read_logs`: what to do with bad rows, and the counts that carry over from file to file."""

    def __init__(
        self,
        logs: list[tuple[str, list[Path]]],
        *,
        tokenizer: LogPath | None,
        skip_bad: bool,
        on_bad: Callable[[LogError], None] | None,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self._logs = logs
        self._tokenizer_path = tokenizer
        self._tokenizer: Any = None
        self._skip_bad = skip_bad
        self._on_bad = on_bad
        self._progress = progress
        self._num_bad = 0  # in the log being read
        self._first_bad = ""
        self._bytes_done = 0
        self._bytes_total = sum(_size_bytes(file) for _, files in logs for file in files)
        # Keyed by hashes, not tuples, to save memory: a collision merely skips a number.
        self._seen: Counter[int] = Counter()

    def records(self) -> Iterator[LogRecord]:
        for log, files in self._logs:
            self._num_bad, usable = 0, False
            for file in files:
                for record in self._state_records(file) if _is_state(file) else self._file_records(file):
                    usable = True
                    yield record
            if not usable:
                raise LogError(f"{log}: no usable row, {self._num_bad} bad; the first: {self._first_bad}", path=log)

    def _file_records(self, file: Path) -> Iterator[LogRecord]:
        size_bytes = _size_bytes(file)
        rows = parquet_rows if file.name.endswith(".parquet") else json_rows
        parse: Callable[[Row], ParsedRow] | None = None
        line: int | None = None
        for line, row in rows(file, report=self._report_position):
            try:
                if isinstance(row, BadRow):
                    raise row
                parse = parse or self._parser(row, file, line)
                record = self._record(parse(row), f"{file}:{line}")
            except BadRow as bad:
                self._leave_out(bad, file, line)
            else:
                yield record
        if line is None:
            self._leave_out(BadRow("the file holds no rows"), file, None)
        self._bytes_done += size_bytes
        self._report_position(0)

    def _state_records(self, state: Path) -> Iterator[LogRecord]:
        try:
            rollouts = load_state(state).rollouts()
        except StateError as error:
            raise LogError(str(error), path=error.path) from error
        for number, rollout in enumerate(rollouts, start=1):
            yield self._record(ParsedRow(rollout=rollout), f"{state}:{number}")

    def _report_position(self, position: int) -> None:
        if self._progress is not None:
            self._progress(self._bytes_done + position, self._bytes_total)

    def _leave_out(self, bad: BadRow, file: Path, line: int | None) -> None:
        where = f"{file}" if line is None else f"{file}:{line}"
        error = LogError(f"{where}: {bad}", path=str(file), line=line, field=bad.field)
        if not self._skip_bad:
            raise error from None
        self._first_bad = self._first_bad if self._num_bad else str(error)
        self._num_bad += 1
        if self._on_bad is not None:
            self._on_bad(error)

    def _parser(self, row: Row, file: Path, line: int) -> Callable[[Row], ParsedRow]:
        """Decide by its first row what a file holds."""
        if any(field in row for field in TOKEN_ID_FIELDS):
            return token_id_row
        if not all(field in row for field in TEXT_FIELDS):
            raise unrecognised(row)
        if self._tokenizer is None:
            self._tokenizer = self._load_tokenizer(file, line)
        return partial(text_row, tokenizer=self._tokenizer)

    def _load_tokenizer(self, file: Path, line: int) -> Any:
        if self._tokenizer_path is None:
            reason = "a text log (fields input, output) needs the policy's tokenizer.json: tokenizer=, --tokenizer FILE"
            raise LogError(f"{file}:{line}: {reason}", path=str(file), line=line)
        path = os.fspath(self._tokenizer_path)
        tokenizers = analysis_package("tokenizers", needed_for="a text log")
        try:
            tokenizer = tokenizers.Tokenizer.from_file(path)
        except Exception as error:  # tokenizers raises bare Exceptions
            raise LogError(f"{path}: not a tokenizer.json that tokenizers can read: {error}", path=path) from None
        # Both are settings of the file; they would cut long responses, or fill short ones.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        warnings.warn(
            f"{file}: text is tokenised again with {path}: token ids can differ from those the policy sampled "
            "(the longer the response, the likelier), and end-of-sequence tokens are missing",
            stacklevel=2,
        )
        return tokenizer

    def _record(self, row: ParsedRow, location: str) -> LogRecord:
        rollout = row.rollout
        step = -1 if rollout.training_step is None else rollout.training_step
        ordinal = self._count(rollout.key, step, rollout.response_hash)
        sample = self._count(rollout.key, step)
        return LogRecord(
            rollout=dataclasses.replace(rollout, ordinal=ordinal) if ordinal else rollout,
            sample=sample if row.sample is None else row.sample,
            location=location,
            prompt_id=row.prompt_id,
            truncated=row.truncated,
        )

    def _count(self, *what: int) -> int:
        """Return how often this was asked before."""
        key = hash(what)
        self._seen[key] += 1
        return self._seen[key] - 1


def _size_bytes(file: Path) -> int:
    status = file.stat()
    return status.st_size if stat.S_ISREG(status.st_mode) else 0
