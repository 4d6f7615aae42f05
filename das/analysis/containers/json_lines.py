"""Rows of a file of JSON lines, plain or gzipped, one line in memory; pipes, too."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable
from io import BufferedReader
from pathlib import Path
from typing import IO, cast

from das.analysis.containers.numbered_rows import MAX_ROW_BYTES, NumberedRows
from das.analysis.fields import BadRow, Row, shown
from das.file_errors import naming_file

_CUT_OFF = "its writer was stopped, or is still writing"


def json_rows(file: Path, *, report: Callable[[int], None]) -> NumberedRows:
    """Yield line number and JSON object of each line that is not blank; `report` gets the bytes read so far."""
    with naming_file(file), open(file, "rb") as raw, _decompressed(raw, file) as lines:
        line = 0
        while True:
            line += 1
            try:
                data = lines.readline(MAX_ROW_BYTES + 1)
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
            if len(data) > MAX_ROW_BYTES:
                yield line, BadRow(f"the line is longer than {MAX_ROW_BYTES} bytes; the file is not read further")
                return
            if not data.isspace():
                yield line, _json_object(data)
            if raw.seekable():
                report(raw.tell())


def _decompressed(raw: BufferedReader, file: Path) -> IO[bytes]:
    """What is gzipped says so in its first bytes, whatever it is called: a pipe has no name of its own."""
    is_gzip = file.name.endswith(".gz") or raw.peek(2)[:2] == b"\x1f\x8b"
    return cast(IO[bytes], gzip.GzipFile(fileobj=raw)) if is_gzip else raw


def _json_object(data: bytes) -> Row | BadRow:
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if error.reason == "unexpected end of data":
            before = shown(_end(data[: error.start].decode(errors="replace")))
            return BadRow(f"the line is cut off inside a character, behind {before}: {_CUT_OFF}")
        return BadRow(f"not UTF-8 text (logs are .jsonl, .jsonl.gz, .parquet or .pt): {shown(data[:40])}")
    try:
        row = json.loads(text)
    except json.JSONDecodeError as error:
        if _is_cut_off(text.strip(), error):
            return BadRow(f"the line is cut off inside its JSON object, behind {shown(_end(text))}: {_CUT_OFF}")
        near = shown(text[error.pos : error.pos + 40])
        return BadRow(f"malformed JSON at column {error.colno}: {error.msg}, near {near}")
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits; thousands of brackets
        return BadRow(f"malformed JSON: {error}")
    if not isinstance(row, dict):
        return BadRow(f"a row must be a JSON object, not {type(row).__name__}: {shown(row)}")
    return row


def _is_cut_off(text: str, error: json.JSONDecodeError) -> bool:
    """Whether an object begins and does not end, rather than holding something that is no JSON."""
    ends_inside = error.pos >= len(error.doc.rstrip()) or error.msg.startswith("Unterminated string")
    return text.startswith("{") and (ends_inside or not text.endswith("}"))


def _end(text: str) -> str:
    return text.rstrip()[-40:]
