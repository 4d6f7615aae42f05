# cython: language_level=3
"""Drafts as Python sees them: rows of one block of memory, read where somebody asks."""
cimport cython
from cpython.list cimport PyList_New, PyList_SET_ITEM
from cpython.ref cimport Py_INCREF
from libc.stdint cimport int32_t
from libc.stdlib cimport free, malloc


@cython.final
cdef class DraftBatch:
    """The drafts of one call, in one block of memory.

    Args:
        num_requests: its rows.
        width: most tokens of a row.
        is_tree: whether each token has a parent of its own; else the one before it is.
    """

    def __cinit__(self, Py_ssize_t num_requests, Py_ssize_t width, bint is_tree):
        self.num_requests = num_requests
        self.width = width
        self.token_ids = <int32_t*>malloc(max(1, num_requests * width) * sizeof(int32_t))
        self.survival = <double*>malloc(max(1, num_requests * width) * sizeof(double))
        self.num_tokens = <int32_t*>malloc(max(1, num_requests) * sizeof(int32_t))
        if is_tree:
            self.parents = <int32_t*>malloc(max(1, num_requests * width) * sizeof(int32_t))
        if (self.token_ids == NULL or self.survival == NULL or self.num_tokens == NULL
                or (is_tree and self.parents == NULL)):
            raise MemoryError()

    def __dealloc__(self):
        free(self.token_ids)
        free(self.parents)
        free(self.survival)
        free(self.num_tokens)


cdef list _ints(const int32_t* values, Py_ssize_t num_values):
    """A list made at its size: an engine reads one a request and step."""
    cdef Py_ssize_t i
    cdef list ints = PyList_New(num_values)
    for i in range(num_values):
        value = <object>values[i]
        Py_INCREF(value)                    # for the list, which takes over a reference
        PyList_SET_ITEM(ints, i, value)
    return ints


@cython.freelist(512)
cdef class Draft:
    """A proposed continuation of one request, a chain of tokens. Immutable; made by `plan_step`.

    Two drafts are equal when their tokens and their tokens' parents are.
    """
    cdef DraftBatch _batch
    cdef Py_ssize_t _row

    def __init__(self):
        raise TypeError(f"a {type(self).__name__} is made by plan_step")

    cdef Py_ssize_t _length(self):
        return 0 if self._batch is None else self._batch.num_tokens[self._row]

    @property
    def draft_token_ids(self):
        """The proposed tokens, a new list; empty where nothing is worth verifying. Complexity: O(tokens)."""
        cdef Py_ssize_t n = self._length()
        return [] if n == 0 else _ints(self._batch.token_ids + self._row * self._batch.width, n)

    @property
    def parents(self):
        """parents[j] < j: which draft token comes before token j, a new list; -1: the end of the context.

        Of a chain -1, 0, 1, and so on. Complexity: O(tokens).
        """
        cdef Py_ssize_t n = self._length()
        if n == 0 or self._batch.parents == NULL:
            return list(range(-1, n - 1))
        return _ints(self._batch.parents + self._row * self._batch.width, n)

    @property
    def survival(self):
        """survival[j]: probability that token j and all before it on its path are accepted; never increases with j.

        A new list. Complexity: O(tokens).
        """
        cdef Py_ssize_t i, n = self._length()
        if n == 0:
            return []
        cdef double* survival = self._batch.survival + self._row * self._batch.width
        return [survival[i] for i in range(n)]

    def __len__(self):
        return self._length()

    def __eq__(self, other):
        if not isinstance(other, Draft):
            return NotImplemented
        return self.draft_token_ids == other.draft_token_ids and self.parents == other.parents

    def __hash__(self):
        return hash((tuple(self.draft_token_ids), tuple(self.parents)))

    def __repr__(self):
        survival = ", ".join(f"{probability:.3g}" for probability in self.survival)
        return f"Draft(draft_token_ids={self.draft_token_ids}, survival=[{survival}])"

    def __reduce__(self):
        raise TypeError(f"a {type(self).__name__} cannot be pickled: send its draft_token_ids")


cdef class DraftTree(Draft):
    """Proposed continuations of one request that share their beginnings, a tree of tokens. Immutable; made by `plan_step`.

    Token j follows token parents[j], which comes before it in the list; several tokens may follow the same one, never
    two equal ones. The first n tokens are a tree, too, for any n. `len` counts all tokens. Two drafts are equal when
    their tokens and their tokens' parents are.
    """

    def __repr__(self):
        survival = ", ".join(f"{probability:.3g}" for probability in self.survival)
        return f"DraftTree(draft_token_ids={self.draft_token_ids}, parents={self.parents}, survival=[{survival}])"


def expected_accepted(DraftBatch batch not None):
    """Return how many requests are expected to accept their draft token j, for each j below the batch's width.

    Complexity: O(tokens).
    """
    cdef Py_ssize_t i, j
    accepted = [0.0] * batch.width
    for i in range(batch.num_requests):
        for j in range(batch.num_tokens[i]):
            accepted[j] += batch.survival[i * batch.width + j]
    return accepted


def drafts_of(list request_ids not None, DraftBatch batch not None):
    """Return the batch's drafts by request, one Draft or DraftTree a row."""
    cdef Py_ssize_t row
    cdef Draft draft
    cdef dict drafts = {}
    if len(request_ids) != batch.num_requests:
        raise ValueError(f"{len(request_ids)} requests for {batch.num_requests} drafts")
    for row in range(batch.num_requests):
        if batch.parents == NULL:
            draft = Draft.__new__(Draft)    # of a type known here, which takes no call through Python
        else:
            draft = DraftTree.__new__(DraftTree)
        draft._batch = batch
        draft._row = row
        drafts[request_ids[row]] = draft
    return drafts
