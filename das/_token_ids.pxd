from libc.stdint cimport int32_t


cdef class TokenIdBuffer:
    """Token ids read from Python once, checked, as one C array."""
    cdef int32_t* data
    cdef Py_ssize_t num_tokens
    cdef Py_ssize_t _capacity
    cdef void clear(self) noexcept
    cdef Py_ssize_t add(self, object token_ids, str name) except -1
    cdef Py_ssize_t load(self, object token_ids, str name) except -1
    cdef int _reserve(self, Py_ssize_t num_tokens) except -1
    cdef Py_ssize_t _load_sequence(self, object token_ids, str name) except -1
    cdef Py_ssize_t _load_array(self, object array, str name) except -1
