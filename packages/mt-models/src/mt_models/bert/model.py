"""The BERT model (Devlin et al., 2019): embedding, bidirectional layers, heads, loss.

Shapes: B batch, S sequence, H hidden, V vocabulary (this rank's ids under tensor parallelism). With sequence
parallelism hidden states between the layers are sharded along S.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mt_core.config.schema import Config
from mt_core.errors import ConfigError
from mt_core.nn.activations import activate
from mt_core.nn.attention import AttentionPattern
from mt_core.nn.build_context import ModelBuildContext
from mt_core.nn.dropout import Dropout
from mt_core.nn.embedding import VocabParallelEmbedding
from mt_core.nn.layout import normal
from mt_core.nn.linear import SEQUENCE_DIM
from mt_core.nn.loss import Loss, build_cross_entropy
from mt_core.nn.model import Model
from mt_core.nn.norm import build_norm
from mt_core.parallel.collectives import gather_copies
from mt_core.parallel.context import ParallelContext
from mt_core.parallel.pipeline.stage import Stage, whole
from mt_models.bert.config import BertConfig
from mt_models.blocks.decoder import TokenEmbedding
from mt_models.blocks.embedding import LearnedTable, TiedOutput, like_token_embeddings
from mt_models.blocks.linear import ReplicatedLinear
from mt_models.blocks.transformer import PostNormLayer, PostNormStack, TransformerLayer, TransformerStack

# -- heads: MLM, pooler of the first position, sentence order ----------------------------------------


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


class BertEmbedding(nn.Module):
    """Token, position and token-type embeddings, summed; normalized if post-norm; then dropout."""

    def __init__(self, config: BertConfig, ctx: ParallelContext) -> None:
        super().__init__()
        assert config.vocab_size is not None  # the trainer fills it in from the tokenizer
        self.ctx = ctx
        self.dropout = Dropout(config.hidden_dropout, ctx)
        width, init = config.hidden_size, normal(config.init_method_std)
        self.word_embeddings = VocabParallelEmbedding(
            config.vocab_size, width, ctx, init=init, divisible_by=config.make_vocab_size_divisible_by
        )
        self.position_embeddings = LearnedTable(config.max_position_embeddings, width, init, ctx)
        self.tokentype_embeddings: LearnedTable | None = None
        if config.num_tokentypes:
            self.tokentype_embeddings = LearnedTable(config.num_tokentypes, width, init, ctx)
        self.layernorm: nn.Module | None = None
        if config.layernorm_placement == "post":
            self.layernorm = build_norm(config.normalization, width, config.norm_epsilon, ctx)

    def forward(self, tokens: Tensor, tokentype_ids: Tensor | None, position_ids: Tensor) -> Tensor:
        """[B, S] ids, types (None: all 0) and positions -> [B, S, H]"""
        # Tables are replicated and give whole sequences. With sequence parallelism word_embeddings gives this rank's
        # slice of S, so that the sum of the tables is cut once, and not each of them.
        added = self.position_embeddings(position_ids)
        if self.tokentype_embeddings is not None:
            types = torch.zeros_like(tokens) if tokentype_ids is None else tokentype_ids
            added = added + self.tokentype_embeddings(types)
        x = self.word_embeddings(tokens) + like_token_embeddings(added, self.ctx)
        if self.layernorm is not None:
            x = self.layernorm(x)
        return self.dropout(x)


class BertEncoder(Model):
    """Embedding and layers, without heads; shared by all BERT-like models."""

    inputs: tuple[str, ...] = ("tokens", "tokentype_ids", "padding_mask", "position_ids")

    def __init__(self, config: BertConfig, context: ModelBuildContext) -> None:
        super().__init__()
        self.config = config
        self.ctx = context.parallel
        self.embedding = self.build_embedding(context)
        self.encoder = self.build_encoder(context)

    def build_embedding(self, context: ModelBuildContext) -> BertEmbedding | TokenEmbedding | None:
        """The part of the model that this process holds."""
        return BertEmbedding(self.config, self.ctx) if context.has_first else None

    def build_encoder(self, context: ModelBuildContext) -> PostNormStack | TransformerStack:
        """The layers that this process holds."""
        return build_layers(self.config, context)

    def hidden_states(
        self,
        tokens: Tensor,
        tokentype_ids: Tensor | None = None,
        padding_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """[B, S] -> [B, S, H]. padding_mask: 1 for tokens, 0 for padding (default: all are tokens)."""
        everything = whole(self.config.num_layers)
        return self.states_of_stage(everything, None, tokens, tokentype_ids, padding_mask, position_ids)

    def states_of_stage(
        self,
        stage: Stage,
        x: Tensor | None,
        tokens: Tensor,
        tokentype_ids: Tensor | None = None,
        padding_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """Hidden states of the previous stage (None for the first) -> those after this stage's layers: [B, S, H]."""
        if position_ids is None:
            position_ids = torch.arange(tokens.shape[1], device=tokens.device)[None]
        seen = None if padding_mask is None else padding_mask.bool()
        if stage.first:
            assert self.embedding is not None
            x = self.embedding(tokens, tokentype_ids, position_ids)
        return self.encoder(x, AttentionPattern(causal=False, key_padding=seen), stage=stage)

    @property
    def max_sequence_length(self) -> int:
        return self.config.max_position_embeddings


class BertOutput(NamedTuple):
    """hidden_states: [B, S, H]. logits: [B, S, V] of the MLM head. pooled: [B, H]. binary_logits: [B, 2], for texts
    in order and exchanged. None for a head that the model does not have."""

    hidden_states: Tensor
    logits: Tensor | None
    pooled: Tensor | None
    binary_logits: Tensor | None


class BertModel(BertEncoder):
    """tokens [B, S] -> BertOutput."""

    def __init__(self, config: BertConfig, context: ModelBuildContext) -> None:
        super().__init__(config, context)
        self.lm_head: MaskedWordHead | None = None
        self.output_layer: TiedOutput | None = None
        self.pooler: Pooler | None = None
        self.binary_head: BinaryHead | None = None
        if context.has_last:
            self.build_heads(config)

    def build_embedding(self, context: ModelBuildContext) -> BertEmbedding | TokenEmbedding | None:
        if not context.has_first and context.has_last and self.config.add_lm_head:
            # The last stage's copy of the token embeddings, which are its LM head.
            return TokenEmbedding(self.config, self.ctx)
        return super().build_embedding(context)

    def build_heads(self, config: BertConfig) -> None:
        """The heads that the configuration has, on the process with the last layer."""
        assert config.vocab_size is not None
        if config.add_lm_head:
            self.lm_head = MaskedWordHead(config, self.ctx)
            self.output_layer = TiedOutput(
                config.vocab_size, self.ctx, bias=True, divisible_by=config.make_vocab_size_divisible_by
            )
        # The binary head reads the pooled vector: has_pooler is true with it.
        self.pooler = Pooler(config, self.ctx) if config.has_pooler else None
        self.binary_head = BinaryHead(config, self.ctx) if config.bert_binary_head else None

    def forward(
        self,
        tokens: Tensor,
        tokentype_ids: Tensor | None = None,
        padding_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> BertOutput:
        return self.heads(self.hidden_states(tokens, tokentype_ids, padding_mask, position_ids))

    def encoders(self) -> Mapping[str, nn.Module]:
        """See mt_ckpt.onnx.save.SupportsEncoding."""
        return {"model": BertWithoutWords(self)}

    def embed(self, tokens: Tensor, padding_mask: Tensor, input_type: str) -> Tensor:
        """[B, S] -> [B, H]: the mean of the last layer over the tokens (Reimers and Gurevych, Sentence-BERT, 2019)"""
        states = self.hidden_states(tokens, padding_mask=padding_mask)
        # [B, S, 1]: padding counts 0 in the sum and in the number of tokens.
        weights = padding_mask[..., None].to(states.dtype)
        return (states * weights).sum(dim=1) / weights.sum(dim=1)

    def run_stage(
        self,
        stage: Stage,
        hidden: Tensor | None,
        tokens: Tensor,
        tokentype_ids: Tensor | None = None,
        padding_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor | BertOutput:
        """hidden [B, S, H] of the previous stage -> the next stage's input, or the output. See Pipelined."""
        x = self.states_of_stage(stage, hidden, tokens, tokentype_ids, padding_mask, position_ids)
        return self.heads(x) if stage.last else x

    def stage_modules(self, stage: Stage) -> Iterator[nn.Module]:
        heads = (self.lm_head, self.output_layer, self.pooler, self.binary_head) if stage.last else ()
        embedding = self.embedding if stage.first or (stage.last and self.lm_head is not None) else None
        yield from (module for module in (embedding, *heads) if module is not None)
        yield from self.encoder.stage_modules(stage)

    def heads(self, x: Tensor, *, with_words: bool = True) -> BertOutput:
        """[B, S, H] after the last layer -> the output; with_words: with that of the masked-word head"""
        logits = None
        if with_words and self.lm_head is not None and self.output_layer is not None:
            assert self.embedding is not None
            logits = self.output_layer(self.lm_head(x), self.embedding.word_embeddings)
        pooled = None if self.pooler is None else self.pooler(first_position(x, self.ctx))
        binary = None if self.binary_head is None or pooled is None else self.binary_head(pooled)
        return BertOutput(x, logits, pooled, binary)


class BertWithoutWords(nn.Module):
    """A BERT without its masked-word head: tokens [B, S] -> BertOutput."""

    def __init__(self, model: BertModel) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, tokens: Tensor, tokentype_ids: Tensor | None = None, padding_mask: Tensor | None = None
    ) -> BertOutput:
        x = self.model.hidden_states(tokens, tokentype_ids, padding_mask)
        return self.model.heads(x, with_words=False)


def first_position(x: Tensor, ctx: ParallelContext) -> Tensor:
    """[B, S, H], sharded along S with sequence parallelism -> [B, H] of position 0, on every rank."""
    # gather_copies and not gather_from: all ranks compute the same head, so that the gradient is cut and not summed.
    return (gather_copies(x, SEQUENCE_DIM, ctx.tp) if ctx.sequence_parallel else x)[:, 0]


def build_layers(config: BertConfig, context: ModelBuildContext) -> PostNormStack | TransformerStack:
    """The layers of the configured placement of norms: (x [B, S, H], pattern) -> [B, S, H]."""
    ctx = context.parallel
    core = context.attention(
        config.attention_backend,
        num_heads=config.num_attention_heads,
        num_query_groups=config.num_attention_heads,
        head_dim=config.head_dim,
        dropout=config.attention_dropout,
        causal=False,
    )
    layer_type = PostNormLayer if config.layernorm_placement == "post" else TransformerLayer
    layers = {
        number: layer_type(config, core, context.feed_forward("dense", config, number), ctx)
        for number in context.layers(config.num_layers)
    }
    if config.layernorm_placement == "post":
        # Post-norm layers end in a norm, and the stack has none of its own.
        return PostNormStack(layers, context.recompute)
    return TransformerStack(layers, config, ctx, context.recompute, has_last=context.has_last)


def build_bert(config: BertConfig, context: ModelBuildContext) -> BertModel:
    return BertModel(config, context)


# -- loss: MLM, and sentence order -------------------------------------------------------------------


class BertLoss:
    """Cross entropy of each masked token, plus that of its sample's order: [B, S], counted at masked tokens.

    Masked, summed and divided by the number of masked tokens, this is the mean over tokens plus a mean over
    samples weighted by their numbers of masked tokens. Both are independent of how the
    global batch is split into micro-batches. With equally many masked tokens in every sample it is the sum of the
    two plain means, which is what Megatron takes for each micro-batch.
    """

    def __init__(self, words: Loss) -> None:
        self.words = words

    def __call__(self, output: BertOutput, batch: Mapping[str, Tensor]) -> Tensor:
        if output.logits is None:
            raise ConfigError('train.loss="bert" needs the masked-word head; set model.add_lm_head=true')
        losses = self.words(output.logits, batch)
        if output.binary_logits is None:
            return losses
        if "is_random" not in batch:
            raise ConfigError(
                "model.bert_binary_head=true learns whether the second segment of a sample follows its first, and the "
                "data set gives no is_random; use data.dataset_type=bert, or set model.bert_binary_head=false"
            )
        order = F.cross_entropy(output.binary_logits.float(), batch["is_random"], reduction="none")
        # [B, S] + [B, 1]: added at every position; the loss mask leaves the masked tokens of the sample.
        return losses + order[:, None]


def build_bert_loss(config: Config, parallel: ParallelContext | None = None) -> BertLoss:
    return BertLoss(build_cross_entropy(config, parallel))
