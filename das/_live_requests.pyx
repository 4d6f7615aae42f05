# cython: language_level=3
"""The state of the requests that run, as C structs: a decode step of 256 requests is two calls, one to draft and one to
extend, and neither touches Python between requests."""
cimport cython
from libc.math cimport isnan
from libc.stdint cimport int32_t, int64_t, uint64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcpy, memset

from das._draft cimport (
    ACCEPTED, COMMON, DECODE_STEPS, DRAFTED, EMITTED, GROUP_SIZE, MAX_CHILDREN, MAX_DRAFT, NUM_COUNTERS, NUM_TREES, OWN,
    VERIFICATION_STEPS, Branches, Chain, Experts, Request, draft_group, explains_nothing, score,
)
from das._draft_tree cimport Search, draft_tree_group, score_tree
from das._drafts cimport DraftBatch
from das._hedge cimport start_experts
from das._rule cimport Rule
from das._suffix_tree cimport SuffixTree
from das._token_ids cimport TokenIdBuffer
from das._tree cimport append, prefetch_places, prefetch_sequence, prefetch_steps, reserve
from das._tree_arrays cimport HISTORY, ROOT, Sequence

import numpy

cdef struct Step:               # one request's part of a decode step
    int64_t row
    int64_t first               # of its tokens in the batch's
    int64_t num_tokens
    int64_t num_verified        # of the pending draft, or one of the two below

cdef enum:
    ALL_VERIFIED = -1
    OUT_OF_RANGE = MAX_DRAFT + 1
    MAX_FEEDBACK = 1 << 16      # decode steps; a step of 256 requests is heard by the policy at the next plan_step
    EXTEND_AHEAD = 4            # requests between asking for memory and using it

# ------------------------------------------------------------------------------------------------ emitted tokens

@cython.final
cdef class EmittedTokens:
    """What an engine emitted for some requests, read from Python and checked as far as that goes without the requests.

    Read before any lock is taken: iterating a strange sequence may run code that calls the drafter.

    Args:
        request_ids: for the messages.
        token_ids: of each request; none changes nothing.
        num_verified: how many tokens of each pending draft the engine really verified; None: all. None instead of a
            list: all of each.
    """
    cdef list request_ids
    cdef list num_verified
    cdef TokenIdBuffer ids      # of all requests, one after the other
    cdef Step* steps
    cdef Py_ssize_t num_steps

    def __cinit__(self, list request_ids not None, list token_ids not None, list num_verified):
        cdef Py_ssize_t i, n = len(request_ids)
        if len(token_ids) != n or (num_verified is not None and len(num_verified) != n):
            raise ValueError("token_ids and num_verified must have one entry a request")
        self.request_ids = request_ids
        self.num_verified = num_verified
        self.ids = TokenIdBuffer()
        self.steps = <Step*>malloc(max(1, n) * sizeof(Step))
        if self.steps == NULL:
            raise MemoryError()
        self.num_steps = n
        for i in range(n):
            self.steps[i].first = self.ids.num_tokens
            try:
                self.steps[i].num_tokens = self.ids.add(token_ids[i], "token_ids")
                self.steps[i].num_verified = ALL_VERIFIED if num_verified is None else _num_verified(num_verified[i])
            except (TypeError, ValueError) as error:
                if type(error) is not TypeError and type(error) is not ValueError:
                    raise               # of the caller's own code
                raise type(error)(f"request {request_ids[i]!r}: {error}") from None

    def __dealloc__(self):
        free(self.steps)

    @property
    def num_tokens(self):
        """Tokens of all requests together."""
        return self.ids.num_tokens


cdef int64_t _num_verified(object number) except -2:
    if number is None:
        return ALL_VERIFIED
    if isinstance(number, bool) or not isinstance(number, (int, numpy.integer)):
        raise TypeError(f"num_verified_draft_tokens must be an int, not {type(number).__name__}")
    return number if 0 <= number <= MAX_DRAFT else OUT_OF_RANGE

# ------------------------------------------------------------------------------------------------ requests

@cython.final
cdef class LiveRequests:
    """The state of all live requests, by row. One thread at a time: the drafter holds its history's lock.

    Args:
        rule: what they are drafted by, and what their feedback teaches.

    Attributes:
        num_alone: rows that grow in their prompt's tree only.
    """
    cdef Request* requests
    cdef Py_ssize_t num_rows
    cdef list trees             # keeps each row's SuffixTrees alive
    cdef list free_rows
    cdef int64_t num_started
    cdef int64_t num_calls      # of `rows_of`
    cdef Search* searches       # room for a group of trees; NULL until the first
    cdef int64_t* feedback      # (drafted, accepted) of each decode step since `take_feedback`
    cdef int64_t num_feedback
    cdef int64_t feedback_capacity
    cdef readonly Rule rule
    cdef readonly Py_ssize_t num_alone

    def __cinit__(self, Rule rule not None):
        self.trees = []
        self.free_rows = []
        self.rule = rule

    def __dealloc__(self):
        cdef Py_ssize_t row
        for row in range(self.num_rows):
            free(self.requests[row].response)
            free(self.requests[row].branches)
            free(self.requests[row].experts)
        free(self.requests)
        free(self.searches)
        free(self.feedback)

    def add(self, SuffixTree tree not None, sequence, *, int64_t num_prompt_tokens, int64_t max_total_tokens,
            uint64_t prompt_key):
        """Take in a request whose open sequence in `tree` has that id, and return its row."""
        cdef Request* grown
        cdef Py_ssize_t row
        cdef int32_t slot = tree.slot_of(sequence)
        cdef Experts* experts = NULL
        if self.rule.parameters.mix != NULL:
            experts = <Experts*>malloc(sizeof(Experts))
            if experts == NULL:
                raise MemoryError()
        if self.free_rows:
            row = self.free_rows.pop()
        else:
            grown = <Request*>realloc(self.requests, (self.num_rows + 1) * sizeof(Request))
            if grown == NULL:
                free(experts)
                raise MemoryError()
            self.requests = grown
            row = self.num_rows
            self.trees.append(None)
            self.num_rows += 1
        memset(&self.requests[row], 0, sizeof(Request))
        self.requests[row].rule = &self.rule.parameters
        self.requests[row].experts = experts
        if experts != NULL:
            start_experts(&self.requests[row])
        self.requests[row].num_prompt = num_prompt_tokens
        self.requests[row].max_total = max_total_tokens
        self.requests[row].prompt_key = prompt_key
        self.requests[row].number = self.num_started
        self.num_started += 1
        self.trees[row] = [None] * NUM_TREES
        self._place(row, OWN, tree, slot)
        self.num_alone += 1
        return row

    def move(self, Py_ssize_t row, SuffixTree tree not None, sequence):
        """The request continues as another open sequence, perhaps of another tree."""
        self._place(row, OWN, tree, tree.slot_of(sequence))

    def join_common(self, Py_ssize_t row, SuffixTree tree not None, sequence):
        """The request grows as an open sequence of the common tree, too, and draws on it."""
        cdef int32_t slot = tree.slot_of(sequence)
        self.num_alone -= self.requests[row].num_trees == 1
        self._place(row, COMMON, tree, slot)

    @property
    def history_explains_nothing(self):
        """Whether prompts' histories lately knew next to nothing of what their requests emitted. Complexity: O(1)."""
        return explains_nothing(self.rule.parameters.explained)

    cdef _place(self, Py_ssize_t row, int32_t which, SuffixTree tree, int32_t slot):
        self.trees[row][which] = tree
        self.requests[row].grows[which].tree = &tree.tree
        self.requests[row].grows[which].slot = slot
        self.requests[row].num_trees = max(self.requests[row].num_trees, which + 1)
        if which == OWN:
            self.requests[row].has_history = tree.tree.nodes[ROOT].total[HISTORY] > 0

    def remove(self, Py_ssize_t row):
        """Forget a request."""
        free(self.requests[row].response)
        free(self.requests[row].branches)
        free(self.requests[row].experts)
        self.num_alone -= self.requests[row].num_trees == 1
        memset(&self.requests[row], 0, sizeof(Request))
        self.trees[row] = None
        self.free_rows.append(row)

    def rows_of(self, dict row_of not None, list request_ids not None):
        """Return the rows of requests, as an int64 array.

        Raises:
            KeyError: `row_of` does not have a request. ValueError: one is named twice.
        """
        cdef Py_ssize_t i, n = len(request_ids)
        cdef Py_ssize_t row
        cdef int64_t call
        rows = numpy.empty(n, dtype=numpy.int64)
        cdef int64_t[::1] view = rows
        self.num_calls += 1
        call = self.num_calls
        for i in range(n):
            found = row_of.get(request_ids[i])
            if found is None:
                raise KeyError(f"request {request_ids[i]!r} is not running")
            row = found
            if self.requests[row].last_call == call:
                raise ValueError("request_ids names a request twice")
            self.requests[row].last_call = call
            view[i] = row
        return rows

    def response(self, Py_ssize_t row):
        """Return all tokens since the prompt, as a new int32 array."""
        cdef Request* request = &self.requests[row]
        cdef int32_t[::1] view
        array = numpy.empty(request.num_response, dtype=numpy.int32)
        if request.num_response > 0:
            view = array
            memcpy(&view[0], request.response, request.num_response * sizeof(int32_t))
        return array

    def num_response_tokens(self, Py_ssize_t row):
        """Return how many tokens the request has since its prompt."""
        return self.requests[row].num_response

    def describe(self, const int64_t[::1] rows not None):
        """Return the rows' prompt keys (uint64), and an int64 array of seven rows: request number, prompt tokens,
        response tokens, decode steps, drafted, accepted and emitted tokens."""
        cdef Py_ssize_t i, n = rows.shape[0]
        cdef Request* request
        keys = numpy.empty(n, dtype=numpy.uint64)
        figures = numpy.empty((7, n), dtype=numpy.int64)
        cdef uint64_t[::1] key = keys
        cdef int64_t[:, ::1] figure = figures
        for i in range(n):
            request = &self.requests[rows[i]]
            key[i] = request.prompt_key
            figure[0, i] = request.number
            figure[1, i] = request.num_prompt
            figure[2, i] = request.num_response
            figure[3, i] = request.counters[DECODE_STEPS]
            figure[4, i] = request.counters[DRAFTED]
            figure[5, i] = request.counters[ACCEPTED]
            figure[6, i] = request.counters[EMITTED]
        return keys, figures

    def take_feedback(self):
        """Return (drafted, accepted) of the decode steps since the last call, as two int64 arrays, and forget them."""
        cdef int64_t i
        drafted = numpy.empty(self.num_feedback, dtype=numpy.int64)
        accepted = numpy.empty(self.num_feedback, dtype=numpy.int64)
        cdef int64_t[::1] drafted_view = drafted
        cdef int64_t[::1] accepted_view = accepted
        for i in range(self.num_feedback):
            drafted_view[i] = self.feedback[2 * i]
            accepted_view[i] = self.feedback[2 * i + 1]
        self.num_feedback = 0
        return drafted, accepted

    def counters(self, Py_ssize_t row):
        """Return the request's counters, in the order of metrics.AcceptanceCounters' fields."""
        return tuple([self.requests[row].counters[i] for i in range(NUM_COUNTERS)])

    def note(self, Py_ssize_t row, EmittedTokens environment not None):
        """Environment tokens: part of the response, but no decode step; they drop the pending draft unscored."""
        cdef Request* request = &self.requests[row]
        cdef Py_ssize_t num_tokens = environment.ids.num_tokens
        if num_tokens > 0:
            self._remember(request, environment.ids.data, num_tokens)
            request.num_drafted = 0
            request.num_asked = 0
        return num_tokens

    def check_verified(self, const int64_t[::1] rows not None, EmittedTokens emitted not None):
        """Raise ValueError where more tokens were verified than the row's pending draft has."""
        cdef Py_ssize_t i
        cdef int64_t num_drafted
        if rows.shape[0] != emitted.num_steps:
            raise ValueError(f"{rows.shape[0]} rows, and tokens emitted for {emitted.num_steps} requests")
        for i in range(emitted.num_steps):
            num_drafted = self.requests[rows[i]].num_drafted
            if emitted.steps[i].num_verified > num_drafted:
                raise ValueError(f"request {emitted.request_ids[i]!r}: num_verified_draft_tokens is "
                                 f"{emitted.num_verified[i]}; the pending draft has {num_drafted} tokens")

    def extend(self, const int64_t[::1] rows not None, EmittedTokens emitted not None):
        """Take one decode step's tokens of each row, in order.

        All arguments are checked before the first row is touched.
        """
        cdef Py_ssize_t i, num_rows = rows.shape[0]
        cdef int32_t tree
        cdef Request* request
        cdef Step* steps = emitted.steps
        self.check_verified(rows, emitted)
        for i in range(num_rows):
            steps[i].row = rows[i]
            request = &self.requests[steps[i].row]
            for tree in range(request.num_trees):
                prefetch_sequence(request.grows[tree].tree, request.grows[tree].slot)
        for i in range(num_rows):
            if i + EXTEND_AHEAD < num_rows:
                self._prefetch_step(&steps[i + EXTEND_AHEAD], emitted.ids.data)
            if steps[i].num_tokens > 0:
                self._extend_row(&self.requests[steps[i].row], &steps[i], emitted.ids.data + steps[i].first)

    cdef void _prefetch_step(self, const Step* step, const int32_t* token_ids) noexcept:
        cdef Request* request = &self.requests[step.row]
        cdef Sequence* sequence
        cdef int32_t tree
        if step.num_tokens == 0:
            return
        for tree in range(request.num_trees):
            sequence = &request.grows[tree].tree.sequences[request.grows[tree].slot]
            prefetch_places(request.grows[tree].tree, sequence.places, sequence.num_pending)
            prefetch_steps(request.grows[tree].tree, sequence.places, sequence.num_pending, token_ids[step.first])

    cdef int _extend_row(self, Request* request, const Step* step, const int32_t* token_ids) except -1:
        cdef int64_t n = step.num_tokens
        cdef int64_t num_verified = request.num_drafted if step.num_verified == ALL_VERIFIED else step.num_verified
        cdef int64_t accepted = 0
        cdef int32_t tree
        for tree in range(request.num_trees):
            reserve(request.grows[tree].tree, request.grows[tree].slot, n)
        self._make_room_for_feedback()
        self._remember(request, token_ids, n)
        request.num_asked = min(request.num_asked, <int32_t>num_verified + 1)
        if request.is_tree:
            accepted = score_tree(request, token_ids, n, num_verified)
        else:
            while accepted < min(num_verified, n) and request.asked[accepted].token == token_ids[accepted]:
                accepted += 1
            score(request, token_ids, n)
        for tree in range(request.num_trees):
            append(request.grows[tree].tree, request.grows[tree].slot, token_ids, n)
        request.num_drafted = 0
        request.num_asked = 0
        request.counters[DECODE_STEPS] += 1
        request.counters[VERIFICATION_STEPS] += num_verified > 0
        request.counters[DRAFTED] += num_verified
        request.counters[ACCEPTED] += accepted
        request.counters[EMITTED] += n
        self.feedback[2 * self.num_feedback] = num_verified
        self.feedback[2 * self.num_feedback + 1] = accepted
        self.num_feedback += 1
        return 0

    cdef int _make_room_for_feedback(self) except -1:
        cdef int64_t wanted
        cdef int64_t* grown
        if self.num_feedback == MAX_FEEDBACK:       # nobody takes it: keep the newer half
            memcpy(self.feedback, self.feedback + MAX_FEEDBACK, MAX_FEEDBACK * sizeof(int64_t))
            self.num_feedback = MAX_FEEDBACK // 2
        elif self.num_feedback == self.feedback_capacity:
            wanted = max(2 * self.feedback_capacity, <int64_t>256)
            grown = <int64_t*>realloc(self.feedback, 2 * wanted * sizeof(int64_t))
            if grown == NULL:
                raise MemoryError()
            self.feedback = grown
            self.feedback_capacity = wanted
        return 0

    cdef int _remember(self, Request* request, const int32_t* token_ids, int64_t num_tokens) except -1:
        """Append tokens to the response."""
        cdef int64_t needed = request.num_response + num_tokens
        cdef int64_t wanted
        cdef int32_t* grown
        if needed > request.response_capacity:
            wanted = max(needed, 64, request.response_capacity + request.response_capacity // 2)
            grown = <int32_t*>realloc(request.response, wanted * sizeof(int32_t))
            if grown == NULL:
                raise MemoryError()
            request.response = grown
            request.response_capacity = wanted
        memcpy(request.response + request.num_response, token_ids, num_tokens * sizeof(int32_t))
        request.num_response = needed
        return 0

    def check_budgets(self, const int64_t[::1] max_draft_tokens not None, const double[::1] min_survival not None):
        """Raise ValueError for a cap outside 0..MAX_DRAFT_TOKENS or a price that is no number."""
        cdef Py_ssize_t i
        for i in range(max_draft_tokens.shape[0]):
            if not 0 <= max_draft_tokens[i] <= MAX_DRAFT:
                raise ValueError(f"max_draft_tokens[{i}] is {max_draft_tokens[i]}; it must be 0 <= cap <= {MAX_DRAFT}")
        for i in range(min_survival.shape[0]):
            if isnan(min_survival[i]):
                raise ValueError(f"min_survival[{i}] is nan; it must be a number, the price of a request")

    def draft(self, const int64_t[::1] rows not None, const int64_t[::1] max_draft_tokens not None,
              const double[::1] min_survival not None, *, int32_t max_children=0):
        """Draft for each row under its cap and price, as `check_budgets` wants them, and return the DraftBatch.

        Trees with up to `max_children` branches at a position; 0: chains.
        """
        cdef Py_ssize_t i, n = rows.shape[0]
        cdef int64_t width = 0
        if max_draft_tokens.shape[0] != n or min_survival.shape[0] != n:
            raise ValueError(f"max_draft_tokens has {max_draft_tokens.shape[0]} entries and min_survival "
                             f"{min_survival.shape[0]}; both must have one a request, {n}")
        if not 0 <= max_children <= MAX_CHILDREN:
            raise ValueError(f"max_children is {max_children}; it must be 0 <= max_children <= {MAX_CHILDREN}")
        self.check_budgets(max_draft_tokens, min_survival)
        for i in range(n):
            width = max(width, max_draft_tokens[i])
        cdef DraftBatch batch = DraftBatch(n, width, max_children > 0)
        if max_children > 0:
            self._make_room_for_trees(rows, max_children)
        with nogil:
            self._draft(rows, max_draft_tokens, min_survival, batch)
        return batch

    cdef void _draft(self, const int64_t[::1] rows, const int64_t[::1] max_draft_tokens, const double[::1] min_survival,
                     DraftBatch batch) noexcept nogil:
        cdef Py_ssize_t i, n = rows.shape[0]
        cdef Chain[GROUP_SIZE] chains
        cdef int32_t in_group = 0
        for i in range(n):
            chains[in_group].request = &self.requests[rows[i]]
            chains[in_group].token_ids = batch.token_ids + i * batch.width
            chains[in_group].survival = batch.survival + i * batch.width
            chains[in_group].max_draft_tokens = self._cap(rows[i], max_draft_tokens[i])
            chains[in_group].min_survival = min_survival[i]
            if batch.parents != NULL:
                chains[in_group].parents = batch.parents + i * batch.width
            in_group += 1
            if in_group == GROUP_SIZE or i == n - 1:
                if batch.parents != NULL:
                    draft_tree_group(chains, self.searches, in_group)
                else:
                    draft_group(chains, in_group)
                in_group = 0
        for i in range(n):
            batch.num_tokens[i] = self.requests[rows[i]].num_drafted

    cdef int _make_room_for_trees(self, const int64_t[::1] rows, int32_t max_children) except -1:
        cdef Py_ssize_t i
        cdef Request* request
        if self.searches == NULL:
            self.searches = <Search*>malloc(GROUP_SIZE * sizeof(Search))
            if self.searches == NULL:
                raise MemoryError()
        for i in range(GROUP_SIZE):
            self.searches[i].max_children = max_children
        for i in range(rows.shape[0]):
            request = &self.requests[rows[i]]
            if request.branches == NULL:
                request.branches = <Branches*>malloc(sizeof(Branches))
                if request.branches == NULL:
                    raise MemoryError()
        return 0

    cdef int32_t _cap(self, int64_t row, int64_t max_draft_tokens) noexcept nogil:
        """The budget's cap, lowered so that draft and bonus token fit into the request's total."""
        cdef Request* request = &self.requests[row]
        return <int32_t>max(0, min(max_draft_tokens, request.max_total - request.num_prompt - request.num_response - 1))

    def clip(self, const int64_t[::1] rows not None, DraftBatch batch not None, Py_ssize_t max_tokens):
        """Cut the batch to `max_tokens` draft tokens in all, the least likely first; ties: the later row first."""
        cdef Py_ssize_t i, j
        total = sum([batch.num_tokens[i] for i in range(batch.num_requests)])
        if total <= max_tokens:
            return
        ranked = sorted(
            (-batch.survival[i * batch.width + j], j, i)
            for i in range(batch.num_requests) for j in range(batch.num_tokens[i]))
        for i in range(batch.num_requests):
            batch.num_tokens[i] = 0
        for _, j, i in ranked[:max_tokens]:
            batch.num_tokens[i] = max(batch.num_tokens[i], <int32_t>j + 1)
        self._record(rows, batch)

    def cut(self, const int64_t[::1] rows not None, DraftBatch batch not None, Py_ssize_t width):
        """Cut each draft of the batch to `width` tokens."""
        cdef Py_ssize_t i
        for i in range(batch.num_requests):
            batch.num_tokens[i] = min(batch.num_tokens[i], <int32_t>width)
        self._record(rows, batch)

    cdef void _record(self, const int64_t[::1] rows, DraftBatch batch) noexcept:
        """The rows' pending drafts are as long as the batch says now."""
        cdef Py_ssize_t i
        cdef Request* request
        for i in range(batch.num_requests):
            request = &self.requests[rows[i]]
            request.num_drafted = min(request.num_drafted, batch.num_tokens[i])
            request.num_asked = min(request.num_asked, batch.num_tokens[i] + 1)
