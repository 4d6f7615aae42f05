"""What is shipped: an sdist that builds, and a wheel that holds what runs and nothing else."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from command_runs import REPOSITORY

pytestmark = pytest.mark.packaging

NOT_SOURCES = (".*", "*.so", "*.c", "*.egg-info", "__pycache__", "build", "dist", "bench")


@dataclass(frozen=True)
class Built:
    sdist: Path
    wheel: Path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Build an sdist from a copy of the sources, and the wheel from the sdist."""
    for name in ("setuptools", "Cython"):
        pytest.importorskip(name, reason="building without isolation needs the dev extra")
    source, out = tmp_path_factory.mktemp("packaging") / "source", tmp_path_factory.mktemp("out")
    shutil.copytree(REPOSITORY, source, ignore=shutil.ignore_patterns(*NOT_SOURCES))
    hook = f"import setuptools.build_meta as backend; backend.build_sdist({str(out)!r})"
    run([sys.executable, "-c", hook], cwd=source)
    (sdist,) = out.glob("*.tar.gz")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--wheel-dir", str(out)]
    run([*pip, "--no-deps", "--no-build-isolation", "--check-build-dependencies", str(sdist)], cwd=out)
    (wheel,) = out.glob("*.whl")
    return Built(sdist, wheel)


def run(command: list[str], **options: object) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def sources(pattern: str) -> set[str]:
    return {str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "das").rglob(pattern)}


def adapters() -> set[str]:
    """The files of integrations/, as a wheel names them."""
    folder = REPOSITORY / "integrations"
    return {str(path.relative_to(folder)) for name in ("*.py", "py.typed") for path in folder.rglob(name)}


def test_sdist_holds_the_sources_and_nothing_generated(built: Built) -> None:
    with tarfile.open(built.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {f"integrations/{name}" for name in adapters()} <= names
    assert sources("*.py") | sources("*.pyx") | sources("*.pxd") | sources("*.pyi") | {"das/py.typed"} <= names
    assert sources("*.css") | sources("*.js") | sources("*-LICENSE.txt") <= names
    assert {
        "pyproject.toml",
        "LICENSE",
        "README.md",
        "Makefile",
        "tests/conftest.py",
        "examples/NOTICE.md",
        "das_command.py",
    } <= names
    assert [name for name in names if name.endswith((".so", ".c"))] == []


def test_wheel_holds_what_runs_and_nothing_else(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as archive:
        names = set(archive.namelist())
        (entry_points,) = (archive.read(name).decode() for name in names if name.endswith("/entry_points.txt"))
        (metadata,) = (archive.read(name).decode() for name in names if name.endswith("/METADATA"))
    shipped = {name for name in names if ".dist-info/" not in name}
    native = {name for name in shipped if name.endswith(".so")}
    assert {name.partition(".")[0] for name in native} == {name.partition(".")[0] for name in sources("*.pyx")}
    assets = sources("*.css") | sources("*.js") | sources("*-LICENSE.txt")
    code = sources("*.py") | sources("*.pyi") | adapters() | {"das_command.py"}
    assert shipped - native == code | assets | {"das/py.typed"}
    assert entry_points.strip().split("\n\n") == [
        "[console_scripts]\ndas = das_command:main",
        "[sglang.srt.plugins]\ndas = das_sglang.plugin:register",
        "[vllm.general_plugins]\ndas = das_vllm.plugin:register",
    ]
    assert "\nLicense-Expression: Apache-2.0 AND MIT\n" in metadata
    assert {"LICENSE", "plotly-LICENSE.txt"} == {Path(name).name for name in names if "/licenses/" in name}


def test_wheel_works_without_the_source_tree(built: Built, tmp_path: Path) -> None:
    with zipfile.ZipFile(built.wheel) as archive:
        archive.extractall(tmp_path)
    code = "import das, das.cli; print(das.__file__); raise SystemExit(das.cli.main(['--help']))"
    shown = run([sys.executable, "-c", code], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path)})
    assert shown.startswith(str(tmp_path / "das" / "__init__.py"))
    assert "replay" in shown
