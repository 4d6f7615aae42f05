# cython: language_level=3
"""Hedged drafting: nine blends instead of one, mixed by weights that follow which of them has been right.

An expert is a blend over the contexts of up to 3, 8 or 16 tokens, and over the text that is running, the history, or
both; other prompts' text is in all of them. What is drafted is the token with the largest weighted mean of their
estimates. Verification tells of every expert what it would have lost, so all of them learn from each prediction.
`das.hedge` says by which algorithm, and what it promises.
"""
from libc.math cimport exp
from libc.stdint cimport int32_t, uint32_t

from das._draft cimport (
    COMMON, FIRST_ESTIMATE, KAPPA, NUM_EXPERTS, WEIGHTS, Chain, ExpertWeights, Level, Request, RuleParameters,
)
from das._tree cimport count_continuation, count_continuations, places_of
from das._tree_arrays cimport HISTORY, RUNNING, Place, Tree

cdef enum:
    NUM_LIMITS = 3
    FROM_BOTH = 2               # beside RUNNING and HISTORY: a source of experts

cdef int32_t[NUM_LIMITS] LIMITS
LIMITS[:] = [3, 8, 16]

EXPERTS = tuple(
    (source, limit) for source in ("running", "history", "both") for limit in (LIMITS[0], LIMITS[1], LIMITS[2])
)


cdef double mix(Chain* chain, int32_t token, float* opinions) noexcept nogil:
    """The experts' P of a token, mixed; each one's own is written to `opinions` unless that is NULL."""
    cdef double[NUM_EXPERTS] estimates
    cdef const ExpertWeights* experts = chain.request.experts.weights
    cdef double mixed = 0.0
    cdef int32_t level, expert
    for expert in range(NUM_EXPERTS):
        estimates[expert] = FIRST_ESTIMATE
    for level in range(chain.evidence.num_levels):
        _correct(chain, &chain.evidence.levels[level], token, estimates)
    for expert in range(NUM_EXPERTS):
        mixed += experts.mixture[expert] * estimates[expert]
        if opinions != NULL:
            opinions[expert] = <float>estimates[expert]
    return mixed


cdef void _correct(Chain* chain, const Level* level, int32_t token, double* estimates) noexcept nogil:
    """Let what one context says correct the estimates of the experts who listen to it."""
    cdef const Tree* tree = chain.request.grows[level.tree].tree
    cdef const Place* place = &places_of(&chain.cursors[level.tree])[level.order]
    cdef uint32_t[2] count, total
    cdef double[3] counts, totals
    cdef int32_t source, limit, expert
    cdef double weight = WEIGHTS[level.tree]
    count_continuations(tree, place, level.order, total)
    count_continuation(tree, place, level.order, token, count)
    counts[FROM_BOTH] = weight * (<double>count[RUNNING] + count[HISTORY])
    totals[FROM_BOTH] = weight * (<double>total[RUNNING] + total[HISTORY])
    for source in range(FROM_BOTH):
        counts[source] = counts[FROM_BOTH] if level.tree == COMMON else weight * count[source]
        totals[source] = totals[FROM_BOTH] if level.tree == COMMON else weight * total[source]
    for source in range(FROM_BOTH + 1):
        for limit in range(NUM_LIMITS):
            expert = source * NUM_LIMITS + limit
            if level.order <= LIMITS[limit] and totals[source] > 0.0:
                estimates[expert] = (counts[source] + KAPPA * estimates[expert]) / (totals[source] + KAPPA)


cdef void teach(Request* request, const float* opinions, bint was_hit) noexcept nogil:
    """One round: every expert loses the square of what it was wrong by, and shares what is left."""
    cdef ExpertWeights* experts = request.experts.weights
    cdef const RuleParameters* rule = request.rule
    cdef double left = 0.0
    cdef double loss
    cdef int32_t expert
    for expert in range(NUM_EXPERTS):
        loss = (<double>opinions[expert] - was_hit) * (<double>opinions[expert] - was_hit)
        experts.weights[expert] *= exp(-rule.learning_rate * loss)
        left += experts.weights[expert]
        experts.expected_losses[expert] += rule.hint_rate * (loss - experts.expected_losses[expert])
    for expert in range(NUM_EXPERTS):
        experts.weights[expert] = (1.0 - rule.share) * experts.weights[expert] / left + rule.share / NUM_EXPERTS
    _expect(experts, rule.learning_rate)


cdef void _expect(ExpertWeights* experts, double learning_rate) noexcept nogil:
    """The optimistic part: weigh the experts as if they had lost once more what they are expected to lose."""
    cdef double total = 0.0
    cdef int32_t expert
    for expert in range(NUM_EXPERTS):
        experts.mixture[expert] = experts.weights[expert] * exp(-learning_rate * experts.expected_losses[expert])
        total += experts.mixture[expert]
    for expert in range(NUM_EXPERTS):
        experts.mixture[expert] /= total


cdef void start_experts(Request* request) noexcept nogil:
    """Give a request the experts' weights that all share, or even ones of its own."""
    cdef int32_t expert
    request.experts.weights = request.rule.expert_weights
    if request.rule.is_hedged_by_request:
        request.experts.weights = &request.experts.own
        for expert in range(NUM_EXPERTS):
            request.experts.own.weights[expert] = request.experts.own.mixture[expert] = 1.0 / NUM_EXPERTS
            request.experts.own.expected_losses[expert] = 0.0


def expect(double[:, ::1] weights not None, double learning_rate):
    """Bring the third row of (weights, expected losses, mixture) in line with the first two."""
    if (weights.shape[0], weights.shape[1]) != (3, NUM_EXPERTS):
        raise ValueError(f"weights must have shape (3, {NUM_EXPERTS})")
    _expect(<ExpertWeights*>&weights[0, 0], learning_rate)
