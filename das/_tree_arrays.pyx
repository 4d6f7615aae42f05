# cython: language_level=3
"""Memory of a suffix tree's arrays: growth, and what is given back."""
from libc.stdint cimport int64_t
from libc.string cimport memcpy, memset

from das._huge_pages cimport allocate, release

NODE_BYTES = sizeof(Node)
EDGE_BYTES = sizeof(Edge)

cdef int64_t _allocations_until_failure = -1


def _fail_allocation_after(int64_t num_allocations):
    """Make the allocation after `num_allocations` more fail, in any tree; -1: never. For tests of the strong guarantee."""
    global _allocations_until_failure
    _allocations_until_failure = num_allocations


cdef bint _allocation_fails() noexcept nogil:
    global _allocations_until_failure
    if _allocations_until_failure >= 0:
        _allocations_until_failure -= 1
        return _allocations_until_failure < 0
    return False


cdef int grow(void** array, int64_t* capacity, int64_t needed, size_t item_bytes) except -1 nogil:
    """Make room for `needed` items. Grows by a quarter at least, so that appending stays O(1) amortised."""
    cdef void* grown
    cdef int64_t wanted
    if needed > capacity[0]:
        wanted = max(needed, capacity[0] + capacity[0] // 4)
        grown = _allocate(wanted * item_bytes)
        if capacity[0] > 0:
            memcpy(grown, array[0], capacity[0] * item_bytes)
        release(array[0], capacity[0] * item_bytes)
        array[0] = grown
        capacity[0] = wanted
    return 0


cdef void* _allocate(size_t num_bytes) except NULL nogil:
    cdef void* block = NULL if _allocation_fails() else allocate(num_bytes)
    if block == NULL:
        with gil:
            raise MemoryError(f"no memory for a suffix tree's array of {num_bytes} bytes")
    return block


cdef int grow_edges(Tree* tree, int64_t needed) except -1 nogil:
    """Make room for `needed` edges at a load of at most 3/4."""
    cdef Edge* old = tree.edges
    cdef Edge* grown
    cdef int64_t i, old_capacity = tree.edges_capacity
    cdef int64_t wanted = needed + needed // 3 + 1
    if wanted <= old_capacity:
        return 0
    wanted = max(wanted, old_capacity + old_capacity // 4)
    grown = <Edge*>_allocate(wanted * sizeof(Edge))
    memset(grown, 0, wanted * sizeof(Edge))
    tree.edges = grown
    tree.edges_capacity = wanted
    for i in range(old_capacity):
        if old[i].child != NONE:
            free_edge(tree, old[i].node, old[i].token)[0] = old[i]
    release(old, old_capacity * sizeof(Edge))
    return 0


cdef int expect_tokens(Tree* tree, int64_t num_tokens) except -1 nogil:
    """Make room for that many more tokens of ordinary text, where .5 nodes and 1.2 edges a token are usual."""
    cdef int64_t num_text = tree.num_text + num_tokens + num_tokens // 16
    grow(<void**>&tree.nodes, &tree.nodes_capacity, tree.num_nodes + num_tokens * 14 // 25, sizeof(Node))
    grow(<void**>&tree.text, &tree.text_capacity, num_text, sizeof(int32_t))
    grow(<void**>&tree.leaf_parent, &tree.leaf_parent_capacity, num_text, sizeof(uint32_t))
    return grow_edges(tree, tree.num_edges + num_tokens * 13 // 10)


cdef void free_arrays(Tree* tree) noexcept nogil:
    release(tree.nodes, tree.nodes_capacity * sizeof(Node))
    release(tree.text, tree.text_capacity * sizeof(int32_t))
    release(tree.leaf_parent, tree.leaf_parent_capacity * sizeof(uint32_t))
    release(tree.edges, tree.edges_capacity * sizeof(Edge))
    release(tree.sequences, tree.sequences_capacity * sizeof(Sequence))
    release(tree.prompts, tree.prompts_capacity * sizeof(Prompt))


cdef int64_t allocated_bytes(const Tree* tree) noexcept nogil:
    return (sizeof(Tree) + tree.nodes_capacity * sizeof(Node) + tree.edges_capacity * sizeof(Edge)
            + tree.text_capacity * sizeof(int32_t) + tree.leaf_parent_capacity * sizeof(uint32_t)
            + tree.sequences_capacity * sizeof(Sequence) + tree.prompts_capacity * sizeof(Prompt))
