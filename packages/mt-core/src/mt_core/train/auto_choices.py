"""Resolves `optimizer.main_weights=auto` and `train.loss=auto`: the smallest exact form, and the fastest exact loss."""

from __future__ import annotations

from collections.abc import Collection
from inspect import signature
from typing import Final

from torch import nn

from mt_core.config.metrics import configured_loss
from mt_core.config.schema import AUTO_LOSS, Config
from mt_core.errors import ConfigError
from mt_core.nn.kernels.choice import Kernels
from mt_core.nn.model import contract, model_options
from mt_core.optim.configs import remainders_objection
from mt_core.parallel.pipeline.schedules import splits_backward
from mt_core.plugins import PluginHost

AUTO: Final = "auto"
COPIES: Final = "copies"
REMAINDERS: Final = "remainders"


def updates_in_one_kernel(kernels: Kernels) -> bool:
    """Whether a GPU's fused kernel updates the weights, which rounds copies as remainders are rounded."""
    return kernels.device_type == "cuda" and kernels.choice_of("adamw", REMAINDERS).implementation.name != "torch"


def with_resolved_main_weights(config: Config, *, in_one_kernel: bool) -> Config:
    """`optimizer.main_weights=auto` replaced by what it stands for; another value is kept. in_one_kernel: as
    `updates_in_one_kernel`."""
    if getattr(config.optimizer, "main_weights", None) != AUTO:
        return config
    exact = in_one_kernel and remainders_objection(config) is None and not sums_gradients_in_bf16(config)
    optimizer = config.optimizer.model_copy(update={"main_weights": REMAINDERS if exact else COPIES})
    return config.model_copy(update={"optimizer": optimizer})


def sums_gradients_in_bf16(config: Config) -> bool:
    """Whether partial gradients (of tensor-parallel ranks, of tied weights of stages) are added up in bf16 with
    remainders, and in fp32 with copies."""
    parallel = config.parallel
    model_ranks = parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size
    return not config.precision.accumulate_allreduce_grads_in_fp32 and model_ranks > 1


# -- `train.loss=auto` -------------------------------------------------------------------------------

LARGE_VOCABULARY = 8192
"""Token ids from which it pays not to store the logits."""
FUSED = "linear_cross_entropy_sum"


def with_resolved_loss(config: Config, model: nn.Module, host: PluginHost) -> Config:
    """`train.loss=auto` replaced by the loss that it stands for; another value is kept. model.vocab_size is set."""
    if config.train.loss != AUTO_LOSS:
        return config
    fused = (config.model.vocab_size or 0) >= LARGE_VOCABULARY and allows_fused_loss(config, model, host)
    return with_loss(config, FUSED if fused else configured_loss(config, host).name)


def with_logits_loss(config: Config, host: PluginHost) -> Config:
    """`train.loss=auto` replaced by the loss of the family that is computed from its outputs."""
    if config.train.loss != AUTO_LOSS:
        return config
    return with_loss(config, configured_loss(config, host).name)


def with_loss(config: Config, name: str) -> Config:
    return config.model_copy(update={"train": config.train.model_copy(update={"loss": name})})


def allows_fused_loss(config: Config, model: nn.Module, host: PluginHost) -> bool:
    """Whether FUSED has the values and gradients of the configured loss, in the same precision."""
    precision = config.precision
    excluded = (
        excludes_fused_loss(config, host),
        precision.fp8_output_proj,
        config.kernels.cross_entropy != "auto",
        # Chunks of the weight's gradient are added up in its own dtype unless gradients are accumulated in fp32.
        precision.dtype != "fp32" and not precision.accumulate_allreduce_grads_in_fp32,
        needs_logits(model, ("project",)) is not None,
    )
    return configured_loss(config, host).name == "cross_entropy" and not any(excluded)


def excludes_fused_loss(config: Config, host: PluginHost) -> bool:
    """Whether the layout excludes FUSED, or generation computes log-probabilities that must be the loss's bits."""
    parallel, invariant = config.parallel, config.numerics.batch_invariant
    return parallel.use_torch_fsdp2 or splits_backward(parallel, host) or invariant


def require_options(model: nn.Module, loss: object, config: Config) -> None:
    """Raises ConfigError when a loss requires forward arguments that the model does not have."""
    options = model_options(loss)
    reason = needs_logits(model, options) if options else None
    if reason is not None:
        raise ConfigError(
            f"train.loss={config.train.loss} takes hidden states, which model.family={config.model.family} does not "
            f"hand over: {reason}; use train.loss=cross_entropy"
        )


def needs_logits(model: nn.Module, options: Collection[str]) -> str | None:
    """Why a loss that calls the model's forward with these arguments cannot take hidden states; None if it can."""
    missing = [name for name in options if name not in signature(model.forward).parameters]
    return contract(model).needs_logits or (f"its forward takes no {' or '.join(missing)}" if missing else None)
