"""Files that set arguments for another script, scripts with several programs, and functional tests of Megatron."""

from __future__ import annotations

from pathlib import Path

import pytest

from mt_core.errors import ConfigError
from mt_core.plugins import PluginHost
from mt_import.megatron_arguments.derived import spread
from mt_import.readers.megatron import MegatronOptions, import_words
from mt_import.result import ImportResult, check_result
from mt_import.sources import import_file

SIZES = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --max-position-embeddings 64"
NEMOTRON = (
    f"{SIZES} --squared-relu --normalization LayerNorm --apply-layernorm-1p --disable-bias-linear "
    "--untie-embeddings-and-output-weights --use-rotary-position-embeddings --rotary-percent 0.5 "
    "--group-query-attention --num-query-groups 2"
)
RUN = (
    "--seq-length 64 --micro-batch-size 1 --lr 1e-3 --train-iters 9 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 99"
)


def write(tmp_path: Path, text: str, name: str = "run.sh") -> Path:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_a_file_of_arguments_is_a_part_of_a_configuration(tmp_path: Path, host: PluginHost) -> None:
    text = f"""if [ -z ${{HF_MODEL_CKPT}} ]; then TOKENIZER_MODEL=org/model; fi
MODEL_ARGS=" \\
    {NEMOTRON} --padded-vocab-size 512 --bf16 --export-te-mcore-model"
"""
    result = import_file(write(tmp_path, text), host)
    assert not result.complete
    assert "MODEL_ARGS" in result.source
    model = result.sections["model"]
    assert (model["family"], model["activation"], model["vocab_size"]) == ("gpt", "squared_relu", 512)
    assert (model["rotary_percent"], model["num_query_groups"]) == (0.5, 2)
    assert result.sections["precision"] == {"dtype": "bf16"}
    # Of keys that other files decide none is written.
    assert set(result.sections) == {"model", "precision"}
    assert result.of_status("refused") == []


def test_arguments_of_a_sourced_file_count_once(tmp_path: Path, host: PluginHost) -> None:
    write(tmp_path, 'COMMON="--bf16 --hidden-dropout 0.0"', "conf/common.sh")
    text = f'HERE="$(dirname "$(realpath "$0")")"\nsource $HERE/conf/common.sh\nOPTIONS="$COMMON {SIZES}"'
    result = import_file(write(tmp_path, text), host)
    assert "OPTIONS" in result.source
    assert "COMMON" not in result.source


def test_a_script_sources_the_model_that_its_argument_names(tmp_path: Path, host: PluginHost) -> None:
    """The way of examples/post_training: the model is a file, and arguments of the user's own are not set."""
    write(tmp_path, f'MODEL_ARGS="{SIZES}"', "conf/org/model.sh")
    write(
        tmp_path,
        'MLM_MODEL_CFG=$1\nif [ -z ${TP} ]; then TP=1; fi\nsource "${SCRIPT_DIR}/conf/${MLM_MODEL_CFG}.sh"',
        "conf/arguments.sh",
    )
    text = f"""SCRIPT_DIR="$(dirname "$(readlink -f "$0")")"
source "${{SCRIPT_DIR}}/conf/arguments.sh"
torchrun --nproc_per_node=$TP ${{SCRIPT_DIR}}/finetune.py ${{MODEL_ARGS}} \\
  --tensor-model-parallel-size ${{TP}} {RUN} ${{EXTRA_ARGS}}
"""
    result = import_file(write(tmp_path, text), host, arguments=["org/model"], options=MegatronOptions(entry="gpt"))
    check_result(result, host)
    assert result.sections["model"]["num_layers"] == 2
    assert any("$EXTRA_ARGS" in note and "left out" in note for note in result.notes)


SEVERAL = f"""if [[ $BATCH -eq 0 ]]; then
  torchrun --nproc_per_node 8 pretrain_gpt.py {SIZES} {RUN} --seed 1
else
  srun sh -c "python -u tools/pretrain_gpt.py {SIZES} {RUN} --seed 2"
fi
python convert.py --in x
"""


@pytest.mark.parametrize(("program", "seed"), [("tools/pretrain_gpt.py", 2), ("2", 1), ("4", 2)])
def test_a_program_is_chosen_by_its_path_or_its_line(program: str, seed: int, tmp_path: Path, host: PluginHost) -> None:
    path = write(tmp_path, SEVERAL)
    result = import_file(path, host, options=MegatronOptions(program=program))
    assert result.sections["train"]["seed"] == seed


def test_programs_that_no_name_chooses_are_listed(tmp_path: Path, host: PluginHost) -> None:
    path = write(tmp_path, SEVERAL)
    for options in (MegatronOptions(), MegatronOptions(program="pretrain_gpt.py"), MegatronOptions(program="other.py")):
        with pytest.raises(ConfigError, match="pretrain_gpt.py in line 2, tools/pretrain_gpt.py in line 4"):
            import_file(path, host, options=options)


def test_printing_a_command_starts_nothing(tmp_path: Path, host: PluginHost) -> None:
    text = f"echo pretrain_gpt.py {SIZES}\npython pretrain_gpt.py {SIZES} {RUN}"
    assert import_file(write(tmp_path, text), host).sections["model"]["num_layers"] == 2


DEEPSEEK = (
    f"{SIZES} {RUN} --multi-latent-attention --swiglu --normalization RMSNorm --disable-bias-linear --hidden-dropout 0 "
    "--attention-dropout 0 --qk-layernorm --position-embedding-type rope --num-experts 8 --moe-router-topk 2 "
    "--moe-layer-freq ([0]*1+[1]*1) --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
    "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4 --moe-router-force-load-balancing "
    "--q-lora-rank 16 --kv-lora-rank 8 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 8 "
    "--moe-token-dispatcher-type flex --moe-enable-deepep --untie-embeddings-and-output-weights"
)


def test_deepseek_with_forced_balancing_imports_where_no_gpu_is(tmp_path: Path, host: PluginHost) -> None:
    result = import_words(DEEPSEEK.split(), host)
    check_result(result, host)
    moe = result.sections["model"]["moe"]
    assert moe["moe_router_force_load_balancing"] is True
    assert moe["moe_token_dispatcher_type"] == "flex"
    assert any("DeepEP" in note for note in result.notes)


@pytest.mark.parametrize(
    ("layout", "stages"),
    [("Et|t|t|tL", None), ("Et|(t|)*2t|(|)*3L", 2), ("E|t*2|||t*2||L", None)],
)
def test_a_layout_of_stages_says_how_many_a_rank_has(layout: str, stages: int | None, host: PluginHost) -> None:
    """4 ranks; 8 stages are two on each. A layout whose stages ranks do not share evenly is refused later."""
    words = f"{SIZES.replace('--num-layers 2', '--num-layers 4')} {RUN} --pipeline-model-parallel-size 4"
    result = import_words([*words.split(), "--pipeline-model-parallel-layout", layout], host)
    found = result.sections["parallel"].get("virtual_pipeline_model_parallel_size")
    assert found == stages


def test_variables_of_deterministic_runs_are_named(tmp_path: Path, host: PluginHost) -> None:
    text = f"export NCCL_ALGO=Ring\nNVTE_ALLOW_NONDETERMINISTIC_ALGO=0 python pretrain_gpt.py {SIZES} {RUN}"
    notes = import_file(write(tmp_path, text), host).notes
    assert [any(name in note for note in notes) for name in ("NCCL_ALGO=Ring", "ALGO=0, which")] == [True, True]


def functional_test(
    tmp_path: Path, host: PluginHost, folder: str, extra: str = "", define: dict[str, str] | None = None
) -> ImportResult:
    options = dict(zip((words := f"{SIZES} {RUN}".replace("--mock-data ", "").split())[::2], words[1::2], strict=True))
    lines = "".join(f"  {option}: {value}\n" for option, value in options.items())
    path = write(
        tmp_path, f"MODEL_ARGS:\n{lines}  --mock-data: true\n{extra}", f"test_cases/{folder}/x/model_config.yaml"
    )
    return import_file(path, host, define=define)


def test_variables_of_a_functional_test_are_defined_or_named(tmp_path: Path, host: PluginHost) -> None:
    extra = "  --seed: ${REPEAT}\n  --save: ${OUT}/run\n  --save-interval: 5\nENV_VARS:\n  NCCL_ALGO: Ring\n"
    result = functional_test(tmp_path, host, "gpt", extra, {"REPEAT": "7"})
    assert result.sections["train"]["seed"] == 7
    assert result.sections["checkpoint"]["save"] == "${OUT}/run"
    assert any("NCCL_ALGO=Ring" in note for note in result.notes)
    with pytest.raises(ConfigError, match=r"--seed \$\{REPEAT\}: expected an integer; give --define REPEAT=VALUE"):
        functional_test(tmp_path, host, "gpt", extra)


def test_a_hybrid_with_megatrons_defaults_is_translated(host: PluginHost) -> None:
    words = f"{SIZES} {RUN} --hybrid-override-pattern M* --is-hybrid-model --mamba-num-groups 2"
    result = import_words(words.split(), host, MegatronOptions(entry="hybrid"))
    check_result(result, host)
    model = result.sections["model"]
    assert {key: model[key] for key in ("family", "normalization", "hidden_dropout", "activation")} == {
        "family": "hybrid",
        "normalization": "LayerNorm",
        "hidden_dropout": 0.1,
        "activation": "gelu_tanh",
    }
    assert model["position_embedding_type"] == "learned_absolute"


def test_a_hybrid_without_mamba_layers_has_any_epsilon(host: PluginHost) -> None:
    """Only Megatron's mixer has an epsilon of its own."""
    words = f"{SIZES} {RUN} --hybrid-override-pattern *- --is-hybrid-model --mamba-num-groups 2 --norm-epsilon 1e-6"
    result = import_words(words.split(), host, MegatronOptions(entry="hybrid"))
    check_result(result, host)
    assert result.sections["model"]["norm_epsilon"] == 1e-6


@pytest.mark.parametrize(("folder", "family"), [("gpt", "gpt"), ("bert", "bert"), ("core/models/T5", "t5")])
def test_the_folder_of_a_functional_test_names_its_script(
    folder: str, family: str, tmp_path: Path, host: PluginHost
) -> None:
    assert functional_test(tmp_path, host, folder).sections["model"]["family"] == family


def test_values_in_brackets_are_several_and_repeated_options_count_once(tmp_path: Path, host: PluginHost) -> None:
    extra = (
        '  --cp-comm-type: "[a2a]"\n  --context-parallel-size: 2\n  --num-experts: 4\n'
        "  --moe-layer-freq: ([0]*1+[1]*1)\n"
        "  --recompute-modules: [moe mlp]\n  --recompute-granularity: selective\n  --num-layers: 2\nMODEL_ARGS_2: {}\n"
    )
    result = functional_test(tmp_path, host, "moe", extra)
    assert result.sections["recompute"]["recompute_modules"] == ["moe", "mlp"]
    assert result.sections["model"]["moe"]["moe_layer_freq"] == "([0]*1+[1]*1)"
    assert any("MODEL_ARGS_2" in note for note in result.notes)


def test_backslashes_of_a_functional_test_are_the_shells(tmp_path: Path, host: PluginHost) -> None:
    extra = "  --pipeline-model-parallel-size: 2\n  --pipeline-model-parallel-layout: Et\\\\|\\\\(t\\\\)*1L\n"
    result = functional_test(tmp_path, host, "gpt", extra)
    assert result.sections["parallel"]["pipeline_model_parallel_layout"] == "Et|(t)*1L"


def test_a_repeated_option_with_another_value_is_an_error(tmp_path: Path, host: PluginHost) -> None:
    with pytest.raises(ConfigError, match="duplicate key"):
        functional_test(tmp_path, host, "gpt", "  --num-layers: 3\n")


def test_layers_are_spread_as_megatron_spreads_them() -> None:
    """Worked out by hand: 24 layers with 8 % attention and half feed-forward."""
    attention = spread(["M"] * 8, "*", 2, extra_section=True)
    assert "".join(attention) == "MM*MM*MM"
    assert "".join(spread(attention, "-", 3, extra_section=False)) == "M-*M-*M-"
    assert "".join(spread(["M"] * 3, "*", 0, extra_section=True)) == "MMM"
