"""Configuration of supervised training, under Megatron's names."""

from __future__ import annotations

from pydantic import model_validator

from mt_core.config.schema import NonNegativeInt, PositiveInt, Section
from mt_core.errors import ConfigError
from mt_data.datasets.text_files import TextDataConfig


class RefreshConfig(Section):
    """Hard negatives that are mined anew from each checkpoint while training continues."""

    evidence: str
    """The passages: a TSV file with the columns id, text and title, or the prefix of an indexed data set."""
    questions: str
    """The file of questions to mine for, one of data.data_path or data.train_data_path."""
    folder: str
    """Where embeddings and mined negatives are kept, which all ranks can read. A resumed run continues with it."""
    negatives: PositiveInt = 30
    """Hard negatives that are kept for each question."""
    every_checkpoints: PositiveInt = 1
    """Mine from every so many checkpoints (checkpoint.save_interval)."""
    in_background: bool = True
    """Train on while a process of its own mines; false waits for it, so that a run can be repeated exactly."""
    device: str = "cpu"
    """Where the process computes: cpu, cuda or auto."""


class DPRDataConfig(TextDataConfig):
    """Questions with positive_ctxs, negative_ctxs and hard_negative_ctxs from JSON files in the format of DPR."""

    dataset_type: str = "dpr"
    train_hard_neg: NonNegativeInt = 0
    """Negatives of each question in training: hard ones, and others where it has too few. The positives of the other
    questions of a micro-batch are negatives in any case."""
    val_av_rank_hard_neg: NonNegativeInt = 0
    """Hard negatives of each question in validation."""
    val_av_rank_other_neg: NonNegativeInt = 0
    """Other negatives of each question in validation."""
    refresh: RefreshConfig | None = None
    """Mine hard negatives anew during training; unset: those of the files."""

    @property
    def passages(self) -> int:
        """Of a question in training: the positive one and the hard negatives."""
        return 1 + self.train_hard_neg

    @model_validator(mode="after")
    def _check_refresh(self) -> DPRDataConfig:
        if self.refresh is not None and not self.train_hard_neg:
            raise ConfigError(
                "data.refresh mines hard negatives, and data.train_hard_neg=0 uses none; set it to at least 1"
            )
        return self
