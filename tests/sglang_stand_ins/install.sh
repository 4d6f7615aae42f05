#!/bin/sh
# An environment in which SGLang's engine runs on a CPU:  sh install.sh FOLDER   (6 minutes, 3 GB)
# Pinned, as engine tests compare with one version. Dependencies are listed because SGLang's own pin a CUDA build of torch.
set -eu

folder=$1
[ -x "$folder/bin/python" ] || "${PYTHON:-python3}" -m venv "$folder"
pip="$folder/bin/python -m pip install --quiet"
$pip torch==2.13.0 "setuptools>=77" "pytest>=8" "hypothesis>=6.100" "rich>=13"
$pip transformers==5.19.0 tokenizers==0.23.2 numpy msgspec orjson pyzmq psutil fastapi uvicorn uvloop aiohttp requests \
    pydantic packaging pillow tqdm prometheus-client setproctitle python-multipart interegular einops xxhash regex tiktoken \
    sentencepiece==0.2.1 partial_json_parser IPython openai==2.8.0 openai-harmony==0.0.4 pybase64 watchfiles zstandard \
    distro easydict scipy dill loguru pandas jsonschema 2>/dev/null
$pip --no-deps sglang==0.5.23 triton apache-tvm-ffi==0.1.11 ninja xgrammar==0.2.7 compressed-tensors==0.18.0 llguidance \
    torch_memory_saver gguf soundfile cffi pycparser
