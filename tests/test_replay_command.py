"""`das replay`: its table, notes and JSON, usage errors, Ctrl-C."""

import json
import os
import random
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from command_runs import run_with_stderr_on_terminal, start
from log_samples import extent_of, write

from das import PriceBudget
from das.analysis import read_log
from das.analysis.replay import replay
from das.cli import main

TWENTY = list(range(100, 120))  # no token twice: without a history there is nothing to draft


def row(response: list[int], *, step: int, prompt: int = 1) -> dict[str, object]:
    return {"prompt_token_ids": [prompt], "response_token_ids": response, "training_step": step}


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """One rollout that comes back word for word: then 20 tokens take three steps, 8 + 1, 8 + 1 and 2."""
    return write(tmp_path / "log.jsonl", row(TWENTY, step=5), row(TWENTY, step=7))


@pytest.fixture
def long_log(tmp_path: Path) -> Path:
    """A short batch, then half a minute of random tokens; --skip-bad names the bad row once all is read."""
    random_tokens = random.Random(0)
    steps = [[random_tokens.randrange(50) for _ in range(50_000)] for _ in range(8)]
    rows = [row(TWENTY, step=0), *(row(tokens, step=1 + i) for i, tokens in enumerate(steps))]
    return write(tmp_path / "long.jsonl", *rows, "junk")


def replayed(capsys: pytest.CaptureFixture[str], *args: object) -> str:
    assert main(["replay", *map(str, args)]) == 0
    output, errors = capsys.readouterr()
    assert errors == ""
    return output


def cells(output: str) -> list[list[str]]:
    return [line.split() for line in output.splitlines()]


# The table.


def test_table_without_terminal_has_no_control_characters(log: Path) -> None:
    process = start("replay", log, "--policy", "fixed")
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
    assert all(character.isprintable() or character == "\n" for character in output)
    assert ["step", "rollouts", "tokens", "step", "step", "rate", "length", "saved", "steps", "drafts"] in cells(output)
    assert ["5", "1", "20", "1.00", "0.00", "-", "-", "0.0%", "20", "20"] in cells(output)
    assert ["7", "1", "20", "6.67", "6.00", "100.0%", "7.00", "85.0%", "3", "20"] in cells(output)
    assert ["all", "2", "40", "1.74", "0.78", "100.0%", "7.00", "42.5%", "23", "40"] in cells(output)


def test_notes_name_means_settings_cost_and_history(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = " ".join(replayed(capsys, log, "--group-size", 2, "--policy", "fixed", "--max-draft-tokens", 9).split())
    assert "The table's rates are token-weighted" in output
    assert (
        "Means over requests: tokens per decode step 5.50, drafted per decode step 4.50, draft acceptance rate 100.0%, "
        "mean acceptance length 10.00." in output
    )
    assert "policy FixedBudget(max_draft_tokens=9, min_survival=0), group_size 2, order step, shape chain," in output
    assert re.search(r"Drafter: [\d.]+ us to draft and [\d.]+ us to take in .* per request and decode step", output)
    assert "History at the end: 2 rollouts of 1 prompts, 40 tokens; 0.0 MB, and 0.0 MB of trees." in output


def test_rows_are_batches_and_from_41_on_training_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "log.jsonl", *(row(TWENTY, step=step) for step in (5, 5, 5, 7)))
    named = [
        line[:2] for line in cells(replayed(capsys, tmp_path / "log.jsonl", "--group-size", 2)) if "#" in str(line)
    ]
    assert named == [["#group", "rollouts"], ["5", "#0"], ["5", "#1"], ["7", "#0"]]
    write(tmp_path / "log.jsonl", *(row(TWENTY, step=step) for step in (*[5] * 40, 7)))
    output = replayed(capsys, tmp_path / "log.jsonl", "--group-size", 1)
    assert "#" not in output
    assert [line[:2] for line in cells(output) if line[:1] in (["5"], ["7"])] == [["5", "40"], ["7", "1"]]


def test_steps_the_log_does_not_name_are_a_dash(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "log.jsonl", {"prompt_token_ids": [1], "response_token_ids": TWENTY})
    output = replayed(capsys, tmp_path / "log.jsonl")
    assert ["-", "1", "20", "1.00", "0.00", "-", "-", "0.0%", "20", "20"] in cells(output)
    assert "all" not in [line[0] for line in cells(output)]  # a single row needs no total


def test_verdict_says_what_is_saved_in_forwards_and_in_time(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    verdict = " ".join(replayed(capsys, log, "--policy", "fixed").split()).partition("of trees. ")[2]
    assert verdict.startswith(
        "Drafting saves 43% of the target forwards and verifies 0.8 extra tokens per step. At 5 ms a forward, 0.025 ms "
        "a token (assumed; --latency takes yours, which `das latency fit` finds), the forwards of whole batches take "
    )
    assert re.search(
        r"take 0\.\d s instead of 0\.\d s: 1\.\d\d times as fast\. The drafter took 0\.0 s here\.$", verdict
    )


def test_times_follow_the_latency_model(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--policy", "fixed", "--json"]
    found = json.loads(replayed(capsys, log, *args, "--latency", "2,0.5,0.001,1"))
    total, times = found["total"], found["generation_time"]
    verified = total["num_decode_steps"] + total["num_drafted_tokens"]
    context, plain_context = total["num_context_tokens"], total["num_context_tokens_without_drafts"]
    with_ms = 3 * total["num_batch_steps"] + 0.5 * verified + 0.001 * context
    without_ms = 2 * total["longest_response_tokens"] + 0.5 * total["num_emitted_tokens"] + 0.001 * plain_context
    assert times["with_drafts_s"] == pytest.approx(with_ms / 1e3)
    assert times["without_drafts_s"] == pytest.approx(without_ms / 1e3)
    assert times["speedup"] == pytest.approx(without_ms / with_ms)
    assert times["latency"] == {"c_base_ms": 2.0, "c_tok_ms": 0.5, "c_kv_ms": 0.001, "c_engine_ms": 1.0}
    undrafted = json.loads(replayed(capsys, log, "--policy", "none", "--json"))["total"]
    assert undrafted["num_context_tokens"] == undrafted["num_context_tokens_without_drafts"] == plain_context
    costly = " ".join(replayed(capsys, log, "--policy", "fixed", "--latency", "0,1").split())
    assert re.search(r"ms a token \(as given\), .*: 0\.\d\d times as fast, so do not draft\.", costly)


def test_verdict_says_nothing_where_nothing_is_saved(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "Nothing was drafted, so nothing is saved" in replayed(capsys, log, "--policy", "none")
    wrong = [token for i in TWENTY for token in (1000 + i, i)]  # after each known token comes another than before
    write(log, row(TWENTY, step=5), row(wrong, step=7))
    output = " ".join(replayed(capsys, log, "--max-draft-tokens", 1).split())
    assert "Drafting saves nothing here (under 1% of the target forwards), and verifies 0." in output


# JSON.


def test_json_is_what_the_library_returns(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--policy", "price", "--min-survival", "0.3", "--max-draft-tokens", "4", "--group-size", "3"]
    options += ["--order", "lockstep", "--window-epochs", "2", "--max-bytes", "1000000"]
    found = json.loads(replayed(capsys, log, "--json", *options))
    policy = PriceBudget(min_survival=0.3, max_draft_tokens=4)
    rollouts = [record.rollout for record in read_log(log)]
    expected = replay(
        rollouts, policy=policy, group_size=3, order="lockstep", window_epochs=2, max_bytes=1_000_000
    ).as_dict()
    assert found.pop("plan_us") > 0
    assert found.pop("extend_us") > 0
    assert found.pop("generation_time")["speedup"] > 0
    del expected["plan_us"], expected["extend_us"]
    assert found == extent_of(log, num_rows=len(rollouts)) | expected
    assert found["settings"]["policy"] == "PriceBudget(max_draft_tokens=4, min_survival=0.3)"


def test_widths_and_their_padding(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--policy", "fixed", "--max-draft-tokens", 2, "--shape", "tree", "--widths", "0,3")
    output = " ".join(replayed(capsys, log, *options).split())
    assert "shape tree, widths [0, 3]," in output
    padded = json.loads(replayed(capsys, log, "--json", *options))["total"]["num_padded_tokens"]
    assert f"Padding: {padded:,} tokens, verified beside the drafted ones as a batch has one width" in output
    assert "Padding" not in replayed(capsys, log)


def test_help_documents_every_key(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(replayed(capsys, log, "--json"))
    explained = re.findall(r"\w+", replayed(capsys, "--help"))
    parts = (found, found["settings"], found["total"], found["history"], *found["batches"])
    assert [key for part in parts for key in part if key not in explained] == []


def test_every_policy_has_its_own_default(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    latency = "LatencyModel(c_base_ms=5.0, c_tok_ms=0.025, c_kv_ms=0.0, c_engine_ms=0.0)"
    for policy, shown in {
        "length-aware": f"LengthAwareBudget(latency={latency}, max_draft_tokens=16, length_weight=0.5)",
        "throughput": f"ThroughputBudget(latency={latency}, max_draft_tokens=16)",
        "class": "LengthClassBudget(long=16, medium=8, short=0, min_survival=0)",
        "fixed": "FixedBudget(max_draft_tokens=8, min_survival=0)",
        "price": "PriceBudget(max_draft_tokens=16, min_survival=0.15)",
        "unlimited": "UnlimitedBudget(max_draft_tokens=16, min_survival=0)",
        "none": "NoDraft(max_draft_tokens=0, min_survival=inf)",
        "aimd": "AdaptiveBudget('aimd', max_draft_tokens=16, first_draft_tokens=2)",
        "beg-mab": "AdaptiveBudget('beg-mab', draft_lengths=(2, 4, 8, 16), first_of_bucket=(1, 2, 5, 21), "
        f"exploration=0.1, window=1000, max_running=32, latency={latency}, seed=0)",
        "goodput": f"AdaptiveBudget('goodput', latency={latency}, max_draft_tokens=16, first_acceptance=0.7)",
        "batch-threshold": "AdaptiveBudget('batch-threshold', max_running=32, max_draft_tokens=8)",
    }.items():
        assert json.loads(replayed(capsys, log, "--json", "--policy", policy))["settings"]["policy"] == shown
    assert json.loads(replayed(capsys, log, "--json"))["settings"]["policy"].startswith("LengthAwareBudget(")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("8,0.5", "c_base_ms=8.0, c_tok_ms=0.5, c_kv_ms=0.0, c_engine_ms=0.0"),
        ("8,0.5,1e-5", "c_base_ms=8.0, c_tok_ms=0.5, c_kv_ms=1e-05, c_engine_ms=0.0"),
        ("8,0.5,0,2", "c_base_ms=8.0, c_tok_ms=0.5, c_kv_ms=0.0, c_engine_ms=2.0"),
        ("llama3.1-8b-a100", "c_base_ms=10.45, c_tok_ms=0.05102, c_kv_ms=2.547e-05, c_engine_ms=0.0"),
    ],
)
def test_latency_by_preset_or_coefficients(
    log: Path, capsys: pytest.CaptureFixture[str], text: str, shown: str
) -> None:
    found = json.loads(replayed(capsys, log, "--json", "--latency", text, "--max-draft-tokens", 3))
    assert found["settings"]["policy"].startswith(
        f"LengthAwareBudget(latency=LatencyModel({shown}), max_draft_tokens=3,"
    )


def test_published_policies_take_their_settings(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--policy", "batch-threshold", "--threshold", 1, "--max-draft-tokens", 5, "--latency", "8,0.5")
    found = json.loads(replayed(capsys, log, "--json", *options))
    assert found["settings"]["policy"] == "AdaptiveBudget('batch-threshold', max_running=1, max_draft_tokens=5)"
    assert found["generation_time"]["latency"]["c_base_ms"] == 8.0
    found = json.loads(replayed(capsys, log, "--json", "--policy", "goodput", "--latency", "8,0.5"))
    assert "c_base_ms=8.0, c_tok_ms=0.5" in found["settings"]["policy"]


# Errors.


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--policy", "nope"], r"Invalid value for '--policy': 'nope' is not one of .*\."),
        (["--min-survival", "0.2"], r"--min-survival goes with --policy class, price, not with length-aware\."),
        (
            ["--policy", "none", "--max-draft-tokens", "4"],
            r"--max-draft-tokens goes with --policy length-aware, throughput, fixed, price, unlimited, aimd, goodput, "
            r"batch-threshold, not with none\.",
        ),
        (["--threshold", "4"], r"--threshold goes with --policy beg-mab, batch-threshold, not with length-aware\."),
        (["--policy", "beg-mab", "--threshold", "-1"], r"threshold is -1; it must be 0 <= threshold < 2\*\*62\."),
        (["--latency", "0,0"], r"Invalid value for '--latency': c_base_ms and c_tok_ms are both 0; one must .*\."),
        (
            ["--latency", "-1,1"],
            r"Invalid value for '--latency': c_base_ms is -1\.0; it must be 0 <= c_base_ms <= .*\.",
        ),
        (["--latency", "5,nan"], r"Invalid value for '--latency': c_tok_ms is nan; it must be 0 <= c_tok_ms <= .*\."),
        *(
            (
                ["--latency", bad],
                rf"Invalid value for '--latency': '{bad}' is neither a preset \(qwen.*\) nor c_base.*\.",
            )
            for bad in ("5", "h100", "1,2,3,4,5", "", "1,x")
        ),
        (["--max-draft-tokens", "65"], r"max_draft_tokens is 65; it must be 0 <= max_draft_tokens <= 64\."),
        (["--policy", "price", "--min-survival", "nan"], r"min_survival is nan; it must be 0 <= min_survival <= 1\."),
        (["--group-size", "0"], r"Invalid value for '--group-size': 0 is not in the range x>=1\."),
        (["--widths", "3,3"], r"Invalid value for '--widths': widths\[1\] is 3 after 3; widths must ascend\."),
        (["--widths", "3,x"], r"Invalid value for '--widths': '3,x' is not a list of ints, like 0,3,7,15\."),
        (["--widths", "0,3", "--order", "lockstep"], r"--widths goes with --order step, where requests share a pass\."),
        (["--window-epochs", "0"], r"window_epochs is 0; it must be at least 1\."),
        (["--max-bytes", "-1"], r"max_bytes is -1; it must be 0 <= max_bytes < 2\*\*62\."),
        (["--order", "nope"], r"Invalid value for '--order': 'nope' is not one of 'step', 'lockstep'\."),
    ],
)
def test_usage_errors_come_before_reading(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "absent.jsonl", *args]) == 2
    output, errors = capsys.readouterr()
    assert output == ""
    assert re.fullmatch(f"das: error: {message} Try 'das replay --help'\\.\n", errors)


def test_bad_rows_end_the_replay_or_are_counted(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open(log, "a") as rows:
        rows.write("junk\n")
    assert main(["replay", str(log)]) == 1
    assert capsys.readouterr().err.startswith(f"das: error: {log}:3: malformed JSON")
    assert main(["replay", "--json", "--skip-bad", str(log)]) == 0
    output, errors = capsys.readouterr()
    assert (json.loads(output)["num_bad_rows"], json.loads(output)["total"]["num_requests"]) == (1, 2)
    assert errors.startswith(f"das: warning: skipped {log}:3: malformed JSON")


def test_a_defect_is_not_a_usage_error(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **options: object) -> None:
        raise ValueError("broken")

    monkeypatch.setattr("das.analysis.decoding.plan_step", broken)
    with pytest.raises(ValueError, match="broken"):
        main(["replay", str(log)])


# Progress and Ctrl-C.


def test_progress_bars_only_on_a_terminal(log: Path) -> None:
    output, shown = run_with_stderr_on_terminal("replay", log)
    assert b"reading" in shown
    assert b"replaying" in shown
    assert b"40/40" in shown
    assert "replaying" not in output


@pytest.mark.parametrize("as_json", [False, True])
def test_ctrl_c_prints_what_was_counted_and_exits_130(long_log: Path, as_json: bool) -> None:
    process = start("replay", "--skip-bad", long_log, *["--json"] * as_json)
    assert process.stderr is not None
    assert "skipped" in process.stderr.readline()
    wait_for_cpu_time(process, 0.3)
    process.send_signal(signal.SIGINT)
    sent_s = time.monotonic()
    output, errors = process.communicate(timeout=60)
    assert time.monotonic() - sent_s < 10  # a quarter of a second where nothing else runs; to the end, half a minute
    assert (process.returncode, errors) == (130, "das: stopped by Ctrl-C\n")
    if as_json:
        found = json.loads(output)
        assert (found["partial"], found["is_complete"], found["total"]["num_requests"]) == (True, False, 1)
        assert [batch["is_complete"] for batch in found["batches"]] == [True, False]
    else:
        assert "PARTIAL: stopped before the end of the log" in output
        assert ["0", "1", "20", "1.00", "0.00", "-", "-", "0.0%", "20", "20"] in cells(output)
        assert ["1", "0", "0", *["-"] * 7] in cells(output)
        assert ["all", "1", "20", "1.00", "0.00", "-", "-", "0.0%", "20", "20"] in cells(output)


def wait_for_cpu_time(process: subprocess.Popen[str], seconds: float) -> None:
    """Wait until the process has computed for some time, however busy the machine is."""

    def computed_s() -> float:
        user = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[11]
        return int(user) / os.sysconf("SC_CLK_TCK")

    start_s = computed_s()
    while computed_s() - start_s < seconds:
        time.sleep(0.01)
