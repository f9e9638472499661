"""Floating-point operations of a decoder for each token, from its configuration.

Only matrix products count, 2 operations per multiply-add; norms, activations and the
softmax are left out, as usual. Backward is twice forward; recomputation is not counted.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Any, Protocol

from mt_core.config.schema import Config
from mt_core.errors import ConfigError
from mt_models.blocks.flop_convention import Convention
from mt_models.blocks.moe import MoEConfigLike, MoEOptions


class LayerFlopConfigLike(Protocol):
    """What the count of a layer reads from a configuration."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def num_attention_heads(self) -> int: ...
    @property
    def query_groups(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def ffn_size(self) -> int: ...
    @property
    def activation(self) -> str: ...


class FlopConfigLike(LayerFlopConfigLike, Protocol):
    """What the count of a decoder reads from a configuration."""

    @property
    def num_layers(self) -> int: ...
    @property
    def feed_forward(self) -> str: ...
    @property
    def vocab_size(self) -> int | None: ...
    def window_of(self, layer: int) -> int | None: ...


@dataclass(frozen=True)
class Flops:
    """Floating-point operations by part: the fields of a subclass."""

    @property
    def forward(self) -> float:
        """The sum of the parts."""
        return sum(astuple(self))

    @property
    def training(self) -> float:
        """Forward and backward, all weights trained."""
        # Backward computes two products for each one of forward: the gradient of the input and that of the weight.
        return 3 * self.forward


@dataclass(frozen=True)
class TokenFlops(Flops):
    """Forward FLOPs for each token, over all layers."""

    attention_projections: float
    """Queries, keys, values and the output of attention."""
    attention_core: float
    """Scores and their product with the values."""
    feed_forward: float
    output: float
    """Logits."""


def flops_per_token(
    config: FlopConfigLike, seq_length: int, *, convention: Convention = "seen", feed_forward: float | None = None
) -> TokenFlops:
    """The mean over the tokens of a sequence of `seq_length`.

    feed_forward: forward FLOPs for each token of one layer's feed-forward, for one that is not dense. Raises
    ConfigError when it is missing, or the vocabulary is unknown.
    """
    if feed_forward is None:
        feed_forward = _known_feed_forward_flops(config)
    keys = sum(mean_keys(seq_length, config.window_of(layer), convention) for layer in range(config.num_layers))
    return TokenFlops(
        attention_projections=config.num_layers * projection_flops(config),
        attention_core=core_flops(config, keys),
        feed_forward=config.num_layers * feed_forward,
        output=output_flops(config.hidden_size, config.vocab_size),
    )


def projection_flops(config: LayerFlopConfigLike) -> float:
    """FLOPs of one layer's projections: queries, keys, values and its output."""
    # 2 H x (N D) each for queries and for the output, 2 H x (G D) each for keys and values
    return 4 * config.hidden_size * config.head_dim * (config.num_attention_heads + config.query_groups)


def core_flops(config: LayerFlopConfigLike, keys: float) -> float:
    """FLOPs of a query: its scores of so many keys, and their product with the values."""
    # 2 D for a score and 2 D for its share of the sum of values, of each head
    return 4 * config.num_attention_heads * config.head_dim * keys


def dense_feed_forward_flops(config: LayerFlopConfigLike) -> float:
    """FLOPs of one layer's feed-forward."""
    matrices = feed_forward_matrices(config.activation)
    return 2 * matrices * config.hidden_size * config.ffn_size


def feed_forward_matrices(activation: str) -> int:
    """3 for gated activations (gate, up, down), else 2."""
    # Imported here, since it needs torch, and configurations do without.
    from mt_core.nn.activations import is_gated

    return 3 if is_gated(activation) else 2


def output_flops(hidden_size: int, vocab_size: int | None) -> float:
    """FLOPs of the logits. Raises ConfigError when the vocabulary is unknown."""
    if vocab_size is None:
        raise ConfigError("model.vocab_size is not set, and the output layer's FLOPs depend on it")
    return 2 * hidden_size * vocab_size


def _known_feed_forward_flops(config: FlopConfigLike) -> float:
    """One layer's feed-forward. Raises ConfigError if it is not the dense one."""
    if config.feed_forward != "dense":
        raise ConfigError(
            f'the feed-forward "{config.feed_forward}" is counted by the plugin that brings it; pass its FLOPs as '
            "feed_forward"
        )
    return dense_feed_forward_flops(config)


def mean_keys(seq_length: int, window: int | None, convention: Convention) -> float:
    """Keys that a query is multiplied with, on average over the sequence."""
    if convention == "full":
        return seq_length
    reach = seq_length if window is None else min(window, seq_length)
    # 1, 2, ... reach for the first positions, then reach for each.
    return (reach * (reach + 1) / 2 + (seq_length - reach) * reach) / seq_length


# -- MoE layers: a token's active experts, not all ---------------------------------------------------


class MoEFlopConfigLike(MoEConfigLike, Protocol):
    """What is read from the configuration of a model."""

    @property
    def activation(self) -> str: ...


def moe_flops(config: MoEFlopConfigLike) -> float:
    """Forward FLOPs for each token of one feed-forward, the mean over the layers: router, the chosen experts, shared
    experts and their gate; of dense layers the dense block."""
    moe, matrices = MoEOptions(config), feed_forward_matrices(config.activation)
    hidden, latent = config.hidden_size, moe["moe_latent_size"]
    width = latent or hidden
    # With a latent the experts are `latent` wide, between a down and an up projection that all experts share.
    experts = 2 * matrices * width * moe.ffn_size * active_experts(moe) + (4 * hidden * latent if latent else 0)
    shared = 2 * matrices * hidden * (moe.shared_size or 0)
    # The router has a row for each expert, whether chosen or not; the gate of the shared expert is one row.
    gates = 2 * hidden * (moe.num_experts + moe["moe_num_zero_experts"] + bool(moe["moe_shared_expert_gate"]))
    dense = 2 * matrices * hidden * config.ffn_size
    sparse_layers = sum(moe.layers)
    total = sparse_layers * (experts + shared + gates) + (config.num_layers - sparse_layers) * dense
    return total / config.num_layers


def active_experts(moe: MoEOptions) -> float:
    """Experts of a token that have matrices, on average where choices are even: others return the token as it is."""
    return moe.topk * moe.num_experts / (moe.num_experts + moe["moe_num_zero_experts"])


def inactive_parameters(config: MoEFlopConfigLike) -> int:
    """Weights of the experts that a token does not use: total parameters minus these are the active ones."""
    moe, matrices = MoEOptions(config), feed_forward_matrices(config.activation)
    width = moe["moe_latent_size"] or config.hidden_size
    return round(sum(moe.layers) * (moe.num_experts - active_experts(moe)) * matrices * width * moe.ffn_size)


def training_flops(config: Config) -> float:
    """FLOPs of training on a sample, for decoders whose layers are all alike but for experts and windows
    (`ModelSpec.training_flops`)."""
    model: Any = config.model
    length = config.data.seq_length
    return length * flops_per_token(model, length, feed_forward=experts_flops(model)).training


def predicting_training_flops(config: Config) -> float:
    """The same for decoders with layers of multi-token prediction (`with_predicted_layers`)."""
    model: Any = config.model
    length = config.data.seq_length
    forward = _forward(model, length)
    if depths := model.mtp_num_layers:
        layers = _forward(model.with_predicted_layers(), length) - forward
        # 4 H^2: eh_proj, [H, 2 H]. Each depth computes logits of its own with the model's LM head.
        each = 4 * model.hidden_size**2 + output_flops(model.hidden_size, model.vocab_size)
        forward += layers + depths * each
    return 3 * length * forward


def _forward(model: Any, length: int) -> float:
    """For each token, without what multi-token prediction adds to the layers."""
    return flops_per_token(model, length, feed_forward=experts_flops(model)).forward


def experts_flops(model: Any) -> float | None:
    """Forward FLOPs for each token of a layer's feed-forward, on average; None for a dense model."""
    return moe_flops(model) if getattr(model, "moe", None) is not None else None
