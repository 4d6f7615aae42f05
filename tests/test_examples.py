"""The files under examples/: the log holds what NOTICE.md says, and the walk-through runs."""

import re
import subprocess
import sys

import pytest
from command_runs import REPOSITORY

from das.analysis import read_log


def test_the_example_log_is_the_cut_it_says_it_is() -> None:
    path = REPOSITORY / "examples" / "amc23_rollouts.jsonl.gz"
    records = list(read_log(path))
    prompts = {record.prompt_id for record in records}
    of_step = {(record.rollout.training_step, record.prompt_id, record.sample) for record in records}
    assert len(prompts) == 40
    assert of_step == {(step, prompt, sample) for step in (400, 800) for prompt in prompts for sample in range(8)}
    assert len(records) == len(of_step)
    assert path.stat().st_size <= 250_000


def test_the_walkthrough_prints_figures_that_add_up() -> None:
    done = subprocess.run(
        [sys.executable, "examples/walkthrough.py"],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        env={"PYTHONPATH": str(REPOSITORY)},
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    figures = {name: float(value) for name, value in map(str.split, done.stdout.splitlines())}
    records = read_log(REPOSITORY / "examples" / "amc23_rollouts.jsonl.gz")
    lengths = [
        len(r.rollout.response_token_ids) for r in records if (r.rollout.training_step, r.prompt_id) == (800, "q00")
    ]
    assert figures["num_emitted_tokens"] == sum(lengths)
    assert figures["tokens_per_decode_step"] > 2


def test_the_readme_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (REPOSITORY / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(code, "README.md", "exec"), {})
    drafted, measured = capsys.readouterr().out.splitlines()
    assert drafted.startswith("[1, 2, 3, 4, 5, 9] [0.7")
    assert measured == f"3.0 {2 / 6}"
