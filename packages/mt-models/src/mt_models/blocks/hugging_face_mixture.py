"""Names and fields of mixtures of experts in Hugging Face's format.

Published files hold a tensor for each expert, and that is what is written. transformers 5 stacks them in memory, gate
rows first as here; files that were saved so are read too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mt_core.config_map import Fixed
from mt_core.name_map import Concatenate, Rule, Same
from mt_models.blocks.decoder_config import DecoderConfig
from mt_models.blocks.hugging_face_decoder import OURS, THEIRS, feed_forward_rules
from mt_models.blocks.mixture import Mixture


@dataclass(frozen=True)
class StackedExperts(Rule):
    """A tensor for each expert there, or several that are laid end to end; one with a leading axis of experts here.

    theirs: all those of expert 0, then those of expert 1, and so on.
    """

    experts: int = 1

    def to_ours(self, tensors: Sequence[Tensor]) -> Tensor:
        parts = len(tensors) // self.experts
        return torch.stack([torch.cat(list(tensors[i : i + parts])) for i in range(0, len(tensors), parts)])

    def to_theirs(self, tensor: Tensor) -> Sequence[Tensor]:
        parts = len(self.sources) // self.experts
        return [part.contiguous() for expert in tensor for part in expert.chunk(parts)]


@dataclass(frozen=True)
class ExpertNames:
    """Names within a layer; {e} stands for an expert."""

    router: str = "mlp.gate.weight"
    gate: str = "mlp.experts.{e}.gate_proj.weight"
    up: str = "mlp.experts.{e}.up_proj.weight"
    down: str = "mlp.experts.{e}.down_proj.weight"
    shared: str = "mlp.shared_experts"
    shared_gate: str = "mlp.shared_expert_gate.weight"
    expert_bias: str = "mlp.gate.e_score_correction_bias"
    stacked_router: str = "mlp.gate.weight"
    stacked_gate_up: str = "mlp.experts.gate_up_proj"
    stacked_down: str = "mlp.experts.down_proj"


def expert_rules(mixture: Mixture, names: ExpertNames, *, ours: str = OURS, theirs: str = THEIRS) -> list[Rule]:
    """The rules of a layer that is a mixture. ours, theirs: what stands before the names of a layer."""
    experts = range(mixture.num_experts)
    halves = [f"{theirs}{name}".replace("{e}", str(e)) for e in experts for name in (names.gate, names.up)]
    downs = [f"{theirs}{names.down}".replace("{e}", str(e)) for e in experts]
    router, fc1, fc2 = (f"{ours}mlp.{name}.weight" for name in ("router", "experts.linear_fc1", "experts.linear_fc2"))

    def in_memory(ours: str, name: str) -> tuple[Rule, ...]:
        return (Same(ours, f"{theirs}{name}"),)

    rules: list[Rule] = [
        Same(router, f"{theirs}{names.router}", others=in_memory(router, names.stacked_router)),
        StackedExperts(fc1, tuple(halves), mixture.num_experts, others=in_memory(fc1, names.stacked_gate_up)),
        StackedExperts(fc2, tuple(downs), mixture.num_experts, others=in_memory(fc2, names.stacked_down)),
    ]
    if mixture["moe_router_enable_expert_bias"]:
        rules.append(Same(f"{ours}mlp.router.expert_bias", f"{theirs}{names.expert_bias}"))
    if mixture.shared_size is not None:
        shared = tuple(f"{theirs}{names.shared}.{half}_proj.weight" for half in ("gate", "up"))
        rules.append(Concatenate(f"{ours}mlp.shared_experts.linear_fc1.weight", shared))
        rules.append(Same(f"{ours}mlp.shared_experts.linear_fc2.weight", f"{theirs}{names.shared}.down_proj.weight"))
    if mixture["moe_shared_expert_gate"]:
        rules.append(Same(f"{ours}mlp.shared_experts.gate_weight", f"{theirs}{names.shared_gate}"))
    return rules


def mixed_feed_forward_rules(config: DecoderConfig, names: ExpertNames) -> list[Rule]:
    """The feed-forwards of all layers, mixtures or dense, each layer's written out."""
    mixture = Mixture(config)
    sparse, dense = expert_rules(mixture, names), feed_forward_rules()
    return [
        rule.for_layer(number)
        for number, has_experts in enumerate(mixture.layers)
        for rule in (sparse if has_experts else dense)
    ]


# -- configuration ---------------------------------------------------------------------------------

MIXTURE_IGNORED = {
    "output_router_logits": "asks the Python class for its logits; training adds the losses of model.moe",
    **dict.fromkeys(
        ("experts_implementation", "_experts_implementation"),
        "which kernel multiplied the experts' matrices; model.moe.moe_grouped_gemm chooses one",
    ),
}
"""For ConfigMap.ignored."""
SILU = Fixed("hidden_act", ("silu", "swish"))


def balance_to_ours(external: Mapping[str, Any], default: float) -> dict[str, Any]:
    """Options of model.moe for `router_aux_loss_coef`."""
    coefficient = float(external.get("router_aux_loss_coef", default) or 0.0)
    return {"moe_router_load_balancing_type": ["aux_loss"], "moe_aux_loss_coeff": [coefficient]}


def balance_to_theirs(mixture: Mixture) -> dict[str, float]:
    """`router_aux_loss_coef` from the coefficient of aux_loss; 0 when there is none."""
    losses = [x for x in mixture.options.get("moe_router_load_balancing_type", ["aux_loss"]) if x.endswith("loss")]
    coefficients = mixture.options.get("moe_aux_loss_coeff") or [0.01] * len(losses)
    return {"router_aux_loss_coef": dict(zip(losses, coefficients, strict=True)).get("aux_loss", 0.0)}
