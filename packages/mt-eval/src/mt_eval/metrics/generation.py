"""Generated texts of a file, measured against references or by running them.

A line is what mt generate --output writes: {"completions": [{"text": ...}, ...]} with the keys of its prompt, among
them the references (a text or a list of texts), or the test of a program.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from statistics import fmean
from typing import Any

from mt_core.errors import ConfigError, DataError, did_you_mean
from mt_core.sandbox.programs import ProgramRunner
from mt_data.preprocess.readers import iter_records
from mt_eval.evaluation import Evaluation, describe_run, result_of, samples_path
from mt_eval.metrics.texts import exact_match, f1
from mt_eval.tasks import Journal, Sample, weighted_mean

ANSWERS: Mapping[str, Callable[[str, Sequence[str]], float]] = {"exact_match": exact_match, "f1": f1}
BLEU, ROUGE, PASS = "bleu", "rouge", "pass@k"
METRICS = (*ANSWERS, BLEU, ROUGE, PASS)
REFERENCES, TEST, ENTRY_POINT, PROMPT = "references", "test", "entry_point", "prompt"
OnSample = Callable[[int, int], None]
"""(number of samples that are done, of all)."""


@dataclass(frozen=True)
class Prediction:
    """A line. error: why nothing was generated."""

    name: str
    texts: Sequence[str]
    values: Mapping[str, Any]
    error: str | None = None


class Generation:
    """The samples of a file, as results name and count them.

    metrics: of METRICS; those of several texts of one line are averaged. reference_key, test_key: of the lines. k: of
    pass@k. runner: runs programs, for pass@k alone. Raises ConfigError for metrics that do not exist or may not run,
    and DataError for a file that cannot be read or lacks a key.
    """

    name = "generation"

    def __init__(
        self,
        path: Path,
        metrics: Sequence[str],
        *,
        reference_key: str = REFERENCES,
        test_key: str = TEST,
        k: Sequence[int] = (1,),
        runner: ProgramRunner | None = None,
    ) -> None:
        self.path, self.chosen, self.k, self.runner = path, tuple(metrics), tuple(k), runner
        self.reference_key, self.test_key = reference_key, test_key
        self._check_metrics()
        self.predictions = [
            _prediction(path, record.line, record.value) for record in iter_records(path, input_format="jsonl")
        ]
        # All lines are checked before the first program runs.
        for prediction in self.predictions:
            self._check(prediction)

    @property
    def settings(self) -> Mapping[str, Any]:
        """data_hash: of what is compared with; it is equal for the texts of another model."""
        compared = [[line.values.get(key) for key in (self.reference_key, self.test_key)] for line in self.predictions]
        return {
            "task": self.name,
            "data": str(self.path),
            "data_hash": sha256(repr(compared).encode()).hexdigest(),
            "metrics": list(self.chosen),
            "k": list(self.k),
        }

    def __len__(self) -> int:
        return len(self.predictions)

    def samples(self, generator: object, skip: int) -> Iterator[Sample]:
        """generator: none is needed."""
        remaining = self.predictions[skip:]
        # In their order. The runner measures several at a time: programs are waited for.
        return map(self._scored, remaining) if self.runner is None else self.runner.map(self._scored, remaining)

    def metrics(self, samples: Sequence[Sample]) -> Mapping[str, float]:
        """Means over lines; of BLEU that of the corpus too."""
        names = dict.fromkeys(name for sample in samples for name in sample.values)
        means = {name: weighted_mean(samples, name) for name in names}
        return {**means, BLEU: self._corpus_bleu()} if BLEU in self.chosen else means

    def _check_metrics(self) -> None:
        for name in self.chosen:
            if name not in METRICS:
                raise ConfigError(f"--metric {name}{did_you_mean(name, METRICS)}: it can be {', '.join(METRICS)}")
        if PASS in self.chosen and self.runner is None:
            raise ConfigError(f"{PASS} runs programs that a model wrote; allow it with --allow-code-execution")

    def _check(self, prediction: Prediction) -> None:
        """Raises DataError for a line without what its metrics need."""
        where = f"{self.path}, {prediction.name}"
        if prediction.error is not None:
            return
        if set(self.chosen) - {PASS} and not self._references(prediction):
            keys = ", ".join(prediction.values) or "none"
            raise DataError(
                f'{where}: no text and no list of texts under "{self.reference_key}"; its keys are {keys} '
                "(--reference-key)"
            )
        if PASS in self.chosen and not isinstance(prediction.values.get(self.test_key), str):
            raise DataError(f'{where}: no program under "{self.test_key}" that tests the generated one (--test-key)')
        if PASS in self.chosen and max(self.k) > len(prediction.texts):
            raise DataError(
                f"{where} has {len(prediction.texts)} texts; pass@{max(self.k)} needs as many (--n of mt generate)"
            )

    def _references(self, prediction: Prediction) -> list[str]:
        value = prediction.values.get(self.reference_key)
        references = [value] if isinstance(value, str) else value
        if isinstance(references, list) and all(isinstance(reference, str) for reference in references):
            return references
        return []

    def _scored(self, prediction: Prediction) -> Sample:
        if prediction.error is not None:
            return Sample(prediction.name, error=prediction.error)
        return self._sample(prediction)

    def _sample(self, prediction: Prediction) -> Sample:
        of_texts = [self._of_text(text, self._references(prediction)) for text in prediction.texts]
        # The mean over the line's texts; a line counts once, however many texts it has.
        values = {name: fmean(scores[name] for scores in of_texts) for name in of_texts[0]}
        if PASS not in self.chosen:
            return Sample(prediction.name, values)
        failures = [self._failure(text, prediction.values) for text in prediction.texts]
        passed = {f"pass@{k}": pass_at_k(len(failures), failures.count(None), k) for k in self.k}
        return Sample(prediction.name, {**values, **passed}, details={"failures": failures})

    def _of_text(self, text: str, references: Sequence[str]) -> dict[str, float]:
        values = {name: measure(text, references) for name, measure in ANSWERS.items() if name in self.chosen}
        if BLEU in self.chosen:
            from mt_eval.metrics.texts import sentence_bleu

            values["sentence_bleu"] = sentence_bleu(text, references)
        if ROUGE in self.chosen:
            from mt_eval.metrics.texts import rouge

            values |= rouge(text, references)
        return values

    def _corpus_bleu(self) -> float:
        from mt_eval.metrics.texts import corpus_bleu

        pairs = [(text, self._references(prediction)) for prediction in self.predictions for text in prediction.texts]
        return corpus_bleu([text for text, _ in pairs], [references for _, references in pairs])

    def _failure(self, text: str, values: Mapping[str, Any]) -> str | None:
        """Failure of prompt, continuation and test as a program; HumanEval's tests define `check`, which is called."""
        assert self.runner is not None
        entry = values.get(ENTRY_POINT)
        # isidentifier: the name goes into a program.
        call = f"\ncheck({entry})" if isinstance(entry, str) and entry.isidentifier() else ""
        # The prompt is the beginning of the program (HumanEval: the signature and docstring).
        return self.runner.failure(f"{values.get(PROMPT, '')}{text}\n{values[self.test_key]}{call}")


def measure_generation(
    task: Generation, output: Path | None = None, on_sample: OnSample = lambda done, total: None
) -> Evaluation:
    """output: the result file; samples are written beside it, and those of a killed run are not measured again."""
    # Samples belong to these texts: with other predictions the journal is refused.
    content_hash = sha256(task.path.read_bytes()).hexdigest()
    described = {"predictions_hash": content_hash, "tasks": {task.name: dict(task.settings)}}
    with Journal(None if output is None else samples_path(output), described) as journal:
        skip = len(journal.samples(task.name))
        for done, sample in enumerate(task.samples(None, skip), start=skip + 1):
            journal.add(task.name, sample)
            on_sample(done, len(task))
        result = result_of(task, journal.samples(task.name))
    provenance = {"predictions": str(task.path), "predictions_hash": content_hash, **describe_run("cpu")}
    if task.runner is not None:
        provenance["network"] = "none" if task.runner.isolates else "not cut off"
    evaluation = Evaluation({task.name: result}, provenance)
    if output is not None:
        evaluation.write(output)
    return evaluation


def _prediction(path: Path, line: int, values: Mapping[str, Any]) -> Prediction:
    """Raises DataError for a line that mt generate has not written."""
    name = f"line {line}"
    if "error" in values:
        return Prediction(name, (), values, str(values["error"]))
    try:
        texts = [str(completion["text"]) for completion in values["completions"]]
    except (KeyError, TypeError) as error:
        raise DataError(f'{path}, {name}: no "completions" with texts, as mt generate --output writes them') from error
    return Prediction(name, texts, values, None if texts else "it has no completions")


# pass@k (Chen et al. 2021, Evaluating Large Language Models Trained on Code, section 2.1).


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """1 - C(n - c, k) / C(n, k): the probability that one of k of the n samples is correct, without bias."""
    if not 1 <= k <= samples:
        raise ValueError(f"k={k} must be from 1 to the number of samples, {samples}")
    # comb is 0 for fewer wrong samples than k: one of any k is right. Whole numbers, exact up to the division.
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)
