#!/bin/sh
# Runs the three benchmarks with the `python` on the path, which `make bench` sets to the peers' environment:
#   sh bench/run.sh [--smoke | --full] [--log FILE] [--seed N] [--repeats N]
# JSON lines go to out/, tables to the terminal and to out/bench.md. Without options about half an hour.
set -eu

cd "$(dirname "$0")/.."
python -c 'import das, bench.peers' || { echo "run 'make bench': it makes the environment" >&2; exit 1; }

cpu=$(python -c 'import os; print(max(os.sched_getaffinity(0)))')
mkdir -p out
{
    python -m bench.bench_tree --cpu "$cpu" "$@"
    python -m bench.bench_draft --cpu "$cpu" "$@"
    python -m bench.bench_accept "$@"
} | tee out/bench.md
