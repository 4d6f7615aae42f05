import numpy as np
import numpy.typing as npt

EXPERTS: tuple[tuple[str, int], ...]

def expect(weights: npt.NDArray[np.float64], learning_rate: float) -> None: ...
