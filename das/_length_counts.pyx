# cython: language_level=3, wraparound=False
"""Counts of how long the last rollouts got, of each prompt and overall, in the bins of `das.length_grid`.

Native, as every finished rollout changes a row of counts: some 0.3 us here, 5 us with numpy.
"""
cimport cython
from libc.stdint cimport int64_t, uint8_t, uint64_t

import numpy as np

from das.length_grid import EDGES as _EDGES, NUM_BINS as _NUM_BINS

cdef enum:
    MOST_BINS = 255             # a bin is a byte, and one value is for places of a ring where no rollout has been yet
    FIRST_ROWS = 64

cdef int NUM = _NUM_BINS
cdef uint8_t NO_BIN = _NUM_BINS
cdef double[MOST_BINS + 1] EDGE
for _number in range(_NUM_BINS + 1):
    EDGE[_number] = _EDGES[_number]


@cython.final
cdef class LengthCounts:
    """The last rollouts of all prompts, and the last ones of each prompt.

    Args:
        window_rollouts: of all prompts together, >= 1.
        prompt_window_rollouts: of one prompt, 1..255.
        max_prompts: >= 1; the prompts whose last rollout is longest ago go first.

    Attributes:
        num_rollouts: in the window of all prompts.
        histogram: rollouts of that window in each bin, float64 [bins].
        above: of each row (a prompt's, see `rows_of`; row 0 is empty) the rollouts longer than each edge, uint8
            [rows, edges].
    """

    cdef readonly int64_t num_rollouts
    cdef readonly object histogram, above
    cdef dict _rows                     # of prompts, in order of their last rollout
    cdef object _recent                 # bins of a row's last rollouts, a ring
    cdef object _num_seen               # rollouts that a row has had
    cdef object _window                 # bins of the last rollouts of all prompts, a ring
    cdef double[::1] _histogram_view
    cdef uint8_t[:, ::1] _above_view, _recent_view
    cdef int64_t[::1] _seen_view
    cdef uint8_t[::1] _window_view
    cdef int64_t _window_size, _prompt_window_size, _max_prompts, _num_pushed

    def __init__(self, int64_t window_rollouts, int64_t prompt_window_rollouts, int64_t max_prompts):
        if not (window_rollouts >= 1 and 1 <= prompt_window_rollouts <= 255 and max_prompts >= 1):
            raise ValueError(f"{(window_rollouts, prompt_window_rollouts, max_prompts)} are no sizes of windows")
        self._window_size, self._prompt_window_size = window_rollouts, prompt_window_rollouts
        self._max_prompts, self._num_pushed, self.num_rollouts = max_prompts, 0, 0
        self._rows = {}
        self.histogram = np.zeros(_NUM_BINS)
        self._histogram_view = self.histogram
        self._window = np.zeros(window_rollouts, np.uint8)
        self._window_view = self._window
        self._make_room(FIRST_ROWS)

    def __reduce__(self):
        keys, counts, bins = self.prompts()
        settings = (self._window_size, self._prompt_window_size, self._max_prompts)
        return _counted, (settings, self.window(), np.repeat(keys, counts), bins)

    @property
    def num_prompts(self):
        return len(self._rows)

    def observe(self, const uint64_t[::1] keys not None, const int64_t[::1] lengths not None):
        """Count finished rollouts, in order of their ends: of the window, and of their prompts; the oldest leave.

        Args:
            keys: which prompt each answers.
            lengths: in tokens; 0 and less counts as 1, those beyond the grid as its last bin.

        Raises ValueError: different lengths. Nothing changes then. O(rollouts x bins).
        """
        cdef int64_t position
        cdef uint8_t its_bin
        _check_as_many(keys.shape[0], lengths.shape[0], "lengths")
        for position in range(keys.shape[0]):
            its_bin = _bin_of(lengths[position])
            self._push_overall(its_bin)
            self._push(self._row_of(keys[position]), its_bin)

    def load(self, const uint8_t[::1] window not None, const uint64_t[::1] keys not None, const uint8_t[::1] bins not None):
        """Count what was learned before: the window, as of `window()`, and rollouts of prompts, by their bins.

        Raises ValueError: a bin that does not exist, or not a bin for each key. Nothing changes then.
        """
        cdef int64_t position
        _check_as_many(keys.shape[0], bins.shape[0], "bins")
        _check_bins(window)
        _check_bins(bins)
        for position in range(window.shape[0]):
            self._push_overall(window[position])
        for position in range(keys.shape[0]):
            self._push(self._row_of(keys[position]), bins[position])

    def rows_of(self, const uint64_t[::1] keys not None):
        """Return the rows of prompts in `above`, intp; 0 for a prompt not known. O(keys)."""
        rows = np.empty(keys.shape[0], np.intp)
        cdef Py_ssize_t[::1] view = rows
        cdef int64_t position
        for position in range(keys.shape[0]):
            view[position] = self._rows.get(keys[position], 0)
        return rows

    @cython.boundscheck(False)
    def of_prompts(self, const uint64_t[::1] keys not None, const double[::1] overall not None):
        """Return, of each prompt's last rollouts, how many are longer than each edge, with `overall` added.

        Args:
            keys: of prompts; of one not known there are none.
            overall: [edges].

        Returns:
            float64 [keys, edges]. Raises ValueError: not a number for each edge. O(result).
        """
        cdef int64_t position, row
        if overall.shape[0] != NUM + 1:
            raise ValueError(f"overall has {overall.shape[0]} entries; it must have {NUM + 1}")
        found = np.empty((keys.shape[0], NUM + 1))
        cdef double[:, ::1] above = found
        for position in range(keys.shape[0]):
            row = self._rows.get(keys[position], 0)
            _add(&self._above_view[row, 0], &overall[0], &above[position, 0])
        return found

    def window(self):
        """Return the bins of the last rollouts of all prompts, the oldest first, uint8. O(window)."""
        return _in_order(self._window, self._num_pushed)

    def prompts(self):
        """Return keys (uint64), numbers of rollouts kept (int64), and their bins (uint8), one prompt after another.

        Prompts come in the order of their last rollout, rollouts the oldest first. O(prompts + rollouts).
        """
        bins = [_in_order(self._recent[row], self._seen_view[row]) for row in self._rows.values()]
        counts = np.array([len(of_one) for of_one in bins], np.int64)
        return np.array(list(self._rows), np.uint64), counts, np.concatenate([np.empty(0, np.uint8), *bins])

    cdef void _push_overall(self, uint8_t its_bin):
        cdef int64_t slot = self._num_pushed % self._window_size
        if self.num_rollouts == self._window_size:
            self._histogram_view[self._window_view[slot]] -= 1.0
        else:
            self.num_rollouts += 1
        self._window_view[slot] = its_bin
        self._histogram_view[its_bin] += 1.0
        self._num_pushed += 1

    cdef void _push(self, int64_t row, uint8_t its_bin):
        cdef int64_t slot = self._seen_view[row] % self._prompt_window_size
        cdef uint8_t oldest = self._recent_view[row, slot]
        self._seen_view[row] += 1
        if oldest == its_bin:
            return
        self._recent_view[row, slot] = its_bin
        self._count(row, its_bin, 1)
        if oldest != NO_BIN:
            self._count(row, oldest, -1)

    cdef void _count(self, int64_t row, uint8_t its_bin, int sign):
        cdef int edge
        for edge in range(its_bin + 1):
            self._above_view[row, edge] += <uint8_t>sign        # modulo 256 in between

    cdef int64_t _row_of(self, uint64_t key) except -1:
        """The row of a prompt, a new one if need be; note that the prompt was seen last."""
        cdef object row = self._rows.pop(key, None)
        if row is None:
            row = self._new_row()
        self._rows[key] = row
        return row

    cdef int64_t _new_row(self) except -1:
        cdef int64_t row
        if len(self._rows) == self._max_prompts:
            row = self._rows.pop(next(iter(self._rows)))
            self._recent[row], self._above_view[row] = NO_BIN, 0
            self._seen_view[row] = 0
            return row
        row = len(self._rows) + 1
        if row == self._seen_view.shape[0]:
            self._make_room(2 * row)
        return row

    cdef int _make_room(self, int64_t num_rows) except -1:
        """Take all new arrays before any is replaced: without memory for one, nothing changes."""
        recent = np.full((num_rows, self._prompt_window_size), NO_BIN, np.uint8)
        above = np.zeros((num_rows, _NUM_BINS + 1), np.uint8)
        num_seen = np.zeros(num_rows, np.int64)
        if self._num_seen is not None:
            for new, old in ((recent, self._recent), (above, self.above), (num_seen, self._num_seen)):
                new[: len(old)] = old
        self._recent, self.above, self._num_seen = recent, above, num_seen
        self._recent_view, self._above_view, self._seen_view = recent, above, num_seen
        return 0


def _counted(settings, window, keys, bins):
    """What a pickled LengthCounts is made from again."""
    counts = LengthCounts(*settings)
    counts.load(window, keys, bins)
    return counts


cdef int _check_bins(const uint8_t[::1] bins) except -1:
    cdef int64_t position
    for position in range(bins.shape[0]):
        if bins[position] >= NUM:
            raise ValueError(f"bins holds {bins[position]}; there are {NUM} bins")
    return 0


cdef int _check_as_many(int64_t num_keys, int64_t num_others, name) except -1:
    if num_keys != num_others:
        raise ValueError(f"keys has {num_keys} entries, {name} {num_others}; they describe the same rollouts")
    return 0


cdef uint8_t _bin_of(int64_t num_tokens) noexcept:
    """The bin of a final length."""
    cdef int low = 0, high = NUM - 1, middle        # the first bin whose end is not below it
    while low < high:
        middle = (low + high) // 2
        if EDGE[middle + 1] < num_tokens:
            low = middle + 1
        else:
            high = middle
    return low


def _in_order(ring, int64_t num_seen):
    cdef int64_t size = len(ring)
    return ring[np.arange(max(0, num_seen - size), num_seen) % size]


@cython.boundscheck(False)
def longer_than_each(const double[:, ::1] above not None, const double[:, ::1] at not None):
    """Return how many rollouts of each row are longer than so many tokens.

    Args:
        above: rollouts longer than each edge, [rows, edges].
        at: tokens, >= 0 and finite, [rows, any number]; fastest where they ascend.

    Returns:
        float64 of the shape of `at`. Inside a bin all lengths are equally likely.

    Raises:
        ValueError: `above` has another number of rows, or of edges than the grid. O(result).
    """
    cdef int64_t row, column, here = 0
    cdef double tokens
    _check_above(above, at.shape[0])
    found = np.empty((at.shape[0], at.shape[1]))
    cdef double[:, ::1] longer = found
    for row in range(at.shape[0]):
        for column in range(at.shape[1]):
            tokens = at[row, column]
            while here < NUM - 1 and EDGE[here + 1] <= tokens:
                here += 1
            while here > 0 and EDGE[here] > tokens:
                here -= 1
            longer[row, column] = _longer_than(&above[row, 0], here, tokens)
    return found


@cython.boundscheck(False)
def tokens_beyond_each(const double[:, ::1] above not None, const int64_t[::1] at not None):
    """Return the tokens that the rollouts of each row have beyond so many, summed up.

    Args:
        above: rollouts longer than each edge, [rows, edges].
        at: tokens, >= 0, [rows].

    Returns:
        float64 [rows]: the area under `longer_than_each` from there on.

    Raises:
        ValueError: as `longer_than_each`. O(rows x bins).
    """
    cdef int64_t row, edge
    cdef double tokens
    _check_above(above, at.shape[0])
    found = np.zeros(at.shape[0])
    cdef double[::1] beyond = found
    for row in range(at.shape[0]):
        tokens = 0.0
        edge = NUM
        while edge > 0 and EDGE[edge - 1] >= at[row]:
            tokens += (above[row, edge - 1] + above[row, edge]) * (EDGE[edge] - EDGE[edge - 1])
            edge -= 1
        if edge > 0 and EDGE[edge] > at[row]:
            tokens += (_longer_than(&above[row, 0], edge - 1, at[row]) + above[row, edge]) * (EDGE[edge] - at[row])
        beyond[row] = tokens / 2.0
    return found


cdef void _add(const uint8_t* counts, const double* overall, double* sums) noexcept nogil:
    cdef int64_t edge
    for edge in range(NUM + 1):
        sums[edge] = counts[edge] + overall[edge]


cdef inline double _longer_than(const double* above, int64_t its_bin, double tokens) noexcept nogil:
    """Rollouts longer than so many tokens, which are in that bin or beyond the grid."""
    cdef double share = (tokens - EDGE[its_bin]) / (EDGE[its_bin + 1] - EDGE[its_bin])
    return above[its_bin] + (above[its_bin + 1] - above[its_bin]) * min(share, 1.0)


cdef int _check_above(const double[:, ::1] above, int64_t num_rows) except -1:
    if above.shape[0] != num_rows or above.shape[1] != NUM + 1:
        raise ValueError(f"above has shape {(above.shape[0], above.shape[1])}; it must be {(num_rows, NUM + 1)}")
    return 0
