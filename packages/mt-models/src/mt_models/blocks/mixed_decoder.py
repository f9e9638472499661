"""A causal decoder with layers of several kinds, each with what it keeps for generation."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Protocol

from torch import Tensor, nn

from mt_core.nn.context_parallel.zigzag import check_sequence_length
from mt_core.nn.environment import ModelEnvironment
from mt_core.nn.loss import Unprojected
from mt_core.nn.norm import Normalization
from mt_models.blocks.decoder import CausalDecoder, TokenEmbedding


class MixedShape(Protocol):
    """What the decoder reads from its configuration; its layers declare what they read."""

    @property
    def num_layers(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def normalization(self) -> Normalization: ...
    @property
    def norm_epsilon(self) -> float: ...
    @property
    def init_method_std(self) -> float: ...
    @property
    def vocab_size(self) -> int | None: ...
    @property
    def make_vocab_size_divisible_by(self) -> int: ...
    @property
    def untie_embeddings_and_output_weights(self) -> bool: ...
    @property
    def fp32_residual_connection(self) -> bool: ...


class MixedDecoder(CausalDecoder):
    """tokens [B, S] -> logits [B, S, vocab]; a family says how to make layer number i (see residual_layer)."""

    embedding_type: ClassVar[type[TokenEmbedding]] = TokenEmbedding
    """Class of the embedding; by default the residual stream is in the dtype of the weights."""

    def __init__(self, config: MixedShape, environment: ModelEnvironment, layer: Callable[[int], nn.Module]) -> None:
        embedding = Fp32Embedding if config.fp32_residual_connection else self.embedding_type
        check_sequence_length(environment.config.data.seq_length, environment.parallel.cp.size)
        # DecoderConfigLike also requires the shape of attention, which only attention reads.
        super().__init__(config, environment, embedding, layer)  # type: ignore[arg-type]
        self.dtype = environment.parallel.params_dtype

    def unprojected(self, x: Tensor) -> Unprojected:
        # An fp32 residual stream ends here: the LM head multiplies in the dtype of its weights.
        return super().unprojected(x.to(self.dtype))


class Fp32Embedding(TokenEmbedding):
    """Token embeddings that start a residual stream in fp32."""

    def forward(self, tokens: Tensor, position_ids: Tensor) -> Tensor:
        return super().forward(tokens, position_ids).float()
