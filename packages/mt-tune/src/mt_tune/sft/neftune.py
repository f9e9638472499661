"""NEFTune (Jain et al., 2023): uniform noise on the token embeddings while training.

The noise of a position is between -m and m with m = alpha / sqrt(L d): L is the length of the position's own segment,
where transformers takes the padded length of the batch, or that of the pack; d is the hidden size. A segment begins
where positions begin again at 0. With tied weights the output layer, which uses the same matrix, has no noise.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mt_core.config.schema import Config
from mt_core.errors import ConfigError
from mt_core.nn.build_context import ModelBuildContext
from mt_core.nn.context_parallel.zigzag import unshard_sequence
from mt_core.nn.dropout import SEQUENCE_DIM, SampleNoise
from mt_core.nn.embedding import VocabParallelEmbedding
from mt_core.parallel.context import ParallelContext
from mt_tune.sft.config import TuneConfig

EMBEDDING, LOOKUP = "embedding", "word_embeddings"
"""Names of the token embeddings of causal decoders, and of the table in them."""


class EmbeddingNoise(SampleNoise):
    """Adds noise to embeddings [B, S, H]; the positions [B or 1, S] of the micro-batch are set before."""

    def __init__(self, alpha: float, ctx: ParallelContext) -> None:
        super().__init__(ctx)
        self.alpha = alpha
        self.positions: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.positions is None:
            return x
        whole = unshard_sequence(self.positions, SEQUENCE_DIM, self.ctx.cp)
        shape = (x.shape[0], whole.shape[SEQUENCE_DIM], x.shape[-1])
        self.seed()
        # Drawn in fp32 for the whole sequence, so that the values depend on no layout.
        noise = torch.empty(shape, device=x.device).uniform_(-1.0, 1.0)
        noise *= (self.alpha / (segment_lengths(whole) * x.shape[-1]).sqrt())[..., None]
        return x + (self.own_positions(noise) if self.divides_positions else noise).to(x.dtype)


def segment_lengths(positions: Tensor) -> Tensor:
    """[B, S] -> [B, S] fp32: the number of positions of each one's segment, which begins at a position 0."""
    starts = positions == 0
    starts[:, 0] = True
    # Numbers of segments, those of a row behind those of the rows before.
    numbers = starts.flatten().cumsum(0) - 1
    return torch.bincount(numbers)[numbers].view(positions.shape).float()


def add_noise(model: nn.Module, config: Config, context: ModelBuildContext) -> nn.Module:
    """The model with noise behind the lookup of its token embeddings. Raises ConfigError for a model without them."""
    embedding = getattr(model, EMBEDDING, None)
    table = getattr(embedding, LOOKUP, None)
    if not context.has_first:
        return model
    if not isinstance(embedding, nn.Module) or not isinstance(table, VocabParallelEmbedding):
        raise ConfigError(
            f"tune.neftune_noise_alpha adds noise to the token embeddings of causal language models, and "
            f"model.family={config.model.family} is none; set it to 0"
        )
    noise = EmbeddingNoise(config.section(TuneConfig).neftune_noise_alpha, table.ctx)
    embedding.noise = noise

    def keep_positions(module: nn.Module, args: tuple[Any, ...]) -> None:
        noise.positions = args[1]

    def with_noise(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        return noise(output)

    embedding.register_forward_pre_hook(keep_positions)
    table.register_forward_hook(with_noise)
    return model
