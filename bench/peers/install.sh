#!/bin/sh
# Makes a virtual environment with the benchmark's peers: sh bench/peers/install.sh VENV
# Needs Python >= 3.11, a C++20 compiler and the package index; no torch, no GPU. About a minute.
set -eu

arctic_version=0.3.0
sglang_version=0.5.23

venv=${1:?usage: sh bench/peers/install.sh VENV}
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
venv=$(cd "$venv" && pwd)
PATH=$venv/bin:$PATH
python -m pip install --quiet --requirement "$here/requirements.txt"

# ArcticInference's setup.py imports torch only to tell CMake where it is, and the suffix-decoding extension does not
# look. A stand-in module answers that import during the build; the package is built as shipped, and runs without torch.
mkdir "$work/stand-in"
printf 'class utils:\n    cmake_prefix_path = ""\n' > "$work/stand-in/torch.py"
PYTHONPATH=$work/stand-in python -m pip install --quiet --no-cache-dir --no-deps --no-build-isolation \
    --no-binary arctic-inference "arctic-inference==$arctic_version"

# SGLang ships its n-gram corpus as C++ sources inside the wheel: compile the trie with our small binding.
# No wheel for this Python or platform: the peer stays absent, and `python -m bench.peers` says so.
if python -m pip download --quiet --no-deps --only-binary :all: --dest "$work" "sglang==$sglang_version"; then
    python -m zipfile --extract "$work"/sglang-*.whl "$work/sglang"
    sources=$work/sglang/sglang/kernels/jit/csrc/ngram_corpus
    python_headers=$(python -c 'import sysconfig; print(sysconfig.get_path("include"))')
    suffix=$(python -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')
    site=$(python -c 'import sysconfig; print(sysconfig.get_path("platlib"))')
    nanobind=$(python -c 'import nanobind; print(nanobind.source_dir() + "/..")')
    ${CXX:-c++} -std=c++20 -O3 -DNDEBUG -fPIC -shared -fvisibility=hidden -fno-strict-aliasing \
        "-DSGLANG_VERSION=\"$sglang_version\"" "-I$sources" "-I$python_headers" "-I$nanobind/include" \
        "-I$nanobind/ext/robin_map/include" "$here/sglang_ngram.cc" "$sources/trie.cpp" "$sources/result.cpp" \
        "$nanobind/src/nb_combined.cpp" -o "$site/das_bench_sglang_ngram$suffix"
else
    echo "sglang_ngram stays absent: no wheel of sglang $sglang_version for this Python and platform" >&2
fi

cd "$here/../.." && python -m bench.peers
