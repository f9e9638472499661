"""What the configurations of decoders and of encoders share, with the rules that tie the keys together."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from mt_core.config.checks import divisors, listed, must_divide
from mt_core.config.fields import PositiveInt, Probability, Section, used_when
from mt_core.config.schema import Config, ModelConfig
from mt_core.errors import ConfigError
from mt_models.blocks.moe import MoEOptions

# -- rules that several families share ---------------------------------------------------------------


def check_tensor_parallel(config: Config, *, query_groups: int, ffn_size: int, heads: int | None = None) -> None:
    """Raise ConfigError unless each tensor-parallel rank gets whole key-value groups, or the same part of the query
    heads of one group, and equal feed-forward rows. heads: query heads; default: one a group."""
    size = config.parallel.tensor_model_parallel_size
    key = "parallel.tensor_model_parallel_size"
    heads = heads or query_groups
    # Of both rules below. Divisors of the groups, and multiples of them that divide the query heads, which have a part
    # of a group each (SelfAttention's ranks_per_group).
    legal = [n for n in divisors(math.gcd(heads, ffn_size)) if query_groups % n == 0 or n % query_groups == 0]
    if ffn_size % size:
        raise ConfigError(
            f"{key}={size} does not divide the width of the feed-forward (model.ffn_hidden_size)={ffn_size}; it can be "
            f"{listed(legal)}"
        )
    if size not in legal:
        raise ConfigError(
            f"{key}={size} does not fit model.num_query_groups={query_groups} key-value heads (each rank has whole "
            f"groups, or a part of one) and model.num_attention_heads={heads}; it can be {listed(legal)}"
        )


RopeScaling = Literal["none", "linear", "dynamic", "ntk", "llama3", "yarn", "longrope"]
SCALED = ("linear", "dynamic", "llama3", "yarn", "longrope")
BY_LENGTH = ("dynamic", "longrope")
"""Scalings whose frequencies depend on the length of the sequence."""


@dataclass(frozen=True)
class QueryScaling:
    """Queries at position p are multiplied by 1 + beta ln(1 + floor((p + offset) / length))."""

    beta: float
    length: int
    offset: int = 0


class DecoderConfig(ModelConfig):
    """A decoder with rotary positions, RMSNorm, a gated feed-forward and grouped queries."""

    num_layers: PositiveInt
    """Transformer layers."""
    hidden_size: PositiveInt
    """Width of the residual stream."""
    num_attention_heads: PositiveInt
    """Query heads."""
    num_query_groups: PositiveInt | None = None
    """Key-value heads; each serves num_attention_heads / num_query_groups query heads.
    Default: num_attention_heads."""
    kv_channels: PositiveInt | None = None
    """Size of a head. Default: hidden_size / num_attention_heads."""
    ffn_hidden_size: PositiveInt | None = None
    """Inner width of the feed-forward. Default: 8/3 hidden_size rounded down to a multiple of 64 (at least 64)."""
    norm_epsilon: Annotated[float, Field(ge=0)] = 1e-6
    """Added to the mean square."""
    attention_dropout: Probability = 0.0
    """Dropout on the attention weights."""
    untie_embeddings_and_output_weights: bool = True
    """The output projection has a matrix of its own."""
    init_method_std: Annotated[float, Field(ge=0)] = 0.02
    """Standard deviation of the initial weights."""
    use_scaled_init_method: bool = True
    """Matrices that add to the residual stream start with init_method_std / sqrt(2 num_layers)."""
    attention_backend: str = "auto"
    """Name of the attention backend; auto: the fastest that serves the model on its device."""
    moe: dict[str, Any] | None = None
    """Options of a mixture of experts in place of the dense feed-forward; needs the feed-forward "moe"."""

    max_position_embeddings: PositiveInt = 4096
    """Positions that the model was trained for. With rope scaling more of them can be used."""
    rotary_base: Annotated[float, Field(gt=0)] = 10000.0
    """Base of the rotary wavelengths."""
    rope_scaling_type: RopeScaling = "none"
    """How rotary frequencies are changed for longer sequences: linear (position interpolation), dynamic (NTK-aware,
    by the length of the sequence), ntk (NTK-aware, by a fixed factor), llama3 (low frequencies only), yarn, or longrope
    (a factor for each frequency)."""
    rope_scaling_factor: Annotated[float, Field(ge=1)] | None = used_when(None, rope_scaling_type=SCALED)
    """Ratio of the longest sequence to that before scaling. longrope: default max_position_embeddings /
    original_max_position_embeddings."""
    original_max_position_embeddings: PositiveInt | None = used_when(
        None, rope_scaling_type=("llama3", "yarn", "longrope")
    )
    """Positions before scaling. Default: max_position_embeddings."""
    rope_ntk_alpha: Annotated[float, Field(gt=0)] | None = used_when(None, rope_scaling_type="ntk")
    """The base is multiplied by this to the power d / (d - 2), with d rotated channels."""
    rope_short_factor: list[float] | None = used_when(None, rope_scaling_type="longrope")
    """A divisor for each frequency, in sequences of at most original_max_position_embeddings."""
    rope_long_factor: list[float] | None = used_when(None, rope_scaling_type="longrope")
    """A divisor for each frequency, in longer sequences."""
    rope_low_freq_factor: Annotated[float, Field(gt=0)] = used_when(1.0, rope_scaling_type="llama3")
    """Frequencies that turn fewer times than this over the original positions are divided by the factor."""
    rope_high_freq_factor: Annotated[float, Field(gt=0)] = used_when(4.0, rope_scaling_type="llama3")
    """Frequencies that turn more times than this over the original positions stay; between the two they blend."""
    rope_beta_fast: Annotated[float, Field(gt=0)] = used_when(32.0, rope_scaling_type="yarn")
    """Frequencies that turn more times than this over the original positions stay."""
    rope_beta_slow: Annotated[float, Field(gt=0)] = used_when(1.0, rope_scaling_type="yarn")
    """Frequencies that turn fewer times than this over the original positions are divided by the factor."""
    rope_truncate: bool = used_when(True, rope_scaling_type="yarn")
    """Round the range of blended channels outwards to whole channels."""
    rope_attention_factor: Annotated[float, Field(gt=0)] | None = used_when(
        None, rope_scaling_type=("yarn", "longrope")
    )
    """Multiplies queries and keys. Default with yarn: m(rope_mscale) / m(rope_mscale_all_dim) when both are set, else
    m(1), with m(x) = 0.1 x ln(rope_scaling_factor) + 1; with longrope sqrt(1 + ln(rope_scaling_factor) /
    ln(original_max_position_embeddings))."""
    rope_mscale: Annotated[float, Field(ge=0)] | None = used_when(None, rope_scaling_type="yarn")
    """See rope_attention_factor."""
    rope_mscale_all_dim: Annotated[float, Field(ge=0)] | None = used_when(None, rope_scaling_type="yarn")
    """See rope_attention_factor."""

    @property
    def query_groups(self) -> int:
        return self.num_query_groups or self.num_attention_heads

    @property
    def head_dim(self) -> int:
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def rotary_dim(self) -> int:
        """Rotated channels of a head: all of them."""
        return self.head_dim

    @property
    def rotary_dim_key(self) -> str:
        """What says rotary_dim, for messages."""
        return "model.kv_channels" if self.kv_channels else "model.hidden_size / model.num_attention_heads"

    @property
    def ffn_size(self) -> int:
        # 8/3: three matrices of this width have as many weights as the two of a plain feed-forward of 4 hidden_size.
        return self.ffn_hidden_size or max(self.hidden_size * 8 // 3 // 64 * 64, 64)

    @property
    def output_init_std(self) -> float:
        return self.init_method_std / math.sqrt(2.0 * self.num_layers if self.use_scaled_init_method else 1.0)

    @property
    def feed_forward(self) -> str:
        return "dense" if self.moe is None else "moe"

    @property
    def max_sequence_length(self) -> int:
        """The longest sequence that the positions serve."""
        # Published files state in max_position_embeddings the positions before
        # scaling or those after it: the larger counts.
        original = self.original_max_position_embeddings or self.max_position_embeddings
        return max(self.max_position_embeddings, int(original * (self.rope_scaling_factor or 1.0)))

    def window_of(self, layer: int) -> int | None:
        """The sliding window of a layer, counted from 0; None: it sees everything before."""
        return None

    # Layers that differ from Llama's. A family that has one of these answers by its own property or method.

    def rotates(self, layer: int) -> bool:
        """Whether a layer, counted from 0, has rotary positions; False: it has none (NoPE)."""
        return True

    def scales_queries(self, layer: int) -> bool:
        """Whether the queries of a layer grow with their positions, by `query_scaling`."""
        return False

    @property
    def query_scaling(self) -> QueryScaling | None:
        """How queries grow with their positions."""
        return None

    @property
    def rotary_base_in_windows(self) -> float | None:
        """The base of the unscaled frequencies of layers with a window; None: these have the frequencies of all."""
        return None

    @property
    def norms_of_branches(self) -> bool:
        """x + norm(f(x)) in place of x + f(norm(x))."""
        return False

    @property
    def qk_layernorm_over_heads(self) -> bool:
        """Queries and keys are normalized over all heads together, in place of each head."""
        return False

    @property
    def qk_layernorm_after_rotary(self) -> bool:
        """Norms of heads are behind the rotation."""
        return False

    # Fixed values for keys of the shared blocks that the family does not expose.

    @property
    def activation(self) -> Literal["swiglu", "geglu_tanh", "clamped_swiglu", "limited_swiglu"]:
        return "swiglu"

    @property
    def add_bias_linear(self) -> bool:
        """Biases in the feed-forward."""
        return False

    @property
    def add_attention_output_bias(self) -> bool:
        """A bias on the output of attention."""
        return self.add_bias_linear

    @property
    def rotary_interleaved(self) -> bool:
        return False

    @property
    def hidden_dropout(self) -> float:
        return 0.0

    if TYPE_CHECKING:  # a family answers these by a property or by a key

        @property
        def normalization(self) -> Literal["LayerNorm", "RMSNorm"]: ...

        @property
        def add_qkv_bias(self) -> bool: ...

        @property
        def qk_layernorm(self) -> bool: ...


class RMSNormDecoderConfig(DecoderConfig):
    """A decoder whose norms are RMSNorm."""

    @property
    def normalization(self) -> Literal["LayerNorm", "RMSNorm"]:
        return "RMSNorm"


class PartialRotaryConfig(RMSNormDecoderConfig):
    """A decoder that rotates a share of the channels of each head."""

    rotary_percent: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of each head that is rotated, its first channels."""

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.rotary_percent)

    @property
    def rotary_dim_key(self) -> str:
        if self.rotary_percent == 1.0:
            return super().rotary_dim_key
        return f"model.rotary_percent={self.rotary_percent} of {self.head_dim} channels"


def check_decoder(config: Config) -> None:
    """Raise ConfigError for heads that do not divide, incomplete rope scaling, or samples that are too long."""
    model = config.model
    assert isinstance(model, DecoderConfig)
    _check_heads(model)
    if model.qk_layernorm_over_heads:
        # The norm of the keys is sharded as the keys are: whole heads for each rank.
        size = config.parallel.tensor_model_parallel_size
        must_divide("parallel.tensor_model_parallel_size", size, "model.num_query_groups", model.query_groups)
    check_tensor_parallel(
        config, query_groups=model.query_groups, ffn_size=model.ffn_size, heads=model.num_attention_heads
    )
    _check_rope_scaling(model)
    _check_whole_sequences(config, model)
    if config.data.seq_length > model.max_sequence_length:
        raise ConfigError(
            f"data.seq_length={config.data.seq_length} is longer than the {model.max_sequence_length} positions of the "
            f"model; use at most {model.max_sequence_length}, raise model.max_position_embeddings, or set "
            "model.rope_scaling_type and model.rope_scaling_factor"
        )


def check_moe_decoder(config: Config) -> None:
    """The same for a family whose layers are MoE: raise ConfigError also without experts."""
    check_decoder(config)
    model = config.model
    assert isinstance(model, DecoderConfig)
    MoEOptions(model)


def _check_heads(model: DecoderConfig) -> None:
    # Families with head sizes of their own, as of latent attention, do not divide the hidden size by heads.
    divides = type(model).head_dim is DecoderConfig.head_dim and model.kv_channels is None
    if divides and model.hidden_size % model.num_attention_heads:
        raise ConfigError(
            f"model.hidden_size={model.hidden_size} is not divisible by "
            f"model.num_attention_heads={model.num_attention_heads}; the number of heads can be "
            f"{listed(divisors(model.hidden_size))}, or set model.kv_channels"
        )
    must_divide("model.num_query_groups", model.query_groups, "model.num_attention_heads", model.num_attention_heads)
    if model.rotary_dim % 2:
        raise ConfigError(
            f"{model.rotary_dim_key}={model.rotary_dim} is odd; rotary positions turn pairs of channels, so it has to "
            "be even"
        )
    if model.rotary_dim == 0:
        raise ConfigError(
            f"{model.rotary_dim_key} leaves none to rotate; model.rotary_percent has to be at least "
            f"{2 / model.head_dim:.3g}"
        )


def _check_rope_scaling(model: DecoderConfig) -> None:
    if model.rope_scaling_type == "none":
        return
    if model.rope_scaling_type == "ntk":
        _check_ntk(model)
    elif model.rope_scaling_type == "longrope":
        _check_longrope(model)
    elif model.rope_scaling_factor is None:
        raise ConfigError(
            f"model.rope_scaling_type={model.rope_scaling_type} needs model.rope_scaling_factor, the ratio of the "
            "longest sequence to that before scaling (at least 1)"
        )
    # Equal in Llama 4, as the two below are in Kimi K2: a step in place of a range of blended channels.
    if model.rope_scaling_type == "llama3" and model.rope_low_freq_factor > model.rope_high_freq_factor:
        raise ConfigError(
            f"model.rope_low_freq_factor={model.rope_low_freq_factor} may not be above "
            f"model.rope_high_freq_factor={model.rope_high_freq_factor}"
        )
    if model.rope_scaling_type == "yarn" and model.rope_beta_slow > model.rope_beta_fast:
        raise ConfigError(
            f"model.rope_beta_slow={model.rope_beta_slow} can be at most model.rope_beta_fast={model.rope_beta_fast}"
        )
    if model.rope_scaling_type == "yarn" and model.rotary_base <= 1.0:
        raise ConfigError(
            f"model.rotary_base={model.rotary_base} has to be above 1 with model.rope_scaling_type=yarn, which divides "
            "by its logarithm"
        )
    # The base is raised to D / (D - 2).
    if model.rope_scaling_type == "dynamic" and model.head_dim < 4:
        raise ConfigError(f"model.rope_scaling_type=dynamic needs heads of at least 4 channels, not {model.head_dim}")


def _check_ntk(model: DecoderConfig) -> None:
    if model.rope_ntk_alpha is None:
        raise ConfigError("model.rope_scaling_type=ntk needs model.rope_ntk_alpha")
    if model.rotary_dim < 4:
        raise ConfigError(f"model.rope_scaling_type=ntk needs heads of at least 4 channels, not {model.rotary_dim}")


def _check_longrope(model: DecoderConfig) -> None:
    for key in ("rope_short_factor", "rope_long_factor"):
        factors = getattr(model, key)
        if factors is None or len(factors) != model.rotary_dim // 2:
            problem = "is not set" if factors is None else f"has {len(factors)} numbers"
            raise ConfigError(
                f"model.{key} {problem}; model.rope_scaling_type=longrope needs one for each of the "
                f"{model.rotary_dim // 2} frequencies"
            )
        if min(factors) <= 0:
            raise ConfigError(f"model.{key} has {min(factors)}; frequencies are divided by it, so it has to be above 0")
    if (original := model.original_max_position_embeddings or model.max_position_embeddings) < 2:
        raise ConfigError(
            f"model.original_max_position_embeddings={original} is below 2; model.rope_scaling_type=longrope divides "
            "by its logarithm"
        )


def _check_whole_sequences(config: Config, model: DecoderConfig) -> None:
    """Raise ConfigError where frequencies depend on the length of a sequence and a rank sees a part of it."""
    original = model.original_max_position_embeddings or model.max_position_embeddings
    size = config.parallel.context_parallel_size
    if size > 1 and model.rope_scaling_type in BY_LENGTH and config.data.seq_length > original:
        raise ConfigError(
            f"parallel.context_parallel_size={size} divides sequences, and model.rope_scaling_type="
            f"{model.rope_scaling_type} chooses frequencies by the length of a whole one; data.seq_length="
            f"{config.data.seq_length} can be at most {original} with it"
        )


# -- encoders ----------------------------------------------------------------------------------------


class EncoderConfig(Section):
    """Layers as BERT and vision transformers have them: heads that divide the width among them, LayerNorm, biases in
    all linear layers, no norms of heads, no rotary positions."""

    num_layers: PositiveInt
    """Transformer layers."""
    hidden_size: PositiveInt
    """Width of the residual stream."""
    num_attention_heads: PositiveInt
    """Attention heads."""
    ffn_hidden_size: PositiveInt | None = None
    """Inner width of the feed-forward. Default: 4 hidden_size."""
    norm_epsilon: Annotated[float, Field(ge=0)] = 1e-5
    """Added to the variance."""
    init_method_std: Annotated[float, Field(ge=0)] = 0.02
    """Standard deviation of the initial weights."""
    use_scaled_init_method: bool = True
    """Matrices that add to the residual stream start with init_method_std / sqrt(2 num_layers)."""
    attention_backend: str = "auto"
    """Name of the attention backend; auto: the fastest that serves the model on its device."""

    # Fixed values for keys that the shared blocks read.

    @property
    def normalization(self) -> Literal["LayerNorm"]:
        return "LayerNorm"

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
    def add_bias_linear(self) -> bool:
        return True

    @property
    def add_qkv_bias(self) -> bool:
        return True

    @property
    def qk_layernorm(self) -> bool:
        return False

    @property
    def rotary_interleaved(self) -> bool:
        return False

    @property
    def output_init_std(self) -> float:
        # Two matrices of each layer add to the residual stream, whose variance would otherwise grow with depth (GPT-2).
        return self.init_method_std / math.sqrt(2.0 * self.num_layers if self.use_scaled_init_method else 1.0)


# -- models without pipeline stages or context parallelism -------------------------------------------


def refuse_divided_sequences(config: Config) -> None:
    """Raise ConfigError for context parallelism, naming the key."""
    family = config.model.family
    if (size := config.parallel.context_parallel_size) > 1:
        raise ConfigError(
            f"parallel.context_parallel_size={size} divides sequences, and model.family={family} reads whole ones; "
            "set it to 1"
        )


def refuse_divided_sequences_and_layers(config: Config) -> None:
    """Raise ConfigError for context parallelism and for pipeline stages, naming the key."""
    refuse_divided_sequences(config)
    family = config.model.family
    if (size := config.parallel.pipeline_model_parallel_size) > 1:
        raise ConfigError(
            f"parallel.pipeline_model_parallel_size={size} divides layers into stages, and model.family={family} has "
            "none; set it to 1"
        )
