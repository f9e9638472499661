"""What Megatron's validation makes of the arguments that were given: defaults, derived values, contradictions.

The rules are those of validate_args in Megatron's training/arguments.py. What depends on the machine (CUDA versions,
environment variables, kernels) is left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from mt_core.errors import ConfigError, Problems
from mt_import.megatron_arguments.entry_scripts import EntryScript
from mt_import.megatron_arguments.table import Version, by_dest, defaults

Values = dict[str, Any]
REQUIRED = ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings", "micro_batch_size", "lr")
MODEL_REQUIRED = REQUIRED[:4]
PART: Mapping[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
"""Arguments of a run that a list of a model's arguments leaves to others: without them, no dropout."""
BY_ITERATIONS = ("train_iters", "lr_decay_iters", "lr_warmup_iters", "lr_wsd_decay_iters")
BY_SAMPLES = ("train_samples", "lr_decay_samples", "lr_warmup_samples", "lr_wsd_decay_samples", "rampup_batch_size")
SOURCES: Sequence[tuple[str, ...]] = (
    ("mock_data",),
    ("data_path",),
    ("train_data_path", "valid_data_path", "test_data_path"),
    ("data_args_path",),
    ("per_split_data_args_path",),
)
"""Ways of naming the data, of which a run has at most one."""
SUMS_IN_FP32 = (
    "ddp_reduce_scatter_with_fp32_accumulation",
    "ddp_param_name_patterns_for_fp32_local_accumulation",
)
HYBRID_PATTERNS = ("hybrid_layer_pattern", "hybrid_override_pattern")


def derive_values(
    arguments: Mapping[str, Any],
    entry: EntryScript,
    version: Version,
    world_size: int | None = None,
    *,
    is_part: bool = False,
) -> Values:
    """Every attribute of Megatron's namespace after validation.

    arguments: attribute -> value. world_size: processes of the run; None: it is not known, and what follows from it is
    left as it was given. is_part: other arguments are given elsewhere, so that those of a run may be missing. Raises
    one ConfigError with a sentence for each missing argument and each contradiction.
    """
    problems = Problems()
    # Of what was given: a default contradicts nothing.
    for check in (_check_sources, _check_pairs) if is_part else (_check_counting, _check_sources, _check_pairs):
        with problems.collect():
            check(arguments)
    # presets: args_defaults of Megatron's scripts, which count where an argument was not given.
    values = {**defaults(version), **entry.presets, **(PART if is_part else {}), **arguments}
    _former_names(values, arguments)
    # In Megatron's order: later rules read what earlier ones have filled in.
    for rule in (_aliases, _hybrid_pattern, _shape, _heads, _precision, _layout, _weight_decay, _recompute):
        with problems.collect():
            rule(values)
    with problems.collect():
        _check_required(values, MODEL_REQUIRED if is_part else REQUIRED)
    with problems.collect():
        _check_values(values)
    if world_size is not None:
        with problems.collect():
            _data_parallel(values, world_size)
    problems.stop_if_any()
    return values


def padded_vocab_size(vocab_size: int, multiple: int, tensor_parallel: int) -> int:
    """Rows of Megatron's table of token embeddings."""
    unit = multiple * tensor_parallel
    return math.ceil(vocab_size / unit) * unit


def spelled(dest: str) -> str:
    """The option that sets an attribute."""
    return by_dest()[dest].spelled


# -- contradictions among what was given ---------------------------------------------------------------


def _check_counting(arguments: Mapping[str, Any]) -> None:
    """A run is counted by iterations or by samples, with all of its schedule."""
    iterations = [dest for dest in BY_ITERATIONS if arguments.get(dest)]
    samples = [dest for dest in BY_SAMPLES if arguments.get(dest)]
    if iterations and samples:
        raise ConfigError(
            f"{spelled(iterations[0])} counts iterations and {spelled(samples[0])} samples; Megatron takes one of both "
            "for the length of training, its decay and its warm-up"
        )
    counted = [dest for dest in ("lr_warmup_iters", "lr_warmup_samples") if arguments.get(dest)]
    if arguments.get("lr_warmup_fraction") is not None and counted:
        raise ConfigError(f"--lr-warmup-fraction and {spelled(counted[0])} both say how long the warm-up is; keep one")
    if not any(arguments.get(dest) for dest in ("train_iters", "train_samples")):
        raise ConfigError("neither --train-iters nor --train-samples is given: how long to train is not known")


def _check_sources(arguments: Mapping[str, Any]) -> None:
    sources = [
        next(dest for dest in names if arguments.get(dest)) for names in SOURCES if any(map(arguments.get, names))
    ]
    if len(sources) > 1:
        raise ConfigError(f"{' and '.join(map(spelled, sources))} both name the data; keep one of them")


EXCLUSIVE: Sequence[tuple[str, str, str]] = (
    ("fp16", "bf16", "a run has one dtype"),
    ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank", "both divide a pipeline rank"),
    ("num_layers", "encoder_num_layers", "both are the number of layers"),
    ("seq_length", "encoder_seq_length", "both are the length of a sample"),
    ("use_torch_fsdp2", "use_distributed_optimizer", "FSDP2 shards the optimizer's state already"),
    ("group_query_attention", "multi_latent_attention", "latent attention has no groups of queries"),
    ("use_rope_scaling", "multi_latent_attention", "latent attention scales positions by --rotary-scaling-factor"),
)


def _check_pairs(arguments: Mapping[str, Any]) -> None:
    contradictions = [
        f"{spelled(first)} and {spelled(other)} contradict one another: {why}; remove one"
        for first, other, why in EXCLUSIVE
        if arguments.get(first) and arguments.get(other)
    ]
    if contradictions:
        raise ConfigError("\n".join(contradictions))


# -- derived values ------------------------------------------------------------------------------------


FORMER: Mapping[str, str] = {
    "activations_checkpoint_method": "recompute_method",
    "activations_checkpoint_num_layers": "recompute_num_layers",
    "checkpoint_num_layers": "recompute_num_layers",
    "distribute_checkpointed_activations": "distribute_saved_activations",
    "fp32_allreduce": "accumulate_allreduce_grads_in_fp32",
    "min_scale": "min_loss_scale",
}
"""Attribute of versions before 0.12 -> the one that has its value since."""


def _former_names(values: Values, arguments: Mapping[str, Any]) -> None:
    for former, name in FORMER.items():
        if former in arguments and name not in arguments:
            values[name] = arguments[former]
    if values["activations_checkpoint_method"] is not None:
        values["recompute_granularity"] = "full"
        values["recompute_num_layers"] = values["recompute_num_layers"] or values["activations_checkpoint_num_layers"]
    for name in ("e4m3", "hybrid"):
        values["fp8"] = name if values[f"fp8_{name}"] else values["fp8"]


def _aliases(values: Values) -> None:
    if values["recompute_activations"]:
        values["recompute_granularity"] = "selective"
    if values["moe_layer_recompute"]:
        values["recompute_granularity"] = "selective"
        values["recompute_modules"] = [*(values["recompute_modules"] or ["core_attn"]), "moe"]
    if values["use_rotary_position_embeddings"]:
        values["position_embedding_type"] = "rope"
    if values["use_megatron_fsdp_v2"]:  # Megatron's configuration of data parallelism turns the first on, too
        values["use_megatron_fsdp"] = True
    for name in ("qk_l2_norm", "moe_apply_probs_on_input"):  # under ModelOpt's name, too
        values[name] = values[name] or values[f"export_{name}"]
    if not values["num_experts"]:
        values["num_experts"] = None
    for first, other in (("num_layers", "encoder_num_layers"), ("seq_length", "encoder_seq_length")):
        # Two names of one value: Megatron copies each into the other.
        values[first] = values[other] = values[first] if values[first] is not None else values[other]
    if pattern := next((values[name] for name in HYBRID_PATTERNS if values[name]), None):
        # One letter is one layer; | separates pipeline stages, and what follows / are further prediction depths.
        values["num_layers"] = values["encoder_num_layers"] = len(pattern.partition("/")[0].replace("|", ""))


def _hybrid_pattern(values: Values) -> None:
    """Layer pattern of a hybrid that gives only shares of attention and feed-forward layers, by Megatron's rule."""
    layers, attention, feed_forward = (
        values["num_layers"],
        values["hybrid_attention_ratio"],
        values["hybrid_mlp_ratio"],
    )
    if layers is None or any(values[name] for name in HYBRID_PATTERNS) or not (attention or feed_forward):
        return
    # Attention first, over all layers; feed-forwards then over those that are left.
    symbols = spread(["M"] * layers, "*", round(layers * attention), extra_section=True)
    values["hybrid_override_pattern"] = "".join(spread(symbols, "-", round(layers * feed_forward), extra_section=False))


def spread(symbols: Sequence[str], new: str, count: int, *, extra_section: bool) -> list[str]:
    """Replace `count` of the Mamba layers, each behind a section of them; sections are as long as one another.

    extra_section: a section follows the last replaced layer, too.
    """
    mamba = symbols.count("M")
    if not 0 < count <= mamba:
        return list(symbols)
    section = (mamba - count) / (count + extra_section)
    layers, left = list[str](), section
    for symbol in symbols:
        if symbol != "M" or left >= 0.5:
            layers.append(symbol)
            left -= symbol == "M"
        else:
            layers.append(new)
            left += section
    return layers


def _shape(values: Values) -> None:
    hidden = values["hidden_size"]
    if values["ffn_hidden_size"] is None and hidden is not None:
        # A gated feed-forward has a third matrix, so that two thirds of the width have as many parameters.
        # A multiple of 64, rounded down, as Megatron.
        values["ffn_hidden_size"] = int(4 * hidden * 2 / 3 / 64) * 64 if values["swiglu"] else 4 * hidden
    if values["num_experts"] and values["moe_ffn_hidden_size"] is None:
        values["moe_ffn_hidden_size"] = values["ffn_hidden_size"]
    if values["add_bias_linear"]:
        values["add_qkv_bias"] = True
    else:
        values["bias_gelu_fusion"] = False


def _heads(values: Values) -> None:
    hidden, heads = values["hidden_size"], values["num_attention_heads"]
    if values["kv_channels"] is None and hidden is not None and heads is not None:
        if hidden % heads:
            raise ConfigError(f"--num-attention-heads {heads} does not divide --hidden-size {hidden}")
        values["kv_channels"] = hidden // heads
    if not values["group_query_attention"]:
        values["num_query_groups"] = None  # the option counts only beside --group-query-attention


def sums_in_fp32(values: Mapping[str, Any]) -> str | None:
    """The option by which gradients that are sent in 16 bits, or accumulated in them, are summed in fp32."""
    options = (by_dest()[dest] for dest in SUMS_IN_FP32 if values[dest])
    return next((option.spelled for option in options), None)


def _precision(values: Values) -> None:
    if values["bf16"]:
        # Megatron sets it for bf16, whatever was given, unless gradients are reduced in bf16.
        values["accumulate_allreduce_grads_in_fp32"] = not values["grad_reduce_in_bf16"]
    if sums_in_fp32(values):
        values["accumulate_allreduce_grads_in_fp32"] = True
    if values["apply_query_key_layer_scaling"]:
        values["attention_softmax_in_fp32"] = True


def _layout(values: Values) -> None:
    if values["expert_tensor_parallel_size"] is None:
        values["expert_tensor_parallel_size"] = values["tensor_model_parallel_size"]
    # Megatron turns it off with a warning.
    if values["tensor_model_parallel_size"] == 1:
        values["sequence_parallel"] = False
    if sizes := values["hierarchical_context_parallel_sizes"]:
        values["context_parallel_size"] = math.prod(sizes)
    # Until 0.12 Megatron counted the decoder's stages, with the encoder's before them.
    values["pipeline_model_parallel_size"] += values["encoder_pipeline_model_parallel_size"]
    values["virtual_pipeline_model_parallel_size"] = _virtual_stages(values)


def _virtual_stages(values: Values) -> int | None:
    """Stages of a pipeline rank; None: one, which is not interleaved."""
    if (stages := values["num_virtual_stages_per_pipeline_rank"]) is not None:
        return int(stages)
    if layout := values["pipeline_model_parallel_layout"]:
        return _stages_of_layout(str(layout)) // int(values["pipeline_model_parallel_size"]) or None
    each, ranks = values["num_layers_per_virtual_pipeline_stage"], values["pipeline_model_parallel_size"]
    if each is None or values["num_layers"] is None:
        return None
    # Embedding and loss count as one layer each where they are accounted for.
    layers = values["num_layers"] + sum(
        values[f"account_for_{part}_in_pipeline_split"] for part in ("embedding", "loss")
    )
    if layers % (ranks * each):
        raise ConfigError(
            f"--num-layers {layers} cannot be divided into {ranks} pipeline ranks of stages with "
            f"--num-layers-per-virtual-pipeline-stage {each}; use a multiple of {ranks * each}"
        )
    return int(layers // ranks // each)


def _stages_of_layout(layout: str) -> int:
    """Stages of a text such as Ett|(tt|)*2tL: one more than its bars, with what is repeated written out."""
    # Here, since the module brings torch along.
    from mt_core.parallel.pipeline.partition import expand

    return expand(layout).count("|") + 1


def _weight_decay(values: Values) -> None:
    ends = ("start_weight_decay", "end_weight_decay")
    set_ends = [dest for dest in ends if values[dest] is not None]
    if values["weight_decay_incr_style"] == "constant":
        if set_ends:
            raise ConfigError(f"{spelled(set_ends[0])} counts only with --weight-decay-incr-style linear or cosine")
    elif len(set_ends) < len(ends):
        missing = " and ".join(spelled(dest) for dest in ends if dest not in set_ends)
        raise ConfigError(f"--weight-decay-incr-style {values['weight_decay_incr_style']} needs {missing}")


def _recompute(values: Values) -> None:
    granularity, method = values["recompute_granularity"], values["recompute_method"]
    if granularity == "selective" and method is not None:
        raise ConfigError(
            f"--recompute-method {method} counts only with --recompute-granularity full; remove it, or "
            "--recompute-activations"
        )
    if granularity == "full" and method is None:
        raise ConfigError("--recompute-granularity full needs --recompute-method uniform or block")


def _check_required(values: Values, required: Sequence[str]) -> None:
    missing = [dest for dest in required if values[dest] is None]
    if missing:
        raise ConfigError(f"{', '.join(map(spelled, missing))}: Megatron needs {'them' if missing[1:] else 'it'}")


def _check_values(values: Values) -> None:
    length, positions = values["seq_length"], values["max_position_embeddings"]
    if length is not None and positions is not None and length > positions:
        raise ConfigError(f"--seq-length {length} is longer than --max-position-embeddings {positions}")
    ranks = values["context_parallel_size"]
    if length is not None and ranks > 1 and length % (2 * ranks):
        raise ConfigError(f"--seq-length {length} has to be a multiple of 2 x --context-parallel-size, {2 * ranks}")
    if values["min_lr"] > (values["lr"] or math.inf):
        raise ConfigError(f"--min-lr {values['min_lr']} is above --lr {values['lr']}")
    if values["save"] is not None and values["save_interval"] is None:
        raise ConfigError("--save needs --save-interval")
    _check_overlap(values)


def _check_overlap(values: Values) -> None:
    sharded = values["use_distributed_optimizer"] or values["use_megatron_fsdp"] or values["use_custom_fsdp"]
    if values["overlap_param_gather"] and not sharded:
        raise ConfigError("--overlap-param-gather needs --use-distributed-optimizer")


def _data_parallel(values: Values, world_size: int) -> None:
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    model = math.prod(values[size] for size in sizes)
    if world_size % model:
        product = " x ".join(f"{spelled(size)} {values[size]}" for size in sizes)
        raise ConfigError(f"{product} = {model} does not divide the {world_size} processes of the run")
    values["world_size"], values["data_parallel_size"] = world_size, world_size // model
    if values["global_batch_size"] is None and values["micro_batch_size"] is not None:
        values["global_batch_size"] = values["micro_batch_size"] * values["data_parallel_size"]
