"""What families read of `model.moe`: which layers are MoE, and the sizes that names and FLOPs depend on.

The MoE layer is the feed-forward "moe" of another distribution, which validates and uses the options. Here are those
that change the weights or their meaning, with the same defaults. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from mt_core.config.layer_pattern import layers_with_experts, pattern_of
from mt_core.errors import ConfigError

DEFAULTS: Mapping[str, Any] = {
    "moe_layer_freq": 1,
    "moe_num_zero_experts": 0,
    "moe_ffn_hidden_size": None,
    "moe_latent_size": None,
    "moe_router_topk": 2,
    "moe_router_score_function": "softmax",
    "moe_router_pre_softmax": False,
    "moe_router_num_groups": None,
    "moe_router_group_topk": None,
    "moe_router_group_score_topk": None,
    "moe_router_topk_scaling_factor": None,
    "moe_router_weight_epsilon": 1e-20,
    "moe_router_expert_scale": False,
    "moe_apply_probs_on_input": False,
    "moe_router_enable_expert_bias": False,
    "moe_router_bias": None,
    "moe_router_hash_layers": 0,
    "moe_shared_expert_intermediate_size": None,
    "moe_shared_expert_gate": False,
}
"""Options that change what a model computes, with their defaults. num_experts has none."""


class MoEConfigLike(Protocol):
    """What is read from the configuration of a model."""

    @property
    def num_layers(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def ffn_size(self) -> int: ...
    @property
    def moe(self) -> dict[str, Any] | None: ...


class MoEOptions:
    """`model.moe` of a family with MoE layers, as attributes. Raises ConfigError if it is not set."""

    def __init__(self, config: MoEConfigLike) -> None:
        if config.moe is None or "num_experts" not in config.moe:
            raise ConfigError("model.moe.num_experts is not set; the layers of this family are mixtures of experts")
        self.options: Mapping[str, Any] = {**DEFAULTS, **config.moe}
        self.num_experts: int = self.options["num_experts"]
        self.topk: int = self.options["moe_router_topk"]
        self.ffn_size: int = self.options["moe_ffn_hidden_size"] or config.ffn_size
        self.shared_size: int | None = self.options["moe_shared_expert_intermediate_size"]
        # [num_layers] bool: which layers are MoE
        self.layers = layers_with_experts(self.options["moe_layer_freq"], config.num_layers)

    def __getitem__(self, key: str) -> Any:
        """An option, or its default."""
        return self.options[key]

    @property
    def first_dense(self) -> int | None:
        """Number of dense layers before the first MoE layer; None: dense layers occur elsewhere too."""
        first = self.layers.index(True) if True in self.layers else len(self.layers)
        return first if all(self.layers[first:]) else None

    def require(self, architecture: str, **allowed: tuple[Any, ...]) -> None:
        """Raise ConfigError unless options that a format cannot express are at their defaults.

        allowed: option -> the values that the format can express; none: any.
        """
        for key, default in DEFAULTS.items():
            # An option that a format does not mention can only have its default, so that no option is lost silently.
            legal = allowed.get(key, (default,))
            if legal and self.options[key] not in legal:
                raise ConfigError(
                    f"model.moe.{key}={self.options[key]} cannot be written as a Hugging Face {architecture}; "
                    f"it can be {' or '.join(str(value) for value in legal)}"
                )


ANY: tuple[Any, ...] = ()
"""For MoEOptions.require: every value can be expressed."""


def frequency_of(layers: list[bool]) -> int | str:
    """`moe_layer_freq` for these layers: 1 if all are MoE, else runs such as "([0]*3+[1]*58)"."""
    return 1 if all(layers) else pattern_of(layers)
