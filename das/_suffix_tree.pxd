from libc.stdint cimport int32_t, uint32_t, int64_t, uint8_t
cimport cython

from das._token_ids cimport TokenIdBuffer

cdef enum:
    MAX_ORDER_C = 16    # longest context; strings of one token more are the deepest the tree distinguishes
    RUNNING = 0         # class of an occurrence: prompt, open sequences and those closed since
    HISTORY = 1         # class of an occurrence: sequences added whole

cdef struct Node:               # 32 bytes: two to a cache line
    int32_t start               # text position where one occurrence of the node's string begins
    int32_t parent
    int32_t top_child           # the child counted most often, the latest of equals; 0: none
    uint32_t count[2]           # occurrences of the node's string, by class
    uint32_t total[2]           # of these, with a next token that has been counted: the sum of the children's counts
    int32_t depth               # length of the node's string

cdef struct Edge:               # 8 bytes; child 0 marks a free slot (the root is nobody's child)
    uint32_t tag                # hash of (parent, first token)
    int32_t child               # > 0: a node; < 0: ~child is the text position where a leaf's string begins

cdef struct Place:              # where the string of a context of known order lies in the tree
    int32_t node                # the last node on its path
    int32_t below               # the child on whose edge it ends; 0: it ends at `node` itself

cdef struct Segment:            # a stretch of text that belongs to one open sequence
    int32_t base                # text position of token number `first`
    int32_t first               # suffixes starting at token numbers first..limit-1 have their text here
    int32_t limit

cdef struct Sequence:
    int64_t generation          # distinguishes the sequences that use this slot one after another
    int32_t is_open
    int32_t source              # RUNNING or HISTORY
    int32_t length              # tokens so far, the prompt's tail included
    int32_t num_pending         # the suffixes of 1..num_pending tokens occur elsewhere too; longer ones are leaves
    int32_t num_nodes_settled   # the tree's size when all places were right: no node since, no stale place
    Segment here
    Segment before              # the previous segment, still being written for the suffixes that start in it
    Place places[MAX_ORDER_C + 1]

cdef struct Prompt:
    int32_t num_tail            # how many last tokens serve as context, at most max_order
    int32_t tail                # text position of the first of them
    int32_t nodes[MAX_ORDER_C + 1]  # nodes[n]: the node of the last n prompt tokens

cdef struct Tree:
    int32_t max_order
    int32_t num_nodes
    int32_t num_text
    int64_t num_tokens
    int64_t num_edges
    int32_t num_sequences       # slots in use, open or free
    int32_t num_open
    int32_t num_prompts
    int64_t nodes_capacity
    int64_t text_capacity
    int64_t edges_capacity
    int64_t sequences_capacity
    int64_t prompts_capacity
    Node* nodes
    int32_t* text
    uint32_t* leaf_parent       # by text position: the leaf's parent, bit 31: its class
    Edge* edges
    Sequence* sequences
    Prompt* prompts

cdef struct Cursor:             # the contexts of one position: order 0 (empty) .. num_orders
    int32_t num_orders
    Place places[MAX_ORDER_C + 1]

cdef void cursor_of_sequence(Tree* tree, int32_t slot, Cursor* cursor) noexcept nogil
cdef void cursor_advance(Tree* tree, Cursor* cursor, int32_t token) noexcept nogil
cdef int32_t continuation(Tree* tree, const Place* place, int32_t order, uint32_t* total) noexcept nogil
cdef int32_t find_continuation(Tree* tree, const Place* place, int32_t order, int32_t token) noexcept nogil
cdef int32_t token_of_child(Tree* tree, int32_t child, int32_t order) noexcept nogil
cdef void counts_of_child(Tree* tree, int32_t child, uint32_t* count) noexcept nogil
cdef int reserve(Tree* tree, int32_t slot, int64_t num_tokens) except -1 nogil
cdef void append(Tree* tree, int32_t slot, const int32_t* token_ids, int64_t num_tokens) noexcept nogil

@cython.final
cdef class SuffixTree:
    cdef Tree tree
    cdef cython.pymutex lock
    cdef TokenIdBuffer ids
    cdef int32_t slot_of(self, object sequence) except -1
    cdef int32_t prompt_of(self, object prompt) except -1
    cdef bint _find(self, object context_token_ids, Place* place) except -1
