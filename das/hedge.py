"""Hedged drafting, the alternative to the one blend: experts are mixed by how well each has predicted lately.

The blend of all sources and contexts is one opinion. Others are to trust the running text alone, or the history alone,
or short contexts only; which of them is right may change with the policy. `Hedge` keeps nine such experts and mixes
their estimates. Nothing has to be tried to learn: verification tells of every expert what it would have lost, so
feedback is full information, and the algorithm is optimistic fixed-share Hedge. OnlineSPEC (arXiv 2603.12617) learns
such an ensemble over draft models; here it is over sources and contexts.

A round is a prediction whose context was verified, and which says that the next token is x. Expert i gave x the
probability p_i. If x came, its loss l_i is (1 - p_i)^2, else p_i^2. With learning rate eta, share alpha, N = 9 experts,

    mixture    w_i  ~  v_i exp(-eta m_i)            m: the losses expected, a running mean of those so far
    update     v_i  <- (1 - alpha) v_i exp(-eta l_i) / sum_j v_j exp(-eta l_j)  +  alpha / N

What it promises (dynamic regret): against any sequence of experts e_1 .. e_T that changes S times,

    sum_t w_t . l_t  -  sum_t l_t(e_t)   <=   (ln N + S ln(N / alpha) + (T - 1 - S) ln(1 / (1 - alpha))) / eta
                                              + eta / 8  sum_t (max_i d_ti - min_i d_ti)^2,     d_t = l_t - m_t

whatever the tokens are: no worse than the best expert of each stretch but for a price for each change, and less than
that where losses are as expected. As (1 - p)^2 and p^2 are convex, the mixture's own loss is at most w_t . l_t. The
bound is for feedback that comes before the next prediction. It comes after the step, and each prediction in between can
move the weights, so in a large batch the bound says little; and it speaks of these losses, not of tokens accepted. For
those there are measurements, in DESIGN.md.

Sources: Hedge, Freund and Schapire 1997; fixed share, Herbster and Warmuth 1998; the optimistic form, Rakhlin and
Sridharan 2013 (where the losses expected may be any function of the past).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

from das._hedge import EXPERTS, expect
from das._rule import Rule
from das.checked_values import check_state, checked_number, checked_numbers
from das.worker_states import checked_states

Weights = npt.NDArray[np.float64]


class Hedge:
    """Weights of nine experts: the text they know (running, history, both) times their longest context (3, 8, 16).

    `Drafter(history, hedge=Hedge())` drafts by it. The mixed estimate is calibrated as the blend's is (`Confidence`).
    The blend is the default: whether this is better differs by log (DESIGN.md), and it takes 1.9 times the time.

    Args:
        learning_rate: eta, 0 < eta <= 100. How much a loss counts: after a loss of 1 more than another's, an expert
            weighs exp(-eta) as much.
        share: alpha, 0 < alpha < 1. What all experts share evenly after each prediction: how fast one that was wrong
            comes back. At 0.003 the last three hundred or so predictions decide.
        hint_rate: of the running mean of losses that is expected next, 0..1; 0: nothing is expected (plain fixed
            share); 1: the last loss.
        per_request: each request has weights of its own, which begin even and end with it; `weights` stay as they are.
            They must learn from fewer predictions: learning_rate=1.0 and share=0.03 measure best.

    Attributes:
        learning_rate, share, hint_rate, per_request: as given. Read-only: a drafter takes them in when it is made.
        weights: float64, (9,), sum 1, in order of `EXPERTS`.
        expected_losses: float64, (9,), 0..1.

    Raises:
        TypeError, ValueError: an argument is of another kind, or out of range.

    Complexity: 216 bytes; nine blends a candidate.
    """

    EXPERTS = EXPERTS
    """(source, longest context) of each expert."""

    __slots__ = ("_arrays", "_hint_rate", "_learning_rate", "_per_request", "_share")

    def __init__(
        self, *, learning_rate: float = 0.3, share: float = 0.003, hint_rate: float = 0.02, per_request: bool = False
    ) -> None:
        self._learning_rate = checked_number(learning_rate, "learning_rate")
        self._share = checked_number(share, "share")
        self._hint_rate = checked_number(hint_rate, "hint_rate")
        if not isinstance(per_request, (bool, np.bool_)):
            raise TypeError(f"per_request must be a bool, not {type(per_request).__name__}")
        self._per_request = bool(per_request)
        if not 0.0 < self._learning_rate <= _MAX_LEARNING_RATE:
            raise ValueError(
                f"learning_rate is {learning_rate}; it must be 0 < learning_rate <= {_MAX_LEARNING_RATE:g}"
            )
        if not 0.0 < self._share < 1.0:
            raise ValueError(f"share is {share}; it must be 0 < share < 1")
        if not 0.0 <= self._hint_rate <= 1.0:
            raise ValueError(f"hint_rate is {hint_rate}; it must be 0 <= hint_rate <= 1")
        self._arrays: Weights = np.empty((3, len(EXPERTS)))  # weights, expected losses, mixture; the kernel's, too
        self.reset()

    def __copy__(self) -> Hedge:
        """Return a hedge that learns for itself from here on; a drafter writes into the weights of its own."""
        copied = type(self)(
            learning_rate=self.learning_rate,
            share=self.share,
            hint_rate=self.hint_rate,
            per_request=self.per_request,
        )
        copied._set(self.weights, self.expected_losses)
        return copied

    @property
    def learning_rate(self) -> float:
        """Eta: how much a loss counts."""
        return self._learning_rate

    @property
    def share(self) -> float:
        """Alpha: what all experts share evenly after each prediction."""
        return self._share

    @property
    def hint_rate(self) -> float:
        """Of the running mean of losses that is expected next."""
        return self._hint_rate

    @property
    def per_request(self) -> bool:
        """Whether each request has weights of its own."""
        return self._per_request

    @property
    def weights(self) -> Weights:
        """A copy of the weights."""
        return np.array(self._arrays[0])

    @property
    def expected_losses(self) -> Weights:
        """A copy of the losses that are expected."""
        return np.array(self._arrays[1])

    def state(self) -> dict[str, Weights]:
        """Return what was learned, as plain arrays: "weights" and "expected_losses"."""
        return {"weights": self.weights, "expected_losses": self.expected_losses}

    def load_state(self, state: Mapping[str, npt.ArrayLike]) -> None:
        """Replace what was learned by `state`.

        Raises:
            KeyError: an array is missing. TypeError: no mapping, or an array of something else than numbers.
            ValueError: wrong shape, weights that are not positive or do not add up to 1, or losses that are not 0..1.
            Nothing changes then.
        """
        check_state(state)
        self._set(*_checked(state))

    def merge(self, states: Iterable[Mapping[str, npt.ArrayLike]]) -> None:
        """Replace what was learned by what several workers learned: their own `state`s, in any order.

        Weights are the normalised geometric mean, which is what the mean of the workers' losses leads to; expected
        losses are the mean. Equal states give that state.

        Args:
            states: at least one. What this object learned is replaced as well: to keep it, give its `state()`, too.

        Raises:
            TypeError, ValueError: no states. KeyError, TypeError, ValueError: as `load_state`, naming the position.
            Nothing changes then.

        Complexity: O(states). Sums are made in order of size, so the order of the states changes no bit.
        """
        checked = checked_states(states, _checked)
        weights, losses = (np.sort(np.stack(arrays), axis=0) for arrays in zip(*checked, strict=True))
        mean = np.exp(np.log(weights).mean(axis=0))
        self._set(mean / mean.sum(), losses.mean(axis=0))

    def reset(self) -> None:
        """Forget everything that was learned: even weights, no losses expected."""
        self._set(np.full(len(EXPERTS), 1.0 / len(EXPERTS)), np.zeros(len(EXPERTS)))

    def apply_to(self, rule: Rule) -> None:
        """Have a drafter's rule mix the experts, and teach these weights."""
        rule.hedge(
            self._arrays,
            learning_rate=self.learning_rate,
            share=self.share,
            hint_rate=self.hint_rate,
            per_request=self.per_request,
        )

    def _set(self, weights: Weights, expected_losses: Weights) -> None:
        """In place: the batch kernel holds on to the array."""
        self._arrays[0] = weights
        self._arrays[1] = expected_losses
        expect(self._arrays, self.learning_rate)


_MAX_LEARNING_RATE = 100.0  # beyond, weights would leave the range of doubles


def _checked(state: Mapping[str, npt.ArrayLike]) -> tuple[Weights, Weights]:
    weights, losses = (
        checked_numbers(state[name], name, shape=(len(EXPERTS),)) for name in ("weights", "expected_losses")
    )
    if not ((weights > 0.0).all() and abs(weights.sum() - 1.0) < 1e-9):
        raise ValueError("weights must be positive and add up to 1")
    if not ((losses >= 0.0).all() and (losses <= 1.0).all()):
        raise ValueError("expected_losses holds a loss that is not 0 <= loss <= 1")
    return weights, losses
