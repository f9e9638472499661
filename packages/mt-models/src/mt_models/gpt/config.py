"""Configuration of the GPT family: keys, the rules that tie them together, published sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr

from mt_core.config.checks import divisors, listed, must_divide
from mt_core.config.fields import NonNegativeInt, PositiveInt, Probability, used_when
from mt_core.config.schema import Config
from mt_core.errors import ConfigError
from mt_models.blocks.config import check_tensor_parallel
from mt_models.blocks.moe import MoEOptions, frequency_of
from mt_models.blocks.prediction_config import check_prediction
from mt_models.blocks.stream_config import StreamKeys, check_streams

PositionEmbedding = Literal["learned_absolute", "rope", "alibi", "none"]
Activation = Literal["gelu", "gelu_tanh", "relu", "squared_relu", "silu", "swiglu", "geglu", "geglu_tanh"]
GATED = ("swiglu", "geglu", "geglu_tanh")
Factor = Annotated[float, Field(gt=0)]
MUP_OPTIMIZERS = ("adam", "lion")


class GPTConfig(StreamKeys):
    """A decoder-only transformer."""

    num_layers: PositiveInt
    """Transformer layers."""
    hidden_size: PositiveInt
    """Width of the residual stream."""
    num_attention_heads: PositiveInt
    """Query heads."""
    num_query_groups: PositiveInt | None = None
    """Key-value heads; each serves num_attention_heads / num_query_groups query heads. 1 is multi-query.
    Default: num_attention_heads (multi-head)."""
    kv_channels: PositiveInt | None = None
    """Size of a head. Default: hidden_size / num_attention_heads."""
    ffn_hidden_size: PositiveInt | None = None
    """Inner width of the feed-forward. Default: 4 hidden_size, or 8/3 hidden_size rounded down to a multiple
    of 64 (at least 64) when the activation is gated."""
    max_position_embeddings: PositiveInt | None = used_when(None, position_embedding_type=("learned_absolute", "rope"))
    """Rows of the table of learned positions, the longest sequence that the model can take. With rope, which has no
    table, the longest sequence that the model was trained for, as converted checkpoints state it."""
    position_embedding_type: PositionEmbedding = "learned_absolute"
    """learned_absolute, rope (rotary), alibi or none."""
    rotary_base: Annotated[float, Field(gt=0)] = used_when(10000.0, position_embedding_type="rope")
    """Base of the rotary wavelengths."""
    rotary_percent: Annotated[float, Field(gt=0, le=1)] = used_when(1.0, position_embedding_type="rope")
    """Share of each head that is rotated."""
    rotary_interleaved: bool = used_when(False, position_embedding_type="rope")
    """Rotate pairs of neighbours (GPT-J) instead of the two halves of a head (GPT-NeoX, Llama)."""
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    """Kind of normalization."""
    norm_epsilon: Annotated[float, Field(ge=0)] = 1e-5
    """Added to the variance."""
    activation: Activation = "gelu"
    """Activation of the feed-forward; swiglu and geglu are gated. gelu is the exact one, gelu_tanh that of GPT-2."""
    qk_layernorm: bool = False
    """Normalize each query and key head before positions are applied."""
    add_bias_linear: bool = True
    """Biases in the linear layers."""
    add_qkv_bias: bool = used_when(False, add_bias_linear=False)
    """A bias on queries, keys and values alone."""
    embedding_layernorm: bool = False
    """Normalize the embedding before the first layer (BLOOM)."""
    parallel_residual: bool = False
    """Attention and feed-forward read the same input, and both are added to it (GPT-J, GPT-NeoX)."""
    parallel_residual_norms: Literal[1, 2] = used_when(2, parallel_residual=True)
    """Norms of a layer with parallel_residual: one of each branch (GPT-NeoX), or one for both (GPT-J, Falcon 7B)."""
    untie_embeddings_and_output_weights: bool = False
    """The output projection has a matrix of its own."""
    hidden_dropout: Probability = 0.0
    """Dropout after the embedding, the attention and the feed-forward."""
    attention_dropout: Probability = 0.0
    """Dropout on the attention weights."""
    init_method_std: Annotated[float, Field(ge=0)] = 0.02
    """Standard deviation of the initial weights; with mup_base_hidden_size, of the embeddings and the output layer."""
    use_scaled_init_method: bool = True
    """Matrices that add to the residual stream start with init_method_std / sqrt(2 num_layers)."""
    embedding_multiplier: Factor = 1.0
    """Factor of the embeddings, with learned positions, before dropout."""
    attention_multiplier: Factor | None = None
    """Factor of the products of queries and keys. Default: 1 / sqrt(head size); with
    mup_base_hidden_size 1 / head size."""
    logits_scaling: Factor | None = None
    """Logits are divided by this. Default: 1; with mup_base_hidden_size the multiple of that width."""
    mup_base_hidden_size: PositiveInt | None = None
    """Maximal update parametrization: the hidden_size for which learning rate and init_method_std were chosen. In a
    model that is m times as wide, the matrices of the layers start with init_method_std / sqrt(m); the learning rate
    and Adam's epsilon of matrices are divided by m, and so are the logits. Default: none of this."""
    attention_backend: str = "auto"
    """Name of the attention backend; auto: the fastest that serves the model on its device."""
    mtp_num_layers: NonNegativeInt = 0
    """Further layers, of which the d-th predicts the token d + 1 positions ahead, in training."""
    mtp_loss_scaling_factor: Annotated[float, Field(ge=0)] = 0.1
    """What the mean of their losses counts beside that of the next token."""
    moe: dict[str, Any] | None = None
    """Options of a mixture of experts in place of the dense feed-forward; needs the feed-forward "moe"."""

    _predicted_layers: int = PrivateAttr(default=0)
    """How many of num_layers are layers of multi-token prediction: see `with_predicted_layers`."""

    @property
    def query_groups(self) -> int:
        return self.num_query_groups or self.num_attention_heads

    @property
    def head_dim(self) -> int:
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def ffn_size(self) -> int:
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        if self.activation in GATED:
            return max(self.hidden_size * 8 // 3 // 64 * 64, 64)
        return 4 * self.hidden_size

    @property
    def table_size(self) -> int | None:
        """Rows of the table of positions, if there is one."""
        return self.max_position_embeddings if self.position_embedding_type == "learned_absolute" else None

    @property
    def rotary_dim(self) -> int:
        """Rotated channels of a head, an even number."""
        # Rounded down to pairs: a quarter of 10 channels is 2 and not 2.5.
        return int(self.head_dim * self.rotary_percent) // 2 * 2

    @property
    def width_multiplier(self) -> float:
        """hidden_size as a multiple of mup_base_hidden_size; 1 without it."""
        return self.hidden_size / (self.mup_base_hidden_size or self.hidden_size)

    @property
    def query_scale(self) -> float:
        """Factor of the queries before their products with keys are divided by sqrt(head size)."""
        if self.attention_multiplier is None and self.mup_base_hidden_size is None:
            return 1.0
        return (self.attention_multiplier or 1.0 / self.head_dim) * math.sqrt(self.head_dim)

    @property
    def logits_divisor(self) -> float:
        return self.logits_scaling or self.width_multiplier

    @property
    def of_layers(self) -> GPTConfig:
        """The same with the standard deviation from which the matrices of the layers start."""
        if self.width_multiplier == 1.0:
            return self
        return self.model_copy(update={"init_method_std": self.init_method_std / math.sqrt(self.width_multiplier)})

    def with_predicted_layers(self) -> GPTConfig:
        """The same with the layers of multi-token prediction counted behind the others, of the last one's kind."""
        changed: dict[str, Any] = {"num_layers": self.num_layers + self.mtp_num_layers}
        if self.moe is not None:
            layers = MoEOptions(self).layers
            changed["moe"] = {**self.moe, "moe_layer_freq": frequency_of(layers + layers[-1:] * self.mtp_num_layers)}
        counted = self.model_copy(update=changed)
        counted._predicted_layers = self.mtp_num_layers
        return counted

    @property
    def output_init_std(self) -> float:
        # Megatron takes the number of the decoder's layers for those of multi-token prediction, too.
        layers = self.num_layers - self._predicted_layers
        return self.init_method_std / math.sqrt(2.0 * layers if self.use_scaled_init_method else 1.0)

    @property
    def feed_forward(self) -> str:
        return "dense" if self.moe is None else "moe"

    def window_of(self, layer: int) -> int | None:
        """No layer has a sliding window."""
        return None


FACTORS: Mapping[str, tuple[Any, ...]] = {
    "embedding_multiplier": (1.0,),
    "attention_multiplier": (None,),
    "logits_scaling": (None, 1.0),
    "mup_base_hidden_size": (None,),
    "mtp_num_layers": (0,),
    "enable_mhc_connections": (False,),
}
"""Keys that most formats cannot express, and the values with which they change nothing."""
SAME_KEYS = (
    "vocab_size",
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "norm_epsilon",
    "attention_dropout",
    "untie_embeddings_and_output_weights",
    "init_method_std",
    "use_scaled_init_method",
    "rotary_base",
)
"""Keys that a GPT with the layers of a Llama has in common with it."""


def check_gpt(config: Config) -> None:
    """Raise ConfigError for a GPT that cannot be built, or cannot read its samples."""
    model = config.model
    assert isinstance(model, GPTConfig)
    _check_heads(model)
    check_tensor_parallel(
        config, query_groups=model.query_groups, ffn_size=model.ffn_size, heads=model.num_attention_heads
    )
    _check_positions(model, config.data.seq_length)
    _check_mup(model, config)
    _check_predicted_layers(model, config)
    check_streams(model, STREAMS_WITH)


STREAMS_WITH: Mapping[str, tuple[Any, ...]] = {
    "parallel_residual": (False,),
    "mup_base_hidden_size": (None,),
}
"""Keys of a GPT with several residual streams: connections of two blocks one after another."""
PREDICTS_WITH: Mapping[str, tuple[Any, ...]] = {
    "position_embedding_type": ("rope", "none"),
    "hidden_dropout": (0.0,),
    "embedding_layernorm": (False,),
    "embedding_multiplier": (1.0,),
    "mup_base_hidden_size": (None,),
}
"""Keys of a GPT with multi-token prediction: the last stage embeds tokens, and does nothing else to them."""


def _check_predicted_layers(model: GPTConfig, config: Config) -> None:
    check_prediction(config, model)
    if not model.mtp_num_layers:
        return
    for key, values in PREDICTS_WITH.items():
        if (value := getattr(model, key)) not in values:
            legal = " or ".join(str(choice) for choice in values)
            raise ConfigError(
                f"model.{key}={value} cannot be combined with model.mtp_num_layers={model.mtp_num_layers}; it can be "
                f"{legal}, or model.mtp_num_layers=0"
            )


def _check_mup(model: GPTConfig, config: Config) -> None:
    """The factors of learning rates are those of optimizers whose step does not grow with the gradient."""
    if model.mup_base_hidden_size is None:
        return
    if config.optimizer.optimizer not in MUP_OPTIMIZERS:
        raise ConfigError(
            f"model.mup_base_hidden_size={model.mup_base_hidden_size} divides the learning rate of matrices by "
            f"the multiple of the width, which is right for optimizer.optimizer={' or '.join(MUP_OPTIMIZERS)}, and not "
            f"for {config.optimizer.optimizer}; choose one of these"
        )
    if config.optimizer.decoupled_lr is not None:
        raise ConfigError(
            f"optimizer.decoupled_lr={config.optimizer.decoupled_lr} and model.mup_base_hidden_size="
            f"{model.mup_base_hidden_size} both say the learning rate of the output layer; keep one"
        )


def _check_heads(model: GPTConfig) -> None:
    if model.kv_channels is None and model.hidden_size % model.num_attention_heads:
        legal = listed(divisors(model.hidden_size))
        raise ConfigError(
            f"model.hidden_size={model.hidden_size} is not divisible by "
            f"model.num_attention_heads={model.num_attention_heads}; the number of heads can be {legal}, "
            "or set model.kv_channels"
        )
    must_divide("model.num_query_groups", model.query_groups, "model.num_attention_heads", model.num_attention_heads)
    if model.position_embedding_type == "rope" and model.rotary_dim < 2:
        raise ConfigError(
            f"model.rotary_percent={model.rotary_percent} of a head of {model.head_dim} leaves no channel to rotate; "
            f"at least {2 / model.head_dim:.3g} is needed"
        )


def _check_positions(model: GPTConfig, seq_length: int) -> None:
    if model.position_embedding_type != "learned_absolute":
        return
    if model.max_position_embeddings is None:
        raise ConfigError(
            "model.max_position_embeddings is not set; learned positions need it, at least "
            f"data.seq_length={seq_length}"
        )
    if seq_length > model.max_position_embeddings:
        raise ConfigError(
            f"data.seq_length={seq_length} is longer than model.max_position_embeddings="
            f"{model.max_position_embeddings}; use at most {model.max_position_embeddings}, or more positions"
        )


# -- published sizes, and a small one that trains in a minute on two CPU cores -----------------------


def _gpt2(layers: int, hidden: int, heads: int) -> dict[str, Any]:
    return {
        "model": {
            "num_layers": layers,
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "max_position_embeddings": 1024,
            "activation": "gelu_tanh",
            "vocab_size": 50257,
        },
        "data": {"seq_length": 1024},
    }


def _gpt3(layers: int, hidden: int, heads: int) -> dict[str, Any]:
    shape = _gpt2(layers, hidden, heads)
    shape["model"]["max_position_embeddings"] = 2048
    shape["data"]["seq_length"] = 2048
    return shape


TINY: dict[str, Any] = {
    "model": {
        "num_layers": 4,
        "hidden_size": 128,
        "num_attention_heads": 4,
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "activation": "swiglu",
        "add_bias_linear": False,
    },
    "data": {"seq_length": 128},
    "train": {"micro_batch_size": 16, "train_iters": 450},
    "optimizer": {"lr": 3e-3, "min_lr": 3e-4, "weight_decay": 0.1, "adam_beta2": 0.95},
    "lr_schedule": {"lr_decay_style": "cosine", "lr_warmup_iters": 20},
}

TINY_STUDENT: dict[str, Any] = {
    **TINY,
    "model": {**TINY["model"], "num_layers": 2, "hidden_size": 64},
    # Little text: labels alone teach a student less than the distributions of gpt-tiny, which has seen more.
    "data": {"seq_length": 128, "corpus_bytes": 600_000},
    "train": {"micro_batch_size": 16, "train_iters": 400, "eval_interval": 50, "eval_iters": 8},
}
"""For mt tune distill, with a trained gpt-tiny as the teacher."""

PRESETS: dict[str, dict[str, Any]] = {
    "gpt-tiny": TINY,
    "gpt-tiny-student": TINY_STUDENT,
    "gpt2-124m": _gpt2(12, 768, 12),
    "gpt2-355m": _gpt2(24, 1024, 16),
    "gpt2-774m": _gpt2(36, 1280, 20),
    "gpt2-1.5b": _gpt2(48, 1600, 25),
    "gpt3-125m": _gpt3(12, 768, 12),
    "gpt3-350m": _gpt3(24, 1024, 16),
    "gpt3-760m": _gpt3(24, 1536, 16),
    "gpt3-1.3b": _gpt3(24, 2048, 16),
    "gpt3-2.7b": _gpt3(32, 2560, 32),
    "gpt3-6.7b": _gpt3(32, 4096, 32),
    "gpt3-13b": _gpt3(40, 5120, 40),
    "gpt3-175b": _gpt3(96, 12288, 96),
}
