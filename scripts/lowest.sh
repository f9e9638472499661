#!/usr/bin/env bash
# Smoke tests with the lowest versions that the distributions allow, in an environment of their own.
# scripts/lowest.sh [FOLDER]      FOLDER: of the environment, kept for the next time; default .venv-lowest
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/smoke_tests.sh
folder="$(realpath -m "${1:-.venv-lowest}")"

[ -x "$folder/bin/python" ] || uv venv --quiet --python 3.11 "$folder"
VIRTUAL_ENV="$folder" uv pip install --quiet --resolution lowest-direct --group dev
smoke_tests "$folder/bin/python"
