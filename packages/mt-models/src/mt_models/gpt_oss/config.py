"""Configuration of the GPT-OSS family, and its published sizes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from mt_core.config.fields import PositiveInt
from mt_core.config.layer_pattern import read_pattern
from mt_core.config.schema import Config
from mt_models.blocks.config import RMSNormDecoderConfig, check_decoder
from mt_models.blocks.moe import MoEOptions

WINDOW_PATTERN = "model.window_attn_skip_freq"


class GptOssConfig(RMSNormDecoderConfig):
    """gpt-oss-20b and gpt-oss-120b (OpenAI, 2025)."""

    moe: dict[str, Any]
    """Options of the MoE layers; num_experts has to be set."""
    norm_epsilon: Annotated[float, Field(ge=0)] = 1e-5
    """Added to the mean square."""
    rotary_base: Annotated[float, Field(gt=0)] = 150000.0
    """Base of the rotary wavelengths."""
    attention_backend: str = "auto"
    """Name of the attention backend. Sinks need the log-sum-exp of the scores: eager, or flex on a GPU; auto takes the
    first that serves."""
    sliding_window: PositiveInt = 128
    """In layers with a window a position sees itself and the sliding_window - 1 before it."""
    window_attn_skip_freq: PositiveInt | str = 2
    """Every so many layers one sees everything before it, and the others have the window (1: none has it); or a pattern
    such as "([1]*3+[0]*1)" with a 1 for each layer with the window."""

    @property
    def activation(self) -> Literal["swiglu", "geglu_tanh", "clamped_swiglu"]:
        return "clamped_swiglu"

    @property
    def add_bias_linear(self) -> bool:
        """Biases of all linear layers: attention, router and experts."""
        return True

    @property
    def add_qkv_bias(self) -> bool:
        return True

    @property
    def qk_layernorm(self) -> bool:
        return False

    @property
    def layers_with_window(self) -> list[bool]:
        """For each layer whether it has the window. Raises ConfigError for a pattern that is none."""
        freq = self.window_attn_skip_freq
        if isinstance(freq, int):
            return [(layer + 1) % freq != 0 for layer in range(self.num_layers)]
        return read_pattern(freq, self.num_layers, WINDOW_PATTERN)

    def window_of(self, layer: int) -> int | None:
        return self.sliding_window if self.layers_with_window[layer] else None


def check_gpt_oss(config: Config) -> None:
    """Raise ConfigError for an invalid decoder, MoE or pattern of windows."""
    check_decoder(config)
    model = config.model
    assert isinstance(model, GptOssConfig)
    model.layers_with_window  # noqa: B018  # raises for a text that is no pattern
    MoEOptions(model)


# -- published sizes ---------------------------------------------------------------------------------


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    return {
        "model": {
            "num_layers": layers,
            "hidden_size": 2880,
            "num_attention_heads": 64,
            "num_query_groups": 8,
            "kv_channels": 64,
            "ffn_hidden_size": 2880,
            "vocab_size": 201088,
            "max_position_embeddings": 131072,
            "rope_scaling_type": "yarn",
            "rope_scaling_factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_truncate": False,
            "moe": {
                "num_experts": experts,
                "moe_router_topk": 4,
                "moe_router_load_balancing_type": ["aux_loss"],
                "moe_aux_loss_coeff": [0.9],
            },
        },
        "data": {"seq_length": 4096},
    }


PRESETS: dict[str, dict[str, Any]] = {"gpt-oss-20b": _gpt_oss(24, 32), "gpt-oss-120b": _gpt_oss(36, 128)}
