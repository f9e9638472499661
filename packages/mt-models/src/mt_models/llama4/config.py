"""Configuration of Llama 4 (text), its published sizes, and its FLOPs."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from mt_core.config.fields import PositiveInt
from mt_core.config.layer_pattern import read_pattern
from mt_core.config.schema import Config
from mt_models.blocks.config import QueryScaling, RMSNormDecoderConfig, check_moe_decoder


class Llama4Config(RMSNormDecoderConfig):
    """Llama 4 Scout and Maverick (Meta, 2025), text."""

    moe: dict[str, Any]
    """Options of the MoE layers; num_experts has to be set."""
    attention_bias: bool = False
    """Biases on queries, keys, values and the output of attention."""
    attention_chunk_size: PositiveInt | None = 8192
    """In layers with rotary positions a position sees those before it in its own chunk of so many; null: all before
    it."""
    no_rope_freq: PositiveInt | str | None = 4
    """Every so many layers one sees everything before it and has no rotary positions: layers n - 1, 2 n - 1, ...; or a
    pattern with a 1 for each layer without, such as "([0]*3+[1]*1)*12"; null: all layers have them."""
    qk_l2_norm: bool = True
    """Queries and keys of layers with rotary positions are divided by their root mean square, behind the rotation."""
    query_scaling_beta: Annotated[float, Field(ge=0)] = 0.1
    """In layers without rotary positions queries at position p are multiplied by
    1 + beta ln(1 + floor((p + 1) / query_scaling_length)); 0: they are not."""
    query_scaling_length: PositiveInt = 8192
    """See query_scaling_beta."""

    @property
    def seen_positions(self) -> int:
        """The chunk, or one of all positions, in which a position sees the same."""
        return self.attention_chunk_size or self.max_sequence_length

    def rotates(self, layer: int) -> bool:
        return not self.layers_without_rope[layer]

    def chunk_of(self, layer: int) -> int | None:
        """The chunk of a layer; None: it sees everything before."""
        return self.attention_chunk_size if self.rotates(layer) else None

    def scales_queries(self, layer: int) -> bool:
        return not self.rotates(layer) and self.query_scaling_beta > 0

    @property
    def query_scaling(self) -> QueryScaling:
        return QueryScaling(self.query_scaling_beta, self.query_scaling_length, offset=1)

    @property
    def layers_without_rope(self) -> list[bool]:
        """For each layer whether it has no rotary positions. Raises ConfigError for a pattern of another length."""
        freq = self.no_rope_freq
        if isinstance(freq, str):
            return read_pattern(freq, self.num_layers, "model.no_rope_freq")
        return [freq is not None and (layer + 1) % freq == 0 for layer in range(self.num_layers)]

    @property
    def rotary_interleaved(self) -> bool:
        return True

    @property
    def add_qkv_bias(self) -> bool:
        return self.attention_bias

    @property
    def add_attention_output_bias(self) -> bool:
        return self.attention_bias

    @property
    def qk_layernorm(self) -> bool:
        """With weights: none."""
        return False

    @property
    def qk_layernorm_after_rotary(self) -> bool:
        return True


def check_llama4(config: Config) -> None:
    check_moe_decoder(config)
    assert isinstance(config.model, Llama4Config)
    _ = config.model.layers_without_rope  # raises for a pattern that does not fit


# -- published sizes ---------------------------------------------------------------------------------


def _llama4(experts: int, step: int, positions: int, **keys: Any) -> dict[str, Any]:
    frequency = 1 if step == 1 else f"([0]*{step - 1}+[1]*1)*{48 // step}"
    return {
        "model": {
            "num_layers": 48,
            "hidden_size": 5120,
            "num_attention_heads": 40,
            "num_query_groups": 8,
            "kv_channels": 128,
            "ffn_hidden_size": 16384,
            "vocab_size": 202048,
            "norm_epsilon": 1e-5,
            "max_position_embeddings": positions,
            "rotary_base": 500000.0,
            "moe": {
                "num_experts": experts,
                "moe_router_topk": 1,
                "moe_router_score_function": "sigmoid",
                "moe_apply_probs_on_input": True,
                "moe_ffn_hidden_size": 8192,
                "moe_shared_expert_intermediate_size": 8192,
                "moe_layer_freq": frequency,
            },
            **keys,
        },
        "data": {"seq_length": 4096},
    }


PRESETS: dict[str, dict[str, Any]] = {
    "llama4-scout": _llama4(16, 1, 262144),
    "llama4-maverick": _llama4(128, 2, 262144, qk_l2_norm=False),
}


# -- FLOPs -------------------------------------------------------------------------------------------


def training_flops(config: Config) -> float:
    """FLOPs of training on a sample (`ModelSpec.training_flops`)."""
    from mt_models.flops import core_flops, mean_keys, moe_flops, output_flops, projection_flops

    model, length = config.model, config.data.seq_length
    assert isinstance(model, Llama4Config)
    keys = sum(
        mean_keys(length, None, "seen") if chunk is None else keys_in_chunks(length, chunk)
        for chunk in map(model.chunk_of, range(model.num_layers))
    )
    layers = model.num_layers * (projection_flops(model) + moe_flops(model))
    return 3 * length * (layers + core_flops(model, keys) + output_flops(model.hidden_size, model.vocab_size))


def keys_in_chunks(length: int, chunk: int) -> float:
    """Keys that a query sees in its chunk, on average over the sequence."""
    whole, rest = divmod(length, chunk)
    return (whole * chunk * (chunk + 1) / 2 + rest * (rest + 1) / 2) / length
