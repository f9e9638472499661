"""`MegatronLMPlugin`: Accelerate's fields, their types and defaults, and what they are in a configuration of mt.

A field that a program does not give is taken from the variable `MEGATRON_LM_<FIELD>`, which a launcher sets. Defaults
are Accelerate's, except for those that make a run wrong: `context_parallel_size` is 1 (there 2), recomputation is off
until it is asked for, and the model says which positions it has.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from mt_core.errors import ConfigError, did_you_mean
from mt_tools.config_import.accelerate import PREFIX, VARIABLE_PREFIX, import_accelerate

Sections = dict[str, dict[str, Any]]
OWN_FIELDS = frozenset(
    (
        *("is_train_batch_min", "consumed_samples", "return_logits", "attention_dropout", "hidden_dropout"),
        *("custom_train_step_class", "custom_train_step_kwargs", "custom_model_provider_function"),
        *("custom_prepare_model_function", "custom_megatron_datasets_provider_function"),
        *("custom_get_batch_function", "custom_loss_function", "encoder_seq_length", "decoder_seq_length"),
        *("use_rotary_position_embeddings", "no_wd_decay_cond", "scale_lr_cond", "lr_mult", "num_micro_batches"),
        *("train_iters", "train_samples", "lr_warmup_iters", "lr_warmup_samples", "lr_warmup_fraction"),
        *("lr_decay_style", "lr_decay_iters", "lr_decay_samples", "seq_length", "min_lr"),
    )
)
"""Fields that the import of Accelerate's files does not read, or that depend on model, scheduler or data."""
REFUSED: Mapping[str, str] = {
    "no_wd_decay_cond": "weights of two dimensions and more are decayed, biases and norms never",
    "scale_lr_cond": "the embedding and the output layer can have a rate of their own, optimizer.decoupled_lr",
    "custom_prepare_model_function": "custom_model_provider_function builds the model, and its weights come with it",
}


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
    recompute_activations: bool = False
    """Selective recomputation."""
    recompute_granularity: str | None = None
    """full or selective."""
    recompute_method: str | None = None
    recompute_num_layers: int | None = None
    use_distributed_optimizer: bool = False
    context_parallel_size: int = Field(1, ge=1)
    expert_model_parallel_size: int = Field(1, ge=1)
    expert_tensor_parallel_size: int = Field(1, ge=1)
    decoder_last_pipeline_num_layers: int | None = None
    num_layers_per_virtual_pipeline_stage: int | None = None
    pipeline_model_parallel_split_rank: int | None = None
    use_custom_fsdp: bool = False
    """FSDP2."""
    no_load_optim: bool = False
    no_save_optim: bool = False
    eod_mask_loss: bool = False
    optimizer_cpu_offload: bool = False
    overlap_cpu_optimizer_d2h_h2d: bool = False
    use_precision_aware_optimizer: bool = False
    attention_backend: bool = True
    attention_dropout: float = Field(0.0, ge=0, le=1)
    hidden_dropout: float = Field(0.0, ge=0, le=1)
    attention_softmax_in_fp32: bool = True
    calculate_per_token_loss: bool = True
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
    """Of training, validation and test."""
    no_wd_decay_cond: Callable[..., Any] | None = None
    scale_lr_cond: Callable[..., Any] | None = None
    lr_mult: float = 1.0
    megatron_dataset_flag: bool = False
    seq_length: int | None = None
    encoder_seq_length: int | None = None
    decoder_seq_length: int | None = None
    tensorboard_dir: str | None = None
    set_all_logging_options: bool = False
    eval_iters: int = 100
    eval_interval: int = 1000
    return_logits: bool = False
    """Outputs have logits, on the ranks of the last pipeline stage."""
    custom_train_step_class: type | None = None
    custom_train_step_kwargs: dict[str, Any] | None = None
    custom_model_provider_function: Callable[..., Any] | None = None
    """(section [model], environment) -> a model of mt; see docs/add-a-model.md."""
    custom_prepare_model_function: Callable[..., Any] | None = None
    custom_megatron_datasets_provider_function: Callable[..., Any] | None = None
    """(numbers of samples of training, validation, test) -> the three data sets."""
    custom_get_batch_function: Callable[..., Any] | None = None
    custom_loss_function: Callable[..., Any] | None = None
    other_megatron_args: dict[str, Any] | None = None
    global_batch_size: int | None = Field(None, init=False)
    """Of a step over all ranks; set by `Accelerator.prepare`."""

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**{**_from_environment(type(self), fields), **fields})
        except ValidationError as error:
            raise ConfigError(_sentences(error, type(self).model_fields)) from None
        for name, reason in REFUSED.items():
            if getattr(self, name) is not None:
                raise ConfigError(f"MegatronLMPlugin({name}=...) cannot be had: {reason}")
        if self.lr_mult != 1.0:
            raise ConfigError(
                f"MegatronLMPlugin(lr_mult={self.lr_mult:g}) scales the rates that scale_lr_cond picks; leave out"
            )

    def sections(self, mixed_precision: str) -> Sections:
        """The keys that are set by fields which depend on neither model nor data. Raises ConfigError for a field that
        mt cannot follow."""
        given = {
            PREFIX + name: getattr(self, name)
            for name, field in type(self).model_fields.items()
            if name not in OWN_FIELDS and name != "global_batch_size" and getattr(self, name) != field.default
        }
        values = {"megatron_lm_config": given, "mixed_precision": mixed_precision}
        result = import_accelerate(values, "MegatronLMPlugin")
        if refused := result.of_status("refused"):
            told = "; ".join(f"{one.words.removeprefix(PREFIX)}: {one.reason}" for one in refused)
            raise ConfigError(f"MegatronLMPlugin has fields that cannot be followed: {told}")
        return {section: dict(keys) for section, keys in result.sections.items()}


def _from_environment(kind: type[MegatronLMPlugin], given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields that the launcher sets and the program does not. Raises ConfigError for a text that is no value."""
    found = {}
    for name, field in kind.model_fields.items():
        text = os.environ.get(VARIABLE_PREFIX + name.upper())
        if text is None or name in given or text.lower() == "none":
            continue
        try:
            kind_of_field: Any = field.annotation
            found[name] = TypeAdapter(kind_of_field).validate_strings(text)
        except ValidationError:
            raise ConfigError(f"{VARIABLE_PREFIX}{name.upper()}={text!r} is no value of the field {name}") from None
    return found


def _sentences(error: ValidationError, fields: Mapping[str, Any]) -> str:
    lines = []
    for problem in error.errors():
        name = str(problem["loc"][0])
        if problem["type"] == "extra_forbidden":
            lines.append(f"MegatronLMPlugin has no field {name}{did_you_mean(name, fields)}")
        else:
            lines.append(f"MegatronLMPlugin({name}={problem['input']!r}): {problem['msg']}")
    return "\n".join(dict.fromkeys(lines))
