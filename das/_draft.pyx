# cython: language_level=3, cdivision=True
"""Drafting for a whole batch in one call: evidence of several context orders -> draft tokens with survival.

For each request the kernel reads, at the contexts of the last 1, 2, 3, 4, 6, 8, 12 and 16 tokens, how often the context
occurred and what followed most often. Starting from almost nothing, each longer context corrects the shorter one,

    P(x) <- (count_n(x) + KAPPA * P(x)) / (total_n + KAPPA)

as in PPM and interpolated n-gram models: a context seen often speaks for itself, one seen once moves the estimate only
part of the way. Candidates x are the contexts' top children. A request whose prompt has no history, or one that explains
nothing of what is emitted now, reads each context in a second tree, too, which holds what such prompts' requests emit: a
fifth of the weight, and corrected by its own.

The best candidate's P is then *calibrated*: it is sorted into a cell by its logit and by who ever continued so (running
text, history, both, or other prompts only), and replaced by the hit rate that such predictions lately had, known from
verification feedback. The product of these probabilities along the chain is the survival; drafting stops where it would
fall below the request's price, or at its cap. The prediction that was asked for but not drafted is remembered, too: the
token the engine emits there is its answer, so the cells learn even when nothing is drafted. A cell forgets as it learns:
each prediction takes a share of 1 / MEMORY of what was there. The policy drifts, and some day it is another one.

Whether the prompts' histories explain what is emitted at all is counted, too: where they do not, because the policy was
replaced, requests draw on the second tree although their prompt has a history.

Each answered prediction also enters a histogram of calibrated probabilities, from which `das.reliability` tells how far
they can be trusted. Nothing here reads it.
"""
from libc.math cimport log
from libc.stdint cimport int16_t, int32_t, int64_t, uint32_t
from libc.string cimport memmove

from das._tree cimport (
    Continuation, count_continuation, cursor_advance, cursor_of_sequence, places_of, prefetch_places, prefetch_sequence,
    prefetch_steps, prefetch_text, read_continuation,
)
from das._tree_arrays cimport HISTORY, RUNNING, Place

cdef enum:
    NUM_BINS = 24               # of the logit of P on [-4, 4]

cdef int32_t[NUM_ORDERS] ORDERS
ORDERS[:] = [1, 2, 3, 4, 6, 8, 12, 16]
cdef double[NUM_TREES] WEIGHTS
WEIGHTS[:] = [1.0, 0.2]         # of an occurrence, by tree
cdef double KAPPA = 2.0         # weight of the shorter contexts' estimate, in occurrences
cdef double FIRST_ESTIMATE = 1e-5
cdef double PRIOR_STRENGTH = 4.0    # predictions' worth of trust in P before a cell has evidence of its own
# How many predictions a cell remembers. Without end, a replaced policy costs 4 % more than a cold start after 200 steps,
# with 2000 at most 2 %. Fewer gain a little more at self-tuned prices, but draft 3 to 5 % less at a given price than the
# study that found the rule (figures in DESIGN.md).
cdef double MEMORY = 2000.0
# Of real rollouts, a history explains half and more of what is emitted; of a replaced policy's, what comes by accident.
cdef double EXPLAINED_MEMORY = 256.0    # predictions by which histories are judged
cdef double EXPLAINED_PRIOR = 8.0       # predictions' worth of trust in histories before anything is known
cdef double LEAST_EXPLAINED = 1.0 / 16.0

MAX_DRAFT_TOKENS = MAX_DRAFT
CELLS_SHAPE = (NUM_SOURCES, NUM_BINS)
CELL_MEMORY = MEMORY
HISTORY_MEMORY = EXPLAINED_MEMORY
HISTOGRAM_SHAPE = (NUM_RATES, NUM_FIGURES)

# ------------------------------------------------------------------------------------------------ the rule

cdef void _gather(Chain* chain) noexcept nogil:
    """Read what follows each context: shorter ones first, and of one length, the common tree's before the own one."""
    cdef int32_t num_trees = chain.request.num_trees
    cdef int32_t i, tree, order
    cdef int32_t longest = 0
    cdef int32_t[NUM_TREES] num_orders
    cdef Level* level = chain.evidence.levels
    for tree in range(num_trees):
        num_orders[tree] = chain.cursors[tree].num_orders
        longest = max(longest, num_orders[tree])
    for i in range(NUM_ORDERS):
        order = ORDERS[i]
        if order > longest:
            break
        for tree in range(num_trees - 1, -1, -1):
            if order > num_orders[tree]:
                continue
            if _read_level(chain.request.grows[tree].tree, places_of(&chain.cursors[tree]), tree, order, level):
                level += 1
            else:
                num_orders[tree] = 0    # longer contexts have no continuation either
    chain.evidence.num_levels = <int32_t>(level - chain.evidence.levels)
    if chain.evidence.num_levels > chain.request.rule.max_levels:
        _keep_longest(&chain.evidence, chain.request.rule.max_levels)


cdef void _keep_longest(Evidence* evidence, int32_t num_levels) noexcept nogil:
    memmove(evidence.levels, &evidence.levels[evidence.num_levels - num_levels], num_levels * sizeof(Level))
    evidence.num_levels = num_levels


cdef inline bint _read_level(const Tree* of_tree, const Place* places, int32_t tree, int32_t order,
                             Level* level) noexcept nogil:
    """Read what follows a context; False where nothing does."""
    cdef Continuation found
    cdef double weight = WEIGHTS[tree]
    read_continuation(of_tree, &places[order], order, &found)
    if found.top_count == 0:
        return False
    level.tree = tree
    level.order = order
    level.top_token = found.top_token
    level.top_count = weight * found.top_count
    level.other_count = weight * min(found.top_count, found.total - found.top_count)
    level.share = 1.0 / (weight * found.total + KAPPA)
    return True


cdef inline double _count_at(Chain* chain, const Level* level, int32_t token) noexcept nogil:
    cdef uint32_t[2] count
    if level.top_token == token:
        return level.top_count
    if level.other_count == 0.0:
        return 0.0
    count_continuation(chain.request.grows[level.tree].tree, &places_of(&chain.cursors[level.tree])[level.order],
                       level.order, token, count)
    return WEIGHTS[level.tree] * (<double>count[RUNNING] + count[HISTORY])


cdef void find_cell(Chain* chain, Prediction* prediction, double probability) noexcept nogil:
    """The calibration cell of a prediction: who ever continued the last token so, and the bin of the logit."""
    cdef uint32_t[2] count
    cdef int32_t source = BY_OTHERS
    cdef int32_t bin_
    cdef double clipped = min(max(probability, 1e-4), 1.0 - 1e-4)
    if chain.cursors[OWN].num_orders > 0:
        count_continuation(chain.request.grows[OWN].tree, &places_of(&chain.cursors[OWN])[1], 1, prediction.token, count)
        if count[HISTORY] > 0:
            source = BY_BOTH if count[RUNNING] > 0 else BY_HISTORY
        elif count[RUNNING] > 0:
            source = BY_RUNNING
    bin_ = <int32_t>((log(clipped / (1.0 - clipped)) + 4.0) * (NUM_BINS / 8.0))
    prediction.source = <int16_t>source
    prediction.cell = <int16_t>((source & chain.request.rule.source_mask) * NUM_BINS + min(max(bin_, 0), NUM_BINS - 1))


cdef double blend(Chain* chain, int32_t token) noexcept nogil:
    """P of a token, from one blend or a mixture."""
    if chain.request.experts != NULL:
        return chain.request.rule.mix(chain, token, NULL)
    return _blend(chain, token)


cdef double _blend(Chain* chain, int32_t token) noexcept nogil:
    """All contexts' evidence of a token, each correcting the weaker ones."""
    cdef double estimate = FIRST_ESTIMATE
    cdef int32_t level
    for level in range(chain.evidence.num_levels):
        estimate = ((_count_at(chain, &chain.evidence.levels[level], token) + KAPPA * estimate)
                    * chain.evidence.levels[level].share)
    return estimate


cdef double hit_rate(const RuleParameters* rule, int32_t cell, double probability) noexcept nogil:
    """The calibrated probability of a prediction."""
    return ((rule.hits[cell] + PRIOR_STRENGTH * probability)
            / (rule.hits[cell] + rule.misses[cell] + PRIOR_STRENGTH))


cdef double _best(Chain* chain, Prediction* best) noexcept nogil:
    """The most probable next token and its P. Ties go to the shorter context's candidate.

    The longest context's candidate mostly wins. So its P comes first, and others are counted only where they may reach
    it: counting searches an edge of each context, in memory that nothing else reads.
    """
    cdef Evidence* evidence = &chain.evidence
    cdef int32_t favourite = evidence.levels[evidence.num_levels - 1].top_token
    cdef double reached = _blend(chain, favourite)
    cdef double probability = -1.0
    cdef double estimate
    cdef int32_t level, token
    best.token = -1
    for level in range(evidence.num_levels):
        token = evidence.levels[level].top_token
        estimate = reached
        if token != favourite:
            if token == best.token or _at_most(evidence, token) < max(reached, probability):
                continue
            estimate = _blend(chain, token)
        if estimate > probability:
            probability = estimate
            best.token = token
    find_cell(chain, best, probability)
    return probability


cdef inline double _at_most(const Evidence* evidence, int32_t token) noexcept nogil:
    """A bound of `_blend`, also after rounding: it has the same terms, each with a count at least as high."""
    cdef double estimate = FIRST_ESTIMATE
    cdef double count
    cdef int32_t level
    for level in range(evidence.num_levels):
        count = evidence.levels[level].other_count
        if evidence.levels[level].top_token == token:
            count = evidence.levels[level].top_count
        estimate = (count + KAPPA * estimate) * evidence.levels[level].share
    return estimate


cdef double _best_mixed(Chain* chain, Prediction* best) noexcept nogil:
    """As `_best`, of hedged drafting: what bounds the one blend does not bound the experts, so every candidate is mixed."""
    cdef double probability = -1.0
    cdef double estimate
    cdef int32_t level, token
    best.token = -1
    for level in range(chain.evidence.num_levels):
        token = chain.evidence.levels[level].top_token
        if token != best.token:
            estimate = blend(chain, token)
            if estimate > probability:
                probability = estimate
                best.token = token
    find_cell(chain, best, probability)
    return probability

# ------------------------------------------------------------------------------------------------ a group of chains

cdef void draft_group(Chain* chains, int32_t num_chains) noexcept nogil:
    """Replace the pending drafts of a few requests.

    One draft is a long row of reads from scattered memory, each depending on the last; a group of drafts is many rows
    side by side. So all go through the same stage together, and every stage asks for what the next one will read.
    """
    cdef int32_t[GROUP_SIZE] active
    cdef int32_t i, num_left
    cdef int32_t num_active = begin_group(chains, num_chains, active)
    while num_active > 0:
        gather_group(chains, active, num_active)
        num_left = 0
        for i in range(num_active):
            if _draft_token(&chains[active[i]]):
                active[num_left] = active[i]
                num_left += 1
        num_active = num_left


cdef void gather_group(Chain* chains, const int32_t* active, int32_t num_active) noexcept nogil:
    """Read the evidence at the chains' cursors, and ask for what tells their candidates' counts."""
    cdef int32_t i, tree
    cdef Chain* chain
    for i in range(num_active):
        chain = &chains[active[i]]
        _gather(chain)
        if chain.evidence.num_levels > 0:   # the longest context's candidate mostly wins
            for tree in range(chain.request.num_trees):
                prefetch_steps(chain.request.grows[tree].tree, places_of(&chain.cursors[tree]),
                               chain.cursors[tree].num_orders,
                               chain.evidence.levels[chain.evidence.num_levels - 1].top_token)


cdef int32_t begin_group(Chain* chains, int32_t num_chains, int32_t* active) noexcept nogil:
    """Drop the pending drafts, set the cursors to the ends of the sequences; return how many to draft for, and which."""
    cdef int32_t i, tree
    cdef int32_t num_active = 0
    cdef Request* request
    for i in range(num_chains):
        request = chains[i].request
        request.num_drafted = 0
        request.num_asked = 0
        request.is_tree = False
        if chains[i].min_survival <= 1.0:       # else nothing can be worth it: do not even look
            for tree in range(request.num_trees):
                prefetch_sequence(request.grows[tree].tree, request.grows[tree].slot)
            active[num_active] = i
            num_active += 1
    for i in range(num_active):
        request = chains[active[i]].request
        for tree in range(request.num_trees):
            prefetch_places(request.grows[tree].tree, request.grows[tree].tree.sequences[request.grows[tree].slot].places,
                            request.grows[tree].tree.sequences[request.grows[tree].slot].num_pending)
    for i in range(num_active):
        request = chains[active[i]].request
        chains[active[i]].path = 1.0
        for tree in range(request.num_trees):
            cursor_of_sequence(request.grows[tree].tree, request.grows[tree].slot, &chains[active[i]].cursors[tree])
            prefetch_text(request.grows[tree].tree, places_of(&chains[active[i]].cursors[tree]),
                          chains[active[i]].cursors[tree].num_orders)
    return num_active


cdef bint _draft_token(Chain* chain) noexcept nogil:
    """Ask for the next token and draft it; False where the chain ends, for want of text, of worth or of room.

    The last prediction asked for is mostly not drafted: a chain that is not cut by its text asks one more.
    """
    cdef Request* request = chain.request
    cdef Prediction* asked = &request.asked[request.num_asked]
    cdef double probability, rate
    cdef int32_t tree
    if chain.evidence.num_levels == 0:
        return False
    if request.experts == NULL:
        probability = _best(chain, asked)
    else:
        probability = _best_mixed(chain, asked)
        note_asked(chain, asked, request.num_asked)
    request.num_asked += 1
    rate = hit_rate(request.rule, asked.cell, probability)
    asked.rate = <float>rate
    if request.num_drafted == chain.max_draft_tokens or chain.path * rate < chain.min_survival:
        return False
    chain.path *= rate
    chain.token_ids[request.num_drafted] = asked.token
    chain.survival[request.num_drafted] = chain.path
    request.num_drafted += 1
    for tree in range(request.num_trees):
        cursor_advance(request.grows[tree].tree, &chain.cursors[tree], asked.token)
    return True

# ------------------------------------------------------------------------------------------------ feedback

cdef void score(Request* request, const int32_t* token_ids, int64_t num_tokens) noexcept nogil:
    """Teach the cells: a prediction counts as long as everything before it came true."""
    cdef int64_t i
    cdef bint was_hit = True
    for i in range(min(num_tokens, <int64_t>request.num_asked)):
        was_hit = learn(request.rule, &request.asked[i], token_ids[i])
        note_answer(request, &request.asked[i], <int32_t>i, was_hit)
        if not was_hit:
            break


cdef void note_asked(Chain* chain, const Prediction* prediction, int32_t position) noexcept nogil:
    """Remember what each expert of a hedged request says of the most probable token of a position."""
    chain.request.rule.mix(chain, prediction.token, &chain.request.experts.opinions[position * NUM_EXPERTS])


cdef void note_answer(Request* request, const Prediction* prediction, int32_t position, bint was_hit) noexcept nogil:
    """Count whether the most probable token of a position came, and the prompt's history knew it."""
    cdef double* explained = request.rule.explained
    cdef bint is_known = prediction.source == BY_HISTORY or prediction.source == BY_BOTH
    if request.has_history:
        explained[0] *= 1.0 - 1.0 / EXPLAINED_MEMORY
        explained[1] *= 1.0 - 1.0 / EXPLAINED_MEMORY
        explained[0 if was_hit and is_known else 1] += 1.0
    if request.experts != NULL:
        request.rule.teach(request, &request.experts.opinions[position * NUM_EXPERTS], was_hit)


cdef bint explains_nothing(const double* explained) noexcept nogil:
    """Whether prompts' histories lately knew next to nothing of what was emitted: the policy was replaced."""
    return (explained[0] + EXPLAINED_PRIOR
            < LEAST_EXPLAINED * (explained[0] + explained[1] + EXPLAINED_PRIOR))


cdef bint learn(const RuleParameters* rule, const Prediction* prediction, int32_t token) noexcept nogil:
    """Teach the cell of a prediction whose context came true what came then; True where it was right."""
    cdef bint was_hit = prediction.token == token
    cdef double rate = prediction.rate
    cdef double* figures = rule.histogram + NUM_FIGURES * (NUM_RATES - 1)
    if 0.0 <= rate < 1.0:       # cells are plain arrays that a caller may have filled with anything
        figures = rule.histogram + NUM_FIGURES * <int32_t>(rate * NUM_RATES)
    figures[0] += 1.0
    figures[1] += was_hit
    figures[2] += rate
    rule.hits[prediction.cell] *= rule.kept
    rule.misses[prediction.cell] *= rule.kept
    if was_hit:
        rule.hits[prediction.cell] += 1.0
    else:
        rule.misses[prediction.cell] += 1.0
    return was_hit
