cdef void* allocate(size_t num_bytes) noexcept nogil
cdef void release(void* block, size_t num_bytes) noexcept nogil
