"""Our figures beside a paper's: what a paper's module returns, how it is printed, and the command that does both."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.harness import print_table
from bench.papers.logged_step import Log, read
from bench.rollouts import EXAMPLE

Figure = float | str | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """One figure.

    Args:
        what: it is, with its unit.
        ours: computed by this command. A float is printed with three digits.
        paper: the same in the paper; None: it does not say.
        source: table, figure or section, "read off" where it was read off a plot by eye.
    """

    what: str
    ours: Figure
    paper: Figure = None
    source: str = ""

    @property
    def ratio(self) -> float | None:
        """Ours over the paper's, where both are numbers."""
        if isinstance(self.ours, str) or isinstance(self.paper, str) or self.ours is None or not self.paper:
            return None
        return self.ours / self.paper


@dataclass(frozen=True, slots=True)
class Claim:
    """A sentence that the figures above it bear out, or do not.

    Args:
        text: the sentence, with its tolerance where it has one.
        holds: whether our figures say so.
    """

    text: str
    holds: bool


@dataclass(frozen=True, slots=True)
class Section:
    """Figures that belong together.

    Args:
        title: what is reproduced.
        setting: what was computed, and on what.
        figures, claims: at least one of each.
        why: where ours differ from the paper's, the reason as far as it is known.
        beside: whose figures stand beside ours, where they are not the paper's.
    """

    title: str
    setting: str
    figures: tuple[Comparison, ...]
    claims: tuple[Claim, ...]
    why: str
    beside: str = "paper"


def print_section(section: Section) -> None:
    """Print a section in Markdown: the table, why it differs, and which claims hold."""
    print_table(
        section.title,
        ["figure", "ours", section.beside, f"ours / {section.beside}", "source"],
        [[row.what, row.ours, row.paper, row.ratio, row.source] for row in section.figures],
    )
    print(f"\nOurs: {section.setting}\nDiffers: {section.why}")
    for claim in section.claims:
        print(f"- {'holds' if claim.holds else 'DOES NOT HOLD'}: {claim.text}")


def run(description: str, sections: Callable[[Log], Sequence[Section]]) -> None:
    """Be the command of a paper's module."""
    options = argparse.ArgumentParser(description=description.split("\n", 1)[0])
    options.add_argument("--log", type=Path, default=EXAMPLE, help="rollout log with two training steps (%(default)s)")
    options.add_argument("--prompts", type=int, help="only so many of its prompts; fewer are quicker")
    options.add_argument("--seed", type=int, default=0, help="of the draw of samples and of the order of prompts")
    options.add_argument("--json", action="store_true", help="one JSON line a section instead of tables")
    chosen = options.parse_args()
    for section in sections(read(chosen.log, seed=chosen.seed, num_prompts=chosen.prompts)):
        if chosen.json:
            print(json.dumps(asdict(section)))
        else:
            print_section(section)
