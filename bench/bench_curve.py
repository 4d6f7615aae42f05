"""What the acceptance curve learned under one policy tells of the others, on replays of a log.

For each policy, the rollouts' counters go to an AcceptanceEstimator of its own. The table has its k and alpha, and by
how much its curve misses the share of tokens that each policy really had accepted. "own / all": the root mean square
error for the share of a prompt's next rollout, by the prompt's own k over by the k of all prompts.

    python -m bench.bench_curve [--log FILE]
"""

import argparse
import math
from pathlib import Path

import numpy as np

from bench.rollouts import EXAMPLE
from das import FixedBudget, PriceBudget, ThroughputBudget
from das.acceptance_curve import AcceptanceEstimator
from das.analysis import read_log
from das.analysis.replay import Replay

POLICIES = {
    **{f"cap {cap}": lambda cap=cap: FixedBudget(cap) for cap in (1, 2, 4, 8, 16, 32)},
    "throughput": ThroughputBudget,
    "price .15": lambda: PriceBudget(min_survival=0.15),
    "price .5": lambda: PriceBudget(min_survival=0.5),
}
Counts = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]  # prompt keys, emitted, drafted, accepted


def counts_under(log, policy) -> Counts:
    """Replay the log and return the counters of its rollouts, in order of their end."""
    run = Replay(log, policy=policy)
    run.run()
    finished = run.drafter.take_finished()
    return (
        finished.prompt_keys,
        finished.num_emitted_tokens,
        finished.num_drafted_tokens,
        finished.num_accepted_tokens,
    )


def observe(estimator: AcceptanceEstimator, counts: Counts) -> None:
    keys, emitted, drafted, accepted = counts
    estimator.observe(keys, num_emitted_tokens=emitted, num_drafted_tokens=drafted, num_accepted_tokens=accepted)


def own_over_all(counts: Counts) -> float:
    """How much better a prompt's own k predicts its next rollout."""
    estimator, squares = AcceptanceEstimator(), np.zeros(2)
    for i in range(len(counts[0])):
        one = tuple(part[i : i + 1] for part in counts)
        key, emitted, drafted, accepted = one
        if drafted[0]:
            reached = 1 - math.exp(-estimator.alpha * drafted[0] / emitted[0])
            guesses = np.array([estimator.estimate(key)[0][0], estimator.k]) * reached
            squares += emitted[0] / (emitted[0] + 100) * (accepted[0] / emitted[0] - guesses) ** 2
        observe(estimator, one)
    return math.sqrt(squares[0] / squares[1])


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--log", type=Path, default=EXAMPLE, help="rollout log (%(default)s)")
    log = [record.rollout for record in read_log(options.parse_args().log)]
    counts = {name: counts_under(log, make()) for name, make in POLICIES.items()}
    emitted = np.array([part[1].sum() for part in counts.values()])
    drafted, accepted = (np.array([part[i].sum() for part in counts.values()]) / emitted for i in (2, 3))
    print(
        "| seen under | k | alpha | own / all | " + " | ".join(POLICIES) + " |\n" + "|---" * (4 + len(POLICIES)) + "|"
    )
    for title, row in (("drafted per token", drafted), ("accepted per token", accepted)):
        print(f"| {title} | | | | " + " | ".join(f"{value:.3f}" for value in row) + " |")
    for name, seen in [*counts.items(), ("all caps", None)]:
        estimator = AcceptanceEstimator(memory_rollouts=100_000)
        for part in [seen] if seen else [part for cap, part in counts.items() if cap.startswith("cap")]:
            observe(estimator, part)
        missed = estimator.k * (1 - np.exp(-estimator.alpha * drafted)) - accepted
        ratio = f"{own_over_all(seen):.3f}" if seen else ""
        cells = " | ".join(f"{value:+.3f}" for value in missed)
        print(f"| {name} | {estimator.k:.3f} | {estimator.alpha:.2f} | {ratio} | {cells} |")


if __name__ == "__main__":
    main()
