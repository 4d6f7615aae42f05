from typing import final

import numpy as np
import numpy.typing as npt

@final
class Rule:
    def __init__(
        self,
        hits: npt.NDArray[np.float64],
        misses: npt.NDArray[np.float64],
        histogram: npt.NDArray[np.float64],
        explained: npt.NDArray[np.float64],
    ) -> None: ...
    def hedge(
        self,
        weights: npt.NDArray[np.float64],
        *,
        learning_rate: float,
        share: float,
        hint_rate: float,
        per_request: bool,
    ) -> None: ...
    def change(self, *, cell_memory: float = ..., max_contexts: int = ..., is_keyed_by_source: bool = True) -> None: ...
