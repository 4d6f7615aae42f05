"""Bytes from the first rank to the others, over a real process group of two."""

import subprocess
import sys

import pytest
from command_runs import REPOSITORY

pytestmark = pytest.mark.sglang

RANK = """
import sys
from torch import distributed
from das_ray.rank_broadcast import broadcast_in

rank, store = int(sys.argv[1]), sys.argv[2]
distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
broadcast = broadcast_in(lambda: distributed.group.WORLD)
for message in (b"first", b"", bytes(range(256)) * 5000, b"last"):
    assert broadcast(message if rank == 0 else b"ignored") == message
print("all the same")
"""


def test_every_rank_gets_what_the_first_one_passed(tmp_path):
    paths = f"{REPOSITORY}:{REPOSITORY / 'integrations'}"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            text=True,
            env={"PYTHONPATH": paths, "PATH": "/usr/bin:/bin"},
        )
        for rank in range(2)
    ]
    assert [rank.communicate(timeout=120)[0].strip() for rank in ranks] == ["all the same"] * 2
