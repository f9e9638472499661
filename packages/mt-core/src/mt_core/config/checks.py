"""Rules that span several keys. Each objection names the values that would be legal."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mt_core.errors import ConfigError, Problems

if TYPE_CHECKING:
    from mt_core.config.parallel import ParallelConfig
    from mt_core.config.schema import Config


WORLD_SIZE = "WORLD_SIZE"
MODEL_AXES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
)

WARMUPS = ("lr_warmup_iters", "lr_warmup_samples", "lr_warmup_fraction")
SPLIT_KEYS = (
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
"""Keys of [parallel] that ask for Megatron's rule."""


def check_config(config: Config) -> None:
    """Raise a ConfigError that lists the rules that the values break, before anything is built."""
    problems = Problems()
    collect_broken_rules(config, problems)
    problems.stop_if_any()


def collect_broken_rules(config: Config, problems: Problems) -> None:
    """Collect what `check_config` raises, beside other problems."""
    with problems.collect():
        check_world(config.parallel)  # without which there is no data-parallel size to check the others with
        for check in (check_layout, check_batch_size):
            with problems.collect():
                check(config)
    for check in (
        check_duration,
        check_loss,
        check_schedule,
        check_recompute,
        check_fp8,
        check_exports,
        check_retention,
    ):
        with problems.collect():
            check(config)


def check_fp8(config: Config) -> None:
    precision, parallel = config.precision, config.parallel
    if precision.fp8_format == "none":
        return
    if precision.dtype == "fp16":
        raise ConfigError(
            f"precision.fp8_format={precision.fp8_format} goes with bf16 weights and activations, which need no loss "
            "scale, or with fp32 on a CPU; precision.dtype can be bf16 or fp32"
        )
    if (precision.fp8_format == "e2m1") != (precision.fp8_recipe == "nvfp4"):
        raise ConfigError(
            f"precision.fp8_format={precision.fp8_format} does not go with "
            f"precision.fp8_recipe={precision.fp8_recipe}: nvfp4 is the recipe of e2m1, and the others are those of "
            "e4m3 and hybrid"
        )
    draws = precision.fp8_recipe == "nvfp4" and precision.fp4_stochastic_rounding
    if draws and config.train.compile != "none":
        raise ConfigError(
            f"precision.fp4_stochastic_rounding=true draws by the sample at hand, which train.compile="
            f"{config.train.compile} would make a constant; set train.compile=none or fp4_stochastic_rounding=false"
        )
    if precision.fp8_recipe == "delayed" and parallel.use_torch_fsdp2:
        raise ConfigError(
            "precision.fp8_recipe=delayed keeps a history in fp32 on every process, and parallel.use_torch_fsdp2 "
            "divides and rounds all that a layer holds; use tensorwise, rowwise or blockwise, or "
            "parallel.use_distributed_optimizer"
        )
    if precision.fp8_output_proj and config.train.loss.startswith("linear_cross_entropy"):
        raise ConfigError(
            f"precision.fp8_output_proj=true: train.loss={config.train.loss} multiplies by the LM head itself; "
            "use train.loss=cross_entropy or precision.fp8_output_proj=false"
        )


def check_exports(config: Config) -> None:
    """A Hugging Face folder is made from a checkpoint."""
    save, export = config.checkpoint.save_interval, config.checkpoint.save_hf_interval
    if save is not None and export is not None and export % save:
        near = max(export - export % save, save)
        raise ConfigError(
            f"checkpoint.save_hf_interval={export} is no multiple of checkpoint.save_interval={save}: a folder is made "
            f"from a checkpoint; use {near}, or change checkpoint.save_interval"
        )


def check_retention(config: Config) -> None:
    keys = config.checkpoint
    if keys.keep_every is not None and keys.keep_last is None:
        raise ConfigError(
            f"checkpoint.keep_every={keys.keep_every}: without checkpoint.keep_last every checkpoint is kept; set "
            "checkpoint.keep_last, too"
        )


def check_recompute(config: Config) -> None:
    recompute, parallel = config.recompute, config.parallel
    if recompute.recompute_granularity == "selective" and not recompute.recompute_modules:
        raise ConfigError(
            "recompute.recompute_granularity=selective with no recompute.recompute_modules computes nothing again; "
            "name some, such as core_attn, or remove both"
        )
    if recompute.min_offloaded_tensor_size != 1048576 and not recompute.offload_modules:
        raise ConfigError("recompute.min_offloaded_tensor_size would be ignored: set recompute.offload_modules too")
    if recompute.offload_modules and recompute.recompute_granularity == "full":
        raise ConfigError(
            "recompute.recompute_granularity=full keeps the inputs of layers alone, of whose modules "
            "recompute.offload_modules would keep activations; set one of the two to none, or to []"
        )
    if recompute.offload_modules and config.train.compile != "none":
        raise ConfigError(
            f"recompute.offload_modules copies what modules keep, which train.compile={config.train.compile} decides "
            "for whole layers; set train.compile=none"
        )
    if "mhc" in recompute.recompute_modules and not getattr(config.model, "enable_mhc_connections", False):
        raise ConfigError(
            "recompute.recompute_modules has mhc, hyper-connections, which this model has not; remove it, or set "
            "model.enable_mhc_connections=true where model.family has the key"
        )
    if "mla_up_proj" in recompute.recompute_modules and not hasattr(config.model, "kv_lora_rank"):
        raise ConfigError(
            "recompute.recompute_modules has mla_up_proj, the way up from latents; "
            f"model.family={config.model.family} has none; remove it"
        )
    if not recompute.distribute_saved_activations:
        return
    if parallel.tensor_model_parallel_size == 1 or parallel.sequence_parallel:
        have = "sequence_parallel divides them already" if parallel.sequence_parallel else "there is one process"
        raise ConfigError(
            "recompute.distribute_saved_activations divides inputs that tensor-parallel processes have in common: "
            f"{have}; remove it"
        )


LARGEST_FACTOR = 10**6
"""Factors are looked for up to here: numbers of a file may have any size."""


def divisors(number: int) -> list[int]:
    """In their order; all of them up to 10^12, and of larger numbers those by factors that are quickly found."""
    if number < 1:
        return []
    products, rest, factor = [1], number, 2
    while factor * factor <= rest and factor <= LARGEST_FACTOR:
        powers = [1]
        while rest % factor == 0:
            rest //= factor
            powers.append(powers[-1] * factor)
        products = [product * power for product in products for power in powers]
        factor += 1
    return sorted(products if rest == 1 else [*products, *(product * rest for product in products)])


def listed(values: list[int]) -> str:
    """ "1, 2 or 4"; long lists keep their ends."""
    shown = [str(value) for value in values]
    if len(shown) > 12:
        shown = [*shown[:8], "...", *shown[-2:]]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} or {shown[-1]}"


def must_divide(key: str, value: int, whole_key: str, whole: int) -> None:
    """`value` (of `key`) has to divide `whole`; the message lists what it can be."""
    must_divide_all(key, value, {whole_key: whole})


def must_divide_all(key: str, value: int, wholes: Mapping[str, int]) -> None:
    """`value` (of `key`) has to divide each of these numbers; the message lists what divides all of them."""
    for whole_key, whole in wholes.items():
        if whole % value:
            legal = divisors(math.gcd(*wholes.values()))
            raise ConfigError(f"{key}={value} does not divide {whole_key}={whole}; it can be {listed(legal)}")


def world_size() -> int:
    """Processes of this job, as the launcher says (torchrun's WORLD_SIZE), else 1."""
    return int(os.environ.get(WORLD_SIZE, "1"))


def smallest_world(parallel: ParallelConfig) -> int:
    """Processes that the axes of a layout need at least."""
    stages = parallel.pipeline_model_parallel_size
    dense = parallel.tensor_model_parallel_size * parallel.context_parallel_size * stages
    expert_tp = parallel.expert_tensor_parallel_size or parallel.tensor_model_parallel_size
    # Both views of the processes have to fit: tp x cp x pp of dense layers, ep x etp x pp of experts.
    return math.lcm(dense, parallel.expert_model_parallel_size * expert_tp * stages)


@contextmanager
def as_world(size: int) -> Iterator[None]:
    """Configuration is checked for so many processes, before any of them is started."""
    # The rules read the launcher's variable; it is restored, as commands may start processes afterwards.
    before = os.environ.get(WORLD_SIZE)
    os.environ[WORLD_SIZE] = str(size)
    try:
        yield
    finally:
        if before is None:
            del os.environ[WORLD_SIZE]
        else:
            os.environ[WORLD_SIZE] = before


def data_parallel_size(config: Config) -> int:
    parallel = config.parallel
    return world_size() // (
        parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size * parallel.context_parallel_size
    )


def global_batch_size(config: Config) -> int:
    """Samples of a full optimizer step."""
    return config.train.global_batch_size or config.train.micro_batch_size * data_parallel_size(config)


def check_world(parallel: ParallelConfig) -> None:
    """That the axes divide the processes."""
    world = world_size()
    # One by one first: the message names the one axis that cannot be.
    for key in MODEL_AXES:
        must_divide(f"parallel.{key}", getattr(parallel, key), "the number of processes", world)
    dense = parallel.tensor_model_parallel_size * parallel.context_parallel_size * parallel.pipeline_model_parallel_size
    must_divide(
        "parallel.tensor_model_parallel_size x context_parallel_size x pipeline_model_parallel_size",
        dense,
        "the number of processes",
        world,
    )


def check_layout(config: Config) -> None:
    """That what is requested along the axes can be."""
    _check_sharding(config)
    _check_sequence_parallel(config)
    _check_experts(config)
    _check_pipeline(config)


def _check_pipeline(config: Config) -> None:
    trace, size = config.logging.trace_schedule, config.parallel.pipeline_model_parallel_size
    if trace is not None and size == 1:
        raise ConfigError("logging.trace_schedule needs parallel.pipeline_model_parallel_size above 1; remove it")
    if trace is not None and not trace.endswith((".json", ".svg")):
        raise ConfigError(f"logging.trace_schedule={trace} is no file that can be written; it can end in .json or .svg")
    splits = [key for key in SPLIT_KEYS if getattr(config.parallel, key)]
    if splits and size == 1:
        raise ConfigError(
            f"parallel.{splits[0]} divides layers over pipeline stages, and parallel.pipeline_model_parallel_size=1; "
            "remove it, or set that above 1"
        )
    if config.parallel.pipeline_backward_communicator and size == 1:
        raise ConfigError(
            "parallel.pipeline_backward_communicator=true is for gradients between pipeline stages, and "
            "parallel.pipeline_model_parallel_size is 1; remove it, or set that above 1"
        )
    layout = config.parallel.pipeline_model_parallel_layout
    if layout is not None and size == 1:
        raise ConfigError(
            f"parallel.pipeline_model_parallel_layout={layout} names pipeline stages, and "
            "parallel.pipeline_model_parallel_size is 1; remove it, or set that above 1"
        )


def _check_sharding(config: Config) -> None:
    parallel = config.parallel
    if parallel.use_torch_fsdp2 and parallel.use_distributed_optimizer:
        raise ConfigError(
            "parallel.use_torch_fsdp2 divides the optimizer's state already; remove parallel.use_distributed_optimizer"
        )
    if parallel.fsdp_reduce_each_micro_batch and parallel.pipeline_model_parallel_size > 1:
        raise ConfigError(
            "parallel.fsdp_reduce_each_micro_batch=true: the passes of pipeline stages interleave, and their gradients "
            "are reduced at the end of a step; set it to false, or parallel.pipeline_model_parallel_size to 1"
        )
    if parallel.use_torch_fsdp2 and config.train.verify_replicas_interval is not None:
        raise ConfigError(
            "train.verify_replicas_interval compares copies of weights, and parallel.use_torch_fsdp2 leaves none; "
            "remove it"
        )
    if parallel.use_torch_fsdp2 and config.precision.dtype == "fp16":
        raise ConfigError("parallel.use_torch_fsdp2 trains in fp32 or bf16; precision.dtype can be fp32 or bf16")
    if parallel.outer_dp_sharding_strategy == "optim" and parallel.num_distributed_optimizer_instances == 1:
        raise ConfigError(
            "parallel.outer_dp_sharding_strategy=optim shares the optimizer's state among several instances; set "
            "parallel.num_distributed_optimizer_instances too, or leave it at no_shard: one instance shards it anyway"
        )
    sharded = parallel.use_torch_fsdp2 or parallel.use_distributed_optimizer
    if parallel.num_distributed_optimizer_instances > 1 and not sharded:
        raise ConfigError(
            f"parallel.num_distributed_optimizer_instances={parallel.num_distributed_optimizer_instances} copies a "
            "sharded state; set parallel.use_distributed_optimizer or parallel.use_torch_fsdp2"
        )


def _check_sequence_parallel(config: Config) -> None:
    parallel = config.parallel
    size = parallel.tensor_model_parallel_size
    if not parallel.sequence_parallel:
        return
    if size == 1:
        raise ConfigError(
            "parallel.sequence_parallel divides sequences over tensor-parallel processes, and "
            "parallel.tensor_model_parallel_size is 1; raise it or remove parallel.sequence_parallel"
        )
    length = config.data.seq_length
    if length % (size * parallel.context_parallel_size):
        raise ConfigError(
            f"data.seq_length={length} cannot be sharded over parallel.tensor_model_parallel_size={size} with "
            f"parallel.sequence_parallel (and context_parallel_size={parallel.context_parallel_size}); "
            f"use a multiple of {size * parallel.context_parallel_size}"
        )


def _check_experts(config: Config) -> None:
    """A model without experts has nothing to divide over their axes."""
    # Models that read images too have the experts in their decoder.
    if getattr(getattr(config.model, "decoder", config.model), "moe", None) is not None:
        return
    parallel = config.parallel
    for key in ("expert_model_parallel_size", "expert_tensor_parallel_size"):
        if getattr(parallel, key) not in (None, 1):
            raise ConfigError(
                f"parallel.{key}={getattr(parallel, key)} divides experts, and this model.family={config.model.family} "
                "has none (no section model.moe); remove it"
            )


def check_batch_size(config: Config) -> None:
    train = config.train
    total, unit = global_batch_size(config), train.micro_batch_size * data_parallel_size(config)
    if total % unit:
        below, above = total - total % unit, total + unit - total % unit
        near = f"{below} or {above}" if below else str(above)
        raise ConfigError(
            f"train.global_batch_size={total} is no multiple of train.micro_batch_size={train.micro_batch_size} "
            f"times the data-parallel size {data_parallel_size(config)}; the nearest legal values are {near}"
        )
    if train.rampup_batch_size is not None:
        _check_rampup(train.rampup_batch_size, total, unit)


def _check_rampup(rampup: tuple[int, int, int], total: int, unit: int) -> None:
    start, increment, samples = rampup
    if start >= total or samples == 0:
        reason = "begins with" if start >= total else "has 0 samples to grow to"
        raise ConfigError(
            f"train.rampup_batch_size={list(rampup)} {reason} train.global_batch_size={total}"
            f"{' or more' if start > total else ''}, so that no step is smaller: remove it, or give a smaller start "
            "and more than 0 samples"
        )
    if (total - start) % increment:
        raise ConfigError(
            f"train.rampup_batch_size={list(rampup)}: from {start} by steps of {increment} the batch never "
            f"reaches train.global_batch_size={total}; the increment can be {listed(divisors(max(total - start, 1)))}"
        )
    for name, value in (("start", start), ("increment", increment)):
        if value % unit:
            raise ConfigError(
                f"train.rampup_batch_size={list(rampup)}: {name} {value} is no multiple of micro_batch_size times "
                f"the data-parallel size, {unit}"
            )


def check_duration(config: Config) -> None:
    train = config.train
    lengths = ("train_iters", "train_samples", "train_epochs")
    set_keys = [key for key in lengths if getattr(train, key) is not None]
    # train_iters beside train_epochs is what the epochs come to; with_train_iters compares them.
    if len(set_keys) != 1 and set_keys != ["train_iters", "train_epochs"]:
        which = f"{' and '.join(set_keys)} are" if set_keys else "none is"
        raise ConfigError(f"set exactly one of {', '.join(f'train.{key}' for key in lengths)}; {which} set")
    if train.rampup_batch_size is not None and train.train_samples is None:
        raise ConfigError(
            "train.rampup_batch_size makes steps of different sizes: set train.train_samples, not "
            f"{' and '.join(set_keys)}"
        )


def check_loss(config: Config) -> None:
    train = config.train
    # loss_divisor without this normalization is an unused value, which is refused elsewhere.
    if train.loss_normalization == "constant" and train.loss_divisor is None:
        raise ConfigError(
            "train.loss_normalization=constant divides the sum of the losses of a global batch by train.loss_divisor; "
            "set it to a number above 0, such as the tokens of a full batch"
        )


def check_warmup(config: Config, origin: Callable[[str], str]) -> None:
    """A schedule without a step between its warm-up and the end of its decay never has the learning rate that was
    requested. A decay that is written and is longer than the run is a schedule of which the run is a part, as in trials
    of a long training; without one the decay ends with the run. Raises ConfigError; nothing is checked of a run of
    train.train_epochs until its steps are known.

    origin: dotted key -> the layer that its value came from. The warm-up and the WSD tail of a preset belong to a run
    of the preset's length; they stay as they are in a shorter trial.
    """
    unit = "iters" if config.train.train_samples is None else "samples"
    ends = {"decay": f"lr_schedule.lr_decay_{unit}", "run": f"train.train_{unit}"}
    name = "run" if _value(config, ends["decay"]) is None else "decay"
    end, warmup = _value(config, ends[name]), 0
    if end is None:
        return
    # A warm-up in the other unit is refused by check_schedule.
    for key in (f"lr_schedule.lr_warmup_{unit}", "lr_schedule.lr_warmup_fraction"):
        value = _value(config, key)
        if not value or origin(key).startswith("preset"):
            continue
        warmup = int(value * end) if key.endswith("fraction") else value
        if warmup >= end:
            raise ConfigError(
                f"{key}={value} leaves nothing of the {name}, {ends[name]}={end}; " + _shorter_warmup(key, end)
            )
    _check_tail(config, f"lr_schedule.lr_wsd_decay_{unit}", (warmup, end), origin)


def _value(config: Config, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name, None)


def _shorter_warmup(key: str, length: int) -> str:
    """What to write instead. length: of the run, or of the decay."""
    if key.endswith("fraction"):
        return f"use less than 1, such as {key}=0.1"
    return f"use at most {length - 1}, such as {key}={length // 10}"


def _check_tail(config: Config, key: str, span: tuple[int, int], origin: Callable[[str], str]) -> None:
    """The tail of the WSD schedule ends with the decay. span: end of the warm-up, end of the decay."""
    tail, (warmup, end) = _value(config, key), span
    if tail is not None and tail > end - warmup and not origin(key).startswith("preset"):
        raise ConfigError(
            f"{key}={tail} is longer than what the warm-up leaves of the decay, which begins at {warmup} and ends at "
            f"{end}; use at most {end - warmup}"
        )


def check_schedule(config: Config) -> None:
    schedule, optimizer = config.lr_schedule, config.optimizer
    if optimizer.min_lr > optimizer.lr:
        raise ConfigError(f"optimizer.min_lr={optimizer.min_lr} is above optimizer.lr={optimizer.lr}")
    _check_rate(config)
    warmup_keys = [key for key in WARMUPS if getattr(schedule, key) is not None]
    if len(warmup_keys) > 1:
        raise ConfigError(f"lr_schedule: set at most one of {', '.join(WARMUPS)}; {' and '.join(warmup_keys)} are set")
    _check_warmup_init(config)
    if schedule.lr_decay_iters is not None and schedule.lr_decay_samples is not None:
        raise ConfigError("lr_schedule: set at most one of lr_decay_iters and lr_decay_samples")
    by_samples = config.train.train_samples is not None
    for key in (f"{part}_{'iters' if by_samples else 'samples'}" for part in ("lr_warmup", "lr_decay", "lr_wsd_decay")):
        if getattr(schedule, key, None) is not None:
            length, instead = ("train_samples", "samples") if by_samples else ("train_iters", "iters")
            raise ConfigError(
                f"lr_schedule.{key} is set while training is counted by train.{length}; "
                f"use lr_schedule.{key.rsplit('_', 1)[0]}_{instead}"
            )


LARGEST_RATE = 1000.0
"""Adam and Lion move each weight by about the rate; SGD on normalized gradients takes rates up to some tens."""


def _check_rate(config: Config) -> None:
    optimizer = config.optimizer
    for key in ("lr", "decoupled_lr"):
        rate = getattr(optimizer, key)
        if rate is not None and not rate <= LARGEST_RATE:
            raise ConfigError(
                f"optimizer.{key}={rate} is no learning rate that trains anything: steps would be larger than any "
                f"weight; it is at most {LARGEST_RATE:g}, and usually below 0.01"
            )


def _check_warmup_init(config: Config) -> None:
    schedule, optimizer = config.lr_schedule, config.optimizer
    if not schedule.lr_warmup_init:
        return
    if not any(getattr(schedule, key) for key in WARMUPS):
        raise ConfigError(
            f"lr_schedule.lr_warmup_init={schedule.lr_warmup_init} is where a warm-up begins, and this run has none; "
            f"set one of {', '.join(WARMUPS)}, or remove it"
        )
    for key in ("lr", "decoupled_lr"):
        highest = getattr(optimizer, key)
        if highest is not None and schedule.lr_warmup_init > highest:
            raise ConfigError(
                f"lr_schedule.lr_warmup_init={schedule.lr_warmup_init} is above optimizer.{key}={highest}, where the "
                f"warm-up ends; use at most {highest}"
            )
