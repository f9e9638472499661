#!/usr/bin/env bash
# Smoke tests with another release of torch and the newest of everything else, in an environment of their own.
# scripts/with_torch.sh 2.11 [FOLDER] [PYTHON]      FOLDER: kept for the next time; default .venv-torch-2.11
# PYTHON: default 3.12, which images with that torch have
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/smoke_tests.sh
release="${1:?the release of torch, such as 2.11}"
folder="$(realpath -m "${2:-.venv-torch-$release}")"
# The interpreter of triton 3.6, which comes with torch 2.11, fails with numpy 2.4 and later.
numpy="$([ "$release" = 2.11 ] && echo "numpy<2.4" || echo numpy)"

[ -x "$folder/bin/python" ] || uv venv --quiet --python "${3:-3.12}" "$folder"
VIRTUAL_ENV="$folder" uv pip install --quiet --group dev "torch==$release.*" "$numpy"
smoke_tests "$folder/bin/python"
