"""A classifier finetuned by mt as a scorer: the probability of one of its classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mt_core.errors import ConfigError
from mt_core.plugins import PluginHost
from mt_data.datasets.text_classification import LabelledTextConfig, unlabelled_texts
from mt_eval.classification.model import TrainedClassifier
from mt_eval.classification.predictions import softmax
from mt_eval.detoxification.metrics import ATTRIBUTE
from mt_eval.detoxification.scorer_options import require_known

TOXIC = "1"
"""Number of the class of toxic texts, in the data sets of Jigsaw and most others."""


class ClassifierScorer:
    """Implements mt_core.specs.TextScorer. Texts that are too long are cut, as in training.

    attribute: the name of the scores. number: of the class whose probability they are. Raises ConfigError for a model
    that was trained on pairs of texts or predicts a number, and for a class that it lacks.
    """

    def __init__(self, classifier: TrainedClassifier, attribute: str, number: int) -> None:
        self.classifier, self.attribute, self.number = classifier, attribute, number
        self.data = _single_text_classes(classifier)
        if not 0 <= number < self.data.num_classes:
            known = ", ".join(f"{place} ({label})" for place, label in enumerate(self.data.task.labels or ()))
            raise ConfigError(f"--scorer-option class={number}: the classes of the model are {known}")

    def scores(self, texts: Sequence[str]) -> list[Mapping[str, float] | None]:
        if not texts:
            return []
        dataset = unlabelled_texts(texts, self.data, self.classifier.trained.tokenizer)
        # [texts, classes]; predictions come in the order of the data set.
        probabilities = softmax(self.classifier.predict(dataset).outputs.numpy())
        return [{self.attribute: float(row[self.number])} for row in probabilities]


def _single_text_classes(classifier: TrainedClassifier) -> LabelledTextConfig:
    data = classifier.config.data
    if not isinstance(data, LabelledTextConfig) or len(data.task.texts) != 1 or data.task.labels is None:
        raise ConfigError(
            f"--scorer classifier: {classifier.trained.checkpoint} was trained on data.dataset_type="
            f"{data.dataset_type}; a scorer is a model with classes of single texts, such as cola, sst2 or "
            "text_classification with data.labels"
        )
    return data


def build_classifier(options: Mapping[str, str], host: PluginHost) -> ClassifierScorer:
    known = require_known("classifier", options, "checkpoint", "attribute", "class")
    if "checkpoint" not in known:
        raise ConfigError("--scorer classifier needs --scorer-option checkpoint=PATH, a model that mt finetuned")
    number = known.get("class", TOXIC)
    if not number.isdecimal():
        raise ConfigError(f"--scorer-option class={number}: give the number of a class, from 0")
    classifier = TrainedClassifier(known["checkpoint"], host)
    return ClassifierScorer(classifier, known.get("attribute", ATTRIBUTE), int(number))
