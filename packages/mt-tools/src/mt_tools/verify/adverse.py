"""Runs under adverse conditions that expose mistakes: samples with unequal numbers of counted tokens, whose losses have
unequal weights, and all-gathered weights that arrive as late as allowed."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np
import torch.distributed as dist

from mt_core.optim.buckets import Bucket
from mt_core.optim.param_and_grad_buffer import ParamAndGradBuffer
from mt_core.specs import Dataset
from mt_core.train.trainer import Trainer

MASK = "loss_mask"


def make_adverse(run: Trainer) -> None:
    """Apply before training. Neither changes what a correct run computes, in any layout."""
    run.train_data = UnequalCounts(run.train_data)
    run.valid_data = {name: UnequalCounts(data) for name, data in run.valid_data.items()}
    weights = run.engine.weights
    if isinstance(weights, ParamAndGradBuffer):
        for bucket in weights.buckets:
            # The buckets of this run only: nothing of the library is changed for others.
            bucket.launch_gather = partial(LateGather, bucket)  # type: ignore[method-assign]


class UnequalCounts:
    """Samples in which fewer tokens count, a different number in each and with unequal weights: a mean over ranks or
    micro-batches then differs from the weighted mean over tokens."""

    def __init__(self, data: Dataset) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Mapping[str, np.ndarray]:
        sample = self.data[index]
        mask = sample.get(MASK)
        if mask is None or mask.ndim == 0:
            return sample
        places = np.flatnonzero(mask)
        # At least a quarter of them is kept.
        kept = np.array(mask, dtype=np.float32)
        # By the sample's number, so that every layout masks the same tokens: none, 3/16, 6/16 or 9/16 of them.
        kept[places[: 3 * len(places) * (index % 4) // 16]] = 0
        # From 1/2 to 11/8 along a sample: eighths are exact, so that sums of weights are too.
        kept *= 0.5 + np.arange(len(kept)) % 8 / 8
        return {**sample, MASK: kept}

    def describe(self, index: int) -> str:
        return self.data.describe(index)


class LateGather(dist.Work):
    """Weights of other ranks that arrive only when waited for, and hold the previous step's values until then."""

    def __init__(self, bucket: Bucket) -> None:
        super().__init__()
        self.bucket = bucket

    def wait(self, timeout: object = None) -> bool:
        # No collective is launched before: a layer that reads its weights without waiting computes with stale ones, and
        # its loss shows it.
        bucket = self.bucket
        dist.all_gather_into_tensor(bucket.weights, bucket.part(bucket.weights), group=bucket.axes.shard.group)
        return True
