"""Results of a few steps on CPU ranks, as unsharded tensors with canonical names, to compare layouts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mt_core.checkpoint_specs import Fragment
from mt_core.config.loading import LoadedConfig, config_from_dict
from mt_core.config.metrics import configured_loss
from mt_core.config.schema import Config
from mt_core.errors import MtError
from mt_core.interfaces import Dataset
from mt_core.nn.layout import parameter_layouts
from mt_core.optim.buckets import Bucket
from mt_core.optim.param_and_grad_buffer import ParamAndGradBuffer
from mt_core.plugins import PluginHost, load_plugins
from mt_core.testing import run_ranks
from mt_core.train.callbacks import Callback, Run
from mt_core.train.checkpoint.local_shards import LocalShard
from mt_core.train.checkpoint.state import MODEL
from mt_core.train.checkpoint.write_plan import collect
from mt_core.train.trainer import Trainer
from mt_tools.verify.small_config import has_global_loss
from mt_tools.verify.small_layout import copies, processes
from mt_tools.verify.small_training import EVALUATE_EVERY, STEPS

# -- adverse conditions that expose mistakes ---------------------------------------------------------
#
# Samples have unequal numbers of counted tokens, so that their losses have unequal weights, and all-gathered weights
# arrive as late as allowed.

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


@dataclass
class RunRecord:
    """losses, norms, rates, samples: of each step: its loss, gradient norm and learning rate, and the samples consumed
    after it. gradients: of the first step, before clipping. weights: after the last.

    evaluations: losses on the validation sets, those after the last step at the end. auxiliary: of each step, the
    losses that layers added, by name. Tensors are canonical, on CPU.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    rates: list[float] = field(default_factory=list)
    samples: list[float] = field(default_factory=list)
    evaluations: list[float] = field(default_factory=list)
    auxiliary: list[dict[str, float]] = field(default_factory=list)

    @property
    def evaluation(self) -> float | None:
        """The loss of the last evaluation."""
        return self.evaluations[-1] if self.evaluations else None

    def after(self, step: int, gradients: dict[str, Tensor]) -> RunRecord:
        """The record without its first steps, comparable to a resumed run. gradients: of its first remaining step,
        which this record does not have."""
        # Evaluations take place every EVALUATE_EVERY steps and once after the last; each may have several validation
        # sets.
        skipped = step // EVALUATE_EVERY * (len(self.evaluations) // (len(self.losses) // EVALUATE_EVERY + 1))
        return RunRecord(
            self.losses[step:],
            self.norms[step:],
            gradients,
            self.weights,
            self.rates[step:],
            self.samples[step:],
            self.evaluations[skipped:],
            self.auxiliary[step:],
        )


class _Recorder(Callback):
    def __init__(self, record: RunRecord, steps: int) -> None:
        self.record, self.steps = record, steps

    def on_train_start(self, run: Run) -> None:
        def keep() -> None:
            # Of the first step alone: later ones start from weights that differ by rounding.
            if not self.record.gradients:
                self.record.gradients = dict(collect(list(gradients(run)), run.ctx))

        run.engine.step.on_gradients = keep

    def on_step_end(self, run: Run, metrics: Mapping[str, float | int | str]) -> None:
        self.record.losses.append(float(metrics["loss"]))
        self.record.norms.append(float(metrics["grad_norm"]))
        self.record.rates.append(float(metrics["learning_rate"]))
        self.record.samples.append(float(metrics["consumed_samples"]))
        self.record.auxiliary.append({name: float(metrics[name]) for name in sorted(run.engine.step.auxiliary.names)})
        # Stopped, not configured shorter: the learning rate schedule keeps its length.
        if run.state.iteration == self.steps:
            run.stop("recorded")

    def on_evaluation(self, run: Run, metrics: Mapping[str, float | int | str]) -> None:
        self.record.evaluations += [float(value) for name, value in metrics.items() if name.endswith("_loss")]


def record_run(
    config: LoadedConfig,
    steps: int = 3,
    *,
    host: PluginHost | None = None,
    run_dir: Path | None = None,
    adverse: bool = False,
    prepare: Callable[[Trainer], object] = lambda trainer: None,
) -> RunRecord:
    """Train `steps` steps and record what they computed; tensors are complete on the first rank. Collective.

    adverse: under conditions that expose mistakes (see `adverse`). prepare: called before training.
    """
    record = RunRecord()
    # A step is recorded after it is done, and before the next one starts.
    train = config.config.train.model_copy(update={"deferred_metrics": "never"})
    at_once = replace(config, config=config.config.model_copy(update={"train": train}))
    trainer = Trainer(at_once, host=host, run_dir=run_dir, callbacks=[_Recorder(record, steps)])
    if adverse:
        make_adverse(trainer)
    prepare(trainer)
    trainer.train()
    fragments = [fragment for fragment in trainer.checkpointed().fragments() if fragment.name.startswith(MODEL)]
    record.weights = {name.removeprefix(MODEL): tensor for name, tensor in collect(fragments, trainer.ctx)}
    trainer.evaluate()
    return record


def gradients(run: Run) -> Iterator[Fragment]:
    """Each parameter's gradient before clipping, as the optimizer sees it, this rank's part."""
    layouts = parameter_layouts(run.model)
    for name, shard in run.engine.weights.named_parameters():
        part = partial(_gradient, shard, run.engine.scaler.scale)
        yield from LocalShard(name, layouts[name], shard.dtype, run.engine.weights.owned_slices(name), part).fragments(
            run.ctx
        )


def _gradient(shard: Tensor, scale: float) -> Tensor:
    return torch.zeros_like(shard) if shard.grad is None else shard.grad / scale  # the loss scale is taken out


# -- runs on CPU ranks of this machine ---------------------------------------------------------------

TIMEOUT = 600.0


def record(config: Config, *, world: int | None = None, steps: int = STEPS, run_dir: Path | None = None) -> RunRecord:
    """Train `steps` steps on `world` ranks; default: as many as the layout needs, two at least.

    Raises the MtError of a rank, and RankFailureError with the traceback of any other.
    """
    world = world or processes(config.parallel)
    records = run_ranks(world, record_on_rank, config.to_dict(), steps, run_dir, timeout=TIMEOUT)
    # Returned by the rank, not raised: an MtError is a sentence for the user, without a traceback of a worker.
    refused = next((result for result in records if isinstance(result, MtError)), None)
    if refused is not None:
        raise refused
    return records[0]


def in_the_same_rounds(config: Config, world: int | None, other: Config, host: PluginHost) -> Config:
    """With micro-batches of as many samples over all ranks as `other` has, for a loss that compares samples, and for
    routers whose balance loss counts rounds of micro-batches."""
    if not (configured_loss(config, host).compares_samples or has_global_loss(config.model.model_dump())):
        return config
    num_copies = copies(config.parallel, world or processes(config.parallel))
    size = max(1, copies(other.parallel, processes(other.parallel)) // num_copies)
    return config.model_copy(update={"train": config.train.model_copy(update={"micro_batch_size": size})})


def record_resumed(first: Config, then: Config, *, steps: int) -> RunRecord:
    """Train `steps` steps under one layout, and the same number in new processes under the other."""
    with TemporaryDirectory(prefix="mt-verify-") as folder:
        record(first, steps=steps, run_dir=Path(folder))
        tree = then.to_dict()
        # Resuming under another layout is what is checked.
        tree["checkpoint"]["accept_changes"] = [f"parallel.{key}" for key in tree["parallel"]]
        return record(config_from_dict(tree, load_plugins()), steps=2 * steps, run_dir=Path(folder))


def record_on_rank(
    rank: int, world: int, tree: Mapping[str, Mapping[str, Any]], steps: int, run_dir: Path | None
) -> RunRecord | MtError | None:
    """The first rank's record, of which the other ranks have only parts; or why this rank refuses the configuration."""
    host = load_plugins()
    loaded = LoadedConfig(config_from_dict(tree, host), {}, None)
    try:
        run = record_run(loaded, steps, host=host, run_dir=run_dir, adverse=True)
    except MtError as error:
        return error
    return run if rank == 0 else None
