# cython: language_level=3
"""Drafting for a whole batch in one call: evidence of several context orders -> draft tokens with survival.

For each request the kernel reads, at the contexts of the last 1, 2, 3, 4, 6, 8, 12 and 16 tokens, how often the context
occurred and what followed most often. Starting from almost nothing, each longer context corrects the shorter one,

    P(x) <- (count_n(x) + KAPPA * P(x)) / (total_n + KAPPA)

as in PPM and interpolated n-gram models: a context seen often speaks for itself, one seen once moves the estimate only
part of the way. Candidates x are the contexts' top children. The best one's P is then *calibrated*: P is sorted into a
cell by its logit and by who ever continued so (running text, history, both), and replaced by the hit rate that such
predictions really had, from verification feedback. The product of these probabilities along the chain is the survival;
drafting stops where it would fall below the request's price, or at its cap. The prediction that was asked for but not
drafted is remembered too: the token the engine emits there is its answer, so the cells learn even when nothing is drafted.

The requests' state lives here as well, as C structs, so that a decode step of 256 requests is one call without the GIL.
"""
cimport cython
from libc.math cimport log
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcpy, memset

from das._suffix_tree cimport SuffixTree
from das._token_ids cimport TokenIdBuffer
from das._tree cimport (
    Continuation, Cursor, append, count_continuation, cursor_advance, cursor_of_sequence, prefetch_places,
    prefetch_sequence, prefetch_steps, prefetch_text, read_continuation, reserve,
)
from das._tree_arrays cimport HISTORY, RUNNING, Sequence, Tree

import numpy

cdef enum:
    NUM_ORDERS = 8
    NUM_BINS = 24               # of the logit of P on [-4, 4]
    NUM_SOURCES = 3             # running, history, both
    MAX_DRAFT = 64              # the longest draft a budget may ask for
    MAX_FEEDBACK = 1 << 16      # decode steps; a step of 256 requests is heard by the policy at the next plan_step
    NUM_COUNTERS = 5
    DECODE_STEPS = 0            # positions in a request's counters, in the order of metrics.AcceptanceCounters
    VERIFICATION_STEPS = 1
    DRAFTED = 2
    ACCEPTED = 3
    EMITTED = 4

cdef int32_t[NUM_ORDERS] ORDERS
ORDERS[:] = [1, 2, 3, 4, 6, 8, 12, 16]
cdef double KAPPA = 2.0         # weight of the shorter contexts' estimate, in occurrences
cdef double FIRST_ESTIMATE = 1e-5
cdef double PRIOR_STRENGTH = 4.0    # predictions' worth of trust in P before a cell has evidence of its own

MAX_DRAFT_TOKENS = MAX_DRAFT
CELLS_SHAPE = (NUM_SOURCES, NUM_BINS)

cdef struct Prediction:
    int32_t token
    int32_t cell

cdef struct Request:
    Tree* tree                  # NULL: this slot is free
    int32_t sequence            # slot of the request's open sequence in the tree
    int32_t num_drafted         # tokens of the pending draft
    int32_t num_asked           # its predictions: one more where drafting stopped of its own accord
    Prediction[MAX_DRAFT + 1] asked
    int64_t num_prompt          # tokens
    int64_t max_total           # prompt and response tokens together
    uint64_t prompt_key
    int32_t* response           # all tokens since the prompt
    int64_t num_response
    int64_t response_capacity
    int64_t[NUM_COUNTERS] counters

cdef struct Step:               # one request's part of a decode step
    int64_t row
    int64_t first               # of its tokens in the batch's
    int64_t num_tokens
    int64_t num_verified

cdef enum:
    EXTEND_AHEAD = 4            # requests between asking for memory and using it

# ------------------------------------------------------------------------------------------------ the rule

cdef struct Evidence:           # what the contexts of one position say
    int32_t num_levels
    double[NUM_ORDERS] total    # occurrences with a next token, per context
    double[NUM_ORDERS] share    # 1 / (total + KAPPA)
    double[NUM_ORDERS] top_count
    int32_t[NUM_ORDERS] top_token


cdef void _gather(Tree* tree, Cursor* cursor, Evidence* evidence) noexcept nogil:
    cdef Continuation found
    cdef int32_t level, order
    evidence.num_levels = 0
    for level in range(NUM_ORDERS):
        order = ORDERS[level]
        if order > cursor.num_orders:
            break
        read_continuation(tree, &cursor.places[order], order, &found)
        if found.top_count == 0:
            break
        evidence.total[level] = <double>found.total[RUNNING] + found.total[HISTORY]
        evidence.share[level] = 1.0 / (evidence.total[level] + KAPPA)
        evidence.top_count[level] = found.top_count
        evidence.top_token[level] = found.top_token
        evidence.num_levels = level + 1


cdef double _count_at(Tree* tree, Cursor* cursor, Evidence* evidence, int32_t level, int32_t token) noexcept nogil:
    cdef uint32_t[2] count
    cdef int32_t order = ORDERS[level]
    if evidence.top_token[level] == token:
        return evidence.top_count[level]
    if evidence.top_count[level] == evidence.total[level]:
        return 0.0
    count_continuation(tree, &cursor.places[order], order, token, count)
    return <double>count[RUNNING] + count[HISTORY]


cdef int32_t _cell(Tree* tree, Cursor* cursor, int32_t token, double probability) noexcept nogil:
    """The calibration cell of a prediction: who ever continued the last token so, and the bin of the logit."""
    cdef uint32_t[2] count
    cdef int32_t source = 0
    cdef int32_t bin_
    cdef double clipped = min(max(probability, 1e-4), 1.0 - 1e-4)
    count_continuation(tree, &cursor.places[1], 1, token, count)
    if count[HISTORY] > 0:
        source = 2 if count[RUNNING] > 0 else 1
    bin_ = <int32_t>((log(clipped / (1.0 - clipped)) + 4.0) * (NUM_BINS / 8.0))
    return source * NUM_BINS + min(max(bin_, 0), NUM_BINS - 1)


cdef double _best(Tree* tree, Cursor* cursor, Evidence* evidence, Prediction* best) noexcept nogil:
    """The most probable next token and its P. Ties go to the shorter context's candidate."""
    cdef int32_t level, other, token
    cdef double estimate
    cdef double probability = -1.0
    for level in range(evidence.num_levels):
        token = evidence.top_token[level]
        for other in range(level):
            if evidence.top_token[other] == token:
                break
        else:
            estimate = FIRST_ESTIMATE
            for other in range(evidence.num_levels):
                estimate = ((_count_at(tree, cursor, evidence, other, token) + KAPPA * estimate)
                            * evidence.share[other])
            if estimate > probability:
                probability = estimate
                best.token = token
    best.cell = _cell(tree, cursor, best.token, probability)
    return probability

# ------------------------------------------------------------------------------------------------ a group of chains

cdef enum:
    GROUP_SIZE = 16             # enough for a memory access to finish while the others are served

cdef struct Chain:              # a draft being made
    Request* request
    int32_t* token_ids
    double* survival
    int32_t max_draft_tokens
    double min_survival
    double path                 # survival of what has been drafted
    Cursor cursor
    Evidence evidence


cdef void _draft_group(Chain* chains, int32_t num_chains, const double* hits, const double* misses) noexcept nogil:
    """Replace the pending drafts of a few requests.

    One draft is a long row of reads from scattered memory, each depending on the last; a group of drafts is many rows
    side by side. So all go through the same stage together, and every stage asks for what the next one will read.
    """
    cdef int32_t[GROUP_SIZE] active
    cdef int32_t i, num_active, num_left
    cdef Chain* chain
    num_active = _begin(chains, num_chains, active)
    while num_active > 0:
        for i in range(num_active):
            chain = &chains[active[i]]
            prefetch_places(chain.request.tree, chain.cursor.places, chain.cursor.num_orders)
        for i in range(num_active):
            chain = &chains[active[i]]
            prefetch_text(chain.request.tree, chain.cursor.places, chain.cursor.num_orders)
        for i in range(num_active):
            chain = &chains[active[i]]
            _gather(chain.request.tree, &chain.cursor, &chain.evidence)
            if chain.evidence.num_levels > 0:   # the longest context's candidate mostly wins
                prefetch_steps(chain.request.tree, chain.cursor.places, chain.cursor.num_orders,
                               chain.evidence.top_token[chain.evidence.num_levels - 1])
        num_left = 0
        for i in range(num_active):
            if _draft_token(&chains[active[i]], hits, misses):
                active[num_left] = active[i]
                num_left += 1
        num_active = num_left


cdef int32_t _begin(Chain* chains, int32_t num_chains, int32_t* active) noexcept nogil:
    """Set the cursors to the ends of the sequences; return how many chains shall be drafted, and which."""
    cdef int32_t i
    cdef int32_t num_active = 0
    cdef Request* request
    for i in range(num_chains):
        request = chains[i].request
        request.num_drafted = 0
        request.num_asked = 0
        if chains[i].min_survival <= 1.0:       # else nothing can be worth it: do not even look
            prefetch_sequence(request.tree, request.sequence)
            active[num_active] = i
            num_active += 1
    for i in range(num_active):
        request = chains[active[i]].request
        prefetch_places(request.tree, request.tree.sequences[request.sequence].places,
                        request.tree.sequences[request.sequence].num_pending)
    for i in range(num_active):
        request = chains[active[i]].request
        chains[active[i]].path = 1.0
        cursor_of_sequence(request.tree, request.sequence, &chains[active[i]].cursor)
    return num_active


cdef bint _draft_token(Chain* chain, const double* hits, const double* misses) noexcept nogil:
    """Ask for the next token and draft it; False where the chain ends, for want of text, of worth or of room.

    The last prediction asked for is mostly not drafted: a chain that is not cut by its text asks one more.
    """
    cdef Request* request = chain.request
    cdef Prediction* asked = &request.asked[request.num_asked]
    cdef double probability, rate
    if chain.evidence.num_levels == 0:
        return False
    probability = _best(request.tree, &chain.cursor, &chain.evidence, asked)
    request.num_asked += 1
    rate = (hits[asked.cell] + PRIOR_STRENGTH * probability) / (hits[asked.cell] + misses[asked.cell] + PRIOR_STRENGTH)
    if request.num_drafted == chain.max_draft_tokens or chain.path * rate < chain.min_survival:
        return False
    chain.path *= rate
    chain.token_ids[request.num_drafted] = asked.token
    chain.survival[request.num_drafted] = chain.path
    request.num_drafted += 1
    cursor_advance(request.tree, &chain.cursor, asked.token)
    return True

# ------------------------------------------------------------------------------------------------ feedback

cdef void _score(Request* request, double* hits, double* misses, const int32_t* token_ids,
                 int64_t num_tokens) noexcept nogil:
    """Teach the cells: a prediction counts as long as everything before it came true."""
    cdef int64_t i
    for i in range(min(num_tokens, <int64_t>request.num_asked)):
        if request.asked[i].token != token_ids[i]:
            misses[request.asked[i].cell] += 1.0
            break
        hits[request.asked[i].cell] += 1.0

# ------------------------------------------------------------------------------------------------ drafts

@cython.final
cdef class DraftBatch:
    """The drafts of one call, in one block of memory."""
    cdef int32_t* token_ids
    cdef double* survival
    cdef int32_t* num_tokens
    cdef Py_ssize_t num_requests
    cdef Py_ssize_t width

    def __cinit__(self, Py_ssize_t num_requests, Py_ssize_t width):
        self.num_requests = num_requests
        self.width = width
        self.token_ids = <int32_t*>malloc(max(1, num_requests * width) * sizeof(int32_t))
        self.survival = <double*>malloc(max(1, num_requests * width) * sizeof(double))
        self.num_tokens = <int32_t*>malloc(max(1, num_requests) * sizeof(int32_t))
        if self.token_ids == NULL or self.survival == NULL or self.num_tokens == NULL:
            raise MemoryError()

    def __dealloc__(self):
        free(self.token_ids)
        free(self.survival)
        free(self.num_tokens)


@cython.final
@cython.freelist(512)
cdef class Draft:
    """A proposed continuation of one request, a chain of tokens. Immutable; made by `plan_step`.

    Two drafts are equal when their tokens are.
    """
    cdef DraftBatch _batch
    cdef Py_ssize_t _row

    @property
    def draft_token_ids(self):
        """The proposed tokens, a new list; empty where nothing is worth verifying. Complexity: O(tokens)."""
        cdef Py_ssize_t i
        cdef int32_t* token_ids = self._batch.token_ids + self._row * self._batch.width
        return [token_ids[i] for i in range(self._batch.num_tokens[self._row])]

    @property
    def survival(self):
        """survival[j]: probability that draft tokens 0..j are all accepted, a new list. Complexity: O(tokens)."""
        cdef Py_ssize_t i
        cdef double* survival = self._batch.survival + self._row * self._batch.width
        return [survival[i] for i in range(self._batch.num_tokens[self._row])]

    def __len__(self):
        return self._batch.num_tokens[self._row]

    def __eq__(self, other):
        return isinstance(other, Draft) and self.draft_token_ids == other.draft_token_ids

    def __hash__(self):
        return hash(tuple(self.draft_token_ids))

    def __repr__(self):
        survival = ", ".join(f"{probability:.3g}" for probability in self.survival)
        return f"Draft(draft_token_ids={self.draft_token_ids}, survival=[{survival}])"

    def __reduce__(self):
        raise TypeError("a Draft cannot be pickled: send its draft_token_ids")

# ------------------------------------------------------------------------------------------------ requests

@cython.final
cdef class LiveRequests:
    """The state of all live requests, by row. One thread at a time: the drafter holds its history's lock.

    Args:
        hits, misses: float64 arrays of CELLS_SHAPE, the calibration cells; updated in place.
    """
    cdef Request* requests
    cdef Py_ssize_t num_rows
    cdef list trees             # keeps each row's SuffixTree alive
    cdef list free_rows
    cdef TokenIdBuffer ids
    cdef Step* steps            # of the batch being taken in
    cdef int64_t steps_capacity
    cdef int64_t* feedback      # (drafted, accepted) of each decode step since `take_feedback`
    cdef int64_t num_feedback
    cdef int64_t feedback_capacity
    cdef double[:, ::1] hits
    cdef double[:, ::1] misses

    def __cinit__(self, double[:, ::1] hits not None, double[:, ::1] misses not None):
        if (hits.shape[0], hits.shape[1]) != CELLS_SHAPE or (misses.shape[0], misses.shape[1]) != CELLS_SHAPE:
            raise ValueError(f"calibration cells must have shape {CELLS_SHAPE}")
        self.trees = []
        self.free_rows = []
        self.ids = TokenIdBuffer()
        self.hits = hits
        self.misses = misses

    def __dealloc__(self):
        cdef Py_ssize_t row
        for row in range(self.num_rows):
            free(self.requests[row].response)
        free(self.requests)
        free(self.feedback)
        free(self.steps)

    def add(self, SuffixTree tree not None, sequence, *, int64_t num_prompt_tokens, int64_t max_total_tokens,
            uint64_t prompt_key):
        """Take in a request whose open sequence in `tree` has that id, and return its row."""
        cdef Request* grown
        cdef Py_ssize_t row
        cdef int32_t slot = tree.slot_of(sequence)
        if self.free_rows:
            row = self.free_rows.pop()
        else:
            grown = <Request*>realloc(self.requests, (self.num_rows + 1) * sizeof(Request))
            if grown == NULL:
                raise MemoryError()
            self.requests = grown
            row = self.num_rows
            self.trees.append(None)
            self.num_rows += 1
        memset(&self.requests[row], 0, sizeof(Request))
        self.requests[row].num_prompt = num_prompt_tokens
        self.requests[row].max_total = max_total_tokens
        self.requests[row].prompt_key = prompt_key
        self._place(row, tree, slot)
        return row

    def move(self, Py_ssize_t row, SuffixTree tree not None, sequence):
        """The request continues as another open sequence, perhaps of another tree."""
        self._place(row, tree, tree.slot_of(sequence))

    cdef _place(self, Py_ssize_t row, SuffixTree tree, int32_t slot):
        self.trees[row] = tree
        self.requests[row].tree = &tree.tree
        self.requests[row].sequence = slot

    def remove(self, Py_ssize_t row):
        """Forget a request."""
        free(self.requests[row].response)
        memset(&self.requests[row], 0, sizeof(Request))
        self.trees[row] = None
        self.free_rows.append(row)

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
        """Return the rows' (prompt tokens, response tokens, prompt keys) as int64, int64 and uint64 arrays."""
        cdef Py_ssize_t i, n = rows.shape[0]
        num_prompt = numpy.empty(n, dtype=numpy.int64)
        num_response = numpy.empty(n, dtype=numpy.int64)
        keys = numpy.empty(n, dtype=numpy.uint64)
        cdef int64_t[::1] prompt_view = num_prompt
        cdef int64_t[::1] response_view = num_response
        cdef uint64_t[::1] key_view = keys
        for i in range(n):
            prompt_view[i] = self.requests[rows[i]].num_prompt
            response_view[i] = self.requests[rows[i]].num_response
            key_view[i] = self.requests[rows[i]].prompt_key
        return num_prompt, num_response, keys

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

    def note(self, Py_ssize_t row, token_ids):
        """Environment tokens: part of the response, but no decode step; they drop the pending draft unscored."""
        cdef Request* request = &self.requests[row]
        if self.ids.load(token_ids, "token_ids") > 0:
            self._remember(request, self.ids.data, self.ids.num_tokens)
            request.num_drafted = 0
            request.num_asked = 0
        return self.ids.num_tokens

    def extend(self, list rows not None, list token_ids not None, list num_verified not None):
        """Take one decode step's tokens of each row, in order; return how many tokens each row got.

        token_ids[i]: none changes nothing. num_verified[i]: how many tokens of the pending draft the engine really
        verified; None: all. All arguments are checked before the first row is touched.
        """
        cdef Py_ssize_t i, num_rows = len(rows)
        cdef int64_t num_tokens = 0
        cdef Step* steps = self._read_steps(rows, token_ids, num_verified)
        for i in range(num_rows):
            prefetch_sequence(self.requests[steps[i].row].tree, self.requests[steps[i].row].sequence)
        for i in range(num_rows):
            if i + EXTEND_AHEAD < num_rows:
                self._prefetch_step(&steps[i + EXTEND_AHEAD])
            if steps[i].num_tokens > 0:
                self._extend_row(&self.requests[steps[i].row], &steps[i])
        return [steps[i].num_tokens for i in range(num_rows)]

    cdef Step* _read_steps(self, list rows, list token_ids, list num_verified) except? NULL:
        """Read and check a batch of decode steps: all tokens into `ids`, one after the other."""
        cdef Py_ssize_t i, num_rows = len(rows)
        cdef Step* step
        cdef Request* request
        if num_rows > self.steps_capacity:
            step = <Step*>realloc(self.steps, 2 * num_rows * sizeof(Step))
            if step == NULL:
                raise MemoryError()
            self.steps = step
            self.steps_capacity = 2 * num_rows
        self.ids.clear()
        for i in range(num_rows):
            step = &self.steps[i]
            step.row = rows[i]
            request = &self.requests[step.row]
            step.first = self.ids.num_tokens
            step.num_tokens = self.ids.add(token_ids[i], "token_ids")
            verified = num_verified[i]
            step.num_verified = request.num_drafted
            if verified is not None:
                if not 0 <= verified <= request.num_drafted:
                    raise ValueError(f"num_verified_draft_tokens is {verified}; the pending draft has "
                                     f"{request.num_drafted} tokens")
                step.num_verified = verified
        return self.steps

    cdef void _prefetch_step(self, const Step* step) noexcept:
        cdef Request* request = &self.requests[step.row]
        cdef Sequence* sequence = &request.tree.sequences[request.sequence]
        if step.num_tokens > 0:
            prefetch_places(request.tree, sequence.places, sequence.num_pending)
            prefetch_steps(request.tree, sequence.places, sequence.num_pending, self.ids.data[step.first])

    cdef int _extend_row(self, Request* request, const Step* step) except -1:
        cdef const int32_t* token_ids = self.ids.data + step.first
        cdef int64_t n = step.num_tokens
        cdef int64_t accepted = 0
        reserve(request.tree, request.sequence, n)
        self._make_room_for_feedback()
        self._remember(request, token_ids, n)
        request.num_asked = min(request.num_asked, <int32_t>step.num_verified + 1)
        while accepted < min(step.num_verified, n) and request.asked[accepted].token == token_ids[accepted]:
            accepted += 1
        _score(request, &self.hits[0, 0], &self.misses[0, 0], token_ids, n)
        append(request.tree, request.sequence, token_ids, n)
        request.num_drafted = 0
        request.num_asked = 0
        request.counters[DECODE_STEPS] += 1
        request.counters[VERIFICATION_STEPS] += step.num_verified > 0
        request.counters[DRAFTED] += step.num_verified
        request.counters[ACCEPTED] += accepted
        request.counters[EMITTED] += n
        self.feedback[2 * self.num_feedback] = step.num_verified
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

    def draft(self, const int64_t[::1] rows not None, const int64_t[::1] max_draft_tokens not None,
              const double[::1] min_survival not None):
        """Draft for each row under its cap (0..MAX_DRAFT_TOKENS) and price, and return the DraftBatch."""
        cdef Py_ssize_t i, n = rows.shape[0]
        cdef int64_t width = 0
        if max_draft_tokens.shape[0] != n or min_survival.shape[0] != n:
            raise ValueError(f"max_draft_tokens has {max_draft_tokens.shape[0]} entries and min_survival "
                             f"{min_survival.shape[0]}; both must have one a request, {n}")
        for i in range(n):
            width = max(width, max_draft_tokens[i])
            if not 0 <= max_draft_tokens[i] <= MAX_DRAFT:
                raise ValueError(f"max_draft_tokens[{i}] is {max_draft_tokens[i]}; it must be 0 <= cap <= {MAX_DRAFT}")
        cdef DraftBatch batch = DraftBatch(n, width)
        cdef Chain[GROUP_SIZE] chains
        cdef int32_t in_group = 0
        with nogil:
            for i in range(n):
                chains[in_group].request = &self.requests[rows[i]]
                chains[in_group].token_ids = batch.token_ids + i * width
                chains[in_group].survival = batch.survival + i * width
                chains[in_group].max_draft_tokens = self._cap(rows[i], max_draft_tokens[i])
                chains[in_group].min_survival = min_survival[i]
                in_group += 1
                if in_group == GROUP_SIZE or i == n - 1:
                    _draft_group(chains, in_group, &self.hits[0, 0], &self.misses[0, 0])
                    in_group = 0
            for i in range(n):
                batch.num_tokens[i] = self.requests[rows[i]].num_drafted
        return batch

    cdef int32_t _cap(self, int64_t row, int64_t max_draft_tokens) noexcept nogil:
        """The budget's cap, lowered so that draft and bonus token fit into the request's total."""
        cdef Request* request = &self.requests[row]
        return <int32_t>max(0, min(max_draft_tokens, request.max_total - request.num_prompt - request.num_response - 1))

    def clip(self, const int64_t[::1] rows not None, DraftBatch batch not None, Py_ssize_t max_tokens):
        """Cut the batch to `max_tokens` draft tokens in all, the least likely first; ties: the later row first."""
        cdef Py_ssize_t i, j
        cdef Request* request
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
        for i in range(batch.num_requests):
            request = &self.requests[rows[i]]
            request.num_drafted = batch.num_tokens[i]
            request.num_asked = min(request.num_asked, batch.num_tokens[i] + 1)


def drafts_of(DraftBatch batch not None):
    """Return the batch's drafts, one Draft a row."""
    cdef Py_ssize_t row
    cdef Draft draft
    drafts = []
    for row in range(batch.num_requests):
        draft = Draft.__new__(Draft)
        draft._batch = batch
        draft._row = row
        drafts.append(draft)
    return drafts
