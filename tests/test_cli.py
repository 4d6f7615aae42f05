"""The `das` command: output, exit codes, errors, Ctrl-C; and the figures of `das inspect`."""

import array
import fcntl
import gzip
import json
import os
import re
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import click
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from command_runs import REPOSITORY, run_with_stderr_on_terminal, start
from log_samples import word_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers

from das import __version__
from das.analysis.extra import lacking
from das.analysis.inspect import LogStatistics, Spread
from das.analysis.logs import LogRecord
from das.cli import main
from das.commands import das
from das.commands.terminal import print_json
from das.rollout import Rollout


def row(prompt: int, length: int, **changes: object) -> dict[str, object]:
    return {"prompt_token_ids": [prompt], "response_token_ids": list(range(length))} | changes


# Two prompts, two samples each, in two steps; in step 7 only the first came back.
ROWS = [
    row(1, 10, training_step=5, reward=1.0, truncated=False),
    row(1, 20, training_step=5, reward=0.0, truncated=True),
    row(2, 30, training_step=5, reward=0.5, truncated=False),
    row(2, 40, training_step=5, reward=0.5, truncated=False),
    row(1, 100, training_step=7),
    row(1, 200, training_step=7),
]


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return path


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return write(tmp_path / "log.jsonl", *ROWS)


def test_a_log_is_never_overwritten(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = log.read_bytes()
    plot = log.with_name("plot.svg")
    plot.write_bytes(content)
    for args in (
        ["replay", str(log), "--html", str(log)],
        ["compare", str(log), "--html", str(log)],
        ["compare", str(log.parent), "--html", str(log)],
        ["compare", str(plot), "--plot", str(plot)],
    ):
        assert main(args) == 2
        assert "is a log that is read; it would be overwritten" in capsys.readouterr().err
    assert log.read_bytes() == plot.read_bytes() == content


def test_a_log_named_twice_is_wrong_usage(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for named in ([log, log], [log, log.parent / "." / log.name], ["-", "-"]):
        assert main(["inspect", *map(str, named)]) == 2
        assert "is named twice; it would count twice" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--html", "--tokenizer"])
def test_an_empty_text_is_no_file_name(log: Path, capsys: pytest.CaptureFixture[str], option: str) -> None:
    assert main(["replay", str(log), option, ""]) == 2
    assert f"'{option}': an empty text is no file name" in capsys.readouterr().err


def test_a_shell_completes_commands(tmp_path: Path) -> None:
    asked = os.environ | {"COMP_WORDS": "das re", "COMP_CWORD": "1", "_DAS_COMPLETE": "bash_complete"}
    process = start(env=asked | {"PYTHONPATH": str(REPOSITORY)}, cwd=tmp_path)
    assert process.communicate(timeout=60)[0] == "plain,replay\n"


def test_dash_is_standard_input_gzipped_or_not(log: Path) -> None:
    named, _ = start("inspect", "--json", log).communicate(timeout=60)
    for piped in (log.read_bytes(), gzip.compress(log.read_bytes())):
        process = start("inspect", "--json", "-", stdin=subprocess.PIPE, text=False)
        printed, errors = process.communicate(piped, timeout=60)
        assert (process.returncode, errors) == (0, b"")
        assert json.loads(printed) == json.loads(named) | {"logs": ["/dev/stdin"]}


def test_what_is_not_finite_is_null_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": [float("nan"), (float("inf"), 1.5)], "b": {"c": -float("inf"), "d": None}})
    assert json.loads(capsys.readouterr().out) == {"a": [None, [None, 1.5]], "b": {"c": None, "d": None}}


# The figures.


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"das {__version__}\n"


def record(prompt: int, length: int, *, training_step: int | None = None, reward: float | None = None) -> LogRecord:
    rollout = Rollout(
        prompt_token_ids=[prompt], response_token_ids=range(length), training_step=training_step, reward=reward
    )
    return LogRecord(rollout=rollout, sample=0, format="das", location="log:1")


def test_statistics_by_hand() -> None:
    statistics = LogStatistics()
    for length in (10, 20, 30, 40):
        statistics.add(record(length // 25, length, training_step=5, reward=length / 10))
    statistics.add(record(0, 100, training_step=7))
    summary = statistics.summary()
    assert summary is not None
    first, second = summary.training_steps
    assert (first.training_step, first.num_rollouts, first.num_prompts) == (5, 4, 2)
    assert first.samples_per_prompt == Spread(mean=2.0, min=2, max=2)
    tokens = first.response_tokens
    assert (tokens.sum, tokens.mean, tokens.p50, tokens.p90, tokens.p99, tokens.max) == (100, 25.0, 20, 40, 40, 40)
    assert (first.token_share, first.reward_mean, first.truncated_share) == (0.5, 2.5, None)
    assert (second.token_share, second.reward_mean) == (0.5, None)
    assert (summary.total.num_rollouts, summary.total.num_prompts, summary.total.reward_mean) == (5, 2, 2.5)
    assert summary.total.samples_per_prompt == Spread(mean=5 / 3, min=1, max=2)
    assert summary.epochs_per_prompt == Spread(mean=1.5, min=1, max=2)


def test_steps_are_sorted_and_unknown_comes_last() -> None:
    statistics = LogStatistics()
    for step in (10, None, 9):
        statistics.add(record(0, 1, training_step=step))
    summary = statistics.summary()
    assert summary is not None
    assert [step.training_step for step in summary.training_steps] == [9, 10, None]


def test_no_records_no_summary() -> None:
    assert LogStatistics().summary() is None


# das inspect.


def test_table_without_terminal_has_no_control_characters(log: Path) -> None:
    process = start("inspect", log)
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
    assert all(character.isprintable() or character == "\n" for character in output)
    cells = [line.split() for line in output.splitlines()]
    assert [
        "step",
        "rollouts",
        "prompts",
        "samples",
        "mean",
        "p50",
        "p90",
        "p99",
        "max",
        "tokens",
        "reward",
        "cut",
    ] in cells
    assert ["5", "4", "2", "2", "25", "20", "40", "40", "40", "25.0%", "0.500", "25.0%"] in cells
    assert ["7", "2", "1", "2", "150", "100", "200", "200", "200", "75.0%", "-", "-"] in cells
    assert ["all", "6", "2", "2", "67", "30", "200", "200", "200", "100.0%", "0.500", "25.0%"] in cells
    assert "400 response tokens; a prompt comes in 1.5 epochs (1 to 2)" in output


def test_json_is_one_object_with_the_documented_keys(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "--json", str(log)]) == 0
    output, errors = capsys.readouterr()
    found = json.loads(output)
    assert errors == ""
    read = {"logs", "formats", "partial", "num_bad_rows", "num_later_turns"}
    assert set(found) == {*read, "epochs_per_prompt", "total", "training_steps"}
    assert (found["logs"], found["partial"], found["num_bad_rows"]) == ([str(log)], False, 0)
    assert [step["training_step"] for step in found["training_steps"]] == [5, 7]
    assert found["training_steps"][0] == {
        "training_step": 5,
        "num_rollouts": 4,
        "num_prompts": 2,
        "samples_per_prompt": {"mean": 2.0, "min": 2, "max": 2},
        "response_tokens": {"sum": 100, "mean": 25.0, "p50": 20, "p90": 40, "p99": 40, "max": 40},
        "token_share": 0.25,
        "reward_mean": 0.5,
        "truncated_share": 0.25,
    }
    assert found["total"]["response_tokens"]["sum"] == 400
    main(["inspect", "--help"])
    explained = capsys.readouterr().out
    assert all(key in explained for key in (*found, *found["total"], *found["total"]["response_tokens"]))


def test_several_logs_are_read_as_one(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pq.write_table(pa.Table.from_pylist([row(3, 5, training_step=5)]), tmp_path / "more.parquet")
    assert main(["inspect", "--json", str(log), str(tmp_path / "more.parquet")]) == 0
    assert json.loads(capsys.readouterr().out)["total"]["num_rollouts"] == 7


def test_text_log_with_tokenizer_warns_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "yes": 1}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    for step in (1, 2):
        write(tmp_path / f"{step}.jsonl", {"input": "yes no", "output": "yes " * step, "score": 1, "step": step})
    args = ["inspect", "--json", str(tmp_path), "--tokenizer", str(tmp_path / "tokenizer.json")]
    assert main(args) == 0
    output, errors = capsys.readouterr()
    assert json.loads(output)["total"]["response_tokens"]["sum"] == 3
    assert errors.count("das: warning: ") == len(errors.splitlines()) == 1
    assert "1.jsonl: text is tokenised again" in errors


def test_skip_bad_counts_and_names_the_first_few(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "log.jsonl", *ROWS, *["junk"] * 8)
    assert main(["inspect", "--json", "--skip-bad", str(path)]) == 0
    output, errors = capsys.readouterr()
    assert (json.loads(output)["num_bad_rows"], json.loads(output)["total"]["num_rollouts"]) == (8, 6)
    assert len(errors.splitlines()) == 6
    assert errors.startswith(f"das: warning: skipped {path}:7: malformed JSON")
    assert errors.endswith("das: warning: skipped 8 bad rows in all\n")


def test_progress_bar_only_on_a_terminal(log: Path) -> None:
    output, shown = run_with_stderr_on_terminal("inspect", log)
    assert b"reading" in shown
    assert "reading" not in output


# Ctrl-C.


@pytest.mark.parametrize("as_json", [False, True])
def test_ctrl_c_prints_what_was_read_and_exits_130(tmp_path: Path, as_json: bool) -> None:
    fifo = tmp_path / "slow"
    os.mkfifo(fifo)
    process = start("inspect", fifo, *["--json"] * as_json)
    with open(fifo, "w") as writer:
        writer.write("".join(json.dumps(r) + "\n" for r in ROWS[:3]))
        writer.flush()
        wait_until_blocked_in_read(process, fifo)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, "das: stopped by Ctrl-C\n")
    if as_json:
        found = json.loads(output)
        assert (found["partial"], found["total"]["num_rollouts"]) == (True, 3)
    else:
        assert "PARTIAL: stopped before the end of the log" in output
        assert "60 response tokens" in output


def wait_until_blocked_in_read(process: subprocess.Popen[str], fifo: Path) -> None:
    """Wait until the process has taken everything out of the pipe and sleeps, waiting for more."""
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    try:
        for _ in range(2000):
            state = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]
            if process.poll() is not None or (state == "S" and pipe_is_empty(reader)):
                return
            time.sleep(0.005)
    finally:
        os.close(reader)


def pipe_is_empty(reader: int) -> bool:
    waiting = array.array("i", [0])
    fcntl.ioctl(reader, termios.FIONREAD, waiting)
    return waiting[0] == 0


@pytest.mark.parametrize("command", ["inspect", "replay"])
def test_ctrl_c_before_the_first_row(tmp_path: Path, command: str) -> None:
    fifo = tmp_path / "silent"
    os.mkfifo(fifo)
    process = start(command, fifo)
    with open(fifo, "w"):  # returns once the process has opened its end
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=60)
    assert (process.returncode, output, errors) == (130, "", "das: stopped by Ctrl-C\n")


# Errors and exit codes.


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        ([], 2, r"A command is missing\. Try 'das --help'\."),
        (["nope"], 2, r"No such command 'nope'\. Try 'das --help'\."),
        (["inspect"], 2, r"Missing argument 'LOG\.\.\.'\. Try 'das inspect --help'\."),
        (["inspect", "--nope", "x"], 2, r"No such option\W+--nope\W* Try 'das inspect --help'\."),
        (["inspect", "absent.jsonl"], 1, r"absent\.jsonl: no such log file or directory"),
        (["inspect", "two\nlines\x1b"], 1, r"two\\nlines\\x1b: no such log file or directory"),
    ],
)
def test_errors_are_one_line(args: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(args) == code
    output, errors = capsys.readouterr()
    assert output == ""
    assert re.fullmatch(f"das: error: {message}\n", errors)


def test_hints_on_installing_hold_without_a_package_index() -> None:
    """das itself is on none yet, whereas the package that is missing is."""
    hint = lacking("click", needed_for="this")
    assert hint == "this needs click: pip install click (das with its extra 'analysis' brings all such packages)"
    for source in (*(REPOSITORY / "das").rglob("*.py"), *(REPOSITORY / "integrations").rglob("*.py")):
        assert not re.search(r"pip install '?das", source.read_text()), source


@pytest.mark.parametrize("command", ["inspect", "replay", "simulate", "compare"])
def test_a_bad_row_names_the_option_that_leaves_it_out(
    log: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    with open(log, "a") as rows:
        rows.write("5\n")
    hint = " (--skip-bad leaves such rows out)"
    assert main([command, str(log)]) == 1
    assert capsys.readouterr().err == f"das: error: {log}:7: a row must be a JSON object, not int: 5{hint}\n"
    assert main([command, str(log), "--skip-bad"]) == 0
    capsys.readouterr()
    assert main([command, str(log.with_name("absent")), "--skip-bad"]) == 1
    assert hint not in capsys.readouterr().err


@pytest.mark.parametrize("command", ["inspect", "replay", "simulate", "compare"])
def test_a_tokenizer_without_use_is_told(log: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    tokenizer = word_tokenizer(log.parent)
    assert main([command, str(log), "--tokenizer", str(tokenizer)]) == 0
    said = f"das: warning: --tokenizer {tokenizer} was not used: the log holds token ids\n"
    assert capsys.readouterr().err == said
    if command in ("replay", "compare"):  # a report shows token texts
        html = log.with_name("report.html")
        assert main([command, str(log), "--tokenizer", str(tokenizer), "--html", str(html)]) == 0
        assert capsys.readouterr().err == ""


@pytest.mark.parametrize("flags", [[], ["--skip-bad"], ["--json"]])
def test_bad_row_exits_1_and_names_file_line_and_field(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    path = write(tmp_path / "log.jsonl", row(1, 0))
    assert main(["inspect", *flags, str(path)]) == 1
    output, errors = capsys.readouterr()
    assert output == ""
    assert errors.startswith("das: error: ")
    assert f"{path}:1: response_token_ids is empty" in errors
    assert len(errors.splitlines()) == 1


@pytest.mark.parametrize("package", ["click", "rich"])
@pytest.mark.parametrize("start_module", ["das.cli", "das_command"])
def test_without_the_extra_one_line_names_it(package: str, start_module: str) -> None:
    code = f"import sys; sys.modules[{package!r}] = None; sys.argv = ['das', 'inspect', 'x']; "
    code += f"from {start_module} import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"das: error: {lacking(package, needed_for='the das command')}\n"


def test_missing_reader_package_is_one_line_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pq.write_table(pa.Table.from_pylist([row(1, 2)]), tmp_path / "log.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert main(["inspect", str(tmp_path / "log.parquet")]) == 2
    assert capsys.readouterr().err == f"das: error: {lacking('pyarrow', needed_for='a Parquet log')}\n"


def test_a_defect_is_not_hidden(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("das.analysis.inspect.LogStatistics.add")
    with pytest.raises(AttributeError):
        main(["inspect", str(log)])


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "inspect" in capsys.readouterr().out


# Values that the options of commands do not take.

EXTREMES = ["nan", "inf", "1e400", str(2**62), str(2**63 - 1), str(2**64), "9" * 5000, "", "x\0y"]


def options_with_values() -> list[tuple[str, str]]:
    """Command and option, of those that take a value; --plot, --html and --tokenizer take a file."""
    commands = {name: das.commands[name] for name in ("replay", "simulate", "compare")}
    return [
        (name, parameter.opts[0])
        for name, command in commands.items()
        for parameter in command.params
        if isinstance(parameter, click.Option)
        and parameter.metavar
        and parameter.opts[0] not in ("--tokenizer", "--plot", "--html")
    ]


@pytest.mark.parametrize(("command", "option"), options_with_values())
def test_no_value_of_an_option_ends_in_a_traceback(
    log: Path, capsys: pytest.CaptureFixture[str], command: str, option: str
) -> None:
    """main() returns, whatever the value: with a result, or with one line that names what is wrong."""
    for value in EXTREMES:
        code = main([command, str(log), f"{option}={value}", *["--policy=none"] * (command == "compare")])
        output, errors = capsys.readouterr()
        assert code in (0, 1, 2)
        assert bool(output) == (code == 0)
        assert errors.count("\n") == (code != 0), errors


@pytest.mark.parametrize(
    "args",
    [
        *(["simulate", "--train-s", value] for value in ("nan", "inf", "1e10")),
        *(["compare", "--draft-token-ms", value] for value in ("nan", "inf", "1e10")),
        ["simulate", "--workers", "1048576"],
        ["simulate", "--workers", "99999999999"],
        *(["compare", option, str(2**62)] for option in ("--lag", "--max-running", "--window-epochs")),
        ["replay", "--window-epochs", str(2**63 - 1)],
        ["state", "import", "directory", "--window-epochs", str(2**63 - 1)],
        ["inspect", "x\0y"],
        ["inspect", "--tokenizer", "x\0y"],
    ],
    ids=lambda args: " ".join(args[1:])[:40],
)
def test_values_beyond_the_librarys_bounds_are_wrong_usage(
    log: Path, capsys: pytest.CaptureFixture[str], args: list[str]
) -> None:
    assert main([*args, str(log)]) == 2
    output, errors = capsys.readouterr()
    assert output == ""
    assert re.fullmatch(r"das: error: .+ Try 'das [a-z ]+ --help'\.\n", errors)


@pytest.mark.parametrize(
    "args", [["state", "show"], ["state", "compact"], ["state", "export", "d"], ["latency", "fit"]]
)
def test_a_name_that_no_file_can_have_is_wrong_usage(capsys: pytest.CaptureFixture[str], args: list[str]) -> None:
    assert main([*args, "x\0y"]) == 2
    assert "'x\\x00y' holds a NUL character, which no file name can." in capsys.readouterr().err


def test_a_mean_of_rewards_whose_sum_is_beyond_a_float(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = write(tmp_path / "log.jsonl", *(row(1, 2, reward=reward) for reward in (1e308, 1e308, 1e308, 1.7e308)))
    assert main(["inspect", str(log), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["total"]["reward_mean"] == pytest.approx(1.175e308)
