# cython: language_level=3
"""What a drafter's requests are drafted by: what was learned about acceptance, and how evidence is weighed."""
cimport cython

from das._draft cimport MAX_LEVELS, NUM_EXPERTS, ExpertWeights
from das._hedge cimport mix, teach
from das._draft import (
    CELL_MEMORY as _CELL_MEMORY, CELLS_SHAPE as _CELLS_SHAPE, HISTOGRAM_SHAPE as _HISTOGRAM_SHAPE,
)

_ALL_CONTEXTS = MAX_LEVELS


@cython.final
cdef class Rule:
    """The rule of `_draft.pyx`, with the arrays that it learns in; they are updated in place.

    Args:
        hits, misses: float64 arrays of CELLS_SHAPE, the calibration cells.
        histogram: float64 array of HISTOGRAM_SHAPE, of the calibrated probabilities.
        explained: float64 array of 2, of what prompts' histories explained and what not.
    """

    def __init__(self, double[:, ::1] hits not None, double[:, ::1] misses not None,
                 double[:, ::1] histogram not None, double[::1] explained not None):
        if (hits.shape[0], hits.shape[1]) != _CELLS_SHAPE or (misses.shape[0], misses.shape[1]) != _CELLS_SHAPE:
            raise ValueError(f"calibration cells must have shape {_CELLS_SHAPE}")
        if (histogram.shape[0], histogram.shape[1]) != _HISTOGRAM_SHAPE:
            raise ValueError(f"histogram must have shape {_HISTOGRAM_SHAPE}")
        if explained.shape[0] != 2:
            raise ValueError(f"explained must have 2 entries, not {explained.shape[0]}")
        self.arrays = hits, misses, histogram, explained
        self.parameters.hits = &hits[0, 0]
        self.parameters.misses = &misses[0, 0]
        self.parameters.histogram = &histogram[0, 0]
        self.parameters.explained = &explained[0]
        self.change()

    def hedge(self, double[:, ::1] weights not None, *, double learning_rate, double share, double hint_rate,
              bint per_request):
        """Mix nine blends instead of drafting from one, from the next request on. See `das.hedge`.

        Args:
            weights: (3, 9) float64: the experts' weights, expected losses and mixture; updated in place.
        """
        if (weights.shape[0], weights.shape[1]) != (3, NUM_EXPERTS):
            raise ValueError(f"weights must have shape (3, {NUM_EXPERTS})")
        self.arrays += (weights,)
        self.parameters.expert_weights = <ExpertWeights*>&weights[0, 0]
        self.parameters.learning_rate = learning_rate
        self.parameters.share = share
        self.parameters.hint_rate = hint_rate
        self.parameters.is_hedged_by_request = per_request
        self.parameters.mix = mix
        self.parameters.teach = teach

    def change(self, *, double cell_memory=_CELL_MEMORY, int max_contexts=_ALL_CONTEXTS, bint is_keyed_by_source=True):
        """Do without a part of the rule, to measure what that part is worth; what is not named is as it should be.

        Args:
            cell_memory: how many predictions a calibration cell remembers; inf: all.
            max_contexts: how many of the contexts that have a continuation are blended, the longest of them; 1: the
                longest match alone. At least 1.
            is_keyed_by_source: False: one row of cells, whoever ever continued so.
        """
        self.parameters.kept = 1.0 - 1.0 / cell_memory
        self.parameters.max_levels = max_contexts
        self.parameters.source_mask = -1 if is_keyed_by_source else 0
