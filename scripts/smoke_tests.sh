# Sourced by lowest.sh and with_torch.sh: three minutes of tests that reach every distribution and most dependencies.
SMOKE_TESTS=(
    tests/core/config/test_config_errors.py
    tests/core/config/test_config_files.py
    tests/core/config/test_config_loading.py
    tests/core/test_plugins_host.py
    tests/core/nn/test_attention.py
    tests/core/nn/fp8/test_linear.py
    tests/core/nn/fp8/test_products.py
    tests/core/nn/kernels/test_compilation.py
    tests/core/optim/test_optimizers.py
    tests/core/optim/test_lr_schedules.py
    tests/core/train/test_resume.py
    tests/core/train/test_steady_step.py
    tests/cli/test_main.py
    tests/cli/test_config_command.py
    tests/data/indexed/test_indexed_round_trip.py
    tests/data/tokenizers/test_train_tokenizer.py
    tests/data/preprocess/test_preprocess_command.py
    tests/ckpt/test_ckpt_round_trip.py
    tests/ckpt/test_safetensors_files.py
    tests/models/test_mistral.py
    tests/moe/test_routing.py
    tests/dist/test_tensor_parallel.py
    tests/tools/plan/test_plan.py
    tests/infer/test_batch_files.py
    tests/eval/test_lambada.py
    tests/retrieval/test_index.py
)

# smoke_tests PYTHON: what is installed, then the tests. No test may be skipped for a missing dependency alone.
smoke_tests() {
    "$1" -m mt_cli --version
    OMP_NUM_THREADS=1 "$1" -m pytest -q -p no:cacheprovider "${SMOKE_TESTS[@]}"
}
