"""Errors of files that say which file it was."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def naming_file(name: str | os.PathLike[str]) -> Iterator[None]:
    """Give the system's errors within the block the name of a file, where they have none.

    Opening a file says its name; reading, writing and syncing do not: a full disk would be "No space left on device".

    Args:
        name: of the file that the block reads or writes.

    Raises:
        OSError: as the block raised it.
    """
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = os.fspath(name)
        raise
