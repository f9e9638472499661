"""FP8 linear layers of other packages: Transformer Engine 2 and torchao. Looked for when named, imported only then.

Each package's linear module is created without memory for a weight and uses the layer's weight at every call. The
tensor-parallel communication is ours, around the module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from mt_core.config.schema import PrecisionConfig
from mt_core.nn.linear import SEQUENCE_DIM, Cut, leave_tensor_parallel
from mt_core.parallel.collectives import copy_to, gather_from
from mt_core.parallel.context import ParallelContext

MODULES: Mapping[str, tuple[str, str]] = {
    "te": ("transformer_engine", "Transformer Engine"),
    "torchao": ("torchao", "torchao"),
}
"""precision.fp8_implementation -> module, name."""
RECIPES: Mapping[str, tuple[tuple[str, str], ...]] = {
    "te": (("tensorwise", "e4m3"), ("tensorwise", "hybrid"), ("blockwise", "e4m3")),
    "torchao": (("tensorwise", "hybrid"), ("rowwise", "e4m3")),
}
"""(precision.fp8_recipe, precision.fp8_format) that it has, with no state that a checkpoint would have to hold."""


def external_objection(name: str, config: PrecisionConfig, device: torch.device) -> str | None:
    """Why the package cannot do what is requested; None: it can."""
    module, title = MODULES[name]
    if find_spec(module) is None:
        return f"{title} is not installed; use auto or torch"
    if device.type != "cuda":
        return f"{title} runs on cuda, not on {device.type}; use auto or emulated"
    if (config.fp8_recipe, config.fp8_format) not in RECIPES[name]:
        known = ", ".join(f"fp8_recipe={recipe} with fp8_format={form}" for recipe, form in RECIPES[name])
        return f"{title} serves {known}; use one of them, or torch"
    if config.fp8_margin or not config.fp8_wgrad:
        return f"{title} has no fp8_margin and no way without fp8_wgrad; leave them as they are, or use torch"
    return None


class BorrowedLinear:
    """A `Multiply` by a module of another package. module: x [..., in] -> [..., out], with a parameter `weight`."""

    def __init__(self, module: nn.Module, cut: Cut, within: Callable[[], AbstractContextManager[Any]]) -> None:
        self.module, self.cut, self.within = module, cut, within

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, ctx: ParallelContext) -> Tensor:
        if self.cut == "output":
            # The collectives at the layer's input; copy_to is the identity whose backward all-reduces.
            x = gather_from(x, SEQUENCE_DIM, ctx.tp) if ctx.sequence_parallel else copy_to(x, ctx.tp)
        with self.within():
            # The module has no weight of its own: the layer's stays the one parameter, under its canonical name.
            out = functional_call(self.module, {"weight": weight}, (x,))
        if self.cut == "input" and ctx.tp.size > 1:
            out = leave_tensor_parallel(out, ctx)
        return out if bias is None else out + bias


def borrowed_linear(name: str, weight: Tensor, cut: Cut, config: PrecisionConfig) -> BorrowedLinear:
    """For a layer with this weight [out, in]."""
    build = {"te": _transformer_engine, "torchao": _torchao}[name]
    module, within = build(weight, config)
    return BorrowedLinear(module, cut, within)


def _transformer_engine(weight: Tensor, config: PrecisionConfig) -> tuple[nn.Module, Callable[[], Any]]:
    """(te.Linear without a weight, the context that it runs in)"""
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe

    form = recipe.Format.HYBRID if config.fp8_format == "hybrid" else recipe.Format.E4M3
    kinds = {"tensorwise": recipe.Float8CurrentScaling, "blockwise": recipe.Float8BlockScaling}
    chosen = kinds[config.fp8_recipe](fp8_format=form)
    out_features, in_features = weight.shape
    # meta: no memory for a weight that is replaced at every call.
    module = te.Linear(in_features, out_features, bias=False, params_dtype=torch.bfloat16, device="meta")
    return module, lambda: te.fp8_autocast(enabled=True, fp8_recipe=chosen)


def _torchao(weight: Tensor, config: PrecisionConfig) -> tuple[nn.Module, Callable[[], Any]]:
    """(torchao's Float8Linear without a weight, the context that it runs in)"""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    out_features, in_features = weight.shape
    plain = nn.Linear(in_features, out_features, bias=False, device="meta", dtype=torch.bfloat16)
    chosen = Float8LinearConfig.from_recipe_name(config.fp8_recipe)
    return convert_to_float8_training(plain, config=chosen), nullcontext
