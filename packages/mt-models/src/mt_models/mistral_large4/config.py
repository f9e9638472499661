"""Configuration of Mistral Large 4, the rules between its keys, and its published size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from mt_core.config.fields import NonNegativeInt, PositiveFloat, PositiveInt
from mt_core.config.layer_pattern import read_pattern
from mt_core.config.schema import Config
from mt_core.config_map import MegatronMap
from mt_core.errors import ConfigError
from mt_models.deepseek.config import check_deepseek
from mt_models.deepseek_v32.config import IndexedAttentionConfig, check_indexers, shrink_indexers

NO_ROPE = "model.no_rope_freq"


class MistralLarge4Config(IndexedAttentionConfig):
    """Mistral Large 4 (Mistral AI, 2026), text."""

    no_rope_freq: PositiveInt | str | None = 4
    """Every so many layers one has no rotary positions: layers n - 1, 2 n - 1, ...; or a pattern with a 1 for each
    layer without, such as "([0]*3+[1]*1)*18". null: all layers have them."""
    kv_source_layers: list[NonNegativeInt] | None = None
    """For each layer, counted from 0, the layer whose latents its keys and values come from: itself, or an earlier one
    of its kind (with or without positions). Default: itself."""
    final_logit_softcapping: PositiveFloat | None = 30.0
    """Logits x become c tanh(x / c)."""
    dsa_indexer_k_norm_epsilon: Annotated[float, Field(ge=0)] = 1e-6
    """Added to the variance in the LayerNorms of the indexer: of its keys, and of what its queries come from."""

    def rotates(self, layer: int) -> bool:
        return not self.layers_without_rope[layer]

    @property
    def layers_without_rope(self) -> list[bool]:
        """For each layer whether it has no rotary positions. Raises ConfigError for a pattern of another length."""
        return layers_without_rope(self.no_rope_freq, self.num_layers)

    def kv_source_of(self, layer: int) -> int:
        """The layer whose latents a layer reads, both counted from 0."""
        return layer if self.kv_source_layers is None else self.kv_source_layers[layer]

    def lends_latents(self, layer: int) -> bool:
        """Whether other layers read the latents of a layer."""
        return any(self.kv_source_of(other) == layer for other in range(layer + 1, self.num_layers))

    def of_layer(self, layer: int) -> MistralLarge4Config:
        """The configuration with the sizes that a layer has: without positions all channels of a head are plain."""
        if self.rotates(layer):
            return self
        return self.model_copy(update={"qk_head_dim": self.head_dim, "qk_pos_emb_head_dim": 0})

    @property
    def dsa_indexer_rope_interleaved(self) -> bool:
        return True


def layers_without_rope(freq: int | str | None, num_layers: int) -> list[bool]:
    """What `no_rope_freq` says of each layer."""
    if isinstance(freq, str):
        return read_pattern(freq, num_layers, NO_ROPE)
    return [freq is not None and (layer + 1) % freq == 0 for layer in range(num_layers)]


def check_mistral_large4(config: Config) -> None:
    """Raise ConfigError for sizes, layers and layouts that do not fit together."""
    check_deepseek(config)
    model = config.model
    assert isinstance(model, MistralLarge4Config)
    for key, only in (("q_lora_rank", None), ("mtp_num_layers", 0)):
        if (value := getattr(model, key)) != only:
            legal = "null" if only is None else only
            raise ConfigError(f"model.{key}={value} is not supported by model.family=mistral_large4; it can be {legal}")
    if model.rope_scaling_type not in ("none", "yarn"):
        raise ConfigError(
            f"model.rope_scaling_type={model.rope_scaling_type} is not defined for frequencies with learned factors; "
            "it can be none or yarn"
        )
    _ = model.layers_without_rope  # raises for a pattern that does not fit
    _check_sources(model)
    check_indexers(config, model)
    if config.parallel.use_torch_fsdp2 and config.precision.dtype != "fp32":
        raise ConfigError(
            f"parallel.use_torch_fsdp2=true casts parameters to precision.dtype={config.precision.dtype}, in which the "
            "factors of frequencies (rotary.alpha) turn far positions by other angles; shard with "
            "parallel.use_distributed_optimizer, or set precision.dtype to fp32"
        )


def _check_sources(model: MistralLarge4Config) -> None:
    sources = model.kv_source_layers
    if sources is None:
        return
    if len(sources) != model.num_layers:
        raise ConfigError(
            f"model.kv_source_layers has {len(sources)} entries; it needs one for each of model.num_layers="
            f"{model.num_layers}"
        )
    for layer, source in enumerate(sources):
        if source > layer or sources[source] != source:
            raise ConfigError(
                f"model.kv_source_layers: layer {layer} reads the latents of layer {source}; it can be itself, or an "
                "earlier layer that reads its own"
            )
        if model.rotates(source) != model.rotates(layer):
            raise ConfigError(
                f"model.kv_source_layers: of layers {source} and {layer} one has rotary positions and the other has "
                "none (model.no_rope_freq), so that they cannot share latents"
            )


# -- a small model for checks ------------------------------------------------------------------------


def shrink_mistral_large4(model: Mapping[str, Any], seq_length: int) -> dict[str, Any]:
    """A layer with positions and one without; with shared latents another one of each, which reads them."""
    keys = {**shrink_indexers(model, seq_length), "no_rope_freq": 2}
    if model.get("kv_source_layers"):
        keys |= {"num_layers": 4, "kv_source_layers": [0, 1, 0, 1]}
    return keys


MEGATRON = MegatronMap(
    unsupported="Megatron has no indexer that reads hidden states, no learned factors of frequencies and queries, and "
    "no latents that layers share"
)


# -- published size ----------------------------------------------------------------------------------

PRESETS: dict[str, dict[str, Any]] = {
    "mistral-large-4-1t": {
        "model": {
            "num_layers": 72,
            "hidden_size": 6144,
            "num_attention_heads": 64,
            "ffn_hidden_size": 24576,
            "vocab_size": 204800,
            "norm_epsilon": 1e-5,
            "kv_lora_rank": 512,
            "qk_head_dim": 64,
            "qk_pos_emb_head_dim": 64,
            "v_head_dim": 128,
            "max_position_embeddings": 1048576,
            "rope_scaling_type": "yarn",
            "rope_scaling_factor": 2048.0,
            "original_max_position_embeddings": 512,
            "rope_attention_factor": 1.0,
            "dsa_indexer_n_heads": 32,
            "moe": {
                "num_experts": 128,
                "moe_router_topk": 4,
                "moe_router_weight_in_fp32": True,
                "moe_ffn_hidden_size": 6144,
                "moe_shared_expert_intermediate_size": 6144,
                "moe_layer_freq": "([0]*1+[1]*71)",
                "moe_router_load_balancing_type": ["seq_aux_loss"],
                "moe_aux_loss_coeff": [0.0001],
            },
        },
        "data": {"seq_length": 4096},
    },
}
