"""From a log file to rows, and from a row to a rollout; what becomes of a `BadRow` is for the caller to decide."""

from __future__ import annotations

import gzip
import importlib
import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import IO, Any, cast

import numpy as np
import numpy.typing as npt

from das._token_ids import token_id_array
from das.rollout import Rollout

Row = dict[str, Any]
NumberedRows = Iterator[tuple[int, "Row | BadRow"]]

TOKEN_ID_FIELDS = ("prompt_token_ids", "response_token_ids")
TEXT_FIELDS = ("input", "output")
_OPTIONAL_FIELDS = (
    *("training_step", "reward", "prompt_id", "prompt_key", "sample", "request_id", "response_mask", "truncated"),
)
_PARQUET_COLUMNS = frozenset((*TOKEN_ID_FIELDS, *_OPTIONAL_FIELDS, *TEXT_FIELDS, "step", "score"))
_MAX_LINE_BYTES = 64 << 20  # a million tokens with logprobs take 20 MB; without a bound, junk is read whole
_CUT_OFF = "its writer was stopped, or is still writing"
_PARQUET_BATCH_ROWS = 64  # 32 k tokens a row: about 70 MB as Python ints


class BadRow(Exception):
    """A row that is no rollout, with the reason; `field` is None where the row as a whole is at fault."""

    def __init__(self, reason: str, field: str | None = None) -> None:
        super().__init__(reason)
        self.field = field


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ParsedRow:
    """What one row says; the rollout's ordinal is not known yet."""

    rollout: Rollout
    sample: int | None = None
    prompt_id: str | None = None
    truncated: bool | None = None


def unrecognised(fields: Iterable[str]) -> BadRow:
    """Return the error of a row whose fields fit no format."""
    return BadRow(
        "neither a token-id log (fields prompt_token_ids, response_token_ids) nor a verl dump (fields input, output); "
        f"fields found: {_field_names(fields)}"
    )


def analysis_package(name: str, *, needed_for: str) -> ModuleType:
    """Import a package of the `analysis` extra, or raise an ImportError that names the extra."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ImportError(f"{needed_for} needs {name}: pip install 'das-drafter[analysis]'", name=name) from error


def json_rows(file: Path, *, report: Callable[[int], None]) -> NumberedRows:
    """Yield line number and JSON object of each line that is not blank; `report` gets the bytes read so far."""
    with open(file, "rb") as raw, _decompressed(raw, file) as lines:
        line = 0
        while True:
            line += 1
            try:
                data = lines.readline(_MAX_LINE_BYTES + 1)
            except EOFError:
                yield line, BadRow(f"the gzip stream is cut off here: {_CUT_OFF}")
                return
            except (zlib.error, gzip.BadGzipFile) as error:
                is_other = line == 1 and str(error).startswith("Not a gzipped file")
                what = (
                    "not a gzip file, although its name ends in .gz" if is_other else "the gzip stream is damaged here"
                )
                yield line, BadRow(f"{what}: {error}")
                return
            if not data:
                return
            if len(data) > _MAX_LINE_BYTES:
                yield line, BadRow(f"the line is longer than {_MAX_LINE_BYTES} bytes; the file is not read further")
                return
            if not data.isspace():
                yield line, _json_object(data)
            if raw.seekable():
                report(raw.tell())


def _decompressed(raw: IO[bytes], file: Path) -> IO[bytes]:
    return cast(IO[bytes], gzip.GzipFile(fileobj=raw)) if file.name.endswith(".gz") else raw


def _json_object(data: bytes) -> Row | BadRow:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if error.reason == "unexpected end of data":
            before = _shown(_end(data[: error.start].decode(errors="replace")))
            return BadRow(f"the line is cut off inside a character, behind {before}: {_CUT_OFF}")
        return BadRow(f"not UTF-8 text (logs are .jsonl, .jsonl.gz or .parquet): {_shown(data[:40])}")
    try:
        row = json.loads(text)
    except json.JSONDecodeError as error:
        if _is_cut_off(text.strip(), error):
            return BadRow(f"the line is cut off inside its JSON object, behind {_shown(_end(text))}: {_CUT_OFF}")
        near = _shown(text[error.pos : error.pos + 40])
        return BadRow(f"malformed JSON at column {error.colno}: {error.msg}, near {near}")
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits; thousands of brackets
        return BadRow(f"malformed JSON: {error}")
    if not isinstance(row, dict):
        return BadRow(f"a row must be a JSON object, not a {type(row).__name__}: {_shown(row)}")
    return row


def _is_cut_off(text: str, error: json.JSONDecodeError) -> bool:
    """Whether an object begins and does not end, rather than holding something that is no JSON."""
    ends_inside = error.pos >= len(error.doc.rstrip()) or error.msg.startswith("Unterminated string")
    return text.startswith("{") and (ends_inside or not text.endswith("}"))


def _end(text: str) -> str:
    return text.rstrip()[-40:]


def parquet_rows(file: Path, *, report: Callable[[int], None]) -> NumberedRows:
    """Yield number and fields of each row, a record batch at a time; `report` gets the bytes read so far."""
    pyarrow = analysis_package("pyarrow", needed_for="a Parquet log")
    parquet = analysis_package("pyarrow.parquet", needed_for="a Parquet log")
    num_rows = 0
    with open(file, "rb") as raw:
        try:
            table = parquet.ParquetFile(raw)
            columns = [name for name in table.schema_arrow.names if name in _PARQUET_COLUMNS]
            if not columns:
                yield 1, unrecognised(table.schema_arrow.names)
                return
            for batch in table.iter_batches(batch_size=_PARQUET_BATCH_ROWS, columns=columns):
                for row in batch.to_pylist():
                    num_rows += 1
                    yield num_rows, row
                report(file.stat().st_size * num_rows // table.metadata.num_rows)
        except (pyarrow.ArrowException, OSError, ValueError) as error:  # ValueError: text that is not UTF-8
            yield num_rows + 1, BadRow(f"not readable as Parquet from here on: {error}")


def token_id_row(row: Row) -> ParsedRow:
    """Return what a row of a token-id log says, or raise `BadRow`."""
    prompt, response = (_token_ids(row, field) for field in TOKEN_ID_FIELDS)
    prompt_id, truncated = row.get("prompt_id"), row.get("truncated")
    return ParsedRow(
        rollout=Rollout(
            prompt_token_ids=prompt,
            response_token_ids=response,
            training_step=_whole_number(row, "training_step"),
            reward=_number(row, "reward"),
            request_id=_text(row, "request_id"),
            prompt_key=_whole_number(row, "prompt_key", bits=64) if type(row.get("prompt_key")) is int else None,
            response_mask=_mask(row, "response_mask", num_tokens=len(response)),
        ),
        sample=_whole_number(row, "sample"),
        prompt_id=str(prompt_id) if type(prompt_id) is int else _text(row, "prompt_id"),
        truncated=truncated if isinstance(truncated, bool) else None,
    )


def text_row(row: Row, *, tokenizer: Any) -> ParsedRow:
    """Return what a row of a verl dump says, or raise `BadRow`."""
    prompt, response = (_encoded(row, field, tokenizer) for field in TEXT_FIELDS)
    return ParsedRow(
        rollout=Rollout(
            prompt_token_ids=prompt,
            response_token_ids=response,
            training_step=_whole_number(row, "step"),
            reward=_number(row, "score"),
        )
    )


def _required(row: Row, field: str) -> Any:
    if field not in row:
        raise BadRow(f"{field} is missing; fields found: {_field_names(row)}", field)
    return row[field]


def _token_ids(row: Row, field: str) -> npt.NDArray[np.int32]:
    values = _required(row, field)
    if not isinstance(values, list):
        raise BadRow(f"{field} must be a list of token ids, not {_shown(values)}", field)
    try:
        ids = token_id_array(values, field)
    except TypeError:
        position = next(i for i, value in enumerate(values) if type(value) is not int)
        raise BadRow(f"{field}[{position}] is {_shown(values[position])}; token ids are integers", field) from None
    except ValueError as error:
        raise BadRow(str(error), field) from None
    return _non_empty(ids, field)


def _encoded(row: Row, field: str, tokenizer: Any) -> npt.NDArray[np.int32]:
    text = _required(row, field)
    if not isinstance(text, str):
        raise BadRow(f"{field} must be text, not {_shown(text)}", field)
    try:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
    except Exception as error:  # bare Exceptions of tokenizers: half a surrogate pair, a word the vocabulary lacks
        raise BadRow(f"{field} cannot be tokenised ({error}): {_shown(text)}", field) from None
    return _non_empty(token_id_array(ids, field), field)


def _non_empty(ids: npt.NDArray[np.int32], field: str) -> npt.NDArray[np.int32]:
    if len(ids) == 0:
        raise BadRow(f"{field} is empty; it must hold at least one token", field)
    return ids


def _whole_number(row: Row, field: str, *, bits: int = 63) -> int | None:
    value = row.get(field)
    if value is None:
        return None
    if type(value) is not int or not 0 <= value < 1 << bits:
        raise BadRow(f"{field} must be an integer, 0 <= {field} < 2**{bits}, not {_shown(value)}", field)
    return value


def _number(row: Row, field: str) -> float | None:
    value = row.get(field)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadRow(f"{field} must be a number, not {_shown(value)}", field)
    try:
        number = float(value)
    except OverflowError:  # an integer beyond the largest float
        number = math.inf
    if not math.isfinite(number):
        raise BadRow(f"{field} must be a finite number, not {_shown(value)}", field)
    return number


def _text(row: Row, field: str) -> str | None:
    value = row.get(field)
    if value is not None and not isinstance(value, str):
        raise BadRow(f"{field} must be text, not {_shown(value)}", field)
    return value


def _mask(row: Row, field: str, *, num_tokens: int) -> npt.NDArray[np.bool_] | None:
    values = row.get(field)
    if values is None:
        return None
    if not isinstance(values, list):
        raise BadRow(f"{field} must be a list of true and false, not {_shown(values)}", field)
    for position, value in enumerate(values):
        if type(value) not in (bool, int) or value not in (0, 1):
            raise BadRow(f"{field}[{position}] is {_shown(value)}; it must be true, false, 1 or 0", field)
    if len(values) != num_tokens:
        raise BadRow(f"{field} has {len(values)} entries; it must have {num_tokens}, one a response token", field)
    return np.array(values, dtype=np.bool_)


def _field_names(fields: Iterable[str]) -> str:
    return ", ".join(sorted(fields))[:200] or "none"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:120]}..."
