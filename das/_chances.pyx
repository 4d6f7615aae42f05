# cython: language_level=3, boundscheck=False, wraparound=False
"""What `LengthAwareBudget` computes for each running request: its chance to end last, and its share of a pass."""
from libc.math cimport exp
from libc.stdint cimport int64_t

import numpy as np

LOOKS = (0.2113, 0.7887)        # where in a stretch of the grid integrands are looked at (Gauss, two points)

cdef extern from *:
    """
    #define LEAST 1e-12         /* a macro: as a variable it would keep loops from being vectorised */
    """
    double LEAST                # probability of being below something: never 0, as it is divided by


def smooth(double[:, ::1] survival not None, int64_t times):
    """Blur each row in place, that often: a quarter of each neighbour and half of itself; ends are their own neighbours.

    Args:
        survival: of each request at each horizon, float64 [requests, horizons].
        times: at least 0.

    Never raises. O(requests x horizons x times).
    """
    cdef int64_t row, column, last = survival.shape[1] - 1
    cdef double before, here, after
    for row in range(survival.shape[0]):
        for _ in range(times):
            here = before = survival[row, 0] if last >= 0 else 0.0
            for column in range(last + 1):
                after = survival[row, min(column + 1, last)]
                survival[row, column] = (before + 2.0 * here + after) / 4.0
                before, here = here, after


def chances_to_be_largest(const double[:, :] cumulative not None, const double[:, :] others not None):
    """Return for each of several independent numbers the probability that it is the largest.

    Args:
        cumulative: of each number the probability to be below each edge of a grid, [numbers, edges]; what is missing to
            1 at the last edge lies beyond it.
        others: of numbers beside these the logarithm of the probability that all are below, at each of `LOOKS` in each
            of the edges + 1 stretches, [looks, edges + 1]; 0 where there are none.

    Returns:
        float64 [numbers], the integral over all values of a number's density times the probability that all others are
        below. Without others scaled to sum to 1, else to at most 1.

    Raises:
        ValueError: `others` does not fit. Never for probabilities. O(numbers x edges).
    """
    cdef int64_t num_numbers = cumulative.shape[0], num_stretches = cumulative.shape[1] + 1
    cdef int64_t look, number, stretch
    cdef double at, total = 0.0
    cdef bint has_others = False
    if others.shape[0] != len(LOOKS) or others.shape[1] != num_stretches:
        raise ValueError(f"others has shape {(others.shape[0], others.shape[1])}; it must be ({len(LOOKS)}, edges + 1)")
    found, edges = np.zeros(num_numbers), np.zeros((num_numbers, num_stretches + 1))
    edges[:, 1:-1], edges[:, -1] = cumulative, 1.0
    cdef double[::1] chances = found
    cdef double[:, ::1] edge = edges
    cdef double[::1] below = np.empty(num_stretches)
    cdef double[::1] all_below = np.empty(num_stretches)
    for look in range(others.shape[0]):
        at = LOOKS[look]
        for stretch in range(num_stretches):
            all_below[stretch] = exp(others[look, stretch]) / others.shape[0]
            has_others = has_others or others[look, stretch] != 0.0
        for number in range(num_numbers):
            _look(&edge[number, 0], num_stretches, at, &below[0])
            _multiply(&all_below[0], &below[0], num_stretches)
        for number in range(num_numbers):
            _look(&edge[number, 0], num_stretches, at, &below[0])
            chances[number] += _integral(&edge[number, 0], &below[0], &all_below[0], num_stretches)
    for number in range(num_numbers):
        total += chances[number]
    if total > 1.0 or (total > 0.0 and not has_others):
        for number in range(num_numbers):
            chances[number] /= total
    return found


def shares(
    const int64_t[::1] known_numbers not None,
    const double[::1] known_chances not None,
    const int64_t[::1] request_numbers not None,
    double even,
    double weight,
):
    """Return each request's share of a pass: `weight` of its chance to end last, the rest of an even share.

    Args:
        known_numbers: of requests whose chance is known, ascending; known_chances: these.
        request_numbers: of the requests asked about; one that is not known has an even chance.
        even: the share of each, if all count alike.
        weight: 0..1.

    Returns:
        float64 [requests], with the sum `even` times requests: of a batch of which a part is asked about, that part
        shares its even part.

    Raises:
        ValueError: known_numbers and known_chances differ in length. O(requests x log known).
    """
    cdef int64_t position, place, num_requests = request_numbers.shape[0]
    cdef double total = 0.0, scale
    if known_numbers.shape[0] != known_chances.shape[0]:
        raise ValueError(f"known_numbers has {len(known_numbers)} entries, known_chances {len(known_chances)}")
    found = np.empty(num_requests)
    cdef double[::1] mixed = found
    for position in range(num_requests):
        place = _place_of(known_numbers, request_numbers[position])
        mixed[position] = 1.0 / num_requests if place < 0 else known_chances[place]
        total += mixed[position]
    scale = weight * num_requests * even / max(total, LEAST)
    for position in range(num_requests):
        mixed[position] = scale * mixed[position] + (1.0 - weight) * even
    return found


cdef void _look(const double* edges, int64_t num_stretches, double at, double* below) noexcept nogil:
    """Write the probability to be below a place in each stretch between edges, never 0."""
    cdef int64_t stretch
    cdef double here
    for stretch in range(num_stretches):
        here = edges[stretch] * (1.0 - at) + edges[stretch + 1] * at
        below[stretch] = here if here > LEAST else LEAST


cdef void _multiply(double* product, const double* factors, int64_t num_stretches) noexcept nogil:
    cdef int64_t stretch
    for stretch in range(num_stretches):
        product[stretch] *= factors[stretch]


cdef double _integral(
    const double* edges, const double* below, const double* all_below, int64_t num_stretches
) noexcept nogil:
    """Over all stretches: a number's density times the probability that all others are below."""
    cdef int64_t stretch
    cdef double total = 0.0
    for stretch in range(num_stretches):
        total += (edges[stretch + 1] - edges[stretch]) / below[stretch] * all_below[stretch]
    return total


cdef int64_t _place_of(const int64_t[::1] numbers, int64_t wanted) noexcept nogil:
    """Where a number is among ascending ones; -1: it is not there."""
    cdef int64_t low = 0, high = numbers.shape[0], middle
    while low < high:
        middle = (low + high) // 2
        if numbers[middle] < wanted:
            low = middle + 1
        else:
            high = middle
    return low if low < numbers.shape[0] and numbers[low] == wanted else -1
