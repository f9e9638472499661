"""`MegatronLMPlugin`: Accelerate's fields, their types and defaults, and what they are in a configuration of mt.

A field that a program does not give is taken from the variable `MEGATRON_LM_<FIELD>`, which a launcher sets. Defaults
are Accelerate's, except for those that make a run wrong: `context_parallel_size` is 1 (there 2), recomputation is off
until it is requested, and the model says which positions it has.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, TypeAdapter, ValidationError

from mt_core.errors import ConfigError, Problems, did_you_mean
from mt_import.readers.accelerate import KEYS, PREFIX, SELECTIVE, VARIABLE_PREFIX, import_accelerate

Sections = dict[str, dict[str, Any]]
IMPORTED = frozenset((*KEYS, SELECTIVE)) - {
    *("attention_dropout", "hidden_dropout", "seq_length", "decoder_seq_length", "train_iters", "train_samples"),
    *("lr_warmup_iters", "lr_warmup_samples", "lr_warmup_fraction", "lr_decay_style", "lr_decay_iters"),
    *("lr_decay_samples", "min_lr", "eod_mask_loss"),
}
"""Fields that are keys of a configuration whatever model, scheduler and data are."""
REFUSED: Mapping[str, str] = {
    "optimizer_cpu_offload": "the optimizer's state stays on the device; use_distributed_optimizer shards it",
    "overlap_cpu_optimizer_d2h_h2d": "it overlaps the copies of optimizer_cpu_offload",
    "pipeline_model_parallel_split_rank": "stages are divided over encoder and decoder together",
    "attention_backend": "a bool names no kernel; the fastest that supports the model is chosen",
    "no_wd_decay_cond": "weights of two dimensions and more are decayed, biases and norms never",
    "scale_lr_cond": "the embedding and the output layer can have a rate of their own, optimizer.decoupled_lr of "
    "mt train; other parameters cannot",
    "lr_mult": "it scales the rates of the parameters that scale_lr_cond picks",
}
"""Fields of which only the default can be had -> why."""
DEPENDENT: Mapping[str, tuple[str, Any]] = {
    "recompute_method": ("recompute_granularity", "full"),
    "recompute_num_layers": ("recompute_granularity", "full"),
    "set_all_logging_options": ("tensorboard_dir", ...),
    "custom_train_step_kwargs": ("custom_train_step_class", ...),
    "custom_prepare_model_function": ("custom_model_provider_function", ...),
}
"""Field -> the field that it counts with, and that one's value; ... is any."""
LENGTHS = (
    ("train_iters", "train_samples"),
    ("lr_warmup_iters", "lr_warmup_samples"),
    ("lr_decay_iters", "lr_decay_samples"),
)
"""Pairs that say the same in steps and in samples."""


class MegatronLMPlugin(BaseModel):
    """How to share the work of training. Raises ConfigError for an unknown field and a value of another type."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        arbitrary_types_allowed=True,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )

    tp_degree: int = Field(1, ge=1)
    """Processes that share each layer's matrices."""
    pp_degree: int = Field(1, ge=1)
    """Stages of layers."""
    num_micro_batches: int = Field(1, ge=1)
    """Micro-batches of a step; they are gradient accumulation."""
    gradient_clipping: float = Field(1.0, ge=0)
    """Largest global norm of the gradient; 0 does not clip."""
    sequence_parallelism: bool = False
    """Activations between the layers' matrices are sharded, too, over the ranks of tp_degree."""
    recompute_activations: bool = False
    """Recomputation: selective, unless recompute_granularity is full."""
    recompute_granularity: str | None = None
    """full or selective."""
    recompute_method: str | None = None
    recompute_num_layers: int | None = None
    use_distributed_optimizer: bool = False
    """Optimizer state sharded over data-parallel ranks."""
    context_parallel_size: int = Field(1, ge=1)
    expert_model_parallel_size: int = Field(1, ge=1)
    expert_tensor_parallel_size: int = Field(1, ge=1)
    decoder_last_pipeline_num_layers: int | None = None
    """Layers of the last stage."""
    num_layers_per_virtual_pipeline_stage: int | None = None
    """Layers of a stage of an interleaved pipeline."""
    pipeline_model_parallel_split_rank: int | None = None
    use_custom_fsdp: bool = False
    """FSDP2."""
    no_load_optim: bool = False
    """`load_state` leaves the optimizer's state out."""
    no_save_optim: bool = False
    """`save_state` leaves the optimizer's state out."""
    eod_mask_loss: bool = False
    """Positions whose token ends a document are not counted in the loss."""
    optimizer_cpu_offload: bool = False
    overlap_cpu_optimizer_d2h_h2d: bool = False
    use_precision_aware_optimizer: bool = False
    """With other_megatron_args={'exp_avg_dtype': ...}."""
    attention_backend: bool = True
    attention_dropout: float = Field(0.0, ge=0, le=1)
    hidden_dropout: float = Field(0.0, ge=0, le=1)
    attention_softmax_in_fp32: bool = True
    calculate_per_token_loss: bool = True
    """False: the mean of the micro-batches' means."""
    use_rotary_position_embeddings: bool | None = None
    """None: as the model has them. Another value than the model's is an error."""
    is_train_batch_min: bool = True
    """The micro-batch is the smallest batch size of the data loaders, else the largest."""
    train_iters: int | None = None
    train_samples: int | None = None
    lr_warmup_iters: int | None = None
    lr_warmup_samples: int | None = None
    lr_warmup_fraction: float | None = None
    lr_decay_style: str = "linear"
    lr_decay_iters: int | None = None
    lr_decay_samples: int | None = None
    min_lr: float = Field(0.0, ge=0)
    weight_decay_incr_style: str = "constant"
    start_weight_decay: float | None = None
    end_weight_decay: float | None = None
    consumed_samples: list[int] | None = None
    """Numbers of samples of training, validation and test."""
    no_wd_decay_cond: Callable[..., Any] | None = None
    scale_lr_cond: Callable[..., Any] | None = None
    lr_mult: float = 1.0
    megatron_dataset_flag: bool = False
    """Passed to `get_batch_func`; set by `prepare` with MegatronLMDummyDataLoader."""
    seq_length: int | None = None
    encoder_seq_length: int | None = None
    """The same as seq_length."""
    decoder_seq_length: int | None = None
    """Length of the decoder's sequences in T5's data sets."""
    tensorboard_dir: str | None = None
    """Folder of event files: the metrics of each step, and of evaluations, under Megatron's names."""
    set_all_logging_options: bool = False
    """Event files also have times, throughput, memory and the number of zeros in the gradient."""
    eval_iters: int = 100
    """Global batches of an evaluation on data sets of mt; programs read it, too."""
    eval_interval: int = 1000
    """Read by programs, which call evaluations themselves."""
    return_logits: bool = False
    """Outputs have logits, on the ranks of the last pipeline stage."""
    custom_train_step_class: type | None = None
    custom_train_step_kwargs: dict[str, Any] | None = None
    custom_model_provider_function: Callable[..., Any] | None = None
    """(section [model], environment) -> a model of mt; see docs/guides/add-a-model.md."""
    custom_prepare_model_function: Callable[..., Any] | None = None
    """(custom_model_provider_function without arguments) -> the model to train."""
    custom_megatron_datasets_provider_function: Callable[..., Any] | None = None
    """(numbers of samples of training, validation, test) -> the three data sets."""
    custom_get_batch_function: Callable[..., Any] | None = None
    custom_loss_function: Callable[..., Any] | None = None
    other_megatron_args: dict[str, Any] | None = None
    """Megatron's arguments by attribute; see `megatron_args`."""
    _global_batch_size: int | None = PrivateAttr(None)

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**{**_from_environment(type(self), fields), **fields})
        except ValidationError as error:
            raise ConfigError(_sentences(error, type(self).model_fields)) from None
        problems = Problems()
        # All problems in one error: a launch on many machines is expensive to repeat.
        for check in (_check_refused, _check_dependent, _check_contradictions):
            with problems.collect():
                check(self)
        problems.stop_if_any()

    @property
    def global_batch_size(self) -> int | None:
        """Samples of a step over all ranks; None before `Accelerator.prepare`."""
        return self._global_batch_size

    def set_global_batch_size(self, size: int) -> None:
        self._global_batch_size = size

    def changed(self) -> dict[str, Any]:
        """The fields whose values are not the defaults."""
        fields = type(self).model_fields
        return {name: value for name, value in self if value != fields[name].default}

    def sections(self, mixed_precision: str) -> Sections:
        """The keys that are set by fields which depend on neither model nor data."""
        # The table of `mt import accelerate` is used, so that a YAML and a program with the same fields mean the same.
        fields = {PREFIX + name: value for name, value in self.changed().items() if name in IMPORTED}
        values = {"megatron_lm_config": fields, "mixed_precision": mixed_precision}
        result = import_accelerate(values, "MegatronLMPlugin")
        return {section: dict(keys) for section, keys in result.sections.items()}


def _check_refused(plugin: MegatronLMPlugin) -> None:
    changed = plugin.changed()
    refused = [f"{name}={changed[name]!r}: {reason}" for name, reason in REFUSED.items() if name in changed]
    if refused:
        raise ConfigError("\n".join(f"MegatronLMPlugin has {text}; leave the field out" for text in refused))


def _check_dependent(plugin: MegatronLMPlugin) -> None:
    changed = plugin.changed()
    for name, (other, value) in DEPENDENT.items():
        if name in changed and (getattr(plugin, other) is None if value is ... else getattr(plugin, other) != value):
            needed = other if value is ... else f"{other}={value!r}"
            raise ConfigError(f"MegatronLMPlugin({name}=...) counts only with {needed}; give both or neither")
    has_dtype = "exp_avg_dtype" in (plugin.other_megatron_args or {})
    if plugin.use_precision_aware_optimizer != has_dtype:
        raise ConfigError(
            "MegatronLMPlugin(use_precision_aware_optimizer=True) and other_megatron_args={'exp_avg_dtype': ...}, the "
            "dtype of the moments, count only together"
        )


def _check_contradictions(plugin: MegatronLMPlugin) -> None:
    for pair in LENGTHS:
        if all(getattr(plugin, name) is not None for name in pair):
            raise ConfigError(f"MegatronLMPlugin has {pair[0]} and {pair[1]}; give one of them")
    lengths = {plugin.seq_length, plugin.encoder_seq_length} - {None}
    if len(lengths) > 1:
        raise ConfigError(
            f"MegatronLMPlugin(seq_length={plugin.seq_length}, encoder_seq_length={plugin.encoder_seq_length}) are two "
            "lengths of the same input; give one of them"
        )
    if any((plugin.consumed_samples or [])[1:]):
        raise ConfigError(
            f"MegatronLMPlugin(consumed_samples={plugin.consumed_samples}): an evaluation begins with the first sample "
            "every time; set those of validation and test to 0"
        )


def _from_environment(kind: type[MegatronLMPlugin], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Fields that the launcher sets and the program does not. Raises ConfigError for a text that is no value."""
    fields = {}
    for name, field in kind.model_fields.items():
        # A launcher writes fields without a value as the word None. What the program gives itself wins.
        text = os.environ.get(VARIABLE_PREFIX + name.upper())
        if text is None or name in arguments or text.lower() == "none":
            continue
        try:
            kind_of_field: Any = field.annotation
            # Not strict, as the class is: variables are texts, "4" and "true".
            fields[name] = TypeAdapter(kind_of_field).validate_strings(text)
        except ValidationError:
            raise ConfigError(f"{VARIABLE_PREFIX}{name.upper()}={text!r} is no value of the field {name}") from None
    return fields


def _sentences(error: ValidationError, fields: Mapping[str, Any]) -> str:
    lines = []
    for problem in error.errors():
        name = str(problem["loc"][0])
        if problem["type"] == "extra_forbidden":
            lines.append(f"MegatronLMPlugin has no field {name}{did_you_mean(name, fields)}")
        else:
            lines.append(f"MegatronLMPlugin({name}={problem['input']!r}): {problem['msg']}")
    return "\n".join(dict.fromkeys(lines))
