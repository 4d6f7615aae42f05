"""Which training step the engine's requests belong to, from what an engine hears of its trainer."""

from __future__ import annotations


class TrainingStep:
    """The version of the policy, as an int that never falls.

    The weight version, where it is a number (trainers pass their step). Else one more for each other version or seen
    weight update, however many calls that took: it counts when the next request starts. Rollouts pushed with a later
    step, or a step that is told, raise it too. The weights an engine starts with are step 0.
    """

    def __init__(self) -> None:
        self._step = 0
        self._version: str | None = None
        self._is_updated = False

    def note_update(self) -> None:
        """Weights were updated, or are about to be."""
        self._is_updated = True

    def raise_to(self, training_step: int) -> None:
        """A trainer said which step it is at, or pushed rollouts of that step."""
        self._step = max(self._step, training_step)
        self._is_updated = False

    def now(self, weight_version: str | None) -> int:
        """Return the training step of a request that starts now. Never raises. O(1)."""
        is_first = self._version is None
        is_other = weight_version != self._version
        self._version = weight_version
        if is_other and weight_version is not None and weight_version.isdecimal():
            self.raise_to(min(int(weight_version), (1 << 62) - 1))
        elif self._is_updated or (is_other and not is_first):
            self._step += 1
            self._is_updated = False
        return self._step
