"""Configuration of EXAONE 4, and its published sizes."""

from __future__ import annotations

from typing import Any

from mt_core.config.fields import PositiveInt
from mt_core.config.schema import Config
from mt_core.config_map import MegatronMap
from mt_core.errors import ConfigError
from mt_models.blocks.config import RMSNormDecoderConfig, check_decoder
from mt_models.blocks.prediction_config import PredictionKeys, check_prediction
from mt_models.blocks.window_pattern import WindowPattern, has_window
from mt_models.flops import (
    core_flops,
    dense_feed_forward_flops,
    mean_keys,
    output_flops,
    projection_flops,
)
from mt_models.flops import training_flops as decoder_training_flops


class Exaone4Config(PredictionKeys, RMSNormDecoderConfig):
    """EXAONE 4.0, and with experts K-EXAONE (LG AI Research, 2025)."""

    sliding_window: PositiveInt | None = None
    """In layers with a window a position sees itself and the sliding_window - 1 before it, and those without have no
    rotary positions. Default: no window, and all layers have rotary positions."""
    sliding_window_pattern: WindowPattern = 4
    """With a sliding window, every so many layers one sees everything before it; or a pattern with a 1 for each layer
    with the window, such as "([1]*3+[0]*2+[1]*1)"."""

    def window_of(self, layer: int) -> int | None:
        return self.sliding_window if has_window(self.sliding_window_pattern, layer, self.num_layers) else None

    def rotates(self, layer: int) -> bool:
        return self.sliding_window is None or self.window_of(layer) is not None

    @property
    def norms_of_branches(self) -> bool:
        # K-EXAONE has its norms before attention and experts.
        return self.moe is None

    @property
    def add_qkv_bias(self) -> bool:
        return False

    @property
    def qk_layernorm(self) -> bool:
        return True


def check_exaone4(config: Config) -> None:
    check_decoder(config)
    model = config.model
    assert isinstance(model, Exaone4Config)
    check_prediction(config, model)
    if model.mtp_num_layers and model.moe is None:
        raise ConfigError(
            f"model.mtp_num_layers={model.mtp_num_layers} needs experts (model.moe): only K-EXAONE has a layer of "
            "multi-token prediction; set it to 0"
        )
    if model.mtp_num_layers > 1:
        raise ConfigError(f"model.mtp_num_layers={model.mtp_num_layers} is not supported; it can be 0 or 1")


def training_flops(config: Config) -> float:
    """See `ModelSpec.training_flops`. The layer of multi-token prediction is dense and has no window."""
    model: Any = config.model
    length, hidden = config.data.seq_length, model.hidden_size
    layer = projection_flops(model) + core_flops(model, mean_keys(length, None, "seen"))
    layer += dense_feed_forward_flops(model) + 4 * hidden**2 + output_flops(hidden, model.vocab_size)
    return decoder_training_flops(config) + 3 * length * model.mtp_num_layers * layer


# -- published sizes ---------------------------------------------------------------------------------


def _exaone(layers: int, hidden: int, heads: int, ffn: int, positions: int, **keys: Any) -> dict[str, Any]:
    return {
        "model": {
            "num_layers": layers,
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_query_groups": 8,
            "ffn_hidden_size": ffn,
            "vocab_size": 102400,
            "norm_epsilon": 1e-5,
            "max_position_embeddings": positions,
            "rotary_base": 1000000.0,
            "rope_scaling_type": "llama3",
            "rope_scaling_factor": 16.0,
            "original_max_position_embeddings": 8192,
            **keys,
        },
        "data": {"seq_length": 4096},
    }


K_EXAONE: dict[str, Any] = {
    "num_layers": 48,
    "hidden_size": 6144,
    "num_attention_heads": 64,
    "num_query_groups": 8,
    "kv_channels": 128,
    "ffn_hidden_size": 18432,
    "vocab_size": 153600,
    "norm_epsilon": 1e-5,
    "max_position_embeddings": 262144,
    "rotary_base": 1000000.0,
    "sliding_window": 128,
    "mtp_num_layers": 1,
    "moe": {
        "num_experts": 128,
        "moe_router_topk": 8,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_topk_scaling_factor": 2.5,
        "moe_ffn_hidden_size": 2048,
        "moe_shared_expert_intermediate_size": 2048,
        "moe_layer_freq": "([0]*1+[1]*47)",
    },
}
PRESETS: dict[str, dict[str, Any]] = {
    "exaone-4.0-1.2b": _exaone(30, 2048, 32, 4096, 65536, untie_embeddings_and_output_weights=False),
    "exaone-4.0-32b": _exaone(64, 5120, 40, 27392, 131072, sliding_window=4096),
    "k-exaone-236b-a23b": {"model": K_EXAONE, "data": {"seq_length": 4096}},
}


MEGATRON = MegatronMap(unsupported="Megatron has no layers without a norm before attention and feed-forward")
