"""Configuration of Ling 3.0, and its published sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, PrivateAttr

from mt_core.config.schema import Activation, Config
from mt_core.errors import ConfigError
from mt_models.blocks.moe import MoEOptions
from mt_models.kimi_linear.config import KimiLinearConfig, check_kimi_layers, shrink_kimi_linear

Limit = Annotated[float, Field(ge=0)]


class BailingHybridConfig(KimiLinearConfig):
    """Ling 3.0 Flash and Ling 3.0 Tiny (inclusionAI, 2026)."""

    predicts: ClassVar[bool] = True
    linear_decay_lower_bound: Annotated[float, Field(lt=0)] | None = None
    """The least logarithm of a decay, which is this times a sigmoid. Default: decays are not bounded, and their
    logarithm is a scaled softplus."""
    expert_swiglu_limits: list[Limit] | None = None
    """For each layer the largest value of an expert's activated gate, and the largest magnitude of what it multiplies;
    0: none. Default: none in any layer."""
    shared_expert_swiglu_limits: list[Limit] | None = None
    """The same of the shared expert of each layer."""

    _layer: int | None = PrivateAttr(default=None)
    """The layer whose feed-forward is described: see `of_layer`."""

    def rotates(self, layer: int) -> bool:
        return not self.linear_layers[layer]

    def with_predicted_layers(self) -> Self:
        counted = super().with_predicted_layers()
        # Layers of multi-token prediction have no limits.
        none = [0.0] * self.mtp_num_layers
        lists = {key: limits + none for key in LIMITS if (limits := getattr(self, key)) is not None}
        return counted.model_copy(update=lists)

    def of_layer(self, layer: int) -> Self:
        """The same for the feed-forward of one layer, whose limits its activations have."""
        described = self.model_copy()
        described._layer = layer
        return described

    @property
    def activation(self) -> Activation:  # type: ignore[override]
        return _limited(self.expert_swiglu_limits, self._layer)

    @property
    def shared_expert_activation(self) -> Activation:
        return _limited(self.shared_expert_swiglu_limits, self._layer)


def _limited(limits: list[float] | None, layer: int | None) -> Any:
    limit = 0.0 if limits is None or layer is None else limits[layer]
    return f"capped_swiglu:{limit}" if limit else "swiglu"


LIMITS = ("expert_swiglu_limits", "shared_expert_swiglu_limits")


def check_bailing_hybrid(config: Config) -> None:
    check_kimi_layers(config)
    model = config.model
    assert isinstance(model, BailingHybridConfig)
    for key in LIMITS:
        _check_limits(model, key)


def _check_limits(model: BailingHybridConfig, key: str) -> None:
    limits: list[float] | None = getattr(model, key)
    if limits is None:
        return
    if len(limits) != model.num_layers:
        raise ConfigError(
            f"model.{key} has {len(limits)} values; it needs one for each of the model.num_layers={model.num_layers}"
        )
    sparse = [False] * model.num_layers if model.moe is None else MoEOptions(model).layers
    dense = [layer for layer, limit in enumerate(limits) if limit and not sparse[layer]]
    if dense:
        raise ConfigError(f"model.{key} limits layers {dense}, which have no experts; it can be 0 there")


def shrink_bailing_hybrid(model: Mapping[str, Any], seq_length: int) -> dict[str, Any]:
    """Both kinds of layers stay."""
    return {**shrink_kimi_linear(model, seq_length), **dict.fromkeys(LIMITS)}


# -- published sizes -----------------------------------------------------------------------------------


def _ling(
    layers: int, hidden: int, heads: int, ffn: int, dense: int, moe: dict[str, Any], **keys: Any
) -> dict[str, Any]:
    return {
        "model": {
            "num_layers": layers,
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "ffn_hidden_size": ffn,
            "vocab_size": 157184,
            "rotary_base": 6000000.0,
            "linear_decay_lower_bound": -5.0,
            "linear_num_key_heads": heads,
            "linear_num_value_heads": heads,
            "moe": {
                "moe_router_topk": 8,
                "moe_router_score_function": "sigmoid",
                "moe_router_enable_expert_bias": True,
                "moe_router_num_groups": 8,
                "moe_router_group_topk": 4,
                "moe_router_group_score_topk": 2,
                "moe_router_topk_scaling_factor": 2.5,
                "moe_router_load_balancing_type": ["seq_aux_loss"],
                "moe_aux_loss_coeff": [0.0001],
                "moe_layer_freq": f"([0]*{dense}+[1]*{layers - dense})",
                **moe,
            },
            **keys,
        },
        "data": {"seq_length": 4096},
    }


def _experts(count: int, width: int) -> dict[str, Any]:
    return {"num_experts": count, "moe_ffn_hidden_size": width, "moe_shared_expert_intermediate_size": width}


PRESETS: dict[str, dict[str, Any]] = {
    "ling-3.0-flash": _ling(
        42,
        2560,
        32,
        6144,
        2,
        _experts(512, 768),
        max_position_embeddings=262144,
        linear_attention_freq=6,
        mtp_num_layers=1,
        expert_swiglu_limits=[0.0] * 35 + [4.0] * 7,
        shared_expert_swiglu_limits=[0.0] * 34 + [5.0] * 6 + [7.0] * 2,
    ),
    "ling-3.0-tiny": _ling(24, 1536, 16, 4608, 1, _experts(128, 512), max_position_embeddings=131072, q_lora_rank=256),
}
