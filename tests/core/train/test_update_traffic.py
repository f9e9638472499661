"""Bytes that a step moves between its backward pass and the next: zeroing, norm, clipping, update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.core.conftest import LITTLE_TEXT, TINY
from tests.core.nn.kernels.interpreter import run_interpreted
from tests.core.operator_bytes import OperatorBytes
from torch.utils._python_dispatch import _disable_current_modes

from mt_core.config.loading import load_config
from mt_core.train import Trainer

ON_A_GPU = ["precision.dtype=bf16", "kernels.adamw=triton", "train.deferred_metrics=always"]
REMAINDERS = "optimizer.main_weights=remainders"
GRADIENTS_16BIT = "precision.accumulate_allreduce_grads_in_fp32=false"
MOVED = {
    "copies, fp32 gradients": (["optimizer.main_weights=copies"], (30, 4)),
    "remainders, fp32 gradients": ([REMAINDERS], (28, 4)),
    "remainders, bf16 gradients": ([REMAINDERS, GRADIENTS_16BIT], (26, 2)),
    "remainders, bf16 gradients and moments": ([REMAINDERS, GRADIENTS_16BIT, "optimizer.exp_avg_dtype=bf16"], (18, 2)),
}
"""Settings -> for each parameter, bytes that Triton's kernels load and store, and that torch's operators do."""


class Traffic(OperatorBytes):
    """kernel_bytes: of Triton's kernels, by the pointers and masks of their accesses."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel_bytes = 0

    def count_kernels(self) -> None:
        from triton.runtime.interpreter import GridExecutor, InterpreterBuilder

        InterpreterBuilder.create_masked_load = self._counted(InterpreterBuilder.create_masked_load, 0)
        InterpreterBuilder.create_masked_store = self._counted(InterpreterBuilder.create_masked_store, 1)
        # The interpreter copies the arguments of a launch by operators of its own.
        GridExecutor.__call__ = uncounted(GridExecutor.__call__)

    def _counted(self, access: Callable[..., Any], mask_at: int) -> Callable[..., Any]:
        def count(builder: Any, pointers: Any, *given: Any) -> Any:
            self.kernel_bytes += int(given[mask_at].data.sum()) * pointers.get_element_ty().primitive_bitwidth // 8
            return access(builder, pointers, *given)

        return count


def uncounted(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, whose operators are not counted."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return call


def count_bytes(rank: int, world: int) -> dict[str, tuple[int, int]]:
    """In a step of a run as `mt train` builds it, without its forward and backward passes."""
    traffic, found = Traffic(), {}
    traffic.count_kernels()
    for name, (settings, _) in MOVED.items():
        trainer = Trainer(load_config(preset="gpt-tiny", overrides=[*TINY, LITTLE_TEXT, *ON_A_GPU, *settings]))
        step = trainer.engine.step
        passes = step.forward_backward
        passes.forward_backward = uncounted(passes.forward_backward)
        batches = trainer.engine.read_batches(trainer.train_data, trainer.engine.remaining_steps())
        trainer.take_step(next(batches))  # makes the moments
        traffic.bytes = traffic.kernel_bytes = 0
        with traffic:
            trainer.take_step(next(batches))
        parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
        found[name] = round(traffic.kernel_bytes / parameters), round(traffic.bytes / parameters)
    return found


@pytest.mark.slow
def test_bytes_moved_for_each_parameter() -> None:
    assert run_interpreted(count_bytes) == [{name: bytes_ for name, (_, bytes_) in MOVED.items()}]
