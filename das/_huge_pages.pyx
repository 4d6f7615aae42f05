# cython: language_level=3
"""Memory for the trees' arrays, on huge pages.

Drafting for 256 requests reads a few hundred scattered cache lines in tens of megabytes a step. With pages of 4 KiB
nearly each of them also misses the processor's address translation; on pages of 2 MiB the same batch call is two to
three times faster. The C library's allocator gives huge pages only to a process started with the right environment,
which a library cannot ask for; so the larger arrays come from regions of their own, marked with madvise(MADV_HUGEPAGE).

A region is a row of 4 KiB units; a run of units is in use or free, and its first and last unit say how long it is (a
boundary tag, Knuth, The Art of Computer Programming 1, section 2.5), so neighbours that become free join in O(1).
Allocation takes the first run that fits, which keeps the low end dense. A region that is empty again is returned.
Arrays below one unit come from malloc. The caller names a block's size when it gives it back.
"""
cimport cython
from libc.stdint cimport int32_t, uintptr_t
from libc.stdlib cimport free, malloc, realloc

import os

cdef extern from *:
    """
    #include <stdlib.h>
    #include <sys/mman.h>
    #ifdef __GLIBC__
    #include <malloc.h>
    #endif
    #ifdef DAS_PLAIN_MALLOC     /* the sanitizer build: it sees overflows only in blocks that malloc gave */
    #define DAS_SMALLEST_RUN ((size_t)-1)
    #else
    #define DAS_SMALLEST_RUN ((size_t)4096)
    #endif
    #ifndef MAP_ANONYMOUS
    #define MAP_ANONYMOUS MAP_ANON
    #endif
    static void* das_map(size_t num_bytes) {
        void* block = mmap(NULL, num_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        return block == MAP_FAILED ? NULL : block;
    }
    static void das_want_huge_pages(void* block, size_t num_bytes) {
    #ifdef MADV_HUGEPAGE
        (void)madvise(block, num_bytes, MADV_HUGEPAGE);     /* a wish: where it is refused, small pages do */
    #endif
    }
    static void das_trim(void) {
    #ifdef __GLIBC__
        (void)malloc_trim(0);
    #endif
    }
    """
    const size_t SMALLEST_RUN_BYTES "DAS_SMALLEST_RUN"
    void* das_map(size_t num_bytes) noexcept nogil
    void das_want_huge_pages(void* block, size_t num_bytes) noexcept nogil
    int munmap(void* block, size_t num_bytes) noexcept nogil
    void das_trim() noexcept nogil

cdef enum:
    UNIT_BYTES = 4096
    HUGE_PAGE_BYTES = 1 << 21
    REGION_UNITS = 8192         # 32 MiB

cdef struct Region:
    char* start                 # on a huge page's boundary
    void* mapping
    size_t mapping_bytes
    int32_t num_units
    int32_t num_used
    int32_t* run                # at a run's first and last unit: its length, negative while it is in use

cdef Region* _regions = NULL
cdef Py_ssize_t _num_regions = 0
cdef Py_ssize_t _regions_capacity = 0
cdef cython.pymutex _lock


cdef void* allocate(size_t num_bytes) noexcept nogil:
    """Return a block of at least that size, not initialised, or NULL."""
    cdef int32_t num_units
    cdef void* block = NULL
    cdef Py_ssize_t i
    if num_bytes < SMALLEST_RUN_BYTES:
        return malloc(max(num_bytes, <size_t>1))
    if num_bytes > <size_t>UNIT_BYTES * 0x7FFFFFF0:
        return NULL
    num_units = <int32_t>((num_bytes + UNIT_BYTES - 1) // UNIT_BYTES)
    with _lock:
        for i in range(_num_regions):
            if _regions[i].num_units - _regions[i].num_used >= num_units:
                block = _take(&_regions[i], num_units)
                if block != NULL:
                    break
        if block == NULL and _add_region(num_units):
            block = _take(&_regions[_num_regions - 1], num_units)
    return block


cdef void release(void* block, size_t num_bytes) noexcept nogil:
    """Give back a block of the size it was asked for; NULL is ignored."""
    cdef Py_ssize_t i
    if block == NULL or num_bytes < SMALLEST_RUN_BYTES:
        free(block)
        return
    with _lock:
        for i in range(_num_regions):
            if 0 <= <char*>block - _regions[i].start < <Py_ssize_t>_regions[i].num_units * UNIT_BYTES:
                _give(&_regions[i], <int32_t>((<char*>block - _regions[i].start) // UNIT_BYTES))
                if _regions[i].num_used == 0:
                    _remove_region(i)
                break


cdef void _tag(Region* region, int32_t first, int32_t num_units, bint used) noexcept nogil:
    region.run[first] = region.run[first + num_units - 1] = -num_units if used else num_units


cdef void* _take(Region* region, int32_t num_units) noexcept nogil:
    cdef int32_t first = 0
    cdef int32_t length
    while first < region.num_units:
        length = region.run[first]
        if length >= num_units:
            _tag(region, first, num_units, True)
            if length > num_units:
                _tag(region, first + num_units, length - num_units, False)
            region.num_used += num_units
            return region.start + <Py_ssize_t>first * UNIT_BYTES
        first += length if length > 0 else -length
    return NULL


cdef void _give(Region* region, int32_t first) noexcept nogil:
    cdef int32_t num_units = -region.run[first]
    region.num_used -= num_units
    if first + num_units < region.num_units and region.run[first + num_units] > 0:
        num_units += region.run[first + num_units]
    if first > 0 and region.run[first - 1] > 0:
        num_units += region.run[first - 1]
        first -= region.run[first - 1]
    _tag(region, first, num_units, False)


cdef bint _add_region(int32_t num_units) noexcept nogil:
    """Map a region with room for a run of that length; False where there is no memory."""
    global _regions, _num_regions, _regions_capacity
    cdef Region region
    cdef Region* grown
    if _num_regions == _regions_capacity:
        grown = <Region*>realloc(_regions, (2 * _regions_capacity + 8) * sizeof(Region))
        if grown == NULL:
            return False
        _regions = grown
        _regions_capacity = 2 * _regions_capacity + 8
    region.num_units = max(num_units, <int32_t>REGION_UNITS)
    region.num_used = 0
    region.mapping_bytes = <size_t>region.num_units * UNIT_BYTES + HUGE_PAGE_BYTES
    region.run = <int32_t*>malloc(region.num_units * sizeof(int32_t))
    region.mapping = NULL if region.run == NULL else das_map(region.mapping_bytes)
    if region.mapping == NULL:
        free(region.run)
        return False
    region.start = <char*>((<uintptr_t>region.mapping + HUGE_PAGE_BYTES - 1) & ~<uintptr_t>(HUGE_PAGE_BYTES - 1))
    das_want_huge_pages(region.start, <size_t>region.num_units * UNIT_BYTES)
    _tag(&region, 0, region.num_units, False)
    _regions[_num_regions] = region
    _num_regions += 1
    return True


cdef void _remove_region(Py_ssize_t i) noexcept nogil:
    global _num_regions
    munmap(_regions[i].mapping, _regions[i].mapping_bytes)
    free(_regions[i].run)
    _num_regions -= 1
    _regions[i] = _regions[_num_regions]


def _lock_for_fork():
    """Before a fork: no thread may be in the middle of an allocation, for in the child it would never end."""
    _lock.acquire()


def _unlock_after_fork():
    _lock.release()


os.register_at_fork(before=_lock_for_fork, after_in_parent=_unlock_after_fork, after_in_child=_unlock_after_fork)


def return_free_memory():
    """Give pages of freed small blocks back to the system, where the C library is glibc, which keeps them otherwise.

    Of use when what was freed is not what will be allocated next. Complexity: O(free blocks of the process), without
    the GIL; some 100 us a freed megabyte.
    """
    with nogil:
        das_trim()


def mapped_bytes():
    """Return the address space mapped for arrays of one unit and more. Complexity: O(regions)."""
    cdef Py_ssize_t i
    with _lock:
        return sum([_regions[i].mapping_bytes for i in range(_num_regions)])


def check_invariants():
    """Verify every region's runs; for tests.

    Raises:
        AssertionError: naming the rule.

    Complexity: O(runs).
    """
    cdef Py_ssize_t i
    cdef int32_t first, length, num_used
    cdef bint previous_is_free
    with _lock:
        for i in range(_num_regions):
            first = num_used = 0
            previous_is_free = False
            while first < _regions[i].num_units:
                length = abs(_regions[i].run[first])
                if length == 0 or first + length > _regions[i].num_units:
                    raise AssertionError(f"runs fill the region (unit {first} of region {i})")
                if _regions[i].run[first + length - 1] != _regions[i].run[first]:
                    raise AssertionError(f"a run's ends agree on its length (unit {first} of region {i})")
                if _regions[i].run[first] > 0 and previous_is_free:
                    raise AssertionError(f"free neighbours are joined (unit {first} of region {i})")
                previous_is_free = _regions[i].run[first] > 0
                num_used += 0 if previous_is_free else length
                first += length
            if num_used != _regions[i].num_used:
                raise AssertionError(f"num_used is the length of the runs in use (region {i})")
