"""The model transform of [quantize]: matrices multiply by rounded weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from mt_ckpt.hugging_face.quantized_outputs import is_linear_weight
from mt_ckpt.quantized.quantizer import PacksCodes
from mt_ckpt.quantized.schemes import FIXED, GROUPED, quantizer_named
from mt_core.config.schema import Config
from mt_core.errors import ConfigError
from mt_core.nn.build_context import ModelBuildContext
from mt_core.nn.layout import LayoutModule
from mt_core.nn.linear import LinearModule, Multiply
from mt_core.parallel.context import ParallelContext
from mt_tune.quantized_training.config import QuantizeConfig
from mt_tune.quantized_training.rounding import WEIGHT, InputRounding, WeightRounding


def round_weights(model: nn.Module, config: Config, context: ModelBuildContext) -> nn.Module:
    """The model whose linear layers and experts multiply by weights as the files of quantize.scheme hold them.

    Raises ConfigError for a scheme that is not known, and for weights that it cannot hold.
    """
    options = config.section(QuantizeConfig)
    scheme = scheme_named(options.scheme)
    for name, module in _matrices(model):
        objection = scheme.objection(module.layouts[WEIGHT].shape[-2:])
        if objection is not None:
            raise ConfigError(f"quantize.scheme={options.scheme}: {name} cannot be quantized: {objection}")
        weight = WeightRounding(name, module, scheme)
        inputs = InputRounding(module, scheme.input_grid or scheme.grid) if rounds_inputs(options, scheme) else None
        if isinstance(module, LinearModule):
            module.multiply = RoundedMultiply(module.multiply, weight, inputs)
        else:
            module.product = _rounded_product(module.product, weight, inputs)  # type: ignore[assignment]
    return model


def scheme_named(name: str | None) -> PacksCodes:
    scheme = quantizer_named(name or "")
    if not isinstance(scheme, PacksCodes):
        able = [other for other in (*FIXED, *GROUPED) if isinstance(quantizer_named(other), PacksCodes)]
        raise ConfigError(f"quantize.scheme={name} is not trained with; it can be {', '.join(able)}")
    return scheme


def rounds_inputs(options: QuantizeConfig, scheme: PacksCodes) -> bool:
    if options.inputs and scheme.input_grid is None:
        raise ConfigError(
            f"quantize.inputs=true: readers of quantize.scheme={options.scheme} do not round inputs; those of int8 and "
            "fp8 do"
        )
    return scheme.input_grid is not None if options.inputs is None else options.inputs


def _matrices(model: nn.Module) -> Iterator[tuple[str, LayoutModule]]:
    """Those that `mt convert --quantize` quantizes."""
    for path, module in model.named_modules():
        name = f"{path}.{WEIGHT}"
        if isinstance(module, LayoutModule) and WEIGHT in module.layouts and is_linear_weight(name):
            if not isinstance(module, LinearModule) and not hasattr(module, "product"):
                raise ConfigError(f"quantize.scheme: {name} is multiplied in a way that cannot be rounded")
            yield name, module


class RoundedMultiply:
    """A product of a linear layer with rounded weights, and rounded inputs if there is a rounding of them."""

    def __init__(self, plain: Multiply, weight: WeightRounding, inputs: InputRounding | None) -> None:
        self.plain, self.weight, self.inputs = plain, weight, inputs

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, ctx: ParallelContext) -> Tensor:
        return self.plain(x if self.inputs is None else self.inputs(x), self.weight(weight), bias, ctx)


class RoundedProduct:
    """A product with the matrices of experts (mt_moe.experts.loop.GroupedProduct)."""

    def __init__(self, plain: Any, weight: WeightRounding, inputs: InputRounding | None) -> None:
        self.plain, self.weight, self.inputs = plain, weight, inputs

    def __call__(self, x: Tensor, weight: Tensor, groups: Any) -> Tensor:
        return self.plain(self._inputs(x), self.weight(weight), groups)

    def _inputs(self, x: Tensor) -> Tensor:
        return x if self.inputs is None or not len(x) else self.inputs(x)


class RoundedPermutingProduct(RoundedProduct):
    """One that permutes rows itself (mt_moe.experts.loop.PermutingProduct)."""

    def of_tokens(self, x: Tensor, weight: Tensor, groups: Any, order: Any) -> Tensor:
        return self.plain.of_tokens(self._inputs(x), self.weight(weight), groups, order)

    def to_tokens(self, x: Tensor, weight: Tensor, groups: Any, order: Any) -> Tensor:
        return self.plain.to_tokens(self._inputs(x), self.weight(weight), groups, order)


def _rounded_product(plain: Any, weight: WeightRounding, inputs: InputRounding | None) -> RoundedProduct:
    kind = RoundedPermutingProduct if hasattr(plain, "of_tokens") else RoundedProduct
    return kind(plain, weight, inputs)
