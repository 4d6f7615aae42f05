"""Running the `das` command in a process of its own."""

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

COMMAND = [sys.executable, "-c", "import sys; from das_command import main; sys.exit(main())"]
REPOSITORY = Path(__file__).parent.parent


def start(*args: object, **options: object) -> subprocess.Popen[str]:
    """Start the command as a shell in the foreground would."""
    environment = {name: value for name, value in os.environ.items() if name not in ("FORCE_COLOR", "COLUMNS")}
    environment |= {"PYTHONPATH": str(REPOSITORY)}
    return subprocess.Popen(
        [*COMMAND, *map(str, args)],
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment} | options,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def all_shown(terminal: int) -> bytes:
    """Return what comes out of a terminal until nobody can write to it any more, and close it."""
    shown = b""
    try:
        while chunk := os.read(terminal, 4096):
            shown += chunk
    except OSError:  # how Linux ends a terminal without writers
        pass
    os.close(terminal)
    return shown


def run_with_stderr_on_terminal(*args: object) -> tuple[str, bytes]:
    """Run the command to its end; return stdout and what the terminal got."""
    terminal, stderr = pty.openpty()
    process = start(*args, stderr=stderr)
    os.close(stderr)
    shown = all_shown(terminal)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    return output, shown
