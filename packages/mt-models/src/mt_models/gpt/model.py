"""The GPT model: token and position embeddings, a stack of transformer layers, logits."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from mt_core.nn.attention import AttentionPattern
from mt_core.nn.build_context import ModelBuildContext
from mt_core.nn.dropout import Dropout
from mt_core.nn.layout import LayoutModule, normal
from mt_core.nn.norm import build_norm
from mt_core.optim.param_groups import decays, is_table
from mt_core.parallel.context import ParallelContext
from mt_models.blocks.attention import SelfAttention
from mt_models.blocks.decoder import TokenEmbedding
from mt_models.blocks.embedding import LearnedTable, like_token_embeddings
from mt_models.blocks.multi_token import TokenPrediction
from mt_models.blocks.position_bias import alibi_slopes
from mt_models.blocks.predicting_decoder import PredictsTokens
from mt_models.blocks.residual_streams import ConnectedTransformerLayer, DecoderOnStreams, stream_connection
from mt_models.blocks.rotary import FixedRotary, RotaryAngles, inverse_frequencies
from mt_models.blocks.stream_prediction import StreamPrediction
from mt_models.blocks.transformer import ParallelResidualLayer, TransformerLayer
from mt_models.gpt.config import GPTConfig


class GPTEmbedding(TokenEmbedding):
    """Token embeddings, plus learned positions or a norm if configured, then dropout."""

    def __init__(self, config: GPTConfig, ctx: ParallelContext) -> None:
        super().__init__(config, ctx)
        self.multiplier = config.embedding_multiplier
        self.dropout = Dropout(config.hidden_dropout, ctx)
        self.position_embeddings: LearnedTable | None = None
        if config.table_size is not None:
            init = normal(config.init_method_std)
            self.position_embeddings = LearnedTable(config.table_size, config.hidden_size, init, ctx)
        self.layernorm: nn.Module | None = None
        if config.embedding_layernorm:
            self.layernorm = build_norm(config.normalization, config.hidden_size, config.norm_epsilon, ctx)

    def forward(self, tokens: Tensor, position_ids: Tensor) -> Tensor:
        x = super().forward(tokens, position_ids)
        if self.position_embeddings is not None:
            x = x + like_token_embeddings(self.position_embeddings(position_ids), self.ctx)
        if self.layernorm is not None:
            # BLOOM: before dropout, which a norm would rescale.
            x = self.layernorm(x)
        if self.multiplier != 1.0:
            x = x * self.multiplier
        return self.dropout(x)


class GPTModel(DecoderOnStreams, PredictsTokens):
    """tokens [B, S] -> logits [B, S, vocab] over the true vocabulary."""

    config: GPTConfig

    def __init__(self, config: GPTConfig, context: ModelBuildContext) -> None:
        ctx = context.parallel
        super().__init__(config, context, GPTEmbedding, lambda number: gpt_layer(config.of_layers, context, number))
        self.add_streams(config, context)
        self.slopes: Tensor | None = None
        if config.position_embedding_type == "alibi":
            # [heads of this rank]
            self.slopes = alibi_slopes(config.num_attention_heads).chunk(ctx.tp.size)[ctx.tp.rank]
        self.rotary: FixedRotary | None = None
        if config.position_embedding_type == "rope":
            self.rotary = FixedRotary(inverse_frequencies(config.rotary_dim, config.rotary_base))
        self.mtp, self.prediction_depths = None, 0
        if config.mtp_num_layers:
            counted = config.with_predicted_layers()
            self.depth_type = StreamPrediction if config.enable_mhc_connections else TokenPrediction
            self.add_prediction(config, context, lambda depth: gpt_layer(counted, context, config.num_layers + depth))
        scale_rates(self, config.width_multiplier)

    def pattern(self, segment_ids: Tensor | None, device: torch.device) -> AttentionPattern:
        if self.slopes is not None:
            self.slopes = self.slopes.to(device)
        return AttentionPattern(segment_ids=segment_ids, alibi_slopes=self.slopes)

    def angles(self, position_ids: Tensor, capacity: Tensor | None) -> RotaryAngles | None:
        return None if self.rotary is None else self.rotary.angles(position_ids)

    @property
    def needs_logits(self) -> str | None:
        """Why a loss needs the logits."""
        if type(self).logits is not GPTModel.logits:
            return super().needs_logits
        scale = self.config.logits_divisor
        return None if scale == 1.0 else f"the logits are divided by {scale:g} (model.logits_scaling)"

    def scaled_logits(self, logits: Tensor) -> Tensor:
        scale = self.config.logits_divisor
        # After the product, where Megatron multiplies.
        return logits if scale == 1.0 else logits / scale

    @property
    def max_sequence_length(self) -> int | None:
        """Longest supported sequence; None without learned positions."""
        return self.config.table_size


def gpt_layer(config: GPTConfig, context: ModelBuildContext, number: int) -> TransformerLayer:
    core = context.attention(
        config.attention_backend,
        num_heads=config.num_attention_heads,
        num_query_groups=config.query_groups,
        head_dim=config.head_dim,
        dropout=config.attention_dropout,
        bias=config.position_embedding_type == "alibi",
    )
    feed_forward = context.feed_forward(config.feed_forward, config, number)
    attention = SelfAttention(config, core, context.parallel)
    attention.query_scale = config.query_scale
    parts = (config, core, feed_forward, context.parallel, attention)
    if config.enable_mhc_connections:
        return ConnectedTransformerLayer(*parts, connections=[stream_connection(config, context) for _ in range(2)])
    if config.parallel_residual:
        return ParallelResidualLayer(*parts, shares_norm=config.parallel_residual_norms == 1)
    return TransformerLayer(*parts)


def scale_rates(model: nn.Module, width: float) -> None:
    """Divide the learning rate and the epsilon of all matrices but the embedding tables by `width`.

    Yang and Hu, Tensor Programs V (2022), table 8 and appendix B.3, as Megatron does it: the output layer is a matrix
    unless it is the embedding; vectors and biases keep both.
    """
    if width == 1.0:
        return
    for path, module in model.named_modules():
        for name, layout in dict(module.layouts).items() if isinstance(module, LayoutModule) else ():
            full = f"{path}.{name}"
            if decays(full, layout.shape) and not is_table(full):
                scaled = replace(layout, lr_mult=layout.lr_mult / width, eps_mult=layout.eps_mult / width)
                module.layouts[name] = scaled


def build_gpt(config: GPTConfig, context: ModelBuildContext) -> GPTModel:
    return GPTModel(config, context)
