"""How a process of the `das` command ends when nobody reads it, on narrow terminals, and by Ctrl-C at any time."""

import fcntl
import os
import pty
import random
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from command_runs import COMMAND, REPOSITORY, all_shown, start
from log_samples import write

RESPONSE = list(range(100, 120))
COMMANDS = [["inspect"], ["inspect", "--json"], ["replay"], ["replay", "--json"]]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Large figures: 24,000 tokens in two steps, in two batches each."""
    return write(
        tmp_path / "log.jsonl",
        *(
            {
                "prompt_token_ids": [prompt],
                "response_token_ids": list(range(1000 * step, 1000 * step + 1_000)),
                "training_step": 1000 + step,
                "reward": 0.125,
                "truncated": False,
            }
            for step in range(2)
            for prompt in range(4)
            for _ in range(3)
        ),
    )


# Nobody reads.


@pytest.mark.parametrize("args", [*COMMANDS, ["--help"], ["replay", "--help"]], ids=" ".join)
def test_a_reader_that_has_gone_ends_the_command_silently(log: Path, args: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    process = start(*args, *[log] * ("--help" not in args), stdout=writing)
    os.close(writing)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (1, "")


@pytest.mark.parametrize("args", COMMANDS, ids=" ".join)
def test_piped_into_head(log: Path, args: list[str]) -> None:
    command = " ".join(f"'{word}'" for word in (*COMMAND, *args, str(log)))
    done = subprocess.run(
        ["sh", "-c", f"{command} | head -n 1"], capture_output=True, text=True, timeout=60, cwd=REPOSITORY
    )
    assert len(done.stdout.splitlines()) == 1
    assert done.stderr == ""


@pytest.mark.parametrize("args", [*COMMANDS, ["--help"]], ids=" ".join)
def test_streams_that_are_closed(log: Path, args: list[str]) -> None:
    command = " ".join(f"'{word}'" for word in (*COMMAND, *args, str(log)))
    for closed, code, errors in (
        (">&-", 1, "das: error: stdout is closed, so there is nowhere to print to\n"),
        ("2>&-", 0, ""),
        (">&- 2>&-", 1, ""),
    ):
        done = subprocess.run(
            ["sh", "-c", f"{command} {closed}"], capture_output=True, text=True, timeout=60, cwd=REPOSITORY
        )
        assert (done.returncode, done.stderr) == (code, errors)
        assert bool(done.stdout) == (code == 0)


# Narrow terminals.


def on_terminal(columns: int, *args: object, by_environment: bool) -> str:
    """What the command shows on a terminal of that width, without colours."""
    terminal, stdout = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if name not in ("FORCE_COLOR", "COLUMNS")}
    environment |= {"PYTHONPATH": str(REPOSITORY), "TERM": "xterm"}
    if by_environment:
        environment["COLUMNS"] = str(columns)
    else:
        fcntl.ioctl(stdout, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    process = start(*args, stdout=stdout, env=environment)
    os.close(stdout)
    shown = all_shown(terminal)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
    return re.sub(r"\x1b\[[\d;]*m", "", shown.decode().replace("\r\n", "\n"))


def words_of_row(shown: str, name: str) -> list[str]:
    (row,) = [line.split() for line in shown.splitlines() if line.split()[:1] == [name]]
    return row


@pytest.mark.parametrize("by_environment", [False, True])
@pytest.mark.parametrize("command", ["inspect", "replay"])
def test_a_narrow_terminal_drops_columns_and_cuts_no_figure(log: Path, command: str, by_environment: bool) -> None:
    args = [command, log, *["--group-size", "2"] * (command == "replay")]
    full = on_terminal(200, *args, by_environment=by_environment)
    total = words_of_row(full, "all")
    assert "Left out" not in full
    for columns in (40,) if by_environment else (80, 60, 40, 20):
        shown = on_terminal(columns, *args, by_environment=by_environment)
        assert "\N{HORIZONTAL ELLIPSIS}" not in shown
        assert max(map(len, shown.splitlines())) <= columns
        table, _, notes = shown.partition("Left out, as")
        row = words_of_row(table, "all")
        assert set(row) <= set(total)
        assert len(row) == len(total) or f"the terminal has {columns} columns:" in " ".join(notes.split())
        if columns == 60:
            assert len(row) >= 5
    assert len(row) < len(total)


def test_a_terminal_too_narrow_for_the_step_alone_breaks_figures_into_lines(log: Path) -> None:
    shown = on_terminal(3, "inspect", log, by_environment=True)
    assert "\N{HORIZONTAL ELLIPSIS}" not in shown
    assert "".join(shown.split()).startswith("step")
    assert "".join(shown.split()).count("1001"[:3]) >= 1


def test_a_pipe_has_room_for_all_columns_whatever_the_terminal(log: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "COLUMNS": "60"}
    done = subprocess.run([*COMMAND, "inspect", log], capture_output=True, text=True, timeout=60, env=environment)
    assert len(words_of_row(done.stdout, "all")) == 12


# Ctrl-C.


def wait_for_import(process: subprocess.Popen[str], library: str) -> None:
    """Wait until the process has loaded a native module of that name."""
    maps = Path(f"/proc/{process.pid}/maps")
    for _ in range(20_000):
        if library in maps.read_text() or process.poll() is not None:
            return
        time.sleep(0.0005)


@pytest.mark.parametrize("moment", range(6))
@pytest.mark.parametrize("library", ["_multiarray_umath", "_live_requests"])
def test_ctrl_c_while_modules_are_loaded(tmp_path: Path, library: str, moment: int) -> None:
    fifo = tmp_path / "silent"
    os.mkfifo(fifo)
    process = start("replay", fifo)
    try:
        wait_for_import(process, library)
        time.sleep(random.Random(moment).random() * 0.3 if moment else 0.0)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, output, errors) == (130, "", "das: stopped by Ctrl-C\n")


def test_ctrl_c_that_a_shell_ignores_stays_ignored(log: Path) -> None:
    code = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); import sys; from das_command import main; "
    code += "code = main(); assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN; sys.exit(code)"
    done = subprocess.run(
        [sys.executable, "-c", code, "inspect", "--json", log], capture_output=True, timeout=60, cwd=REPOSITORY
    )
    assert (done.returncode, done.stderr) == (0, b"")
