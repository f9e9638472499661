"""The table of Megatron's arguments is complete, and says what Megatron itself has."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from mt_cli.config_fields import section_fields, section_names
from mt_core.checkpoint_lookup import open_checkpoint
from mt_core.plugins import PluginHost
from mt_import.megatron_arguments.command_line import parse_arguments
from mt_import.megatron_arguments.derived import derive_values
from mt_import.megatron_arguments.entry_scripts import entry_script
from mt_import.megatron_arguments.table import (
    REASONS,
    WITH,
    Argument,
    arguments,
    by_option,
    defaults,
    keys_with_options,
)
from mt_import.readers.megatron import MegatronOptions, import_words

OPTIONS = [line.split() for line in (Path(__file__).parent / "options.txt").read_text().splitlines()]
"""(version, option, whether it is a flag that sets True (+), False (-), either (±), or takes a value (=))"""
OTHER_ATTRIBUTES = {
    *("_is_global_batch_size_explicitly_specified", "consumed_train_samples", "consumed_valid_samples", "iteration"),
    *("data_parallel_size", "expert_gtp_weight_remat_size", "gtp_weight_remat_size", "rank", "params_dtype"),
    *("layernorm_zero_centered_gamma", "skipped_train_samples", "use_dist_ckpt", "world_size", "variable_seq_lengths"),
    *("transformer_pipeline_model_parallel_size", "use_layer_wise_distributed_optimizer"),
    "virtual_pipeline_model_parallel_size",
}
"""Those of a stored namespace that no option sets."""
BY_MODEL = {
    *("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "kv_channels", "hidden_dropout"),
    *("attention_dropout", "max_position_embeddings", "encoder_num_layers", "transformer_impl", "num_query_groups"),
    *("add_bias_linear", "normalization", "position_embedding_type", "swiglu", "group_query_attention", "num_experts"),
    *("untie_embeddings_and_output_weights", "moe_ffn_hidden_size", "moe_token_dispatcher_type", "moe_aux_loss_coeff"),
    *("weight_decay", "adam_beta2", "micro_batch_size", "global_batch_size", "train_iters", "lr", "min_lr", "save"),
    *("lr_decay_style", "lr_warmup_iters", "save_interval", "no_save_optim", "no_save_rng", "data_path", "split"),
    *("seq_length", "encoder_seq_length", "vocab_size", "tokenizer_type", "distributed_backend", "async_strategy"),
    *("masked_softmax_fusion", "bias_gelu_fusion", "bias_swiglu_fusion", "bias_dropout_fusion", "apply_rope_fusion"),
    *("no_persist_layer_norm", "gradient_accumulation_fusion", "use_cpu_initialization"),
    "dist_ckpt_optim_fully_reshardable",
}
"""The options of the runs behind the golden checkpoints."""
DERIVED = {
    *("add_qkv_bias", "expert_tensor_parallel_size", "start_weight_decay", "end_weight_decay", "padded_vocab_size"),
    *("eval_global_batch_size", "eval_micro_batch_size", "dataloader_type", "overlap_p2p_comm", "align_param_gather"),
    *(
        "tensor_parallel_num_weight_shards",
        "expert_tensor_parallel_num_weight_shards",
        "megatron_fsdp_main_grads_dtype",
    ),
    *("megatron_fsdp_grad_comm_dtype", "muon_tp_mode", "rl_generation_lag"),
}
"""What Megatron's validation or a version made of the defaults."""
BASE_TEXT = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --max-position-embeddings 64 --seq-length 64 --lr 1e-3 "
    "--micro-batch-size 2 --train-iters 20 --data-path d --vocab-file v --merge-file m"
)
BASE = BASE_TEXT.split()


def test_every_option_is_in_the_table_as_it_is_parsed() -> None:
    marks = {"true": "+", "false": "-", "pair": "±"}
    found = {argument.option: marks.get(argument.takes, "=") for argument in arguments()}
    assert {option: mark for _, option, mark in OPTIONS if found.get(option) != mark} == {}
    assert (
        len(arguments()) == len({argument.option for argument in arguments()}) == len(OPTIONS) + 49
    )  # of pretrain_vlm.py, examples/multimodal and examples/post_training


@pytest.mark.parametrize("model", ["gpt", "moe", "bert"])
def test_defaults_are_those_that_megatron_stored(model: str, golden: Path, host: PluginHost) -> None:
    folder = golden / model / "dist_tp1_pp1"
    stored = open_checkpoint(folder, host).metadata["megatron"]["args"]
    ours = defaults("main")
    assert stored.keys() - ours.keys() == OTHER_ATTRIBUTES
    compared = stored.keys() & ours.keys() - BY_MODEL - DERIVED
    assert len(compared) > 700
    assert {name: (stored[name], ours[name]) for name in compared if not same(stored[name], ours[name])} == {}


def same(stored: Any, ours: Any) -> bool:
    """Enums are their names, dtypes are torch's, no value is an empty one, and one value a list of one."""
    words = {"torch.float32": "fp32", "torch.bfloat16": "bf16"}
    if isinstance(stored, str) and stored.startswith("<"):
        return True  # an object of Megatron's
    ours = ours[0] if isinstance(ours, list) and not isinstance(stored, list) else ours
    return (words.get(stored, stored) if isinstance(stored, str) else stored) == ours or not (stored or ours)


@pytest.mark.slow
def test_every_row_says_what_becomes_of_it(host: PluginHost) -> None:
    fields = {field.dotted for name in section_names(host) for field in section_fields(name, host)}
    # The parts of llava are models, whose keys are those of [model].
    keys = [
        (a.option, re.sub(r"^model\.(vision|language)_model\.", "model.", key)) for a in arguments() for key in a.keys
    ]
    assert [(option, key) for option, key in keys if key not in fields] == []
    without = [a.option for a in arguments() if bool(a.keys) is not (a.outcome in ("copy", "model", "rule"))]
    assert without == []
    assert [a.option for a in arguments() if a.outcome == "refused" and not a.reason] == []
    reasons = {a.reason for a in arguments() if a.outcome == "none" and not a.reason.startswith(WITH)}
    assert reasons == set(REASONS)


def test_what_counts_only_with_another_option_names_one_that_is_not_done() -> None:
    """An option is without effect beside one that is refused, or by itself without one, and never for a reason that
    another option takes away."""
    rows = {argument.option: argument for argument in arguments()}
    named = {a.option: rows[a.reason.removeprefix(WITH)] for a in arguments() if a.reason.startswith(WITH)}
    assert len(named) > 90
    # --dataloader-type is refused for what counts here: cyclic.
    assert {parent.option for parent in named.values() if parent.outcome != "refused"} == {"dataloader-type"}


@pytest.mark.parametrize(
    ("words", "words_of_reason"),
    [
        ("--sft --chat-template x", "tokenizer.chat_template"),
        ("--sft --sft-tokenizer-prompt-format identity", "tokenizer.chat_template"),
        ("--fim-data --fim-eod-token x", "end of document"),
        ("--sft --no-tokenizer-sentencepiece-ignore-extra-whitespaces", "another tokenization"),
        ("--exit-signal SIGUSR2", "SIGTERM and SIGINT"),
        ("--optimizer muon --tensor-model-parallel-size 2 --muon-tp-mode blockwise", "orthogonalized"),
        ("--use-megatron-fsdp --megatron-fsdp-grad-comm-dtype bf16", "precision.grad_reduce_in_bf16"),
        ("--use-megatron-fsdp --megatron-fsdp-main-grads-dtype bf16", "accumulate_allreduce_grads_in_fp32"),
        ("--use-megatron-fsdp --megatron-fsdp-main-params-dtype bf16", "kept in fp32"),
        ("--tokenizer-metadata x", "tokenizer.tokenizer_type"),
        ("--fake-process-group", "processes that do not exist"),
        ("--spec my.layers spec", "docs/guides/add-a-model.md"),
        ("--moe-dispatch-fwd-dtype fp8", "quantized before they are sent"),
        ("--moe-combine-bwd-dtype fp8", "quantized before they are sent"),
        ("--mamba-training-ssm-states-dtype bf16", "they are in fp32"),
    ],
)
def test_what_has_an_effect_beside_another_option_is_refused_there(words: str, words_of_reason: str, host) -> None:
    """Alone each of them changes nothing, or it is refused in any case."""
    result = import_words([*BASE, *words.split()], host)
    assert [one.status for one in result.accounts if words_of_reason in one.reason] == ["refused"]


@pytest.mark.parametrize(
    "option",
    ["--ddp-reduce-scatter-with-fp32-accumulation", "--ddp-param-name-patterns-for-fp32-local-accumulation router"],
)
def test_gradients_that_are_summed_in_fp32_are_so_here(option: str, host: PluginHost) -> None:
    words = [*BASE, "--bf16", "--grad-reduce-in-bf16", *option.split()]
    result = import_words(words, host)
    # Both keys have their defaults: fp32 is accumulated and sent.
    assert {"grad_reduce_in_bf16", "accumulate_allreduce_grads_in_fp32"}.isdisjoint(result.sections["precision"])
    reasons = {one.words.split()[0]: one.reason for one in result.accounts}
    assert "also sent in fp32" in reasons["--grad-reduce-in-bf16"]
    assert reasons["--grad-reduce-in-bf16"] == reasons[option.split()[0]]
    (without,) = [import_words(words[: len(BASE) + 2], host).sections["precision"]]
    assert without["grad_reduce_in_bf16"] is True


def test_without_the_state_of_the_optimizer(host: PluginHost) -> None:
    words = [*BASE, "--save", "c", "--save-interval", "5", "--no-save-optim", "--no-save-rng"]
    result = import_words(words, host)
    assert result.sections["checkpoint"] == {"save": "c", "save_interval": 5, "save_optimizer": False}
    (account,) = [one for one in result.accounts if one.words == "--no-save-rng"]
    assert "always saved" in account.reason


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--profile", {"first_step": 11, "last_step": 12}),
        ("--profile --use-pytorch-profiler", {"first_step": 10, "last_step": 11}),
        ("--profile --profile-step-start 4 --profile-step-end 6 --profile-ranks 0 8", {"ranks": [0, 8]}),
        ("--profile-step-start 4 --profile-ranks 0", {}),
    ],
)
def test_profiled_steps_are_those_of_the_profile(words: str, expected: Mapping[str, Any], host: PluginHost) -> None:
    result = import_words([*BASE, *words.split()], host)
    found = result.sections.get("profile", {})
    assert {**found, **expected} == found
    assert (result.sections["train"].get("callbacks") == ["profile"]) is bool(expected)
    if not expected:
        assert {one.reason for one in result.accounts if "profile" in one.words} == {"counts only with --profile"}


def test_without_the_tools_nothing_is_profiled(host: PluginHost, monkeypatch: pytest.MonkeyPatch) -> None:
    from mt_core.config import sections

    known = dict(sections.section_types(host))
    del known["profile"]
    monkeypatch.setattr("mt_import.megatron_arguments.translation.section_types", lambda host: known)
    result = import_words([*BASE, "--profile"], host)
    assert "profile" not in result.sections
    assert "install it" in result.accounts[-1].reason


def test_a_biencoder_starts_from_a_bert(host: PluginHost) -> None:
    words = [*BASE, "--bert-load", "bert", "--titles-data-path", "t"]
    assert import_words(words, host, MegatronOptions(entry="ict")).sections["checkpoint"]["load"] == "bert"
    assert "load" not in import_words(words[:-2], host).sections["checkpoint"]


def test_standard_specs_change_nothing(host: PluginHost) -> None:
    standard = ["megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec"]
    result = import_words([*BASE, "--spec", *standard], host)
    assert [one.status for one in result.accounts if one.words.startswith("--spec")] == ["no effect"]
    assert "model.family" in result.accounts[-1].reason


def test_an_iteration_of_a_checkpoint_is_loaded(host: PluginHost) -> None:
    words = ["--load", "ckpt", "--override-ckpt-iteration", "20", "--override-opt_param-scheduler"]
    checkpoint = import_words([*BASE, *words], host).sections["checkpoint"]
    assert checkpoint["resume_from"] == "ckpt/iter_0000020"
    assert "optimizer.lr" in checkpoint["accept_changes"]
    checkpoint = import_words([*BASE, *words, "--finetune"], host).sections["checkpoint"]
    assert checkpoint == {"load": "ckpt/iter_0000020", "save_interval": None}


def test_gpt_from_before_megatron_core_is_the_same_model(host: PluginHost) -> None:
    """A legacy GPT has the layers, the activation and the positions of one of Megatron-Core."""
    result = import_words([*BASE, "--use-legacy-models"], host)
    assert [one.status for one in result.accounts if one.words == "--use-legacy-models"] == ["no effect"]
    since = import_words(BASE, host, MegatronOptions(version="0.12"))
    assert result.sections == since.sections


@pytest.mark.parametrize(
    ("words", "entry", "named"),
    [
        ("--num-experts 2", "gpt", "--num-experts"),  # another router than its options say
        ("--use-rotary-position-embeddings --rotary-base 500000", "gpt", "--rotary-base"),  # always 10000 there
        ("", "bert", "those of GPT alone"),
    ],
)
def test_what_legacy_models_do_otherwise_is_refused(words: str, entry: str, named: str, host: PluginHost) -> None:
    result = import_words([*BASE, "--use-legacy-models", *words.split()], host, MegatronOptions(entry=entry))
    (refused,) = result.of_status("refused")
    assert refused.words == "--use-legacy-models"
    assert named in refused.reason
    usual = ["--use-legacy-models", "--use-rotary-position-embeddings", "--rotary-base", "10000"]
    assert import_words([*BASE, *usual], host).of_status("refused") == []


T5_STAGES = [*BASE[2:], "--encoder-num-layers", "4", "--tokenizer-type", "BertWordPieceCase"]


@pytest.mark.parametrize(("decoder", "stages", "expected"), [(4, 2, 4), (8, 4, 6), (8, 2, None)])
def test_stages_of_the_encoder_stand_before_the_decoders(
    decoder: int, stages: int, expected: int | None, host: PluginHost
) -> None:
    """Two for an encoder of 4 layers: two layers each, as many as the decoder's stages have, or they cannot be divided
    over both together."""
    sizes = ["--decoder-num-layers", str(decoder), "--pipeline-model-parallel-size", str(stages)]
    words = [*T5_STAGES, *sizes, "--encoder-pipeline-model-parallel-size", "2"]
    result = import_words(words, host, MegatronOptions(entry="t5"))
    refused = [one.words for one in result.of_status("refused")]
    assert refused == ([] if expected else ["--encoder-pipeline-model-parallel-size 2"])
    if expected:
        assert result.sections["parallel"]["pipeline_model_parallel_size"] == expected


def test_stages_of_an_encoder_are_those_of_t5(host: PluginHost) -> None:
    words = [*BASE, "--pipeline-model-parallel-size", "2", "--encoder-pipeline-model-parallel-size", "2"]
    (refused,) = import_words(words, host).of_status("refused")
    assert "encoder alone" in refused.reason


@pytest.mark.parametrize("words", ["--distributed-backend nccl2", "--dist-ckpt-use-dtensor-format"])
def test_newer_ways_to_send_and_to_store_change_no_result(words: str, host: PluginHost) -> None:
    """torch's second backend for NCCL sends the same messages, and DTensors are another form of Megatron's files."""
    result = import_words([*BASE, *words.split()], host)
    assert [one.status for one in result.accounts if one.words == words] == ["no effect"]
    assert result.sections == import_words(BASE, host).sections


def test_the_second_version_of_megatrons_sharding_turns_it_on(host: PluginHost) -> None:
    words = ["--use-megatron-fsdp-v2", "--bf16", "--data-parallel-sharding-strategy", "optim_grads_params"]
    parallel = import_words([*BASE, *words], host).sections["parallel"]
    assert parallel["use_torch_fsdp2"] is True


EXCLUDED = {
    *(
        "rampup-batch-size",
        "train-samples",
        "lr-decay-samples",
        "lr-wsd-decay-samples",
        "data-args-path",
        "exit-interval",
    ),
    *("per-split-data-args-path", "train-data-path", "valid-data-path", "test-data-path", "tiktoken-special-tokens"),
    "hierarchical-context-parallel-sizes",
}
"""Copied arguments that contradict one of BASE, or are copied under another one's name."""
NEEDS: Mapping[str, str] = {
    "lr-wsd": "--lr-decay-style WSD",
    "weight-decay-incr": "--start-weight-decay 0.1 --end-weight-decay 0.2",
    "start-weight": "--weight-decay-incr-style linear --end-weight-decay 0.3",
    "end-weight": "--weight-decay-incr-style linear --start-weight-decay 0.3",
    "muon": "--optimizer muon",
    "lion": "--optimizer lion",
    "sgd": "--optimizer sgd",
    **dict.fromkeys(("loss-scale", "initial-loss", "min-loss", "hysteresis", "accumulate"), "--fp16"),
    "grad-reduce": "--bf16",
    **dict.fromkeys(("fp8", "no-fp8", "first-last"), "--bf16 --fp8-format hybrid"),
    "fp8-amax": "--bf16 --fp8-format hybrid --fp8-recipe delayed",
    "num-layers-at": "--bf16 --fp8-format hybrid --first-last-layers-bf16",
    "recompute-method": "--recompute-granularity full",
    **dict.fromkeys(("recompute-num", "distribute-saved"), "--recompute-granularity full --recompute-method block"),
    "outer-dp": "--use-megatron-fsdp --num-distributed-optimizer-instances 2",
    "torch-fsdp2": "--use-torch-fsdp2",
    "overlap-param": "--use-distributed-optimizer",
    "sequence": "--tensor-model-parallel-size 2",
    "tp-comm-overlap": "--tensor-model-parallel-size 2 --sequence-parallel",
    "fim": "--fim-data",
    "decoupled-min": "--decoupled-lr 1e-3",
    "save": "--save-interval 5",
    "cuda-graph-warmup": "--cuda-graph-impl local",
    "tensorboard": "--tensorboard-dir x",
    "wandb": "--wandb-project x",
    "tokenizer-model": "--tokenizer-type Llama2Tokenizer",
    "tokenizer-sentencepiece": "--tokenizer-type Llama2Tokenizer",
    **dict.fromkeys(("tiktoken", "null-tokenizer"), "--tokenizer-type TikTokenizer"),
    "null-tokenizer": "--tokenizer-type NullTokenizer",
    "decoder-seq": "--max-position-embeddings 200",
    "expert-tensor": "--tensor-model-parallel-size 2 --num-experts 2",
    "tokenizer-hf": "--tokenizer-type HuggingFaceTokenizer",
}
"""Beginning of a copied argument -> what has to stand beside it for it to count. The longest beginning counts."""
SCRIPTS: Mapping[str, str] = {
    **dict.fromkeys(("mask-prob", "short-seq-prob"), "bert"),
    "decoder-seq-length": "t5",
    **dict.fromkeys(("titles-data-path", "query-in-block-prob", "use-one-sent-docs"), "ict"),
}
TEXTS: Mapping[str, str] = {
    "context-parallel-size": "2",
    "fp8-recipe": "blockwise",
    "pipeline-model-parallel-layout": "Ett|ttL",
    "split": "9,1,0",
    "tiktoken-pattern": "v1",
}


def other_value(argument: Argument) -> list[str]:
    """Words with a value that is no default, here or there."""
    if argument.is_flag:
        return []
    if argument.option in TEXTS:
        return [TEXTS[argument.option]]
    if argument.choices:
        return [next(choice for choice in argument.choices if choice not in (argument.default, "adam", "v2"))]
    if argument.kind == "text":
        return ["something"]
    if argument.count:
        return ["2", "3"]
    small = argument.kind == "float" and (argument.default is None or argument.default <= 1)
    return ["0.0005" if small else str(int(argument.default or 1) + 2)]


@pytest.mark.parametrize(
    "argument", [a for a in arguments() if a.outcome == "copy" and a.option not in EXCLUDED], ids=lambda a: a.option
)
def test_an_argument_that_is_copied_decides_its_key(argument: Argument, host: PluginHost) -> None:
    needed = max((name for name in NEEDS if argument.option.startswith(name)), key=len, default="")
    words = [argument.spelled, *other_value(argument)]
    options = MegatronOptions(entry=SCRIPTS.get(argument.option, "gpt"))
    result = import_words([*BASE, *NEEDS.get(needed, "").split(), *words], host, options)
    given = parse_arguments(words)[argument.dest].value
    account = next(one for one in result.accounts if one.words.split()[0] == argument.spelled)
    assert account.keys[argument.keys[0]] == given != argument.default


def test_products_in_fp4_are_a_format_and_its_recipe(host: PluginHost) -> None:
    words = ["--bf16", "--fp4-format", "e2m1", "--first-last-layers-bf16"]
    precision = import_words([*BASE, *words], host, MegatronOptions()).sections["precision"]
    expected = {"dtype": "bf16", "fp8_format": "e2m1", "fp8_recipe": "nvfp4", "first_last_layers_bf16": True}
    assert {key: precision[key] for key in expected} == expected


PAGE = Path(__file__).parents[2] / "docs" / "guides" / "from-megatron.md"


def test_the_page_says_what_the_table_says() -> None:
    """Each option in its table of themes decides each key beside it, by itself or together with the others."""
    text = PAGE.read_text()
    known = keys_with_options()
    rows = [line.split("|")[2:4] for line in text.splitlines() if re.match(r"\| [a-z ]*\| `--", line)]
    rows = [row for row in rows if "Megatron" not in row[0] and "`mt " not in row[1] and "--nproc" not in row[1]]
    assert len(rows) > 20
    for left, right in rows:
        options = re.findall(r"`(--[a-z0-9_-]+)`", left)
        keys = re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)`", right)
        assert all(option in by_option() for option in options), left
        decided = {key: [option for option in options if option in known.get(key, ())] for key in keys}
        assert all(decided.values()), (left, decided)
    assert f"All {len(arguments())} options" in text


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        (
            "--activations-checkpoint-method block --activations-checkpoint-num-layers 3",
            {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 3},
        ),
        (
            "--activations-checkpoint-method uniform",
            {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        ),
        ("--fp8-hybrid", {"fp8": "hybrid"}),
        ("--fp32-allreduce --min-scale 2", {"accumulate_allreduce_grads_in_fp32": True, "min_loss_scale": 2.0}),
    ],
)
def test_names_of_older_versions_have_the_values_of_newer_ones(words: str, keys: dict[str, Any]) -> None:
    given = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --max-position-embeddings 64 --seq-length 64"
    given = f"{given} --micro-batch-size 2 --train-iters 5 --lr 1e-3 {words}"
    parsed = {dest: argument.value for dest, argument in parse_arguments(given.split()).items()}
    values = derive_values(parsed, entry_script("gpt"), "0.12")
    assert {key: values[key] for key in keys} == keys
