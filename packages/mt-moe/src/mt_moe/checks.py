"""Rules that `model.moe`, the model and the layout have to satisfy before anything is built. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mt_core.config.checks import divisors, listed, must_divide
from mt_core.config.layer_pattern import layers_with_experts
from mt_core.errors import ConfigError
from mt_core.specs import MOE_DISPATCHERS
from mt_moe.config import MoeConfig, read_moe_config
from mt_moe.dispatchers.config import OPTIONS, ExchangeConfig, FlexConfig, check_flex, read_options

if TYPE_CHECKING:
    from mt_core.config.schema import Config
    from mt_core.plugins import PluginHost

PREFIX = "model.moe"
MOST_IN_A_TABLE = 513
"""Experts whose numbers a table by token has exactly in bf16 (`mt_moe.routing.selection.TABLE_OFFSET`)."""


def check_moe(config: Config, host: PluginHost) -> None:
    """Raise ConfigError for an invalid MoE configuration."""
    values: Mapping[str, Any] = config.model.moe  # type: ignore[attr-defined]  # the caller saw that it is there
    moe = read_moe_config(values)
    _refuse_unused(moe)
    if not any(layers_with_experts(moe.moe_layer_freq, config.model.num_layers)):  # type: ignore[attr-defined]
        raise ConfigError(
            f"{PREFIX}.moe_layer_freq={moe.moe_layer_freq!r} gives no layer experts; remove {PREFIX}, or write a 1 for "
            "each layer that has them"
        )
    check_router(moe)
    check_balancing(moe)
    check_capacity(moe)
    check_shared_experts(moe)
    check_layout(moe, config)
    check_dispatcher(moe, config, host)


def check_dispatcher(moe: MoeConfig, config: Config, host: PluginHost) -> None:
    """The dispatcher is registered, and accepts its options."""
    name = moe.moe_token_dispatcher_type
    spec = host[MOE_DISPATCHERS].get(name, key=f"{PREFIX}.moe_token_dispatcher_type")
    options = read_options(spec.config_type.load(), moe.moe_dispatcher_options)
    if isinstance(options, FlexConfig):
        check_flex(moe, options)
    if isinstance(options, ExchangeConfig):
        check_rank_capacity(moe, options, config)
        check_static_shape(options, config)


def check_static_shape(options: ExchangeConfig, config: Config) -> None:
    """Ranks that communicate have equally many tokens. Without sequence parallelism tensor-parallel ranks have slices
    of one micro-batch."""
    parallel = config.parallel
    tp = parallel.tensor_model_parallel_size
    expert_tp = parallel.expert_tensor_parallel_size or tp
    communicates = parallel.expert_model_parallel_size > 1 or expert_tp > 1
    if not options.static_shape or not communicates or parallel.sequence_parallel:
        return
    tokens = config.train.micro_batch_size * config.data.seq_length // parallel.context_parallel_size
    if tokens % tp:
        raise ConfigError(
            f"{OPTIONS}.static_shape=true needs equally many tokens on every rank, and "
            f"parallel.tensor_model_parallel_size={tp} does not divide the {tokens} of a micro-batch "
            f"(train.micro_batch_size={config.train.micro_batch_size}, data.seq_length={config.data.seq_length}, "
            f"parallel.context_parallel_size={parallel.context_parallel_size}); change one of them, or leave "
            "static_shape out"
        )


def check_rank_capacity(moe: MoeConfig, options: ExchangeConfig, config: Config) -> None:
    """A bound on rows has an effect, and exceeding it stops the run."""
    key = f"{OPTIONS}.expert_rank_capacity_factor"
    if options.expert_rank_capacity_factor is None:
        return
    if not options.static_shape:
        raise ConfigError(
            f"{key} would be ignored: ranks exchange how many rows there are; set {OPTIONS}.static_shape=true"
        )
    if moe.moe_pad_expert_input_to_capacity:
        raise ConfigError(
            f"{key} would be ignored: {PREFIX}.moe_pad_expert_input_to_capacity=true gives every expert equally many "
            "rows; leave one of the two out"
        )
    if config.parallel.expert_model_parallel_size == 1:
        raise ConfigError(
            f"{key} would be ignored: with parallel.expert_model_parallel_size=1 a rank has the rows of all experts; "
            "leave it out, or divide the experts"
        )
    if config.precision.dtype == "fp16":
        raise ConfigError(
            f"{key} is not possible with precision.dtype=fp16, whose loss scale skips steps that exceed it; use bf16"
        )


def _refuse_unused(moe: MoeConfig) -> None:
    """A key that was set but that nothing reads is an error."""
    for key in sorted(moe.model_fields_set):
        field = type(moe).model_fields[key]
        extra: Any = field.json_schema_extra or {}
        conditions = extra.get("used_when", {})
        if getattr(moe, key) == field.default:
            continue
        for other, allowed in conditions.items():
            if getattr(moe, other) not in allowed:
                legal = " or ".join(str(value) for value in allowed)
                raise ConfigError(
                    f"{PREFIX}.{key} would be ignored: it only counts when {PREFIX}.{other} is {legal}, "
                    f"and that is {getattr(moe, other)}"
                )


def check_router(moe: MoeConfig) -> None:
    if moe.moe_router_topk > moe.num_scored:
        further = f" and {PREFIX}.moe_num_zero_experts={moe.moe_num_zero_experts}" if moe.moe_num_zero_experts else ""
        raise ConfigError(
            f"{PREFIX}.moe_router_topk={moe.moe_router_topk} is above {PREFIX}.num_experts={moe.num_experts}{further}; "
            f"a token can have 1 to {moe.num_scored} experts"
        )
    _check_zero_experts(moe)
    after_softmax = moe.moe_router_score_function == "softmax" and not moe.moe_router_pre_softmax
    if moe.moe_router_topk == 1 and after_softmax and not moe.uses_sinkhorn:
        raise ConfigError(
            f"{PREFIX}.moe_router_topk=1 with a softmax over the chosen experts gives every token the weight 1 and the "
            f"router no gradient; set {PREFIX}.moe_router_pre_softmax=true"
        )
    if moe.moe_apply_probs_on_input and moe.moe_router_topk > 1:
        raise ConfigError(
            f"{PREFIX}.moe_apply_probs_on_input is for one expert a token; {PREFIX}.moe_router_topk="
            f"{moe.moe_router_topk} can be 1"
        )
    if moe.moe_router_force_load_balancing and moe.moe_router_random_seed is not None:
        raise ConfigError(
            f"set at most one of {PREFIX}.moe_router_force_load_balancing and {PREFIX}.moe_router_random_seed; "
            "both are set"
        )
    if moe.moe_input_jitter_eps is not None and moe.moe_input_jitter_eps >= 1:
        raise ConfigError(f"{PREFIX}.moe_input_jitter_eps={moe.moe_input_jitter_eps} has to be below 1")
    if moe.moe_router_hash_layers and moe.uses_sinkhorn:
        raise ConfigError(
            f"{PREFIX}.moe_router_hash_layers={moe.moe_router_hash_layers} chooses experts by the ids of tokens, and "
            f"{PREFIX}.moe_router_load_balancing_type=['sinkhorn'] by scores; leave one of the two out"
        )
    _check_groups(moe)
    chosen_otherwise = moe.moe_router_force_load_balancing or moe.moe_router_random_seed is not None
    if chosen_otherwise and moe.moe_router_num_groups is not None:
        key = "moe_router_force_load_balancing" if moe.moe_router_force_load_balancing else "moe_router_random_seed"
        raise ConfigError(f"{PREFIX}.{key} chooses experts without groups; remove {PREFIX}.moe_router_num_groups")


def _check_zero_experts(moe: MoeConfig) -> None:
    """Raise ConfigError for what experts that return the token cannot be combined with."""
    if not moe.moe_num_zero_experts:
        return
    setting = f"{PREFIX}.moe_num_zero_experts={moe.moe_num_zero_experts}"
    excluded = (
        "moe_router_num_groups", "moe_expert_capacity_factor", "moe_router_hash_layers", "moe_latent_size",
        "moe_apply_probs_on_input",
    )  # fmt: skip
    for key in excluded:
        if value := getattr(moe, key):
            raise ConfigError(f"{setting} cannot be combined with {PREFIX}.{key}={value}; leave one of the two out")
    if moe.uses_sinkhorn:
        raise ConfigError(f"{setting} cannot be combined with {PREFIX}.moe_router_load_balancing_type=['sinkhorn']")
    if moe.moe_token_dispatcher_type == "flex":
        raise ConfigError(
            f"{setting} cannot be combined with {PREFIX}.moe_token_dispatcher_type=flex, whose buffers have a column "
            "for each expert with matrices; use alltoall or allgather"
        )


def _check_groups(moe: MoeConfig) -> None:
    groups, chosen = moe.moe_router_num_groups, moe.moe_router_group_topk
    if groups is None and chosen is None:
        if moe.moe_router_group_score_topk is not None:
            raise ConfigError(
                f"{PREFIX}.moe_router_group_score_topk would be ignored: set {PREFIX}.moe_router_num_groups too"
            )
        return
    if groups is None or chosen is None:
        present, missing = ("num_groups", "group_topk") if chosen is None else ("group_topk", "num_groups")
        raise ConfigError(f"{PREFIX}.moe_router_{present} is set; set {PREFIX}.moe_router_{missing} too")
    must_divide(f"{PREFIX}.moe_router_num_groups", groups, f"{PREFIX}.num_experts", moe.num_experts)
    size = moe.num_experts // groups
    if chosen > groups:
        raise ConfigError(
            f"{PREFIX}.moe_router_group_topk={chosen} is above {PREFIX}.moe_router_num_groups={groups}; "
            f"it can be 1 to {groups}"
        )
    if moe.moe_router_topk > chosen * size:
        raise ConfigError(
            f"{PREFIX}.moe_router_topk={moe.moe_router_topk} is above the {chosen * size} experts of "
            f"{PREFIX}.moe_router_group_topk={chosen} groups of {size}; choose fewer experts or more groups"
        )
    if not 1 <= moe.group_score_topk <= size:
        raise ConfigError(
            f"{PREFIX}.moe_router_group_score_topk={moe.group_score_topk} (by default moe_router_topk / "
            f"moe_router_group_topk, rounded down) can be 1 to {size}, the number of experts of a group"
        )


def check_balancing(moe: MoeConfig) -> None:
    types = moe.moe_router_load_balancing_type
    key = f"{PREFIX}.moe_router_load_balancing_type"
    if len(set(types)) < len(types):
        raise ConfigError(f"{key}={types} names a type twice")
    if len(types) > 1 and (alone := [name for name in types if name in ("none", "sinkhorn")]):
        raise ConfigError(f"{key}={types}: {alone[0]} stands alone; losses can be combined with one another")
    coefficients = moe.moe_aux_loss_coeff
    if coefficients is not None and len(coefficients) != len(moe.loss_types):
        raise ConfigError(
            f"{PREFIX}.moe_aux_loss_coeff={coefficients} has {len(coefficients)} values, and {key}={types} has "
            f"{len(moe.loss_types)} losses; give one value for each loss"
        )
    if moe.moe_aux_loss_score_function is not None and not moe.loss_types:
        raise ConfigError(
            f"{PREFIX}.moe_aux_loss_score_function={moe.moe_aux_loss_score_function} would be ignored: {key}={types} "
            "has no loss; leave it out"
        )
    if not moe.uses_sinkhorn:
        return
    excluded = (
        "moe_router_enable_expert_bias",
        "moe_router_num_groups",
        "moe_expert_capacity_factor",
        "moe_router_pre_softmax",
        "moe_router_random_seed",
        "moe_router_force_load_balancing",
    )
    for name in excluded:
        if getattr(moe, name) not in (None, False):
            raise ConfigError(f"{key}=['sinkhorn'] chooses experts by itself and excludes {PREFIX}.{name}")
    if moe.moe_router_score_function != "softmax":
        raise ConfigError(
            f"{key}=['sinkhorn'] has its own score (softmax, or sigmoid for one expert); "
            f"{PREFIX}.moe_router_score_function={moe.moe_router_score_function} would be ignored"
        )


def check_capacity(moe: MoeConfig) -> None:
    if moe.moe_expert_capacity_factor is not None:
        return
    for key in ("moe_pad_expert_input_to_capacity", "moe_token_drop_policy"):
        if key in moe.model_fields_set and getattr(moe, key) != MoeConfig.model_fields[key].default:
            raise ConfigError(
                f"{PREFIX}.{key} would be ignored: nothing is dropped; set {PREFIX}.moe_expert_capacity_factor"
            )


def check_shared_experts(moe: MoeConfig) -> None:
    if moe.moe_shared_expert_intermediate_size is not None:
        return
    for key in ("moe_shared_expert_gate", "moe_shared_expert_overlap"):
        if getattr(moe, key):
            raise ConfigError(
                f"{PREFIX}.{key} would be ignored: there is no shared expert; "
                f"set {PREFIX}.moe_shared_expert_intermediate_size"
            )


def check_layout(moe: MoeConfig, config: Config) -> None:
    """Experts are sharded over expert-parallel ranks, their inner width over expert-tensor-parallel ranks."""
    parallel = config.parallel
    if parallel.use_torch_fsdp2 and moe.moe_router_hash_layers and moe.num_experts > MOST_IN_A_TABLE:
        raise ConfigError(
            f"parallel.use_torch_fsdp2=true casts parameters to precision.dtype, which has no numbers of "
            f"{PREFIX}.num_experts={moe.num_experts} experts for {PREFIX}.moe_router_hash_layers; there can be "
            f"{MOST_IN_A_TABLE}, or shard with parallel.use_distributed_optimizer"
        )
    expert_parallel = parallel.expert_model_parallel_size
    must_divide("parallel.expert_model_parallel_size", expert_parallel, f"{PREFIX}.num_experts", moe.num_experts)
    tensor = parallel.expert_tensor_parallel_size or parallel.tensor_model_parallel_size
    ffn = moe.moe_ffn_hidden_size or config.model.ffn_size  # type: ignore[attr-defined]
    if ffn % tensor:
        raise ConfigError(
            f"parallel.expert_tensor_parallel_size={tensor} does not divide the experts' inner width {ffn} "
            f"({PREFIX}.moe_ffn_hidden_size); it can be {listed(divisors(ffn))}"
        )
    shared = moe.moe_shared_expert_intermediate_size
    if shared is not None and shared % parallel.tensor_model_parallel_size:
        raise ConfigError(
            f"parallel.tensor_model_parallel_size={parallel.tensor_model_parallel_size} does not divide "
            f"{PREFIX}.moe_shared_expert_intermediate_size={shared}; it can be {listed(divisors(shared))}"
        )
