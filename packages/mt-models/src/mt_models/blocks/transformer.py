"""Transformer layers, pre-norm and post-norm, and stacks of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Protocol

from torch import Tensor, nn

from mt_core.errors import ConfigError
from mt_core.nn.attention import AttentionCore, AttentionPattern
from mt_core.nn.cache import Cache
from mt_core.nn.dropout import Dropout
from mt_core.nn.kernels.choice import Kernels
from mt_core.nn.kernels.reference.layers import bias_dropout_add
from mt_core.nn.model import NumberedLayers
from mt_core.nn.norm import Norm, build_norm
from mt_core.nn.recompute import Call, Recompute, remade
from mt_core.parallel.context import ParallelContext
from mt_core.parallel.pipeline.stage import Stage
from mt_models.blocks.attention import AttentionConfigLike, SelfAttention
from mt_models.blocks.rotary import RotaryAngles

# -- layers by their numbers -------------------------------------------------------------------------


class LayerStack(nn.Module):
    """The layers that are held here, and the norm behind the last of the model if it is here and there is one.

    hyper_head: the sum of residual streams before this norm, where layers are on several.
    """

    hyper_head: nn.Module | None

    def __init__(
        self, layers: Mapping[int, nn.Module], recompute: Recompute, final_layernorm: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.recompute = recompute
        self.layers = NumberedLayers(layers.items())
        if recompute.selects("layernorm"):
            _remake_norms(layers.values())
        self.hyper_head = None
        self.final_layernorm = final_layernorm

    def through(self, x: Tensor, call: Call, stage: Stage | None) -> Tensor:
        """[B, S, H] -> [B, S, H] through the layers of the stage, each by `call`; default: all of them."""
        x = self.through_layers(x, call, stage)
        if self.final_layernorm is None or (stage is not None and not stage.last):
            return x
        return self.final_layernorm(x if self.hyper_head is None else self.hyper_head(x))

    def through_layers(self, x: Tensor, call: Call, stage: Stage | None) -> Tensor:
        """The same without the norm behind the last layer."""
        # With interleaved stages a process holds the layers of several, of which one pass runs those of one.
        numbers = self.layers.numbers() if stage is None else stage.layers
        return self.recompute.run([(number, self.layers[number]) for number in numbers], x, call)

    def stage_modules(self, stage: Stage) -> Iterator[nn.Module]:
        """The layers of the stage, and what is behind the last."""
        yield from (self.layers[number] for number in stage.layers)
        if stage.last and self.hyper_head is not None:
            yield self.hyper_head
        if stage.last and self.final_layernorm is not None:
            yield self.final_layernorm


class LayerConfigLike(AttentionConfigLike, Protocol):
    """What a transformer layer reads from the configuration of its model."""

    @property
    def num_layers(self) -> int: ...
    @property
    def hidden_dropout(self) -> float: ...


def block_norm(config: LayerConfigLike, ctx: ParallelContext) -> Norm:
    """The configured norm, over the hidden size."""
    return build_norm(config.normalization, config.hidden_size, config.norm_epsilon, ctx)


class TransformerLayer(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)): [batch, sequence, hidden] -> the same.

    attention: replaces the SelfAttention that the configuration describes. remakes_norms: what attention and
    feed-forward read is computed again in the backward pass instead of being kept.
    """

    remakes_norms = False

    def __init__(
        self,
        config: LayerConfigLike,
        core: AttentionCore,
        feed_forward: nn.Module,
        ctx: ParallelContext,
        attention: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.attention_dropout = Dropout(config.hidden_dropout, ctx)
        self.mlp_dropout = Dropout(config.hidden_dropout, ctx)
        self.add = bias_dropout_add
        self.input_layernorm = block_norm(config, ctx)
        self.self_attention = attention or SelfAttention(config, core, ctx)
        self.pre_mlp_layernorm = block_norm(config, ctx)
        self.mlp = feed_forward

    def forward(
        self,
        x: Tensor,
        pattern: AttentionPattern,
        angles: RotaryAngles | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        def attend(normed: Tensor) -> Tensor:
            return self.self_attention(normed, pattern, angles, cache)

        if self.remakes_norms:
            attended = _of_norm(self.input_layernorm, x, attend)
            x = self.residual(x, attended, self.attention_dropout)
            return self.residual(x, _of_norm(self.pre_mlp_layernorm, x, self.mlp), self.mlp_dropout)
        x, normed = self.input_layernorm.add(x)
        attended = attend(normed)
        x, normed = self.residual_and_norm(x, attended, self.attention_dropout, self.pre_mlp_layernorm)
        return self.residual(x, self.mlp(normed), self.mlp_dropout)

    def use_kernels(self, kernels: Kernels) -> None:
        # Without dropout it is a sum, for which torch has a kernel.
        if self.mlp_dropout.rate > 0.0:
            self.add = kernels.pick("bias_dropout_add", "dropout")

    def residual(self, x: Tensor, branch: Tensor, dropout: Dropout) -> Tensor:
        """x + dropout(branch)"""
        # Ranks have different positions of a sequence: the mask is drawn for
        # the whole and sharded, which no kernel does.
        if dropout.divides_positions:
            return x + dropout(branch)
        return self.add(branch, None, x, dropout.begin())

    def residual_and_norm(self, x: Tensor, branch: Tensor, dropout: Dropout, norm: Norm) -> tuple[Tensor, Tensor]:
        """(x + dropout(branch), the norm of it), without dropout in one pass where the norm's kernel can."""
        return norm.add(x, branch) if dropout.rate == 0.0 else norm.add(self.residual(x, branch, dropout))


def _of_norm(norm: Norm, x: Tensor, block: Callable[[Tensor], Tensor]) -> Tensor:
    """block(norm(x)), where the norm's result is not kept for the backward pass."""
    return remade(lambda: (norm(x),), block)


def _remake_norms(layers: Iterable[nn.Module]) -> None:
    for layer in layers:
        if not isinstance(layer, TransformerLayer) or type(layer).forward is not TransformerLayer.forward:
            raise ConfigError(
                f"recompute.recompute_modules has layernorm, which layers of the kind {type(layer).__name__} cannot "
                "compute again; remove it"
            )
        layer.remakes_norms = True


class ParallelResidualLayer(TransformerLayer):
    """x + attention(norm_1(x)) + feed_forward(norm_2(x)): both read the same x (GPT-NeoX).

    shares_norm: norm_2 is norm_1 (GPT-J, Falcon 7B).
    """

    def __init__(
        self,
        config: LayerConfigLike,
        core: AttentionCore,
        feed_forward: nn.Module,
        ctx: ParallelContext,
        attention: nn.Module | None = None,
        *,
        shares_norm: bool = False,
    ) -> None:
        super().__init__(config, core, feed_forward, ctx, attention)
        if shares_norm:
            del self.pre_mlp_layernorm
        self.shares_norm = shares_norm

    def forward(
        self,
        x: Tensor,
        pattern: AttentionPattern,
        angles: RotaryAngles | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        x, normed = self.input_layernorm.add(x)
        attended = self.attention_dropout(self.self_attention(normed, pattern, angles, cache))
        if not self.shares_norm:
            x, normed = self.pre_mlp_layernorm.add(x)
        return x + attended + self.mlp_dropout(self.mlp(normed))


class BranchNormLayer(TransformerLayer):
    """x + norm(attention(x)), then x + norm(feed_forward(x)): norms of what is added, and none before (OLMo 2)."""

    def __init__(
        self,
        config: LayerConfigLike,
        core: AttentionCore,
        feed_forward: nn.Module,
        ctx: ParallelContext,
        attention: nn.Module | None = None,
    ) -> None:
        super().__init__(config, core, feed_forward, ctx, attention)
        del self.input_layernorm, self.pre_mlp_layernorm
        self.post_self_attn_layernorm = block_norm(config, ctx)
        self.post_mlp_layernorm = block_norm(config, ctx)

    def forward(
        self,
        x: Tensor,
        pattern: AttentionPattern,
        angles: RotaryAngles | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        attended = self.post_self_attn_layernorm(self.self_attention(x, pattern, angles, cache))
        x = self.residual(x, attended, self.attention_dropout)
        return self.residual(x, self.post_mlp_layernorm(self.mlp(x)), self.mlp_dropout)


class TransformerStack(LayerStack):
    """Layers of a decoder, or of an encoder. final_layernorm: makes the norm behind the last; default: as in layers."""

    def __init__(
        self,
        layers: Mapping[int, nn.Module],
        config: LayerConfigLike,
        ctx: ParallelContext,
        recompute: Recompute,
        final_layernorm: Callable[[], nn.Module] | None = None,
        *,
        has_last: bool = True,
    ) -> None:
        # A function, since only the process with the last layer has the norm.
        build = final_layernorm or partial(block_norm, config, ctx)
        super().__init__(layers, recompute, build() if has_last else None)

    def forward(
        self,
        x: Tensor,
        pattern: AttentionPattern,
        angles: RotaryAngles | None = None,
        cache: Cache | None = None,
        stage: Stage | None = None,
    ) -> Tensor:
        """[B, S, H] -> [B, S, H] through the layers of the stage; default: all of them."""

        def call(number: int, layer: nn.Module, x: Tensor) -> Tensor:
            return layer(x, pattern, angles, cache)

        return self.through(x, call, stage)


# -- post-norm, as in the original transformer and in BERT -------------------------------------------


class PostNormLayer(nn.Module):
    """norm(x + attention(x)), then norm(x + feed_forward(x)): [batch, sequence, hidden] -> the same."""

    def __init__(
        self, config: LayerConfigLike, core: AttentionCore, feed_forward: nn.Module, ctx: ParallelContext
    ) -> None:
        super().__init__()
        self.attention_dropout = Dropout(config.hidden_dropout, ctx)
        self.mlp_dropout = Dropout(config.hidden_dropout, ctx)
        self.self_attention = SelfAttention(config, core, ctx)
        self.post_attention_layernorm = block_norm(config, ctx)
        self.mlp = feed_forward
        self.post_mlp_layernorm = block_norm(config, ctx)

    def forward(self, x: Tensor, pattern: AttentionPattern) -> Tensor:
        x = self.post_attention_layernorm(x + self.attention_dropout(self.self_attention(x, pattern, None, None)))
        return self.post_mlp_layernorm(x + self.mlp_dropout(self.mlp(x)))


class PostNormStack(LayerStack):
    """A stack without a final norm: each layer ends in a norm."""

    def forward(self, x: Tensor, pattern: AttentionPattern, stage: Stage | None = None) -> Tensor:
        """[B, S, H] -> [B, S, H] through the layers of the stage; default: all of them."""
        # No angles and no cache: encoders alone are post-norm, with learned positions.
        return self.through(x, lambda number, layer, x: layer(x, pattern), stage)
