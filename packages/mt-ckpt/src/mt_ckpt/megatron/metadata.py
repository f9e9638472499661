"""What a reader of Megatron's formats says beside the tensors, and the schedules of the optimizer's groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mt_ckpt.megatron.arguments import Arguments, unknown_arguments
from mt_ckpt.megatron.run_arguments import run_sections
from mt_ckpt.pickles.inert_objects import plain
from mt_core.config.checks import global_batch_size
from mt_core.config.loading import config_from_dict
from mt_core.config.schema import Config, OptimizerConfig
from mt_core.data.training_length import total_train_samples
from mt_core.errors import CheckpointError, ConfigError
from mt_core.optim.configs import AdamConfig
from mt_core.optim.param_groups import weight_decay_schedule
from mt_core.optim.schedules import Horizon, span_of
from mt_core.plugins import PluginHost
from mt_core.train.build import lr_schedule

KEY = "megatron"
"""Key of the metadata: what Megatron's files say, unchanged."""
LEFT_OUT = "optimizer_left_out"
"""Below it: why an optimizer that is in the files is not read."""
CARRIED = ("checkpoint_version", "opt_param_scheduler", "num_floating_point_operations_so_far")


def metadata_of(args: Arguments, common: Mapping[str, Any], section: Mapping[str, Any]) -> dict[str, Any]:
    """JSON values. common: what is the same on all ranks. section: [model]."""
    consumed, scheduler = int(args.get("consumed_train_samples", 0)), common.get("opt_param_scheduler") or {}
    return {
        "iteration": int(common.get("iteration", 0) or 0),
        "consumed_samples": consumed,
        "schedule_samples": int(scheduler.get("num_steps", scheduler.get("num_iters", consumed))),
        "skipped_iterations": 0,
        "config": {"model": dict(section), **run_sections(args)},
        KEY: {
            "args": plain(args.values),
            "unknown_arguments": unknown_arguments(args.values),
            **{name: plain(common[name]) for name in CARRIED if name in common},
        },
    }


def optimizer_left_out(metadata: Mapping[str, Any]) -> str | None:
    """The reason, of a checkpoint of any format."""
    carried = metadata.get(KEY)
    return carried.get(LEFT_OUT) if isinstance(carried, Mapping) else None


def true_vocab_size(args: Arguments, padded: int, vocab_size: int | None) -> int:
    """Rows of the vocabulary that stand for ids.

    vocab_size: by the caller. Else the args say it where the run needed it (--vocab-size); the number that a
    tokenizer gave is not kept by Megatron, so that all rows count. Raises ConfigError for more rows than there are.
    """
    if vocab_size is not None:
        if not 0 < vocab_size <= padded:
            raise ConfigError(f"vocab_size={vocab_size}: {args.origin} has {padded} rows; it can be 1 to {padded}")
        return vocab_size
    said = args.values.get("vocab_size")
    if said is None:
        return padded
    counts_end = args.get("tokenizer_type") == "NullTokenizer" and "null_tokenizer_eod_id" not in args.values
    return min(int(said) + counts_end, padded)  # that tokenizer used to add its end of document to what it was given


# -- schedules of optimizer groups, as in Megatron's OptimizerParamScheduler; times in samples -------

CONSTANT = "constant"


def scheduler_value(metadata: Mapping[str, Any], host: PluginHost) -> dict[str, Any]:
    """The value under `opt_param_scheduler`: as it came from Megatron, else from our schedules."""
    carried = _carried(metadata)
    if carried:
        return dict(carried)
    config, consumed = _config(metadata, host), _consumed(metadata)
    horizon = _horizon(config, consumed)
    span = span_of(config.lr_schedule, horizon)
    start, end = _weight_decays(config.optimizer)
    return {
        "max_lr": config.optimizer.lr,
        "lr_warmup_steps": span.warmup,
        "num_steps": _scheduled(metadata),
        "lr_decay_style": config.lr_schedule.lr_decay_style,
        "lr_decay_steps": span.decay,
        "min_lr": config.optimizer.min_lr,
        "start_wd": start,
        "end_wd": end,
        "wd_incr_style": config.optimizer.weight_decay_incr_style,
        # The whole training, also where the learning rate's decay ends before.
        "wd_incr_steps": horizon.total_samples,
    }


def optimizer_options(metadata: Mapping[str, Any], host: PluginHost) -> dict[str, Any]:
    """The values of [optimizer], of Adam where it is another one, with the learning rate and the weight decay of the
    next step, and `max_lr`.

    Megatron computes both anew when it loads: by the value under `opt_param_scheduler`, but between `min_lr` and
    `max_lr` of the group, which are therefore those of that value.

    Raises CheckpointError for a run whose weight decay is not on Megatron's parameters.
    """
    config, consumed = _config(metadata, host), _consumed(metadata)
    if config.optimizer.no_weight_decay is not None:
        raise CheckpointError(
            f"the run has optimizer.no_weight_decay={config.optimizer.no_weight_decay}, and Megatron decays every "
            "matrix and no bias or norm, whatever a checkpoint says; convert without the optimizer's state "
            "(--target-optimizer-format none)"
        )
    horizon, highest, scheduled = _horizon(config, consumed), config.optimizer.lr, _scheduled(metadata)
    # Without a length of the training its schedule has no next step.
    learning_rate = lr_schedule(config, host, horizon)(scheduled) if _has_length(config) else highest
    values = {**AdamConfig().model_dump(), **config.optimizer.model_dump(), "max_lr": highest}
    carried = {name: value for name, value in _carried(metadata).items() if name in ("min_lr", "max_lr")}
    options = {**values, **carried, "lr": learning_rate}
    weight_decay = weight_decay_schedule(config.optimizer, horizon.total_samples)
    return options if weight_decay is None else {**options, "weight_decay": weight_decay(scheduled)}


def _carried(metadata: Mapping[str, Any]) -> Mapping[str, Any]:
    """The value under `opt_param_scheduler` that came from Megatron; empty if none did."""
    return metadata.get(KEY, {}).get("opt_param_scheduler") or {}


def _weight_decays(config: OptimizerConfig) -> tuple[float | None, float | None]:
    """At the beginning and the end of the training."""
    if config.weight_decay_incr_style == CONSTANT:
        return config.weight_decay, config.weight_decay
    return config.start_weight_decay, config.end_weight_decay


def _consumed(metadata: Mapping[str, Any]) -> int:
    return int(metadata.get("consumed_samples", 0))


def _scheduled(metadata: Mapping[str, Any]) -> int:
    """Samples of the steps that changed the weights, in fp16 fewer than those consumed."""
    return int(metadata.get("schedule_samples", _consumed(metadata)))


def _config(metadata: Mapping[str, Any], host: PluginHost) -> Config:
    """With the global batch size of the training, which depends on its data-parallel ranks where it is not set."""
    config, iteration = config_from_dict(metadata["config"], host), int(metadata.get("iteration", 0))
    if config.train.global_batch_size is not None or iteration == 0:
        return config
    # A batch size that grows has to be set, so all steps had equally many samples.
    samples = max(_consumed(metadata) // iteration, 1)
    return config.model_copy(update={"train": config.train.model_copy(update={"global_batch_size": samples})})


def _has_length(config: Config) -> bool:
    return config.train.train_iters is not None or config.train.train_samples is not None


def _horizon(config: Config, consumed: int) -> Horizon:
    """A checkpoint that does not say how long its training is has schedules as long as it got, of one sample at
    least."""
    total = total_train_samples(config) if _has_length(config) else max(consumed, 1)
    return Horizon(total, global_batch_size(config), config.optimizer.lr, config.optimizer.min_lr)
