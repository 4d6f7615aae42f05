"""What commands say about the logs they read: the format, later turns; and logs with tool output through replay."""

import json
from pathlib import Path

import pytest
from log_samples import row, verl, word_tokenizer, write

from das.cli import main

DUMP = Path(__file__).parent / "data" / "slime_rollout_7.pt"


def found(capsys: pytest.CaptureFixture[str], *args: object) -> dict:
    assert main([*map(str, args), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("command", ["inspect", "replay", "simulate", "compare"])
def test_every_command_names_format_and_later_turns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    log = write(tmp_path / "log.jsonl", row(), row(prompt_token_ids=[1, 2, 7, 8, 9, 3]))
    read = found(capsys, command, log)
    assert (read["formats"], read["num_later_turns"]) == ({"das": 2}, 1)
    assert main([command, str(log)]) == 0
    assert "Log format: das; rows that are later turns: 1." in capsys.readouterr().out


def test_several_formats_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = write(tmp_path / "log.jsonl", row())
    assert found(capsys, "inspect", DUMP, log)["formats"] == {"slime": 5, "das": 1}
    assert main(["inspect", str(DUMP), str(log)]) == 0
    assert "Log format: slime, das.\n" in capsys.readouterr().out


def test_format_is_forced_by_its_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    both = write(tmp_path / "log.jsonl", row() | verl(1))
    assert found(capsys, "inspect", both)["formats"] == {"das": 1}
    forced = ["inspect", both, "--format", "verl", "--tokenizer", word_tokenizer(tmp_path)]
    assert found(capsys, *forced)["formats"] == {"verl": 1}
    assert main(["inspect", str(both), "--format", "vrel"]) == 2
    assert "'vrel' is not one of 'das', 'open-instruct', 'slime'" in capsys.readouterr().err


def test_tool_output_of_a_trainers_log_is_never_drafted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two answers of four tokens around tool output of five, twice in the same words."""
    ids, mask = [1, *range(10, 14), *range(50, 55), *range(20, 24)], [0, *[1] * 4, *[0] * 5, *[1] * 4]
    for step in (1, 2):
        sample = {"token_ids": ids, "input_lengths": len(ids), "token_loss_mask": mask, "rewards": 1.0}
        write(tmp_path / f"train_data_step{step}.jsonl", sample)
    first, second = found(capsys, "replay", tmp_path, "--policy", "unlimited")["batches"]
    assert (first["num_emitted_tokens"], second["num_emitted_tokens"]) == (8, 8)
    assert first["num_decode_steps"] == 8
    assert second["num_decode_steps"] == 2  # each answer is drafted as a whole, and not a token more
    assert second["num_drafted_tokens"] == second["num_accepted_tokens"] == 8
    projected = found(capsys, "simulate", tmp_path, "--policy", "unlimited")
    assert projected["with_drafts"]["num_decode_steps"] == 10
