"""Floating-point operations of the biencoder for each pair, from its configuration (counted as in mt_models.flops)."""

from __future__ import annotations

from dataclasses import dataclass

from mt_models.bert.flops import EncoderFlops, encoder_flops
from mt_models.biencoder.config import BiencoderConfig
from mt_models.flops import Flops


@dataclass(frozen=True)
class PairFlops(Flops):
    """Forward FLOPs for each pair of a question and a text."""

    tower: EncoderFlops
    """For each token, of either."""
    projection: float
    """Projections of both embeddings."""
    scores: float
    """Scores of the question's embedding against those of all texts of the batch."""
    seq_length: int

    @property
    def forward(self) -> float:
        return 2 * self.seq_length * self.tower.forward + self.projection + self.scores


def flops_per_pair(config: BiencoderConfig, seq_length: int, *, texts: int) -> PairFlops:
    """texts: number of texts that a question is compared with: the samples of the micro-batch on all ranks."""
    width = config.biencoder_projection_dim or config.hidden_size
    return PairFlops(
        tower=encoder_flops(config, seq_length),
        projection=4 * config.hidden_size * config.biencoder_projection_dim,
        scores=2 * width * texts,
        seq_length=seq_length,
    )
