"""Configurations of classification and multiple-choice models: the base model's keys plus the head's, so that a
preset of the base applies: `preset = "bert-base-uncased"` with `model.family = "bert_classification"`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from mt_core.config.fields import PositiveInt, Probability
from mt_core.config.schema import Config, DataConfig, ModelConfig
from mt_core.config_map import MegatronMap
from mt_core.errors import ConfigError
from mt_models.bert.config import PRESETS as BERT
from mt_models.bert.config import BertConfig, check_encoder, encoder_flops
from mt_models.blocks.config import check_decoder, refuse_divided_sequences_and_layers
from mt_models.flops import Convention, Flops
from mt_models.flops import flops_per_token as decoder_flops_per_token
from mt_models.gpt.config import GPTConfig, check_gpt
from mt_models.llama.config import LlamaConfig
from mt_models.modernbert.config import ModernBertConfig, check_modernbert_encoder
from mt_models.modernbert.config import flops_per_token as modernbert_flops_per_token


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


class ModernBertClassificationConfig(ModernBertConfig, ClassificationConfig):
    """ModernBERT with a class for each text or pair of texts."""

    add_lm_head: Literal[False] = False
    """The head chooses; there is none for masked words. Its first layer is that of the head of masked words."""
    output_bias: Literal[False] = False
    """There are no logits of masked words."""
    classifier_pooling: Literal["cls", "mean"] = "cls"
    """What the head reads: the first token's state, or the mean over the tokens of a text."""


class GPTTextConfig(GPTConfig):
    """A GPT without words to predict."""

    logits_scaling: None = None
    """There are no logits over words."""
    mup_base_hidden_size: None = None
    """All parameters have one learning rate."""
    mtp_num_layers: Literal[0] = 0
    """No layers of multi-token prediction."""


class GPTClassificationConfig(GPTTextConfig, ClassificationConfig):
    """GPT with a class for each text, read at its last token."""


class GPTMultipleChoiceConfig(GPTTextConfig, MultipleChoiceConfig):
    """GPT with a score for each of several texts, read at its last token."""


class LlamaClassificationConfig(LlamaConfig, ClassificationConfig):
    """Llama with a class for each text, read at its last token."""


class LlamaMultipleChoiceConfig(LlamaConfig, MultipleChoiceConfig):
    """Llama with a score for each of several texts, read at its last token."""


def _check_bert(config: Config) -> None:
    assert isinstance(config.model, BertConfig)
    check_encoder(config.model, config)


CHECKS_OF_BASE = {"bert": _check_bert, "modernbert": check_modernbert_encoder, "gpt": check_gpt, "llama": check_decoder}


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


# -- presets: the hyper-parameters of Megatron-LM's examples for MNLI and RACE; QQP has those of MNLI
#
# The name says task and size: `base` and `345m` are the shapes of the published models, `tiny` one for a CPU. Shape and
# tokenizer give way to those of checkpoint.load.

Tree = dict[str, dict[str, Any]]

TINY_MODEL = {**BERT["bert-base-uncased"]["model"], "num_layers": 2, "hidden_size": 128, "num_attention_heads": 2}
SIZES: dict[str, Tree] = {
    "base": BERT["bert-base-uncased"],
    "345m": BERT["megatron-bert-345m-uncased"],
    "tiny": {"model": TINY_MODEL, "data": {"seq_length": 128}},
}


def _recipe(task: str, size: str, *, epochs: int, batch: int, lr: float, warmup: float, **model: Any) -> Tree:
    shape = SIZES[size]
    return {
        "model": {**shape["model"], **model},
        "data": {**shape["data"], "dataset_type": task},
        "train": {
            "train_epochs": epochs,
            "micro_batch_size": batch // 8,  # of the eight GPUs of the examples
            "global_batch_size": batch,
            "eval_interval": None,
            "full_validation": True,
        },
        "optimizer": {"lr": lr, "weight_decay": 0.1, "clip_grad": 1.0},
        "lr_schedule": {"lr_decay_style": "linear", "lr_warmup_fraction": warmup},
        "checkpoint": {"save_interval": None, "keep_last": 1, "best_metric": "accuracy"},
    }


def _pairs(task: str, size: str, classes: int) -> Tree:
    return _recipe(task, size, epochs=5, batch=64, lr=5e-5, warmup=0.065, num_classes=classes)


CLASSIFICATION = {
    f"{task}-bert-{size}": _pairs(task, size, classes) for task, classes in (("mnli", 3), ("qqp", 2)) for size in SIZES
}
MULTIPLE_CHOICE = {
    f"race-bert-{size}": _recipe("race", size, epochs=3, batch=32, lr=1e-5, warmup=0.06) for size in SIZES
}
NONE: dict[str, Tree] = {}
"""Heads on decoders: use presets of the base model, with model.family set to the head's."""


# -- FLOPs (counted as in mt_models.flops); the head's are averaged over the tokens of a text --------


@dataclass(frozen=True)
class TextFlops(Flops):
    """Forward FLOPs for each token of a text."""

    attention_projections: float
    """Queries, keys, values and the output of attention."""
    attention_core: float
    """Scores and their product with the values."""
    feed_forward: float
    pooler: float
    head: float


def flops_per_token(config: Any, seq_length: int, *, convention: Convention = "seen") -> TextFlops:
    """The mean over the tokens of a text (of one option, where there are several to choose from).

    config: of any family of mt_models.heads. convention: of decoders; BERT's positions see all others.
    """
    outputs = config.num_classes if isinstance(config, ClassificationConfig) else 1
    layers, pooler = _layers(config, seq_length, convention)
    return TextFlops(
        attention_projections=layers.attention_projections,
        attention_core=layers.attention_core,
        feed_forward=layers.feed_forward,
        pooler=pooler / seq_length,
        head=2 * config.hidden_size * outputs / seq_length,
    )


def _layers(config: Any, seq_length: int, convention: Convention) -> tuple[Any, float]:
    """FLOPs of the layers per token, and of the pooler per text."""
    if isinstance(config, ModernBertConfig):
        return modernbert_flops_per_token(config, seq_length), 2 * config.hidden_size**2
    if isinstance(config, BertConfig):
        return encoder_flops(config, seq_length), 2 * config.hidden_size**2
    return decoder_flops_per_token(config, seq_length, convention=convention), 0.0


TEXTS_OF_QUESTION = 4
"""Texts to choose from, of the data set race."""


def training_flops(config: Config) -> float:
    """See `ModelSpec.training_flops`: of a text, or of all those of a question."""
    model, length = config.model, config.data.seq_length
    texts = 1 if isinstance(model, ClassificationConfig) else TEXTS_OF_QUESTION
    return texts * length * flops_per_token(model, length).training


MEGATRON = MegatronMap(unsupported="Megatron-Core has no heads that choose a class or a text")
