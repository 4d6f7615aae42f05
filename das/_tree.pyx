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
the text has just become longer. About half a node a token remains (32 bytes each); edges live in one hash table keyed
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
from libc.limits cimport INT_MAX
from libc.stdint cimport int32_t, int64_t, uint32_t
from libc.string cimport memcpy, memset

from das._tree_arrays cimport (
    CLOSED_END, DEPTH_BITS, HISTORY, LEAF_PARENT_MASK, MAX_NODES, MAX_ORDER_C, NONE, ROOT, RUNNING, Edge, Node, Place,
    Prompt, Segment, Sequence, Tree, add_edge, counts_of, depth_of, find_edge, first_token_of, grow, grow_edges, home_slot,
    parent_of, parent_of_child, start_of,
)

cdef extern from *:
    void prefetch "__builtin_prefetch"(const void* address) noexcept nogil

cdef enum:
    CACHE_LINE_BYTES = 64

# ------------------------------------------------------------------------------------------------ counting

cdef inline void _promote(Node* node, int32_t token, uint32_t count) noexcept nogil:
    """The child starting with `token` was just counted: it is on top now unless another has a higher count."""
    if count >= node.top_count or token == node.top_token:
        node.top_token = token
        node.top_count = count


cdef inline void _count_child(Tree* tree, int32_t node, int32_t child, int32_t source) noexcept nogil:
    """A suffix of class `source` passed from `node` to its child node `child`."""
    cdef Node* reached = &tree.nodes[child]
    reached.count[source] += 1
    tree.nodes[node].total[source] += 1
    _promote(&tree.nodes[node], first_token_of(tree, node, child), reached.count[RUNNING] + reached.count[HISTORY])


cdef inline void _add_leaf(Tree* tree, int32_t node, int32_t token, int32_t start, int32_t source) noexcept nogil:
    add_edge(tree, node, token, ~start, 0)
    tree.leaf_parent[start] = <uint32_t>node | (<uint32_t>source << 31)
    tree.nodes[node].total[source] += 1
    _promote(&tree.nodes[node], token, 1)


cdef int32_t _split(Tree* tree, int32_t node, int32_t below, int32_t depth) noexcept nogil:
    """Put a node of that depth on the edge from `node` to `below` and return it. It counts what `below` counts."""
    cdef int32_t middle = tree.num_nodes
    cdef int32_t start = start_of(tree, below)
    cdef int32_t next_token = tree.text[start + depth]
    cdef Node* new = &tree.nodes[middle]
    cdef Edge* edge = find_edge(tree, node, first_token_of(tree, node, below))
    cdef int32_t depth_below = edge.depth
    tree.num_nodes += 1
    memset(new, 0, sizeof(Node))
    new.start = start
    new.parent_depth = <uint32_t>node << DEPTH_BITS | <uint32_t>depth
    counts_of(tree, below, new.count)
    edge.child = middle
    edge.depth = depth
    if below > 0:
        tree.nodes[below].parent_depth = <uint32_t>middle << DEPTH_BITS | <uint32_t>depth_below
    else:   # also where the leaf vanishes: a stale place on it must find the way up
        tree.leaf_parent[start] = (tree.leaf_parent[start] & ~<uint32_t>LEAF_PARENT_MASK) | <uint32_t>middle
    if depth > tree.max_order:
        return middle           # nothing continues at full depth: the leaf has become this node
    if next_token >= 0:
        add_edge(tree, middle, next_token, below, depth_below)
        new.total = new.count
        new.top_token = next_token
        new.top_count = new.count[RUNNING] + new.count[HISTORY]
    elif next_token < CLOSED_END:
        _return_leaf(&tree.sequences[-2 - next_token], middle, depth)
    return middle


cdef inline void _return_leaf(Sequence* owner, int32_t node, int32_t depth) noexcept nogil:
    """A sibling has overtaken the owner's leaf of that length, and `node` is there now: the suffix is pending again."""
    owner.places[depth].node = node
    owner.places[depth].below = NONE
    owner.num_pending = max(owner.num_pending, depth)


# ------------------------------------------------------------------------------------------------ places

cdef inline void climb(const Tree* tree, Place* place, int32_t order) noexcept nogil:
    """Repair a place on an edge that has been split since."""
    cdef int32_t below = place.below
    cdef int32_t node = parent_of_child(tree, below)
    if node == place.node:
        return
    while depth_of(tree, node) >= order:
        below = node
        node = parent_of(tree, node)
    if below > 0 and depth_of(tree, below) == order:
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
    climb(tree, place, order)
    node = place.node
    while node != counted:
        _count_child(tree, parent_of(tree, node), node, source)
        node = parent_of(tree, node)


# ------------------------------------------------------------------------------------------------ sequences

cdef int reserve(Tree* tree, int32_t slot, int64_t num_tokens) except -1 nogil:
    """Make room for everything that appending `num_tokens`, and closing all that is open, can create."""
    cdef int64_t num_suffixes = num_tokens + (tree.num_open + 3) * MAX_ORDER_C
    cdef Sequence* sequence = &tree.sequences[slot]
    cdef int64_t num_text = tree.num_text
    if sequence.length + num_tokens >= sequence.here.limit:
        num_text += segment_tokens(sequence.length + num_tokens, num_tokens) + MAX_ORDER_C + 1
    if num_text > INT_MAX or tree.num_nodes + num_suffixes > MAX_NODES:
        with gil:
            raise MemoryError("a suffix tree holds at most 2**31 text positions and 2**27 nodes")
    grow(<void**>&tree.nodes, &tree.nodes_capacity, tree.num_nodes + num_suffixes, sizeof(Node))
    grow(<void**>&tree.text, &tree.text_capacity, num_text, sizeof(int32_t))
    grow(<void**>&tree.leaf_parent, &tree.leaf_parent_capacity, num_text, sizeof(uint32_t))
    grow_edges(tree, tree.num_edges + 2 * num_suffixes)
    return 0


cdef inline int64_t segment_tokens(int64_t length, int64_t num_tokens) noexcept nogil:
    """How many suffixes a new segment shall hold when `num_tokens` are due and the sequence has that length."""
    return max(num_tokens, min(max(length, 48), 1024))


cdef inline int32_t address_of(const Sequence* sequence, int32_t number) noexcept nogil:
    """Text position of the sequence's token `number`, where the suffix that starts there has its text."""
    if number >= sequence.here.first:
        return sequence.here.base + (number - sequence.here.first)
    return sequence.before.base + (number - sequence.before.first)


cdef inline void _open_segment(Tree* tree, Sequence* sequence, int64_t num_tokens) noexcept nogil:
    cdef int32_t num_suffixes = <int32_t>segment_tokens(sequence.length, num_tokens)
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
        if not step(tree, &place, order, token):
            if place.below != NONE:
                node = _split(tree, node, place.below, order)
                _count_child(tree, parent_of(tree, node), node, source)
            _add_leaf(tree, node, token, address_of(sequence, sequence.length - order), source)
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


cdef void close_sequence(Tree* tree, int32_t slot) noexcept nogil:
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
            _count_child(tree, parent_of(tree, place.node), place.node, sequence.source)
    if end + (sequence.here.limit + MAX_ORDER_C + 1 - sequence.length) == tree.num_text and end < tree.num_text:
        tree.num_text = end + 1     # nothing was opened behind this segment: give back what it did not use
    sequence.is_open = False
    tree.num_open -= 1


cdef void end_prompt(Tree* tree, int32_t slot, Prompt* prompt) noexcept nogil:
    """Close a prompt's sequence and make every place of its end a node, so that responses can start there."""
    cdef Sequence* sequence = &tree.sequences[slot]
    cdef int32_t order, leaf
    cdef int32_t num_pending = sequence.num_pending
    close_sequence(tree, slot)
    prompt.num_tail = min(sequence.length, tree.max_order)
    prompt.tail = sequence.here.base + (sequence.length - prompt.num_tail - sequence.here.first)
    prompt.nodes[0] = ROOT
    for order in range(1, prompt.num_tail + 1):
        if order <= num_pending:
            prompt.nodes[order] = sequence.places[order].node
        else:
            leaf = ~address_of(sequence, sequence.length - order)
            prompt.nodes[order] = _split(tree, parent_of_child(tree, leaf), leaf, order)


cdef int32_t _free_slot(Tree* tree) except -1 nogil:
    """Return a slot for a new sequence; may allocate, changes nothing else."""
    cdef int32_t slot
    if tree.num_open < tree.num_sequences:
        for slot in range(tree.num_sequences):
            if not tree.sequences[slot].is_open:
                return slot
    grow(<void**>&tree.sequences, &tree.sequences_capacity, tree.num_sequences + 1, sizeof(Sequence))
    memset(&tree.sequences[tree.num_sequences], 0, sizeof(Sequence))
    tree.num_sequences += 1
    return tree.num_sequences - 1


cdef int32_t open_sequence(Tree* tree, int32_t prompt_handle, int32_t source, int64_t num_tokens) except -1 nogil:
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
    cdef Place* places
    cursor.num_orders = sequence.num_pending
    cursor.first = CURSOR_ROOM - (MAX_ORDER_C + 1)
    places = places_of(cursor)
    for order in range(cursor.num_orders + 1):
        places[order] = sequence.places[order]
        if places[order].below != NONE:
            climb(tree, &places[order], order)


cdef void prefetch_sequence(const Tree* tree, int32_t slot) noexcept nogil:
    """Ask for the memory that `cursor_of_sequence` will read."""
    cdef const char* sequence = <const char*>&tree.sequences[slot]
    cdef size_t line
    for line in range(sizeof(Sequence) // CACHE_LINE_BYTES + 1):
        prefetch(sequence + line * CACHE_LINE_BYTES)


cdef void prefetch_places(const Tree* tree, const Place* places, int32_t num_orders) noexcept nogil:
    """Ask for what tells how contexts of order 1..num_orders continue: counts, and on a leaf's edge the text."""
    cdef int32_t order
    for order in range(1, num_orders + 1):
        prefetch_continuation(tree, &places[order], order)
        if places[order].below < 0:
            prefetch(&tree.leaf_parent[~places[order].below])


cdef inline void prefetch_continuation(const Tree* tree, const Place* place, int32_t order) noexcept nogil:
    if place.below < 0:
        prefetch(&tree.text[~place.below + order])
    else:
        prefetch(&tree.nodes[place.below if place.below != NONE else place.node])


cdef void prefetch_text(const Tree* tree, const Place* places, int32_t num_orders) noexcept nogil:
    """Ask for the text of the nodes' edges, whose position `prefetch_places` has fetched."""
    cdef int32_t order
    for order in range(1, num_orders + 1):
        if places[order].below > 0:
            prefetch(&tree.text[tree.nodes[places[order].below].start + order])


cdef void prefetch_steps(const Tree* tree, const Place* places, int32_t num_orders, int32_t token) noexcept nogil:
    """Ask for the edges along which contexts of order 0..num_orders continue with `token`."""
    cdef int32_t order
    for order in range(num_orders + 1):
        if places[order].below != NONE:
            break               # nor does a longer context branch
        prefetch(&tree.edges[home_slot(tree, places[order].node, token)])


cdef void cursor_advance(Tree* tree, Cursor* cursor, int32_t token) noexcept nogil:
    """The contexts one token later: the context of order n + 1 is that of order n, one step down.

    Where a context does not continue with `token`, no longer one does: its end is theirs, too. Asks for the memory that
    the next reading will touch and the last one has not.
    """
    cdef int32_t num_steps = min(cursor.num_orders + 1, tree.max_order)
    cdef Place* places = places_of(cursor)
    cdef int32_t order, below
    for order in range(num_steps):
        below = places[order].below
        if not step(tree, &places[order], order, token):
            num_steps = order
            break
        if places[order].below != below:
            prefetch_continuation(tree, &places[order], order + 1)
    cursor.num_orders = num_steps
    if cursor.first == 0:
        cursor.first = CURSOR_ROOM - (MAX_ORDER_C + 1)
        memcpy(places_of(cursor), places, MAX_ORDER_C * sizeof(Place))
    cursor.first -= 1
    places_of(cursor)[0].node = ROOT
    places_of(cursor)[0].below = NONE
