"""Long, Medium and Short requests: the runtime classes of DAS (arXiv 2511.13841, section 4.2.3).

A rollout's class is where its length lies among those of the last rollouts; a running request's class is the likeliest
one, given what its prompt's earlier rollouts were and how far it has got.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from enum import IntEnum
from itertools import islice, repeat
from typing import Any, NamedTuple

import numpy as np

from das.checked_values import check_state, checked_number
from das.length_grid import (
    NUM_BINS,
    FloatArray,
    IntArray,
    bins_of_lengths,
    length_exceeded_by,
    longer_than,
    within_grid,
)
from das.lengths import KeyArray, LengthModel, check_range, int_array, parallel_arrays

_MOST_REQUESTS = 16384  # whose classes are remembered


class LengthClass(IntEnum):
    """How long a rollout is beside others."""

    SHORT = 0
    MEDIUM = 1
    LONG = 2


_CLASSES = len(LengthClass)


class LengthClasses:
    """Sorts running requests into Short, Medium and Long, from the lengths of finished rollouts.

    Thresholds are quantiles of the last rollouts of all prompts, so they follow lengths that shift in training.

    - The *initial* class is what most of the prompt's last rollouts were (of equals the longer one): a wrong Long costs
      draft tokens, a wrong Short the makespan. A prompt without a finished rollout starts as Medium.
    - The *runtime* class is the likeliest, P(class | tokens so far, initial class), from the lengths of rollouts whose
      prompt had that initial class, shrunk to those of all. The longer a request runs, the longer its class.
    - A request's class never falls, whatever thresholds do meanwhile.

    Args:
        lengths: what the classes are found from; it must learn through this object. None: LengthModel().
        medium_above, long_above: the share of rollouts that are Short, and that are not Long; 0 < medium_above <
            long_above < 1. The paper names no thresholds; these are ours.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, or out of range.
    """

    def __init__(
        self, lengths: LengthModel | None = None, *, medium_above: float = 0.5, long_above: float = 0.8
    ) -> None:
        if lengths is not None and not isinstance(lengths, LengthModel):
            raise TypeError(f"lengths must be a LengthModel, not {type(lengths).__name__}")
        medium, long = checked_number(medium_above, "medium_above"), checked_number(long_above, "long_above")
        if not 0.0 < medium < long < 1.0:
            raise ValueError(
                f"medium_above is {medium_above}, long_above {long_above}; it must be 0 < medium_above < long_above < 1"
            )
        self.lengths = LengthModel() if lengths is None else lengths
        self.medium_above, self.long_above = medium, long
        self._forget()

    def _forget(self) -> None:
        self._window: deque[tuple[int, int]] = deque()  # initial class and bin of the last rollouts
        self._above = np.zeros((_CLASSES, NUM_BINS + 1))  # of these, longer than each edge, by initial class
        self._requests: dict[int, int] = {}  # 3 * initial + present class, by request number
        self._learned: _Learned | None = None

    def thresholds(self) -> tuple[float, float]:
        """Return the lengths, in tokens, beyond which a rollout is Medium, and Long. O(1), O(bins) after a rollout."""
        medium, long = self._learn().thresholds.tolist()
        return medium, long

    def observe_finished(self, prompt_keys: KeyArray, num_response_tokens: IntArray) -> None:
        """Learn from finished rollouts, `lengths` included. Args, Raises: as `LengthModel.observe_finished`.

        Rollouts told of together have the initial class of their prompt before all of them.

        Complexity: O(rollouts x bins), some 8 us each.
        """
        keys, lengths = parallel_arrays(prompt_keys, num_response_tokens)
        initial = self.initial_classes(keys)
        self.lengths.observe_finished(keys, lengths)
        for its_class, its_bin in zip(initial.tolist(), bins_of_lengths(lengths).tolist(), strict=True):
            self._push(its_class, its_bin)
        self._learned = None

    def observe_running(self, num_response_tokens: IntArray) -> None:
        """Take note of all requests that run now. Args, Raises, Complexity: as `LengthModel.observe_running`."""
        self.lengths.observe_running(num_response_tokens)
        self._learned = None

    def initial_classes(self, prompt_keys: KeyArray) -> IntArray:
        """Return the class that each request starts in, int64 [requests]. O(requests).

        Args:
            prompt_keys: which prompt each answers, uint64 [requests].
        """
        at = np.append(0.0, self._learn().thresholds)
        longer = self.lengths.prompt_rollouts_longer_than(at, prompt_keys=prompt_keys)
        return np.where(longer[:, 0] > 0, _likeliest(*longer.T), int(LengthClass.MEDIUM))

    def probabilities(self, initial_classes: IntArray, num_response_tokens: IntArray) -> FloatArray:
        """Return P(class | tokens so far, initial class), float64 [requests, 3]: Short, Medium, Long. O(requests).

        Args:
            initial_classes: 0..2, int64 [requests].
            num_response_tokens: of each so far, int64 [requests].
        """
        reached, medium_or_long, long = self._longer(initial_classes, num_response_tokens)
        return np.stack([reached - medium_or_long, medium_or_long - long, long], axis=1) / reached[:, None]

    def classes(self, request_numbers: IntArray, prompt_keys: KeyArray, num_response_tokens: IntArray) -> IntArray:
        """Return the present class of each running request, and remember it: it is the least one from here on.

        Args:
            request_numbers: unique to each request, int64 [requests]. Of the last 16,384 requests the class is
                remembered, also while they are not asked about.
            prompt_keys: which prompt each answers, uint64 [requests].
            num_response_tokens: of each so far, int64 [requests].

        Returns:
            0 (Short), 1 (Medium) or 2 (Long), int64 [requests].

        Complexity: O(requests), about 80 us for 256.
        """
        numbers = request_numbers.tolist()
        known = self._known(numbers)
        if len(known) and known.min() < 0:
            is_new = known < 0
            known[is_new] = (_CLASSES + 1) * self.initial_classes(prompt_keys[is_new])
            self._remember(numbers, known)
        initial, before = known // _CLASSES, known % _CLASSES
        present = np.maximum(before, _likeliest(*self._longer(initial, num_response_tokens)))
        for position in np.flatnonzero(present > before).tolist():
            self._requests[numbers[position]] = int(_CLASSES * initial[position] + present[position])
        return present

    def state(self) -> dict[str, Any]:
        """Return what was learned, as arrays and a state of `lengths`; nothing of running requests."""
        window = np.array(self._window, np.uint8).reshape(-1, 2)
        return {"lengths": self.lengths.state(), "window_classes": window[:, 0], "window_bins": window[:, 1]}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Replace what was learned by `state`.

        Raises:
            KeyError: a part is missing. TypeError, ValueError: no mapping, or not such arrays; as
            `LengthModel.load_state`. Nothing changes then.
        """
        check_state(state)
        check_state(state["lengths"], "lengths")
        classes, bins = (int_array(state[name], name) for name in ("window_classes", "window_bins"))
        check_range(classes, "window_classes", below=_CLASSES)
        check_range(bins, "window_bins", below=NUM_BINS)
        if len(classes) != len(bins):
            raise ValueError("window_classes and window_bins differ in length; they describe the same rollouts")
        self.lengths.load_state(state["lengths"])
        self._forget()
        for its_class, its_bin in zip(classes.tolist(), bins.tolist(), strict=True):
            self._push(its_class, its_bin)

    def __repr__(self) -> str:
        return f"LengthClasses({self.lengths}, medium_above={self.medium_above:g}, long_above={self.long_above:g})"

    def _known(self, numbers: list[int]) -> IntArray:
        """Return what is remembered of requests, -1 where nothing is."""
        return np.fromiter(map(self._requests.get, numbers, repeat(-1)), np.int64, len(numbers))

    def _remember(self, numbers: list[int], known: IntArray) -> None:
        """Remember the classes of requests; where there are too many, these longer than others."""
        self._requests.update(zip(numbers, known.tolist(), strict=True))
        too_many = len(self._requests) - max(_MOST_REQUESTS, len(numbers))
        if too_many > 0:
            for number in numbers:
                self._requests[number] = self._requests.pop(number)
            for number in list(islice(self._requests, too_many)):
                del self._requests[number]

    def _push(self, its_class: int, its_bin: int) -> None:
        if len(self._window) == self.lengths.window_rollouts:
            oldest_class, oldest_bin = self._window.popleft()
            self._above[oldest_class, : oldest_bin + 1] -= 1.0
        self._window.append((its_class, its_bin))
        self._above[its_class, : its_bin + 1] += 1.0

    def _learn(self) -> _Learned:
        if self._learned is None:
            overall = self.lengths.survival_at_edges()
            shares = np.array([1.0 - self.medium_above, 1.0 - self.long_above])
            thresholds = length_exceeded_by(shares, np.broadcast_to(overall, (2, len(overall))))
            above = self._above + self.lengths.shrinkage_rollouts * overall
            self._learned = _Learned(thresholds, above, longer_than(thresholds, above, np.arange(_CLASSES)[:, None]))
        return self._learned

    def _longer(self, initial_classes: IntArray, num_response_tokens: IntArray) -> tuple[FloatArray, ...]:
        """Return how many rollouts like each request got as far as it, and of these beyond each threshold."""
        learned = self._learn()
        reached = longer_than(within_grid(num_response_tokens), learned.above, initial_classes)
        return reached, *(np.minimum(reached, beyond[initial_classes]) for beyond in learned.above_thresholds.T)


class _Learned(NamedTuple):
    """What classes are found from.

    Args:
        thresholds: tokens, of Medium and Long.
        above: rollouts longer than each edge, by initial class, shrunk to those of all [3, edges].
        above_thresholds: and longer than the thresholds [3, 2].
    """

    thresholds: FloatArray
    above: FloatArray
    above_thresholds: FloatArray


def _likeliest(rollouts: FloatArray, medium_or_long: FloatArray, long: FloatArray) -> IntArray:
    """Return the class of most rollouts; of equals the longer one."""
    medium, short = medium_or_long - long, rollouts - medium_or_long
    is_long = (long >= medium) & (long >= short)
    return np.where(is_long, int(LengthClass.LONG), np.where(medium >= short, int(LengthClass.MEDIUM), 0))
