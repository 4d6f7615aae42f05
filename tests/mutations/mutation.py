"""One line that is wrong, where it stands, and why."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutation:
    """`old` occurs once in `file`; lines that recur come with a neighbour."""

    file: str
    name: str
    old: str
    new: str
    why: str
