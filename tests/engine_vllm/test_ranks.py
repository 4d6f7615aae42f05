"""Ranks that each schedule for themselves draft the same tokens, however fast they are."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from engine_runs import Case, token_ids


def test_two_ranks_one_of_them_slowed_draft_the_same(
    tiny_model: Path, cases: list[Case], undrafted: dict[str, list[Any]], tmp_path: Path
) -> None:
    script = Path(__file__).with_name("rank_run.py")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*launcher, str(script), str(tiny_model), str(tmp_path)], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-4000:]
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    assert first["fault"] is None
    assert first["accepted"] > 0
    assert any(draft for step in first["drafts"] for draft in step)
    greedy = [case.name for case in cases if case.parameters["temperature"] == 0.0]
    for epoch in first["outputs"]:
        assert epoch == {name: token_ids(undrafted[name]) for name in greedy}
