# cython: language_level=3
"""A suffix tree that counts what followed each short context, while several sequences are still growing.

The question. Given the last n tokens of a rollout, n = 1..16: how often did these n tokens occur before, and which token
came next, how often? The naive answer scans everything seen so far:

    for start in range(len(text) - n):
        if text[start : start + n] == context:
            count[text[start + n]] += 1

Index it instead. Take every *suffix* (the text from position i on), cut it to 17 tokens (16 of context and the next
one), and put it into a trie: one edge a token, one number a node saying how many suffixes passed. The children of the
node reached by a context are its continuations, with counts. That trie is right and too large: up to 17 nodes a token.

Path compression. Most paths do not branch, so only the places where they do become nodes; an edge stands for a stretch
of text, kept as a position in the text array and never copied. A suffix that nobody else shares ends in a *leaf*, and a
leaf needs no node: it is the text position where it starts. It even grows by itself, because its edge reads the text and
the text has just become longer. About 0.6 nodes a token remain (32 bytes each); edges live in one hash table keyed
(node, first token), so a step down costs one probe however many children the root has.

Growing one token. Let the last n tokens of a sequence be its suffix of order n. When token x arrives, each suffix of
order n = 16..0 takes one step, the longest first. A `Place` says where it is: at a node, or on an edge below one.
  - The step along x exists: move there. Passing a node counts one there.
  - It does not: *branch*. On an edge, a new node splits it; then a leaf for x is hung in. From now on this suffix is a
    leaf and needs no attention: its text is its own.
Because a long suffix that occurs elsewhere drags all shorter ones with it, the suffixes that still need steps (the
*pending* ones) are always those of orders 1..num_pending; the rest are leaves. A pending suffix that reaches 17 tokens is
counted for good and dropped. So a token costs num_pending + 1 <= 17 steps, also in text that loops for ever, where a tree
without the depth limit turns quadratic. The places of the pending suffixes are at the same time the answer to the
question above for the sequence's own next token: a request needs no other cursor, and drafting copies the places and
steps them along the drafted tokens without writing.

Several sequences growing at once. Two things can happen to a sequence between its own tokens, both made by a sibling:
  - The edge it stands on is split. Its place is *stale*; `settle` finds out (the parent of `below` is not `node` any more)
    and climbs to where it is now. Nodes that appeared above it are counted then.
  - Its leaf is *overtaken*: the sibling produced the same tokens, arrived at the very end of the leaf and went on. The
    text behind an open sequence's last token holds ~(1 + slot) <= -2, which equals no token and names the owner, so
    `split` can hand the owner a pending suffix again. (A closed sequence ends in -1.) By the argument above all shorter
    suffixes of the owner are overtaken in the same step, so "pending are 1..num_pending" stays true.
This is what the classic linear-time construction (Ukkonen 1995; the readable text is Gusfield, "Algorithms on Strings,
Trees and Sequences", chapter 6) cannot offer: with one active point a sequence, an open leaf that is overtaken goes
unnoticed. Keeping all <= 17 places costs a few more steps a token and needs no suffix links.

What is counted when. node.count: suffixes that reached the node, by class. node.total: those that went on and reached (or
founded) a child. A suffix on the middle of an edge is not counted below it until it branches, arrives, or its sequence
closes; closing makes a node of the place it ends at. So answers are exact for closed sequences, and may lack occurrences
that start in the last 16 tokens of an open one; a drafting request therefore never counts itself as its own evidence.

Prompts. A response starts as if its prompt had just been read, but must not count the prompt's own transitions again. The
places of a prompt's end are made nodes when it is added (`Prompt.nodes`); responses start there.

Text of open sequences. A leaf reads up to 17 tokens in a row, so each sequence writes into a `Segment` of its own; when
that is full, the next one takes over for new suffixes while the next 16 tokens are written to both.

Nothing fails half-way: `reserve` makes room for the worst case (one node and two edges a suffix) before the first write.
"""
cimport cython
from libc.limits cimport INT_MAX
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, realloc
from libc.string cimport memcpy, memset

from das._token_ids cimport TokenIdBuffer

MAX_ORDER = MAX_ORDER_C
NODE_BYTES = sizeof(Node)

cdef enum:
    ROOT = 0
    NONE = 0                    # as a child: the root is nobody's child
    CLOSED_END = -1
    NODE_MASK = 0x7FFFFFFF
    SLOT_BITS = 24

# ------------------------------------------------------------------------------------------------ memory

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


cdef int _grow(void** array, int64_t* capacity, int64_t needed, size_t item_bytes) except -1 nogil:
    """Make room for `needed` items. Grows by half, so that appending stays O(1) amortised."""
    cdef void* grown
    cdef int64_t wanted
    if needed > capacity[0]:
        wanted = max(needed, capacity[0] + capacity[0] // 2)
        grown = NULL if _allocation_fails() else realloc(array[0], wanted * item_bytes)
        if grown == NULL:
            with gil:
                raise MemoryError(f"no memory for a suffix tree array of {wanted * item_bytes} bytes")
        array[0] = grown
        capacity[0] = wanted
    return 0


cdef int _grow_edges(Tree* tree, int64_t needed) except -1 nogil:
    """Make room for `needed` edges at a load of at most 3/4."""
    cdef Edge* old = tree.edges
    cdef Edge* grown
    cdef int64_t i, old_capacity = tree.edges_capacity
    cdef int64_t wanted = needed + needed // 3 + 1
    if wanted <= old_capacity:
        return 0
    wanted = max(wanted, old_capacity + old_capacity // 3)
    grown = NULL if _allocation_fails() else <Edge*>calloc(wanted, sizeof(Edge))
    if grown == NULL:
        with gil:
            raise MemoryError(f"no memory for a suffix tree edge table of {wanted * sizeof(Edge)} bytes")
    tree.edges = grown
    tree.edges_capacity = wanted
    for i in range(old_capacity):
        if old[i].child != NONE:
            _put_edge(tree, old[i].tag, old[i].child)
    free(old)
    return 0


cdef int reserve(Tree* tree, int32_t slot, int64_t num_tokens) except -1 nogil:
    """Make room for everything that appending `num_tokens` to the sequence and closing it can create."""
    cdef int64_t num_suffixes = num_tokens + 2 * MAX_ORDER_C + 2
    cdef Sequence* sequence = &tree.sequences[slot]
    cdef int64_t num_text = tree.num_text
    cdef int64_t text_capacity = tree.text_capacity
    if sequence.length + num_tokens >= sequence.here.limit:
        num_text += _segment_tokens(sequence.length + num_tokens, num_tokens) + MAX_ORDER_C + 1
    if num_text > INT_MAX or tree.num_nodes + num_suffixes > INT_MAX:
        with gil:
            raise MemoryError("a suffix tree holds at most 2**31 text positions and nodes")
    _grow(<void**>&tree.nodes, &tree.nodes_capacity, tree.num_nodes + num_suffixes, sizeof(Node))
    _grow(<void**>&tree.text, &text_capacity, num_text, sizeof(int32_t))
    _grow(<void**>&tree.leaf_parent, &tree.text_capacity, num_text, sizeof(uint32_t))
    _grow_edges(tree, tree.num_edges + 2 * num_suffixes)
    return 0


cdef inline int64_t _segment_tokens(int64_t length, int64_t num_tokens) noexcept nogil:
    """How many suffixes a new segment shall hold when `num_tokens` are due and the sequence has that length."""
    return max(num_tokens, min(max(length, 48), 1024))


# ------------------------------------------------------------------------------------------------ edges

cdef inline uint32_t _hash(int32_t node, int32_t token) noexcept nogil:
    cdef uint64_t key = ((<uint64_t><uint32_t>node << 32) | <uint32_t>token) * <uint64_t>0x9E3779B97F4A7C15
    return <uint32_t>(((key ^ (key >> 29)) * <uint64_t>0xBF58476D1CE4E5B9) >> 32)


cdef inline int64_t _home_slot(const Tree* tree, uint32_t tag) noexcept nogil:
    return <int64_t>((<uint64_t>tag * <uint64_t>tree.edges_capacity) >> 32)


cdef inline int32_t start_of(const Tree* tree, int32_t child) noexcept nogil:
    return ~child if child < 0 else tree.nodes[child].start


cdef inline int32_t parent_of(const Tree* tree, int32_t child) noexcept nogil:
    return <int32_t>(tree.leaf_parent[~child] & NODE_MASK) if child < 0 else tree.nodes[child].parent


cdef inline int32_t _find_edge(const Tree* tree, int32_t node, int32_t depth, int32_t token) noexcept nogil:
    """Return the child of `node` (which has that depth) whose edge starts with `token`, or NONE."""
    cdef uint32_t tag = _hash(node, token)
    cdef int64_t i = _home_slot(tree, tag)
    cdef int32_t child
    while True:
        child = tree.edges[i].child
        if child == NONE:
            return NONE
        # the tag is 32 bits of hash: the child itself tells whether it is the right one
        if (tree.edges[i].tag == tag and parent_of(tree, child) == node
                and tree.text[start_of(tree, child) + depth] == token):
            return child
        i += 1
        if i == tree.edges_capacity:
            i = 0


cdef inline void _put_edge(Tree* tree, uint32_t tag, int32_t child) noexcept nogil:
    cdef int64_t i = _home_slot(tree, tag)
    while tree.edges[i].child != NONE:
        i += 1
        if i == tree.edges_capacity:
            i = 0
    tree.edges[i].tag = tag
    tree.edges[i].child = child


cdef inline void _add_edge(Tree* tree, int32_t node, int32_t token, int32_t child) noexcept nogil:
    _put_edge(tree, _hash(node, token), child)
    tree.num_edges += 1


cdef inline void _replace_edge(Tree* tree, int32_t node, int32_t token, int32_t old, int32_t new) noexcept nogil:
    cdef int64_t i = _home_slot(tree, _hash(node, token))
    while tree.edges[i].child != old:
        i += 1
        if i == tree.edges_capacity:
            i = 0
    tree.edges[i].child = new


# ------------------------------------------------------------------------------------------------ counting

cdef inline int64_t _count(const Tree* tree, int32_t child) noexcept nogil:
    if child < 0:
        return 1
    return <int64_t>tree.nodes[child].count[RUNNING] + tree.nodes[child].count[HISTORY]


cdef inline void _promote(Tree* tree, int32_t node, int32_t child) noexcept nogil:
    """`child` of `node` was just counted: it is the top child now unless another has a higher count."""
    cdef int32_t top = tree.nodes[node].top_child
    if top != child and (top == NONE or _count(tree, child) >= _count(tree, top)):
        tree.nodes[node].top_child = child


cdef inline void _count_child(Tree* tree, int32_t node, int32_t child, int32_t source) noexcept nogil:
    """A suffix of class `source` passed from `node` to its child node `child`."""
    tree.nodes[child].count[source] += 1
    tree.nodes[node].total[source] += 1
    _promote(tree, node, child)


cdef inline void _add_leaf(Tree* tree, int32_t node, int32_t token, int32_t start, int32_t source) noexcept nogil:
    _add_edge(tree, node, token, ~start)
    tree.leaf_parent[start] = <uint32_t>node | (<uint32_t>source << 31)
    tree.nodes[node].total[source] += 1
    _promote(tree, node, ~start)


cdef int32_t _split(Tree* tree, int32_t node, int32_t below, int32_t depth) noexcept nogil:
    """Put a node of that depth on the edge from `node` to `below` and return it. It counts what `below` counts."""
    cdef int32_t middle = tree.num_nodes
    cdef int32_t start = start_of(tree, below)
    cdef int32_t next_token = tree.text[start + depth]
    cdef Node* new = &tree.nodes[middle]
    cdef Sequence* owner
    tree.num_nodes += 1
    memset(new, 0, sizeof(Node))
    new.start = start
    new.parent = node
    new.depth = depth
    counts_of_child(tree, below, new.count)
    _replace_edge(tree, node, tree.text[start + tree.nodes[node].depth], below, middle)
    if tree.nodes[node].top_child == below:
        tree.nodes[node].top_child = middle
    if below > 0:
        tree.nodes[below].parent = middle
    else:   # also where the leaf vanishes: a stale place on it must find the way up
        tree.leaf_parent[start] = (tree.leaf_parent[start] & ~<uint32_t>NODE_MASK) | <uint32_t>middle
    if next_token >= 0 and depth <= tree.max_order:
        _add_edge(tree, middle, next_token, below)
        new.total[RUNNING] = new.count[RUNNING]
        new.total[HISTORY] = new.count[HISTORY]
        new.top_child = below
    elif next_token < CLOSED_END and depth <= tree.max_order:
        owner = &tree.sequences[-2 - next_token]        # its leaf ended here and has been overtaken
        owner.places[depth].node = middle
        owner.places[depth].below = NONE
        owner.num_pending = max(owner.num_pending, depth)
    return middle


# ------------------------------------------------------------------------------------------------ places

cdef inline bint _step(const Tree* tree, Place* place, int32_t order, int32_t token) noexcept nogil:
    """Move a place of that order one token down; False, and unmoved, where the tree has no such continuation."""
    cdef int32_t child = place.below
    if child == NONE:
        child = _find_edge(tree, place.node, order, token)
        if child == NONE:
            return False
    elif tree.text[start_of(tree, child) + order] != token:
        return False
    if child > 0 and tree.nodes[child].depth == order + 1:
        place.node = child
        place.below = NONE
    else:
        place.below = child
    return True


cdef inline void _climb(const Tree* tree, Place* place, int32_t order) noexcept nogil:
    """Repair a place on an edge that has been split since."""
    cdef int32_t below = place.below
    cdef int32_t node = parent_of(tree, below)
    if node == place.node:
        return
    while tree.nodes[node].depth >= order:
        below = node
        node = tree.nodes[node].parent
    if below > 0 and tree.nodes[below].depth == order:
        place.node = below
        place.below = NONE
    else:
        place.node = node
        place.below = below


cdef inline void _settle(Tree* tree, Place* place, int32_t order, int32_t source) noexcept nogil:
    """Repair a pending suffix's place and count it at the nodes that appeared above it."""
    cdef int32_t counted = place.node
    cdef int32_t node
    if place.below == NONE:
        return
    _climb(tree, place, order)
    node = place.node
    while node != counted:
        _count_child(tree, tree.nodes[node].parent, node, source)
        node = tree.nodes[node].parent


# ------------------------------------------------------------------------------------------------ sequences

cdef inline int32_t _address(const Sequence* sequence, int32_t number) noexcept nogil:
    """Text position of the sequence's token `number`, where the suffix that starts there has its text."""
    if number >= sequence.here.first:
        return sequence.here.base + (number - sequence.here.first)
    return sequence.before.base + (number - sequence.before.first)


cdef inline void _open_segment(Tree* tree, Sequence* sequence, int64_t num_tokens) noexcept nogil:
    cdef int32_t num_suffixes = <int32_t>_segment_tokens(sequence.length, num_tokens)
    sequence.before = sequence.here
    sequence.here.base = tree.num_text
    sequence.here.first = sequence.length
    sequence.here.limit = sequence.length + num_suffixes
    tree.num_text += num_suffixes + MAX_ORDER_C + 1


cdef inline void _write(Tree* tree, Sequence* sequence, int32_t number, int32_t value) noexcept nogil:
    """Put a token, or an end mark, where the suffixes that start in either segment read it."""
    cdef Segment* before = &sequence.before
    tree.text[sequence.here.base + (number - sequence.here.first)] = value
    if number <= before.limit + MAX_ORDER_C and before.limit > before.first:
        tree.text[before.base + (number - before.first)] = value


cdef void append(Tree* tree, int32_t slot, const int32_t* token_ids, int64_t num_tokens) noexcept nogil:
    """Append tokens to an open sequence for which `reserve` was called."""
    cdef Sequence* sequence = &tree.sequences[slot]
    cdef int64_t i
    for i in range(num_tokens):
        if sequence.length >= sequence.here.limit:
            _open_segment(tree, sequence, num_tokens - i)
        _write(tree, sequence, sequence.length, token_ids[i])
        _write(tree, sequence, sequence.length + 1, -2 - slot)
        _append_token(tree, sequence, token_ids[i])
    tree.num_tokens += num_tokens


cdef void _append_token(Tree* tree, Sequence* sequence, int32_t token) noexcept nogil:
    cdef int32_t order, node
    cdef int32_t num_pending = 0
    cdef int32_t source = sequence.source
    cdef Place place
    for order in range(sequence.num_pending, -1, -1):
        place = sequence.places[order]
        if tree.num_nodes != sequence.num_nodes_settled:
            _settle(tree, &place, order, source)
        node = place.node
        if not _step(tree, &place, order, token):
            if place.below != NONE:
                node = _split(tree, node, place.below, order)
                _count_child(tree, tree.nodes[node].parent, node, source)
            _add_leaf(tree, node, token, _address(sequence, sequence.length - order), source)
            continue
        if order == tree.max_order and place.below != NONE:
            # a leaf of full depth occurs a second time: from now on it needs a count, hence a node
            place.node = _split(tree, node, place.below, order + 1)
            place.below = NONE
        if place.below == NONE:
            _count_child(tree, node, place.node, source)
        if order < tree.max_order:
            sequence.places[order + 1] = place
            num_pending = max(num_pending, order + 1)
        else:
            num_pending = tree.max_order
    sequence.num_pending = num_pending
    sequence.num_nodes_settled = tree.num_nodes
    sequence.length += 1


cdef void _close(Tree* tree, int32_t slot) noexcept nogil:
    """End a sequence: what is pending gets a node where it ends, and is counted there."""
    cdef Sequence* sequence = &tree.sequences[slot]
    cdef Place* place
    cdef int32_t order
    cdef int32_t end = sequence.here.base + (sequence.length - sequence.here.first)
    _write(tree, sequence, sequence.length, CLOSED_END)
    for order in range(sequence.num_pending, 0, -1):
        place = &sequence.places[order]
        _settle(tree, place, order, sequence.source)
        if place.below != NONE:
            place.node = _split(tree, place.node, place.below, order)
            place.below = NONE
            _count_child(tree, tree.nodes[place.node].parent, place.node, sequence.source)
    if end + (sequence.here.limit + MAX_ORDER_C + 1 - sequence.length) == tree.num_text and end < tree.num_text:
        tree.num_text = end + 1     # nothing was opened behind this segment: give back what it did not use
    sequence.is_open = False
    tree.num_open -= 1


cdef void _end_prompt(Tree* tree, int32_t slot, Prompt* prompt) noexcept nogil:
    """Close a prompt's sequence and make every place of its end a node, so that responses can start there."""
    cdef Sequence* sequence = &tree.sequences[slot]
    cdef int32_t order, leaf
    cdef int32_t num_pending = sequence.num_pending
    _close(tree, slot)
    prompt.num_tail = min(sequence.length, tree.max_order)
    prompt.tail = sequence.here.base + (sequence.length - prompt.num_tail - sequence.here.first)
    prompt.nodes[0] = ROOT
    for order in range(1, prompt.num_tail + 1):
        if order <= num_pending:
            prompt.nodes[order] = sequence.places[order].node
        else:
            leaf = ~_address(sequence, sequence.length - order)
            prompt.nodes[order] = _split(tree, parent_of(tree, leaf), leaf, order)


cdef int32_t _free_slot(Tree* tree) except -1 nogil:
    """Return a slot for a new sequence; may allocate, changes nothing else."""
    cdef int32_t slot
    for slot in range(tree.num_sequences):
        if not tree.sequences[slot].is_open:
            return slot
    _grow(<void**>&tree.sequences, &tree.sequences_capacity, tree.num_sequences + 1, sizeof(Sequence))
    memset(&tree.sequences[tree.num_sequences], 0, sizeof(Sequence))
    tree.num_sequences += 1
    return tree.num_sequences - 1


cdef int32_t _open(Tree* tree, int32_t prompt_handle, int32_t source, int64_t num_tokens) except -1 nogil:
    """Open a sequence behind a prompt (0: none), with room for `num_tokens`, and return its slot."""
    cdef int32_t slot = _free_slot(tree)
    cdef Sequence* sequence = &tree.sequences[slot]
    cdef Prompt* prompt = &tree.prompts[prompt_handle]
    cdef int32_t order
    cdef int64_t generation = sequence.generation
    memset(sequence, 0, sizeof(Sequence))
    sequence.generation = generation + 1
    reserve(tree, slot, num_tokens + prompt.num_tail)
    sequence = &tree.sequences[slot]
    sequence.is_open = True
    sequence.source = source
    _open_segment(tree, sequence, num_tokens + prompt.num_tail)
    memcpy(&tree.text[sequence.here.base], &tree.text[prompt.tail], prompt.num_tail * sizeof(int32_t))
    sequence.length = prompt.num_tail
    sequence.num_pending = prompt.num_tail
    for order in range(prompt.num_tail + 1):
        sequence.places[order].node = prompt.nodes[order]
    _write(tree, sequence, sequence.length, -2 - slot)
    tree.num_open += 1
    return slot


# ------------------------------------------------------------------------------------------------ reading

cdef void cursor_of_sequence(Tree* tree, int32_t slot, Cursor* cursor) noexcept nogil:
    """The contexts at the sequence's end. The sequence's own places stay as they are."""
    cdef Sequence* sequence = &tree.sequences[slot]
    cdef int32_t order
    cursor.num_orders = sequence.num_pending
    for order in range(cursor.num_orders + 1):
        cursor.places[order] = sequence.places[order]
        if cursor.places[order].below != NONE:
            _climb(tree, &cursor.places[order], order)


cdef void cursor_advance(Tree* tree, Cursor* cursor, int32_t token) noexcept nogil:
    """The contexts one token later: the context of order n + 1 is that of order n, one step down."""
    cdef int32_t order
    cdef int32_t num_orders = 0
    cdef Place place
    for order in range(min(cursor.num_orders, tree.max_order - 1), -1, -1):
        place = cursor.places[order]
        if _step(tree, &place, order, token):
            cursor.places[order + 1] = place
            num_orders = max(num_orders, order + 1)
    cursor.num_orders = num_orders


cdef int32_t continuation(Tree* tree, const Place* place, int32_t order, uint32_t* total) noexcept nogil:
    """Return the top child of a context and write how many occurrences have a next token; NONE and zeros without."""
    if place.below == NONE:
        total[RUNNING] = tree.nodes[place.node].total[RUNNING]
        total[HISTORY] = tree.nodes[place.node].total[HISTORY]
        return tree.nodes[place.node].top_child
    if tree.text[start_of(tree, place.below) + order] < 0:
        total[RUNNING] = 0
        total[HISTORY] = 0
        return NONE
    counts_of_child(tree, place.below, total)
    return place.below


cdef int32_t find_continuation(Tree* tree, const Place* place, int32_t order, int32_t token) noexcept nogil:
    """Return the child of a context that starts with `token`, or NONE."""
    if place.below == NONE:
        return _find_edge(tree, place.node, order, token)
    return place.below if tree.text[start_of(tree, place.below) + order] == token else NONE


cdef int32_t token_of_child(Tree* tree, int32_t child, int32_t order) noexcept nogil:
    """The token by which a context of that order continues to `child`."""
    return tree.text[start_of(tree, child) + order]


cdef void counts_of_child(Tree* tree, int32_t child, uint32_t* count) noexcept nogil:
    if child > 0:
        count[RUNNING] = tree.nodes[child].count[RUNNING]
        count[HISTORY] = tree.nodes[child].count[HISTORY]
    else:
        count[HISTORY] = tree.leaf_parent[~child] >> 31
        count[RUNNING] = 1 - count[HISTORY]


# ------------------------------------------------------------------------------------------------ from Python

@cython.final
cdef class SuffixTree:
    """Counts of what followed each context of up to `max_order` tokens, in two classes: running and history.

    Args:
        max_order: longest context, in tokens, 1..16.

    Raises:
        TypeError, ValueError: max_order is not an int, or not in 1..16.

    Complexity: one token costs at most max_order + 1 steps of O(1); about 50 bytes a token.
    Thread safety: every method takes the tree's mutex; `add`, `add_prompt` and `extend` work without the GIL.
    """

    def __cinit__(self):
        self.ids = TokenIdBuffer()
        self.tree.max_order = MAX_ORDER_C
        _grow(<void**>&self.tree.nodes, &self.tree.nodes_capacity, 1, sizeof(Node))
        _grow(<void**>&self.tree.prompts, &self.tree.prompts_capacity, 1, sizeof(Prompt))
        _grow_edges(&self.tree, 1)
        memset(self.tree.nodes, 0, sizeof(Node))
        memset(self.tree.prompts, 0, sizeof(Prompt))
        self.tree.num_nodes = 1
        self.tree.num_prompts = 1

    def __init__(self, *, max_order=MAX_ORDER_C):
        if isinstance(max_order, bool) or not isinstance(max_order, int):
            raise TypeError(f"max_order must be an int, not {type(max_order).__name__}")
        if not 1 <= max_order <= MAX_ORDER_C:
            raise ValueError(f"max_order is {max_order}; it must be 1 <= max_order <= {MAX_ORDER_C}")
        if self.tree.num_text > 0:
            if max_order != self.tree.max_order:
                raise ValueError(f"max_order is {self.tree.max_order} and cannot change in a tree that holds tokens")
            return
        self.tree.max_order = max_order

    def __dealloc__(self):
        free(self.tree.nodes)
        free(self.tree.text)
        free(self.tree.leaf_parent)
        free(self.tree.edges)
        free(self.tree.sequences)
        free(self.tree.prompts)

    def __reduce__(self):
        raise TypeError("a SuffixTree cannot be pickled: it is derived data; keep the rollouts and rebuild it")

    @property
    def max_order(self):
        """Longest context, in tokens."""
        return self.tree.max_order

    @property
    def num_tokens(self):
        """Tokens indexed so far."""
        return self.tree.num_tokens

    @property
    def num_nodes(self):
        """Nodes in the tree, the root included; leaves need none."""
        return self.tree.num_nodes

    @property
    def num_edges(self):
        """Edges in the tree."""
        return self.tree.num_edges

    @property
    def num_open_sequences(self):
        """Sequences that can still grow."""
        return self.tree.num_open

    def add_prompt(self, token_ids):
        """Index a prompt once, as class running, and return the handle that responses to it start from.

        Args:
            token_ids: at least one token id, 0 <= id < 2**31.

        Returns:
            a handle > 0, valid for this tree.

        Raises:
            TypeError, ValueError: not token ids, or none. MemoryError: no room. The tree is unchanged then.

        Complexity: O(tokens).
        """
        cdef int32_t slot
        with self.lock:
            _load_non_empty(self.ids, token_ids)
            with nogil:
                _grow(<void**>&self.tree.prompts, &self.tree.prompts_capacity, self.tree.num_prompts + 1, sizeof(Prompt))
                slot = _open(&self.tree, 0, RUNNING, self.ids.num_tokens)
                append(&self.tree, slot, self.ids.data, self.ids.num_tokens)
                _end_prompt(&self.tree, slot, &self.tree.prompts[self.tree.num_prompts])
                self.tree.num_prompts += 1
            return self.tree.num_prompts - 1

    def add(self, token_ids, *, prompt=0):
        """Index a finished sequence, as class history.

        Args:
            token_ids: at least one token id, 0 <= id < 2**31.
            prompt: handle from `add_prompt`; the prompt's last tokens are then context for the first tokens. 0: none.

        Raises:
            TypeError, ValueError: not token ids, or none. KeyError: unknown prompt. MemoryError: no room.
            The tree is unchanged then.

        Complexity: O(tokens).
        """
        cdef int32_t slot, handle = self.prompt_of(prompt)
        with self.lock:
            _load_non_empty(self.ids, token_ids)
            with nogil:
                slot = _open(&self.tree, handle, HISTORY, self.ids.num_tokens)
                append(&self.tree, slot, self.ids.data, self.ids.num_tokens)
                _close(&self.tree, slot)

    def open(self, *, prompt=0):
        """Start a sequence that will grow, class running, and return its id.

        Args:
            prompt: handle from `add_prompt`; the prompt's last tokens are the context of the first token. 0: none.

        Returns:
            the id for `extend`, `close` and `continuations`.

        Raises:
            KeyError: unknown prompt. MemoryError: no room; the tree is unchanged then.

        Complexity: O(max_order).
        """
        cdef int32_t slot, handle = self.prompt_of(prompt)
        with self.lock:
            slot = _open(&self.tree, handle, RUNNING, 0)
            return (self.tree.sequences[slot].generation << SLOT_BITS) | slot

    def extend(self, sequence, token_ids):
        """Append tokens to an open sequence; they are visible to every reader at once.

        Args:
            sequence: id from `open`.
            token_ids: any number of token ids, 0 <= id < 2**31.

        Raises:
            KeyError: the sequence is not open. TypeError, ValueError: not token ids. MemoryError: no room.
            The tree is unchanged then.

        Complexity: O(tokens).
        """
        cdef int32_t slot
        with self.lock:
            slot = self.slot_of(sequence)
            self.ids.load(token_ids, "token_ids")
            with nogil:
                reserve(&self.tree, slot, self.ids.num_tokens)
                append(&self.tree, slot, self.ids.data, self.ids.num_tokens)

    def close(self, sequence):
        """End an open sequence. Its tokens stay, as class running; its id is unknown afterwards.

        Raises:
            KeyError: the sequence is not open.

        Complexity: O(max_order).
        """
        with self.lock:
            _close(&self.tree, self.slot_of(sequence))

    def counts(self, context_token_ids):
        """Return how often the context occurs with a visible next token, as (running, history).

        Args:
            context_token_ids: 0..max_order token ids.

        Raises:
            TypeError, ValueError: not token ids, or too many.

        Complexity: O(context).
        """
        cdef Place place
        cdef uint32_t[2] total
        with self.lock:
            if not self._find(context_token_ids, &place):
                return 0, 0
            continuation(&self.tree, &place, <int32_t>self.ids.num_tokens, total)
            return total[RUNNING], total[HISTORY]

    def child_counts(self, context_token_ids, token_id):
        """Return how often the context occurs with `token_id` next, as (running, history).

        Args:
            context_token_ids: 0..max_order token ids.
            token_id: 0 <= id < 2**31.

        Raises:
            TypeError, ValueError: not token ids, or too many.

        Complexity: O(context).
        """
        cdef Place place
        cdef int32_t child, token
        cdef uint32_t[2] count
        with self.lock:
            self.ids.load((token_id,), "token_id")
            token = self.ids.data[0]
            if not self._find(context_token_ids, &place):
                return 0, 0
            child = find_continuation(&self.tree, &place, <int32_t>self.ids.num_tokens, token)
            if child == NONE:
                return 0, 0
            counts_of_child(&self.tree, child, count)
            return count[RUNNING], count[HISTORY]

    def top_child(self, context_token_ids):
        """Return the token that most often came next (of equals the one counted last), or None.

        Args:
            context_token_ids: 0..max_order token ids.

        Raises:
            TypeError, ValueError: not token ids, or too many.

        Complexity: O(context).
        """
        cdef Place place
        cdef uint32_t[2] total
        cdef int32_t child, order
        with self.lock:
            if not self._find(context_token_ids, &place):
                return None
            order = <int32_t>self.ids.num_tokens
            child = continuation(&self.tree, &place, order, total)
            return None if child == NONE else token_of_child(&self.tree, child, order)

    def continuations(self, sequence, draft_token_ids=()):
        """Return what an open sequence's own cursor knows: per context order, (running, history, top token).

        Args:
            sequence: id from `open`.
            draft_token_ids: tokens assumed to follow the sequence; nothing is added to the tree.

        Returns:
            a list whose entry n - 1 describes the last n tokens; it ends before the first order without continuation.

        Raises:
            KeyError: the sequence is not open. TypeError, ValueError: not token ids.

        Complexity: O(max_order * (1 + draft tokens)).
        """
        cdef Cursor cursor
        cdef uint32_t[2] total
        cdef int32_t order, child
        cdef Py_ssize_t i
        found = []
        with self.lock:
            cursor_of_sequence(&self.tree, self.slot_of(sequence), &cursor)
            for i in range(self.ids.load(draft_token_ids, "draft_token_ids")):
                cursor_advance(&self.tree, &cursor, self.ids.data[i])
            for order in range(1, cursor.num_orders + 1):
                child = continuation(&self.tree, &cursor.places[order], order, total)
                if child == NONE:
                    break
                found.append((total[RUNNING], total[HISTORY], token_of_child(&self.tree, child, order)))
        return found

    def memory_bytes(self):
        """Return the bytes allocated for the tree's arrays.

        Complexity: O(1).
        """
        cdef Tree* tree = &self.tree
        return (sizeof(Tree) + tree.nodes_capacity * sizeof(Node) + tree.edges_capacity * sizeof(Edge)
                + tree.text_capacity * (sizeof(int32_t) + sizeof(uint32_t))
                + tree.sequences_capacity * sizeof(Sequence) + tree.prompts_capacity * sizeof(Prompt))

    def check_invariants(self):
        """Verify the whole structure; for tests, slow.

        Raises:
            AssertionError: naming the rule and the node.

        Complexity: O(nodes + edges).
        """
        with self.lock:
            _check(&self.tree)

    cdef int32_t slot_of(self, object sequence) except -1:
        """Return the slot of an open sequence's id. Call with the lock held."""
        cdef int64_t slot
        if isinstance(sequence, int) and 0 <= sequence < (1 << 62):
            slot = sequence & ((1 << SLOT_BITS) - 1)
            if (slot < self.tree.num_sequences and self.tree.sequences[slot].is_open
                    and self.tree.sequences[slot].generation == sequence >> SLOT_BITS):
                return <int32_t>slot
        raise KeyError(f"sequence {sequence!r} is not open in this tree")

    cdef int32_t prompt_of(self, object prompt) except -1:
        if not isinstance(prompt, int) or not 0 <= prompt < self.tree.num_prompts:
            raise KeyError(f"prompt {prompt!r} was not added to this tree")
        return prompt

    cdef bint _find(self, object context_token_ids, Place* place) except -1:
        """Load the context into `ids`, walk it from the root, and say whether it occurs."""
        cdef int32_t order
        self.ids.load(context_token_ids, "context_token_ids")
        if self.ids.num_tokens > self.tree.max_order:
            raise ValueError(f"context_token_ids holds {self.ids.num_tokens} tokens; this tree's contexts have at most "
                             f"{self.tree.max_order}")
        place.node = ROOT
        place.below = NONE
        for order in range(<int32_t>self.ids.num_tokens):
            if not _step(&self.tree, place, order, self.ids.data[order]):
                return False
        return True


cdef int _load_non_empty(TokenIdBuffer ids, object token_ids) except -1:
    if ids.load(token_ids, "token_ids") == 0:
        raise ValueError("token_ids is empty; it must hold at least one token id")
    return 0


# ------------------------------------------------------------------------------------------------ checking

cdef int _demand(bint holds, str rule, int64_t where) except -1:
    if not holds:
        raise AssertionError(f"{rule} (at {where})")
    return 0


cdef int _check(Tree* tree) except -1:
    cdef int64_t i, num_edges = 0
    cdef int32_t slot
    children = {}               # node -> its children
    for i in range(tree.edges_capacity):
        if tree.edges[i].child != NONE:
            num_edges += 1
            children.setdefault(parent_of(tree, tree.edges[i].child), []).append(tree.edges[i].child)
    _demand(num_edges == tree.num_edges, "num_edges is the number of edges in the table", num_edges)
    _demand(tree.num_nodes <= tree.nodes_capacity and tree.num_text <= tree.text_capacity, "arrays hold what is used", 0)
    _demand(sum(len(of_node) for of_node in children.values()) == num_edges, "each edge belongs to one node", num_edges)
    starts = {start_of(tree, i) for i in range(1, tree.num_nodes)}
    _demand(all(0 <= start < tree.num_text for start in starts), "a node's string lies in the text", 0)
    pending = _pending_by_node(tree)
    prompt_ends = {tree.prompts[i].nodes[order] for i in range(1, tree.num_prompts)
                   for order in range(tree.prompts[i].num_tail + 1)}
    for i in range(tree.num_nodes):
        _check_node(tree, <int32_t>i, children.get(i, []), pending.get(i, 0), i == ROOT or i in prompt_ends)
    for slot in range(tree.num_sequences):
        if tree.sequences[slot].is_open:
            _check_sequence(tree, slot)
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
    cdef int32_t child, first, depth
    cdef int64_t[2] total
    cdef int64_t most = 0
    total[RUNNING] = total[HISTORY] = 0
    for child in children:
        first = tree.text[start_of(tree, child) + self.depth]
        _demand(first >= 0, "an edge starts with a token", child)
        _demand(_find_edge(tree, node, self.depth, first) == child, "an edge is found by its node and first token", child)
        counts_of_child(tree, child, count)
        total[RUNNING] += count[RUNNING]
        total[HISTORY] += count[HISTORY]
        most = max(most, _count(tree, child))
        if child > 0:
            _demand(tree.nodes[child].depth > self.depth, "a child is deeper than its parent", child)
            for depth in range(self.depth):
                _demand(tree.text[tree.nodes[child].start + depth] == tree.text[self.start + depth],
                        "a child's string continues its parent's", child)
    _demand(total[RUNNING] == self.total[RUNNING] and total[HISTORY] == self.total[HISTORY],
            "a node's total is the sum of its children's counts", node)
    _demand((self.top_child == NONE) == (not children), "a node with children has a top child", node)
    if children:
        _demand(self.top_child in children, "the top child is a child", node)
        _demand(_count(tree, self.top_child) == most, "the top child has the highest count", node)
    _demand(self.depth <= tree.max_order + 1, "no node is deeper than max_order + 1", node)
    _demand(self.depth <= tree.max_order or not children, "nothing continues at full depth", node)
    if not starts_sequences:
        _demand(_count(tree, node) >= total[RUNNING] + total[HISTORY] + pending,
                "a node's count covers its children and what is pending at it", node)
        _demand(self.count[RUNNING] >= total[RUNNING] and self.count[HISTORY] >= total[HISTORY],
                "a node's count covers its children, by class", node)
    return 0


cdef int _check_sequence(Tree* tree, int32_t slot) except -1:
    cdef Sequence* sequence = &tree.sequences[slot]
    cdef Place place
    cdef int32_t order, start, depth
    cdef int32_t end = sequence.here.base + (sequence.length - sequence.here.first)
    _demand(tree.text[end] == -2 - slot, "an open sequence's end names its slot", slot)
    _demand(sequence.num_pending <= min(sequence.length, tree.max_order), "a pending suffix is in the sequence", slot)
    for order in range(1, min(sequence.length, tree.max_order) + 1):
        start = _address(sequence, sequence.length - order)
        if order > sequence.num_pending:
            _demand(_find_edge(tree, parent_of(tree, ~start), tree.nodes[parent_of(tree, ~start)].depth,
                               tree.text[start + tree.nodes[parent_of(tree, ~start)].depth]) == ~start,
                    "a suffix that is not pending is a leaf", start)
            continue
        place = sequence.places[order]
        if place.below != NONE:
            _climb(tree, &place, order)
        _demand((place.below == NONE) == (tree.nodes[place.node].depth == order), "a place is at its order's depth", slot)
        start = start_of(tree, place.below if place.below != NONE else place.node)
        for depth in range(order):
            _demand(tree.text[start + depth] == tree.text[_address(sequence, sequence.length - order) + depth],
                    "a place spells the sequence's last tokens", slot)
    return 0
