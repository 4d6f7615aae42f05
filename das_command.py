"""Where the `das` command starts: outside the package, because Ctrl-C may come while that is imported."""

from __future__ import annotations

import os
import signal


def main() -> int:
    """Run the `das` command with the arguments of this process, and return the exit code; see `das.cli.main`.

    Ctrl-C ends it with one line on stderr and code 130 at any time: while modules are loaded, where a KeyboardInterrupt
    would end in a traceback, and after the results are out.
    """
    is_ignored = signal.getsignal(signal.SIGINT) is not signal.default_int_handler  # by a shell, in the background
    if not is_ignored:
        signal.signal(signal.SIGINT, _stop)
    from das import cli

    cli.load()
    try:
        if not is_ignored:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return cli.main()
    except KeyboardInterrupt:  # just before or behind where `cli.main` looks for it
        _stop()
        raise
    finally:
        if not is_ignored:
            signal.signal(signal.SIGINT, _stop)


def _stop(*_: object) -> None:
    """End the process here and now: nothing is half done that would have to be tidied up."""
    try:
        os.write(2, b"das: stopped by Ctrl-C\n")
    finally:
        os._exit(130)
