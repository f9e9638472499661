"""Configurations of classification and multiple-choice models: the base model's keys plus the head's, so that a
preset of the base applies: `preset = "bert-base-uncased"` with `model.family = "bert_classification"`."""

from __future__ import annotations

from typing import Literal

from mt_core.config.schema import Config, DataConfig, ModelConfig, PositiveInt, Probability
from mt_core.errors import ConfigError
from mt_models.bert.config import BertConfig, check_encoder
from mt_models.blocks.encoder_checks import refuse_divided_sequences_and_layers
from mt_models.gpt.config import GPTConfig, check_gpt
from mt_models.llama.config import LlamaConfig, check_llama


class HeadConfig(ModelConfig):
    """A head over one vector of a text."""

    classifier_dropout: Probability | None = None
    """Dropout before the head. Default: hidden_dropout."""


class ClassificationConfig(HeadConfig):
    """One of num_classes for a text or a pair of texts."""

    num_classes: PositiveInt = 2
    """Classes to choose from; 1 with train.loss="regression" predicts a number."""


class MultipleChoiceConfig(HeadConfig):
    """One of several texts."""


class BertBase(BertConfig):
    """BERT without the heads of its pretraining."""

    add_lm_head: Literal[False] = False
    """The head chooses; there is none for masked words."""
    bert_binary_head: Literal[False] = False
    """The head chooses; there is none for the order of texts."""
    add_pooler: Literal[True] = True
    """The head reads the pooler."""


class BertClassificationConfig(BertBase, ClassificationConfig):
    """BERT with a class for each text or pair of texts."""


class BertMultipleChoiceConfig(BertBase, MultipleChoiceConfig):
    """BERT with a score for each of several texts."""


class GPTClassificationConfig(GPTConfig, ClassificationConfig):
    """GPT with a class for each text, read at its last token."""


class GPTMultipleChoiceConfig(GPTConfig, MultipleChoiceConfig):
    """GPT with a score for each of several texts, read at its last token."""


class LlamaClassificationConfig(LlamaConfig, ClassificationConfig):
    """Llama with a class for each text, read at its last token."""


class LlamaMultipleChoiceConfig(LlamaConfig, MultipleChoiceConfig):
    """Llama with a score for each of several texts, read at its last token."""


def _check_bert(config: Config) -> None:
    assert isinstance(config.model, BertConfig)
    check_encoder(config.model, config)


CHECKS_OF_BASE = {"bert": _check_bert, "gpt": check_gpt, "llama": check_llama}


def check_choice(config: Config) -> None:
    """Raise ConfigError for a base model that cannot be built, or samples or a loss made for another task."""
    model = config.model
    assert isinstance(model, HeadConfig)
    refuse_divided_sequences_and_layers(config)
    CHECKS_OF_BASE[model.family.partition("_")[0]](config)
    if config.train.loss in ("cross_entropy", "bert"):
        raise ConfigError(
            f"train.loss={config.train.loss} is for predicted words; model.family={model.family} chooses, use "
            'train.loss="classification"'
        )
    _check_samples(model, config.data)
    _check_regression(config)


def _check_samples(model: HeadConfig, data: DataConfig) -> None:
    dataset, wanted = data.dataset_type, getattr(data, "num_classes", None)
    if isinstance(model, ClassificationConfig):
        if dataset == "race":
            raise ConfigError(
                f"data.dataset_type=race has several texts to choose from and model.family={model.family} takes one; "
                f"use model.family={model.family.replace('classification', 'multiple_choice')}"
            )
        if wanted is not None and model.num_classes != wanted:
            raise ConfigError(
                f"model.num_classes={model.num_classes} does not fit data.dataset_type={dataset}, which has "
                f"{'a number to predict' if wanted == 1 else f'{wanted} classes'}; set it to {wanted}"
            )
    elif wanted is not None:
        raise ConfigError(
            f"data.dataset_type={dataset} has one text with a class and model.family={model.family} takes several "
            f"texts; use model.family={model.family.replace('multiple_choice', 'classification')}"
        )


def _check_regression(config: Config) -> None:
    predicts_number = getattr(config.model, "num_classes", None) == 1
    if predicts_number != (config.train.loss == "regression"):
        raise ConfigError(
            f"train.loss={config.train.loss} and model.family={config.model.family} with "
            f"model.num_classes={getattr(config.model, 'num_classes', 'none')}: regression predicts a number with "
            'model.num_classes=1 and train.loss="regression"; classes take train.loss="classification"'
        )
