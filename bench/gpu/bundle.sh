#!/usr/bin/env bash
# Collects what the benchmarks of run.sh need on a GPU machine without network, into bench/gpu/bundle: wheels of mt, of
# all packages but torch, triton and numpy that it imports there, and the tests.
# bench/gpu/bundle.sh [PYTHON]      PYTHON: version of the GPU machine's interpreter; default 3.12
set -euo pipefail
cd "$(dirname "$0")/../.."
python="${1:-3.12}"
bundle=bench/gpu/bundle
ours=(core models data ckpt moe tools infer tune cli)
needed=(pydantic orjson backports.zstd lazy-loader pluggy typer rich jinja2 safetensors xxhash)
testing=(pytest pytest-timeout pytest-xdist hypothesis)

rm -rf "$bundle"
mkdir -p "$bundle/wheels" "$bundle/tests"
for name in "${ours[@]}"; do
    uv build --quiet --wheel --package "mt-$name" --out-dir "$bundle/wheels"
done
printf '%s\n' "${needed[@]}" "${testing[@]}" |
    uv pip compile --quiet --no-header --no-annotate --python-version "$python" --output-file "$bundle/wheels.txt" - >/dev/null
uvx --quiet pip download --quiet --no-deps --only-binary=:all: --python-version "$python" --implementation cp \
    --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
    --requirement "$bundle/wheels.txt" --dest "$bundle/wheels"
rm -f "$bundle/wheels/.gitignore"
cp pyproject.toml bench/{decode,rollouts}.py bench/peer_steps/{cases,plain_torch,plain_on_gpu}.py "$bundle"
mkdir "$bundle/tests/ckpt"
cp tests/ckpt/convert_cases.py "$bundle/tests/ckpt"
cp -r tests/conftest.py tests/costs.py tests/covering.py tests/core tests/gpu tests/moe "$bundle/tests"
find "$bundle" -name __pycache__ -prune -exec rm -rf {} +
du -sh "$bundle"
