"""Configuration of the Gemma family."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from mt_core.config.schema import Config, PositiveInt
from mt_models.blocks.decoder_config import DecoderConfig, check_decoder

PositiveFloat = Annotated[float, Field(gt=0)]


class GemmaConfig(DecoderConfig):
    """Gemma 2 (2024) and Gemma 3 (2025), text only. The defaults are those of Gemma 3."""

    untie_embeddings_and_output_weights: bool = False
    """The output projection has a matrix of its own."""
    sliding_window: PositiveInt = 1024
    """In local layers a position sees itself and the sliding_window - 1 before it."""
    sliding_window_pattern: PositiveInt = 6
    """Every so many layers one is global and sees everything before it; the others are local. Gemma 2: 2."""
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

    def window_of(self, layer: int) -> int | None:
        return self.sliding_window if (layer + 1) % self.sliding_window_pattern else None


def check_gemma(config: Config) -> None:
    check_decoder(config)
