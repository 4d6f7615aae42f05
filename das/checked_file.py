"""Files of named arrays that are written whole or not at all, and that are read as they were written or not at all.

    offset 0   header, 64 bytes: b"das file", format version (uint32), zeros
    from 64    arrays, one after another, each zero-padded to a multiple of 64 bytes
    footer     JSON: {"kind", "values", "arrays": [[name, dtype, shape, crc32 of the padded bytes], ...]}
    tail       28 bytes: offset (uint64) and length (uint64) of the footer, crc32 (uint32) of header, footer and these
               two, b"das end\\n"

Numbers are little-endian. Every byte is covered by a checksum. Nothing is ever unpickled. A reader knows arrays by name
and ignores others, so a new array needs no new version; the version rises where an old reader would go wrong.
"""

from __future__ import annotations

import io
import json
import math
import mmap
import os
import re
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TypeVar

import numpy as np
import numpy.typing as npt

from das.file_errors import naming_file

Array = npt.NDArray[Any]

FORMAT_VERSION = 1
_ALIGNMENT = 64
_MAGIC, _END = b"das file", b"das end\n"
_HEADER = struct.Struct("<8sI")
_PLACE = struct.Struct("<QQ")
_TAIL = struct.Struct("<QQI8s")
_DTYPE = re.compile(r"[<|][biuf][1248]")
_MAX_FOOTER_BYTES = 256 << 20
_CHUNK_BYTES = 1 << 20
_T = TypeVar("_T")


class StateError(ValueError):
    """A saved state that is damaged, newer than this das, in use by another writer, or lacks what was asked for.

    Attributes: `path`, of the file or directory. The message begins with it.
    """

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(f"{path}: {problem}")
        self.path = str(path)


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """Tells a file apart from all others: its size, and the checksum of its footer, which holds those of its arrays."""

    num_bytes: int
    checksum: int


def write_checked_file(
    path: Path, *, kind: str, values: Mapping[str, Any], arrays: Mapping[str, Array | Sequence[Array]]
) -> FileIdentity:
    """Write a file that is there in full, and lasts, once this returns; until then there is the one before, if any.

    Written under another name, synced to the device, renamed, and the directory synced.

    Args:
        kind: what a reader has to ask for.
        values: what JSON can hold.
        arrays: of bool, int or float; a sequence of one-dimensional ones of one dtype is written as one array.

    Raises:
        OSError: as the system says; the file before is there then, or (if only the directory could not be synced) the
        new one.
    """
    return _replace(path, lambda file: _write(file, kind, values, arrays))


def _replace(path: Path, write: Callable[[BinaryIO], _T]) -> _T:
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        with naming_file(temporary), open(temporary, "wb", buffering=_CHUNK_BYTES) as file:
            written = write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)
    return written


def checked_bytes(*, kind: str, values: Mapping[str, Any], arrays: Mapping[str, Array | Sequence[Array]]) -> bytes:
    """Return what `write_checked_file` would write."""
    file = io.BytesIO()
    _write(file, kind, values, arrays)
    return file.getvalue()


def write_checked_bytes(path: Path, data: bytes) -> None:
    """Write what `checked_bytes` returned, as `write_checked_file` does. Raises OSError."""
    _replace(path, lambda file: file.write(data))


def sync_directory(path: Path) -> None:
    """Make lasting which names a directory holds."""
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with naming_file(path):
            os.fsync(directory)
    finally:
        os.close(directory)


def _write(
    file: BinaryIO, kind: str, values: Mapping[str, Any], arrays: Mapping[str, Array | Sequence[Array]]
) -> FileIdentity:
    header = _HEADER.pack(_MAGIC, FORMAT_VERSION).ljust(_ALIGNMENT, b"\0")
    file.write(header)
    described = []
    for name, array in arrays.items():
        pieces = [array] if isinstance(array, np.ndarray) else array
        dtype = pieces[0].dtype.newbyteorder("<") if len(pieces) else np.dtype("<i4")
        num_items = checksum = 0
        for piece in pieces:
            data = np.ascontiguousarray(piece, dtype).reshape(-1).view(np.uint8).data
            num_items += piece.size
            checksum = zlib.crc32(data, checksum)
            file.write(data)
        padding = bytes(-num_items * dtype.itemsize % _ALIGNMENT)
        file.write(padding)
        shape = list(array.shape) if isinstance(array, np.ndarray) else [num_items]
        described.append([name, dtype.str, shape, zlib.crc32(padding, checksum)])
    footer = json.dumps({"kind": kind, "values": values, "arrays": described}, separators=(",", ":")).encode()
    place = _PLACE.pack(file.tell(), len(footer))
    checksum = zlib.crc32(header + footer + place)
    file.write(footer + _TAIL.pack(*_PLACE.unpack(place), checksum, _END))
    return FileIdentity(file.tell(), checksum)


class CheckedFile:
    """A file that `write_checked_file` has written, open for reading. Use it in a `with` statement.

    Args:
        path: of the file.
        kind: which it must be.
        data: what `checked_bytes` returned, to be read instead; `path` says in errors what it is.

    Attributes:
        values: as they were written.
        identity: the file's.

    Raises:
        OSError: it cannot be read. StateError: it is damaged, of another kind, or of a newer version.
    """

    def __init__(self, path: Path, *, kind: str, data: bytes | None = None) -> None:
        self.path = path
        self._data = data
        self._file = open(path, "rb", buffering=0) if data is None else io.BytesIO()  # noqa: SIM115  closed below
        try:
            self._read_footer(kind)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> CheckedFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __contains__(self, name: str) -> bool:
        return name in self._arrays

    def array(self, name: str, dtype: str) -> Array:
        """Return an array, checked, in memory.

        Raises:
            StateError: it is not there, damaged, or of another dtype.
        """
        placed = self._placed(name, dtype)
        data = self._read_at(placed.offset, placed.num_padded_bytes)
        if zlib.crc32(data) != placed.checksum:
            self._damaged(name)
        array: Array = np.frombuffer(data[: placed.num_bytes], dtype).reshape(placed.shape)
        return array

    def any_array(self, name: str) -> Array:
        """Return an array of whatever dtype, checked, in memory; raises as `array`."""
        if name not in self._arrays:
            self.fail(f"it has no array {name!r}")
        return self.array(name, self._arrays[name].dtype)

    def map(self, name: str, dtype: str, look: Callable[[Array], None]) -> Array:
        """Return a one-dimensional array, checked, that stays on disk until it is used.

        Args:
            look: called with all of it, piece by piece, in order.

        Raises:
            as `array`. Whoever cuts the file short later ends the process that reads the array (SIGBUS).
        """
        placed = self._seen(name, dtype, look)
        if placed.num_bytes == 0:
            return np.zeros(0, dtype)
        if self._data is not None:
            return np.frombuffer(self._data, dtype, count=placed.shape[0], offset=placed.offset)
        view = mmap.mmap(self._file.fileno(), placed.offset + placed.num_bytes, access=mmap.ACCESS_READ)
        array: Array = np.frombuffer(view, dtype, count=placed.shape[0], offset=placed.offset)
        return array

    def stored(self, name: str, dtype: str, look: Callable[[Array], None]) -> StoredArray:
        """Return a one-dimensional array, checked, whose parts are read from disk where they are asked for.

        Args, Raises: as `map`; but a file that is cut short later is an error.
        """
        placed = self._seen(name, dtype, look)
        return StoredArray(self.path, os.dup(self._file.fileno()), np.dtype(dtype), placed.offset, placed.shape[0])

    def _seen(self, name: str, dtype: str, look: Callable[[Array], None]) -> _Placed:
        placed = self._placed(name, dtype)
        checksum, num_seen = 0, 0
        while num_seen < placed.num_padded_bytes:
            chunk = self._read_at(placed.offset + num_seen, min(_CHUNK_BYTES, placed.num_padded_bytes - num_seen))
            checksum = zlib.crc32(chunk, checksum)
            look(np.frombuffer(chunk[: placed.num_bytes - num_seen], dtype))
            num_seen += len(chunk)
        if checksum != placed.checksum:
            self._damaged(name)
        return placed

    def fail(self, problem: str) -> NoReturn:
        """Raise a StateError of this file."""
        raise StateError(self.path, problem)

    def _read_footer(self, kind: str) -> None:
        size = os.fstat(self._file.fileno()).st_size if self._data is None else len(self._data)
        header = self._read_at(0, min(_ALIGNMENT, size))
        if len(header) < _ALIGNMENT or not header.startswith(_MAGIC):
            self.fail("it is no file of das, or it is cut short")
        version = _HEADER.unpack_from(header)[1]
        if version > FORMAT_VERSION:
            self.fail(f"it is of format {version}; this das reads formats up to {FORMAT_VERSION}: a newer das wrote it")
        if size < _ALIGNMENT + _TAIL.size:
            self.fail("it is cut short")
        tail = self._read_at(size - _TAIL.size, _TAIL.size)
        offset, length, checksum, end = _TAIL.unpack(tail)
        if end != _END or offset % _ALIGNMENT or offset + length + _TAIL.size != size or length > _MAX_FOOTER_BYTES:
            self.fail("it is cut short, or its end is damaged")
        footer = self._read_at(offset, length)
        if zlib.crc32(header + footer + tail[: _PLACE.size]) != checksum:
            self.fail("its header or footer is damaged: the checksum differs")
        self.identity = FileIdentity(size, checksum)
        try:
            self._read_description(json.loads(footer), offset, kind)
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            if isinstance(error, StateError):
                raise
            raise StateError(self.path, f"its footer makes no sense: {error}") from error

    def _read_description(self, footer: Any, num_bytes: int, kind: str) -> None:
        if footer["kind"] != kind:
            self.fail(f"it is of kind {footer['kind']!r}; expected {kind!r}")
        self.values: Any = footer["values"]
        self._arrays: dict[str, _Placed] = {}
        offset = _ALIGNMENT
        for name, dtype, shape, checksum in footer["arrays"]:
            if not (isinstance(name, str) and isinstance(dtype, str) and _DTYPE.fullmatch(dtype)):
                raise ValueError(f"array {name!r} of {dtype!r}")
            if len(shape) > 2 or not all(type(length) is int and 0 <= length < 1 << 48 for length in shape):
                raise ValueError(f"shape {shape!r}")
            if name in self._arrays:
                raise ValueError(f"two arrays {name!r}")
            placed = self._arrays[name] = _Placed(dtype, tuple(shape), offset, checksum)
            offset += placed.num_padded_bytes
        if offset != num_bytes:
            raise ValueError(f"arrays of {offset - _ALIGNMENT} bytes in {num_bytes - _ALIGNMENT}")

    def _placed(self, name: str, dtype: str) -> _Placed:
        placed = self._arrays.get(name)
        if placed is None:
            self.fail(f"it has no array {name!r}")
        if placed.dtype != dtype:
            self.fail(f"its array {name!r} is of {placed.dtype}; expected {dtype}")
        return placed

    def _damaged(self, name: str) -> NoReturn:
        self.fail(f"its array {name!r} is damaged: the checksum differs")

    def _read_at(self, offset: int, length: int) -> bytes:
        if self._data is not None:
            return self._data[offset : offset + length]
        return _read(self.path, self._file.fileno(), offset, length)


def _read(path: Path, descriptor: int, offset: int, length: int) -> bytes:
    pieces = []
    while length > 0:
        piece = os.pread(descriptor, length, offset)
        if not piece:
            raise StateError(path, "it became shorter while it was read")
        pieces.append(piece)
        offset, length = offset + len(piece), length - len(piece)
    return b"".join(pieces)


class StoredArray:
    """A one-dimensional array in a file, of which parts are read; see CheckedFile.stored.

    Args:
        descriptor: of the open file, closed with this object.
    """

    def __init__(self, path: Path, descriptor: int, dtype: np.dtype[Any], offset: int, num_items: int) -> None:
        self._path, self._descriptor = path, descriptor
        self._dtype, self._offset, self._num_items = dtype, offset, num_items

    def __len__(self) -> int:
        return self._num_items

    def __del__(self) -> None:
        os.close(self._descriptor)

    def part(self, start: int, length: int) -> Array:
        """Return these items, in memory, not writeable; those within the array.

        Raises:
            OSError: it cannot be read. StateError: the file was cut short.
        """
        size = self._dtype.itemsize
        data = _read(self._path, self._descriptor, self._offset + start * size, length * size)
        array: Array = np.frombuffer(data, self._dtype).copy()
        array.flags.writeable = False
        return array


@dataclass(frozen=True, slots=True)
class _Placed:
    """Where an array lies."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    checksum: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    @property
    def num_padded_bytes(self) -> int:
        return self.num_bytes + -self.num_bytes % _ALIGNMENT
