"""Every way a log can be wrong, each with the file, line and field its error names; and skipping it."""

import gzip
import json
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from log_samples import parquet, read_skipping, responses, row, verl, without, word_tokenizer, write

from das.analysis import LogError, read_log, read_logs


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    return word_tokenizer(tmp_path)


# Rows that are no rollout.

BAD_ROWS = [
    (without("prompt_token_ids"), "prompt_token_ids", "prompt_token_ids is missing; fields found: prompt_id, "),
    (without("response_token_ids"), "response_token_ids", "response_token_ids is missing"),
    (row(prompt_token_ids=None), "prompt_token_ids", "prompt_token_ids must be a list of token ids, not None"),
    (row(prompt_token_ids="12"), "prompt_token_ids", "prompt_token_ids must be a list of token ids, not '12'"),
    (row(response_token_ids={"a": 1}), "response_token_ids", "response_token_ids must be a list of token ids"),
    (row(prompt_token_ids=[]), "prompt_token_ids", "prompt_token_ids is empty"),
    (row(response_token_ids=[]), "response_token_ids", "response_token_ids is empty"),
    (row(response_token_ids=[1, -4]), "response_token_ids", r"response_token_ids\[1\] is -4; .*0 <= id < 2\*\*31"),
    (row(response_token_ids=[2**31]), "response_token_ids", r"response_token_ids\[0\] is 2147483648; "),
    (row(response_token_ids=[10**30]), "response_token_ids", r"response_token_ids\[0\] is 10+; "),
    (row(response_token_ids=[1, 2.0]), "response_token_ids", r"response_token_ids\[1\] is 2\.0; token ids are int"),
    (row(response_token_ids=[True]), "response_token_ids", r"response_token_ids\[0\] is True; token ids are int"),
    (row(prompt_token_ids=[[1]]), "prompt_token_ids", r"prompt_token_ids\[0\] is \[1\]; token ids are int"),
    (row(training_step="3"), "training_step", "training_step must be an integer, .* not '3'"),
    (row(training_step=3.0), "training_step", "training_step must be an integer, .* not 3.0"),
    (row(training_step=-1), "training_step", r"training_step must be an integer, 0 <= .* not -1"),
    (
        row(training_step=2**62),
        "training_step",
        r"training_step must be an integer, .*2\*\*62, not 4611686018427387904",
    ),
    (row(training_step=2**63), "training_step", "training_step must be an integer"),
    (row(sample=True), "sample", "sample must be an integer, .* not True"),
    (row(reward="high" * 1000), "reward", "reward must be a number, not 'high"),
    (row(reward=True), "reward", "reward must be a number, not True"),
    (row(reward=float("nan")), "reward", "reward must be a finite number, not nan"),
    (row(reward=10**400), "reward", "reward must be a finite number, not 10"),
    (row(request_id=5), "request_id", "request_id must be text, not 5"),
    (row(prompt_id=[1]), "prompt_id", r"prompt_id must be text, not \[1\]"),
    (row(response_mask=[True]), "response_mask", "response_mask has 1 entries; it must have 3"),
    (row(response_mask="yes"), "response_mask", "response_mask must be a list of true and false, not 'yes'"),
    (row(response_mask=[1, 0, 2]), "response_mask", r"response_mask\[2\] is 2; it must be true, false"),
    (row(response_mask=[1, None, 0]), "response_mask", r"response_mask\[1\] is None; "),
    (
        '{"prompt_token_ids": [1, 2',
        None,
        "the line is cut off inside its JSON object, behind '.*: .1, 2': its writer was",
    ),
    (
        '{"prompt_token_ids": {"a": 1}',
        None,
        "the line is cut off inside its JSON object, behind '.*1}': its writer was",
    ),
    ('{"prompt_token_ids": 1 2}', None, "malformed JSON at column 24: .*, near '2}"),
    ('{"prompt_token_ids": 01}', None, "malformed JSON at column "),
    ('"prompt_token_ids": [1', None, "malformed JSON at column "),
    ("9" * 5000, None, "malformed JSON: "),
    ("[" * 100_000, None, "malformed JSON: "),
    ("[1, 2]", None, r"a row must be a JSON object, not list: \[1, 2\]"),
    ("null", None, "a row must be a JSON object, not NoneType"),
    (b"\x00\xff\xfe junk", None, "not UTF-8 text"),
]


@pytest.mark.parametrize(("bad_row", "field", "message"), BAD_ROWS)
def test_bad_row(tmp_path: Path, bad_row: object, field: str | None, message: str) -> None:
    path = write(tmp_path / "log.jsonl", row(), "", bad_row, row())
    with pytest.raises(LogError, match=rf"log\.jsonl:3: {message}") as caught:
        list(read_log(path))
    assert (caught.value.path, caught.value.line, caught.value.field) == (str(path), 3, field)
    records, [error] = read_skipping(path)
    assert len(records) == 2
    assert str(error) == str(caught.value)
    assert len(str(error)) - len(str(path)) < 300


def test_unrecognised_first_row_names_its_fields(tmp_path: Path) -> None:
    path = write(tmp_path / "log.jsonl", {"question": "a", "answer": "b"}, row())
    with pytest.raises(
        LogError, match=r"log\.jsonl:1: the fields fit no known format \(das, .* fields found: answer, question$"
    ):
        list(read_log(path))
    records, bad = read_skipping(path)  # the first row that fits decides
    assert (len(records), len(bad)) == (1, 1)


# Logs that cannot be read.


def test_missing_log_is_reported_by_the_call_itself(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"absent\.jsonl: no such log file or directory"):
        read_log(tmp_path / "absent.jsonl")


def test_directory_without_logs(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("{}")
    with pytest.raises(LogError, match=r"the directory holds no logs \(\.jsonl, \.jsonl\.gz, \.parquet, \.pt\)"):
        read_log(tmp_path)


def test_paths_must_be_several_and_not_one(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="paths must be a sequence of paths"):
        read_logs(str(tmp_path))
    with pytest.raises(ValueError, match="paths is empty"):
        read_logs([])


@pytest.mark.parametrize("name", ["log.jsonl", "log.jsonl.gz"])
@pytest.mark.parametrize("content", [b"", b"\n \n"])
def test_empty_log(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    with pytest.raises(LogError, match=rf"{name}: the file holds no rows"):
        list(read_log(path))


def test_empty_parquet(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist([row()]).slice(0, 0), tmp_path / "log.parquet")
    with pytest.raises(LogError, match=r"log\.parquet: the file holds no rows"):
        list(read_log(tmp_path / "log.parquet"))


def test_no_usable_row_stays_an_error_when_skipping(tmp_path: Path) -> None:
    path = write(tmp_path / "log.jsonl", row(prompt_token_ids=[]), "junk")
    with pytest.raises(LogError, match=r"log\.jsonl: no usable row, 2 bad; the first: .*:1: prompt_token_ids is empty"):
        read_skipping(path)


def test_empty_file_in_a_directory_can_be_skipped(tmp_path: Path) -> None:
    write(tmp_path / "1.jsonl", row())
    write(tmp_path / "2.jsonl")
    records, [error] = read_skipping(tmp_path)
    assert len(records) == 1
    assert "2.jsonl: the file holds no rows" in str(error)


def test_truncated_gzip_gives_the_rows_before_the_cut(tmp_path: Path) -> None:
    whole = write(tmp_path / "log.jsonl.gz", *[row(response_token_ids=[i * i, i]) for i in range(2000)])
    path = tmp_path / "cut.jsonl.gz"
    path.write_bytes(whole.read_bytes()[:-3000])
    records, [error] = read_skipping(path)
    assert 500 < len(records) < 2000
    assert responses(records)[-1] == [(len(records) - 1) ** 2, len(records) - 1]
    assert error.line == len(records) + 1
    assert (
        str(error)
        == f"{path}:{error.line}: the gzip stream is cut off here: its writer was stopped, or is still writing"
    )
    strict = read_log(path)
    with pytest.raises(LogError, match=rf"cut\.jsonl\.gz:{error.line}: the gzip stream is cut off"):
        list(strict)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("not gzip at all", "not a gzip file, although its name ends in .gz"),
        ("flipped byte", "the gzip stream is damaged here"),
        ("garbage behind", "the gzip stream is damaged here"),
    ],
)
def test_damaged_gzip_names_the_file(tmp_path: Path, damage: str, message: str) -> None:
    data = bytearray(gzip.compress(b"".join(json.dumps(row(sample=i)).encode() + b"\n" for i in range(300))))
    if damage == "flipped byte":
        data[len(data) // 2] ^= 0xFF
    path = tmp_path / "log.jsonl.gz"
    path.write_bytes(b"plain text" if damage == "not gzip at all" else data + b"junk" * (damage == "garbage behind"))
    with pytest.raises(LogError, match=rf"log\.jsonl\.gz:\d+: {message}: "):
        list(read_log(path))


@pytest.mark.parametrize("newline", [b"", b"\n", b"\r\n"])
def test_a_line_cut_off_anywhere_is_called_that(tmp_path: Path, newline: bytes) -> None:
    """A log that is still being written, or whose writer was stopped, ends at any byte."""
    line = json.dumps(row(prompt_id='\u00e9\\"\U0001f600', reward=-0.5e-3, truncated=True), ensure_ascii=False).encode()
    for end in range(1, len(line)):
        path = tmp_path / "log.jsonl"
        path.write_bytes(line + b"\n" + line[:end] + newline)
        message = (
            r"log\.jsonl:2: the line is cut off inside .*, behind '.*: its writer was stopped, or is still writing$"
        )
        if newline and line[end] & 0xC0 == 0x80:  # half a character and then a newline is no text at all
            message = r"log\.jsonl:2: not UTF-8 text"
        with pytest.raises(LogError, match=message) as caught:
            list(read_log(path))
        assert (caught.value.path, caught.value.line) == (str(path), 2)


def test_a_gzip_log_cut_off_anywhere_names_file_and_line(tmp_path: Path) -> None:
    whole = gzip.compress(b"".join(json.dumps(row(sample=i)).encode() + b"\n" for i in range(30)))
    for end in range(2, len(whole)):
        path = tmp_path / "log.jsonl.gz"
        path.write_bytes(whole[:end])
        with pytest.raises(
            LogError, match=r"log\.jsonl\.gz:\d+: the gzip stream is cut off here: its writer"
        ) as caught:
            list(read_log(path))
        assert caught.value.line is not None


def test_overlong_line_is_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("das.analysis.containers.json_lines.MAX_ROW_BYTES", 1000)
    records, [error] = read_skipping(write(tmp_path / "log.jsonl", row(), "x" * 5000, row()))
    assert len(records) == 1
    assert (error.line, "longer than 1000 bytes" in str(error)) == (2, True)


@pytest.mark.parametrize("package", ["pyarrow", "tokenizers"])
def test_a_missing_package_names_the_extra(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    path = parquet(tmp_path / "1.parquet", row()) if package == "pyarrow" else write(tmp_path / "1.jsonl", verl(1))
    with pytest.raises(ImportError, match=rf"needs {package}: pip install {package} \(das with its extra 'analysis'"):
        list(read_log(path, tokenizer=tokenizer))


# Parquet.


def test_parquet_row_with_null_token_ids_names_row_and_field(tmp_path: Path) -> None:
    path = parquet(tmp_path / "log.parquet", row(), row(response_token_ids=None), row(response_token_ids=[1, None]))
    records, bad = read_skipping(path)
    assert len(records) == 1
    assert [(error.line, error.field) for error in bad] == [(2, "response_token_ids"), (3, "response_token_ids")]
    assert "response_token_ids[1] is None; token ids are integers" in str(bad[1])


def test_parquet_with_other_columns_names_them(tmp_path: Path) -> None:
    path = parquet(tmp_path / "log.parquet", {"answer": "x", "step": 1, "question": "y"})
    with pytest.raises(LogError, match=r"log.parquet:1: the fields fit no .* fields found: step$"):
        list(read_log(path))
    path = parquet(tmp_path / "other.parquet", {"answer": "x", "question": "y"})
    with pytest.raises(LogError, match=r"other.parquet:1: the fields fit no .* fields found: answer, question$"):
        list(read_log(path))


@pytest.mark.parametrize("content", [b"", b"no parquet at all", b"PAR1" + bytes(40) + b"PAR1"])
def test_damaged_parquet_names_the_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "log.parquet"
    path.write_bytes(content)
    with pytest.raises(LogError, match=r"log\.parquet:1: not readable as Parquet"):
        list(read_log(path))


def test_parquet_text_that_is_not_utf8(tmp_path: Path) -> None:
    offsets, text = pa.py_buffer(np.array([0, 1, 2, 3], np.int32)), pa.py_buffer(b"a\xffb")
    table = pa.Table.from_pylist([row()] * 3)
    broken = pa.Array.from_buffers(pa.string(), 3, [None, offsets, text])
    pq.write_table(
        table.set_column(table.schema.get_field_index("prompt_id"), "prompt_id", broken), tmp_path / "l.parquet"
    )
    with pytest.raises(LogError, match=r"l\.parquet:2: a column cannot be decoded: .*utf-8"):
        list(read_log(tmp_path / "l.parquet"))
    assert len(read_skipping(tmp_path / "l.parquet")[0]) == 2


@pytest.mark.parametrize("field", ["reward", "training_step", "prompt_id"])
@pytest.mark.parametrize(
    ("arrow_type", "value"),
    [
        (pa.date32(), 2**30),
        (pa.date64(), 86_400_000 * 10**11),
        (pa.duration("s"), 2**62),
        (pa.duration("us"), 2**62),
        (pa.duration("ns"), 2**62 + 1),
        (pa.time64("us"), 2**62),
        (pa.timestamp("us"), 2**62),
        (pa.timestamp("ns"), 2**62 + 1),
        (pa.timestamp("s", tz="+25:00"), 5),
    ],
    ids=str,
)
def test_parquet_times_beyond_those_of_python(tmp_path: Path, arrow_type: pa.DataType, value: int, field: str) -> None:
    stored = pa.array([None, value, None], pa.int32() if arrow_type.bit_width == 32 else pa.int64()).view(arrow_type)
    table = pa.Table.from_pylist([row()] * 3)
    fields = [name for name in table.column_names if name != field]
    pq.write_table(table.select(fields).append_column(field, stored), tmp_path / "l.parquet")
    records, bad = read_skipping(tmp_path / "l.parquet")
    assert (len(records), [error.line for error in bad]) == (2, [2])


def test_a_damaged_byte_anywhere_in_parquet_is_an_error_of_the_log(tmp_path: Path) -> None:
    path = parquet(tmp_path / "l.parquet", row())
    whole, messages = path.read_bytes(), []
    for position in range(0, len(whole), 5):
        path.write_bytes(whole[:position] + b"\xff" + whole[position + 1 :])
        try:
            list(read_log(path, progress=lambda done, total: None))
        except LogError as error:
            messages.append(str(error))
    assert len(messages) > 50
    assert all("l.parquet:" in message for message in messages)


# verl dumps.


def test_text_log_without_tokenizer_says_what_to_pass_even_when_skipping(tmp_path: Path) -> None:
    path = write(tmp_path / "1.jsonl", verl(1))
    with pytest.raises(LogError, match=r"1\.jsonl:1: .*tokenizer\.json.*--tokenizer"):
        list(read_log(path, skip_bad=True))


@pytest.mark.parametrize(
    ("bad_row", "field", "message"),
    [
        (verl(1, ""), "output", "output is empty"),
        (verl(1, "\ud800"), "output", "output cannot be tokenised"),
        (verl(1, input=["what"]), "input", r"input must be text, not \['what'\]"),
        ({"input": "what", "step": 1}, "output", "output is missing; fields found: input, step"),
        (verl(1) | {"step": "2"}, "step", "step must be an integer, .*not '2'"),
        (verl(1, score=[1]), "score", r"score must be a number, not \[1\]"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*tokenised again")
def test_bad_verl_row(tmp_path: Path, tokenizer: Path, bad_row: object, field: str, message: str) -> None:
    path = write(tmp_path / "1.jsonl", verl(1), bad_row)
    with pytest.raises(LogError, match=rf"1\.jsonl:2: {message}") as caught:
        list(read_log(path, tokenizer=tokenizer))
    assert (caught.value.line, caught.value.field) == (2, field)


def test_tokenizer_file_that_is_missing_or_none(tmp_path: Path) -> None:
    log, junk = write(tmp_path / "1.jsonl", verl(1)), write(tmp_path / "junk.json", "{}")
    with pytest.raises(FileNotFoundError, match=r"absent\.json: no such tokenizer file"):
        read_log(log, tokenizer=tmp_path / "absent.json")
    with pytest.raises(LogError, match=r"junk\.json: not a tokenizer\.json"):
        list(read_log(log, tokenizer=junk))
