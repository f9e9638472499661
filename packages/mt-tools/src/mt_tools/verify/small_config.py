"""Shrinks a user's configuration for a few CPU processes, and keeps every feature that a layout could break."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import count, pairwise
from typing import Any

from mt_core.config.checks import as_world, check_config
from mt_core.config.layer_pattern import MOE_LAYER_FREQ, parse_pattern, pattern_of
from mt_core.config.loading import config_from_dict
from mt_core.config.metrics import configured_loss
from mt_core.config.parallel import ParallelConfig
from mt_core.config.schema import Config
from mt_core.data.building import build_tokenizer
from mt_core.errors import ConfigError
from mt_core.interfaces import CAUSAL_LM_SAMPLE
from mt_core.parallel.context import ParallelContext
from mt_core.plugins import PluginHost
from mt_core.specs import DATASETS, MODELS, SECTIONS
from mt_core.train.auto_choices import LARGE_VOCABULARY, with_loss, with_resolved_loss
from mt_core.train.build import build_model
from mt_tools.verify.small_layout import (
    LARGEST_WORLD,
    Divisors,
    forget_division,
    processes,
    shrink_axes,
    shrink_stages,
)
from mt_tools.verify.small_training import STEPS, Tree, keep_dropout, shrink_training

HEAD_DIM = 8
FEW_EXPERTS = 8
GLOBAL_LOSS, LOCAL_LOSS = "global_aux_loss", "aux_loss"
"""The balance loss that depends on the order of micro-batches, which layouts change, and the one in its place."""
FEW_DOCUMENTS = "1,1,98"
"""Shares of the mock corpus. An index of a third of it, in samples as short as these, takes longer than all steps."""
VOCAB = 509
"""A prime: no number of ranks divides it."""
ON_EVERY_DEVICE = ("auto", "sdpa", "eager")
"""Attention backends that run on a CPU. The last one supports every model."""
SHARED_WITH_PARTS = ("vocab_size", "make_vocab_size_divisible_by")
"""Keys that a model has for its parts, which are tables in its section."""
FAKE_IMAGE_TEXTS = "captioned_shapes"
KEPT_PRECISION = {
    "fp32": (),
    "bf16": ("accumulate_allreduce_grads_in_fp32", "grad_reduce_in_bf16", "attention_softmax_in_fp32"),
    "fp16": ("accumulate_allreduce_grads_in_fp32", "attention_softmax_in_fp32"),
}
SMALL_SCALE = {"fp16": {"initial_loss_scale": 2.0**10, "loss_scale_window": 2}}
"""A loss scale with which no step overflows, and that grows after every second one."""
FULL_STATE = {"main_weights": "copies", "exp_avg_dtype": "fp32"}


def shrink(
    config: Config,
    host: PluginHost,
    *,
    steps: int = STEPS,
    dropout: float | None = None,
    dtype: str = "fp32",
    same_rounds: bool = False,
    beside: Config | None = None,
) -> Config:
    """The same family, options and axes with few and narrow layers, short sequences, fake data, in `dtype` on a CPU.

    Axes are halved until the model fits on LARGEST_WORLD processes, and stages are merged accordingly. Options for GPUs
    only, and faster equivalents of the same computation, get their CPU values. The batch grows after the first step,
    the learning rate warms up and decays, and a validation set is evaluated twice. dropout: replaces the configured
    one; None keeps it (see `keep_dropout`). same_rounds: it is compared with one process by `in_the_same_rounds`, so
    that global_aux_loss may be kept, without dropout, where layouts agree in it. beside: the same model in another
    layout, of which the small version has the same sizes, samples and batches. Raises ConfigError if the small
    configuration breaks a rule.
    """
    parallel, num_layers = _small_layout(config, host)
    layouts = [parallel]
    if beside is not None:
        other, other_layers = _small_layout(beside, host)
        layouts.append(other)
        # The layers of the layout with more stages: the other one divides as many.
        num_layers = max(num_layers, other_layers) if num_layers and other_layers else num_layers
    divisors = Divisors.of(layouts)
    # A tree of plain values, which is validated again as a whole at the end.
    tree = config.to_dict() | {"parallel": parallel.model_dump(mode="json")}
    if num_layers is not None:
        tree["model"]["num_layers"] = num_layers
    _shrink_model(tree["model"], divisors)
    for part in _parts(tree["model"]):
        _shrink_part(part, divisors)
    for model in (tree["model"], *_parts(tree["model"])):
        if model.get("moe"):
            _shrink_experts(model, divisors, same_rounds)
    whole = draws_completions(config, host) or holds_whole_records(config, host)
    length = config.data.seq_length if whole else _short_length(tree, divisors)
    family = host[MODELS].get(config.model.family, key="model.family")
    # After the common keys: what only the family defines in its section.
    if family.shrink is not None:
        tree["model"] |= family.shrink.load()(tree["model"], length)
    # If the loss, or that of a router, depends on what is in a round of micro-batches, one process runs those of all
    # ranks as one micro-batch, with other dropout masks.
    by_rounds = configured_loss(config, host).compares_samples or has_global_loss(tree["model"])
    keep_dropout(tree["model"], layouts, 0.0 if by_rounds else dropout)
    _replace_data(tree, length, config, host)
    shrink_training(tree, layouts, steps)
    _compute_on_cpu(tree, dtype)
    _shrink_sections(tree, host)
    small = config_from_dict(tree, host)
    _check(small, host)
    return _with_loss_of(config, small, host)


def _with_loss_of(config: Config, small: Config, host: PluginHost) -> Config:
    """`train.loss=auto` as resolved for the configured vocabulary, which counts as large if the tokenizer decides."""
    alone = small.model_copy(update={"parallel": ParallelConfig()})
    model = build_model(alone, ParallelContext(), host)
    vocab_size = config.model.vocab_size or LARGE_VOCABULARY
    large = config.model_copy(update={"model": config.model.model_copy(update={"vocab_size": vocab_size})})
    return with_loss(small, with_resolved_loss(large, model, host).train.loss)


def _check(small: Config, host: PluginHost) -> None:
    """Validated before processes are started, each of which would raise the same error."""
    try:
        with as_world(processes(small.parallel)):
            check_config(small)
            host.check_config(small)
    except ConfigError as error:
        raise ConfigError(f"this configuration, made small to be checked, breaks a rule: {error}") from error


def _small_layout(config: Config, host: PluginHost) -> tuple[ParallelConfig, int | None]:
    """[parallel], and model.num_layers; None where the family has another key."""
    small = shrink_axes(config.parallel)
    num_layers = config.model.model_dump().get("num_layers")
    if num_layers is None:
        return forget_division(small), None
    if config.model.stacked_layers != num_layers:  # several stacks
        return forget_division(small), min(num_layers, 2 * small.pipeline_model_parallel_size)
    division = shrink_stages(config.parallel, num_layers, small.pipeline_model_parallel_size, host)
    return small.model_copy(update=dict(division.keys)), division.num_layers


def _shrink_model(model: dict[str, Any], divisors: Divisors) -> None:
    tp = divisors.tensor
    if "num_attention_heads" in model:
        groups = model.get("num_query_groups") or model["num_attention_heads"]
        # Grouped queries stay grouped: 1 or 2 heads for each group.
        per_group = min(model["num_attention_heads"] // groups, 2)
        # Fewer groups than tensor-parallel ranks stay as they are: ranks then share groups, which is a case of its own.
        groups = math.lcm(divisors.own_heads, 2) if groups >= tp else groups
        heads = groups * per_group
        heads = heads * tp // math.gcd(heads, tp)  # lcm: tp divides the heads
        model["num_attention_heads"] = heads
        if model.get("num_query_groups"):
            model["num_query_groups"] = groups
        if model.get("kv_channels"):
            model["kv_channels"] = HEAD_DIM
        model["hidden_size"] = heads * HEAD_DIM
        _shrink_positions(model)
        if "mamba_head_dim" in model:
            _shrink_mixer(model, tp)
    if model.get("ffn_hidden_size"):
        model["ffn_hidden_size"] = 16 * tp  # 16 on each rank, of one layout
    if "vocab_size" in model:
        model["vocab_size"] = VOCAB
        # A prime vocabulary is padded in every layout, by other numbers of rows.
        model["make_vocab_size_divisible_by"] = 4


def _shrink_positions(model: dict[str, Any]) -> None:
    """Lists with a number for each frequency, and patterns with one for each layer."""
    frequencies = int(HEAD_DIM * model.get("rotary_percent", 1.0)) // 2
    for key in ("rope_short_factor", "rope_long_factor"):
        if model.get(key):
            model[key] = model[key][:frequencies]
    for key in ("no_rope_freq", "sliding_window_pattern"):
        if isinstance(model.get(key), str):
            model[key] = 2


def _shrink_mixer(model: dict[str, Any], tp: int) -> None:
    """Mamba's heads are as narrow as those of attention, and groups still divide them."""
    model["mamba_head_dim"] = min(model["mamba_head_dim"], HEAD_DIM)
    model["mamba_state_dim"] = min(model["mamba_state_dim"], 2 * HEAD_DIM)
    if model.get("mamba_num_heads"):
        model["mamba_num_heads"] = math.lcm(min(model["mamba_num_groups"], 2 * tp), tp)
    heads = model.get("mamba_num_heads") or 2 * model["hidden_size"] // model["mamba_head_dim"]
    model["mamba_num_groups"] = math.gcd(heads, model["mamba_num_groups"])


def _parts(model: dict[str, Any]) -> list[dict[str, Any]]:
    """The models that a model consists of (LLaVA's tower and decoder)."""
    return [value for value in model.values() if isinstance(value, dict) and "num_layers" in value]


def _shrink_part(part: dict[str, Any], divisors: Divisors) -> None:
    shared = {key: part[key] for key in SHARED_WITH_PARTS if key in part}
    _shrink_model(part, divisors)
    part |= shared | {"num_layers": min(part["num_layers"], 2 * divisors.stages)}


def _shrink_experts(model: dict[str, Any], divisors: Divisors, same_rounds: bool) -> None:
    """Few and narrow experts. The routing options stay: groups, shared experts."""
    moe = model["moe"]
    experts = math.lcm(FEW_EXPERTS, divisors.experts)
    if moe["num_experts"] > experts or moe["num_experts"] % divisors.experts:
        moe["num_experts"] = experts
        moe["moe_router_topk"] = min(moe.get("moe_router_topk", 2), 2)
        if moe.get("moe_router_num_groups"):
            # Two of four groups, of two experts or more each.
            moe |= {"moe_router_num_groups": 4, "moe_router_group_topk": 2}
            if moe.get("moe_router_group_score_topk"):
                moe["moe_router_group_score_topk"] = min(moe["moe_router_group_score_topk"], 2)
    narrow = 16 * divisors.tensor
    for key in ("moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "moe_latent_size"):
        if moe.get(key):
            moe[key] = narrow
    if not (same_rounds and _same_by_rounds(moe, divisors)):
        _replace_global_loss(moe)
    if moe.get("moe_router_hash_layers"):
        moe["moe_router_hash_layers"] = 1
    if isinstance(frequency := moe.get("moe_layer_freq"), str | list):
        sparse = [bool(entry) for entry in parse_pattern(str(frequency), MOE_LAYER_FREQ)]
        moe["moe_layer_freq"] = pattern_of(_fewer_layers(sparse, model["num_layers"]))


def _fewer_layers(sparse: list[bool], num_layers: int) -> list[bool]:
    """For each of a few layers whether it has experts: one dense layer at the beginning where dense layers come first;
    else layers that follow one another in the model, with a dense one behind one with experts and most changes of
    kind."""
    if sparse == sorted(sparse):
        return [layer >= int(not all(sparse)) for layer in range(num_layers)]
    longer = sparse + sparse[-1:] * (num_layers - len(sparse))
    rows = [longer[first : first + num_layers] for first in range(len(longer) - num_layers + 1)]
    return max(rows, key=lambda row: (row != sorted(row), sum(a != b for a, b in pairwise(row))))


def _replace_global_loss(moe: dict[str, Any]) -> None:
    losses = list(moe.get("moe_router_load_balancing_type") or ["aux_loss"])
    if GLOBAL_LOSS in losses and LOCAL_LOSS in losses:  # which may not be named twice
        place = losses.index(GLOBAL_LOSS)
        del losses[place]
        if moe.get("moe_aux_loss_coeff"):
            moe["moe_aux_loss_coeff"] = [*moe["moe_aux_loss_coeff"][:place], *moe["moe_aux_loss_coeff"][place + 1 :]]
    moe["moe_router_load_balancing_type"] = [LOCAL_LOSS if loss == GLOBAL_LOSS else loss for loss in losses]


def has_global_loss(model: Mapping[str, Any]) -> bool:
    """Whether routers have the balance loss that counts the rounds of micro-batches of a step so far."""
    return GLOBAL_LOSS in ((model.get("moe") or {}).get("moe_router_load_balancing_type") or [])


def _same_by_rounds(moe: Mapping[str, Any], divisors: Divisors) -> bool:
    """Whether global_aux_loss is the same in all layouts whose rounds of micro-batches have the same samples: not where
    stages begin a round before the one before is done, nor beside what depends on the size of a micro-batch."""
    losses = set(moe.get("moe_router_load_balancing_type") or [])
    return (
        GLOBAL_LOSS in losses
        and losses <= {GLOBAL_LOSS, "seq_aux_loss"}
        and moe.get("moe_expert_capacity_factor") is None
        and divisors.stages == 1
    )


def draws_completions(config: Config, host: PluginHost) -> bool:
    """Prompts of the user's stay whole, and completions are appended to them. Rows are only as long as needed."""
    spec = host[DATASETS].get(config.data.dataset_type, key="data.dataset_type")
    return "prompt" in {field.name for field in spec.sample}


def holds_whole_records(config: Config, host: PluginHost) -> bool:
    """Records of the user's that are compared with one another: an answer that is cut is another answer."""
    spec = host[DATASETS].get(config.data.dataset_type, key="data.dataset_type")
    fields = {field.name for field in spec.sample}
    return spec.sample != CAUSAL_LM_SAMPLE and "segment_ids" in fields and "images" not in fields


def _short_length(tree: Tree, divisors: Divisors) -> int:
    """Length of samples: a few tokens for each rank that shares a sequence."""
    unit = 2 * divisors.sequence
    # 2 cp zig-zag chunks, each of which tp ranks divide.
    return int(max(unit, min(tree["data"]["seq_length"], 16) // unit * unit))


def _replace_data(tree: Tree, length: int, config: Config, host: PluginHost) -> None:
    """Fake samples, or those of a family's own data set, whose keys follow the model's where both have them."""
    data = tree["data"]
    data |= {key: value for key, value in tree["model"].items() if key in data}
    spec = host[DATASETS].get(config.data.dataset_type, key="data.dataset_type")
    if spec.sample == CAUSAL_LM_SAMPLE:
        # Options that change positions, masks and losses of samples.
        kept = {key: data[key] for key in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss", "read_by")}
        tree["data"] = {"dataset_type": "mock", "split": FEW_DOCUMENTS, **kept}
        tree["tokenizer"] = {"tokenizer_type": "ByteLevelTokenizer"}
    elif {"images", "tokens"} <= {field.name for field in spec.sample}:
        tree["data"] = _fake_images(tree, length, config.model.family, host)
        tree["tokenizer"] = {"tokenizer_type": "ByteLevelTokenizer"}
    elif "vocab_size" in tree["model"]:
        # Its tokenizer's ids have to stay below. Tokens that a model draws have to be the tokenizer's.
        size = build_tokenizer(config, host).vocab_size
        tree["model"]["vocab_size"] = size if draws_completions(config, host) else _undivided(max(VOCAB, size))
    tree["data"]["seq_length"] = length
    if tree["data"].get("decoder_seq_length"):
        tree["data"]["decoder_seq_length"] = min(tree["data"]["decoder_seq_length"], length)
    for key in ("max_position_embeddings", "max_sequence_length"):
        if tree["model"].get(key):
            tree["model"][key] = max(length, 32)


def _fake_images(tree: Tree, length: int, family: str, host: PluginHost) -> dict[str, Any]:
    """Keys of the data set of fake images with texts. Images of sizes of their own fill a half of a sample at most."""
    config: Any = host[MODELS].get(family, key="model.family").config_type.load()
    wanted = config.model_validate(tree["model"]).image_data_keys
    names = (
        *("img_h", "img_w", "image_token_index", "image_seq_length", "dynamic_resolution"),
        *("audio_token_index", "audio_rule"),
    )
    keys = {"dataset_type": FAKE_IMAGE_TEXTS} | {name: wanted[name] for name in names if name in wanted}
    if keys.get("dynamic_resolution"):
        pixels = keys["img_h"] * keys["img_w"]
        keys |= {"min_pixels": pixels, "max_pixels": length // 2 * pixels}
    return keys


def _shrink_sections(tree: Tree, host: PluginHost) -> None:
    """Sections of other distributions, last: what they see is the small configuration."""
    for spec in host[SECTIONS]:
        if spec.name in tree and spec.shrink is not None:
            tree[spec.name] = dict(spec.shrink.load()(tree[spec.name], tree))


def _undivided(size: int) -> int:
    """The next size that is not divisible by any number of ranks."""
    return next(number for number in count(size) if math.gcd(number, math.factorial(LARGEST_WORLD)) == 1)


def _compute_on_cpu(tree: Tree, dtype: str) -> None:
    """Without GPU-only options, and by default in fp32, where the order of summation changes little."""
    tree["train"].update(device="cpu", compile="none", cuda_graphs="none", deferred_metrics="never")
    tree["kernels"] = {}
    tree["parallel"] |= {"nccl_communicators": {}, "pipeline_backward_communicator": None, "nccl_ub": False}
    tree["parallel"]["tp_comm_overlap"] = False
    # Only rules that the configuration has for this format are kept; keys of others would be refused.
    kept = {key: tree["precision"][key] for key in KEPT_PRECISION[dtype] if tree["precision"]["dtype"] == dtype}
    tree["precision"] = {"dtype": dtype, **kept, **SMALL_SCALE.get(dtype, {})}
    model, optimizer = tree["model"], tree["optimizer"]
    if model.get("attention_backend", "auto") not in ON_EVERY_DEVICE:
        model["attention_backend"] = ON_EVERY_DEVICE[-1]  # eager
    model |= {key: "torch" for key in ("linear_attention_backend", "mamba_scan_backend") if key in model}
    # The other values store remainders of bf16 weights, or round moments stochastically.
    optimizer |= {key: value for key, value in FULL_STATE.items() if key in optimizer}
