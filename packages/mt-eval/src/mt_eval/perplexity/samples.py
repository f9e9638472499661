"""Perplexity of the samples of a data set, with what they have beside tokens, such as neighbours."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import tee
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mt_core.config.schema import Config
from mt_core.errors import ConfigError, DataError
from mt_core.interfaces import Dataset, Split, SplitRequest, Tokenizer
from mt_core.plugins import PluginHost
from mt_core.specs import DATASETS
from mt_eval.perplexity.task import LOG_LIKELIHOOD, bounded_exp
from mt_eval.scoring import Continuation, Scored, score
from mt_eval.tasks import Sample, weighted_mean
from mt_infer.text import TextGenerator

NEIGHBORS = ("neighbor_tokens", "neighbor_mask")


class SamplePerplexity:
    """A task (mt_eval.tasks.Task) whose samples are those of a data set, in its order.

    The loss counts where theirs does. with_neighbors: each chunk with its neighbours; False: without any. limit: the
    first samples only. Raises ConfigError for samples that have no neighbours to leave out.
    """

    def __init__(
        self, dataset: Dataset, name: str, data: str, *, with_neighbors: bool = True, limit: int | None = None
    ) -> None:
        self.dataset, self.data = dataset, data
        self.name = name if with_neighbors else f"{name} without neighbors"
        self.with_neighbors, self.limit = with_neighbors, limit
        if not with_neighbors and not (len(dataset) and NEIGHBORS[0] in dataset[0]):
            raise ConfigError(
                f"--without-neighbors: samples of data.dataset_type={data} have no neighbours; leave it out"
            )

    @property
    def settings(self) -> Mapping[str, Any]:
        return {
            "task": "perplexity of samples",
            "data": self.data,
            "data_hash": getattr(self.dataset, "fingerprint", str)(),
            "neighbors": self.with_neighbors,
            "limit": self.limit,
        }

    def __len__(self) -> int:
        return len(self.dataset) if self.limit is None else min(self.limit, len(self.dataset))

    def samples(self, generator: TextGenerator, skip: int) -> Iterator[Sample]:
        """The log-likelihood of a token of each sample, weighted by the number of those that count."""
        # tee: each sample is made once, for the engine and for the result, though they are consumed apart. The engine
        # is ahead by as many as it takes.
        all_targets, scored = tee(map(self._targets, range(skip, len(self))))
        scores = score(generator, (targets.continuation for targets in scored if targets is not None))
        for number, targets in enumerate(all_targets, skip):
            if targets is None:
                yield Sample(f"sample {number}", error="none of its tokens counts in the loss")
            else:
                # next: `scores` has entries for the samples with targets only, in their order.
                yield targets.measured(f"sample {number}", next(scores))

    def metrics(self, samples: Sequence[Sample]) -> Mapping[str, float]:
        loss = -weighted_mean(samples, LOG_LIKELIHOOD)
        return {"loss": loss, "perplexity": bounded_exp(loss), "tokens": sum(sample.weight for sample in samples)}

    def _targets(self, number: int) -> Targets | None:
        sample = self.dataset[number]
        counted = np.flatnonzero(sample["loss_mask"])
        if not len(counted):
            return None
        first, last = int(counted[0]), int(counted[-1])
        # The engine predicts each token from those before it: the inputs up to the last that counts, then its label.
        tokens = [*sample["tokens"][: last + 1].tolist(), int(sample["labels"][last])]
        # Where labels are not the shifted tokens (masked models, prefixes), this would measure something else.
        if sample["labels"][first:last].tolist() != tokens[first + 1 : -1]:
            raise DataError(f"{self.data}, sample {number}: its labels are not the tokens that follow")
        # Between the first and the last there may be tokens of weight 0.
        weights = sample["loss_mask"][first : last + 1].astype(np.float64)
        return Targets(Continuation(tokens, first + 1, self._inputs(sample)), weights)

    def _inputs(self, sample: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
        if not self.with_neighbors:
            return {}
        # [1, ...]: the engine takes a batch of one sequence.
        return {name: torch.from_numpy(sample[name])[None] for name in NEIGHBORS if name in sample}


@dataclass(frozen=True)
class Targets:
    """The tokens of a sample that are predicted, from the first that counts to the last. weights: in the loss."""

    continuation: Continuation
    weights: NDArray[np.float64]

    def measured(self, name: str, scored: Scored) -> Sample:
        total = float(self.weights.sum())
        return Sample(name, {LOG_LIKELIHOOD: math.fsum(self.weights * scored.logprobs) / total}, total)


def split_tasks(
    split: Split,
    config: Config,
    tokenizer: Tokenizer,
    host: PluginHost,
    *,
    without_neighbors: bool = False,
    limit: int | None = None,
) -> list[SamplePerplexity]:
    """Perplexity of the data sets of a split of the configuration; without_neighbors: each a second time, without them.

    Raises ConfigError for a split without data, and as the data set.
    """
    spec = host[DATASETS].get(config.data.dataset_type, key="data.dataset_type")
    # None: as many samples as the data has.
    request = SplitRequest(split, None, config.data.seq_length, config.train.seed)
    built = spec.build.load()(config.data, tokenizer, request)
    if built is None:
        raise ConfigError(
            f"--split {split}: the section [data] of the checkpoint gives it no data; set data.* with --set"
        )
    named = built if isinstance(built, Mapping) else {split: built}
    kept = (True, False) if without_neighbors else (True,)
    return [
        SamplePerplexity(dataset, name, config.data.dataset_type, with_neighbors=with_neighbors, limit=limit)
        for name, dataset in named.items()
        for with_neighbors in kept
    ]
