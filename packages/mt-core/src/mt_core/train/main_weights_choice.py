"""Resolves `optimizer.main_weights=auto`: the form of fp32 master weights with the fewest bytes, where it is exact."""

from __future__ import annotations

from typing import Final

from mt_core.config.schema import Config
from mt_core.nn.kernels.choice import Kernels
from mt_core.optim.checks import remainders_objection

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
