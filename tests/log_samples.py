"""Rows and files for the tests that read logs."""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from das.analysis import LogError, LogRecord, read_log


def row(**changes: object) -> dict[str, object]:
    fields = {"training_step": 3, "prompt_id": "q1", "sample": 0, "prompt_token_ids": [1, 2], "reward": 0.5}
    return fields | {"response_token_ids": [7, 8, 9]} | changes


def without(field: str) -> dict[str, object]:
    return {name: value for name, value in row().items() if name != field}


def write(path: Path, *rows: object) -> Path:
    """Write each row as a line of JSON; text and bytes as they are."""
    lines = [r if isinstance(r, bytes) else (r if isinstance(r, str) else json.dumps(r)).encode() for r in rows]
    data = b"".join(line + b"\n" for line in lines)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def responses(records: list[LogRecord]) -> list[list[int]]:
    return [record.rollout.response_token_ids.tolist() for record in records]


def read_skipping(path: Path, **options: object) -> tuple[list[LogRecord], list[LogError]]:
    bad: list[LogError] = []
    return list(read_log(path, skip_bad=True, on_bad=bad.append, **options)), bad


def verl(step: int, output: str = "it is it", **changes: object) -> dict[str, object]:
    return {"input": "what is it", "output": output, "gts": None, "score": 1.0, "step": step, "acc": True} | changes


def extent_of(log: Path, *, num_rows: int) -> dict[str, object]:
    """What `--json` says of a log that was read whole, as token ids."""
    extent = {"logs": [str(log)], "formats": {"das": num_rows}, "partial": False}
    return extent | {"num_bad_rows": 0, "num_later_turns": 0}


def parquet(path: Path, *rows: dict[str, object]) -> Path:
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return path


def word_tokenizer(folder: Path) -> Path:
    """Whole words; the file asks for truncation, padding and an end token, none of which a log reader may obey."""
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "what": 1, "is": 2, "it": 3, "[END]": 4}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(single="$A [END]", special_tokens=[("[END]", 4)])
    words.enable_truncation(2)
    words.enable_padding(length=9)
    path = folder / "tokenizer.json"
    words.save(str(path))
    return path
