#!/usr/bin/env bash
# One of eight parts of the benchmarks on a GPU, from bench/gpu/bundle (see bundle.sh): without network, without uv, and
# in less than ten minutes. A command that fails or runs out of time is reported at the end; the others still run.
# bench/gpu/run.sh [--dry-run] PART [FOLDER]
# PART: 1 to 8. FOLDER: of part-PART.zip with all JSON files and logs; default bench/gpu/results, where they lie unpacked
# --dry-run: only print the commands with their limits in seconds
set -uo pipefail
dry_run=
[ "${1:-}" = --dry-run ] && dry_run=yes && shift
here="$(dirname "$(realpath "$0")")"
part="${1:?the part, 1 to 8}"
[[ "$part" == [1-8] ]] || { echo "bench/gpu/run.sh $part: the part is 1 to 8" >&2; exit 2; }
results="$here/results/part-$part"
archive="$(realpath -m "${2:-$here/results}")/part-$part.zip"
site="${TMPDIR:-/tmp}/mt-bench-site"
seconds_in_all=570
seconds_of_installation=20
seconds_of_limits=$seconds_of_installation
failed=()

prepare() {
    rm -rf "$results" "$site" "$archive"
    mkdir -p "$results" "$site" "$(dirname "$archive")"
    python3 -m pip install --quiet --no-index --no-deps --no-compile --upgrade --target "$site" \
        "$here"/bundle/wheels/*.whl || exit 2
    # Plugins of pytest that are installed on the machine are not what the tests are about.
    export PYTHONPATH="$site" PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 OMP_NUM_THREADS="${OMP_NUM_THREADS:-8}"
    cd "$here/bundle" || exit 2
}

# After each command, so that an interrupted part leaves what it has measured.
write_archive() {
    (cd "$results" && python3 -m zipfile -c "$archive" ./*)
}

# measure NAME SECONDS COMMAND...: its output into NAME.log. The limit is also what is left of all the time: those of a
# part, with the installation, fit into it.
measure() {
    local name="$1" limit="$2" left=$((seconds_in_all - SECONDS)) began=$SECONDS
    shift 2
    if [ "$dry_run" ]; then
        echo "$name, $limit s: $*"
        ((seconds_of_limits += limit))
        return
    fi
    if ((left < 5)); then
        failed+=("$name (no time left)")
        return
    fi
    # Interrupted and not terminated: pytest then reports the failures so far.
    timeout --signal=INT --kill-after=5 "$((limit < left ? limit : left))" "$@" >"$results/$name.log" 2>&1 ||
        failed+=("$name (exit status $?)")
    echo "== $name: $((SECONDS - began)) s"
    tail -n 40 "$results/$name.log"
    write_archive
}

mt() {
    local name="$1" limit="$2"
    shift 2
    measure "$name" "$limit" python3 -m mt_cli "$@"
}

bench() {
    local name="$1" limit="$2"
    shift 2
    mt "$name" "$limit" bench "$@" --out "$results/$name.json"
}

# The same model in plain torch, compiled.
plain() {
    measure "plain-$1" "$2" python3 plain_on_gpu.py --preset "$1" --out "$results/plain-$1.json"
}

decode() {
    local model="$1" limit="$2"
    shift 2
    measure "decode-$model" "$limit" python3 decode.py --model "$model" --batch 1 --batch 8 "$@" \
        --out "$results/decode-$model.json"
}

# gpu_tests NAME SECONDS PROCESSES FILES...: kernels are compiled on the CPU's cores, each test on one.
gpu_tests() {
    local name="$1" limit="$2" processes="$3"
    shift 3
    measure "$name" "$limit" python3 -m pytest -v -o addopts= -p no:cacheprovider -p pytest_timeout --timeout 90 \
        -p xdist.plugin --numprocesses "$processes" "$@"
}

compiled=(--set train.compile=blocks)
graphs=(--set train.cuda_graphs=blocks)
step_graph=(--set train.cuda_graphs=step)
if [ ! "$dry_run" ]; then
    prepare
    # A rehearsal on a CPU, which has no graphs and generates code for minutes.
    python3 -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' ||
        { compiled=() graphs=() step_graph=(); }
fi

# The first three parts are worth the most; each part stands by itself. Tests are last: they measure nothing.
case "$part" in
1)
    bench train-124m 60 train --preset 124m
    plain 124m 60
    bench train-1.2b 60 train --preset 1.2b
    plain 1.2b 80
    bench train-8b 110 train --preset 8b
    plain 8b 110
    mt doctor 20 doctor
    bench calibrate 50 calibrate
    ;;
2)
    bench train-124m-compile 110 train --preset 124m "${compiled[@]}" "${step_graph[@]}"
    bench train-1.2b-compile 120 train --preset 1.2b "${compiled[@]}"
    bench train-1.2b-fp8 120 train --preset 1.2b --precision fp8 "${compiled[@]}"
    bench train-8b-fp8 170 train --preset 8b --precision fp8 "${compiled[@]}"
    ;;
3)
    bench train-124m-step-graph 60 train --preset 124m "${step_graph[@]}"
    bench train-1.2b-graphs 70 train --preset 1.2b "${graphs[@]}"
    bench train-7b-a1b 120 train --preset 7b-a1b
    decode 8b 200 --weights plain --weights int8 --weights fp8 --weights int4
    bench train-124m-graphs 60 train --preset 124m "${graphs[@]}"
    ;;
4)
    bench kernels 200 kernels --no-compile
    bench attention 110 attention
    [ ${#compiled[@]} = 0 ] || bench kernels-compile 140 kernels --only rms_norm --only layer_norm --only activation --only rotary
    bench train-1.2b-copies 70 train --preset 1.2b --set optimizer.main_weights=copies
    ;;
5)
    bench moe 120 moe
    bench train-7b-a1b-grouped 120 train --preset 7b-a1b --set model.moe.moe_grouped_gemm=grouped
    bench train-7b-a1b-graphs 120 train --preset 7b-a1b "${graphs[@]}"
    bench train-1.2b-again 70 train --preset 1.2b
    bench train-3b 90 train --preset 3b
    ;;
6)
    decode 583m 70
    decode 16b-moe 140 --weights plain --weights int8
    bench train-1.2b-fp8-eager 70 train --preset 1.2b --precision fp8
    bench train-8b-fp8-rowwise 170 train --preset 8b --precision fp8 --set precision.fp8_recipe=rowwise \
        "${compiled[@]}"
    ;;
7)
    # Fine-tuning. GRPO with LoRA: 64 completions of 256 tokens a step.
    bench train-8b-lora 110 train --preset 8b --set adapter.type=lora
    measure grpo-8b 240 python3 rollouts.py --preset llama3-8b --out "$results/grpo-8b.json"
    gpu_tests tests-gpu-decoding 160 4 tests/gpu/test_decoding.py tests/gpu/test_quantized_products.py
    ;;
8)
    # Experts compile a kernel for each tile and FP8 whole models: the last ones.
    gpu_tests tests-gpu 440 6 tests/gpu/test_families.py tests/gpu/test_kernels.py tests/gpu/test_steps.py \
        tests/gpu/test_main_gradients.py tests/gpu/test_experts.py tests/gpu/test_fp8.py tests/gpu/test_block_sparse.py \
        tests/gpu/test_recurrent_blocks.py
    # It compares times.
    gpu_tests tests-gpu-time 90 0 tests/gpu/test_time_parts.py
    ;;
esac

if [ "$dry_run" ]; then
    echo "$seconds_of_limits s at most, with $seconds_of_installation s for the installation; $seconds_in_all s are allowed"
    exit
fi
echo "written to $archive after $SECONDS s"
for name in "${failed[@]}"; do
    echo "failed: $name" >&2
done
((${#failed[@]} == 0))
