"""Perplexity of named texts during training, with the trainer's weights in its layout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mt_core.config.schema import Config
from mt_core.parallel.context import is_writer
from mt_core.train.trainer import Trainer
from mt_eval.config import EvalConfig
from mt_eval.evaluation import measure
from mt_eval.perplexity.task import Perplexity
from mt_eval.perplexity.texts import TextSet
from mt_eval.tasks import Journal
from mt_infer.text import TextGenerator

REPLICAS: Mapping[str, Any] = {"tensor_model_parallel_size": 1}


class PerplexityEvaluator:
    """Implements mt_core.train.validation.Evaluator. Texts are read once, by rank 0.

    Raises DataError for a text that does not exist, before training starts.
    """

    def __init__(self, config: Config) -> None:
        self.texts = {name: TextSet(name, path) for name, path in config.section(EvalConfig).perplexity.items()}
        if is_writer():
            for text in self.texts.values():
                text.require_file()
        self.stride = config.section(EvalConfig).overlapping_eval
        self.interval = config.section(EvalConfig).interval
        # FSDP2 keeps pieces of weights; each rank generates with a copy of its own.
        self.parallel = REPLICAS if config.parallel.use_torch_fsdp2 else None
        self._tasks: list[Perplexity] | None = None

    def evaluate(self, run: Trainer) -> Mapping[str, float]:
        # Collective. Afterwards rank 0 sends the requests, and the other ranks compute their parts of them.
        generator = TextGenerator.of_engine(run.engine, self.parallel)
        if not is_writer():
            generator.follow()
            return {}
        try:
            return {f"{task.name}_perplexity": self._perplexity(generator, task) for task in self._of(generator)}
        finally:
            generator.close()

    def _of(self, generator: TextGenerator) -> list[Perplexity]:
        # Encoded once, at the first evaluation: the tokenizer comes with the generator.
        if self._tasks is None:
            read = self.texts.values()
            self._tasks = [
                Perplexity(text_set, generator.tokenizer, generator.longest, stride=self.stride) for text_set in read
            ]
        return self._tasks

    def _perplexity(self, generator: TextGenerator, task: Perplexity) -> float:
        # In memory: an evaluation that is interrupted is repeated with its training step.
        journal = Journal(None, {})
        measure(generator, task, journal, lambda task, done: None)
        return task.metrics(journal.samples(task.name))["perplexity"]
