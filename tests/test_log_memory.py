"""Reading is streamed: memory does not grow with the file, whatever holds the rows."""

import io
import json
import pickle
import random
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from log_samples import row

READ = """
import sys
from das.analysis import read_log
num_tokens = num_rows = 0
for record in read_log(sys.argv[1]):
    num_rows += 1
    num_tokens += len(record.rollout.response_token_ids)
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(num_rows, num_tokens, int(peak.split()[1]) // 1024)
"""


def read_apart(path):
    """Read a log in a process of its own: rows, tokens, and the most memory it had at once in MiB."""
    done = subprocess.run([sys.executable, "-c", READ, path], capture_output=True, text=True, check=True, timeout=3000)
    return tuple(map(int, done.stdout.split()))


def tokens(rng, num_tokens):
    return rng.choices(range(1000, 130_000), k=num_tokens)


def json_lines(folder, num_bytes):
    """Short rows, each of a prompt of its own: what a reader keeps of each weighs most there."""
    rng, path, num_rows = random.Random(0), folder / "log.jsonl", 0
    rest = tokens(rng, 150)
    with open(path, "w", encoding="ascii") as log:
        while log.tell() < num_bytes:
            for _ in range(1000):
                log.write(json.dumps(row(prompt_token_ids=[num_rows, 1], response_token_ids=[num_rows, *rest])) + "\n")
                num_rows += 1
    return path, num_rows, 151 * num_rows


def parquet_table(folder, num_bytes):
    """One row group, as a trainer that writes a table at once leaves it."""
    path, num_tokens = folder / "log.parquet", 2000
    num_rows = num_bytes // (4 * num_tokens)
    ids = np.random.default_rng(0).integers(0, 1 << 30, num_rows * num_tokens, dtype=np.int32)
    offsets = np.arange(0, num_rows * num_tokens + 1, num_tokens, dtype=np.int32)
    responses = pa.ListArray.from_arrays(pa.array(offsets), pa.array(ids))
    prompts = pa.array([[number] for number in range(num_rows)], pa.list_(pa.int32()))
    table = pa.table({"prompt_token_ids": prompts, "response_token_ids": responses})
    pq.write_table(table, path, row_group_size=num_rows, use_dictionary=False)
    return path, num_rows, num_rows * num_tokens


def torch_archive(folder, num_bytes):
    """A dump as slime writes it, but without names that are said once and referred to."""
    rng, path = random.Random(0), folder / "3.pt"
    written = io.BytesIO()
    pickler = pickle.Pickler(written, protocol=2)
    pickler.fast = True
    logprobs = [rng.random() for _ in range(4000)]
    pickler.dump({"tokens": tokens(rng, 5000), "response_length": 4000, "rollout_log_probs": logprobs, "reward": 1.0})
    sample = written.getvalue()[2:-1]  # without the protocol in front and the stop behind
    num_rows = num_bytes // len(sample)
    head = b"\x80\x02}(X\x0a\x00\x00\x00rollout_idK\x03X\x07\x00\x00\x00samples]("
    with zipfile.ZipFile(path, "w") as archive, archive.open("dump/data.pkl", "w", force_zip64=True) as pickled:
        pickled.write(head)
        for _ in range(num_rows):
            pickled.write(sample)
        pickled.write(b"eu.")
    return path, num_rows, 4000 * num_rows


@pytest.mark.parametrize(
    ("write", "num_bytes"), [(json_lines, 16 << 20), (parquet_table, 32 << 20), (torch_archive, 8 << 20)]
)
def test_memory_does_not_grow_with_the_file(tmp_path: Path, write, num_bytes) -> None:
    peaks = []
    for size in (num_bytes // 16, num_bytes):
        path, num_rows, num_tokens = write(tmp_path, size)
        *read, peak_mib = read_apart(path)
        assert read == [num_rows, num_tokens]
        peaks.append(peak_mib)
    assert peaks[1] - peaks[0] < 12


@pytest.mark.slow
@pytest.mark.parametrize("write", [json_lines, parquet_table, torch_archive])
def test_a_gigabyte_takes_less_than_500_mb(tmp_path: Path, write) -> None:
    path, num_rows, num_tokens = write(tmp_path, 1 << 30)
    *read, peak_mib = read_apart(path)
    path.unlink()
    assert read == [num_rows, num_tokens]
    assert peak_mib * (1 << 20) < 500e6
