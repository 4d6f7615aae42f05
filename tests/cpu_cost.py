"""What a call costs the thread that makes it, in the time of a machine of known speed.

The same machine is 1.6 times slower at one hour than at another, and CI's is another machine, so a bar in microseconds
says little by itself. Each call is timed beside a reference task of the same kind: a few short NumPy calls and
some interpreted code. Where that takes longer than it did when the bars were set, the bars are wider by as much.
"""

import time
from collections.abc import Callable, Iterable

import numpy as np

REFERENCE_US = 100.0  # what the reference task takes on the machine the bars are for

VALUES = np.random.default_rng(0).random(256)


def reference_task() -> dict[int, float]:
    """Do a policy's kind of work, always the same."""
    total = 0.0
    for factor in range(1, 9):
        order = np.argsort(VALUES * factor)
        total += float(np.cumsum(VALUES[order])[-1])
    return {number: number * total for number in range(100)}


def timed_us(call: Callable[[], object]) -> float:
    """Return the CPU time of one call; what else runs on the machine does not count."""
    start_ns = time.thread_time_ns()
    call()
    return (time.thread_time_ns() - start_ns) / 1000


def times_us(calls: Iterable[Callable[[], object]]) -> list[float]:
    """Return the CPU time of each call, on a machine where the reference task takes REFERENCE_US, or this if faster."""
    spent, reference = [], []
    for call in calls:
        spent.append(timed_us(call))
        reference.append(timed_us(reference_task))
    slowness = max(1.0, min(reference) / REFERENCE_US)
    return [each / slowness for each in spent]


def least_us(call: Callable[[], object], *, tries: int = 300) -> float:
    """Return the least of many times of one call: what it costs when caches are warm and nothing disturbs it."""
    return min(times_us([call] * tries))
