"""Reading logs: every format, what arrives in a record, and in which order."""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from log_samples import parquet, responses, row, verl, without, word_tokenizer, write

from das.analysis import read_log, read_logs
from das.analysis.logs import log_files


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    return word_tokenizer(tmp_path)


# Token-id logs.


@pytest.mark.parametrize("name", ["log.jsonl", "log.jsonl.gz", "log_without_suffix"])
def test_every_field_arrives(tmp_path: Path, name: str) -> None:
    ids = [0, 2**31 - 1, 9]
    full = row(
        response_token_ids=ids,
        request_id="r-9",
        response_mask=[True, False, 1],
        sample=5,
        truncated=True,
        logprobs=[0.1],
        other={},
    )
    path = write(tmp_path / name, full)
    [record] = read_log(path)
    rollout = record.rollout
    assert rollout.prompt_token_ids.tolist() == [1, 2]
    assert rollout.response_token_ids.tolist() == ids
    assert (rollout.training_step, rollout.reward, rollout.request_id, rollout.ordinal) == (3, 0.5, "r-9", 0)
    assert rollout.response_mask is not None
    assert rollout.response_mask.tolist() == [True, False, True]
    assert (record.prompt_id, record.sample, record.truncated) == ("q1", 5, True)
    assert record.location == f"{path}:1"


def test_only_the_token_ids_are_required(tmp_path: Path) -> None:
    bare = {"prompt_token_ids": [1], "response_token_ids": [2]}
    nulls = bare | dict.fromkeys(["training_step", "reward", "prompt_id", "sample", "request_id", "response_mask"])
    for record in read_log(write(tmp_path / "log.jsonl", bare, nulls)):
        rollout = record.rollout
        known = rollout.training_step, rollout.reward, rollout.request_id, rollout.response_mask
        assert (*known, record.prompt_id, record.truncated) == (None,) * 6


def test_rows_come_in_file_order_with_their_line_numbers(tmp_path: Path) -> None:
    first, last = json.dumps(row()).encode(), json.dumps(row(response_token_ids=[4], prompt_id=17)).encode()
    path = tmp_path / "log.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + first + b"\n\n  \n" + last)  # byte order mark, blank lines, no last newline
    records = list(read_log(path))
    assert responses(records) == [[7, 8, 9], [4]]
    assert [record.location for record in records] == [f"{path}:1", f"{path}:4"]
    assert [record.prompt_id for record in records] == ["q1", "17"]


def test_equal_responses_of_one_prompt_and_step_count_on(tmp_path: Path) -> None:
    same, other_step, other_prompt = row(), row(training_step=4), row(prompt_token_ids=[5])
    rows = [same, other_step, same, row(response_token_ids=[1]), other_prompt, same, other_step]
    records = list(read_log(write(tmp_path / "log.jsonl", *rows)))
    assert [record.rollout.ordinal for record in records] == [0, 0, 1, 0, 0, 2, 1]


def test_ordinals_count_on_across_logs(tmp_path: Path) -> None:
    paths = [write(tmp_path / name, row()) for name in ("a.jsonl", "b.jsonl.gz")]
    records = list(read_logs(paths))
    assert [record.rollout.ordinal for record in records] == [0, 1]
    assert [record.location for record in records] == [f"{path}:1" for path in paths]


def test_missing_samples_are_counted_within_prompt_and_step(tmp_path: Path) -> None:
    rows = [without("sample"), without("sample") | {"training_step": 4}, without("sample"), row(sample=9)]
    assert [record.sample for record in read_log(write(tmp_path / "log.jsonl", *rows))] == [0, 0, 1, 9]


def test_a_row_is_handed_out_before_the_next_is_written() -> None:
    read_end, write_end = os.pipe()
    records = read_log(f"/dev/fd/{read_end}")
    os.write(write_end, json.dumps(row()).encode() + b"\n")
    assert responses([next(records)]) == [[7, 8, 9]]
    os.close(write_end)
    assert list(records) == []
    os.close(read_end)


# Parquet.


def test_parquet_holds_what_json_lines_hold(tmp_path: Path) -> None:
    rows = [row(response_token_ids=[i, i + 1], response_mask=[True, i % 2 == 0], sample=i) for i in range(200)]
    rows += [row(), row()]
    from_json = list(read_log(write(tmp_path / "log.jsonl", *rows)))
    from_parquet = list(read_log(parquet(tmp_path / "log.parquet", *rows)))
    for a, b in zip(from_json, from_parquet, strict=True):
        assert responses([a]) == responses([b])
        assert a.rollout.prompt_key == b.rollout.prompt_key
        assert np.array_equal(a.rollout.response_mask, b.rollout.response_mask)  # type: ignore[arg-type]
        for field in ("training_step", "reward", "request_id", "ordinal"):
            assert getattr(a.rollout, field) == getattr(b.rollout, field)
        assert (a.prompt_id, a.sample) == (b.prompt_id, b.sample)
    assert from_parquet[-1].location == f"{tmp_path / 'log.parquet'}:202"


def test_progress_rises_to_the_size_of_all_logs(tmp_path: Path) -> None:
    rows = [row()] * 100
    paths = [write(tmp_path / "a.jsonl", *rows), write(tmp_path / "b.jsonl.gz", *rows)]
    paths.append(parquet(tmp_path / "c.parquet", *rows))
    calls: list[tuple[int, int]] = []
    assert len(list(read_logs(paths, progress=lambda done, total: calls.append((done, total))))) == 300
    size = sum(path.stat().st_size for path in paths)
    assert calls == sorted(calls)
    assert {total for _, total in calls} == {size}
    assert calls[-1] == (size, size)
    assert 0 < calls[0][0] < size


# verl dumps.


def test_verl_dumps_are_read_in_the_order_of_their_steps(tmp_path: Path, tokenizer: Path) -> None:
    folder = tmp_path / "dump"
    folder.mkdir()
    for step in (10, 9, 2):
        write(folder / f"{step}.jsonl", verl(step), verl(step, "it what"))
    (folder / "notes.txt").write_text("not a log")
    (folder / ".11.jsonl").write_text("being written")
    with pytest.warns(UserWarning, match="token ids can differ .* end-of-sequence tokens are missing") as caught:
        records = list(read_log(folder, tokenizer=tokenizer))
    assert len(caught) == 1
    assert [record.rollout.training_step for record in records] == [2, 2, 9, 9, 10, 10]
    assert records[0].rollout.prompt_token_ids.tolist() == [1, 2, 3]
    assert responses(records)[:2] == [[3, 2, 3], [3, 1]]  # neither cut, padded nor ended
    assert [record.sample for record in records] == [0, 1, 0, 1, 0, 1]
    assert records[-1].location == f"{folder / '10.jsonl'}:2"
    assert (records[0].rollout.reward, records[0].prompt_id) == (1.0, None)


def test_token_id_log_ignores_the_tokenizer_and_does_not_warn(tmp_path: Path, tokenizer: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(list(read_log(write(tmp_path / "log.jsonl", row()), tokenizer=tokenizer))) == 1


def test_numbers_in_file_names_sort_as_numbers(tmp_path: Path) -> None:
    names = ["step2_a.jsonl", "step10_a.jsonl", "step10_b.jsonl.gz", "x.parquet"]
    for name in reversed(names):
        (tmp_path / name).touch()
    (tmp_path / "sub.jsonl").mkdir()
    assert [path.name for path in log_files(tmp_path)] == names


def test_import_is_light() -> None:
    code = (
        "import sys, das.analysis; print([m for m in ('pyarrow', 'tokenizers', 'rich', 'click') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_file_that_is_there_by_two_names_counts_once(tmp_path):
    folder = tmp_path / "dumps"
    folder.mkdir()
    first = folder / "1.jsonl"
    first.write_text('{"prompt_token_ids": [1], "response_token_ids": [2, 3]}\n')
    (folder / "latest.jsonl").symlink_to("1.jsonl")
    os.link(first, folder / "linked.jsonl")
    with pytest.warns(UserWarning, match=r"is left out: it is .*1\.jsonl by another name") as warned:
        records = list(read_logs([folder, first]))
    assert len(records) == 1
    assert len(warned) == 3
