from libc.stdint cimport int32_t, int64_t, uint32_t

from das._tree_arrays cimport MAX_ORDER_C, Place, Prompt, Sequence, Tree

cdef struct Cursor:             # the contexts of one position: order 0 (empty) .. num_orders
    int32_t num_orders
    Place[MAX_ORDER_C + 1] places

cdef struct Continuation:       # what follows a context
    uint32_t[2] total           # occurrences of the context with a counted next token, by class
    int32_t top_token           # what came next most often
    uint32_t top_count          # how often, both classes together; 0: nothing ever came

cdef void prefetch_sequence(const Tree* tree, int32_t slot) noexcept nogil
cdef void prefetch_places(const Tree* tree, const Place* places, int32_t num_orders) noexcept nogil
cdef void prefetch_text(const Tree* tree, const Place* places, int32_t num_orders) noexcept nogil
cdef void prefetch_steps(const Tree* tree, const Place* places, int32_t num_orders, int32_t token) noexcept nogil
cdef void cursor_of_sequence(Tree* tree, int32_t slot, Cursor* cursor) noexcept nogil
cdef void cursor_advance(Tree* tree, Cursor* cursor, int32_t token) noexcept nogil
cdef void read_continuation(Tree* tree, const Place* place, int32_t order, Continuation* found) noexcept nogil
cdef int32_t first_continuation(const Tree* tree, const Place* place, int32_t order) noexcept nogil
cdef void count_continuation(Tree* tree, const Place* place, int32_t order, int32_t token, uint32_t* count) noexcept nogil
cdef bint step(const Tree* tree, Place* place, int32_t order, int32_t token) noexcept nogil
cdef void climb(const Tree* tree, Place* place, int32_t order) noexcept nogil
cdef int32_t address_of(const Sequence* sequence, int32_t number) noexcept nogil
cdef int32_t open_sequence(Tree* tree, int32_t prompt_handle, int32_t source, int64_t num_tokens) except -1 nogil
cdef void close_sequence(Tree* tree, int32_t slot) noexcept nogil
cdef void end_prompt(Tree* tree, int32_t slot, Prompt* prompt) noexcept nogil
cdef int reserve(Tree* tree, int32_t slot, int64_t num_tokens) except -1 nogil
cdef void append(Tree* tree, int32_t slot, const int32_t* token_ids, int64_t num_tokens) noexcept nogil
