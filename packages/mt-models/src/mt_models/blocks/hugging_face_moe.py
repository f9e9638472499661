"""Names and fields of MoE layers in Hugging Face's format.

Published files hold one tensor per expert, and that is what is exported. transformers 5 stacks them in memory, gate
rows first as here; files saved in that form are imported too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mt_core.config_map import Fixed
from mt_core.errors import CheckpointError, ConfigError
from mt_core.name_map import Concatenate, Rule, Same
from mt_models.blocks.config import DecoderConfig
from mt_models.blocks.hugging_face_decoder import OURS, THEIRS, feed_forward_rules
from mt_models.blocks.moe import MoEOptions


@dataclass(frozen=True)
class StackedExperts(Rule):
    """One tensor per expert (or several, concatenated) in Hugging Face's format; one with a leading expert axis here.

    theirs: all those of expert 0, then those of expert 1, and so on.
    """

    experts: int = 1

    def import_value(self, tensors: Sequence[Tensor]) -> Tensor:
        # 1 (down) or 2 (gate, then up) tensors for each expert -> [experts, rows of all parts, in]
        # In one step: experts that were joined first would be in memory a third time.
        return torch.cat(list(tensors)).unflatten(0, (self.experts, -1))

    def export_value(self, tensor: Tensor) -> Sequence[Tensor]:
        parts = len(self.sources) // self.experts
        return [part.contiguous() for expert in tensor for part in expert.chunk(parts)]


@dataclass(frozen=True)
class RouterWithoutBias(Rule):
    """The router's matrix. Sigmoid routers of transformers always have an expert bias, which is exported as zeros."""

    def import_value(self, tensors: Sequence[Tensor]) -> Tensor:
        weight, bias = tensors
        # Meta tensors carry shapes only: a plan of a conversion reads no values.
        if not bias.is_meta and bias.count_nonzero():
            raise CheckpointError(
                f"{self.sources[1]} is not zero, but {BIAS_KEY} in config.json is false; set it to true"
            )
        return weight

    def export_value(self, tensor: Tensor) -> Sequence[Tensor]:
        return [tensor, torch.zeros(tensor.shape[0], device=tensor.device)]


@dataclass(frozen=True)
class ExpertNames:
    """Names within a layer; {e} is the expert's number. gate: empty for experts without a gate, whose `stacked_gate_up`
    holds the rows of `up`."""

    router: str = "mlp.gate.weight"
    gate: str = "mlp.experts.{e}.gate_proj.weight"
    up: str = "mlp.experts.{e}.up_proj.weight"
    down: str = "mlp.experts.{e}.down_proj.weight"
    shared: str = "mlp.shared_experts"
    shared_gate: str = "mlp.shared_expert_gate.weight"
    latent_down: str = "mlp.fc1_latent_proj.weight"
    latent_up: str = "mlp.fc2_latent_proj.weight"
    expert_bias: str = "mlp.gate.e_score_correction_bias"
    stacked_router: str = "mlp.gate.weight"
    stacked_gate_up: str = "mlp.experts.gate_up_proj"
    stacked_down: str = "mlp.experts.down_proj"


def expert_rules(
    moe: MoEOptions, names: ExpertNames, *, ours: str = OURS, theirs: str = THEIRS, always_biased: bool = False
) -> list[Rule]:
    """The rules of an MoE layer. ours, theirs: prefixes of the names of a layer. always_biased: the format has an
    expert bias even if the model has none."""
    experts = range(moe.num_experts)
    # gate of expert 0, up of expert 0, gate of expert 1, ...: the order in which StackedExperts takes them
    first = (names.gate, names.up) if names.gate else (names.up,)
    halves = [f"{theirs}{name}".replace("{e}", str(e)) for e in experts for name in first]
    downs = [f"{theirs}{names.down}".replace("{e}", str(e)) for e in experts]
    router, fc1, fc2 = (f"{ours}mlp.{name}.weight" for name in ("router", "experts.linear_fc1", "experts.linear_fc2"))

    def in_memory(ours: str, name: str) -> tuple[Rule, ...]:
        return (Same(ours, f"{theirs}{name}"),)

    rules: list[Rule] = [
        # Written: one tensor for each expert, as published files have it. `others`: what transformers 5 holds in
        # memory, which is [experts, 2 ffn, in] with all gate rows first, the canonical layout.
        Same(router, f"{theirs}{names.router}", others=in_memory(router, names.stacked_router)),
        StackedExperts(fc1, tuple(halves), moe.num_experts, others=in_memory(fc1, names.stacked_gate_up)),
        StackedExperts(fc2, tuple(downs), moe.num_experts, others=in_memory(fc2, names.stacked_down)),
    ]
    if always_biased and not moe["moe_router_enable_expert_bias"]:
        rules[0] = RouterWithoutBias(router, (f"{theirs}{names.router}", f"{theirs}{names.expert_bias}"))
    if moe["moe_router_enable_expert_bias"]:
        rules.append(Same(f"{ours}mlp.router.expert_bias", f"{theirs}{names.expert_bias}"))
    if moe.shared_size is not None:
        shared = tuple(f"{theirs}{names.shared}.{half}_proj.weight" for half in ("gate", "up")[not names.gate :])
        rules.append(Concatenate(f"{ours}mlp.shared_experts.linear_fc1.weight", shared))
        rules.append(Same(f"{ours}mlp.shared_experts.linear_fc2.weight", f"{theirs}{names.shared}.down_proj.weight"))
    if moe["moe_shared_expert_gate"]:
        rules.append(Same(f"{ours}mlp.shared_experts.gate_weight", f"{theirs}{names.shared_gate}"))
    if moe["moe_latent_size"] is not None:
        rules.append(Same(f"{ours}mlp.fc1_latent_proj.weight", f"{theirs}{names.latent_down}"))
        rules.append(Same(f"{ours}mlp.fc2_latent_proj.weight", f"{theirs}{names.latent_up}"))
    return rules


def written_packed(rules: list[Rule]) -> list[Rule]:
    """The same rules, with experts written in one tensor instead of one by one. Both forms are read."""
    return [
        replace(rule.others[0], others=(replace(rule, others=()),)) if isinstance(rule, StackedExperts) else rule
        for rule in rules
    ]


def renamed(rule: Rule, prefix: str, instead: str) -> Rule:
    """The rule of a layer under another prefix here, in every form that is read."""
    others = tuple(renamed(other, prefix, instead) for other in rule.others)
    return replace(rule, ours=instead + rule.ours.removeprefix(prefix), others=others)


def mixed_feed_forward_rules(config: DecoderConfig, names: ExpertNames, *, always_biased: bool = False) -> list[Rule]:
    """The feed-forwards of all layers, MoE or dense, one by one. always_biased: see expert_rules."""
    moe = MoEOptions(config)
    # Rules name a layer `{i}`; which kind a layer has depends on its number, so that they are expanded here.
    sparse, dense = expert_rules(moe, names, always_biased=always_biased), feed_forward_rules()
    return [
        rule.for_layer(number)
        for number, has_experts in enumerate(moe.layers)
        for rule in (sparse if has_experts else dense)
    ]


# -- configuration ---------------------------------------------------------------------------------

BIAS_KEY = "moe_router_enable_expert_bias"
"""A key in config.json: false if the expert bias is zeros that the model does not have. Only mt reads it."""


def import_bias(external: Mapping[str, Any]) -> dict[str, bool]:
    """Options of model.moe for a router with sigmoid scores."""
    return {"moe_router_enable_expert_bias": bool(external.get(BIAS_KEY, True))}


def export_bias(moe: MoEOptions) -> dict[str, bool]:
    return {} if moe["moe_router_enable_expert_bias"] else {BIAS_KEY: False}


def require_normalized(external: Mapping[str, Any]) -> None:
    """Sigmoid scores are normalized over the chosen experts if there are several, as Megatron does.

    Raises ConfigError for a norm_topk_prob that says something else.
    """
    several = external["num_experts_per_tok"] > 1
    if bool(external.get("norm_topk_prob", True)) != several:
        raise ConfigError(
            f"norm_topk_prob={external.get('norm_topk_prob', True)} is not supported; it can be {several}, since "
            f"num_experts_per_tok={external['num_experts_per_tok']}"
        )


def import_groups(external: Mapping[str, Any], score_topk: int) -> dict[str, int]:
    if external.get("n_group") in (None, 1):
        if external.get("topk_group") not in (None, 1):
            raise ConfigError(f"topk_group={external['topk_group']} is not supported with n_group=1; it can be 1")
        return {}
    return {
        "moe_router_num_groups": external["n_group"],
        "moe_router_group_topk": external["topk_group"],
        "moe_router_group_score_topk": score_topk,
    }


def group_scores(moe: MoEOptions, fixed: int) -> tuple[int | None, ...]:
    """Values of moe_router_group_score_topk equivalent to the number that the class has fixed, or to no groups."""
    if moe["moe_router_num_groups"] is None:
        return (None,)
    # Megatron's default: a group's score is the sum of its topk / group_topk highest.
    # Unset is right where that is the number in the class.
    by_default = moe["moe_router_topk"] // moe["moe_router_group_topk"]
    return (fixed, None) if by_default == fixed else (fixed,)


def shared_experts(moe: MoEOptions, kind: str) -> int:
    """Width of the shared expert over that of a routed one. Raises ConfigError unless it is a whole number."""
    shared, uneven = divmod(moe.shared_size or 0, moe.ffn_size)
    if uneven or not shared:
        raise ConfigError(
            f"model.moe.moe_shared_expert_intermediate_size={moe.shared_size} cannot be written as a Hugging Face "
            f"{kind}; it can be a multiple of the experts' width {moe.ffn_size}"
        )
    return shared


def first_dense(moe: MoEOptions, kind: str) -> int:
    """Number of dense layers before the MoE layers. Raises ConfigError for dense layers elsewhere."""
    if moe.first_dense is None:
        raise ConfigError(
            f"model.moe.moe_layer_freq={moe['moe_layer_freq']} cannot be written as a Hugging Face {kind}, whose "
            "dense layers come first"
        )
    return moe.first_dense


MOE_IGNORED = {
    "output_router_logits": "makes the Python class return its logits; training adds the losses of model.moe",
}
"""For ConfigMap.ignored."""
SILU = Fixed("hidden_act", ("silu", "swish"))


def import_balance(external: Mapping[str, Any], default: float) -> dict[str, Any]:
    """Options of model.moe for `router_aux_loss_coef`."""
    coefficient = float(external.get("router_aux_loss_coef", default) or 0.0)
    return {"moe_router_load_balancing_type": ["aux_loss"], "moe_aux_loss_coeff": [coefficient]}


def import_softmax_balance(external: Mapping[str, Any], default: float) -> dict[str, Any]:
    """The same for a class whose routers take sigmoids of logits, and whose loss takes their softmax."""
    return {**import_balance(external, default), "moe_aux_loss_score_function": "softmax"}


def export_balance(moe: MoEOptions) -> dict[str, float]:
    """`router_aux_loss_coef` from the coefficient of aux_loss; 0 when there is none. Raises ConfigError unless each
    loss has a coefficient."""
    # Coefficients belong to the kinds of losses in order; the field there means aux_loss alone.
    types = moe.options.get("moe_router_load_balancing_type", ["aux_loss"])
    losses = [name for name in types if name.endswith("loss")]
    coefficients = moe.options.get("moe_aux_loss_coeff") or [0.01] * len(losses)
    if len(coefficients) != len(losses):
        raise ConfigError(
            f"model.moe.moe_aux_loss_coeff={coefficients} has {len(coefficients)} values, and "
            f"model.moe.moe_router_load_balancing_type={types} has {len(losses)} losses; give one value for each loss"
        )
    return {"router_aux_loss_coef": dict(zip(losses, coefficients, strict=True)).get("aux_loss", 0.0)}
