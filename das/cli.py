"""The `das` command: what ends a command, and how; it starts in `das_command`, the commands are in `das.commands`."""

from __future__ import annotations

import contextlib
import importlib
import sys
import warnings
from collections.abc import Sequence
from typing import TextIO

_ERROR, _USAGE, _INTERRUPTED = 1, 2, 130


def main(args: Sequence[str] | None = None) -> int:
    """Run the `das` command.

    Args:
        args: the arguments after the command's name; None: those of this process.

    Returns:
        the exit code: 0; 1 for an error; 2 for wrong usage or a missing extra; 130 after Ctrl-C; 1 without a word where
        the reader of stdout has gone (`das replay ... | head -1`).

    Raises:
        only what is a defect of das; an error a user can cause is one line on stderr.
    """
    try:
        return _run(args)
    except KeyboardInterrupt:
        return _interrupted()


def load() -> None:
    """Import what the commands need, as far as it is there; what is missing, `main` says. Never raises ImportError."""
    with contextlib.suppress(ImportError):
        importlib.import_module("das.commands")


def _run(args: Sequence[str] | None) -> int:
    if sys.stdout is None:
        return _fail("stdout is closed, so there is nowhere to print to", _ERROR)
    from das.analysis.extra import lacking
    from das.file_errors import naming_file

    try:
        import click

        from das.analysis.logs import LogError
        from das.checked_file import StateError
        from das.commands import das
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("click", "rich"):
            raise
        return _fail(lacking(package, needed_for="the das command"), _USAGE)
    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = _show_warning
        try:
            with naming_file("stdout"):  # what reads and writes files names them itself
                code = das.main(args=args, prog_name="das", standalone_mode=False)
        except click.UsageError as error:
            command = error.ctx.command_path if error.ctx is not None else "das"
            return _fail(f"{error.format_message()} Try '{command} --help'.", _USAGE)
        except click.Abort:
            return _interrupted()
        except ImportError as error:
            return _fail(str(error), _USAGE)
        except (LogError, StateError) as error:
            return _fail(str(error), _ERROR)
        except OSError as error:
            named = error.filename is not None and error.strerror
            return _fail(f"{error.filename}: {error.strerror}" if named else str(error), _ERROR)
        except SystemExit as ended:  # how click and rich say that nobody reads stdout any more
            code = ended.code
    return code if isinstance(code, int) else 0


def _interrupted() -> int:
    _say("stopped by Ctrl-C")
    return _INTERRUPTED


def _fail(message: str, code: int) -> int:
    _say(f"error: {message}")
    return code


def _say(message: str) -> None:
    """Print one line on stderr, whatever characters file names and log rows put into it."""
    if sys.stderr is None:  # closed; print() would take stdout instead
        return
    line = "".join(character if character.isprintable() else repr(character)[1:-1] for character in message)
    print(f"das: {line}", file=sys.stderr)


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    _say(f"warning: {message}")
