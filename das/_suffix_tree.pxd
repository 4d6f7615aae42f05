from libc.stdint cimport int32_t
cimport cython

from das._token_ids cimport TokenIdBuffer
from das._tree_arrays cimport Tree


@cython.final
cdef class SuffixTree:
    cdef Tree tree
    cdef cython.pymutex lock
    cdef int32_t slot_of(self, object sequence) except -1
    cdef int32_t prompt_of(self, object prompt) except -1
    cdef TokenIdBuffer read_context(self, object context_token_ids)
