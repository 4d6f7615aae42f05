"""The makespan optimum of DAS: how much to draft for each request, so that the whole batch ends soonest.

Request i is to emit l_i tokens, and p_i draft tokens are verified for it over its whole run. Then

    A_i(p_i) = k_i l_i (1 - exp(-alpha_i p_i / l_i))   of them are accepted              (Eq. 3, das.acceptance_curve)
    N = max_i (l_i - A_i(p_i))                         forwards run until the last ends  (Eq. 4)
    J = c_base N + c_tok sum_i p_i                     is what that takes                (Eq. 5)

To end within N forwards, drafts must spare a request l_i - N of its own, out of the s_i = k_i l_i that they can at
most: p_i(N) = (l_i / alpha_i) ln(s_i / (s_i - (l_i - N))), nothing where l_i <= N. J is convex in N, and least where

    c_base = c_tok sum_{l_i > N} (l_i / alpha_i) / (s_i - (l_i - N)),

whose right side falls in N, with a step down at each l_i. So drafting pays if and only if
c_base > c_tok sum_{i: l_i = max l} 1 / (alpha_i k_i).

The paper prints Eq. 7 and 9 with s_i = l_i / k_i, which is right for k_i = 1 only: it believes that drafts spare more
than they do, and its budgets miss the N that they are meant for.

Source: DAS, arXiv 2511.13841, Eq. 3 to 9; s_i from solving its Eq. 4 for p_i.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from das.acceptance_curve import decode_steps
from das.budget import FloatArray, IntArray, check_draft_length

Formula = Literal["corrected", "printed"]
Numbers = npt.ArrayLike

_MOST_TOKENS = 1e15
_MOST_MS = 1e9
_LEAST_K, _LEAST_ALPHA, _MOST_ALPHA = 1e-9, 1e-9, 1e9
_MOST_NEWTON_STEPS = 64  # 4 to 8 are usual; each one is safe to stop at
_CLOSE = 1e-13  # relative error of the condition above


def optimal_budgets(
    lengths: Numbers,
    *,
    k: Numbers,
    alpha: Numbers,
    c_base_ms: float,
    c_tok_ms: float,
    formula: Formula = "corrected",
    exact_cost: bool = False,
) -> tuple[float, FloatArray]:
    """Return the number of forwards, and the draft tokens of each request, that end a batch soonest.

    Args:
        lengths: tokens that each request is still to emit, 0..1e15.
        k: share of them that drafts can spare at most, 1e-9..1; one number, or one a request.
        alpha: how soon drafts reach that share, 1e-9..1e9; one number, or one a request.
        c_base_ms, c_tok_ms: of a forward, and of a token in it, 0..1e9.
        formula: "printed": as in the paper. Its forwards are those it promises; `forwards_needed` tells the real ones.
        exact_cost: also count c_tok for the token that a forward emits of each running request, which Eq. 5 leaves out:
            c_tok sum_i (p_i + l_i - A_i). Where k alpha > 1, the first drafts then cost less than nothing, and are made
            whoever ends last. Goes with the corrected formula.

    Returns:
        (forwards, draft tokens), a float and float64 >= 0, one a request: all drafts of its run together. Requests of
        equal length, k and alpha get equal budgets, longer ones of equal k and alpha no smaller ones. Where a token
        costs nothing, as many forwards are spared as can be, which takes infinitely many draft tokens; where that, and
        a forward, cost nothing, nothing is drafted.

    Raises:
        TypeError: no numbers. ValueError: one out of range or not finite (named with its position), numbers that are
        not one a request, an unknown formula, or exact_cost with what it excludes.

    Complexity: O(n log n) for n requests: a sort, a binary search over lengths (in which requests still draft?), and
    Newton's method between two of them. About 0.1 ms for 256 requests.

    Source: DAS (arXiv 2511.13841), Eq. 5 to 9.
    """
    lengths, k, alpha = _requests(lengths, k, alpha)
    c_base_ms = _number(c_base_ms, "c_base_ms", 0.0, _MOST_MS)
    c_tok_ms = _number(c_tok_ms, "c_tok_ms", 0.0, _MOST_MS)
    if formula not in get_args(Formula):
        raise ValueError(f"formula is {formula!r}; it must be 'corrected' or 'printed'")
    if exact_cost and formula != "corrected":
        raise ValueError(f"exact_cost goes with formula 'corrected', not with {formula!r}")
    draft_tokens = np.zeros(len(lengths))
    runs = lengths > 0
    if not runs.any():
        return 0.0, draft_tokens
    if not runs.all():
        lengths, k, alpha = lengths[runs], k[runs], alpha[runs]
    scales = lengths / alpha
    can_spare = lengths * k if formula == "corrected" else lengths / k
    ends, free_tokens = lengths, np.zeros(len(lengths))  # forwards until each ends with the drafts that cost nothing
    if exact_cost:
        ends = np.where(k * alpha > 1.0, lengths - can_spare + scales, lengths)
        free_tokens = scales * np.log(np.maximum(1.0, k * alpha))
    # N is kept as what it exceeds the least possible one by: the logarithm needs that, and a difference would lose it.
    least = max(0.0, float((lengths - can_spare).max()))
    offsets = least - (lengths - can_spare)
    with np.errstate(divide="ignore", over="ignore"):
        excess = _excess(ends, scales, offsets, least, _ratio(c_base_ms, c_tok_ms), exact_cost)
        drafted = scales * np.log(can_spare / (excess + offsets))
    draft_tokens[runs] = np.where(ends > least + excess, np.maximum(drafted, 0.0), free_tokens)
    return least + excess, draft_tokens


def forwards_needed(draft_tokens: Numbers, *, lengths: Numbers, k: Numbers, alpha: Numbers) -> float:
    """Return the forwards until the last request ends, with these drafts (Eq. 4).

    Args:
        draft_tokens: of each request over its run, at least 0; infinity is allowed.
        lengths, k, alpha: as for `optimal_budgets`.

    Raises:
        TypeError, ValueError: as `optimal_budgets`.

    Complexity: O(n).
    """
    return float(_decode_steps(draft_tokens, *_requests(lengths, k, alpha)).max(initial=0.0))


def makespan_ms(
    draft_tokens: Numbers,
    *,
    lengths: Numbers,
    k: Numbers,
    alpha: Numbers,
    c_base_ms: float,
    c_tok_ms: float,
    exact_cost: bool = False,
) -> float:
    """Return the milliseconds until the last request ends, with these drafts (Eq. 5).

    Args:
        draft_tokens: as for `forwards_needed`.
        lengths, k, alpha, c_base_ms, c_tok_ms, exact_cost: as for `optimal_budgets`.

    Raises:
        TypeError, ValueError: as `optimal_budgets`.

    Complexity: O(n).
    """
    c_base_ms = _number(c_base_ms, "c_base_ms", 0.0, _MOST_MS)
    c_tok_ms = _number(c_tok_ms, "c_tok_ms", 0.0, _MOST_MS)
    steps = _decode_steps(draft_tokens, *_requests(lengths, k, alpha))
    num_tokens = float(np.sum(draft_tokens)) + (float(steps.sum()) if exact_cost else 0.0)
    tokens_ms = c_tok_ms * num_tokens if c_tok_ms > 0 else 0.0  # infinitely many may cost nothing
    return c_base_ms * float(steps.max(initial=0.0)) + tokens_ms


def step_caps(draft_tokens: Numbers, *, num_forwards: float, max_draft_tokens: int = 16) -> IntArray:
    """Return how many tokens each request may draft in one decode step: its budget, spread over the forwards.

    Args:
        draft_tokens: of each request over its run, as `optimal_budgets` returns it.
        num_forwards: that the batch runs.
        max_draft_tokens: 0..64, the most that a cap can be.

    Returns:
        int64, one a request: the nearest whole number, a half upwards.

    Raises:
        TypeError, ValueError: a bad max_draft_tokens; a budget or a number of forwards that is negative or NaN.

    Complexity: O(n).
    """
    most = check_draft_length(max_draft_tokens)
    budgets = np.asarray(draft_tokens, np.float64)
    if not (budgets >= 0).all():
        raise ValueError("draft_tokens holds a budget that is not at least 0")
    if not num_forwards >= 0:
        raise ValueError(f"num_forwards is {num_forwards}; it must be at least 0")
    per_step = np.where(budgets > 0, most, 0.0)  # no forwards, or infinite budgets: as much as may be
    np.divide(budgets, num_forwards, out=per_step, where=np.isfinite(budgets) & (num_forwards > 0))
    caps: IntArray = np.floor(np.minimum(per_step, most) + 0.5).astype(np.int64)
    return caps


def step_prices(lengths: Numbers, *, num_forwards: float, k: Numbers, alpha: Numbers) -> FloatArray:
    """Return the survival from which on a draft token belongs to the optimum: what the last token of a budget brings.

    That is A_i'(p_i(N)) = alpha_i (s_i - (l_i - N)) / l_i. In the optimum it equals c_tok / (value of one accepted
    token), and the values of all requests that draft add up to c_base.

    Args:
        lengths, k, alpha: as for `optimal_budgets`.
        num_forwards: that the batch runs, as `optimal_budgets` returned it; at least 0.

    Returns:
        float64, one a request, 0..1: 0 for one that cannot end in so few forwards. Infinity for one that ends without
        drafts.

    Raises:
        TypeError, ValueError: as `optimal_budgets`.

    Complexity: O(n).
    """
    lengths, k, alpha = _requests(lengths, k, alpha)
    if not num_forwards >= 0:
        raise ValueError(f"num_forwards is {num_forwards}; it must be at least 0")
    prices = np.full(len(lengths), np.inf)
    drafts = lengths > num_forwards
    marginal = alpha[drafts] * (k[drafts] - 1.0 + num_forwards / lengths[drafts])
    prices[drafts] = np.clip(marginal, 0.0, 1.0)
    return prices


def _excess(
    ends: FloatArray, scales: FloatArray, offsets: FloatArray, least: float, ratio: float, exact_cost: bool
) -> float:
    """Return how many more forwards than the least possible are best.

    Args:
        ends: forwards in which each request ends without drafts that cost anything.
        scales: l_i / alpha_i.
        offsets: of the denominators: s_i - (l_i - N) = (N - least) + offset.
        least: forwards that no draft can spare.
        ratio: c_base / c_tok.
        exact_cost: each running request costs a token a forward: less drafting pays for one more that runs on.
    """
    if ratio == np.inf:
        return 0.0
    order = np.argsort(-ends)
    negative, scales, offsets = -ends[order], scales[order], offsets[order]

    def saved(excess: float, num_drafting: int) -> float:
        """Tokens that one forward more would save the requests that end last."""
        tokens = float((scales[:num_drafting] / (excess + offsets[:num_drafting])).sum())
        return tokens - num_drafting if exact_cost else tokens

    def ends_by(position: int) -> bool:
        """Is the optimum at or below the end at that position, the last one first?"""
        num_later = int(np.searchsorted(negative, negative[position]))
        return saved(-float(negative[position]) - least, num_later) <= ratio

    num_candidates = int(np.searchsorted(negative, -least, side="right"))
    low, high = 0, num_candidates  # ends_by(low) holds: nobody ends later than the last
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if ends_by(middle) else (low, middle)
    num_drafting = low + 1  # the optimum is at the end there, or between that and the one before it
    upper = -float(negative[low]) - least
    if saved(upper, num_drafting) >= ratio:
        return upper
    lower = -float(negative[high]) - least if high < num_candidates else 0.0
    scales, offsets = scales[:num_drafting], offsets[:num_drafting]
    target = ratio + num_drafting if exact_cost else ratio
    return min(upper, _root(scales, offsets, target, max(lower, float((scales / target - offsets).max()))))


def _root(scales: FloatArray, offsets: FloatArray, target: float, start: float) -> float:
    """Return the x where sum_i scale_i / (x + offset_i) is the target, from a start at or below it.

    1 / sum is concave in x, so Newton's method on it climbs from below and never overshoots.
    """
    x = start
    for _ in range(_MOST_NEWTON_STEPS):
        terms = scales / (x + offsets)
        total = float(terms.sum())
        too_much = total / target - 1.0
        if too_much <= _CLOSE:
            break
        x += too_much * total / float((terms * terms / scales).sum())
    return x


def _decode_steps(draft_tokens: Numbers, lengths: FloatArray, k: FloatArray, alpha: FloatArray) -> FloatArray:
    """Return the decode steps that each request takes."""
    drafted = np.asarray(draft_tokens, np.float64)
    if drafted.shape != lengths.shape:
        raise ValueError(f"draft_tokens has shape {drafted.shape}; it must have {len(lengths)} entries, one a request")
    if not (drafted >= 0).all():
        raise ValueError("draft_tokens holds a budget that is not at least 0")
    return decode_steps(drafted, lengths=lengths, k=k, alpha=alpha)


def _ratio(c_base_ms: float, c_tok_ms: float) -> float:
    if c_base_ms == 0:
        return 0.0
    return c_base_ms / c_tok_ms if c_tok_ms > 0 else np.inf


def _requests(lengths: Numbers, k: Numbers, alpha: Numbers) -> tuple[FloatArray, FloatArray, FloatArray]:
    array = _in_range(lengths, "lengths", 0.0, _MOST_TOKENS)
    if array.ndim != 1:
        raise ValueError(f"lengths has {array.ndim} dimensions; it must have one, with an entry a request")
    return (
        array,
        _one_a_request(_in_range(k, "k", _LEAST_K, 1.0), "k", len(array)),
        _one_a_request(_in_range(alpha, "alpha", _LEAST_ALPHA, _MOST_ALPHA), "alpha", len(array)),
    )


def _one_a_request(array: FloatArray, name: str, num_requests: int) -> FloatArray:
    if array.ndim == 0:
        return np.full(num_requests, array)
    if array.shape != (num_requests,):
        raise ValueError(f"{name} has shape {array.shape}; it must be one number, or {num_requests}, one a request")
    return array


def _in_range(values: Numbers, name: str, least: float, most: float) -> FloatArray:
    try:
        array: FloatArray = np.asarray(values, np.float64)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a number, or numbers of one shape, not {values!r}") from None
    good = (array >= least) & (array <= most)
    if not good.all():
        position = int(np.argmin(good))
        where = f"{name}[{position}]" if array.ndim else name
        raise ValueError(f"{where} is {array.flat[position]}; it must be {least:g} <= {name} <= {most:g}")
    return array


def _number(value: Any, name: str, least: float, most: float) -> float:
    array = _in_range(value, name, least, most)
    if array.ndim:
        raise ValueError(f"{name} has {array.ndim} dimensions; it must be one number")
    return float(array)
