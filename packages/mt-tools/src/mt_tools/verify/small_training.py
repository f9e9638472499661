"""The training options of a small run: whatever a layout can break shows within a few steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from mt_core.config.parallel import ParallelConfig
from mt_tools.verify.small_layout import copies, processes

Tree = dict[str, dict[str, Any]]

STEPS = 5
"""Enough that a stale value of the step before the last shows, and that the batch has grown."""
BATCH = 8
EVALUATE_EVERY = 2


def shrink_training(tree: Tree, layouts: Sequence[ParallelConfig], steps: int) -> None:
    """Sets [train], [lr_schedule] and other options of a run of which each of the layouts can take a step. The training
    horizon is twice the steps, so that a learning rate that depends on the samples keeps changing."""
    batch = batch_size(*layouts)
    tree["train"].update(
        micro_batch_size=1,
        global_batch_size=batch,
        # The first step has half of the batch.
        # [start, increment, samples]: the second step has the full batch.
        rampup_batch_size=[batch // 2, batch // 2, batch // 2],
        train_iters=None,
        train_epochs=None,
        train_samples=batch // 2 + batch * (2 * steps - 1),
        eval_interval=EVALUATE_EVERY,
        eval_iters=1,
        # The fake validation set is large, and every batch of it shows the same.
        full_validation=False,
        exit_iteration=None,
        callbacks=[],
        check_memory=False,
        deterministic=False,
        sample_prompt=None,
        # Several ranks share the cores of this machine.
        num_threads=1,
    )
    if "adam_eps" in tree["optimizer"]:
        # Adam normalizes any gradient to a step of the learning rate's size, also rounding noise where the exact
        # gradient is 0 (such as the bias of keys). A larger eps keeps such steps small.
        tree["optimizer"]["adam_eps"] = 1e-4
    tree["lr_schedule"] = {"lr_decay_style": "cosine", "lr_warmup_samples": batch // 2}
    tree["checkpoint"] = {"save_interval": None}
    tree["logging"] = {"progress": "none"}


def batch_size(*layouts: ParallelConfig) -> int:
    """The smallest batch of at least BATCH samples of which the copies of the model can share a half in each layout."""
    # The ramp-up's half batch has to be a multiple of the copies, too.
    unit = 2 * math.lcm(*(copies(parallel, processes(parallel)) for parallel in layouts))
    return -(-BATCH // unit) * unit


def keep_dropout(model: dict[str, Any], layouts: Sequence[ParallelConfig], rate: float | None) -> None:
    """Dropout as configured, or with `rate`. Attention dropout is drawn inside of kernels, for the heads and positions
    of a rank: layouts that shard those differently drop different weights, so there it is disabled."""
    sharded = any(each.tensor_model_parallel_size * each.context_parallel_size > 1 for each in layouts)
    for key in model:
        if key.endswith("attention_dropout") and sharded:
            model[key] = 0.0
        elif key.endswith("dropout") and rate is not None:
            model[key] = rate
