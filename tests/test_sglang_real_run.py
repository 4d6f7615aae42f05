"""Two training steps of examples/real_run on SGLang's real engine: with das the run is the same, to the last bit."""

import os
import re
import subprocess
import sys

import pytest
import run_file
from command_runs import REPOSITORY

pytestmark = pytest.mark.sglang


def test_training_with_das_is_training_without(tmp_path):
    command = [sys.executable, "examples/real_run/real_run.py", "--sglang", sys.executable, "--steps", "2"]
    done = subprocess.run(
        [*command, "--out", str(tmp_path)],
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'integrations'}"},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"^(holds |MISSED)", done.stdout, re.MULTILINE) == ["holds "] * 3
    without, with_das = (
        run_file.read(run_file.path_of(tmp_path, engine="sglang", drafts=drafts, seed=0)) for drafts in (False, True)
    )
    assert [step.weights for step in with_das] == [step.weights for step in without]
    assert len({step.weights for step in with_das}) == 2  # each update changed them
    assert [step.num_decode_steps for step in without] == [
        sum(map(len, step.responses)) - len(step.responses) for step in without
    ]
    for ours, theirs in zip(with_das, without, strict=True):
        assert ours.num_decode_steps < 0.6 * theirs.num_decode_steps
        assert ours.makespan_passes < theirs.makespan_passes
