"""Configuration of ModernBERT, its published sizes and FLOPs."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from mt_core.config.fields import PositiveInt, Probability
from mt_core.config.schema import Config, ModelConfig
from mt_core.config_map import MegatronMap
from mt_core.errors import ConfigError
from mt_models.bert.config import BertFlops, check_encoder, check_masked_words
from mt_models.blocks.config import EncoderConfig
from mt_models.flops import core_flops, dense_feed_forward_flops, mean_keys, output_flops, projection_flops


class ModernBertConfig(ModelConfig, EncoderConfig):
    """A bidirectional encoder with rotary positions (Warner et al., Smarter, Better, Faster, Longer, 2024)."""

    ffn_hidden_size: PositiveInt | None = None
    """Inner width of the gated feed-forward. Default: 3/2 hidden_size."""
    max_position_embeddings: PositiveInt = 8192
    """Positions that the model was trained for, the longest sequence that it can take."""
    global_attn_every_n_layers: PositiveInt = 3
    """Every so many layers, the first included, one attends to all positions; the others attend within a window."""
    local_attention: PositiveInt = 128
    """Width of the window: a position sees those at a distance of at most half of it, on both sides."""
    rotary_base: Annotated[float, Field(gt=0)] = 160000.0
    """Base of the rotary wavelengths of layers that attend to all positions."""
    rotary_base_local: Annotated[float, Field(gt=0)] = 10000.0
    """Base of the rotary wavelengths of layers with a window."""
    activation: Literal["geglu", "geglu_tanh", "swiglu"] = "geglu"
    """Activation of the feed-forward."""
    lm_head_activation: Literal["gelu", "gelu_tanh", "relu", "silu"] = "gelu"
    """Activation of the masked-word head."""
    norm_bias: bool = False
    """Biases in the norms."""
    attention_bias: bool = False
    """Biases on queries, keys, values and the output of attention."""
    mlp_bias: bool = False
    """Biases in the feed-forward."""
    lm_head_bias: bool = False
    """A bias in the dense layer of the masked-word head."""
    output_bias: bool = True
    """A bias on the logits of masked words."""
    add_lm_head: bool = True
    """The head that predicts masked words."""
    embedding_dropout: Probability = 0.0
    """Dropout after the embedding."""
    attention_dropout: Probability = 0.0
    """Dropout on the attention weights and on the output of attention."""

    @property
    def ffn_size(self) -> int:
        return self.ffn_hidden_size or 3 * self.hidden_size // 2

    def window_of(self, layer: int) -> int | None:
        """The keys that a layer, counted from 0, sees on each side, itself included; None: all."""
        return self.local_attention // 2 + 1 if layer % self.global_attn_every_n_layers else None

    # Fixed values for keys that the shared blocks read. Attention's own biases are passed to it.

    @property
    def add_bias_linear(self) -> bool:
        return self.mlp_bias

    @property
    def add_qkv_bias(self) -> bool:
        return self.attention_bias

    @property
    def hidden_dropout(self) -> float:
        return 0.0


def check_modernbert(config: Config) -> None:
    """Raise ConfigError for a model that cannot be built, or whose samples or loss are made for another."""
    model = config.model
    assert isinstance(model, ModernBertConfig)
    check_modernbert_encoder(config)
    check_masked_words(config, add_lm_head=model.add_lm_head)
    if config.data.dataset_type == "bert" and getattr(config.data, "bert_binary_head", False):
        raise ConfigError(
            "data.bert_binary_head=true gives pairs of texts, and model.family=modernbert has no head that predicts "
            "their order; set data.bert_binary_head=false"
        )


def check_modernbert_encoder(config: Config) -> None:
    """Raise ConfigError for layers that cannot be built."""
    model = config.model
    assert isinstance(model, ModernBertConfig)
    check_encoder(model, config)
    if model.head_dim % 2:
        raise ConfigError(
            f"model.hidden_size / model.num_attention_heads={model.head_dim} is odd; rotary positions turn pairs of "
            "channels, so it has to be even"
        )


# -- published sizes ---------------------------------------------------------------------------------


def _published(layers: int, hidden: int, heads: int, ffn: int) -> dict[str, Any]:
    return {
        "model": {
            "num_layers": layers,
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "ffn_hidden_size": ffn,
            "vocab_size": 50368,
        },
        "data": {"seq_length": 8192},
    }


PRESETS: dict[str, dict[str, Any]] = {
    "modernbert-base": _published(22, 768, 12, 1152),
    "modernbert-large": _published(28, 1024, 16, 2624),
}


MEGATRON = MegatronMap(unsupported="Megatron has no bidirectional encoder with rotary positions and windows")


# -- FLOPs, counted as in mt_models.flops ------------------------------------------------------------


def flops_per_token(config: ModernBertConfig, seq_length: int) -> BertFlops:
    """The mean over the tokens of a sequence. Raises ConfigError when the vocabulary is unknown."""
    hidden, layers = config.hidden_size, config.num_layers
    return BertFlops(
        attention_projections=layers * projection_flops(config),
        attention_core=sum(core_flops(config, _keys(seq_length, config.window_of(i))) for i in range(layers)),
        feed_forward=layers * dense_feed_forward_flops(config),
        lm_head=2 * hidden**2 if config.add_lm_head else 0.0,
        output=output_flops(hidden, config.vocab_size) if config.add_lm_head else 0.0,
        pooler=0.0,
        binary_head=0.0,
    )


def _keys(seq_length: int, window: int | None) -> float:
    """Keys that a query sees on both sides, on average; mean_keys counts one side, with the query itself."""
    return seq_length if window is None else 2 * mean_keys(seq_length, window, "seen") - 1


def training_flops(config: Config) -> float:
    """See `ModelSpec.training_flops`."""
    model: Any = config.model
    return config.data.seq_length * flops_per_token(model, config.data.seq_length).training
