"""Configuration of the biencoder: its BERT towers, the comparison of their embeddings, published sizes and FLOPs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from mt_core.config.fields import NonNegativeInt, PositiveInt
from mt_core.config.schema import Config
from mt_core.config_map import MegatronMap
from mt_core.errors import ConfigError
from mt_models.bert.config import PRESETS as BERTS
from mt_models.bert.config import BertConfig, EncoderFlops, check_encoder, encoder_flops
from mt_models.blocks.config import refuse_divided_sequences_and_layers
from mt_models.flops import Flops


class BiencoderConfig(BertConfig):
    """Two BERT encoders; the vector of a text is its first position."""

    add_lm_head: Literal[False] = False
    """The towers have no heads of BERT's pretraining."""
    bert_binary_head: Literal[False] = False
    """The towers have no heads of BERT's pretraining."""
    add_pooler: Literal[False] = False
    """The vector of a text is its first position as the last layer leaves it."""
    biencoder_projection_dim: NonNegativeInt = 0
    """Width of the vectors, by a linear layer on top of each tower; 0 leaves it out."""
    biencoder_shared_query_context_model: bool = False
    """One tower encodes both questions and texts."""
    retriever_score_scaling: bool = False
    """Divide scores by the square root of hidden_size."""
    retriever_report_topk_accuracies: list[PositiveInt] = Field([])
    """For validation sets, the shares of questions whose text is among so many with the highest scores."""


def check_biencoder(config: Config) -> None:
    """Raise ConfigError for towers that cannot be built, or samples or a loss made for another task."""
    model = config.model
    assert isinstance(model, BiencoderConfig)
    refuse_divided_sequences_and_layers(config)
    check_encoder(model, config)
    if config.train.loss in ("cross_entropy", "bert", "classification"):
        raise ConfigError(
            f"train.loss={config.train.loss} takes logits, and model.family=biencoder gives vectors of questions and "
            'texts; use train.loss="retrieval"'
        )


# -- published sizes ---------------------------------------------------------------------------------
#
# Retrievers: that of ORQA and REALM with two towers of Megatron's BERT, those that start from the original BERT, and
# small ones for a CPU. "ict" ones train on the inverse cloze task, "dpr" ones on questions with passages.

REPORTED = [1, 5, 20, 100]
INVERSE_CLOZE = {"dataset_type": "ict", "seq_length": 256}
QUESTIONS = {"dataset_type": "dpr", "seq_length": 256, "train_hard_neg": 1}
FINETUNING = {
    "train": {"micro_batch_size": 8},
    "optimizer": {"lr": 2e-5, "weight_decay": 0.1},
    "lr_schedule": {"lr_decay_style": "linear", "lr_warmup_fraction": 0.01},
}
"""Megatron-LM's recipe for Natural Questions."""
FROM_BERT = {
    "model": {
        **BERTS["bert-base-uncased"]["model"],
        "retriever_score_scaling": True,
        "retriever_report_topk_accuracies": REPORTED,
    }
}
TINY = {
    "model": {
        "num_layers": 1,
        "hidden_size": 128,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "init_method_std": 0.1,
        "biencoder_projection_dim": 64,
        "biencoder_shared_query_context_model": True,
        "retriever_score_scaling": True,
        "retriever_report_topk_accuracies": [1, 5, 20],
    },
    "train": {"micro_batch_size": 32, "train_iters": 400},
    "optimizer": {"lr": 1e-3, "min_lr": 1e-4},
    "lr_schedule": {"lr_decay_style": "cosine", "lr_warmup_iters": 40},
}
"""One tower for both: with little text two hardly agree."""

PRESETS: dict[str, dict[str, Any]] = {
    "ict-tiny": {**TINY, "data": {"dataset_type": "ict", "seq_length": 128}},
    "dpr-tiny": {**TINY, "data": {"dataset_type": "dpr", "seq_length": 128}},
    "ict-base": {
        "model": {
            "num_layers": 12,
            "hidden_size": 768,
            "num_attention_heads": 12,
            "max_position_embeddings": 512,
            "biencoder_projection_dim": 128,
            "retriever_score_scaling": True,
            "retriever_report_topk_accuracies": REPORTED,
        },
        "data": INVERSE_CLOZE,
    },
    "ict-bert-base-uncased": {**FROM_BERT, "data": INVERSE_CLOZE},
    "dpr-bert-base-uncased": {**FROM_BERT, **FINETUNING, "data": QUESTIONS},
}


# -- FLOPs for each question (counted as in mt_models.flops) -----------------------------------------


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


def training_flops(config: Config) -> float:
    """See `ModelSpec.training_flops`. Scores are counted against the texts of a rank's micro-batch: their number over
    all ranks is not in the configuration, and a score is a thousandth of an encoded token."""
    model: Any = config.model
    negatives = getattr(config.data, "train_hard_neg", 0)
    compared = config.train.micro_batch_size * (1 + negatives)
    return flops_per_question(model, config.data.seq_length, compared=compared, hard_negatives=negatives).training


MEGATRON = MegatronMap(
    unsupported="Megatron-Core never had two encoders in one checkpoint; Megatron-LM removed its biencoder"
)
