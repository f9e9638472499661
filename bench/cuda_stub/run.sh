#!/usr/bin/env bash
# Runs a command on H200s that are not there (cuda_stub.c).
# bench/cuda_stub/run.sh COMMAND...      CUDA_STUB_DEVICES: number of GPUs, default 1
# The stub is built on first use for the interpreter `python`, into MT_CUDA_STUB or a folder of the user's cache.
set -euo pipefail
here="$(dirname "$(realpath "$0")")"
version="$(python -c 'from importlib.metadata import version; print(version("torch"))')"
folder="${MT_CUDA_STUB:-${XDG_CACHE_HOME:-$HOME/.cache}/mt-cuda-stub/$version}"
[ "$folder/libcuda.so.1" -nt "$here/cuda_stub.c" ] && [ "$folder/libcuda.so.1" -nt "$here/build.py" ] || python "$here/build.py" "$folder" >&2
exec env LD_PRELOAD="$folder/libcuda.so.1" LD_LIBRARY_PATH="$folder${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" \
    TRITON_LIBCUDA_PATH="$folder" "$@"
