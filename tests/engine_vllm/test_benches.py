"""Benchmarks that need torch run to the end: no figure comes from code that nothing else runs."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_gpu_rollout_runs_on_a_cpu_and_goes_on_where_it_was(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    sizes = ["--shape", "tiny", "--context", "16", "--requests", "4", "--tokens", "32", "--repeats", "1"]
    command = [sys.executable, "-W", "ignore", "-m", "bench.gpu_rollout", *sizes, "--out", str(out)]
    first = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert first.returncode == 0, first.stderr
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    rollouts = {row["policy"]: row for row in rows if row["kind"] == "rollout"}
    assert set(rollouts) == {"none", "fixed 4", "unlimited 16", "price 0.15", "throughput"}
    assert {row["emitted"] for row in rollouts.values()} == {4 * 32}
    assert rollouts["none"]["decode_steps"] == 4 * 32
    assert rollouts["price 0.15"]["decode_steps"] < 4 * 32
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert again.returncode == 0, again.stderr
    assert out.read_text().splitlines() == [json.dumps(row) for row in rows]  # nothing measured again
    assert "| throughput |" in again.stdout
