from libc.stdint cimport int32_t

from das._draft cimport Chain, Request

cdef double mix(Chain* chain, int32_t token, float* opinions) noexcept nogil
cdef void teach(Request* request, const float* opinions, bint was_hit) noexcept nogil
cdef void start_experts(Request* request) noexcept nogil
