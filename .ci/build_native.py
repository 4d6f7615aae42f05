"""Compile native modules of das in place, in the current folder, with other flags than they are shipped with.

python .ci/build_native.py [--flags="-O0 -g"] [das._tree ...]   all modules of pyproject.toml, unless some are named
"""

import argparse
import os
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Distribution, Extension


def compile_module(extension: Extension) -> None:
    command = Distribution({"ext_modules": [extension]}).get_command_obj("build_ext")
    command.inplace = command.force = True
    command.build_temp = os.path.join("build", extension.name)
    command.ensure_finalized()
    command.run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flags", default="-O0", help="for the compiler and the linker")
    parser.add_argument("modules", nargs="*", help="names as in pyproject.toml")
    arguments = parser.parse_args()
    declared = tomllib.loads(Path("pyproject.toml").read_text())["tool"]["setuptools"]["ext-modules"]
    flags = arguments.flags.split()
    extensions = [
        Extension(module["name"], module["sources"], extra_compile_args=flags, extra_link_args=flags)
        for module in declared
        if not arguments.modules or module["name"] in arguments.modules
    ]
    extensions = cythonize(extensions, force=True, quiet=True)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(compile_module, extensions))


if __name__ == "__main__":
    main()
