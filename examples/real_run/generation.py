"""What the training loop asks of an engine, and what it hears."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

WIDTHS = (0, 1, 3, 7)  # draft tokens a request that a pass of SGLang may verify; vLLM verifies each draft as it is
MIN_SURVIVAL = (
    0.15  # of PriceBudget, the policy of both engines: it looks at no clock, so that a replay drafts the same
)
LONGEST_DRAFT = WIDTHS[-1]


@dataclass(frozen=True, slots=True)
class Generation:
    """The rollouts of a training step.

    Args:
        responses: token ids, the end included.
        num_decode_steps: of all requests, behind the first token of each, which comes with the prefill.
        makespan_passes: decode passes from the prefill until the last request ended.
        makespan_s: wall time from the first prompt to the last response.
    """

    responses: list[list[int]]
    num_decode_steps: int
    makespan_passes: int
    makespan_s: float


class Engine(Protocol):
    """An inference engine that weights are loaded into."""

    def load(self, folder: Path) -> None:
        """Take the weights of a model folder from now on."""

    def generate(self, prompts: Sequence[list[int]], *, request_ids: Sequence[str]) -> Generation:
        """Sample a response to each prompt at temperature 1, all at once."""

    def close(self) -> None:
        """Shut the engine down."""
