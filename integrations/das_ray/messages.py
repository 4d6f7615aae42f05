"""What goes between workers and shards: checked bytes, as das writes files; nothing is unpickled, no size is believed.

    rollouts   a segment (das.rollout_segment) with its texts: finished rollouts, each with its training step
    pieces     the same of rollouts that still run: `request_id` is "WORKER/REQUEST", `ordinal` how many tokens of the
               response came before. Only the first piece carries the prompt; later ones have its last token instead
    note       a checked file (das.checked_file) of some other kind: values that JSON holds, and arrays

Every message is parsed and checked whole before anything is done with it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from das.checked_file import Array, CheckedFile, StateError, checked_bytes
from das.prompt_record import PromptWindow
from das.rollout import Rollout, TokenArray, hash_token_ids, with_changes
from das.rollout_segment import Place, Segment, SegmentWriter

MAX_MESSAGE_BYTES = 64 << 20
MAX_MESSAGE_ROLLOUTS = 1 << 16
MAX_WORKER_LENGTH = 200  # characters of a worker's name
_SEGMENT = 1  # a message is one segment
_SHARD_SEED = b"das shard"


class MessageError(ValueError):
    """Bytes that are no message of das, or one that is refused. What the receiver knows is as it was."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What a running request has generated since the last piece.

    Args:
        worker: whose request it is.
        start: tokens of the response before it.
        rollout: its text as response, with request_id and training step. Where `start` is 0 with the prompt, else with
            its last token.
    """

    worker: str
    start: int
    rollout: Rollout

    @property
    def end(self) -> int:
        """Tokens of the response up to its end."""
        return self.start + len(self.rollout.response_token_ids)

    @property
    def name(self) -> int:
        """64 bits that tell the request apart from all others."""
        return piece_name(self.worker, self.rollout)


def piece_name(worker: str, rollout: Rollout) -> int:
    """Return 64 bits that tell a worker's running request apart from all others."""
    text = f"{rollout.key}/{worker}/{rollout.request_id}".encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def shard_of(prompt_key: int, num_shards: int) -> int:
    """Return which shard keeps a prompt: the same in every process, whatever keys a caller chose."""
    digest = hashlib.blake2b(prompt_key.to_bytes(8, "little"), digest_size=8, key=_SHARD_SEED).digest()
    return int.from_bytes(digest, "little") % num_shards


def check_worker(worker: Any) -> str:
    """Return a worker's name. Raises MessageError."""
    if not isinstance(worker, str) or not 0 < len(worker) <= MAX_WORKER_LENGTH or "/" in worker:
        raise MessageError(f"worker is {worker!r}; it must be a text of 1 to {MAX_WORKER_LENGTH} characters without /")
    return worker


# ---------------------------------------------------------------- rollouts and pieces


def rollouts_message(rollouts: Iterable[Rollout], *, worker: str) -> bytes:
    """Return a message of rollouts, each with its training step; texts that a prompt's rollouts share go once."""
    by_key: dict[int, list[Rollout]] = {}
    for rollout in rollouts:
        by_key.setdefault(rollout.key, []).append(rollout)
    writer = SegmentWriter(_SEGMENT)
    for key, of_prompt in by_key.items():
        newest = max([rollout.training_step or 0 for rollout in of_prompt])
        writer.add(PromptWindow(key, tuple(of_prompt), newest, False), {})
    return writer.to_bytes({"worker": worker})


def read_rollouts(data: Any, what: str) -> tuple[str, list[Rollout]]:
    """Return (worker, rollouts) of a message, with texts of their own.

    Raises:
        MessageError: it is none, is too large, or holds what no rollout can be; `what` begins the message.

    Complexity: O(bytes).
    """
    _check_size(data, what)
    try:
        segment = Segment(Path(what), _SEGMENT, with_texts=True, data=data)
        segment.check_places({_SEGMENT: segment.num_tokens})
    except StateError as error:
        raise MessageError(str(error)) from None
    num_rollouts = int(segment.num_rollouts.sum(dtype=np.uint64))
    if num_rollouts > MAX_MESSAGE_ROLLOUTS:
        raise MessageError(f"{what}: it holds {num_rollouts} rollouts; {MAX_MESSAGE_ROLLOUTS} is the most")
    if segment.num_response_tokens() * 4 > MAX_MESSAGE_BYTES:
        raise MessageError(f"{what}: its responses have more than {MAX_MESSAGE_BYTES} bytes")
    worker = check_worker(segment.values.get("worker") if isinstance(segment.values, dict) else None)
    hashes: dict[int, int] = {}

    def text_of(place: Place) -> TokenArray:
        text = segment.text(place).copy()
        text.flags.writeable = False
        hashes[id(text)] = hash_token_ids(text)
        return text

    rollouts: list[Rollout] = []
    for position in range(len(segment.prompt_keys)):
        rollouts += segment.window(position, text_of).rollouts
    for rollout in rollouts:
        if hashes[id(rollout.response_token_ids)] != rollout.response_hash:
            raise MessageError(f"{what}: the hash of a response of prompt {rollout.key} is not that of its tokens")
    return worker, rollouts


def pieces_message(pieces: Iterable[Piece], *, worker: str) -> bytes:
    """Return a message of pieces."""
    return rollouts_message([_as_sent(piece) for piece in pieces], worker=worker)


def read_pieces(data: Any, what: str) -> list[Piece]:
    """Return the pieces of a message. Raises and complexity: as `read_rollouts`."""
    pieces = []
    for rollout in read_rollouts(data, what)[1]:
        worker, slash, request_id = (rollout.request_id or "").partition("/")
        if not slash:
            raise MessageError(f"{what}: a piece is named {rollout.request_id!r}; it must be WORKER/REQUEST")
        own = with_changes(rollout, request_id=request_id, ordinal=0)
        pieces.append(Piece(check_worker(worker), rollout.ordinal, own))
    return pieces


def _as_sent(piece: Piece) -> Rollout:
    rollout = piece.rollout
    prompt = rollout.prompt_token_ids if piece.start == 0 else rollout.prompt_token_ids[-1:]
    name = f"{piece.worker}/{rollout.request_id}"
    return with_changes(rollout, prompt_token_ids=prompt, request_id=name, ordinal=piece.start)


# ---------------------------------------------------------------- everything else


@dataclass(frozen=True, slots=True)
class Note:
    """A message of values that JSON holds, and arrays."""

    values: dict[str, Any]
    arrays: dict[str, Array]


def note_message(kind: str, values: Mapping[str, Any], arrays: Mapping[str, Array] | None = None) -> bytes:
    """Return a note."""
    named = dict(arrays or {})
    return checked_bytes(kind=kind, values={**values, "array_names": list(named)}, arrays=named)


def read_note(data: Any, kind: str, what: str) -> Note:
    """Return a note of that kind. Raises MessageError: it is none, is damaged, or is too large."""
    _check_size(data, what)
    try:
        with CheckedFile(Path(what), kind=kind, data=data) as file:
            values = file.values
            if not isinstance(values, dict) or not isinstance(values.get("array_names"), list):
                raise MessageError(f"{what}: it makes no sense: {values!r:.80}")
            arrays = {name: file.any_array(name) for name in values.pop("array_names") if isinstance(name, str)}
    except StateError as error:
        raise MessageError(str(error)) from None
    return Note(values, arrays)


def count_in(note: Note, name: str, what: str) -> int:
    """Return an int of a note, 0 or more. Raises MessageError."""
    value = note.values.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 63:
        raise MessageError(f"{what}: {name} is {value!r}; it must be an int of at least 0")
    return value


def numbers_in(note: Note, name: str, what: str, *, dtype: str = "<u8", length: int | None = None) -> list[int]:
    """Return a one-dimensional array of a note, of so many entries (None: any). Raises MessageError."""
    array = note.arrays.get(name)
    if array is None or array.dtype.str != dtype or array.ndim != 1 or (length is not None and len(array) != length):
        raise MessageError(f"{what}: {name} must be an array of {dtype}, {'any' if length is None else length} entries")
    numbers: list[int] = array.tolist()
    return numbers


def bytes_array(data: bytes) -> Array:
    """Return a message as an array, to be part of a note."""
    return np.frombuffer(data, "|u1")


def bytes_in(note: Note, name: str, what: str) -> bytes:
    """Return a message that is part of a note. Raises MessageError."""
    array = note.arrays.get(name)
    if array is None or array.dtype.str != "|u1" or array.ndim != 1:
        raise MessageError(f"{what}: {name} must be an array of bytes")
    return array.tobytes()


def _check_size(data: Any, what: str) -> None:
    if not isinstance(data, bytes):
        raise MessageError(f"{what} must be bytes, not {type(data).__name__}")
    if len(data) > MAX_MESSAGE_BYTES:
        raise MessageError(f"{what} has {len(data)} bytes; {MAX_MESSAGE_BYTES} is the most")
