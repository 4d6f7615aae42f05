"""Readers for what trainers write to disk, as token ids or text in many formats, and for saved states of das."""

from __future__ import annotations

import fnmatch
import os
import re
import stat
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from das.analysis.containers import SUFFIXES, rows_of
from das.analysis.conversations import Conversations
from das.analysis.extra import analysis_package
from das.analysis.fields import BadRow, Row
from das.analysis.formats import FORMATS, LogFormat, ParsedRow, format_of, unrecognised
from das.checked_file import StateError
from das.rollout import Rollout, with_changes
from das.state import load_state
from das.state_directory import HEAD_NAME

LogPath = str | os.PathLike[str]
STATE_FORMAT = "state"  # of records from saved states
# What trainers write beside rollouts: open-instruct's note on the run, NeMo-RL's validation texts.
_NO_ROLLOUTS = ("*_metadata.jsonl", "val_data_step*.jsonl")


class LogError(ValueError):
    """A log that cannot be read, or a row in it that is no rollout.

    Attributes: `path` of the file (or directory), `line` (1-based; row number in Parquet; None: the file as a whole),
    `field` (None: the row as a whole), `is_skippable` (it is a row, which reading with `skip_bad` leaves out). The
    message names path, line and field, the rule and the value.
    """

    def __init__(
        self,
        message: str,
        *,
        path: str | None = None,
        line: int | None = None,
        field: str | None = None,
        is_skippable: bool = False,
    ) -> None:
        super().__init__(message)
        self.is_skippable = is_skippable
        self.path = path
        self.line = line
        self.field = field


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LogRecord:
    """One row of a log.

    Args:
        rollout: the sampled response and its prompt.
        sample: which sample of its prompt and training step; counted in order of appearance where the log is silent.
        location: file:line it was read from (file:row for Parquet and torch archives).
        format: name of the format it was read as, as in `das.analysis.formats.FORMATS`; "state": from a saved state.
        is_later_turn: the prompt goes on from one that came earlier in the log, whose key the rollout has.
        prompt_id: the trainer's own name of the prompt; None: not in the log. The prompt key does not depend on it.
        truncated: the response was cut at the length limit; None: the log does not say.
    """

    rollout: Rollout
    sample: int
    location: str
    format: str
    is_later_turn: bool = False
    prompt_id: str | None = None
    truncated: bool | None = None


def read_log(
    path: LogPath,
    *,
    tokenizer: LogPath | None = None,
    format: str | None = None,
    skip_bad: bool = False,
    on_bad: Callable[[LogError], None] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[LogRecord]:
    """Stream the records of one log, in file order; see `read_logs`.

    Args:
        path: a file, a directory of dumps, or a saved state.
        tokenizer, format, skip_bad, on_bad, progress: as in `read_logs`.

    Returns:
        an iterator of records.

    Raises:
        as `read_logs`.

    Complexity: as `read_logs`.
    """
    return read_logs([path], tokenizer=tokenizer, format=format, skip_bad=skip_bad, on_bad=on_bad, progress=progress)


def read_logs(
    paths: Sequence[LogPath],
    *,
    tokenizer: LogPath | None = None,
    format: str | None = None,
    skip_bad: bool = False,
    on_bad: Callable[[LogError], None] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[LogRecord]:
    """Stream the records of several logs, one log after the other, each in file order.

    A name ending in .parquet is read as Parquet, in .pt as a torch archive, in .gz as gzipped JSON lines, anything else
    as JSON lines. The fields of a file's first row decide which trainer's format it has, and all its rows must have;
    docs/logs.md lists formats and fields. Other fields are ignored; an optional field that is null counts as absent.

    A prompt that goes on from one that came earlier in the logs, that is, begins with it, is a later turn of a
    conversation: its rollouts have the `prompt_key` of the longest such prompt (and so that of the first turn).

    Args:
        paths: at least one file or directory (its .jsonl, .jsonl.gz, .parquet and .pt files, in folders too; numbers in
            names sort as numbers), or state that `das.save_state` has written (a prompt after another, the oldest epoch
            first, keys as saved). A file that is there by another name, too, counts once, with a UserWarning. Equal
            responses to one prompt and training step count on (`Rollout.ordinal`) across all of them where rows do not
            number them.
        tokenizer: a tokenizer.json, for text logs; prompt and response are encoded apart, without special tokens.
        format: the format of all files, a name in `das.analysis.formats.FORMATS`; None: as their fields say.
        skip_bad: leave rows out that are no rollout, instead of raising.
        on_bad: called with the error of each row (or cut-off rest of a file) left out.
        progress: called with (bytes read, bytes in all), compressed size; pipes count as 0.

    Returns:
        an iterator of records. Text logs add one UserWarning: encoding text again can shift tokens.

    Raises:
        FileNotFoundError: no such log or tokenizer. LogError: a bad row; a log without a single usable row, even with
        `skip_bad`; a text log without tokenizer. ImportError: a package of the `analysis` extra is missing.
        TypeError, ValueError: `paths` is a single path, or empty; no such format. Problems with the paths are raised by
        the call itself, the others while iterating.

    Complexity: O(bytes) time; one row in memory (64 for Parquet), about 100 bytes for each row and 200 for each prompt
    read so far.
    """
    if isinstance(paths, str | os.PathLike):
        raise TypeError(f"paths must be a sequence of paths, not the single path {str(paths)!r}; use read_log for it")
    if not paths:
        raise ValueError("paths is empty; it must name at least one log")
    if format is not None and format not in FORMATS:
        raise ValueError(f"format is {format!r}; it must be one of {', '.join(FORMATS)}")
    if tokenizer is not None and not Path(tokenizer).is_file():
        raise FileNotFoundError(f"{tokenizer}: no such tokenizer file")
    logs = _each_file_once([(str(path), log_files(path)) for path in paths])
    forced = None if format is None else FORMATS[format]
    reader = _LogReader(logs, tokenizer=tokenizer, forced=forced, skip_bad=skip_bad, on_bad=on_bad, progress=progress)
    return reader.records()


def log_files(path: LogPath) -> list[Path]:
    """Return the files of a log: the file itself, or the logs in a directory, numbers in names sorted as numbers.

    Args:
        path: a file, or a directory; hidden files and folders inside it are left out, and so is what trainers write
            beside rollouts (*_metadata.jsonl, val_data_step*.jsonl). A saved state counts as a file.

    Returns:
        at least one path.

    Raises:
        FileNotFoundError: no such file or directory. LogError: a directory without logs.

    Complexity: O(n log n) for n directory entries. Links to folders are not followed.
    """
    log = Path(path)
    if not log.exists():
        raise FileNotFoundError(f"{log}: no such log file or directory")
    if not log.is_dir() or _is_state(log):
        return [log]
    files = sorted(_logs_below(log), key=lambda file: [_numeric_order(part) for part in file.relative_to(log).parts])
    if not files:
        raise LogError(f"{log}: the directory holds no logs ({', '.join(SUFFIXES)})", path=str(log))
    return files


def _each_file_once(logs: list[tuple[str, list[Path]]]) -> list[tuple[str, list[Path]]]:
    """Leave out files that are others by another name (links, a folder and a file in it): they would count twice."""
    first_names: dict[tuple[int, int], Path] = {}
    kept: list[tuple[str, list[Path]]] = []
    for log, files in logs:
        new = []
        for file in files:
            status = file.stat()
            first = first_names.setdefault((status.st_dev, status.st_ino), file)
            if first is file:
                new.append(file)
            else:
                warnings.warn(f"{file} is left out: it is {first} by another name, and would count twice", stacklevel=3)
        if new:
            kept.append((log, new))
    return kept


def _is_state(log: Path) -> bool:
    return (log / HEAD_NAME).exists()


def _logs_below(directory: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(directory, onerror=_raise):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            is_log = name.endswith(SUFFIXES) and not any(fnmatch.fnmatch(name, pattern) for pattern in _NO_ROLLOUTS)
            if is_log and not name.startswith(".") and (file := Path(folder, name)).is_file():
                yield file


def _raise(error: OSError) -> None:
    """A folder that cannot be read is told: a log that lacks some of its files looks like one that is whole."""
    raise error


def _numeric_order(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


class _LogReader:
    """One call of `read_logs`: what to do with bad rows, and the counts that carry over from file to file."""

    def __init__(
        self,
        logs: list[tuple[str, list[Path]]],
        *,
        tokenizer: LogPath | None,
        forced: LogFormat | None,
        skip_bad: bool,
        on_bad: Callable[[LogError], None] | None,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self._logs = logs
        self._tokenizer_path = tokenizer
        self._tokenizer: Any = None
        self._forced = forced
        self._skip_bad = skip_bad
        self._on_bad = on_bad
        self._progress = progress
        self._num_bad = 0  # in the log being read
        self._first_bad = ""
        self._bytes_done = 0
        self._bytes_total = sum(_size_bytes(file) for _, files in logs for file in files)
        # Keyed by hashes, not tuples, to save memory: a collision merely skips a number.
        self._seen: Counter[int] = Counter()
        self._conversations = Conversations()

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
        own, began_at = self._forced, None
        line: int | None = None
        for line, row in rows_of(file, columns=self._columns(), report=self._report_position):
            try:
                if isinstance(row, BadRow):
                    raise row
                if self._forced is None:
                    own = _checked_format(row, own, began_at)
                    began_at = began_at or line
                assert own is not None
                if own.is_text and self._tokenizer is None:
                    self._tokenizer = self._load_tokenizer(own, file, line)
                record = self._record(own.parse(row, file, self._tokenizer), own.name, f"{file}:{line}")
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
            yield self._record(ParsedRow(rollout=rollout, names_key=True), STATE_FORMAT, f"{state}:{number}")

    def _report_position(self, position: int) -> None:
        if self._progress is not None:
            self._progress(self._bytes_done + position, self._bytes_total)

    def _leave_out(self, bad: BadRow, file: Path, line: int | None) -> None:
        where = f"{file}" if line is None else f"{file}:{line}"
        error = LogError(f"{where}: {bad}", path=str(file), line=line, field=bad.field, is_skippable=line is not None)
        if not self._skip_bad:
            raise error from None
        self._first_bad = self._first_bad if self._num_bad else str(error)
        self._num_bad += 1
        if self._on_bad is not None:
            self._on_bad(error)

    def _columns(self) -> set[str]:
        formats = FORMATS.values() if self._forced is None else (self._forced,)
        return {field for one in formats for field in one.fields}

    def _load_tokenizer(self, own: LogFormat, file: Path, line: int) -> Any:
        if self._tokenizer_path is None:
            reason = f"a text log ({own.trainer}) needs the policy's tokenizer.json: tokenizer=, --tokenizer FILE"
            raise LogError(f"{file}:{line}: {reason}", path=str(file), line=line)
        path = os.fspath(self._tokenizer_path)
        tokenizer = load_tokenizer(path, needed_for="a text log")
        # Both are settings of the file; they would cut long responses, or fill short ones.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        warnings.warn(
            f"{file}: text is tokenised again with {path}: token ids can differ from those the policy sampled "
            "(the longer the response, the likelier), and end-of-sequence tokens are missing",
            stacklevel=2,
        )
        return tokenizer

    def _record(self, row: ParsedRow, format_name: str, location: str) -> LogRecord:
        rollout = row.rollout
        key = rollout.key if row.names_key else self._conversations.key(rollout)
        is_later_turn = key != rollout.key
        if is_later_turn:
            rollout = with_changes(rollout, prompt_key=key)
        step = -1 if rollout.training_step is None else rollout.training_step
        ordinal = rollout.ordinal if row.has_ordinal else self._count(rollout.key, step, rollout.response_hash)
        sample = self._count(rollout.key, step)
        return LogRecord(
            rollout=with_changes(rollout, ordinal=ordinal) if ordinal else rollout,
            sample=sample if row.sample is None else row.sample,
            location=location,
            format=format_name,
            is_later_turn=is_later_turn,
            prompt_id=row.prompt_id,
            truncated=row.truncated,
        )

    def _count(self, *what: int) -> int:
        """Return how often this was asked before."""
        key = hash(what)
        self._seen[key] += 1
        return self._seen[key] - 1


def load_tokenizer(path: LogPath, *, needed_for: str) -> Any:
    """Return the tokenizer of a tokenizer.json, a `tokenizers.Tokenizer`.

    Raises:
        ImportError: the package is missing. LogError: no such file, or no tokenizer.
    """
    tokenizers = analysis_package("tokenizers", needed_for=needed_for)
    try:
        return tokenizers.Tokenizer.from_file(os.fspath(path))
    except Exception as error:  # tokenizers raises bare Exceptions
        raise LogError(
            f"{path}: not a tokenizer.json that tokenizers can read: {error}", path=os.fspath(path)
        ) from None


def _size_bytes(file: Path) -> int:
    status = file.stat()
    return status.st_size if stat.S_ISREG(status.st_mode) else 0


def _checked_format(row: Row, own: LogFormat | None, began_at: int | None) -> LogFormat:
    """Return the format of a file, which its first row that has one decides; a row of another one is bad."""
    found = format_of(row)
    if own is None:
        if found is None:
            raise unrecognised(row)
        return found
    if found is not None and found is not own:
        raise BadRow(
            f"the row has the format {found.name}, but the file began with {own.name} in line {began_at}; a file holds "
            "one format"
        )
    return own
