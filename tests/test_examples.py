"""The files under examples/: the log holds what NOTICE.md says, and the walk-through runs."""

import random
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


def test_the_tiny_reasoner_knows_its_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """Demonstrations solve their problem; wrong arithmetic, other numbers and a miss earn nothing."""
    monkeypatch.syspath_prepend(str(REPOSITORY / "examples" / "tiny_reasoner"))
    import task

    source = random.Random(0)
    for _ in range(200):
        problem = task.random_problem(source)
        text = task.demonstration(problem, source)
        assert task.reward(problem, text) == 1.0
        assert task.decode([*task.encode(text), task.END, 3]) == text
        assert len(task.encode(problem.prompt)) == 12
        assert len(text) < task.MAX_RESPONSE_TOKENS
    problem = task.Problem((7, 3, 5), 26)
    assert task.reward(problem, "7+3=10+5=15?7*3=21+5=26!") == 1.0
    for wrong in (
        "7*3=21+5=26?",
        "7*3=22+5=26!",
        "7*3=21+6=26!",
        "8*3=21+5=26!",
        "7*5=35-3=32!",
        "7*3=21+5=26!?",
        "",
        "26!",
    ):
        assert task.reward(problem, wrong) == 0.0


def test_the_tiny_reasoner_s_log_is_of_six_epochs() -> None:
    folder = REPOSITORY / "examples" / "tiny_reasoner"
    records = list(read_log(folder / "tiny_reasoner_rollouts.jsonl.gz"))
    assert len(records) == 6 * 48 * 8
    assert {record.rollout.training_step for record in records} == set(range(18))
    assert max(len(record.rollout.response_token_ids) for record in records) <= 192
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < 8_000_000
