"""The names that programs import from `accelerate.utils`."""

from __future__ import annotations

import random

import numpy as np
import torch

from mt_accelerate.data_loaders import MegatronLMDummyDataLoader
from mt_accelerate.data_parallel import avg_losses_across_data_parallel_group, gather_across_data_parallel_groups
from mt_accelerate.distributed_type import DistributedType
from mt_accelerate.megatron_lm_plugin import MegatronLMPlugin
from mt_accelerate.project import ProjectConfiguration
from mt_accelerate.schedulers import MegatronLMDummyScheduler
from mt_accelerate.tracking import LoggerType
from mt_accelerate.train_steps import AbstractTrainStep, BertTrainStep, GPTTrainStep, T5TrainStep

__all__ = [
    "AbstractTrainStep",
    "BertTrainStep",
    "DistributedType",
    "GPTTrainStep",
    "LoggerType",
    "MegatronLMDummyDataLoader",
    "MegatronLMDummyScheduler",
    "MegatronLMPlugin",
    "ProjectConfiguration",
    "T5TrainStep",
    "avg_losses_across_data_parallel_group",
    "gather_across_data_parallel_groups",
    "set_seed",
]


def set_seed(seed: int) -> None:
    """Of Python's, NumPy's and torch's random numbers; the seed of training, too."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
