"""The biencoder (Lee et al., Latent Retrieval, 2019): embeds questions and texts; scores are dot products.

Shapes: B batch, S sequence, P width of the embeddings (biencoder_projection_dim, or hidden_size without projection).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from torch import Tensor

from mt_core.nn.environment import ModelEnvironment
from mt_core.nn.layout import normal
from mt_core.nn.model import Model
from mt_models.bert.model import BertEncoder, first_position
from mt_models.biencoder.config import BiencoderConfig
from mt_models.blocks.replicated import ReplicatedLinear


class Tower(BertEncoder):
    """tokens [B, S] -> embeddings [B, P]."""

    def __init__(self, config: BiencoderConfig, environment: ModelEnvironment) -> None:
        super().__init__(config, environment)
        self.projection_enc: ReplicatedLinear | None = None
        if config.biencoder_projection_dim:
            self.projection_enc = ReplicatedLinear(
                config.hidden_size, config.biencoder_projection_dim, self.ctx, init=normal(config.init_method_std)
            )

    def forward(
        self, tokens: Tensor, tokentype_ids: Tensor | None = None, padding_mask: Tensor | None = None
    ) -> Tensor:
        # The state itself: Megatron's biencoder has no pooler, whose tanh would bound the dot products.
        vector = first_position(self.hidden_states(tokens, tokentype_ids, padding_mask), self.ctx)
        return vector if self.projection_enc is None else self.projection_enc(vector)


class Vectors(NamedTuple):
    """query: [B, P]. context: [B, P], row i is of the text of question i; or [B, C, P], with C - 1 others behind it."""

    query: Tensor
    context: Tensor


class BiencoderModel(Model):
    """Questions [B, S] and the texts that they come from [B, S], or several for each [B, C, S] -> Vectors."""

    inputs: tuple[str, ...] = tuple(
        f"{side}_{name}" for side in ("query", "context") for name in ("tokens", "tokentype_ids", "padding_mask")
    )

    def __init__(self, config: BiencoderConfig, environment: ModelEnvironment) -> None:
        super().__init__()
        self.config = config
        if config.biencoder_shared_query_context_model:
            self.shared_model = Tower(config, environment)
        else:
            self.query_model = Tower(config, environment)
            self.context_model = Tower(config, environment)

    def forward(
        self,
        query_tokens: Tensor,
        context_tokens: Tensor,
        query_tokentype_ids: Tensor | None = None,
        query_padding_mask: Tensor | None = None,
        context_tokentype_ids: Tensor | None = None,
        context_padding_mask: Tensor | None = None,
    ) -> Vectors:
        # [B, C, S] or [B, S] -> [B C, S]: all texts in one batch of the tower
        rows = [
            None if x is None else x.flatten(0, -2)
            for x in (context_tokens, context_tokentype_ids, context_padding_mask)
        ]
        assert rows[0] is not None
        context = self.context_tower(rows[0], rows[1], rows[2])
        return Vectors(
            self.query_tower(query_tokens, query_tokentype_ids, query_padding_mask),
            context.unflatten(0, context_tokens.shape[:-1]),
        )

    def embed(self, tokens: Tensor, padding_mask: Tensor, input_type: Literal["query", "document"]) -> Tensor:
        """[B, S] -> [B, P], by the tower of questions or that of texts"""
        tower = self.query_tower if input_type == "query" else self.context_tower
        return tower(tokens, padding_mask=padding_mask)

    @property
    def query_tower(self) -> Tower:
        return self.shared_model if self.config.biencoder_shared_query_context_model else self.query_model

    @property
    def context_tower(self) -> Tower:
        return self.shared_model if self.config.biencoder_shared_query_context_model else self.context_model

    @property
    def max_sequence_length(self) -> int:
        return self.config.max_position_embeddings


def build_biencoder(config: BiencoderConfig, environment: ModelEnvironment) -> BiencoderModel:
    return BiencoderModel(config, environment)
