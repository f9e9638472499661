"""MiniMax-M3, text: pre-norm layers of attention to all keys or to chosen blocks, norms that multiply by 1 + weight."""

from __future__ import annotations

from functools import partial

from mt_core.errors import ConfigError
from mt_core.nn.attention import AttentionCore
from mt_core.nn.build_context import ModelBuildContext
from mt_core.nn.recompute import recomputed
from mt_models.blocks.attention import SelfAttention
from mt_models.blocks.block_sparse_attention import BlocksOfPass, BlockSparseAttention
from mt_models.blocks.decoder import RotaryDecoder, attention_core, freeze
from mt_models.blocks.norm import ZeroCenteredRMSNorm
from mt_models.blocks.transformer import TransformerLayer
from mt_models.minimax_m3.config import MiniMaxM3Config

FLEX, AUTO = "flex", "auto"


class MiniMaxM3Layer(TransformerLayer):
    """x + attention(norm(x)), then x + feed_forward(norm(x)): [batch, sequence, hidden] -> the same."""

    def __init__(self, config: MiniMaxM3Config, context: ModelBuildContext, number: int, of_pass: BlocksOfPass) -> None:
        ctx = context.parallel
        attention = self._attention(config, context, config.sparse_layers[number], of_pass)
        feed_forward = context.feed_forward(config.feed_forward, config, number)
        super().__init__(config, attention.core, feed_forward, ctx, attention)
        # Replace the norms that TransformerLayer has built: these multiply by 1 + weight.
        self.input_layernorm = ZeroCenteredRMSNorm(config.hidden_size, config.norm_epsilon, ctx)
        self.pre_mlp_layernorm = ZeroCenteredRMSNorm(config.hidden_size, config.norm_epsilon, ctx)

    @staticmethod
    def _attention(
        config: MiniMaxM3Config, context: ModelBuildContext, sparse: bool, of_pass: BlocksOfPass
    ) -> SelfAttention:
        ctx = context.parallel
        attention: SelfAttention
        if sparse:
            attention = BlockSparseAttention(config, block_sparse_core(config, context), ctx, of_pass)
            # Nothing gives it a gradient.
            freeze(attention.indexer)
        else:
            attention = SelfAttention(config, attention_core(config, context), ctx)
        # As above.
        norm = partial(ZeroCenteredRMSNorm, config.head_dim, config.norm_epsilon, ctx, per_head=True)
        attention.q_layernorm, attention.k_layernorm = norm(), norm()
        return attention


def block_sparse_core(config: MiniMaxM3Config, context: ModelBuildContext) -> AttentionCore:
    """The attention core of model.attention_backend. `auto` is flex on a GPU where it supports the model, if sequences
    of data.seq_length are long enough for queries to leave out blocks of keys: other backends compute all scores."""
    backend, length = config.attention_backend, context.config.data.seq_length
    automatic, leaves_out = backend == AUTO, config.leaves_blocks_out(length)

    def core(backend: str) -> AttentionCore:
        return context.attention(
            backend,
            num_heads=config.num_attention_heads,
            num_query_groups=config.query_groups,
            head_dim=config.head_dim,
            dropout=config.attention_dropout,
            # The choice of blocks is a mask of each head. Generated texts may be longer than those of training.
            bias=leaves_out or (automatic and config.leaves_blocks_out(config.max_sequence_length)),
        )

    if backend == FLEX and leaves_out:
        return with_tiles(core(FLEX), context)
    if automatic and leaves_out and context.parallel.device.type == "cuda":
        try:
            return with_tiles(core(FLEX), context)
        except ConfigError:
            # The summary of the run has the reason, as of all backends that auto passes over.
            return core(AUTO)
    return core(backend)


def with_tiles(core: AttentionCore, context: ModelBuildContext) -> AttentionCore:
    """The core of flex, with one that leaves tiles out where blocks are chosen."""
    import torch
    from torch.nn.attention.flex_attention import flex_attention

    from mt_models.blocks.block_sparse_flex import BlockSparseFlex

    sparse = BlockSparseFlex(torch.compile(flex_attention), core)
    return recomputed(sparse) if context.recompute.selects("core_attn") else sparse


class MiniMaxM3Model(RotaryDecoder):
    """tokens [B, S] -> logits [B, S, vocab]"""

    config: MiniMaxM3Config

    def __init__(self, config: MiniMaxM3Config, context: ModelBuildContext) -> None:
        of_pass = BlocksOfPass()
        super().__init__(
            config,
            context,
            lambda number: MiniMaxM3Layer(config, context, number, of_pass),
            partial(ZeroCenteredRMSNorm, config.hidden_size, config.norm_epsilon, context.parallel),
        )


def build_minimax_m3(config: MiniMaxM3Config, context: ModelBuildContext) -> MiniMaxM3Model:
    """See `ModelSpec.build`."""
    return MiniMaxM3Model(config, context)
