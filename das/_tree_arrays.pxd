"""The arrays of a suffix tree: what is stored where, and how an edge is found. `_tree.pyx` explains why."""
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t

cdef enum:
    ROOT = 0
    NONE = 0            # as a child: the root is nobody's child
    CLOSED_END = -1     # what the text holds behind a closed sequence; behind an open one: -2 - slot
    LEAF_PARENT_MASK = 0x7FFFFFFF
    DEPTH_BITS = 5
    DEPTH_MASK = 31
    MAX_NODES = 1 << 27 # what is left of 32 bits beside the depth

cdef enum:
    MAX_ORDER_C = 16    # longest context; strings of one token more are the deepest the tree distinguishes
    RUNNING = 0         # class of an occurrence: prompt, open sequences and those closed since
    HISTORY = 1         # class of an occurrence: sequences added whole

cdef struct Node:               # 32 bytes: two to a cache line, and all that drafting reads of a context in one
    int32_t start               # text position where one occurrence of the node's string begins
    uint32_t parent_depth       # parent << DEPTH_BITS | length of the node's string
    int32_t top_token           # first token of the child counted most often, the latest of equals
    uint32_t top_count          # that child's count; 0: no child
    uint32_t[2] count           # occurrences of the node's string, by class
    uint32_t[2] total           # of these, with a next token that has been counted: the sum of the children's counts

cdef struct Edge:               # 16 bytes; child 0 marks a free slot (the root is nobody's child)
    int32_t node
    int32_t token               # the edge's first token
    int32_t child               # > 0: a node; < 0: ~child is the text position where a leaf's string begins
    int32_t depth               # the child's depth; 0: a leaf, which ends where its text ends

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
    Place[MAX_ORDER_C + 1] places

cdef struct Prompt:
    int32_t num_tail            # how many last tokens serve as context, at most max_order
    int32_t tail                # text position of the first of them
    int32_t[MAX_ORDER_C + 1] nodes  # nodes[n]: the node of the last n prompt tokens

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
    int64_t leaf_parent_capacity
    int64_t edges_capacity
    int64_t sequences_capacity
    int64_t prompts_capacity
    Node* nodes
    int32_t* text
    uint32_t* leaf_parent       # by text position: the leaf's parent, bit 31: its class
    Edge* edges
    Sequence* sequences
    Prompt* prompts

cdef int grow(void** array, int64_t* capacity, int64_t needed, size_t item_bytes) except -1 nogil
cdef int grow_edges(Tree* tree, int64_t needed) except -1 nogil
cdef int expect_tokens(Tree* tree, int64_t num_tokens) except -1 nogil
cdef void free_arrays(Tree* tree) noexcept nogil
cdef int64_t allocated_bytes(const Tree* tree) noexcept nogil


cdef inline int64_t home_slot(const Tree* tree, int32_t node, int32_t token) noexcept nogil:
    cdef uint64_t key = ((<uint64_t><uint32_t>node << 32) | <uint32_t>token) * <uint64_t>0x9E3779B97F4A7C15
    key = ((key ^ (key >> 29)) * <uint64_t>0xBF58476D1CE4E5B9) >> 32
    return <int64_t>((key * <uint64_t>tree.edges_capacity) >> 32)


cdef inline Edge* find_edge(const Tree* tree, int32_t node, int32_t token) noexcept nogil:
    """Return the edge of `node` that starts with `token`, or NULL."""
    cdef Edge* edge = &tree.edges[home_slot(tree, node, token)]
    cdef Edge* end = &tree.edges[tree.edges_capacity]
    while edge.child != NONE:
        if edge.node == node and edge.token == token:
            return edge
        edge += 1
        if edge == end:
            edge = tree.edges
    return NULL


cdef inline Edge* free_edge(Tree* tree, int32_t node, int32_t token) noexcept nogil:
    """Return the free slot where an edge of `node` that starts with `token` belongs."""
    cdef Edge* edge = &tree.edges[home_slot(tree, node, token)]
    cdef Edge* end = &tree.edges[tree.edges_capacity]
    while edge.child != NONE:
        edge += 1
        if edge == end:
            edge = tree.edges
    return edge


cdef inline void add_edge(Tree* tree, int32_t node, int32_t token, int32_t child, int32_t depth) noexcept nogil:
    cdef Edge* edge = free_edge(tree, node, token)
    edge.node = node
    edge.token = token
    edge.child = child
    edge.depth = depth
    tree.num_edges += 1


cdef inline int32_t depth_of(const Tree* tree, int32_t node) noexcept nogil:
    return <int32_t>(tree.nodes[node].parent_depth & DEPTH_MASK)


cdef inline int32_t parent_of(const Tree* tree, int32_t node) noexcept nogil:
    return <int32_t>(tree.nodes[node].parent_depth >> DEPTH_BITS)


cdef inline int32_t start_of(const Tree* tree, int32_t child) noexcept nogil:
    return ~child if child < 0 else tree.nodes[child].start


cdef inline int32_t parent_of_child(const Tree* tree, int32_t child) noexcept nogil:
    return <int32_t>(tree.leaf_parent[~child] & LEAF_PARENT_MASK) if child < 0 else parent_of(tree, child)


cdef inline int32_t first_token_of(const Tree* tree, int32_t node, int32_t child) noexcept nogil:
    """The token by which `node` continues to its child."""
    return tree.text[start_of(tree, child) + depth_of(tree, node)]


cdef inline void counts_of(const Tree* tree, int32_t child, uint32_t* count) noexcept nogil:
    if child > 0:
        count[RUNNING] = tree.nodes[child].count[RUNNING]
        count[HISTORY] = tree.nodes[child].count[HISTORY]
    else:
        count[HISTORY] = tree.leaf_parent[~child] >> 31
        count[RUNNING] = 1 - count[HISTORY]


