"""AdamW on the fused `adamw` kernels, optionally with bf16 weights plus remainders and with bf16 moments."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from mt_core.errors import ConfigError
from mt_core.nn.kernels.reference.adamw import AdamWOptions, AdamWTensors, TorchAdamW, join_halves, split_halves
from mt_core.optim.base import FunctionalOptimizer
from mt_core.optim.param_groups import ParamGroup


class FusedAdamW(FunctionalOptimizer):
    """AdamW on fp32 weights, or on bf16 ones with the low 16 bits in the optimizer state ("remainder").

    engine: TorchAdamW or an equivalent. moment_dtype: float32, or bfloat16 (stochastically rounded). gradient_scale: []
    fp32 factor on the gradients of the next step, for clipping and loss scaling without a host synchronization. A
    step with a non-finite scale is a no-op. copies: the model's 16-bit weight of each fp32 weight, written in the same
    pass.
    """

    def __init__(
        self,
        groups: list[ParamGroup],
        lr: float,
        beta1: float,
        beta2: float,
        eps: float,
        engine: TorchAdamW,
        moment_dtype: torch.dtype = torch.float32,
        copies: Mapping[Tensor, Tensor] | None = None,
    ) -> None:
        super().__init__(groups, lr)
        _require_weights(group["params"] for group in groups)
        self.beta1, self.beta2, self.eps = beta1, beta2, eps
        self.engine = engine
        self.moment_dtype = moment_dtype
        self.gradient_scale: Tensor | None = None
        self.copies = copies or {}

    def update(self, parameters: list[Tensor], gradients: list[Tensor], group: ParamGroup) -> None:
        eps = self.eps * group.get("eps_mult", 1.0)
        options = AdamWOptions(group["lr"], self.beta1, self.beta2, eps, group["weight_decay"])
        scale = self.gradient_scale
        if scale is None:
            # The kernel always reads a factor, from the device.
            scale = torch.ones((), device=parameters[0].device)
        copies = [self.copies.get(parameter) for parameter in parameters]
        # A remainder exists where the weight is bf16, so a group has remainders for all of its weights or for none; so
        # it is with copies.
        for members in _by_dtypes(parameters, gradients, copies):
            weights = [parameters[i] for i in members]
            states = [self._state(weight) for weight in weights]
            tensors = AdamWTensors(
                weights,
                [gradients[i] for i in members],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [state["step"] for state in states],
                [state["remainder"] for state in states if "remainder" in state],
                [copy for i in members if (copy := copies[i]) is not None],
            )
            self.engine.step(tensors, options, scale)

    def main(self, parameter: Tensor) -> Tensor:
        """The fp32 value of a weight, however it is stored."""
        remainder = self.state[parameter].get("remainder")
        return parameter.detach().float() if remainder is None else join_halves(parameter.detach(), remainder)

    def set_main(self, parameter: Tensor, main: Tensor) -> None:
        """Set a weight from its fp32 value, however it is stored."""
        if parameter.dtype == torch.float32:
            parameter.data.copy_(main)
            return
        # high: the upper 16 bits, which are the bf16 weight. low: int16, the other bits of the fp32 mantissa.
        high, low = split_halves(main.float())
        parameter.data.copy_(high)
        self._state(parameter)["remainder"].copy_(low)

    def _state(self, parameter: Tensor) -> dict[str, Tensor]:
        state = self.state[parameter]
        if not state:
            # On the device: a skipped step must not count, and the host does not see whether a step is skipped.
            state["step"] = torch.zeros((), device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter, dtype=self.moment_dtype)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=self.moment_dtype)
            if parameter.dtype == torch.bfloat16:
                state["remainder"] = torch.zeros_like(parameter, dtype=torch.int16)
        return state


def _by_dtypes(*lists: Sequence[Tensor | None]) -> Iterable[list[int]]:
    """Indices of the tensors, grouped by the dtypes in all lists: one kernel launch per group."""
    groups: dict[tuple[torch.dtype | None, ...], list[int]] = defaultdict(list)
    for i, tensors in enumerate(zip(*lists, strict=True)):
        groups[tuple(None if tensor is None else tensor.dtype for tensor in tensors)].append(i)
    return groups.values()


def _require_weights(groups: Iterable[list[Tensor]]) -> None:
    dtypes = {parameter.dtype for parameters in groups for parameter in parameters}
    wrong = dtypes - {torch.float32, torch.bfloat16}
    if wrong:
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in wrong))
        raise ConfigError(
            f"fused AdamW keeps 32-bit weights as float32, or as bfloat16 and a 16-bit remainder, not as {names}; "
            "use precision.dtype=bf16 or fp32, or the optimizer adam on float32 master weights"
        )
