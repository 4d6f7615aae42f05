"""The types of options and arguments that several commands take, within the bounds of what they are passed on to."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click


class FilePath(click.Path):
    """A file or directory that need not exist; click's own type looks it up, which a NUL in its name ends.

    Args:
        dir_okay: a directory may be named.
    """

    def __init__(self, *, dir_okay: bool = True) -> None:
        super().__init__(path_type=Path, dir_okay=dir_okay)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not os.fspath(value):
            self.fail("an empty text is no file name.", param, ctx)
        if "\0" in os.fspath(value):
            self.fail(f"{str(value)!r} holds a NUL character, which no file name can.", param, ctx)
        return super().convert(value, param, ctx)


class Count(click.IntRange):
    """An int, `least` <= count < `below`; of the bounds, the help shows the lower one."""

    def __init__(self, *, least: int, below: int = 1 << 62) -> None:
        super().__init__(min=least)
        self._below = below

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        count = super().convert(value, param, ctx)
        if count >= self._below:
            self.fail(f"{count} is not less than 2**{self._below.bit_length() - 1}.", param, ctx)
        return count


class Time(click.FloatRange):
    """A number, 0 <= time <= `most`; not nan, which click's own ranges let through."""

    def __init__(self, *, most: float) -> None:
        super().__init__(min=0)
        self._most = most

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        time = super().convert(value, param, ctx)
        if not time <= self._most:
            self.fail(f"{time} is not a number up to {self._most:g}.", param, ctx)
        return time
