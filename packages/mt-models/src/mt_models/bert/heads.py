"""BERT's heads: MLM, the pooler of the first position, sentence order."""

from __future__ import annotations

from torch import Tensor, nn

from mt_core.nn.activations import activate
from mt_core.nn.layout import normal
from mt_core.nn.norm import build_norm
from mt_core.parallel.context import ParallelContext
from mt_models.bert.config import BertConfig
from mt_models.blocks.replicated import ReplicatedLinear


class MaskedWordHead(nn.Module):
    """norm(activation(W x + b)), the input of the output layer: [B, S, H] -> the same."""

    def __init__(self, config: BertConfig, ctx: ParallelContext) -> None:
        super().__init__()
        self.activation = config.activation
        width = config.hidden_size
        # Replicated, as in Megatron; it is applied to S sharded over ranks,
        # unlike the pooler, which reads one position.
        self.dense = ReplicatedLinear(width, width, ctx, init=normal(config.init_method_std), on_sequence=True)
        self.layer_norm = build_norm(config.normalization, width, config.norm_epsilon, ctx)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer_norm(activate(self.activation, self.dense(x)))


class Pooler(nn.Module):
    """tanh(W x + b) of one position: [B, H] -> [B, H]."""

    def __init__(self, config: BertConfig, ctx: ParallelContext) -> None:
        super().__init__()
        width = config.hidden_size
        self.dense = ReplicatedLinear(width, width, ctx, init=normal(config.init_method_std))

    def forward(self, x: Tensor) -> Tensor:
        return self.dense(x).tanh()


class BinaryHead(ReplicatedLinear):
    """Logits of "in order" and "exchanged": [B, H] -> [B, 2]."""

    def __init__(self, config: BertConfig, ctx: ParallelContext) -> None:
        super().__init__(config.hidden_size, 2, ctx, init=normal(config.init_method_std))
