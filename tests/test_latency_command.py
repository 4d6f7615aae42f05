"""Latency files and `das latency`: what is read, what is fitted, what is printed, and errors that name the line."""

import json
import re
from pathlib import Path

import pytest

from das.analysis.latency_sweep import fit_latency_sweep, read_latency_sweep
from das.analysis.logs import LogError
from das.cli import main
from das.latency_presets import LATENCY_PRESETS

EXAMPLES = Path(__file__).parent.parent / "examples"
SWEEPS = {
    name: EXAMPLES / f"latency_{name.rpartition('-')[2]}_{name.rpartition('-')[0]}.csv" for name in LATENCY_PRESETS
}
STEPS = "num_tokens,step_ms,num_context_tokens,note\n1,6,100,a\n2,7.0,0,b\n4,9,100,c\n"


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def printed(capsys: pytest.CaptureFixture[str], *args: object) -> str:
    assert main(["latency", *map(str, args)]) == 0
    output, errors = capsys.readouterr()
    assert errors == ""
    return output


# Reading.


def test_a_row_is_a_pass(tmp_path: Path) -> None:
    sweep = read_latency_sweep(write(tmp_path / "steps.csv", STEPS))
    assert (sweep.num_tokens, sweep.step_ms) == ([1, 2, 4], [6, 7, 9])
    assert (sweep.num_context_tokens, sweep.num_skipped) == ([100, 0, 100], 0)
    assert read_latency_sweep(write(tmp_path / "plain.csv", "step_ms,num_tokens\n5,1\n")).num_context_tokens is None


def test_batches_with_drafts_and_modes(tmp_path: Path) -> None:
    text = (
        "mode,batch,seq,gamma,mean_ms,median_ms\n"
        "target_decode,0,0,0,9,1\ntarget_decode,2,10,0,9,2\ntarget_verify,4,100,3,9,3\ndrafter_decode,4,100,3,9,4\n"
    )
    sweep = read_latency_sweep(write(tmp_path / "sweep.csv", text))
    assert (sweep.num_tokens, sweep.num_context_tokens, sweep.step_ms) == ([2, 16], [20, 400], [2, 3])
    assert sweep.num_skipped == 2
    sweep = read_latency_sweep(write(tmp_path / "sweep.csv", "\ufeffbatch,mean_ms\n3,9\n"))
    assert (sweep.num_tokens, sweep.num_context_tokens, sweep.step_ms) == ([3], None, [9])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file is empty; it must begin with a header line"),
        ("a\n", "has no column step_ms, median_ms or mean_ms, and none of num_tokens or batch"),
        ("num_tokens,ms\n1,2\n", "has no column step_ms, median_ms or mean_ms"),
        ("tokens,step_ms\n1,2\n", "has no column num_tokens or batch"),
        ("num_tokens,step_ms\n1,2\n2,x\n", ":3: step_ms is 'x'; it must be a number greater than 0"),
        ("num_tokens,step_ms\n0,2\n", ":2: num_tokens is '0'; it must be a number greater than 0"),
        ("num_tokens,step_ms\n1,inf\n", ":2: step_ms is 'inf'; it must be a number greater than 0"),
        ("num_tokens,step_ms\n1\n", ":2: step_ms is None; it must be a number greater than 0"),
        ("num_tokens,step_ms\n1,2,3\n", ":2: has more fields than the header"),
        ("batch,gamma,step_ms\n1,-1,3\n", ":2: gamma is '-1'; it must be a number at least 0"),
        ("batch,seq,step_ms\n1,nan,3\n", ":2: seq is 'nan'; it must be a number at least 0"),
        ("batch,step_ms\n-1,3\n", ":2: batch is '-1'; it must be a number at least 0"),
        ("num_tokens,step_ms\n", "holds no pass of the target model, 0 other rows"),
        ("batch,step_ms\n0,1\n", "holds no pass of the target model, 1 other rows"),
        ("num_tokens,step_ms\n5,1\n5,2\n", "num_tokens holds fewer than two different values"),
    ],
)
def test_errors_name_file_and_line(tmp_path: Path, text: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "steps.csv", text)
    with pytest.raises(LogError) as caught:
        fit_latency_sweep(path)
    assert str(caught.value).startswith(str(path))
    assert message in str(caught.value)
    assert caught.value.path == str(path)
    assert main(["latency", "fit", str(path)]) == 1
    output, errors = capsys.readouterr()
    assert (output, errors) == ("", f"das: error: {caught.value}\n")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(LogError, match=r"absent\.csv: cannot be read: No such file or directory"):
        read_latency_sweep("absent.csv")
    (tmp_path / "bytes.csv").write_bytes(b"batch,step_ms\n\xff\xfe,1\n")
    with pytest.raises(LogError, match=r"bytes\.csv: cannot be read: 'utf-8' codec"):
        read_latency_sweep(tmp_path / "bytes.csv")


# Presets.


@pytest.mark.parametrize("name", LATENCY_PRESETS)
def test_presets_are_what_the_shipped_sweeps_give(name: str) -> None:
    fitted, preset = fit_latency_sweep(SWEEPS[name]), LATENCY_PRESETS[name].fit
    assert fitted.num_steps == preset.num_steps
    for coefficient in ("c_base_ms", "c_tok_ms", "c_kv_ms", "c_engine_ms"):
        assert getattr(preset.latency, coefficient) == float(f"{getattr(fitted.latency, coefficient):.4g}")
    for error in ("mean_relative_error", "median_relative_error", "p90_relative_error"):
        assert getattr(preset, error) == round(getattr(fitted, error), 4)


def test_without_context_errors_are_larger() -> None:
    for path in SWEEPS.values():
        plain = fit_latency_sweep(path, with_context=False)
        assert plain.latency.c_kv_ms == 0
        assert 190 < plain.latency.c_base_ms / plain.latency.c_tok_ms < 200
        assert plain.mean_relative_error > fit_latency_sweep(path).mean_relative_error


# The command.


def test_fit_prints_formula_errors_and_the_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "steps.csv", "num_tokens,step_ms\n1,6\n2,7\n4,9\n")
    assert printed(capsys, "fit", path).splitlines() == [
        "3 passes (0 rows skipped): t = 5 + 1 tokens",
        "A pass costs as much as 5 tokens before it computes any.",
        "Relative error: median 0.0%, p90 0.0%, mean 0.0%.",
        "--latency 5,1,0",
    ]
    with_context = printed(capsys, "fit", SWEEPS["qwen2.5-7b-a100"])
    assert "223 passes (5 rows skipped): t = 9.281 + 0.04558 tokens + 1.77e-05 context" in with_context
    option = with_context.splitlines()[-1].split()
    assert main(["replay", "absent.jsonl", *option]) == 1  # it is taken, and the log is missed
    assert "no such log file" in capsys.readouterr().err
    assert "context" not in printed(capsys, "fit", "--no-context", SWEEPS["qwen2.5-7b-a100"])
    constant = printed(capsys, "fit", write(path, "num_tokens,step_ms\n1,5\n9,5\n5,5\n"))
    assert "5 + " in constant


def test_fit_json_and_its_documentation(capsys: pytest.CaptureFixture[str]) -> None:
    path = SWEEPS["llama3.1-8b-a100"]
    found = json.loads(printed(capsys, "fit", "--json", path))
    fitted = fit_latency_sweep(path)
    assert (found["file"], found["num_skipped"], found["num_steps"]) == (str(path), 5, 224)
    assert found["latency"]["c_kv_ms"] == fitted.latency.c_kv_ms
    assert found["p90_relative_error"] == fitted.p90_relative_error
    explained = re.findall(r"\w+", printed(capsys, "fit", "--help"))
    assert [key for key in (*found, *found["latency"]) if key not in explained] == []


def test_list_shows_every_preset(capsys: pytest.CaptureFixture[str]) -> None:
    output = printed(capsys, "list")
    assert all(name in output for name in LATENCY_PRESETS)
    assert output.count("Source: furiosa-ai/EfficientRollout (Apache-2.0), commit 0ff0bc5") == 1
    found = json.loads(printed(capsys, "list", "--json"))
    assert list(found) == list(LATENCY_PRESETS)
    explained = re.findall(r"\w+", printed(capsys, "list", "--help"))
    preset = found["qwen2.5-7b-a100"]
    assert [key for key in (*preset, *preset["fit"]) if key not in explained] == []


def test_a_missing_command_or_file_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["latency"]) == 2
    assert capsys.readouterr().err == "das: error: A command is missing. Try 'das latency --help'.\n"
    assert main(["latency", "fit"]) == 2
    assert "Missing argument 'FILE'" in capsys.readouterr().err
    assert main(["latency", "nope"]) == 2
    assert main(["latency", "fit", "absent.csv"]) == 1
