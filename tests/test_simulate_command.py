"""`das simulate` and `das compare`: their tables, notes, JSON and errors."""

import json
import re
import signal
import sys
from pathlib import Path

import pytest
from command_runs import run_with_stderr_on_terminal, start
from log_samples import extent_of, write

from das import FixedBudget, LatencyModel
from das.analysis import read_log
from das.analysis.extra import lacking
from das.analysis.simulate import simulate
from das.cli import main

TWENTY = list(range(100, 120))  # no token twice: without a history there is nothing to draft
PASSES = "1000,0"  # a pass takes a second, whatever is in it


def row(response: list[int], *, step: int, prompt: int = 1) -> dict[str, object]:
    return {"prompt_token_ids": [prompt], "response_token_ids": response, "training_step": step}


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """One rollout that comes back word for word: with drafts of 8, 20 tokens take three passes the second time."""
    return write(tmp_path / "log.jsonl", row(TWENTY, step=5), row(TWENTY, step=7))


def run(capsys: pytest.CaptureFixture[str], *args: object) -> str:
    assert main([*map(str, args)]) == 0
    output, errors = capsys.readouterr()
    assert errors == ""
    return output


def cells(output: str) -> list[list[str]]:
    return [line.split() for line in output.splitlines()]


def without_measured_times(projection: dict[str, object]) -> dict[str, object]:
    """What does not change from run to run."""
    return {name: value for name, value in projection.items() if name not in ("plan_s", "extend_s", "drafting_us")}


# das simulate.


def test_table_and_notes(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = run(capsys, "simulate", log, "--policy", "fixed", "--latency", PASSES, "--train-s", 10)
    assert ["5", "#0", "1", "20", "20", "0.0", "20.0", "20.0", "20.0", "1.00", "20.0"] in cells(output)
    assert ["7", "#0", "1", "20", "20", "30.0", "33.0", "3.0", "20.0", "6.67", "3.0"] in cells(output)
    assert ["all", "2", "40", "20", "43.0", "23.0", "40.0", "1.74", "23.0"] in cells(output)
    notes = " ".join(output.split())
    assert "Forwards: 23 instead of 40; 1.74 tokens and 0.78 drafted per decode step." in notes
    assert "Utilisation of the workers: 100%; without drafts 100%." in notes
    assert "and ends after 43.0 s instead of 60.0 s: 1.40 times as fast; the relation" in notes
    assert (
        "at R = 0.67 gives 1.40 for synchronous training. Verdict: enable drafting; the log is trained on 1.40" in notes
    )


def test_the_verdict_may_be_to_leave_speculation_off(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nothing = " ".join(run(capsys, "simulate", log, "--policy", "none", "--latency", "9,0,0,1").split())
    assert "Verdict: leave speculation off. Under this policy the log takes 1.11 times as long as without;" in nothing
    write(log, *(row(TWENTY, step=step) for step in range(4)))
    hidden = run(capsys, "simulate", log, "--policy", "fixed", "--latency", PASSES, "--lag", 1, "--train-s", 500)
    assert "Verdict: leave speculation off. Generation is" in " ".join(hidden.split())
    assumed = " ".join(run(capsys, "simulate", log).split())
    assert "The latency is assumed; --latency takes yours" in assumed


def test_json_is_what_the_library_returns(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--policy", "fixed", "--max-draft-tokens", 3, "--latency", "5,0.5", "--group-size", 2, "--workers", 2]
    options += ["--max-running", 1, "--assignment", "round-robin", "--lag", 1, "--train-s", 0.5]
    options += ["--execution", "decoupled", "--draft-token-ms", 2, "--window-epochs", 3]
    found = json.loads(run(capsys, "simulate", log, "--json", *options))
    expected = simulate(
        [record.rollout for record in read_log(log)],
        policy=FixedBudget(3),
        latency=LatencyModel(c_base_ms=5, c_tok_ms=0.5),
        group_size=2,
        num_workers=2,
        max_running=1,
        assignment="round-robin",
        lag=1,
        train_s=0.5,
        execution="decoupled",
        draft_token_ms=2.0,
        window_epochs=3,
    ).as_dict()
    assert found.pop("latency") == {"c_base_ms": 5.0, "c_tok_ms": 0.5, "c_kv_ms": 0.0, "c_engine_ms": 0.0}
    extent = extent_of(log, num_rows=2)
    assert without_measured_times(found) == extent | without_measured_times(expected)


def test_help_documents_every_key(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(run(capsys, "simulate", log, "--json"))
    explained = re.findall(r"\w+", run(capsys, "simulate", "--help"))
    schedule = found["with_drafts"]
    parts = (found, found["latency"], schedule, *schedule["workers"], *schedule["batches"])
    keys = [key for part in parts for key in part if not key.startswith("request_mean_")]
    assert [key for key in keys if key not in explained] == []


def test_examples_of_the_help_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = write(tmp_path / "log.jsonl", *(row(TWENTY, step=step) for step in (5, 7) for _ in range(8)))  # 8 workers
    monkeypatch.chdir(log.parent)  # they write a report
    for command in ("simulate", "compare"):
        examples = re.findall(rf"das ({command} rollouts.*)", run(capsys, command, "--help"))
        assert len(examples) >= 3
        for example in examples:
            words = re.sub(r" --plot \S+", "", example).split()
            run(capsys, *(log if word == "rollouts.jsonl.gz" else word for word in words))


def test_progress_bar_on_a_terminal(log: Path) -> None:
    output, shown = run_with_stderr_on_terminal("simulate", log)
    assert b"simulating" in shown
    assert b"40/40" in shown
    assert "simulating" not in output


def test_a_long_log_shows_its_last_batches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = write(tmp_path / "log.jsonl", *(row(TWENTY, step=step) for step in range(45)))
    output = run(capsys, "simulate", log)
    assert "the last 40 of 45 batches" in output
    assert [line[0] for line in cells(output) if line[1:2] == ["#0"]] == [str(step) for step in range(5, 45)]


# das compare.


def test_compare_ranks_by_makespan(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--policy", "fixed=4", "--policy", "none", "--policy", "fixed=8", "--latency", PASSES]
    output = run(capsys, "compare", log, *options)
    ranked = [line[:6] for line in cells(output) if line[1:2] in (["chain"], ["-"])]
    assert ranked == [
        ["fixed=8", "chain", "4", "23.0", "1.739", "1.739"],
        ["fixed=4", "chain", "4", "24.0", "1.667", "1.667"],
        ["none", "chain", "4", "40.0", "1.000", "1.000"],
        ["off", "-", "-", "40.0", "1.000", "1.000"],
    ]
    assert "Verdict on the first row, fixed=8: enable." in " ".join(output.split())


def test_compare_every_policy_with_every_setting(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--policy", "fixed=8", "--policy", "price=0.2", "--shape", "chain", "--shape", "tree"]
    options += ["--window-epochs", 1, "--window-epochs", 2, "--latency", PASSES, "--json"]
    found = json.loads(run(capsys, "compare", log, *options))
    rows = [(entry["policy"], entry["shape"], entry["window_epochs"]) for entry in found["compared"]]
    assert len(set(rows)) == len(rows) == 8
    makespans = [entry["projection"]["with_drafts"]["makespan_s"] for entry in found["compared"]]
    assert makespans == sorted(makespans)
    settings = [entry["projection"]["settings"] for entry in found["compared"]]
    assert [(one["shape"], one["window_epochs"]) for one in settings] == [row[1:] for row in rows]
    assert set(found) == {*extent_of(log, num_rows=2), "latency", "compared"}


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_compare_plots(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], suffix: str) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"running.{suffix}"
    run(capsys, "compare", log, "--policy", "fixed", "--policy", "none", "--latency", PASSES, "--plot", path)
    drawn = path.read_bytes()
    assert drawn.startswith(b"<?xml" if suffix == "svg" else b"\x89PNG")
    assert len(drawn) > 5000


def test_compare_without_matplotlib(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["compare", str(log), "--plot", str(tmp_path / "x.svg")]) == 2
    assert capsys.readouterr() == ("", f"das: error: {lacking('matplotlib', needed_for='--plot')}\n")


def test_compare_stopped_half_way_prints_what_is_done(
    log: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done = []

    def one_only(*args: object, **settings: object) -> object:
        if done:
            raise KeyboardInterrupt
        done.append(simulate(*args, **settings))  # type: ignore[arg-type]
        return done[0]

    monkeypatch.setattr(sys.modules["das.commands.compare"], "simulate", one_only)
    assert main(["compare", str(log), "--policy", "fixed=8", "--policy", "none"]) == 130
    output, errors = capsys.readouterr()
    assert "PARTIAL" in output
    assert [line[0] for line in cells(output) if line[1:2] == ["chain"]] == ["fixed=8"]
    assert errors == "das: stopped by Ctrl-C\n"


# Errors.


@pytest.mark.parametrize("command", ["simulate", "compare"])
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--workers", "0"], r"Invalid value for '--workers': 0 is not in the range x>=1\."),
        (["--max-running", "0"], r"Invalid value for '--max-running': 0 is not in the range x>=1\."),
        (["--lag", "-1"], r"Invalid value for '--lag': -1 is not in the range x>=0\."),
        (["--train-s", "-1"], r"Invalid value for '--train-s': -1\.0 is not in the range x>=0\."),
        (["--assignment", "any"], r"Invalid value for '--assignment': 'any' is not one of 'prompt', .*\."),
        (["--execution", "fastest-of-n", "--lag", "1"], r"--execution fastest-of-n goes with --lag 0\."),
        (["--execution", "decoupled", "--shape", "tree"], r"--execution decoupled goes with --shape chain\."),
        (["--latency", "5"], r"Invalid value for '--latency': '5' is neither a preset .*\."),
    ],
)
def test_usage_errors_come_before_reading(
    command: str, args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "absent.jsonl", *args]) == 2
    output, errors = capsys.readouterr()
    assert output == ""
    assert re.fullmatch(f"das: error: {message} Try 'das {command} --help'\\.\n", errors)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (
            "best",
            "--policy best: 'best' is none of length-aware, throughput, class, fixed, price, "
            "unlimited, none, aimd, beg-mab, goodput, batch-threshold.",
        ),
        ("none=3", "--policy none=3: none takes no number."),
        ("fixed=x", "--policy fixed=x: 'x' is no max_draft_tokens."),
        ("beg-mab=x", "--policy beg-mab=x: 'x' is no threshold."),
        ("fixed=65", "max_draft_tokens is 65; it must be 0 <= max_draft_tokens <= 64."),
        ("price=2", "min_survival is 2.0; it must be 0 <= min_survival <= 1."),
    ],
)
def test_policies_that_cannot_be(policy: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "absent.jsonl", "--policy", policy]) == 2
    assert capsys.readouterr().err == f"das: error: {message} Try 'das compare --help'.\n"


@pytest.mark.parametrize("command", ["simulate", "compare"])
@pytest.mark.parametrize(
    ("args", "most"), [([], 3), (["--group-size", "2"], 2), (["--lag", "1"], 6), (["--execution", "fastest-of-n"], 6)]
)
def test_workers_without_a_request_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, args: list[str], most: int
) -> None:
    log = str(write(tmp_path / "log.jsonl", *(row(TWENTY, step=step) for step in range(3) for _ in range(3))))
    policy = ["--policy", "fixed"]
    assert main([command, log, *policy, *args, "--workers", str(most)]) == 0
    capsys.readouterr()
    for num_workers in (most + 1, 99_999):
        assert main([command, log, *policy, *args, "--workers", str(num_workers)]) == 2
        assert f"so workers beyond {most} have nothing to do." in capsys.readouterr().err


@pytest.mark.parametrize("command", ["simulate", "compare"])
def test_lag_does_not_go_with_turns_that_are_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    turns = row([7, 8], step=3) | {"prompt_token_ids": [1, 2]}, row([9], step=3) | {"prompt_token_ids": [1, 2, 7, 8, 3]}
    assert main([command, str(write(tmp_path / "log.jsonl", *turns)), "--lag", "1"]) == 2
    assert re.fullmatch(r"das: error: --lag 0 is what logs need .*\n", capsys.readouterr().err)


def test_bad_rows_and_absent_files(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open(log, "a") as rows:
        rows.write("junk\n")
    for command in ("simulate", "compare"):
        assert main([command, str(log)]) == 1
        assert capsys.readouterr().err.startswith(f"das: error: {log}:3: malformed JSON")
        assert main([command, "--json", "--skip-bad", str(log)]) == 0
        output, errors = capsys.readouterr()
        assert json.loads(output)["num_bad_rows"] == 1
        assert errors.startswith(f"das: warning: skipped {log}:3: malformed JSON")


def test_ctrl_c_ends_a_simulation(tmp_path: Path) -> None:
    log = write(tmp_path / "long.jsonl", *(row(list(range(100_000)), step=step) for step in range(8)), "junk")
    process = start("simulate", "--skip-bad", log)
    assert process.stderr is not None
    assert "skipped" in process.stderr.readline()  # all is read
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, output, errors) == (130, "", "das: stopped by Ctrl-C\n")


@pytest.mark.parametrize(
    ("name", "said"), [("missing/plot.svg", "is no directory"), ("plot.xyz", "must end in one of")]
)
def test_a_plot_that_cannot_be_written_is_told_before_anything_is_compared(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str, said: str
) -> None:
    monkeypatch.setattr(sys.modules["das.commands.compare"], "simulate", lambda *_, **__: pytest.fail("compared"))
    assert main(["compare", str(log), "--plot", str(tmp_path / name)]) == 2
    assert said in " ".join(capsys.readouterr().err.replace("│", " ").split())
