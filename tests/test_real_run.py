"""What examples/real_run says of runs: each claim is made where it holds, and missed where it does not."""

import random
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import findings
import numpy as np
import picture
import pytest
import real_run
import run_file

NUM_PROMPTS, NUM_SAMPLES, NUM_STEPS = 3, 4, 3


def a_run(*, engine: str = "sglang", drafts: bool = True, seed: int = 0) -> list[run_file.Step]:
    """Responses that come back at the next training step, with a token changed here and there."""
    source = random.Random(seed)
    prompts = [[prompt, 20, 21] for prompt in range(NUM_PROMPTS) for _ in range(NUM_SAMPLES)]
    responses = [[source.randrange(19) for _ in range(source.randrange(5, 40))] for _ in prompts]
    run = []
    for training_step in range(NUM_STEPS):
        responses = [[source.randrange(19) if source.random() < 0.05 else token for token in row] for row in responses]
        num_tokens = sum(map(len, responses)) - len(responses)
        step = run_file.Step(
            engine=engine,
            drafts=drafts,
            seed=seed,
            training_step=training_step,
            prompts=prompts,
            responses=responses,
            rewards=[float(source.random() < 0.4) for _ in prompts],
            num_decode_steps=num_tokens,
            makespan_passes=max(map(len, responses)) - 1,
            makespan_s=1.0,
            update_s=1.0,
            weights=f"{seed} {training_step}",
        )
        run.append(step)
    if not drafts:
        return run
    return [
        replace(step, num_decode_steps=told.num_decode_steps, makespan_passes=told.makespan_passes)
        for step, told in zip(run, findings.predictions(run), strict=True)
    ]


def write(folder: Path, run: list[run_file.Step]) -> Path:
    first = run[0]
    path = run_file.path_of(folder, engine=first.engine, drafts=first.drafts, seed=first.seed)
    with path.open("w") as file:
        for step in run:
            run_file.write(step, file)
    return path


@pytest.fixture(scope="module")
def sglang_runs() -> tuple[list[run_file.Step], list[run_file.Step]]:
    return a_run(drafts=False), a_run(drafts=True)


@pytest.fixture(scope="module")
def vllm_runs() -> list[list[run_file.Step]]:
    return [a_run(engine="vllm", drafts=drafts, seed=seed) for drafts in (False, True) for seed in range(3)]


def test_a_file_returns_what_was_written(tmp_path: Path) -> None:
    assert run_file.read(write(tmp_path, a_run())) == a_run()


def test_runs_come_by_seed(tmp_path: Path, vllm_runs: list[list[run_file.Step]]) -> None:
    for run in vllm_runs[::-1]:
        write(tmp_path, run)
    found = run_file.read_runs(tmp_path, engine="vllm", drafts=True)
    assert [run[0].seed for run in found] == [0, 1, 2]
    assert {run[0].drafts for run in found} == {True}


# ---------------------------------------------------------------- findings


def test_a_run_parts_from_another_at_the_first_difference() -> None:
    run = a_run()
    assert findings.first_difference(run, run) == ""
    for name, value in (("responses", [[1]]), ("rewards", [0.5]), ("weights", "others")):
        other = [*run[:1], replace(run[1], **{name: value}), replace(run[2], weights="others, too")]
        assert findings.first_difference(run, other) == f"{name} of training step 1"


def test_a_run_that_is_shorter_is_no_equal() -> None:
    with pytest.raises(ValueError, match="shorter"):
        findings.first_difference(a_run(), a_run()[:2])


def test_a_group_of_equal_rewards_has_no_gradient() -> None:
    rewards = [0.0] * 4 + [1.0] * 4 + [0.0, 0.0, 1.0, 0.0]
    run = [replace(a_run()[0], rewards=rewards), replace(a_run()[0], rewards=[0.0, 1.0] * 6)]
    assert findings.shares_with_gradient(run) == [1 / 3, 1.0]


def test_predictions_are_those_of_a_replay_behind_the_first_token() -> None:
    """Rollouts without any context in common are never drafted; the same ones again nearly always are."""
    prompts = [[30, 31], [32, 33]]
    responses = [list(range(10)), list(range(10, 25))]
    steps = [replace(a_run()[0], prompts=prompts, responses=responses, training_step=step) for step in range(2)]
    first, second = findings.predictions(steps)
    assert first == findings.Prediction(num_decode_steps=9 + 14, makespan_passes=14)
    assert second.num_decode_steps <= 2 + 3
    assert second.makespan_passes <= 3


def curves(*rows: float) -> findings.FloatArray:
    return np.array([[row, row] for row in rows])


def test_two_sets_that_are_apart_are_told_apart() -> None:
    found = findings.compare(curves(0.1, 0.2, 0.3, 0.4, 0.5), curves(1.1, 1.2, 1.3, 1.4, 1.5))
    assert found.num_dealings == 252
    assert found.p_mean == found.p_gap == 2 / 252  # the dealing seen, and its mirror image
    assert found.difference == pytest.approx(1.0)
    assert found.band < found.greatest_gap


def test_a_set_is_like_itself() -> None:
    one = np.random.default_rng(0).random((4, 6))
    found = findings.compare(one, one)
    assert (found.difference, found.p_mean, found.p_gap) == (0.0, 1.0, 1.0)


def test_a_gap_at_one_training_step_is_seen_where_the_mean_is_the_same() -> None:
    first = np.tile([0.5, 0.5, 0.5], (5, 1)) + np.linspace(0, 0.01, 5)[:, None]
    second = first + np.array([0.2, -0.1, -0.1])
    found = findings.compare(first, second)
    assert found.p_mean == 1.0
    assert found.p_gap == 2 / 252
    assert found.greatest_gap == pytest.approx(0.2)


def test_without_an_effect_small_p_are_as_rare_as_they_say() -> None:
    source = np.random.default_rng(5)
    found = [findings.compare(*source.random((2, 4, 3))) for _ in range(200)]
    for name in ("p_mean", "p_gap"):
        share = np.mean([getattr(comparison, name) <= 0.1 for comparison in found])
        assert 0.02 < share < 0.16  # 0.1 less what 70 dealings, in pairs, round down; three standard deviations


def test_equal_sets_leave_the_band_once_in_twenty_times_and_lowest_to_highest_more_often_than_not() -> None:
    """Why the claim is about the band, and not about the lowest and highest of five seeds."""
    source = np.random.default_rng(6)
    left_band = left_range = 0
    for _ in range(200):
        first, second = source.normal(size=(2, 5, 6))
        found = findings.compare(first, second)
        left_band += found.greatest_gap > found.band
        left_range += findings.num_inside(first, second) + findings.num_inside(second, first) < 12
    assert left_band <= 20
    assert left_range > 100


def test_a_mean_curve_is_inside_where_others_go_as_low_and_as_high() -> None:
    band = np.array([[0.1, 0.1, 0.1], [0.3, 0.3, 0.3]])
    assert findings.num_inside(np.array([[0.0, 0.2, 0.4], [0.1, 0.3, 0.6]]), band) == 1


# ---------------------------------------------------------------- report and picture


def report(folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["real_run.py", "--report", "--out", str(folder)])
    return real_run.main()


def test_the_report_finds_that_all_holds(tmp_path, monkeypatch, capsys, sglang_runs, vllm_runs) -> None:
    for run in (*sglang_runs, *vllm_runs):
        write(tmp_path, run)
    assert report(tmp_path, monkeypatch) == 0
    printed = capsys.readouterr().out
    assert printed.count("holds   SGLang") == 3
    assert printed.count("holds   vLLM") == 3
    assert "MISSED" not in printed


@pytest.mark.parametrize(
    ("change", "missed"),
    [
        ({"weights": "others"}, "they part at weights of training step 1"),
        ({"rewards": [0.0] * NUM_PROMPTS * NUM_SAMPLES}, "of the groups have advantages"),
        ({"num_decode_steps": 100}, "replay predicts"),
    ],
    ids=["another run", "no gradient", "another count"],
)
def test_the_report_says_what_is_missed(tmp_path, monkeypatch, capsys, sglang_runs, change, missed) -> None:
    for run in sglang_runs:
        spoiled = [run[0], *(replace(step, **change) for step in run[1:])]
        write(tmp_path, spoiled if "rewards" in change or run[0].drafts else run)
    assert report(tmp_path, monkeypatch) == 1
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("MISSED")]
    assert len(told) == 1
    assert missed in told[0]


def test_a_report_of_nothing_fails(tmp_path, monkeypatch) -> None:
    assert report(tmp_path, monkeypatch) == 1


def test_the_picture_has_a_panel_for_each_figure(tmp_path, sglang_runs, vllm_runs) -> None:
    for run in (*sglang_runs, *vllm_runs):
        write(tmp_path, run)
    picture.draw(tmp_path, tmp_path / "drawn.svg")
    words = {text.text for text in ElementTree.parse(tmp_path / "drawn.svg").iter("{http://www.w3.org/2000/svg}text")}
    for engine in ("SGLang, keyed noise", "vLLM, 3 seeds"):
        for panel in ("mean reward", "decode steps", "makespan in passes"):
            assert f"{engine}: {panel}" in words
    assert {"without", "with das", "replayed"} <= words


def test_no_picture_of_nothing(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match="real_run"):
        picture.draw(tmp_path, tmp_path / "drawn.svg")
