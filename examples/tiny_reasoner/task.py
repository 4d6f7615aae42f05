"""The task of the tiny reasoner: reach a target from three numbers, by trying aloud.

A prompt is `07 03 05>26:`. A response is a row of trials, each worked out step by step: `7+3=10+5=15?` says that this
one misses, `7*3=21+5=26!` that this one hits, and ends the response. A response is right if its last trial uses each
number once, its arithmetic holds, and it reaches the target. How long that takes depends on luck and on the policy.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

CHARACTERS = "0123456789+-*=>?! :"
NUM_TOKENS = 32  # characters, the end of a response, and unused rows
END = len(CHARACTERS)
MAX_RESPONSE_TOKENS = 192

_OPERATIONS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
_LARGEST = 99
_HIT_RATE = 0.2  # of the trials in demonstrations: what is left to learn from rewards
_TRIAL = re.compile(r"(\d+)([-+*])(\d+)=(\d+)([-+*])(\d+)=(\d+)!")


@dataclass(frozen=True, slots=True)
class Problem:
    """Three numbers of 1..12 and a target of 0..99 that a trial can reach."""

    numbers: tuple[int, int, int]
    target: int

    @property
    def prompt(self) -> str:
        """The prompt's text, 12 characters."""
        return " ".join(f"{number:02}" for number in self.numbers) + f">{self.target:02}:"


def encode(text: str) -> list[int]:
    """Return one token id a character."""
    return [CHARACTERS.index(character) for character in text]


def decode(token_ids: Sequence[int]) -> str:
    """Return the text up to the end of the response."""
    return "".join(CHARACTERS[token] for token in itertools.takewhile(lambda token: token < END, token_ids))


def trials(numbers: tuple[int, int, int]) -> dict[str, int]:
    """Return every trial of these numbers, without its mark, and the result it reaches."""
    found = {}
    for first, second, third in itertools.permutations(numbers):
        for name, operation in _OPERATIONS.items():
            middle = operation(first, second)
            if not 0 <= middle <= _LARGEST:
                continue
            for last_name, last_operation in _OPERATIONS.items():
                result = last_operation(middle, third)
                if 0 <= result <= _LARGEST:
                    found[f"{first}{name}{second}={middle}{last_name}{third}={result}"] = result
    return found


def random_problem(source: random.Random) -> Problem:
    """Return a problem that has a solution."""
    numbers = (source.randint(1, 12), source.randint(1, 12), source.randint(1, 12))
    return Problem(numbers, source.choice(sorted(set(trials(numbers).values()))))


def demonstration(problem: Problem, source: random.Random) -> str:
    """Return a response that tries at random, never the same twice, and hits at last."""
    results = trials(problem.numbers)
    hits = [trial for trial, result in results.items() if result == problem.target]
    misses = [trial for trial, result in results.items() if result != problem.target]
    source.shuffle(misses)
    num_misses = 0
    while num_misses < min(7, len(misses)) and source.random() > _HIT_RATE:
        num_misses += 1
    return "".join(f"{trial}?" for trial in misses[:num_misses]) + source.choice(hits) + "!"


def reward(problem: Problem, response: str) -> float:
    """Return 1.0 for a response that solves the problem, else 0.0."""
    trial = _TRIAL.fullmatch(response[response.rfind("?") + 1 :])
    if trial is None:
        return 0.0
    first, name, second, middle, last_name, third, result = trial.groups()
    return float(
        sorted(map(int, (first, second, third))) == sorted(problem.numbers)
        and _OPERATIONS[name](int(first), int(second)) == int(middle)
        and _OPERATIONS[last_name](int(middle), int(third)) == int(result)
        and int(result) == problem.target
    )
