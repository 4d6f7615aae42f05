"""Break das on purpose, one line at a time, and demand that the tests notice.

python tests/mutations/run.py [--sample K/N] [NAME ...]

Each mutation is applied to a copy of the sources, the native modules that it touches are compiled anew, and the tests
of that file run until the first failure. A test that fails, crashes or never ends kills the mutation; one that
survives shows what the tests do not look at. Exits 1 if any survives or does not fit the sources any more.
"""

import argparse
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mutation import Mutation
from mutations import MUTATIONS
from targets import TESTS

ROOT = Path(__file__).parents[2]
BUILD = ROOT / ".ci" / "build_native.py"
TIMEOUT_S = 300  # all tests of a mutation; short_tests.py limits each
MEMORY_BYTES = 8 << 30  # a mutation may ask for memory without end
TESTS_FAILED = 1  # pytest's exit status; 2 and more: it could not run them


class Unfit(Exception):
    """The mutation or its tests cannot be run: neither killed nor survived."""


def touched_modules(sources: Path, file: str) -> list[str]:
    """The native modules to compile when a file under das/ changes: itself, and whoever includes a .pxd."""
    path = sources / file
    if path.suffix == ".py":
        return []
    if path.suffix == ".pyx":
        return [f"das.{path.stem}"]
    touched = {path.stem}
    while True:
        includes = re.compile(rf"^from das\.({'|'.join(touched)}) cimport", re.MULTILINE)
        more = {other.stem for other in (sources / "das").glob("*.p[yx][xd]") if includes.search(other.read_text())}
        if more <= touched:
            return sorted(f"das.{name}" for name in touched if (sources / f"das/{name}.pyx").exists())
        touched |= more


def run(command: list[str], folder: Path) -> tuple[int | None, str]:
    """Return the exit status (None: it ran out of time) and what was printed. Nothing it started lives on."""
    paths = f"{folder}{os.pathsep}{folder / 'tests' / 'mutations'}"
    end_s = time.monotonic() + TIMEOUT_S
    with tempfile.TemporaryFile() as printed:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=os.environ | {"PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1", "DAS_TEST_PROFILE": "dev"},
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES)),
        )
        # WNOWAIT leaves the ended process a zombie, so that its process group cannot be anybody else's yet
        ended = os.WEXITED | os.WNOHANG | os.WNOWAIT
        while (in_time := time.monotonic() < end_s) and os.waitid(os.P_PID, process.pid, ended) is None:
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
        status = process.wait()
        printed.seek(0)
        return status if in_time else None, printed.read().decode(errors="replace")


def build(folder: Path, modules: list[str]) -> None:
    status, output = run([sys.executable, str(BUILD), "--flags=-O0", *modules], folder)
    if status != 0:
        raise Unfit(f"does not compile\n{output[-3000:]}")


def run_tests(folder: Path, tests: tuple[str, ...]) -> tuple[int | None, str]:
    options = [
        "-x",
        "-q",
        "--no-header",
        "--tb=no",
        "-p",
        "no:cacheprovider",
        "-p",
        "short_tests",
        "-m",
        "not slow and not timed",
    ]
    return run([sys.executable, "-m", "pytest", *options, *(f"tests/{name}" for name in tests)], folder)


def apply(mutation: Mutation, folder: Path) -> None:
    path = folder / mutation.file
    text = path.read_text()
    if text.count(mutation.old) != 1:
        raise Unfit(f"occurs {text.count(mutation.old)} times in {mutation.file}, not once: {mutation.old!r}")
    path.write_text(text.replace(mutation.old, mutation.new))


def killer(mutation: Mutation, pristine: Path, folder: Path) -> str | None:
    """Return what killed the mutation, or None if it survived."""
    shutil.copytree(pristine, folder)
    try:
        apply(mutation, folder)
        modules = touched_modules(folder, mutation.file)
        if modules:
            build(folder, modules)
        status, output = run_tests(folder, TESTS[mutation.file])
    finally:
        shutil.rmtree(folder)
    if status is None:
        return f"no end within {TIMEOUT_S} s"
    if status < 0:
        return "a test that never ends" if -status == signal.SIGALRM else f"signal {-status}"
    if status == TESTS_FAILED:
        failed = re.search(r"^(?:FAILED|ERROR) tests/(\S+)", output, re.MULTILINE)
        return failed[1] if failed else "a test"
    if status == 0:
        return None
    raise Unfit(f"pytest ended with {status}\n{output[-3000:]}")


def prepare(mutations: list[Mutation], folder: Path) -> None:
    """Copy and compile the sources as they are, and make sure that they pass the tests that mutations shall fail."""
    unwanted = shutil.ignore_patterns("*.so", "*.c", "__pycache__")
    for name in ("das", "tests", "examples"):
        shutil.copytree(ROOT / name, folder / name, ignore=unwanted)
    shutil.copy(ROOT / "pyproject.toml", folder)
    build(folder, [])
    shutil.rmtree(folder / "build")
    where = "import das._draft as module; print(module.__file__)"
    _, output = run([sys.executable, "-c", where], folder)
    if not output.startswith(str(folder)):
        raise Unfit(f"the tests would import another das than the copy: {output}")
    groups = dict.fromkeys(TESTS[mutation.file] for mutation in mutations)
    files = tuple(dict.fromkeys(name for group in groups for name in group))
    status, output = run_tests(folder, files)
    if status != 0:
        raise Unfit(f"the tests fail without any mutation\n{output[-3000:]}")


def chosen(arguments: argparse.Namespace) -> list[Mutation]:
    if arguments.names:
        unknown = set(arguments.names) - {mutation.name for mutation in MUTATIONS}
        if unknown:
            raise Unfit(f"no mutation is named {', '.join(sorted(unknown))}")
        return [mutation for mutation in MUTATIONS if mutation.name in arguments.names]
    part, parts = arguments.sample
    return MUTATIONS[part - 1 :: parts]


def fraction(text: str) -> tuple[int, int]:
    part, parts = (int(number) for number in text.split("/"))
    if not 1 <= part <= parts:
        raise ValueError
    return part, parts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=fraction, default=(1, 1), metavar="K/N", help="every N-th, from the K-th on")
    parser.add_argument("names", nargs="*", metavar="NAME")
    counts = {"killed": 0, "survived": 0, "unfit": 0}
    with tempfile.TemporaryDirectory(prefix="das_mutations_") as name:
        mutations = chosen(parser.parse_args())
        print(f"{len(mutations)} of {len(MUTATIONS)} mutations: {' '.join(mutation.name for mutation in mutations)}")
        pristine = Path(name, "pristine")
        prepare(mutations, pristine)

        def attempt(mutation: Mutation) -> None:
            start_s = time.monotonic()
            try:
                by = killer(mutation, pristine, Path(name, mutation.name))
                outcome, detail = ("killed", f"by {by}") if by else ("survived", f"in {mutation.file}: {mutation.why}")
            except Unfit as error:
                outcome, detail = "unfit", str(error)
            counts[outcome] += 1
            print(f"{outcome:8} {time.monotonic() - start_s:5.1f} s  {mutation.name}: {detail}", flush=True)

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(attempt, mutations))
    print(f"{counts['killed']} passed, {counts['survived'] + counts['unfit']} failed")
    return int(counts["killed"] != len(mutations))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Unfit as error:
        sys.exit(f"mutations: {error}")
