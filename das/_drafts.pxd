from libc.stdint cimport int32_t

cdef class DraftBatch:
    cdef int32_t* token_ids
    cdef int32_t* parents       # NULL: all are chains
    cdef double* survival
    cdef int32_t* num_tokens
    cdef Py_ssize_t num_requests
    cdef Py_ssize_t width
