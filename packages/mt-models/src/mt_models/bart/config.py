"""Configuration of the BART family: keys, the rules that tie them together, published sizes."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import Field

from mt_core.config.checks import divisors, listed
from mt_core.config.fields import PositiveInt, Probability
from mt_core.config.schema import Activation, Config, ModelConfig
from mt_core.errors import ConfigError
from mt_models.blocks.config import check_tensor_parallel, refuse_divided_sequences


class BartConfig(ModelConfig):
    """An encoder and a decoder, each with a table of learned positions."""

    num_layers: PositiveInt
    """Layers of the encoder."""
    decoder_num_layers: PositiveInt | None = None
    """Layers of the decoder. Default: num_layers."""
    hidden_size: PositiveInt
    """Width of the residual stream."""
    num_attention_heads: PositiveInt
    """Attention heads."""
    ffn_hidden_size: PositiveInt | None = None
    """Inner width of the feed-forward. Default: 4 hidden_size."""
    max_position_embeddings: PositiveInt
    """The longest sequence of encoder and decoder. Each has a table of so many positions."""
    position_offset: Annotated[int, Field(ge=0)] = 2
    """Rows of the tables before that of the first position, which are not used: 2 in BART and mBART, else 0."""
    layernorm_placement: Literal["pre", "post"] = "post"
    """post: a norm behind each block, as in BART. pre: before each block and behind each stack, as in mBART."""
    normalize_embedding: bool = True
    """A norm of token and position embeddings in each stack."""
    norm_before_positions: bool = False
    """In the decoder this norm is applied before positions are added, as in Blenderbot-small."""
    scale_embedding: bool = False
    """Multiply token embeddings by the square root of hidden_size before positions are added."""
    norm_epsilon: Annotated[float, Field(ge=0)] = 1e-5
    """Added to the variance."""
    activation: Activation = "gelu"
    """Activation of the feed-forward."""
    decoder_start_token_id: Annotated[int, Field(ge=0)] | None = None
    """The id with which the decoder begins in generation. Default: the tokenizer's beginning of a text."""
    hidden_dropout: Probability = 0.1
    """Dropout after the embeddings, the attention and the feed-forward."""
    attention_dropout: Probability = 0.0
    """Dropout on the attention weights."""
    activation_dropout: Probability = 0.0
    """Dropout between the two matrices of the feed-forward."""
    init_method_std: Annotated[float, Field(ge=0)] = 0.02
    """Standard deviation of the initial weights."""
    use_scaled_init_method: bool = False
    """Matrices that add to the residual stream start with init_method_std / sqrt(2 num_layers)."""
    attention_backend: str = "auto"
    """Name of the attention backend; auto: the fastest that serves the model on its device."""

    @property
    def decoder_layers(self) -> int:
        return self.decoder_num_layers or self.num_layers

    @property
    def stacked_layers(self) -> int:
        """Layers that pipeline stages divide: the encoder's, then the decoder's."""
        return self.num_layers + self.decoder_layers

    @property
    def query_groups(self) -> int:
        return self.num_attention_heads

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def ffn_size(self) -> int:
        return self.ffn_hidden_size or 4 * self.hidden_size

    @property
    def embedding_scale(self) -> float:
        return math.sqrt(self.hidden_size) if self.scale_embedding else 1.0

    @property
    def output_init_std(self) -> float:
        return self.init_method_std / math.sqrt(2.0 * self.num_layers if self.use_scaled_init_method else 1.0)

    # Fixed values for keys of the shared blocks that these models do not expose.

    @property
    def normalization(self) -> Literal["LayerNorm"]:
        return "LayerNorm"

    @property
    def add_bias_linear(self) -> bool:
        return True

    @property
    def add_qkv_bias(self) -> bool:
        return True

    @property
    def add_output_bias(self) -> bool:
        return True

    @property
    def untie_embeddings_and_output_weights(self) -> bool:
        return False

    @property
    def output_scale(self) -> float:
        return 1.0

    @property
    def qk_layernorm(self) -> bool:
        return False

    @property
    def rotary_interleaved(self) -> bool:
        return False


def check_bart(config: Config) -> None:
    """Raise ConfigError for a model that cannot be built, or cannot read its samples."""
    model = config.model
    assert isinstance(model, BartConfig)
    if model.hidden_size % model.num_attention_heads:
        raise ConfigError(
            f"model.hidden_size={model.hidden_size} is not divisible by model.num_attention_heads="
            f"{model.num_attention_heads}; the number of heads can be {listed(divisors(model.hidden_size))}"
        )
    if model.norm_before_positions and not model.normalize_embedding:
        raise ConfigError(
            "model.norm_before_positions=true places the norm of embeddings, and model.normalize_embedding=false; set "
            "one of them to the other value"
        )
    check_tensor_parallel(config, query_groups=model.num_attention_heads, ffn_size=model.ffn_size)
    refuse_divided_sequences(config)
    lengths = {"data.seq_length": config.data.seq_length}
    if (decoder := getattr(config.data, "decoder_seq_length", None)) is not None:
        lengths["data.decoder_seq_length"] = decoder
    for key, value in lengths.items():
        if value > model.max_position_embeddings:
            raise ConfigError(
                f"{key}={value} is longer than model.max_position_embeddings={model.max_position_embeddings}; use at "
                f"most {model.max_position_embeddings}, or more positions"
            )


# -- published sizes ---------------------------------------------------------------------------------


def _preset(layers: int, hidden: int, ffn: int, heads: int, vocabulary: int, **keys: Any) -> dict[str, Any]:
    positions = keys.setdefault("max_position_embeddings", 1024)
    return {
        "model": {
            "num_layers": layers,
            "hidden_size": hidden,
            "ffn_hidden_size": ffn,
            "num_attention_heads": heads,
            "vocab_size": vocabulary,
            **keys,
        },
        "data": {"seq_length": positions},
    }


MBART: dict[str, Any] = {"layernorm_placement": "pre", "scale_embedding": True}
BLENDERBOT: dict[str, Any] = {
    "layernorm_placement": "pre",
    "normalize_embedding": False,
    "position_offset": 0,
    "scale_embedding": True,
    "max_position_embeddings": 128,
}

PRESETS: dict[str, dict[str, Any]] = {
    "bart-base": _preset(6, 768, 3072, 12, 50265),
    "bart-large": _preset(12, 1024, 4096, 16, 50265),
    "mbart-large": _preset(12, 1024, 4096, 16, 250027, **MBART),
    "blenderbot-400m": _preset(2, 1280, 5120, 32, 8008, decoder_num_layers=12, **BLENDERBOT),
    "blenderbot-3b": _preset(2, 2560, 10240, 32, 8008, decoder_num_layers=24, **BLENDERBOT),
    "blenderbot-90m": _preset(
        *(8, 512, 2048, 16, 54944),
        max_position_embeddings=512,
        position_offset=0,
        norm_before_positions=True,
        scale_embedding=True,
    ),
}
