"""Samples in a dump that slime wrote with `torch.save`, read without torch and without unpickling anything.

Such a file is a zip archive, and its entry data.pkl a pickle of protocol 2 of `{"rollout_id": n, "samples": [{...}]}`
(`save_debug_rollout_data` in THUDM/slime, slime/observability/rollout_data_utils.py, 4c4adbbf). Unpickling runs what
the file says. `torch.load(weights_only=True)` does not, but it refuses the whole file for one class it does not know
(numpy scalars in rewards, slime's references to tensors on disk), and holds all of it in memory. What a rollout needs
is plain data. So the operations of the pickle are followed here, and those that would import or call something leave an
`Unread` in the place of their result: nothing is looked up, nothing is called, one sample is in memory.
"""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from das.analysis.containers.numbered_rows import MAX_ROW_BYTES, NumberedRows
from das.analysis.fields import BadRow, Row

_MAX_SAMPLE_VALUES = MAX_ROW_BYTES // 8  # four million tokens with logprobs; a value takes 8 bytes and more in memory
_MAX_SHARED_CHARACTERS = 64  # of texts that later samples may refer to: the names of fields, mostly
_MAX_NAME_BYTES = 1000


class Unread:
    """What stands where a pickle holds something that is no plain data."""

    __slots__ = ("what",)

    def __init__(self, what: str) -> None:
        self.what = what

    def __repr__(self) -> str:
        return f"<{self.what}, not plain data>"


_SHARED = Unread("a value shared with another sample")
_STORAGE = Unread("a tensor")


def torch_rows(file: Path, *, report: Callable[[int], None]) -> NumberedRows:
    """Yield number and fields of each sample; `report` gets the bytes read so far.

    The dump's `rollout_id` becomes the field training_step. What is no plain data is an `Unread`. Texts and containers
    that a sample shares with an earlier one are unread, too; slime's samples share the names of their fields only.

    Complexity: O(bytes) time, about .3 us a value; one sample in memory.
    """
    num_samples = 0
    with open(file, "rb") as raw:
        try:
            with zipfile.ZipFile(raw) as archive, archive.open(_pickle_entry(archive)) as entry:
                for sample in _PickledSamples(io.BufferedReader(entry, 1 << 20)).samples():  # type: ignore[arg-type]
                    num_samples += 1
                    yield num_samples, sample
                    report(raw.tell())
        except BadRow as bad:
            yield num_samples + 1, bad
        except (zipfile.BadZipFile, OSError, RuntimeError) as error:  # OSError, too, where an offset leads nowhere
            yield num_samples + 1, BadRow(f"not an archive that torch.save wrote, or a damaged one: {error}")
        except (struct.error, IndexError, TypeError, ValueError, EOFError) as error:
            yield num_samples + 1, BadRow(f"the pickle in the archive is damaged: {error}")


def _pickle_entry(archive: zipfile.ZipFile) -> zipfile.ZipInfo:
    entries = [entry for entry in archive.infolist() if entry.filename.endswith("/data.pkl")]
    if len(entries) != 1 or entries[0].compress_type != zipfile.ZIP_STORED:
        raise BadRow("not an archive that torch.save wrote: it must hold one data.pkl, not compressed")
    return entries[0]


class _PickledSamples:
    """A pickle whose operations are followed as far as they make plain data.

    As in a real unpickler there is a stack of values; a mark sets it aside and starts an empty one, until an operation
    takes all values behind the mark.
    """

    def __init__(self, stream: io.BufferedReader) -> None:
        self._stream = stream
        self._stack: list[Any] = []
        self._set_aside: list[list[Any]] = []
        self._memo: dict[int, Any] = {}
        self._memo_of_sample: list[int] = []
        self._num_values = 0  # since the last sample
        self._act: dict[bytes, Callable[[], None]] = {
            b"\x80": self._protocol,
            b"(": self._mark,
            b"N": lambda: self._stack.append(None),
            b"\x88": lambda: self._stack.append(True),
            b"\x89": lambda: self._stack.append(False),
            b"K": lambda: self._stack.append(self._read(1)[0]),
            b"M": lambda: self._stack.append(self._number("<H")),
            b"J": lambda: self._stack.append(self._number("<i")),
            b"G": lambda: self._stack.append(self._number(">d")),
            b"\x8a": lambda: self._stack.append(int.from_bytes(self._read(self._read(1)[0]), "little", signed=True)),
            b"X": lambda: self._stack.append(self._read(self._number("<I")).decode("utf-8", "surrogatepass")),
            b"]": lambda: self._stack.append([]),
            b"}": lambda: self._stack.append({}),
            b")": lambda: self._stack.append(()),
            b"\x85": lambda: self._tuple(1),
            b"\x86": lambda: self._tuple(2),
            b"\x87": lambda: self._tuple(3),
            b"t": self._tuple_behind_mark,
            b"a": lambda: self._extend([self._stack.pop()]),
            b"e": lambda: self._extend(self._behind_mark()),
            b"s": lambda: self._set_items([self._stack.pop(-2), self._stack.pop()]),
            b"u": lambda: self._set_items(self._behind_mark()),
            b"q": lambda: self._remember(self._read(1)[0]),
            b"r": lambda: self._remember(self._number("<I")),
            b"h": lambda: self._stack.append(self._memo.get(self._read(1)[0], _SHARED)),
            b"j": lambda: self._stack.append(self._memo.get(self._number("<I"), _SHARED)),
            b"c": self._name,
            b"Q": lambda: self._stack.__setitem__(-1, _STORAGE),
            b"R": self._call,
            b"\x81": self._call,
            b"b": lambda: self._stack.__delitem__(-1),  # the state of an object, which stays as it is
        }

    def samples(self) -> Iterator[Row]:
        """Yield the samples, each when its last field is there."""
        read, act, num_samples = self._stream.read, self._act, 0
        while (operation := read(1)) != b".":
            if not operation:
                raise EOFError("it ends in the middle")
            follow = act.get(operation)
            if follow is None:
                raise BadRow(f"the pickle holds operation {operation!r}, which protocol 2 of torch.save does not write")
            follow()
            self._count(1)
            if operation in b"us" and (sample := self._sample()) is not None:
                yield sample
                num_samples += 1
                self._forget()
        if num_samples == 0:
            raise BadRow("the archive holds no samples; slime's dumps are {rollout_id, samples: [{tokens, ...}]}")

    def _count(self, num_values: int) -> None:
        self._num_values += num_values
        if self._num_values > _MAX_SAMPLE_VALUES:
            raise BadRow(f"more than {_MAX_SAMPLE_VALUES} values belong to one sample; the file is not read further")

    def _read(self, num_bytes: int) -> bytes:
        self._count(num_bytes // 8)
        data = self._stream.read(num_bytes)
        if len(data) < num_bytes:
            raise EOFError("it ends in the middle")
        return data

    def _number(self, form: str) -> Any:
        return struct.unpack(form, self._read(struct.calcsize(form)))[0]

    def _protocol(self) -> None:
        protocol = self._read(1)[0]
        if protocol != 2:
            raise BadRow(f"the pickle has protocol {protocol}; torch.save writes 2")

    def _mark(self) -> None:
        self._set_aside.append(self._stack)
        self._stack = []

    def _behind_mark(self) -> list[Any]:
        values, self._stack = self._stack, self._set_aside.pop()
        return values

    def _tuple(self, length: int) -> None:
        self._stack[-length:] = [tuple(self._stack[-length:])]

    def _tuple_behind_mark(self) -> None:
        values = self._behind_mark()
        self._stack.append(tuple(values))

    def _extend(self, values: list[Any]) -> None:
        if type(self._stack[-1]) is list:
            self._stack[-1].extend(values)

    def _set_items(self, values: list[Any]) -> None:
        if type(self._stack[-1]) is dict:
            pairs = zip(values[::2], values[1::2], strict=True)
            self._stack[-1].update((key, value) for key, value in pairs if type(key) is str)

    def _remember(self, index: int) -> None:
        self._memo[index] = self._stack[-1]
        self._memo_of_sample.append(index)

    def _name(self) -> None:
        names = [self._stream.readline(_MAX_NAME_BYTES).decode().strip() for _ in range(2)]
        self._stack.append(Unread(".".join(names)))

    def _call(self) -> None:
        arguments, called = self._stack.pop(), self._stack[-1]
        del arguments
        self._stack[-1] = Unread(called.what if isinstance(called, Unread) else "an object")

    def _sample(self) -> Row | None:
        """The dictionary that is complete now, if it is one of the samples, with the number of its dump."""
        if len(self._set_aside) == 2:
            of_dump = self._set_aside[1]
        elif len(self._set_aside) == 1:  # the only sample, or the last one behind a thousand
            of_dump = self._stack[:-1]
        else:
            return None
        sample = self._stack[-1]
        if len(of_dump) < 2 or of_dump[-2] != "samples" or type(of_dump[-1]) is not list or type(sample) is not dict:
            return None
        named = dict(zip(map(str, of_dump[:-2:2]), of_dump[1:-2:2], strict=False))
        return sample | {"training_step": named.get("rollout_id")}

    def _forget(self) -> None:
        """Let go of the sample, but not of the short texts that later ones refer to."""
        self._stack[-1] = None
        for index in self._memo_of_sample:
            value = self._memo.get(index)
            if type(value) is not str or len(value) > _MAX_SHARED_CHARACTERS:
                self._memo.pop(index, None)
        self._memo_of_sample.clear()
        self._num_values = 0
