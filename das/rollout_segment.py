"""Segments: the part of a saved state that one save writes, as columns; a state is several of them.

A segment holds prompts' windows, and the token ids (texts) that no earlier segment holds. What the latest segment that
names a prompt says of it replaces all that earlier ones say; without a rollout, the prompt is forgotten. Its rollouts
refer to texts by segment number, position and length, so those that stay are never written again.

Arrays of a segment file, of P prompts and R rollouts (those of one prompt after another; oldest epoch first):

    tokens              int32    texts, one after another
    prompt_key          uint64   [P], each once
    num_rollouts        uint32   [P], their sum is R
    current_step        int64    [P]  see das.prompt_record.PromptWindow
    has_finished        uint8    [P]
    training_step       int64    [R]
    {prompt,response}_{hash,segment,start,length}   uint64, uint32, uint64, uint32   [R]  the two texts
    ordinal             uint32   [R]  if any is not 0
    reward              float64  [R]  if there are any; NaN: not known
    request_id_length   uint32   [R]  if there are any; 0: none, else bytes + 1; of request_id_text: uint8, UTF-8
    mask_length         uint32   [R]  if there are any; 0: none, else bytes; of mask_bits: uint8, packed, first token in
                                      the highest bit
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from das.checked_file import Array, CheckedFile, FileIdentity, StoredArray, checked_bytes, write_checked_file
from das.prompt_record import PromptWindow
from das.rollout import Rollout, TokenArray, hash_token_ids, stored_rollout

_KIND = "rollouts"
_MAX_STEP, _MAX_ORDINAL = 1 << 62, 1 << 31
_DTYPES = {"B": "|u1", "I": "<u4", "Q": "<u8", "q": "<i8", "d": "<f8"}  # of array.array
_TEXT = {"hash": "Q", "segment": "I", "start": "Q", "length": "I"}
_OF_PROMPTS = {"prompt_key": "Q", "num_rollouts": "I", "current_step": "q", "has_finished": "B"}
_OF_ROLLOUTS = {
    "training_step": "q",
    **{f"{which}_{part}": code for which in ("prompt", "response") for part, code in _TEXT.items()},
}
_OPTIONAL = {"ordinal": ("I", 0), "reward": ("d", np.nan), "request_id_length": ("I", 0), "mask_length": ("I", 0)}
_OF_BYTES = {"request_id_text": "request_id_length", "mask_bits": "mask_length"}


class Place(NamedTuple):
    """Where a text lies: in which segment, from which token on, and how many tokens."""

    segment: int
    start: int
    length: int


class SegmentWriter:
    """Collects the windows of one save.

    Args:
        number: of the segment, not used before in its directory.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.num_tokens = 0
        self._texts: list[TokenArray] = []
        codes = _OF_PROMPTS | _OF_ROLLOUTS | {name: code for name, (code, _) in _OPTIONAL.items()}
        self._columns: dict[str, array[Any]] = {name: array(code) for name, code in codes.items()}
        self._bytes = {name: bytearray() for name in _OF_BYTES}

    @property
    def is_empty(self) -> bool:
        """Whether nothing was collected."""
        return not self._columns["prompt_key"]

    def add(self, window: PromptWindow, known: Mapping[int, Place]) -> int:
        """Take in a window; return how many tokens its texts have, each counted once.

        Args:
            known: the prompt's texts that earlier segments hold, by hash.
        """
        self._add_prompt(window.prompt_key, len(window.rollouts), window.current_step, window.has_finished)
        places = dict(known)
        hashes: dict[int, int] = {}  # of prompts; their rollouts share one array
        used: set[Place] = set()
        put = self._columns
        for rollout in window.rollouts:
            prompt, response = rollout.prompt_token_ids, rollout.response_token_ids
            if id(prompt) not in hashes:
                hashes[id(prompt)] = hash_token_ids(prompt)
            put["training_step"].append(rollout.training_step)
            for which, text, its_hash in (
                ("prompt", prompt, hashes[id(prompt)]),
                ("response", response, rollout.response_hash),
            ):
                place = places.get(its_hash)
                if place is None:
                    place = places[its_hash] = Place(self.number, self.num_tokens, len(text))
                    self._texts.append(text)
                    self.num_tokens += len(text)
                used.add(place)
                for part, value in zip(_TEXT, (its_hash, *place), strict=True):
                    put[f"{which}_{part}"].append(value)
            put["ordinal"].append(rollout.ordinal)
            put["reward"].append(np.nan if rollout.reward is None else rollout.reward)
            name = None if rollout.request_id is None else rollout.request_id.encode("utf-8", "surrogatepass")
            self._add_bytes("request_id_text", name, 1)
            mask = rollout.response_mask
            self._add_bytes("mask_bits", None if mask is None else np.packbits(mask).tobytes(), 0)
        return sum([place.length for place in used])

    def add_forgotten(self, prompt_key: int) -> None:
        """Note that nothing is known of a prompt any more."""
        self._add_prompt(prompt_key, 0, 0, False)

    def write(self, path: Path, values: Mapping[str, Any] | None = None) -> FileIdentity:
        """Write the segment file, with what JSON can hold beside it. Raises OSError."""
        return write_checked_file(path, kind=_KIND, values=values or {}, arrays=self._arrays())

    def to_bytes(self, values: Mapping[str, Any] | None = None) -> bytes:
        """Return what `write` would write."""
        return checked_bytes(kind=_KIND, values=values or {}, arrays=self._arrays())

    def _arrays(self) -> dict[str, Array | list[TokenArray]]:
        arrays: dict[str, Array | list[TokenArray]] = {"tokens": self._texts or np.zeros(0, "<i4")}
        for name, column in self._columns.items():
            values = (
                np.frombuffer(column, _DTYPES[column.typecode]) if column else np.zeros(0, _DTYPES[column.typecode])
            )
            default = _OPTIONAL.get(name, (None, None))[1]
            is_default = default is not None and (np.isnan(values) if name == "reward" else values == default).all()
            if not is_default:
                arrays[name] = values
        arrays |= {
            name: np.frombuffer(data, np.uint8) for name, data in self._bytes.items() if _OF_BYTES[name] in arrays
        }
        return arrays

    def _add_prompt(self, prompt_key: int, num_rollouts: int, current_step: int, has_finished: bool) -> None:
        for name, value in zip(_OF_PROMPTS, (prompt_key, num_rollouts, current_step, has_finished), strict=True):
            self._columns[name].append(value)

    def _add_bytes(self, name: str, data: bytes | None, extra: int) -> None:
        self._columns[_OF_BYTES[name]].append(0 if data is None else len(data) + extra)
        self._bytes[name] += data or b""


class Segment:
    """A segment file that was read and checked.

    Args:
        path: of the file.
        number: of the segment.
        with_texts: check the texts, too. False: leave them out.
        mapped: texts stay on disk until they are used. False: `text` reads each into memory.
        data: what `SegmentWriter.to_bytes` returned, to be read instead of a file.

    Attributes:
        identity: of the file.
        values: that were written beside the rollouts.
        prompt_keys, num_rollouts: uint64 and uint32, one entry a prompt.
        greatest_token_id: -1 where there is none.

    Raises:
        OSError: it cannot be read. StateError: it is damaged, newer, or holds what no rollout can be.
    """

    def __init__(
        self, path: Path, number: int, *, with_texts: bool, mapped: bool = True, data: bytes | None = None
    ) -> None:
        self.number = number
        self.greatest_token_id = -1
        self._tokens: TokenArray | StoredArray | None = None
        with CheckedFile(path, kind=_KIND, data=data) as file:
            self.identity = file.identity
            self.values: Any = file.values
            read = {name: file.array(name, _DTYPES[code]) for name, code in (_OF_PROMPTS | _OF_ROLLOUTS).items()}
            for name, (code, default) in _OPTIONAL.items():
                dtype = _DTYPES[code]
                of_all = np.broadcast_to(np.array(default, dtype), read["training_step"].shape)
                read[name] = file.array(name, dtype) if name in file else of_all
            self._bytes = {name: file.array(name, "|u1") if name in file else np.zeros(0, "|u1") for name in _OF_BYTES}
            self._columns = read
            self._file = file
            self.prompt_keys, self.num_rollouts = read["prompt_key"], read["num_rollouts"]
            self._check_columns()
            if with_texts:
                self._tokens = (file.map if mapped else file.stored)("tokens", "<i4", self._look_at)
        self._first_rows = _ends_before(self.num_rollouts)
        self._first_bytes = {
            "request_id_text": _ends_before(np.maximum(read["request_id_length"], 1) - 1),
            "mask_bits": _ends_before(read["mask_length"]),
        }

    @property
    def num_tokens(self) -> int:
        """Tokens of texts, of rollouts that are stored and of such that no longer are."""
        return 0 if self._tokens is None else len(self._tokens)

    def text(self, place: Place) -> TokenArray:
        """Return a text of this segment, which was read `with_texts`.

        Raises:
            not `mapped`: OSError, it cannot be read; StateError, the file was cut short since.
        """
        if isinstance(self._tokens, StoredArray):
            return self._tokens.part(place.start, place.length)
        assert self._tokens is not None  # see above
        return self._tokens[place.start : place.start + place.length]

    def num_response_tokens(self) -> int:
        """Return how many tokens the rollouts' responses have together, texts that they share counted for each."""
        return int(self._columns["response_length"].sum(dtype=np.uint64))

    def places(self, entry: int) -> dict[int, Place]:
        """Return the texts of the prompt at this position, by hash."""
        rows = self._rows(entry)
        found = {}
        for which in ("prompt", "response"):
            columns = [self._columns[f"{which}_{part}"][rows].tolist() for part in _TEXT]
            found.update({its_hash: Place(*place) for its_hash, *place in zip(*columns, strict=True)})
        return found

    def check_places(self, num_tokens_of: Mapping[int, int]) -> None:
        """Raise StateError for a text that lies in no segment; `num_tokens_of` has the length of each."""
        for which in ("prompt", "response"):
            numbers, starts, lengths = (self._columns[f"{which}_{part}"] for part in ("segment", "start", "length"))
            for number in np.unique(numbers).tolist():
                of_it = numbers == number
                most = num_tokens_of.get(number, 0)
                if (starts[of_it] > most).any() or (starts[of_it] + lengths[of_it] > most).any():
                    self._file.fail(f"it refers to tokens that segment {number} does not hold")

    def window(self, entry: int, text_of: Callable[[Place], TokenArray]) -> PromptWindow:
        """Return the window of the prompt at this position."""
        rows = self._rows(entry)
        key, _, step, has_finished = (self._columns[name][entry].item() for name in _OF_PROMPTS)
        of_rows = {name: self._columns[name][rows].tolist() for name in (*_OF_ROLLOUTS, *_OPTIONAL)}
        texts: dict[Place, TokenArray] = {}  # so that rollouts of one prompt share its array
        rollouts = []
        for row, values in zip(range(rows.start, rows.stop), zip(*of_rows.values(), strict=True), strict=True):
            rollouts.append(self._rollout(key, row, dict(zip(of_rows, values, strict=True)), texts, text_of))
        return PromptWindow(key, tuple(rollouts), step, bool(has_finished))

    def _rollout(
        self,
        key: int,
        row: int,
        values: Mapping[str, Any],
        texts: dict[Place, TokenArray],
        text_of: Callable[[Place], TokenArray],
    ) -> Rollout:
        found: list[TokenArray] = []
        for which in ("prompt", "response"):
            place = Place(values[f"{which}_segment"], values[f"{which}_start"], values[f"{which}_length"])
            if place not in texts:
                texts[place] = text_of(place)
            found.append(texts[place])
        request_id = self._bytes_of("request_id_text", row, values["request_id_length"] - 1)
        bits = self._bytes_of("mask_bits", row, values["mask_length"] or -1)
        mask = None
        if bits is not None:
            mask = np.unpackbits(np.frombuffer(bits, np.uint8), count=len(found[1])).astype(np.bool_)
            mask.flags.writeable = False
        return stored_rollout(
            prompt_token_ids=found[0],
            response_token_ids=found[1],
            training_step=values["training_step"],
            reward=None if math.isnan(values["reward"]) else values["reward"],
            request_id=None if request_id is None else request_id.decode("utf-8", "surrogatepass"),
            prompt_key=key,
            response_mask=mask,
            ordinal=values["ordinal"],
            response_hash=values["response_hash"],
        )

    def _bytes_of(self, name: str, row: int, length: int) -> bytes | None:
        start = int(self._first_bytes[name][row])
        return None if length < 0 else self._bytes[name][start : start + length].tobytes()

    def _rows(self, entry: int) -> slice:
        start = int(self._first_rows[entry])
        return slice(start, start + int(self.num_rollouts[entry]))

    def _look_at(self, tokens: Array) -> None:
        if len(tokens):
            if tokens.min() < 0:
                self._file.fail("it holds a negative token id")
            self.greatest_token_id = max(self.greatest_token_id, int(tokens.max()))

    def _check_columns(self) -> None:
        """Raise StateError for what no Rollout can hold, though the checksum is right."""
        for problem in self._problems():
            self._file.fail(problem)

    def _problems(self) -> Iterator[str]:
        columns = self._columns
        num_prompts, num_rollouts = len(self.prompt_keys), len(columns["training_step"])
        for names, length in ((_OF_PROMPTS, num_prompts), ({**_OF_ROLLOUTS, **_OPTIONAL}, num_rollouts)):
            yield from (f"{name} has not {length} entries" for name in names if columns[name].shape != (length,))
        if int(self.num_rollouts.sum(dtype=np.uint64)) != num_rollouts:
            yield "num_rollouts does not add up"
        if len(np.unique(self.prompt_keys)) != num_prompts:
            yield "prompt_key names a prompt twice"
        for name, below in (("current_step", _MAX_STEP), ("training_step", _MAX_STEP), ("ordinal", _MAX_ORDINAL)):
            if not ((columns[name] >= 0) & (columns[name] < below)).all():
                yield f"{name} is not 0 <= {name} < 2**{below.bit_length() - 1}"
        if np.isinf(columns["reward"]).any():
            yield "reward is not finite"
        for which in ("prompt", "response"):
            if (columns[f"{which}_length"] == 0).any():
                yield f"a {which} has no token"
        masks = columns["mask_length"]
        if (masks[masks > 0] != (columns["response_length"][masks > 0].astype(np.int64) + 7) // 8).any():
            yield "a mask is not as long as its response"
        named = columns["request_id_length"]
        sizes = {"request_id_text": int((named[named > 0].astype(np.int64) - 1).sum()), "mask_bits": int(masks.sum())}
        yield from (f"{name} has not {size} bytes" for name, size in sizes.items() if len(self._bytes[name]) != size)
        text = self._bytes["request_id_text"]
        starts = _ends_before(np.maximum(named, 1) - 1)
        try:
            text.tobytes().decode("utf-8", "surrogatepass")
            is_text = not (text[starts[named > 1]] & 0xC0 == 0x80).any()  # nor does one begin inside a character
        except UnicodeDecodeError:
            is_text = False
        if not is_text:
            yield "a request_id is no UTF-8 text"


def _ends_before(lengths: Array) -> Array:
    """Return where each of several stretches that follow one another starts."""
    ends: Array = np.cumsum(lengths, dtype=np.int64)
    return ends - lengths
