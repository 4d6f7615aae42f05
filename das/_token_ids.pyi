from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

class TokenIdBuffer: ...

def token_id_array(
    token_ids: Sequence[int] | Iterable[int] | npt.NDArray[Any], name: str = ...
) -> npt.NDArray[np.int32]: ...
