import numpy as np
import numpy.typing as npt

_FloatArray = npt.NDArray[np.float64]
_IntArray = npt.NDArray[np.int64]

LOOKS: tuple[float, ...]

def smooth(survival: _FloatArray, times: int) -> None: ...
def chances_to_be_largest(cumulative: _FloatArray, others: _FloatArray) -> _FloatArray: ...
def shares(
    known_numbers: _IntArray, known_chances: _FloatArray, request_numbers: _IntArray, even: float, weight: float
) -> _FloatArray: ...
