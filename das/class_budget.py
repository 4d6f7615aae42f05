"""The class form of a length-aware budget: long requests draft far, short ones not at all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from das.budget import FinishedRollouts, FloatArray, IntArray, RunningRequests, check_draft_length, check_min_survival
from das.checked_values import check_state
from das.length_classes import LengthClasses


class LengthClassBudget:
    """A cap for each class of requests: Long aggressive, Medium intermediate, Short none.

    Classes follow the lengths of finished rollouts and how far a request has got; see `LengthClasses`.

    Args:
        long, medium, short: draft tokens of a request of that class, 0..64. The paper names no numbers; these are ours.
        min_survival: draft while the survival probability is at least this; 0 <= min_survival <= 1. The paper has none.
        classes: with what was learned, or other thresholds; no other policy may teach it. None: LengthClasses().

    Attributes:
        classes: as of now, but for the last finished rollouts, at most one for 64 in the window.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, or out of range.

    Source: DAS (arXiv 2511.13841), section 4.2.3.
    """

    __slots__ = ("_caps", "_has_new_rollouts", "_untold", "classes", "min_survival")

    def __init__(
        self,
        *,
        long: int = 16,
        medium: int = 8,
        short: int = 0,
        min_survival: float = 0.0,
        classes: LengthClasses | None = None,
    ) -> None:
        if classes is not None and not isinstance(classes, LengthClasses):
            raise TypeError(f"classes must be LengthClasses, not {type(classes).__name__}")
        caps = {"short": short, "medium": medium, "long": long}  # in the order of LengthClass
        checked = [check_draft_length(cap, name) for name, cap in caps.items()]
        self._caps = np.array(checked, np.int64)
        self.min_survival = check_min_survival(min_survival)
        self.classes = LengthClasses() if classes is None else classes
        self._has_new_rollouts = True  # since running requests were noted
        self._untold: list[FinishedRollouts] = []  # that classes have not heard of yet

    @property
    def max_draft_tokens(self) -> int:
        """The most that a request of any class may draft."""
        return int(self._caps.max())

    def budgets(self, requests: RunningRequests) -> tuple[IntArray, FloatArray]:
        """Return caps (int64, tokens) and prices (float64), one entry a request. Never raises.

        Complexity: O(requests), under 150 us for 256.
        """
        if self._has_new_rollouts and len(requests) == requests.num_running:
            self.classes.observe_running(requests.num_response_tokens)
            self._has_new_rollouts = False
        classes = self.classes.classes(requests.request_numbers, requests.prompt_keys, requests.num_response_tokens)
        return self._caps[classes], np.full(len(requests), self.min_survival, np.float64)

    def observe(self, drafted: IntArray, accepted: IntArray, *, step_ms: float | None = None) -> None:
        """Take note of verified drafts; classes learn nothing from them. Never raises."""

    def observe_finished(self, finished: FinishedRollouts) -> None:
        """Learn from the lengths of finished rollouts. O(rollouts), some 8 us each.

        To find the classes anew takes 0.1 ms, and in a large batch a rollout ends in nearly every step. So they wait
        until they are one for 64 in the window: fewer move no threshold.
        """
        self._untold.append(finished)
        if 64 * sum(map(len, self._untold)) >= self.classes.lengths.num_rollouts:
            self._tell()

    def state(self) -> dict[str, Any]:
        """Return what was learned: the state of `classes`.

        It holds numpy arrays, which JSON does not: `das.save_state` saves them.
        """
        self._tell()
        return {"classes": self.classes.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Replace what was learned by `state`.

        Raises:
            KeyError: a part is missing. TypeError, ValueError: no mapping; as `LengthClasses.load_state`. Nothing
            changes then.
        """
        check_state(state)
        check_state(state["classes"], "classes")
        self.classes.load_state(state["classes"])
        self._untold.clear()
        self._has_new_rollouts = True

    def _tell(self) -> None:
        """Tell the classes of the rollouts that wait, as of one moment."""
        if self._untold:
            keys, lengths = ([getattr(one, name) for one in self._untold] for name in _TOLD)
            self.classes.observe_finished(np.concatenate(keys), np.concatenate(lengths))
            self._untold.clear()
            self._has_new_rollouts = True

    def __repr__(self) -> str:
        short, medium, long = self._caps.tolist()
        return f"LengthClassBudget(long={long}, medium={medium}, short={short}, min_survival={self.min_survival:g})"


_TOLD = ("prompt_keys", "num_response_tokens")
