"""`das state`, saved states as logs, and rollouts as Arrow tables and Parquet files."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from rollout_samples import rollout
from state_samples import SAMPLES, as_values, contents

from das import Drafter, PriceBudget, RolloutHistory, load_state, save_state
from das.analysis import LogError, read_log, rollout_table, rollouts_of_table, write_parquet
from das.cli import main

EXAMPLE = Path(__file__).parent.parent / "examples" / "amc23_rollouts.jsonl.gz"


@pytest.fixture
def saved(tmp_path):
    history = RolloutHistory(window_epochs=9)
    history.add_many([sample for sample in SAMPLES if sample.request_id is None or sample.request_id.isascii()])
    save_state(tmp_path / "state", drafter=Drafter(history), policy=PriceBudget())
    return tmp_path / "state", history


def ran(capsys, *arguments):
    assert main([str(argument) for argument in arguments]) == 0
    return capsys.readouterr().out


def test_show(saved, capsys):
    path, history = saved
    found = json.loads(ran(capsys, "state", "show", path, "--json"))
    statistics = history.statistics()
    expected = {
        "directory": str(path),
        "num_prompts": statistics.num_prompts,
        "num_rollouts": statistics.num_rollouts,
        "num_tokens": statistics.num_tokens,
        "training_steps": {"min": 0, "max": 6},
        "num_bytes": (path / "rollouts-00000001.das").stat().st_size,
        "num_segments": 1,
        "history": {"window_epochs": 9, "max_bytes": 8 << 30, "max_common_tokens": 1 << 20},
        "num_predictions": 0.0,
        "policy": "PriceBudget",
    }
    assert found == expected
    text = ran(capsys, "state", "show", path)
    assert "10 rollouts of 4 prompts" in text
    assert "training steps 0 to 6" in text
    assert "state of a PriceBudget" in text
    for line in main_help(capsys, "state", "show"):
        assert line in {*expected, "num_prompts, num_rollouts, num_tokens"} or line.split(",")[0] in expected


def main_help(capsys, *command):
    """The keys that --help documents."""
    text = ran(capsys, *command, "--help").partition("Keys of --json:")[2].partition("Options:")[0]
    return [
        line.split("  ")[0] for line in text.replace("\n      ", "\n").split("\n") if line.strip() and line[0] != " "
    ]


def test_compact(saved, capsys):
    path, history = saved
    history.add(rollout([1], 9))
    save_state(path, history=history)
    assert json.loads(ran(capsys, "state", "compact", path, "--json"))["num_segments"] == 1
    assert "11 rollouts of 4 prompts" in ran(capsys, "state", "compact", path)
    again = RolloutHistory(window_epochs=9)
    load_state(path, history=again)
    assert contents(again) == contents(history)


def stored(history):
    """Everything but ordinals, which readers of logs count anew."""
    return [as_values(one)[:-1] for key in sorted(history.prompt_keys()) for one in history.rollouts(key)]


def test_an_export_is_named_as_the_log_that_it_is(saved, tmp_path, capsys):
    path, _ = saved
    assert main(["state", "export", str(path), str(tmp_path / "log.jsonl")]) == 2
    assert "log.jsonl does not end in .parquet" in capsys.readouterr().err
    assert not (tmp_path / "log.jsonl").exists()


def test_export_and_import(saved, tmp_path, capsys):
    path, history = saved
    assert "10 rollouts" in ran(capsys, "state", "export", path, tmp_path / "log.parquet")
    ran(capsys, "state", "import", tmp_path / "again", tmp_path / "log.parquet", "--window-epochs", "9")
    again = RolloutHistory(window_epochs=9)
    load_state(tmp_path / "again", history=again)
    assert stored(again) == stored(history)
    assert main(["state", "import", str(path), str(tmp_path / "log.parquet")]) == 1
    assert "it holds a saved state already" in capsys.readouterr().err


def test_a_state_is_read_like_a_log(tmp_path, capsys):
    ran(capsys, "state", "import", tmp_path / "state", EXAMPLE)
    one, other = (json.loads(ran(capsys, "inspect", log, "--json"))["total"] for log in (tmp_path / "state", EXAMPLE))
    assert one.pop("truncated_share") is None  # which no rollout tells
    assert one == {name: pytest.approx(value) for name, value in other.items() if name != "truncated_share"}
    read = [as_values(record.rollout) for record in read_log(tmp_path / "state")]
    assert sorted(read, key=str) == sorted([as_values(record.rollout) for record in read_log(EXAMPLE)], key=str)


def test_a_damaged_state_is_one_line(saved, capsys):
    path, _ = saved
    head = path / "state.das"
    head.write_bytes(head.read_bytes()[:-1])
    for command in (["state", "show"], ["state", "compact"], ["inspect"]):
        assert main([*command, str(path)]) == 1
        error = capsys.readouterr().err
        assert error.startswith(f"das: error: {head}: it is cut short")
        assert error.count("\n") == 1
    with pytest.raises(LogError, match="cut short"):
        list(read_log(path))


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["state"], 2, "A command is missing"),
        (["state", "show", "absent"], 1, "absent/state.das"),
        (["state", "import", "here", "absent.jsonl"], 1, "absent.jsonl: no such log"),
    ],
)
def test_errors(arguments, code, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == code
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- tables


def test_tables_hold_every_field():
    table = rollout_table(SAMPLES)
    assert table.schema.field("prompt_token_ids").type == pyarrow.list_(pyarrow.int32())
    found = [as_values(one) for one in rollouts_of_table(table)]
    shown = {"ä ☃ \udc80": "ä ☃ ?"}
    expected = [
        dataclasses.replace(one, ordinal=0, request_id=shown.get(one.request_id, one.request_id)) for one in SAMPLES
    ]
    assert found == [as_values(one) for one in expected]


def test_an_empty_table():
    assert list(rollouts_of_table(rollout_table([]))) == []


def test_a_row_that_is_no_rollout_is_named():
    table = rollout_table(SAMPLES[:1]).drop_columns("response_token_ids")
    with pytest.raises(ValueError, match="row 0: response_token_ids is missing"):
        list(rollouts_of_table(table))


def test_parquet_files_are_logs(tmp_path, monkeypatch):
    monkeypatch.setattr("das.analysis.rollout_tables._BATCH_ROLLOUTS", 4)
    rollouts = [rollout(np.arange(n + 1), n % 3, prompt=[n % 5], reward=float(n)) for n in range(10)]
    assert write_parquet(tmp_path / "log.parquet", rollouts) == 10
    assert pyarrow.parquet.ParquetFile(tmp_path / "log.parquet").num_row_groups == 3
    found = [record.rollout for record in read_log(tmp_path / "log.parquet")]
    assert [as_values(one) for one in found] == [as_values(one) for one in rollouts]
    (tmp_path / "log.parquet").write_text("before")
    with pytest.raises(ZeroDivisionError):
        write_parquet(tmp_path / "log.parquet", (1 // 0 for _ in range(3)))
    assert [(entry.name, entry.read_text()) for entry in tmp_path.iterdir()] == [("log.parquet", "before")]
