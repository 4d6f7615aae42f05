"""Whatever goes wrong with a file that a command reads or writes: one line, with the file's name and the reason."""

import os
import re
from pathlib import Path

import pytest
from command_runs import start
from log_samples import row, write

import das
from das.analysis.rollout_tables import write_parquet
from das.cli import main
from das.file_errors import naming_file

LONG = "x" * 300
# Names of what cannot be read: reading /proc/self/mem at 0 is an error, although it can be opened.
UNREADABLE = ["/proc/self/mem", "absent", "log.jsonl/inside", "loop", LONG]
READING = [
    ["inspect", "{}"],
    ["replay", "{}"],
    ["simulate", "{}"],
    ["compare", "{}"],
    ["replay", "log.jsonl", "--html", "report.html", "--tokenizer", "{}"],
    ["latency", "fit", "{}"],
    ["state", "show", "{}"],
    ["state", "compact", "{}"],
    ["state", "export", "{}", "rollouts.parquet"],
    ["state", "import", "new", "{}"],
]
# Of what cannot be written: full is a link to a device without room.
UNWRITABLE = ["full", "log.jsonl/inside", LONG, "absent/file", "/proc/absent"]
WRITING = [
    ["replay", "log.jsonl", "--html", "{}"],
    ["compare", "log.jsonl", "--policy", "none", "--html", "{}"],
    ["compare", "log.jsonl", "--policy", "none", "--plot", "{}.svg"],
    ["state", "export", "state", "{}.parquet"],
    ["state", "import", "{}/state", "log.jsonl"],
]
# A state makes the folders that it lies in.
NOT_WRITTEN = [
    (args, name) for args in WRITING for name in UNWRITABLE if ("import" in args, name) != (True, "absent/file")
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write(tmp_path / "log.jsonl", row(), row(training_step=4))
    history = das.RolloutHistory()
    history.add(das.Rollout(prompt_token_ids=[1], response_token_ids=[2, 3]))
    das.save_state(tmp_path / "state", history=history)
    (tmp_path / "loop").symlink_to("loop")
    for name in ("full", "full.svg", "full.parquet"):
        (tmp_path / name).symlink_to("/dev/full")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", UNREADABLE, ids=lambda name: name[:20])
@pytest.mark.parametrize("args", READING, ids=" ".join)
def test_what_cannot_be_read(folder: Path, args: list[str], name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([part.format(name) for part in args]) == 1
    output, errors = capsys.readouterr()
    assert output == ""
    assert re.fullmatch(rf"das: error: {name}.*: [A-Za-z].*\n", errors)
    assert "[Errno" not in errors


@pytest.mark.parametrize(("args", "name"), NOT_WRITTEN, ids=lambda part: part[:20] if isinstance(part, str) else None)
def test_what_cannot_be_written(folder: Path, args: list[str], name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([part.format(name) for part in args]) in (1, 2)
    _, errors = capsys.readouterr()
    assert re.fullmatch(r"das: error: .+\n", errors)
    assert name.partition("/inside")[0].removesuffix("/file") in errors
    assert "[Errno" not in errors
    assert os.stat("/dev/full").st_rdev == os.makedev(1, 7)


@pytest.mark.parametrize("args", [["inspect"], ["replay"], ["inspect", "--json"], ["--help"]], ids=" ".join)
def test_a_full_disk_behind_stdout(folder: Path, args: list[str]) -> None:
    with open("/dev/full", "w") as full:
        process = start(*args, *["log.jsonl"] * ("--help" not in args), stdout=full)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (1, "das: error: stdout: No space left on device\n")


def test_an_export_replaces_files_and_nothing_else(folder: Path) -> None:
    rollouts = list(das.load_state(folder / "state").rollouts())
    (folder / "link").symlink_to("target")
    for _ in range(2):
        assert write_parquet("link", rollouts) == 1
        assert (folder / "link").is_symlink()
        assert (folder / "target").is_file()
    for name in ("/dev/full", "state"):
        with pytest.raises(FileExistsError, match="is there, and no file that could be replaced"):
            write_parquet(name, rollouts)
    assert sorted(path.name for path in folder.glob("*.tmp")) == []


def test_a_name_that_is_there_stays() -> None:
    for raised, told in (
        (OSError(28, "No space left on device"), "a file"),
        (OSError(2, "No such file", "other"), "other"),
        (OSError("says all by itself"), None),
    ):
        with pytest.raises(OSError, match=r".") as caught, naming_file(Path("a file")):
            raise raised
        assert caught.value.filename == told
