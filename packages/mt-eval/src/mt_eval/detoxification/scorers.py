"""Scorers: a server of one's own, Google's Perspective API, a classifier finetuned by mt."""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from typing import Any

from mt_core.errors import ConfigError, DataError, did_you_mean
from mt_core.plugins import PluginHost
from mt_data.datasets.text_classification import LabelledTextConfig, unlabelled_texts
from mt_eval.classification.model import TrainedClassifier
from mt_eval.classification.predictions import softmax
from mt_eval.detoxification.annotation import ATTRIBUTE

# -- options (--scorer-option KEY=VALUE) -------------------------------------------------------------


def require_known(scorer: str, options: Mapping[str, str], *names: str) -> Mapping[str, str]:
    """The options. Raises ConfigError for one that is none of `names`."""
    for option in options:
        if option not in names:
            hint = did_you_mean(option, names)
            raise ConfigError(f"--scorer {scorer} has no option {option}{hint}; it has {', '.join(names)}")
    return options


ATTRIBUTES = ("toxicity", "severe_toxicity", "sexually_explicit", "threat", "profanity", "identity_attack")
"""Those that Megatron-LM's detoxification requested of Perspective."""
PERSPECTIVE_URL = "https://commentanalyzer.googleapis.com/v1alpha1/comments:analyze"
PERSPECTIVE_KEY = "PERSPECTIVE_API_KEY"
PERSPECTIVE_BYTES = 20480
"""Longest text of a request."""
ATTEMPTS, FIRST_WAIT = 6, 1.0
"""Requests that fail are repeated, after 1 s, 2 s, 4 s, ..."""
RETRIED = (408, 429, 500, 502, 503, 504)
TIMEOUT = 60.0

Scores = Mapping[str, float]


class HttpScorer:
    """POST {"texts": [...]} to a URL, whose answer is {"scores": [{attribute: score} or null, ...]}."""

    def __init__(self, url: str) -> None:
        self.url = url

    def scores(self, texts: Sequence[str]) -> list[Scores | None]:
        if not texts:
            return []
        answer = post(self.url, {"texts": list(texts)})
        entries = answer.get("scores") if isinstance(answer, dict) else None
        # One entry for each text: a shorter answer would shift scores to other texts.
        if not isinstance(entries, list) or len(entries) != len(texts):
            raise DataError(f'{self.url}: the answer has no list "scores" of {len(texts)} entries, one for each text')
        return [None if scores is None else _checked(self.url, scores) for scores in entries]


class PerspectiveScorer:
    """One request for each text, several at a time. The key is read from the environment, so that no file has it."""

    def __init__(self, key: str, url: str = PERSPECTIVE_URL, workers: int = 8, language: str = "en") -> None:
        self.url, self.workers, self.language = f"{url}?key={key}", workers, language

    def scores(self, texts: Sequence[str]) -> list[Scores | None]:
        # Requests are small and wait for the network; map keeps the order of the texts.
        with ThreadPoolExecutor(self.workers) as pool:
            return list(pool.map(self._scores, texts))

    def _scores(self, text: str) -> Scores | None:
        request = {
            # The limit is in bytes. A cut within a character leaves bytes that decode drops.
            "comment": {"text": text.encode()[:PERSPECTIVE_BYTES].decode(errors="ignore")},
            "languages": [self.language],
            "requestedAttributes": {attribute.upper(): {} for attribute in ATTRIBUTES},
            "spanAnnotations": False,
        }
        try:
            answer = post(self.url, request, shown=PERSPECTIVE_URL)["attributeScores"]
            return {name: float(answer[name.upper()]["summaryScore"]["value"]) for name in ATTRIBUTES}
        except RefusedError:
            return None  # a language that it does not judge, for instance
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{PERSPECTIVE_URL}: an answer without attributeScores") from error


class RefusedError(DataError):
    """The server answers that it does not judge the text."""


def post(url: str, content: Mapping[str, Any], *, shown: str | None = None) -> Any:
    """The JSON of the answer. shown: the URL in messages, without a key.

    Raises RefusedError when the server finds the request bad, and DataError when it does not answer after several
    attempts.
    """
    body, shown = json.dumps(content).encode(), shown or url
    for attempt in range(ATTEMPTS):
        if attempt:
            time.sleep(FIRST_WAIT * 2 ** (attempt - 1))
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            problem = f"status {error.code}"
            # 400 is about this text; the others in RETRIED are about the server or the quota, and may pass.
            if error.code == 400:
                raise RefusedError(f"{shown}: {problem}") from error
            if error.code not in RETRIED:
                raise DataError(f"{shown}: {problem}; check the address and the key") from error
        except (OSError, HTTPException, ValueError) as error:
            problem = str(error) or type(error).__name__
    raise DataError(f"{shown}: no answer after {ATTEMPTS} attempts: {problem}; run the same command again to go on")


def build_http(options: Mapping[str, str], host: Any) -> HttpScorer:
    known = require_known("http", options, "url")
    url = known.get("url", "")
    if not url.startswith(("http://", "https://")):
        raise ConfigError("--scorer http needs --scorer-option url=http://HOST:PORT/PATH")
    return HttpScorer(url)


def build_perspective(options: Mapping[str, str], host: Any) -> PerspectiveScorer:
    known = require_known("perspective", options, "workers", "language")
    key = os.environ.get(PERSPECTIVE_KEY)
    if not key:
        raise ConfigError(f"--scorer perspective needs the API key in the environment variable {PERSPECTIVE_KEY}")
    workers = known.get("workers", "8")
    if not workers.isdigit() or not int(workers):
        raise ConfigError(f"--scorer-option workers={workers}: give the number of requests at a time")
    return PerspectiveScorer(key, workers=int(workers), language=known.get("language", "en"))


def _checked(url: str, scores: Any) -> Scores:
    try:
        by_attribute = {str(name): float(score) for name, score in scores.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise DataError(f"{url}: scores of a text are {{attribute: number}}, not {scores!r}") from error
    if not all(0 <= score <= 1 for score in by_attribute.values()):
        raise DataError(f"{url}: scores go from 0 to 1; one of {by_attribute} does not")
    return by_attribute


# -- classifier finetuned by mt: the probability of one class ----------------------------------------

TOXIC = "1"
"""Number of the class of toxic texts, in the data sets of Jigsaw and most others."""


class ClassifierScorer:
    """Implements mt_eval.text_scorers.TextScorer. Texts that are too long are cut, as in training.

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
