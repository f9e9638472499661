"""Configuration of the Gemma family, and its published sizes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from mt_core.config.fields import PositiveInt
from mt_core.config_map import MegatronMap
from mt_models.blocks.config import RMSNormDecoderConfig
from mt_models.blocks.window_pattern import WindowPattern, has_window

PositiveFloat = Annotated[float, Field(gt=0)]


class GemmaConfig(RMSNormDecoderConfig):
    """Gemma 2 (2024) and Gemma 3 (2025), text only. The defaults are those of Gemma 3."""

    untie_embeddings_and_output_weights: bool = False
    """The output projection has a matrix of its own."""
    sliding_window: PositiveInt = 1024
    """In local layers a position sees itself and the sliding_window - 1 before it."""
    sliding_window_pattern: WindowPattern = 6
    """Every so many layers one is global and sees everything before it; the others are local. Gemma 2: 2. Or a pattern
    with a 1 for each local layer, such as "([1]*3+[0]*2+[1]*1)"."""
    rotary_base: PositiveFloat = 1000000.0
    """Base of the rotary wavelengths of global layers, to which rope scaling applies."""
    rotary_base_local: PositiveFloat = 10000.0
    """Base of the rotary wavelengths of local layers."""
    query_pre_attn_scalar: PositiveFloat | None = None
    """Scores are divided by its square root. Default: the size of a head."""
    qk_layernorm: bool = True
    """Normalize each query and key head before positions are applied: Gemma 3."""
    attn_logit_softcapping: PositiveFloat | None = None
    """Attention scores s become c tanh(s / c): Gemma 2. Needs an attention_backend that has them: auto, eager, flex,
    flash_attn_2 or flash_attn_3."""
    final_logit_softcapping: PositiveFloat | None = None
    """Logits x become c tanh(x / c): Gemma 2."""

    @property
    def activation(self) -> Literal["swiglu", "geglu_tanh"]:
        return "geglu_tanh"

    @property
    def add_qkv_bias(self) -> bool:
        return False

    @property
    def rotary_base_in_windows(self) -> float:
        # Gemma 3: scaling applies to global layers only; local ones have their own base. In Gemma 2 the two are equal.
        return self.rotary_base_local

    def window_of(self, layer: int) -> int | None:
        return self.sliding_window if has_window(self.sliding_window_pattern, layer, self.num_layers) else None


# -- published sizes ---------------------------------------------------------------------------------


def _gemma(
    layers: int, hidden: int, heads: int, groups: int, head: int, ffn: int, vocab: int, **keys: Any
) -> dict[str, Any]:
    return {
        "model": {
            "num_layers": layers,
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_query_groups": groups,
            "kv_channels": head,
            "ffn_hidden_size": ffn,
            "vocab_size": vocab,
            **keys,
        },
        "data": {"seq_length": 8192},
    }


def _gemma2(layers: int, hidden: int, heads: int, head: int, ffn: int, scalar: float) -> dict[str, Any]:
    variant = {
        "max_position_embeddings": 8192,
        "rotary_base": 10000.0,
        "sliding_window": 4096,
        "sliding_window_pattern": 2,
        "qk_layernorm": False,
        "query_pre_attn_scalar": scalar,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    }
    return _gemma(layers, hidden, heads, heads // 2, head, ffn, 256000, **variant)


def _gemma3_small(layers: int, hidden: int, ffn: int) -> dict[str, Any]:
    return _gemma(layers, hidden, 4, 1, 256, ffn, 262144, sliding_window=512, max_position_embeddings=32768)


def _gemma3(layers: int, hidden: int, heads: int, head: int, ffn: int, scalar: float = 256.0) -> dict[str, Any]:
    variant = {
        "query_pre_attn_scalar": scalar,
        "rope_scaling_type": "linear",
        "rope_scaling_factor": 8.0,
        "max_position_embeddings": 131072,
    }
    return _gemma(layers, hidden, heads, heads // 2, head, ffn, 262208, **variant)


PRESETS: dict[str, dict[str, Any]] = {
    "gemma2-2b": _gemma2(26, 2304, 8, 256, 9216, 256.0),
    "gemma2-9b": _gemma2(42, 3584, 16, 256, 14336, 256.0),
    "gemma2-27b": _gemma2(46, 4608, 32, 128, 36864, 144.0),
    "gemma3-270m": _gemma3_small(18, 640, 2048),
    "gemma3-1b": _gemma3_small(26, 1152, 6912),
    "gemma3-4b": _gemma3(34, 2560, 8, 256, 10240),
    "gemma3-12b": _gemma3(48, 3840, 16, 256, 15360),
    "gemma3-27b": _gemma3(62, 5376, 32, 128, 21504, 168.0),
}


MEGATRON = MegatronMap(
    unsupported="Megatron has its zero-centered norms (apply_layernorm_1p), but no norms behind attention and "
    "feed-forward, no gated tanh GELU, no rotary base for each kind of layer and no scale on token embeddings"
)
