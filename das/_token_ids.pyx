# cython: language_level=3
"""Token ids from Python to C: the one place where they are read and checked.

Two paths, because per-step calls bring a list of a few ids and bulk loads bring an int32 buffer; going through
`numpy.asarray` for a list of eight costs ten times the list path.
"""
cimport cython
from cpython.long cimport PyLong_AsLongAndOverflow
from cpython.mem cimport PyMem_Free, PyMem_Realloc
from libc.stdint cimport int32_t
from libc.string cimport memcpy

from collections.abc import Mapping, Set

import numpy

cdef long long MAX_TOKEN_ID = 0x7FFFFFFF


@cython.final
cdef class TokenIdBuffer:

    def __dealloc__(self):
        PyMem_Free(self.data)

    cdef int _reserve(self, Py_ssize_t num_tokens) except -1:
        cdef int32_t* data
        if num_tokens > self._capacity:
            data = <int32_t*>PyMem_Realloc(self.data, 2 * num_tokens * sizeof(int32_t))
            if data == NULL:
                raise MemoryError()
            self.data = data
            self._capacity = 2 * num_tokens
        return 0

    cdef void clear(self) noexcept:
        self.num_tokens = 0

    cdef Py_ssize_t load(self, object token_ids, str name) except -1:
        """Read `token_ids` into `data` and return how many there are."""
        self.num_tokens = 0
        return self.add(token_ids, name)

    cdef Py_ssize_t add(self, object token_ids, str name) except -1:
        """Read `token_ids` behind what `data` holds and return how many there are. A failing call adds nothing."""
        if type(token_ids) is list or type(token_ids) is tuple:
            return self._load_sequence(token_ids, name)
        if isinstance(token_ids, (str, bytes, bytearray)):
            raise TypeError(f"{name} must hold token ids (ints), not {type(token_ids).__name__}")
        if isinstance(token_ids, numpy.ndarray) or hasattr(token_ids, "__array_interface__"):
            return self._load_array(numpy.asarray(token_ids), name)
        try:
            view = memoryview(token_ids)
        except TypeError:
            pass
        else:
            return self._load_array(numpy.asarray(view), name)
        # Not isinstance(): Cython drops what an abstract class's check raises, a RecursionError for one.
        if Set.__instancecheck__(token_ids) or Mapping.__instancecheck__(token_ids):
            raise TypeError(
                f"{name} must be a sequence of token ids; a {type(token_ids).__name__} does not say their order")
        try:
            as_list = list(token_ids)
        except TypeError:
            raise TypeError(f"{name} must be a sequence of token ids, not {type(token_ids).__name__}") from None
        return self._load_sequence(as_list, name)

    cdef Py_ssize_t _load_sequence(self, object token_ids, str name) except -1:
        cdef Py_ssize_t i, n = len(token_ids)
        cdef bint is_list = type(token_ids) is list
        cdef long value
        cdef int overflow
        cdef int32_t* data
        self._reserve(self.num_tokens + n)
        data = self.data + self.num_tokens
        for i in range(n):
            item = (<list>token_ids)[i] if is_list else (<tuple>token_ids)[i]
            if type(item) is not int:
                item = _as_int(item, name, i)
            value = PyLong_AsLongAndOverflow(item, &overflow)
            if value < 0 or value > MAX_TOKEN_ID:   # -1 where there was an overflow
                raise ValueError(f"{name}[{i}] is {item}; token ids are 0 <= id < 2**31")
            data[i] = <int32_t>value
        self.num_tokens += n
        return n

    cdef Py_ssize_t _load_array(self, object array, str name) except -1:
        cdef const int32_t[::1] view
        cdef Py_ssize_t i, n
        cdef int32_t lowest = 0
        if array.ndim != 1:
            raise ValueError(f"{name} has {array.ndim} dimensions; token ids are one-dimensional")
        if array.dtype.kind not in "iu":
            raise TypeError(f"{name} has dtype {array.dtype}; token ids are integers")
        n = array.shape[0]
        if array.dtype != numpy.int32:
            outside = numpy.flatnonzero((array < 0) | (array > MAX_TOKEN_ID)) if n else ()
            if len(outside):
                raise ValueError(f"{name}[{outside[0]}] is {array[outside[0]]}; token ids are 0 <= id < 2**31")
        array = numpy.ascontiguousarray(array, dtype=numpy.int32)
        self._reserve(self.num_tokens + n)
        if n > 0:
            view = array
            memcpy(self.data + self.num_tokens, &view[0], n * sizeof(int32_t))
            for i in range(self.num_tokens, self.num_tokens + n):
                lowest |= self.data[i]
            if lowest < 0:
                i = int((array < 0).argmax())
                raise ValueError(f"{name}[{i}] is {array[i]}; token ids are 0 <= id < 2**31")
        self.num_tokens += n
        return n


cdef object _as_int(object item, str name, Py_ssize_t position):
    if isinstance(item, bool) or not isinstance(item, (int, numpy.integer)):
        raise TypeError(f"{name}[{position}] is a {type(item).__name__}; token ids are ints")
    return int(item)


def token_id_array(token_ids, name="token_ids"):
    """Return the token ids as a read-only int32 array of their own.

    Args:
        token_ids: a sequence of ints, or a one-dimensional integer buffer or array; each 0 <= id < 2**31.
        name: what to call the argument in an error message.

    Returns:
        a new int32 array, not writeable.

    Raises:
        TypeError: not integers, or not a sequence (a set or mapping does not say their order). ValueError: an id out of
        range (with its position), or not 1-D.

    Complexity: O(tokens).
    """
    cdef TokenIdBuffer ids = TokenIdBuffer()
    cdef int32_t[::1] view
    cdef Py_ssize_t n = ids.load(token_ids, name)
    array = numpy.empty(n, dtype=numpy.int32)
    if n > 0:
        view = array
        memcpy(&view[0], ids.data, n * sizeof(int32_t))
    array.flags.writeable = False
    return array
