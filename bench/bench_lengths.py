"""Forecasts of lengths against a rollout log: how likely they found what came, and how far off they were.

    python -m bench.bench_lengths [--log FILE] [--group-size N]

Training steps follow one another, cut into batches of N samples a prompt. The rollouts of a batch are forecast from
what ended before it: at their start, and those that get so far at the median and at the 0.9 quantile of all lengths.
`log likelihood`: mean over rollouts of log P(bin of the final length), higher is better. `median error`: mean
|forecast median - length|, tokens. `bias`: mean expected remaining length / what remained - 1. Counts only, no times.
"""

import argparse
from collections import defaultdict
from itertools import product

import numpy as np
from numpy.typing import NDArray

from bench.harness import print_table
from bench.rollouts import EXAMPLE
from das import LengthModel
from das.analysis import read_log
from das.length_grid import bins_of_lengths

SHRINKAGE_ROLLOUTS = (1, 4, 16, 64, 1e6)
WINDOW_ROLLOUTS = (512, 2048)
AGES = (0.0, 0.5, 0.9)  # quantiles of all lengths
Batch = tuple[NDArray[np.uint64], NDArray[np.int64]]


def batches(log: str, group_size: int) -> list[Batch]:
    """Return prompt keys and lengths of each batch, in order of their ends."""
    steps: dict[int, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for record in read_log(log):
        rollout = record.rollout
        steps[rollout.training_step or 0][rollout.key].append(len(rollout.response_token_ids))
    found = []
    for _, prompts in sorted(steps.items()):
        for start in range(0, max(map(len, prompts.values())), group_size):
            pairs = [(n, key) for key, of_key in prompts.items() for n in of_key[start : start + group_size]]
            lengths, keys = zip(*sorted(pairs), strict=True)
            found.append((np.array(keys, np.uint64), np.array(lengths, np.int64)))
    return found


def scores(log: list[Batch], model: LengthModel) -> list[tuple[float, float, float]]:
    """Return log likelihood, median error and bias at each age, over all batches but the first."""
    sums = np.zeros((len(AGES), 5))
    for position, (keys, lengths) in enumerate(log):
        for row, age in enumerate(AGES if position else ()):
            so_far = int(model.quantile(age)) if age else 0
            running = lengths > so_far
            forecast = model.forecast(keys[running], np.full(running.sum(), so_far))
            bins = bins_of_lengths(lengths[running])
            likelihood = forecast.remaining_distribution()[np.arange(len(bins)), bins]
            errors = np.abs(forecast.quantile(0.5) - lengths[running])
            expected, remained = forecast.expected_remaining_tokens(), lengths[running] - so_far
            sums[row] += [len(bins), np.log(likelihood).sum(), errors.sum(), expected.sum(), remained.sum()]
        model.observe_finished(keys, lengths)
    return [(likely / n, error / n, expected / remained - 1) for n, likely, error, expected, remained in sums]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--log", default=str(EXAMPLE), help="a rollout log")
    options.add_argument("--group-size", type=int, default=8, metavar="N")
    given = options.parse_args()
    log = batches(given.log, given.group_size)
    rows = []
    for shrinkage, window in product(SHRINKAGE_ROLLOUTS, WINDOW_ROLLOUTS):
        found = scores(log, LengthModel(shrinkage_rollouts=shrinkage, window_rollouts=window))
        cells = [f"{likely:.3f}, {error:.0f}, {bias:+.1%}" for likely, error, bias in found]
        rows.append([f"{shrinkage:g}", str(window), *cells])
    header = ["shrinkage", "window", *(f"at quantile {age}" if age else "at the start" for age in AGES)]
    print_table("Forecasts of lengths: log likelihood, median error, bias", header, rows)


if __name__ == "__main__":
    main()
