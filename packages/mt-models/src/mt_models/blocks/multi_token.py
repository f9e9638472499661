"""Multi-token prediction (DeepSeek-V3, 2024): further layers that predict the tokens after the next one.

Depth d (from 1) predicts at position i the token i + d + 1, from the state of depth d - 1 (of the model itself before
the first depth) and the token embedding of token i + d:

    h_d = norm(layer(eh_proj [enorm(embedding(t_{i+d})), hnorm(h_{d-1})]))

Embedding and LM head are those of the model. The losses are for training alone; decoding may draft
tokens with the layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from mt_core.nn.attention import AttentionPattern
from mt_core.nn.auxiliary import AuxiliaryLoss
from mt_core.nn.cache import Cache
from mt_core.nn.layout import normal
from mt_core.nn.loss import Loss, weighted_mean
from mt_core.nn.model import NumberedLayers
from mt_core.nn.norm import Normalization, build_norm
from mt_core.nn.recompute import Recompute
from mt_core.parallel.context import ParallelContext
from mt_models.blocks.linear import ReplicatedLinear
from mt_models.blocks.rotary import RotaryAngles

EmbedAhead = Callable[[int], Tensor]
"""How many places ahead -> embeddings of the tokens that far behind each position, [B, S, H]"""
Logits = Callable[[Tensor], Tensor]
"""[B, S, H] -> [B, S, vocab]"""


class DepthConfigLike(Protocol):
    """What a depth reads from the configuration of the model."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def init_method_std(self) -> float: ...


class PredictionConfigLike(DepthConfigLike, Protocol):
    """What all depths together read."""

    @property
    def normalization(self) -> Normalization: ...
    @property
    def norm_epsilon(self) -> float: ...
    @property
    def mtp_num_layers(self) -> int: ...
    @property
    def mtp_loss_scaling_factor(self) -> float: ...


class TokenPrediction(nn.Module):
    """One depth. eh_proj [H, 2H] is replicated on every tensor-parallel rank. norm: makes a norm over the hidden
    size."""

    def __init__(
        self, config: PredictionConfigLike, layer: nn.Module, norm: Callable[[], nn.Module], ctx: ParallelContext
    ) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.enorm = norm()
        self.hnorm = norm()
        init = normal(config.init_method_std)
        # Replicated: a column-parallel matrix would need an all-gather before the layer, which takes whole rows of H.
        self.eh_proj = ReplicatedLinear(2 * hidden, hidden, ctx, init=init, bias=False, on_sequence=True)
        self.mtp_model_layer = layer
        self.final_layernorm = norm()

    def head_input(self, state: Tensor) -> Tensor:
        """State of the depth -> the input of the LM head: the same."""
        return state

    def forward(
        self,
        hidden: Tensor,
        embedded: Tensor,
        pattern: AttentionPattern,
        angles: RotaryAngles | None,
        cache: Cache | None = None,
    ) -> Tensor:
        """hidden: of the depth before, embedded: of the token that it predicted; [B, S, H] -> the same"""
        # [B, S, 2 H], the embedding first, as in DeepSeek's checkpoints. Norms make the two comparable in size.
        x = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), -1))
        return self.final_layernorm(self.mtp_model_layer(x, pattern, angles, cache))


class StreamTokenPrediction(TokenPrediction):
    """One depth on n residual streams: [B, S, n H] of the depth before -> the same. The layer's streams start as
    e_proj enorm(embedding) + h_proj hnorm(X_i). Both matrices, [H, H], are replicated on every tensor-parallel rank.

    Subclasses have `head_input`, and what it needs behind the layer.
    """

    def __init__(
        self,
        config: DepthConfigLike,
        layer: nn.Module,
        ctx: ParallelContext,
        *,
        streams: int,
        enorm: nn.Module,
        hnorm: nn.Module,
    ) -> None:
        nn.Module.__init__(self)
        hidden, init = config.hidden_size, normal(config.init_method_std)
        self.streams, self.enorm, self.hnorm = streams, enorm, hnorm
        self.e_proj = ReplicatedLinear(hidden, hidden, ctx, init=init, bias=False, on_sequence=True)
        self.h_proj = ReplicatedLinear(hidden, hidden, ctx, init=init, bias=False, on_sequence=True)
        self.mtp_model_layer = layer

    def normed(self, hidden: Tensor) -> Tensor:
        """hnorm of each stream: [B, S, n H] -> [B, S, n, H]"""
        normed: Tensor = self.hnorm(hidden.unflatten(-1, (self.streams, -1)))
        return normed

    def forward(
        self,
        hidden: Tensor,
        embedded: Tensor,
        pattern: AttentionPattern,
        angles: RotaryAngles | None,
        cache: Cache | None = None,
    ) -> Tensor:
        started = self.e_proj(self.enorm(embedded)).unsqueeze(-2) + self.h_proj(self.normed(hidden))
        streams: Tensor = self.mtp_model_layer(started.flatten(-2), pattern, angles, cache)
        return streams


class MultiTokenPrediction(nn.Module):
    """All depths, and a loss for each: mtp_loss_scaling_factor / depths times the mean over the micro-batch's
    counted positions, reported as `mtp_{d}_loss`.

    layer: makes the transformer layer of depth number d, from 0. norm: makes a norm; default: the configured one.
    depth_type: the kind of a depth; default: TokenPrediction.
    """

    def __init__(
        self,
        config: PredictionConfigLike,
        layer: Callable[[int], nn.Module],
        loss: Loss,
        recompute: Recompute,
        ctx: ParallelContext,
        norm: Callable[[], nn.Module] | None = None,
        depth_type: type[TokenPrediction] | None = None,
    ) -> None:
        super().__init__()
        depths = range(config.mtp_num_layers)
        self.loss, self.recompute = loss, recompute
        self.weight = config.mtp_loss_scaling_factor / config.mtp_num_layers
        build = norm or partial(build_norm, config.normalization, config.hidden_size, config.norm_epsilon, ctx)
        kind = depth_type or TokenPrediction
        self.layers = NumberedLayers((depth, kind(config, layer(depth), build, ctx)) for depth in depths)
        self.losses = nn.ModuleList(AuxiliaryLoss(f"mtp_{depth + 1}_loss") for depth in depths)

    def forward(
        self,
        hidden: Tensor,
        batch: Mapping[str, Tensor],
        embed_ahead: EmbedAhead,
        logits: Logits,
        pattern: AttentionPattern,
        angles: RotaryAngles | None,
    ) -> Tensor:
        """hidden [B, S, H], the input of the LM head -> the same, with the losses attached to its autograd graph.

        batch: tokens, labels [B, S], loss_mask [B, S], maybe segment_ids [B, S].
        """
        # `state` passes from depth to depth; to `lm_head_input` the losses are tied one by one.
        # tokens t0 t1 t2 t3, labels t1 t2 t3 t4. Depth 1, at position 0: state of t0, embedding of t1, target t2.
        lm_head_input, state = hidden, hidden
        for depth in self.layers.numbers():
            # What is embedded behind the end does not count: the mask, shifted by as much, leaves these positions out.
            state = self._predict(depth, state, embed_ahead(depth + 1), pattern, angles)
            layer = self.layers[depth]
            assert isinstance(layer, TokenPrediction)
            predicted = logits(layer.head_input(state))
            loss = self.weight * self._mean_loss(predicted, batch, depth + 1)
            lm_head_input = self.losses[depth](lm_head_input, loss)
        return lm_head_input

    def _predict(
        self, depth: int, state: Tensor, embedded: Tensor, pattern: AttentionPattern, angles: RotaryAngles | None
    ) -> Tensor:
        def call(number: int, layer: nn.Module, x: Tensor) -> Tensor:
            return layer(x, embedded, pattern, angles)

        return self.recompute.run([(depth, self.layers[depth])], state, call)

    def _mean_loss(self, logits: Tensor, batch: Mapping[str, Tensor], by: int) -> Tensor:
        weights = shifted(batch["loss_mask"], by)
        if (segments := batch.get("segment_ids")) is not None:
            # A target in the next document cannot be predicted from this one. Zeros shifted in may
            # equal a segment's number, but the loss mask is 0 there.
            weights = weights * (shifted(segments, by) == segments)
        losses = self.loss(logits, {"labels": shifted(batch["labels"], by), "loss_mask": weights})
        return weighted_mean(losses, weights)


def shifted(x: Tensor, by: int) -> Tensor:
    """[B, S] -> [B, S] shifted left by `by`, padded with zeros."""
    moved = torch.zeros_like(x)
    if by < x.shape[1]:
        moved[:, :-by] = x[:, by:]
    return moved
