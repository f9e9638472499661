"""Keys of gated delta nets that configurations of several families have, their rules and FLOPs. Imports no torch."""

from __future__ import annotations

from typing import Literal, Protocol

from mt_core.config.checks import must_divide
from mt_core.config.fields import PositiveInt, Section
from mt_core.config.layer_pattern import pattern_of, read_pattern
from mt_core.config.schema import Config
from mt_models.blocks.flop_convention import Convention

FREQ = "model.linear_attention_freq"


class DeltaNetKeys(Section):
    """Sizes and kinds of the gated delta nets of a decoder."""

    linear_attention_freq: PositiveInt | str = 4
    """Every so many layers one has attention, the others a gated delta net; or a list pattern with 1 for a gated delta
    net and 0 for attention, such as "([1]*3+[0]*1)*12"."""
    linear_num_key_heads: PositiveInt = 16
    """Query and key heads of a gated delta net."""
    linear_num_value_heads: PositiveInt = 32
    """Value heads of a gated delta net; a key head serves linear_num_value_heads / linear_num_key_heads of them."""
    linear_key_head_dim: PositiveInt = 128
    """Channels of a query and key head."""
    linear_value_head_dim: PositiveInt = 128
    """Channels of a value head."""
    linear_conv_kernel_dim: PositiveInt = 4
    """Positions that the convolutions of queries, keys and values see: a position and those before it."""
    linear_chunk_size: PositiveInt = 64
    """Positions that training computes together. Changes speed, memory and rounding, not the result."""
    linear_attention_backend: Literal["auto", "torch", "fla", "triton"] = "auto"
    """What computes the delta rule: torch, the kernels of flash-linear-attention (fla), mt's Triton kernels, or auto,
    which is fla on a GPU where it is installed, and else torch, on a GPU with mt's kernel for the steps of decoding.
    triton computes in bf16, with keys of at most 128 channels and chunks of 32 or 64 positions."""

    @property
    def linear_key_size(self) -> int:
        """Channels of all query heads, and of all key heads."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def linear_value_size(self) -> int:
        """Channels of all value heads."""
        return self.linear_num_value_heads * self.linear_value_head_dim


class HasDeltaNets(Protocol):
    """A configuration with these keys."""

    @property
    def num_layers(self) -> int: ...
    @property
    def linear_attention_freq(self) -> int | str: ...


def linear_layers(config: HasDeltaNets) -> list[bool]:
    """For each layer whether it is a gated delta net. Raises ConfigError for a pattern that cannot be read."""
    freq, layers = config.linear_attention_freq, config.num_layers
    if isinstance(freq, int) or freq.isdigit():
        return [bool((layer + 1) % int(freq)) for layer in range(layers)]
    return read_pattern(freq, layers, FREQ)


def frequency_of_attention(layers: list[bool]) -> int | str:
    """`linear_attention_freq` for these layers: a number where every n-th and no other has attention."""
    every = layers.index(False) + 1 if False in layers else len(layers) + 1
    if layers == [bool((layer + 1) % every) for layer in range(len(layers))]:
        return every
    return pattern_of(layers)


def check_delta_nets(config: Config) -> None:
    """Raise ConfigError for heads that do not divide, over one another or over ranks, and for a pattern of other
    length."""
    model, parallel = config.model, config.parallel
    linear_layers(model)  # type: ignore[arg-type]
    keys, values = model.linear_num_key_heads, model.linear_num_value_heads  # type: ignore[attr-defined]
    must_divide("model.linear_num_key_heads", keys, "model.linear_num_value_heads", values)
    size = parallel.tensor_model_parallel_size
    must_divide("parallel.tensor_model_parallel_size", size, "model.linear_num_key_heads (a rank has whole ones)", keys)
    name = "the value heads (model.linear_num_value_heads) of a tensor-parallel rank"
    must_divide("parallel.context_parallel_size", parallel.context_parallel_size, name, values // size)


# -- FLOPs for each token --------------------------------------------------------------------------------


def delta_projection_flops(hidden: int, config: DeltaNetKeys) -> float:
    """FLOPs of one layer's projections: q, k, v, z, b and a in, values out."""
    rows = 2 * config.linear_key_size + 2 * config.linear_value_size + 2 * config.linear_num_value_heads
    return 2.0 * hidden * (rows + config.linear_value_size)


def delta_convolution_flops(config: DeltaNetKeys) -> float:
    """FLOPs of one layer's convolutions."""
    return 2.0 * (2 * config.linear_key_size + config.linear_value_size) * config.linear_conv_kernel_dim


def delta_rule_flops(config: DeltaNetKeys, seq_length: int, convention: Convention) -> float:
    """FLOPs of one layer's delta rule in chunks. full: whole chunks, filled ones included; seen: positions up to a
    token's own in its chunk."""
    size = min(config.linear_chunk_size, seq_length)
    whole, rest = divmod(seq_length, size)
    if convention == "full":
        # The last chunk is filled with zeros to its full size.
        tokens = (whole + (rest > 0)) * size / seq_length
        partners = tokens * size
    else:
        tokens = 1.0
        partners = (whole * size * (size + 1) + rest * (rest + 1)) / 2 / seq_length
    keys, values = config.linear_key_size, config.linear_value_size
    # Keys and queries with keys; the triangular system's two right sides; scores with the updates.
    decayed_keys = config.linear_num_value_heads * config.linear_key_head_dim
    within = 2 * partners * (2 * keys + decayed_keys + 2 * values)
    # The state is read by keys and by queries, and written.
    return within + tokens * 6 * values * config.linear_key_head_dim
