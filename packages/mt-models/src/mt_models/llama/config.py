"""Configuration of the Llama family."""

from __future__ import annotations

from mt_core.config.schema import Config
from mt_models.blocks.decoder_config import DecoderConfig, check_decoder


class LlamaConfig(DecoderConfig):
    """Llama (Touvron et al., 2023; Llama 2, 2023; The Llama 3 Herd of Models, 2024)."""

    attention_bias: bool = False
    """Biases on queries, keys, values and the output of attention."""
    mlp_bias: bool = False
    """Biases in the feed-forward."""

    @property
    def add_bias_linear(self) -> bool:
        return self.mlp_bias

    @property
    def add_qkv_bias(self) -> bool:
        return self.attention_bias

    @property
    def qk_layernorm(self) -> bool:
        return False


def check_llama(config: Config) -> None:
    check_decoder(config)
