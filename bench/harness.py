"""Runs measurements one per subprocess, in shuffled order, and keeps a JSON row of each.

A benchmark is a module with `measure(job) -> results`. A job is a plain dictionary that says all there is to say; the
child reads it from its standard input and answers on its standard output: `python -m bench.harness MODULE [CPU]`.
"""

import argparse
import ctypes
import gc
import json
import os
import platform
import random
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

from bench.rollouts import EXAMPLE

ROOT = Path(__file__).parent.parent
Job = dict[str, Any]
Row = dict[str, Any]


def parser(description: str) -> argparse.ArgumentParser:
    """The options that all benchmarks share."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--log", type=Path, default=EXAMPLE, help="rollout log with two training steps (%(default)s)")
    options.add_argument("--out", type=Path, default=ROOT / "out", help="folder for the JSON lines (%(default)s)")
    options.add_argument("--seed", type=int, default=0, help="order of the measurements, and of the prompts")
    options.add_argument("--repeats", type=int, default=1, help="measure everything so often; tables show medians")
    options.add_argument("--cpu", type=int, default=None, help="pin every measurement to this core")
    options.add_argument("--timeout", type=float, default=3600, help="seconds for one measurement (%(default)s)")
    options.add_argument("--full", action="store_true", help="also 10 M indexed tokens, where sizes are measured")
    options.add_argument("--smoke", action="store_true", help="smallest sizes, seconds: does it run at all?")
    return options


def measure_all(bench: str, jobs: Sequence[Job], options: argparse.Namespace, *, workers: int = 1) -> list[Row]:
    """Run every job in a process of its own and return the rows, in the order of `jobs`.

    Failed and absent measurements are printed, kept as rows with an `error`, and left out of what is returned.
    """
    queue = [(number, job) for number, job in enumerate(jobs) for _ in range(options.repeats)]
    random.Random(options.seed).shuffle(queue)
    environment = _environment(options)
    options.out.mkdir(parents=True, exist_ok=True)
    rows: list[tuple[int, Row]] = []
    with (options.out / f"{bench}.jsonl").open("a") as out, ThreadPoolExecutor(workers) as pool:
        results = pool.map(lambda item: _run_child(bench, item[1], options), queue)
        for done, ((number, job), result) in enumerate(zip(queue, results, strict=True), 1):
            row = {"bench": bench, "job": job, **result, **environment}
            out.write(json.dumps(row) + "\n")
            out.flush()
            if "error" in result:
                print(f"[{done}/{len(queue)}] {label(job)}: {result['error']}", file=sys.stderr)
            else:
                print(f"[{done}/{len(queue)}] {label(job)}: {result['wall_s']:.1f} s", file=sys.stderr)
                rows.append((number, row))
    if len(rows) < len(queue):
        print(
            f"\n{bench}: {len(queue) - len(rows)} of {len(queue)} measurements are absent or failed; see its JSON lines"
        )
    return [row for _, row in sorted(rows, key=lambda item: item[0])]


def label(job: Job) -> str:
    """A job in one line."""
    return " ".join(str(value) for name, value in job.items() if name not in ("log", "seed"))


def resident_bytes() -> int:
    """The resident set of this process, after giving back what the allocator holds without need."""
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def median(rows: Iterable[Row], value: Callable[[Row], float]) -> float:
    """Median of one result over the repeats; not a number where there is no row."""
    values = [value(row) for row in rows]
    return statistics.median(values) if values else float("nan")


def percentile(values: Sequence[float], percent: int) -> float:
    """The smallest value that `percent` percent of the values do not exceed."""
    return sorted(values)[max(0, -(-len(values) * percent // 100) - 1)]


def print_table(title: str, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table in Markdown; numbers get three significant digits or one decimal, what is not a number a dash."""
    lines = [[_cell(value) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *lines, strict=True)]
    print(f"\n### {title}\n")
    for line in [list(header), ["-" * width for width in widths], *lines]:
        first, *others = [cell.rjust(width) for cell, width in zip(line, widths, strict=True)]
        print("| " + " | ".join([line[0].ljust(len(first)), *others]) + " |")


def _cell(value: object) -> str:
    if value is None or value != value:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 100 else f"{value:.3f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _run_child(bench: str, job: Job, options: argparse.Namespace) -> Row:
    pin = [] if options.cpu is None else [str(options.cpu)]
    command = [sys.executable, "-m", "bench.harness", f"bench.{bench}", *pin]
    start_s = time.perf_counter()
    try:
        child = subprocess.run(
            command, input=json.dumps(job), capture_output=True, text=True, cwd=ROOT, timeout=options.timeout
        )
    except subprocess.TimeoutExpired:
        return {"error": f"took longer than {options.timeout:g} s"}
    if child.returncode:
        return {"error": child.stderr.strip().splitlines()[-1] if child.stderr.strip() else f"exit {child.returncode}"}
    results: Row = json.loads(child.stdout.splitlines()[-1])
    return results | {"wall_s": round(time.perf_counter() - start_s, 3)}


def _environment(options: argparse.Namespace) -> Row:
    """What has to be known to repeat a measurement."""
    return {
        "command": shlex.join([Path(sys.executable).name, *sys.orig_argv[1:]]),
        "commit": _output("git", "rev-parse", "HEAD"),
        "uncommitted_changes": bool(_output("git", "status", "--porcelain")),
        "cpu": _cpu_name(),
        "num_cpus": os.cpu_count(),
        "pinned_to": options.cpu,
        "platform": platform.platform(),
        "python": platform.python_version(),
        "seed": options.seed,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _output(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


if __name__ == "__main__":
    if len(sys.argv) > 2:
        os.sched_setaffinity(0, {int(sys.argv[2])})
    measure: Callable[[Job], Row] = import_module(sys.argv[1]).measure
    print(json.dumps(measure(json.loads(sys.stdin.read()))))
