"""One sampled response to one prompt, and the key that says which prompt it answers."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from das._token_ids import token_id_array
from das.checked_values import check_int

TokenArray = npt.NDArray[np.int32]
TokenIds = Sequence[int] | TokenArray


def prompt_key(prompt_token_ids: TokenIds) -> int:
    """Return the stable 64-bit key of a prompt.

    Args:
        prompt_token_ids: at least one token id, each 0 <= id < 2**31.

    Returns:
        0 <= key < 2**64; equal token ids give equal keys in every process and on every machine.

    Raises:
        TypeError, ValueError: not token ids, or none at all.

    Complexity: O(tokens).
    """
    return hash_token_ids(_non_empty(prompt_token_ids, "prompt_token_ids"))


def named_prompt_key(name: object) -> int:
    """Return the key of a named prompt: an int of 0 to 2**64 - 1 is its own, anything else goes by its text."""
    if isinstance(name, int) and not isinstance(name, bool) and 0 <= name < 1 << 64:
        return name
    digest = hashlib.blake2b(str(name).encode("utf-8", "replace"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def hash_token_ids(token_ids: TokenArray) -> int:
    """Return a 64-bit hash of checked token ids, the same in every process and on every machine. O(tokens)."""
    digest = hashlib.blake2b(token_ids.astype("<i4", copy=False).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _non_empty(token_ids: TokenIds, name: str) -> TokenArray:
    array = token_id_array(token_ids, name)
    if len(array) == 0:
        raise ValueError(f"{name} is empty; it must hold at least one token id")
    return array


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Rollout:
    """One sampled response to one prompt.

    Args:
        prompt_token_ids: the prompt, at least one token id, 0 <= id < 2**31; copied.
        response_token_ids: the response, at least one token id; copied.
        training_step: version of the policy at the first generated token, >= 0; None: not known.
        reward: the rollout's reward; None: not known.
        request_id: the engine's name for the generation, where there was one.
        prompt_key: the caller's own key, 0 <= key < 2**64; None: `prompt_key(prompt_token_ids)`.
        response_mask: as long as the response; False marks environment or tool tokens, which are context only.
        ordinal: a trainer's or a log's number that tells equal responses of one prompt and step apart, 0 <= ordinal
            < 2**31: which sample of its group it is, say. Where there is a request_id, 0 is none.

    Raises:
        TypeError, ValueError: naming the argument, the rule and the value.

    Complexity: O(tokens). The arrays are read-only int32 (bool for the mask).
    """

    prompt_token_ids: TokenArray
    response_token_ids: TokenArray
    training_step: int | None = None
    reward: float | None = None
    request_id: str | None = None
    prompt_key: int | None = None
    response_mask: npt.NDArray[np.bool_] | None = None
    ordinal: int = 0
    response_hash: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        put = object.__setattr__  # the class is frozen for everybody else
        prompt = _non_empty(self.prompt_token_ids, "prompt_token_ids")
        response = _non_empty(self.response_token_ids, "response_token_ids")
        put(self, "prompt_token_ids", prompt)
        put(self, "response_token_ids", response)
        put(self, "response_hash", hash_token_ids(response))
        if self.prompt_key is None:
            put(self, "prompt_key", hash_token_ids(prompt))
        else:
            check_int(self.prompt_key, "prompt_key", below=1 << 64)
            put(self, "prompt_key", int(self.prompt_key))
        if self.training_step is not None:
            check_int(self.training_step, "training_step", below=1 << 62)
            put(self, "training_step", int(self.training_step))
        check_int(self.ordinal, "ordinal", below=1 << 31)
        if self.reward is not None:
            put(self, "reward", _finite(self.reward, "reward"))
        if self.request_id is not None and not isinstance(self.request_id, str):
            raise TypeError(f"request_id must be a str or None, not {type(self.request_id).__name__}")
        if self.response_mask is not None:
            put(self, "response_mask", _mask(self.response_mask, len(response)))

    def __reduce__(self) -> tuple[Any, ...]:  # not __setstate__: dataclass overwrites that before Python 3.11.4
        return _restored, (type(self), [getattr(self, name) for name in self.__dataclass_fields__])

    @property
    def key(self) -> int:
        """The prompt's key: the caller's own, or the hash of the prompt's token ids."""
        assert self.prompt_key is not None  # set by __post_init__
        return self.prompt_key


def rollouts_of_fields(items: Iterable[Mapping[str, Any]]) -> list[Rollout]:
    """Return rollouts that come as plain values, as trainers push them to engines.

    Args:
        items: the fields of each; its `prompt_key` may be a text, which stands for `named_prompt_key` of it.

    Raises:
        TypeError: nothing to go through. ValueError: no rollout; it says which one, from 0, and what is wrong with it.

    Complexity: O(tokens).
    """
    if isinstance(items, (str, bytes, Mapping)) or not isinstance(items, Iterable):
        raise TypeError(f"rollouts must come one after another, as in a list, not as a {type(items).__name__}")
    rollouts = []
    for number, item in enumerate(items):
        try:
            if not isinstance(item, Mapping):
                raise TypeError(f"it must be a mapping of the fields of a rollout, not {type(item).__name__}")
            key = item.get("prompt_key")
            rollouts.append(Rollout(**{**item, "prompt_key": named_prompt_key(key) if isinstance(key, str) else key}))
        except (TypeError, ValueError) as error:
            raise ValueError(f"rollout {number}: {error}") from error
    return rollouts


def check_vocabulary(rollouts: Iterable[Rollout], *, vocabulary_size: int) -> None:
    """Raise ValueError for the first rollout with a token that a model does not have: drafted, it stops the engine.

    Complexity: O(tokens).
    """
    for number, rollout in enumerate(rollouts):
        greatest = max(int(rollout.prompt_token_ids.max()), int(rollout.response_token_ids.max()))
        if greatest >= vocabulary_size:
            raise ValueError(f"rollout {number} holds token {greatest}; the model's vocabulary has {vocabulary_size}")


def _restored(kind: type[Rollout], values: list[Any]) -> Rollout:
    """Return the rollout of fields that `pickle` or `copy` brings; arrays that they have made are writeable."""
    rollout = object.__new__(kind)
    for name, value in zip(kind.__dataclass_fields__, values, strict=True):
        if isinstance(value, np.ndarray):
            value.flags.writeable = False
        object.__setattr__(rollout, name, value)
    return rollout


def stored_rollout(**fields: Any) -> Rollout:
    """Return the rollout of all its fields, known to be right: nothing is copied, hashed or checked."""
    return _restored(Rollout, [fields[name] for name in Rollout.__dataclass_fields__])


def with_changes(rollout: Rollout, **changes: Any) -> Rollout:
    """Return a copy with some fields replaced by values known to be right: nothing is copied or checked again."""
    changed = copy.copy(rollout)
    for name, value in changes.items():
        object.__setattr__(changed, name, value)
    return changed


def _finite(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TypeError(f"{name} must be a number or None, not {type(value).__name__}")
    try:
        number = float(value)
    except OverflowError:  # an int beyond what a float holds
        number = float("inf")
    if not np.isfinite(number):
        raise ValueError(f"{name} is {number}; it must be finite")
    return number


def _mask(mask: Any, length: int) -> npt.NDArray[np.bool_]:
    try:
        array = np.array(mask)
    except ValueError:  # rows of different lengths
        raise ValueError(f"response_mask is not one-dimensional; it must hold {length} booleans") from None
    if array.dtype != np.bool_ and array.dtype.kind not in "iu":
        raise TypeError(f"response_mask must hold booleans (or 0 and 1), not {array.dtype}")
    if array.shape != (length,):
        raise ValueError(f"response_mask has shape {array.shape}; it must be ({length},), one entry a response token")
    others = np.flatnonzero((array != 0) & (array != 1))
    if len(others):
        raise ValueError(f"response_mask[{others[0]}] is {array[others[0]]}; it must be a boolean, or 0 or 1")
    array = array.astype(np.bool_)
    array.flags.writeable = False
    return array
