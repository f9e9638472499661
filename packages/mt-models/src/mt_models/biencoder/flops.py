"""FLOPs of the biencoder for each question, from its configuration (counted as in mt_models.flops)."""

from __future__ import annotations

from dataclasses import dataclass

from mt_models.bert.flops import EncoderFlops, encoder_flops
from mt_models.biencoder.config import BiencoderConfig
from mt_models.flops import Flops


@dataclass(frozen=True)
class QuestionFlops(Flops):
    """Forward FLOPs for each question and the texts that are encoded with it."""

    tower: EncoderFlops
    """For each token, of either tower."""
    projection: float
    """Projections of the embeddings."""
    scores: float
    """Scores of the question's embedding against those of all texts of the batch."""
    encoded_tokens: int
    """Positions of the question and its texts."""

    @property
    def forward(self) -> float:
        return self.encoded_tokens * self.tower.forward + self.projection + self.scores


def flops_per_question(
    config: BiencoderConfig, seq_length: int, *, compared: int, hard_negatives: int = 0
) -> QuestionFlops:
    """compared: number of texts whose scores a question gets: those of the micro-batch on all ranks."""
    width, encoded = config.biencoder_projection_dim or config.hidden_size, 2 + hard_negatives
    return QuestionFlops(
        tower=encoder_flops(config, seq_length),
        projection=2 * encoded * config.hidden_size * config.biencoder_projection_dim,
        scores=2 * width * compared,
        encoded_tokens=encoded * seq_length,
    )
