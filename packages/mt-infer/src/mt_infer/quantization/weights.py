"""Weight-only quantization of a model in memory: matrices are stored in 8 or 4 bits. On a GPU a Triton kernel
multiplies by what is stored; elsewhere the matrix is dequantized into the dtype of the model, one layer at a time.

What stays as it is: token embeddings (and the LM head that is tied to them), positions, norms, biases, convolutions,
recurrent parameters, and the router of a mixture of experts. An LM head of its own is quantized by a key.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from mt_core.errors import ConfigError
from mt_core.nn.embedding import VocabParallelEmbedding, VocabParallelOutput
from mt_core.nn.kernels.request import KernelRequest, supports_triton
from mt_core.nn.layout import LayoutModule
from mt_core.nn.linear import LinearModule
from mt_infer.config import InferenceConfig
from mt_infer.quantization.groups import INT4_PER_WORD, Stored, dequantize, quantize, quantize_int8
from mt_infer.quantization.int8_product import Int8Matrix, expert_products

FP8_SINCE = (8, 9)
"""Compute capability."""


def kernel_objection(name: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the kernel cannot multiply numbers of this format with inputs of this dtype; None if it can."""
    request = KernelRequest(device_type=device.type, dtype=str(dtype).removeprefix("torch."))
    if (reason := supports_triton(request)) is not True:
        return str(reason)
    # Triton is there, and not for a GPU: its interpreter, with TRITON_INTERPRET=1, which tests use.
    if device.type != "cuda":
        return "triton's interpreter does not multiply bf16" if dtype == torch.bfloat16 else None
    # Conversions of e4m3 exist from this compute capability on.
    if name == "fp8" and torch.cuda.get_device_capability(device) < FP8_SINCE:
        return f"{torch.cuda.get_device_name(device)} has no FP8"
    return None


DYNAMIC = "int8_dynamic"
"""The format whose products quantize their inputs too; see int8_product.py."""


def product_description(name: str, device: torch.device, dtype: torch.dtype) -> str:
    """How products with weights of this format are computed, for people."""
    if name == DYNAMIC:
        return f"int8 by int8 on {device.type.upper()}"
    objection = kernel_objection(name, device, dtype)
    if objection is None:
        return f"Triton weight-only kernel on {device.type.upper()}"
    dequantized = f"dequantized by torch on {device.type.upper()}"
    return f"{dequantized}: {objection}" if device.type == "cuda" else dequantized


WEIGHT = "weight"
EXPERT_AXIS = "edp"
"""The replicas of what experts own: their matrices are [experts, out, in]."""


class Int8Weight(nn.Module):
    """Parametrization of a weight [..., out, in] of int8_dynamic: a scale for each output feature."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.dtype = weight.dtype
        self.product_description = product_description(DYNAMIC, weight.device, weight.dtype)
        self._matrix: Int8Matrix | None = None
        """Kept, since what oneDNN packs with the first product belongs to it."""

    def forward(self, *stored: Tensor) -> Tensor:
        if self._matrix is None or self._matrix.stored[0] is not stored[0]:
            self._matrix = Int8Matrix(stored, self.dtype)
        return self._matrix

    def right_inverse(self, weight: Tensor) -> Stored:
        return quantize_int8(weight.float())


class QuantizedWeight(nn.Module):
    """Parametrization of a weight [..., out, in]: stored in groups along `in`, dequantized where it is read."""

    def __init__(self, weight: Tensor, name: str, group: int) -> None:
        super().__init__()
        self.name, self.group = name, group
        # The stored columns are filled up to whole groups: the true number is kept here.
        self.columns, self.dtype = weight.shape[-1], weight.dtype
        self.uses_kernel = kernel_objection(name, weight.device, weight.dtype) is None
        self.product_description = product_description(name, weight.device, weight.dtype)

    def forward(self, *stored: Tensor) -> Tensor:
        if self.uses_kernel:  # then there is Triton
            from mt_infer.quantization.tensor import QuantizedTensor

            return QuantizedTensor(stored, self.group, self.columns, self.dtype)
        # Each read of `module.weight` makes the matrix again, and it is freed after the layer: memory holds one dense
        # matrix.
        return dequantize(stored, self.name, self.group, self.columns).to(self.dtype)

    def right_inverse(self, weight: Tensor) -> Stored:
        return quantize(weight, self.name, self.group)


def quantize_weights(model: nn.Module, options: InferenceConfig) -> None:
    """In place; each rank its part of a matrix. Raises ConfigError for groups that tensor parallelism would cut."""
    name, group = options.quantize_weights, options.quantize_group_size
    if name is None:
        return
    # All checks before the first matrix changes: quantization in place cannot be undone.
    refuse_impossible(model, options)
    # A list: parametrizations add modules to the model below.
    chosen = list(matrices(model, with_output=options.quantize_output_layer))
    if name == DYNAMIC and options.quantize_output_layer:
        chosen += tied_tables(model)
    for path, module in chosen:
        require_whole_groups(path, module, options)
    for _, module in chosen:
        module.requires_grad_(False)
        dense = getattr(module, WEIGHT)
        weight = Int8Weight(dense) if name == DYNAMIC else QuantizedWeight(dense, name, group)
        # unsafe: what is stored has other shapes and dtypes than the weight.
        parametrize.register_parametrization(module, WEIGHT, weight, unsafe=True)
        # Their grouped product is a function of the module, not F.linear.
        if is_expert_matrix(module):
            multiply_as_stored(module, weight)


def multiply_as_stored(module: LayoutModule, weight: QuantizedWeight | Int8Weight) -> None:
    """The matrices of experts; F.linear, which all others go through, reads a QuantizedTensor as it is stored."""
    if isinstance(weight, Int8Weight):
        module.product = expert_products  # type: ignore[assignment]
    if not isinstance(weight, QuantizedWeight) or not weight.uses_kernel:
        return
    from mt_infer.quantization.tensor import QuantizedGroupedProduct

    module.product = QuantizedGroupedProduct(module.product)  # type: ignore[assignment, arg-type]


def matrices(model: nn.Module, *, with_output: bool) -> Iterator[tuple[str, LayoutModule]]:
    """Modules whose weight is quantized, with their names."""
    for path, module in model.named_modules():
        is_output = isinstance(module, VocabParallelOutput)
        if (isinstance(module, LinearModule) and (with_output or not is_output)) or is_expert_matrix(module):
            yield path, module


def tied_tables(model: nn.Module) -> Iterator[tuple[str, LayoutModule]]:
    """Token embeddings that are the LM head too."""
    modules = list(model.named_modules())
    if not any(isinstance(module, VocabParallelOutput) for _, module in modules):
        yield from ((path, module) for path, module in modules if isinstance(module, VocabParallelEmbedding))


def is_expert_matrix(module: nn.Module) -> bool:
    layout = module.layouts.get(WEIGHT) if isinstance(module, LayoutModule) else None
    # Recognized by its declared layout, since mt_infer does not import mt_moe.
    return layout is not None and layout.replicas == EXPERT_AXIS and len(layout.shape) == 3


def require_whole_groups(path: str, module: LayoutModule, options: InferenceConfig) -> None:
    """A group is of one rank, so that every layout stores the same numbers."""
    if options.quantize_weights == DYNAMIC:
        return  # a rank's part of an output feature has a scale, as its inputs have
    layout, columns, group = module.layouts[WEIGHT], getattr(module, WEIGHT).shape[-1], options.quantize_group_size
    # This rank has a part of the input features. If its boundary cut a group, ranks would have scales of other numbers
    # than one rank alone, and other results.
    if columns < layout.shape[-1] and columns % group:
        multiple = INT4_PER_WORD if options.quantize_weights == "int4" else 2
        allowed = [size for size in range(multiple, columns + 1, multiple) if columns % size == 0]
        raise ConfigError(
            f"inference.quantize_group_size={group} does not divide the {columns} input features of {path} on a "
            f"tensor-parallel rank; it can be {', '.join(map(str, allowed))}"
        )


def refuse_impossible(model: nn.Module, options: InferenceConfig) -> None:
    group = options.quantize_group_size
    if group % INT4_PER_WORD and options.quantize_weights == "int4":
        raise ConfigError(
            f"inference.quantize_group_size={group} is no multiple of {INT4_PER_WORD}, the numbers of int4 in a word; "
            f"use {group + -group % INT4_PER_WORD}"
        )
    has_output = any(isinstance(module, VocabParallelOutput) for module in model.modules())
    if options.quantize_output_layer and not has_output and options.quantize_weights != DYNAMIC:
        raise ConfigError(
            "inference.quantize_output_layer=true, but the model has no LM head of its own here: it is tied to the "
            "token embeddings, which stay as they are; leave the key out, or set "
            'inference.quantize_weights="int8_dynamic", which quantizes tied embeddings too'
        )


def product_of(model: nn.Module) -> str:
    """How products with quantized weights are computed, for people; empty for a model without."""
    return next(
        (module.product_description for module in model.modules() if isinstance(module, QuantizedWeight | Int8Weight)),
        "",
    )


def weight_bytes(model: nn.Module) -> int:
    """Bytes of the parameters in memory, each counted once."""
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
