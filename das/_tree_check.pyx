# cython: language_level=3
"""Verification of a suffix tree's whole structure, for tests."""
from libc.stdint cimport int32_t, int64_t, uint32_t

from das._tree cimport address_of, climb
from das._tree_arrays cimport (
    HISTORY, NONE, ROOT, RUNNING, Edge, Node, Place, Sequence, Tree, counts_of, depth_of, find_edge, first_token_of,
    parent_of_child, start_of,
)


cdef int _demand(bint holds, str rule, int64_t where) except -1:
    if not holds:
        raise AssertionError(f"{rule} (at {where})")
    return 0


cdef int check_tree(Tree* tree) except -1:
    cdef int64_t i, num_edges = 0
    cdef int32_t slot
    cdef Edge* edge
    children = {}               # node -> its children
    for i in range(tree.edges_capacity):
        edge = &tree.edges[i]
        if edge.child != NONE:
            num_edges += 1
            _check_edge(tree, edge)
            children.setdefault(edge.node, []).append(edge.child)
    _demand(4 * num_edges <= 3 * tree.edges_capacity, "the edge table is at most three quarters full", num_edges)
    _demand(num_edges == tree.num_edges, "num_edges is the number of edges in the table", num_edges)
    _demand(tree.num_nodes <= tree.nodes_capacity and tree.num_text <= tree.text_capacity, "arrays hold what is used", 0)
    pending = _pending_by_node(tree)
    prompt_ends = {tree.prompts[i].nodes[order] for i in range(1, tree.num_prompts)
                   for order in range(tree.prompts[i].num_tail + 1)}
    for i in range(tree.num_nodes):
        _check_node(tree, <int32_t>i, children.get(i, []), pending.get(i, 0), i == ROOT or i in prompt_ends)
    for slot in range(tree.num_sequences):
        if tree.sequences[slot].is_open:
            _check_sequence(tree, slot)
    return 0


cdef int _check_edge(Tree* tree, Edge* edge) except -1:
    cdef int32_t i
    cdef int32_t start = start_of(tree, edge.child)
    cdef int32_t depth = depth_of(tree, edge.node)
    _demand(find_edge(tree, edge.node, edge.token) == edge, "an edge is found by its node and first token", edge.child)
    _demand(parent_of_child(tree, edge.child) == edge.node, "a child knows its parent", edge.child)
    _demand(0 <= start < tree.num_text, "a child's string lies in the text", edge.child)
    _demand(tree.text[start + depth] == edge.token, "an edge starts with its first token", edge.child)
    _demand(edge.depth == (depth_of(tree, edge.child) if edge.child > 0 else 0), "an edge knows its child's depth", edge.child)
    _demand(edge.child < 0 or edge.depth > depth, "a child is deeper than its parent", edge.child)
    for i in range(depth):
        _demand(tree.text[start + i] == tree.text[tree.nodes[edge.node].start + i],
                "a child's string continues its parent's", edge.child)
    return 0


cdef dict _pending_by_node(Tree* tree):
    """How many pending suffixes were last counted at each node."""
    cdef int32_t slot, order
    pending = {}
    for slot in range(tree.num_sequences):
        if tree.sequences[slot].is_open:
            for order in range(1, tree.sequences[slot].num_pending + 1):
                node = tree.sequences[slot].places[order].node
                pending[node] = pending.get(node, 0) + 1
    return pending


cdef int _check_node(Tree* tree, int32_t node, list children, int64_t pending, bint starts_sequences) except -1:
    cdef Node* self = &tree.nodes[node]
    cdef uint32_t[2] count
    cdef int32_t child
    cdef int64_t[2] total
    cdef int64_t most = 0
    cdef int64_t top = 0
    total[RUNNING] = total[HISTORY] = 0
    for child in children:
        counts_of(tree, child, count)
        total[RUNNING] += count[RUNNING]
        total[HISTORY] += count[HISTORY]
        most = max(most, <int64_t>count[RUNNING] + count[HISTORY])
        if first_token_of(tree, node, child) == self.top_token:
            top = <int64_t>count[RUNNING] + count[HISTORY]
    _demand(total[RUNNING] == self.total[RUNNING] and total[HISTORY] == self.total[HISTORY],
            "a node's total is the sum of its children's counts", node)
    _demand(top == self.top_count and top == most, "the top child has the highest count, and the node knows it", node)
    _demand(depth_of(tree, node) <= tree.max_order + 1, "no node is deeper than max_order + 1", node)
    _demand(depth_of(tree, node) <= tree.max_order or not children, "nothing continues at full depth", node)
    if not starts_sequences:
        _demand(<int64_t>self.count[RUNNING] + self.count[HISTORY] >= total[RUNNING] + total[HISTORY] + pending,
                "a node's count covers its children and what is pending at it", node)
        _demand(self.count[RUNNING] >= total[RUNNING] and self.count[HISTORY] >= total[HISTORY],
                "a node's count covers its children, by class", node)
    return 0


cdef int _check_sequence(Tree* tree, int32_t slot) except -1:
    cdef Sequence* sequence = &tree.sequences[slot]
    cdef Place place
    cdef Edge* edge
    cdef int32_t order, start, at, depth
    cdef int32_t end = sequence.here.base + (sequence.length - sequence.here.first)
    _demand(tree.text[end] == -2 - slot, "an open sequence's end names its slot", slot)
    _demand(sequence.num_pending <= min(sequence.length, tree.max_order), "a pending suffix is in the sequence", slot)
    for order in range(1, min(sequence.length, tree.max_order) + 1):
        start = address_of(sequence, sequence.length - order)
        if order > sequence.num_pending:
            edge = find_edge(tree, parent_of_child(tree, ~start), first_token_of(tree, parent_of_child(tree, ~start), ~start))
            _demand(edge != NULL and edge.child == ~start, "a suffix that is not pending is a leaf", start)
            continue
        place = sequence.places[order]
        if place.below != NONE:
            climb(tree, &place, order)
        _demand((place.below == NONE) == (depth_of(tree, place.node) == order), "a place is at its order's depth", slot)
        at = start_of(tree, place.below if place.below != NONE else place.node)
        for depth in range(order):
            _demand(tree.text[at + depth] == tree.text[start + depth], "a place spells the sequence's last tokens", slot)
    return 0
