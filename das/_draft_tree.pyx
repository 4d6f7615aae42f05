# cython: language_level=3
"""Drafting trees: at each position several next tokens, from the evidence and the cells that chains are drafted from.

A chain bets everything on one token a position. A tree may hold the second-best token, too, where that is likelier than
one more token at the chain's end. Every token is *offered* with its survival, the product of calibrated probabilities
along its path; the best offer becomes a node, and the contexts behind it offer its children: best-first search, until
the best offer is below the price or the cap is reached. As no child survives longer than its parent, nodes come in order
of survival: every front part of a draft is a tree, the best one of its size.

Candidates are the contexts' top children, as a chain's, and then each context's first child: the token that followed it
where it was first seen, the only other one that a node knows without a search. Siblings are ranked by P, the chain's choice
first. What is calibrated, offered and scored of a sibling is the probability that it comes *if none before it does*,

    P(x_i) / (1 - P(x_1) - ... - P(x_i-1))

so siblings together never claim more than certainty, and each answers a question of its own.
"""
from libc.string cimport memcpy

from das._draft cimport (
    GROUP_SIZE, Branches, Level, Prediction, begin_group, blend, find_cell, gather_group, hit_rate, learn,
    note_answer, note_asked,
)
from das._tree cimport cursor_advance, first_continuation, places_of

MAX_CHILDREN_OF_NODE = MAX_CHILDREN

# ------------------------------------------------------------------------------------------------ the search

cdef void draft_tree_group(Chain* chains, Search* searches, int32_t num_chains) noexcept nogil:
    """Replace the pending drafts of a few requests by trees, side by side as `draft_group` does it."""
    cdef int32_t[GROUP_SIZE] active
    cdef int32_t i, num_left
    cdef int32_t num_active = begin_group(chains, num_chains, active)
    for i in range(num_active):
        chains[active[i]].request.is_tree = True
        searches[active[i]].num_offers = 0
        searches[active[i]].num_made = 0
    while num_active > 0:
        gather_group(chains, active, num_active)
        num_left = 0
        for i in range(num_active):
            _offer_children(&chains[active[i]], &searches[active[i]])
            if _add_node(&chains[active[i]], &searches[active[i]]):
                active[num_left] = active[i]
                num_left += 1
        num_active = num_left


cdef void _offer_children(Chain* chain, Search* search) noexcept nogil:
    """Ask what follows the position reached last, and offer it."""
    cdef int32_t position = chain.request.num_drafted
    cdef Prediction* asked = &chain.request.branches.asked[position * MAX_CHILDREN]
    cdef double[MAX_CHILDREN] rates
    cdef double left = 1.0
    cdef double rate
    cdef int32_t i, num_asked
    memcpy(&search.cursors[position * NUM_TREES], chain.cursors, NUM_TREES * sizeof(Cursor))
    num_asked = _candidates(chain, asked, rates, search.max_children)
    chain.request.branches.num_asked[position] = num_asked
    if num_asked > 0 and chain.request.experts != NULL:
        note_asked(chain, asked, position)
    chain.request.num_asked = position + 1
    for i in range(num_asked):
        rate = hit_rate(chain.request.rule, asked[i].cell, rates[i])
        asked[i].rate = <float>rate
        rates[i] = left * rate
        left -= rates[i]
        if rates[i] > 0.0 and chain.path * rates[i] >= chain.min_survival:
            _push(search, chain.path * rates[i], position, asked[i].token)


cdef int32_t _candidates(Chain* chain, Prediction* ranked, double* probabilities, int32_t most) noexcept nogil:
    """The most probable next tokens, the one that a chain would draft first, with cell and probability.

    The probability of each is that of its coming if none before it does. Return how many.
    """
    cdef int32_t level, i
    cdef int32_t num_ranked = 0
    cdef double left = 1.0
    cdef double probability
    cdef Level* asked
    for level in range(chain.evidence.num_levels):
        num_ranked = _rank(chain, chain.evidence.levels[level].top_token, 0, ranked, probabilities, num_ranked, most)
    for level in range(chain.evidence.num_levels):
        asked = &chain.evidence.levels[level]
        num_ranked = _rank(
            chain, first_continuation(chain.request.grows[asked.tree].tree,
                                      &places_of(&chain.cursors[asked.tree])[asked.order], asked.order),
            1, ranked, probabilities, num_ranked, most)
    for i in range(num_ranked):
        probability = probabilities[i]
        probabilities[i] = min(1.0, probability / max(left, 1e-9))
        left -= probability
        find_cell(chain, &ranked[i], probabilities[i])
    return num_ranked


cdef int32_t _rank(Chain* chain, int32_t token, int32_t first_place, Prediction* ranked, double* probabilities,
                   int32_t num_ranked, int32_t most) noexcept nogil:
    """Put a candidate (-1: none) where its P belongs, behind its equals and not before a place; return how many there are."""
    cdef int32_t place
    cdef double probability
    if token < 0 or first_place == most:
        return num_ranked
    for place in range(num_ranked):
        if ranked[place].token == token:
            return num_ranked
    probability = blend(chain, token)
    if num_ranked < most:
        num_ranked += 1
    elif probability <= probabilities[most - 1]:
        return num_ranked
    place = num_ranked - 1
    while place > first_place and probabilities[place - 1] < probability:
        probabilities[place] = probabilities[place - 1]
        ranked[place].token = ranked[place - 1].token
        place -= 1
    probabilities[place] = probability
    ranked[place].token = token
    return num_ranked


cdef bint _add_node(Chain* chain, Search* search) noexcept nogil:
    """Make a node of the best offer and go there; False where none is left, or no room."""
    cdef Request* request = chain.request
    cdef int32_t node = request.num_drafted
    cdef int32_t tree
    cdef Offer offer
    if node == chain.max_draft_tokens or search.num_offers == 0:
        return False
    offer = _pop(search)
    chain.path = offer.survival
    chain.survival[node] = offer.survival
    chain.token_ids[node] = request.branches.token_ids[node] = offer.token
    chain.parents[node] = request.branches.parents[node] = offer.position - 1
    request.num_drafted += 1
    memcpy(chain.cursors, &search.cursors[offer.position * NUM_TREES], NUM_TREES * sizeof(Cursor))
    for tree in range(request.num_trees):
        cursor_advance(request.grows[tree].tree, &chain.cursors[tree], offer.token)
    return True

# ------------------------------------------------------------------------------------------------ the heap of offers

cdef inline bint _is_better(const Offer* one, const Offer* other) noexcept nogil:
    return one.survival > other.survival or (one.survival == other.survival and one.number < other.number)


cdef void _push(Search* search, double survival, int32_t position, int32_t token) noexcept nogil:
    cdef int32_t hole = search.num_offers
    cdef Offer offer
    offer.survival = survival
    offer.number = search.num_made
    offer.position = position
    offer.token = token
    search.num_made += 1
    search.num_offers += 1
    while hole > 0 and _is_better(&offer, &search.offers[(hole - 1) // 2]):
        search.offers[hole] = search.offers[(hole - 1) // 2]
        hole = (hole - 1) // 2
    search.offers[hole] = offer


cdef Offer _pop(Search* search) noexcept nogil:
    cdef Offer best = search.offers[0]
    cdef Offer last
    cdef int32_t hole = 0
    cdef int32_t child = 1
    search.num_offers -= 1
    last = search.offers[search.num_offers]
    while child < search.num_offers:
        if child + 1 < search.num_offers and _is_better(&search.offers[child + 1], &search.offers[child]):
            child += 1
        if not _is_better(&search.offers[child], &last):
            break
        search.offers[hole] = search.offers[child]
        hole = child
        child = 2 * hole + 1
    search.offers[hole] = last
    return best

# ------------------------------------------------------------------------------------------------ feedback

cdef int64_t score_tree(Request* request, const int32_t* token_ids, int64_t num_tokens,
                        int64_t num_verified) noexcept nogil:
    """Teach the cells along the path that came true, siblings before it included; return the path's length.

    Only the first `num_verified` nodes count; the predictions behind the path's last one are answered by the token after.
    """
    cdef Branches* branches = request.branches
    cdef int64_t accepted = 0
    cdef int32_t position = 0
    cdef int32_t i
    cdef bint was_hit
    cdef Prediction* asked
    while accepted < num_tokens and position < request.num_asked:
        for i in range(branches.num_asked[position]):
            asked = &branches.asked[position * MAX_CHILDREN + i]
            was_hit = learn(request.rule, asked, token_ids[accepted])
            if i == 0:
                note_answer(request, asked, position, was_hit)
            if was_hit:
                break
        position = _child(branches, position, token_ids[accepted], num_verified)
        if position == 0:
            break
        accepted += 1
    return accepted


cdef int32_t _child(const Branches* branches, int32_t position, int32_t token, int64_t num_verified) noexcept nogil:
    """The position behind the node of that token at a position; 0 where there is none."""
    cdef int64_t node
    for node in range(position, num_verified):      # behind node j only later ones follow
        if branches.parents[node] == position - 1 and branches.token_ids[node] == token:
            return <int32_t>node + 1
    return 0
