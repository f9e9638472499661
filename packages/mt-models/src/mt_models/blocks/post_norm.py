"""The post-norm transformer layer of the original transformer and of BERT, and a stack of them."""

from __future__ import annotations

from torch import Tensor, nn

from mt_core.nn.attention import AttentionCore, AttentionPattern
from mt_core.nn.dropout import Dropout
from mt_core.parallel.context import ParallelContext
from mt_core.parallel.pipeline.stage import Stage
from mt_models.blocks.attention import SelfAttention
from mt_models.blocks.layer_stack import LayerStack
from mt_models.blocks.transformer import LayerShape, block_norm


class PostNormLayer(nn.Module):
    """norm(x + attention(x)), then norm(x + feed_forward(x)): [batch, sequence, hidden] -> the same."""

    def __init__(self, config: LayerShape, core: AttentionCore, feed_forward: nn.Module, ctx: ParallelContext) -> None:
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
