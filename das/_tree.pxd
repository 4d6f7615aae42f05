from libc.stdint cimport int32_t, int64_t, uint32_t

from das._tree_arrays cimport (
    HISTORY, MAX_ORDER_C, NONE, RUNNING, Edge, Node, Place, Prompt, Sequence, Tree, counts_of, depth_of, find_edge,
    start_of,
)

cdef enum:
    CURSOR_ROOM = 2 * (MAX_ORDER_C + 1)

cdef struct Cursor:             # the contexts of one position: order 0 (empty) .. num_orders
    int32_t num_orders
    int32_t first               # order n is at places[first + n]; one token on, the same place is that of order n + 1
    Place[CURSOR_ROOM] places

cdef struct Continuation:       # what follows a context
    int32_t top_token           # what came next most often
    uint32_t top_count          # how often; 0: nothing ever came
    uint32_t total              # occurrences of the context with a counted next token

cdef void prefetch_sequence(const Tree* tree, int32_t slot) noexcept nogil
cdef void prefetch_places(const Tree* tree, const Place* places, int32_t num_orders) noexcept nogil
cdef void prefetch_text(const Tree* tree, const Place* places, int32_t num_orders) noexcept nogil
cdef void prefetch_steps(const Tree* tree, const Place* places, int32_t num_orders, int32_t token) noexcept nogil
cdef void cursor_of_sequence(Tree* tree, int32_t slot, Cursor* cursor) noexcept nogil
cdef void cursor_advance(Tree* tree, Cursor* cursor, int32_t token) noexcept nogil
cdef void climb(const Tree* tree, Place* place, int32_t order) noexcept nogil
cdef int32_t address_of(const Sequence* sequence, int32_t number) noexcept nogil
cdef int32_t open_sequence(Tree* tree, int32_t prompt_handle, int32_t source, int64_t num_tokens) except -1 nogil
cdef void close_sequence(Tree* tree, int32_t slot) noexcept nogil
cdef void end_prompt(Tree* tree, int32_t slot, Prompt* prompt) noexcept nogil
cdef int reserve(Tree* tree, int32_t slot, int64_t num_tokens) except -1 nogil
cdef void append(Tree* tree, int32_t slot, const int32_t* token_ids, int64_t num_tokens) noexcept nogil


# What is done for each context of each position is defined here, so that the kernels in other modules inline it.

cdef inline Place* places_of(Cursor* cursor) noexcept nogil:
    """The places of the cursor's contexts, by order."""
    return &cursor.places[cursor.first]


cdef inline bint step(const Tree* tree, Place* place, int32_t order, int32_t token) noexcept nogil:
    """Move a place of that order one token down; False, and unmoved, where the tree has no such continuation."""
    cdef int32_t child = place.below
    cdef int32_t depth = 0
    cdef Edge* edge
    if child == NONE:
        edge = find_edge(tree, place.node, token)
        if edge == NULL:
            return False
        child = edge.child
        depth = edge.depth
    else:
        if tree.text[start_of(tree, child) + order] != token:
            return False
        if child > 0:
            depth = depth_of(tree, child)
    if depth == order + 1:
        place.node = child
        place.below = NONE
    else:
        place.below = child
    return True


cdef inline void read_continuation(const Tree* tree, const Place* place, int32_t order,
                                   Continuation* found) noexcept nogil:
    """What follows a context of that order, in both classes together; found.top_count is 0 where nothing does."""
    cdef const Node* node
    if place.below == NONE:
        node = &tree.nodes[place.node]
        found.top_token = node.top_token
        found.top_count = node.top_count
        found.total = node.total[RUNNING] + node.total[HISTORY]
        return
    found.top_token = tree.text[start_of(tree, place.below) + order]
    found.total = 1
    if found.top_token < 0:
        found.total = 0
    elif place.below > 0:
        node = &tree.nodes[place.below]
        found.total = node.count[RUNNING] + node.count[HISTORY]
    found.top_count = found.total


cdef inline int32_t first_continuation(const Tree* tree, const Place* place, int32_t order) noexcept nogil:
    """What followed a context of that order where it was first seen; negative: its text ended there."""
    return tree.text[start_of(tree, place.below if place.below != NONE else place.node) + order]


cdef inline void count_continuation(const Tree* tree, const Place* place, int32_t order, int32_t token,
                                    uint32_t* count) noexcept nogil:
    """How often a context of that order continued with `token`, by class."""
    cdef int32_t child = place.below
    cdef Edge* edge
    count[RUNNING] = count[HISTORY] = 0
    if child == NONE:
        edge = find_edge(tree, place.node, token)
        if edge != NULL:
            counts_of(tree, edge.child, count)
    elif tree.text[start_of(tree, child) + order] == token:
        counts_of(tree, child, count)


cdef inline void count_continuations(const Tree* tree, const Place* place, int32_t order,
                                     uint32_t* count) noexcept nogil:
    """How often a context of that order continued, by class."""
    count[RUNNING] = count[HISTORY] = 0
    if place.below == NONE:
        count[RUNNING] = tree.nodes[place.node].total[RUNNING]
        count[HISTORY] = tree.nodes[place.node].total[HISTORY]
    elif tree.text[start_of(tree, place.below) + order] >= 0:
        counts_of(tree, place.below, count)
