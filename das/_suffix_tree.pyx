# cython: language_level=3
"""SuffixTree: the tree of `_tree.pyx` as a Python object. Here arguments are checked and locks are held."""
cimport cython
from libc.stdint cimport int32_t, int64_t, uint32_t
from libc.string cimport memset

from das._token_ids cimport TokenIdBuffer
from das._tree cimport (
    Continuation, Cursor, append, close_sequence, count_continuation, count_continuations, cursor_advance,
    cursor_of_sequence, end_prompt, first_continuation, open_sequence, places_of, read_continuation, reserve, step,
)
from das._tree_arrays cimport (
    HISTORY, MAX_ORDER_C, NONE, ROOT, RUNNING, Node, Place, Prompt, Tree, allocated_bytes, expect_tokens,
    free_arrays, grow, grow_edges,
)
from das._tree_check cimport check_tree

MAX_ORDER = MAX_ORDER_C

cdef enum:
    SLOT_BITS = 24              # of a sequence's id; the rest says how often the slot was used before


@cython.final
cdef class SuffixTree:
    """Counts of what followed each context of up to `max_order` tokens, in two classes: running and history.

    Args:
        max_order: longest context, in tokens, 1..16.
        num_expected_tokens: about how many tokens will be added; memory is taken for them at once, which saves the
            growing. A hint: any number may follow.

    Raises:
        TypeError, ValueError: an argument is not an int, or out of range. MemoryError: no room for what is expected.

    Complexity: one token costs at most max_order + 1 steps of O(1); about 65 bytes a token.
    Thread safety: all methods and properties take the tree's mutex; `add`, `add_prompt`, `extend` work without the GIL.
    """

    def __cinit__(self):
        self.tree.max_order = MAX_ORDER_C
        grow(<void**>&self.tree.nodes, &self.tree.nodes_capacity, 1, sizeof(Node))
        grow(<void**>&self.tree.prompts, &self.tree.prompts_capacity, 1, sizeof(Prompt))
        grow_edges(&self.tree, 1)
        memset(self.tree.nodes, 0, sizeof(Node))
        memset(self.tree.prompts, 0, sizeof(Prompt))
        self.tree.num_nodes = 1
        self.tree.num_prompts = 1

    def __init__(self, *, max_order=MAX_ORDER_C, num_expected_tokens=0):
        if isinstance(max_order, bool) or not isinstance(max_order, int):
            raise TypeError(f"max_order must be an int, not {type(max_order).__name__}")
        if not 1 <= max_order <= MAX_ORDER_C:
            raise ValueError(f"max_order is {max_order}; it must be 1 <= max_order <= {MAX_ORDER_C}")
        _check_expected(num_expected_tokens)
        with self.lock:
            if self.tree.num_text > 0:
                if max_order != self.tree.max_order:
                    raise ValueError(f"max_order is {self.tree.max_order} and cannot change in a tree that holds tokens")
                return
            self.tree.max_order = max_order
            if num_expected_tokens > 0:
                expect_tokens(&self.tree, num_expected_tokens)

    def __dealloc__(self):
        free_arrays(&self.tree)

    def __reduce__(self):
        raise TypeError("a SuffixTree cannot be pickled: it is derived data; keep the rollouts and rebuild it")

    @property
    def max_order(self):
        """Longest context, in tokens."""
        with self.lock:
            return self.tree.max_order

    @property
    def num_tokens(self):
        """Tokens indexed so far."""
        with self.lock:
            return self.tree.num_tokens

    @property
    def num_nodes(self):
        """Nodes in the tree, the root included; leaves need none."""
        with self.lock:
            return self.tree.num_nodes

    @property
    def num_edges(self):
        """Edges in the tree."""
        with self.lock:
            return self.tree.num_edges

    @property
    def num_open_sequences(self):
        """Sequences that can still grow."""
        with self.lock:
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
        cdef TokenIdBuffer ids = _read_non_empty(token_ids)
        with self.lock:
            with nogil:
                grow(<void**>&self.tree.prompts, &self.tree.prompts_capacity, self.tree.num_prompts + 1, sizeof(Prompt))
                slot = open_sequence(&self.tree, 0, RUNNING, ids.num_tokens)
                append(&self.tree, slot, ids.data, ids.num_tokens)
                end_prompt(&self.tree, slot, &self.tree.prompts[self.tree.num_prompts])
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
        cdef int32_t slot, handle
        cdef TokenIdBuffer ids = _read_non_empty(token_ids)
        with self.lock:
            handle = self.prompt_of(prompt)
            with nogil:
                slot = open_sequence(&self.tree, handle, HISTORY, ids.num_tokens)
                append(&self.tree, slot, ids.data, ids.num_tokens)
                close_sequence(&self.tree, slot)

    def open(self, *, prompt=0, num_expected_tokens=0):
        """Start a sequence that will grow, class running, and return its id.

        Args:
            prompt: handle from `add_prompt`; the prompt's last tokens are the context of the first token. 0: none.
            num_expected_tokens: about how many tokens it will get; memory is taken for them here, and for the other
                open sequences to become as long, so that `extend` need not. A hint: never for more tokens than the
                tree holds already, and for none where memory is short.

        Returns:
            the id for `extend`, `close` and `continuations`.

        Raises:
            KeyError: unknown prompt. TypeError, ValueError: a bad number of tokens. MemoryError: no room.
            The tree is unchanged then.

        Complexity: O(max_order + open sequences), beside the growing: O(1) a token expected.
        """
        cdef int32_t slot, handle
        cdef int64_t num_tokens
        _check_expected(num_expected_tokens)
        with self.lock:
            handle = self.prompt_of(prompt)
            if num_expected_tokens > 0:
                num_tokens = num_expected_tokens + _still_expected(&self.tree, num_expected_tokens)
                try:
                    expect_tokens(&self.tree, min(num_tokens, self.tree.num_text))
                except MemoryError:
                    pass                # a hint: there may be room enough for what comes
            slot = open_sequence(&self.tree, handle, RUNNING, 0)
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
        cdef TokenIdBuffer ids = _read(token_ids, "token_ids")
        with self.lock:
            slot = self.slot_of(sequence)
            with nogil:
                reserve(&self.tree, slot, ids.num_tokens)
                append(&self.tree, slot, ids.data, ids.num_tokens)

    def close(self, sequence):
        """End an open sequence. Its tokens stay, as class running; its id is unknown afterwards.

        Raises:
            KeyError: the sequence is not open.

        Complexity: O(max_order).
        """
        with self.lock:
            close_sequence(&self.tree, self.slot_of(sequence))

    def counts(self, context_token_ids):
        """Return how often the context occurs with a visible next token, as (running, history).

        Args:
            context_token_ids: 0..max_order token ids.

        Raises:
            TypeError, ValueError: not token ids, or too many.

        Complexity: O(context).
        """
        cdef Place place
        cdef uint32_t[2] count
        cdef TokenIdBuffer context = self.read_context(context_token_ids)
        with self.lock:
            if not _find(&self.tree, context, &place):
                return 0, 0
            count_continuations(&self.tree, &place, <int32_t>context.num_tokens, count)
            return count[RUNNING], count[HISTORY]

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
        cdef uint32_t[2] count
        cdef TokenIdBuffer token = _read((token_id,), "token_id")
        cdef TokenIdBuffer context = self.read_context(context_token_ids)
        with self.lock:
            if not _find(&self.tree, context, &place):
                return 0, 0
            count_continuation(&self.tree, &place, <int32_t>context.num_tokens, token.data[0], count)
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
        cdef Continuation found
        cdef TokenIdBuffer context = self.read_context(context_token_ids)
        with self.lock:
            if not _find(&self.tree, context, &place):
                return None
            read_continuation(&self.tree, &place, <int32_t>context.num_tokens, &found)
            return found.top_token if found.top_count else None

    def first_child(self, context_token_ids):
        """Return the token that came next where the context was first seen, or None where that text ended there.

        None for the empty context, too.

        Args, Raises, Complexity: as `top_child`.
        """
        cdef Place place
        cdef int32_t token
        cdef TokenIdBuffer context = self.read_context(context_token_ids)
        with self.lock:
            if context.num_tokens == 0 or not _find(&self.tree, context, &place):
                return None
            token = first_continuation(&self.tree, &place, <int32_t>context.num_tokens)
            return token if token >= 0 else None

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
        cdef Continuation found
        cdef uint32_t[2] count
        cdef int32_t order
        cdef Py_ssize_t i
        by_order = []
        cdef TokenIdBuffer draft = _read(draft_token_ids, "draft_token_ids")
        with self.lock:
            cursor_of_sequence(&self.tree, self.slot_of(sequence), &cursor)
            for i in range(draft.num_tokens):
                cursor_advance(&self.tree, &cursor, draft.data[i])
            for order in range(1, cursor.num_orders + 1):
                read_continuation(&self.tree, &places_of(&cursor)[order], order, &found)
                if found.top_count == 0:
                    break
                count_continuations(&self.tree, &places_of(&cursor)[order], order, count)
                by_order.append((count[RUNNING], count[HISTORY], found.top_token))
        return by_order

    def memory_bytes(self):
        """Return the bytes allocated for the tree's arrays.

        Complexity: O(1).
        """
        with self.lock:
            return allocated_bytes(&self.tree)

    def check_invariants(self):
        """Verify the whole structure; for tests, slow.

        Raises:
            AssertionError: naming the rule and the node.

        Complexity: O(nodes + edges).
        """
        with self.lock:
            check_tree(&self.tree)

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
        if isinstance(prompt, bool) or not isinstance(prompt, int) or not 0 <= prompt < self.tree.num_prompts:
            raise KeyError(f"prompt {prompt!r} was not added to this tree")
        return prompt

    cdef TokenIdBuffer read_context(self, object context_token_ids):
        cdef TokenIdBuffer ids = _read(context_token_ids, "context_token_ids")
        if ids.num_tokens > self.tree.max_order:
            raise ValueError(f"context_token_ids holds {ids.num_tokens} tokens; this tree's contexts have at most "
                             f"{self.tree.max_order}")
        return ids


cdef int _check_expected(object num_expected_tokens) except -1:
    if isinstance(num_expected_tokens, bool) or not isinstance(num_expected_tokens, int):
        raise TypeError(f"num_expected_tokens must be an int, not {type(num_expected_tokens).__name__}")
    if not 0 <= num_expected_tokens < 1 << 31:
        raise ValueError(f"num_expected_tokens is {num_expected_tokens}; it must be 0 <= num_expected_tokens < 2**31")
    return 0


cdef int64_t _still_expected(const Tree* tree, int64_t num_expected_tokens) noexcept:
    """How many tokens the open sequences lack to be as long as is expected."""
    cdef int64_t num_tokens = 0
    cdef int32_t slot
    for slot in range(tree.num_sequences):
        if tree.sequences[slot].is_open:
            num_tokens += max(0, num_expected_tokens - tree.sequences[slot].length)
    return num_tokens


cdef TokenIdBuffer _read(object token_ids, str name):
    """Token ids as C integers. Before the lock is taken: reading a strange sequence may run code that uses the tree."""
    cdef TokenIdBuffer ids = TokenIdBuffer()
    ids.load(token_ids, name)
    return ids


cdef TokenIdBuffer _read_non_empty(object token_ids):
    cdef TokenIdBuffer ids = _read(token_ids, "token_ids")
    if ids.num_tokens == 0:
        raise ValueError("token_ids is empty; it must hold at least one token id")
    return ids


cdef bint _find(Tree* tree, TokenIdBuffer context, Place* place):
    """Walk a context from the root; False where it does not occur."""
    cdef int32_t order
    place.node = ROOT
    place.below = NONE
    for order in range(<int32_t>context.num_tokens):
        if not step(tree, place, order, context.data[order]):
            return False
    return True
