"""The FP8 options of a run, and the matrices that they apply to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from mt_core._torch_compat import has_scaled_mm_on_cpu
from mt_core.config.schema import PrecisionConfig
from mt_core.errors import ConfigError
from mt_core.nn.fp8.external import MODULES, borrowed_linear, external_objection
from mt_core.nn.fp8.history import AmaxHistory
from mt_core.nn.fp8.microscaling import GradientRounding, MxScaling, Nvfp4Scaling
from mt_core.nn.fp8.multiply import Fp8Multiply, Product, emulated_product, torch_product
from mt_core.nn.fp8.scaling import BlockScaling, CurrentScaling, DelayedScaling, RowScaling, Scaling
from mt_core.nn.kernels.choice import Kernels
from mt_core.nn.kernels.reference.fp8_casts import ALIGNMENT, BLOCK, FORMATS, MX_BLOCK, TORCH_CASTS, Casts, Role
from mt_core.nn.linear import LinearModule, Multiply
from mt_core.parallel.context import ParallelContext

SLOWER_UP_TO = 1024
"""Features: torchao measured 0.8 times the speed of bf16 for 1024 x 2048 x 1024 on an H100."""
PRODUCTS: Mapping[str, Product] = {"torch": torch_product, "emulated": emulated_product}
SCALINGS: Mapping[str, Callable[[Mapping[Role, torch.dtype], int, Casts], Scaling]] = {
    "tensorwise": CurrentScaling,
    "rowwise": RowScaling,
    "blockwise": BlockScaling,
}
"""By precision.fp8_recipe, those without a history."""
MICROSCALED = ("mxfp8", "nvfp4")
"""Recipes with scales of 8 bits, whose casts are their own."""
MULTIPLES: Mapping[str, int] = {"blockwise": BLOCK, "mxfp8": MX_BLOCK}


@dataclass(frozen=True)
class Fp8Options:
    """FP8 options of a run, on its device. implementation: as resolved. casts: of linear layers."""

    config: PrecisionConfig
    implementation: str
    min_features: int
    casts: Casts = TORCH_CASTS

    @property
    def dtypes(self) -> Mapping[Role, torch.dtype]:
        return FORMATS[self.config.fp8_format]

    @property
    def margin(self) -> int:
        return self.config.fp8_margin

    @property
    def is_delayed(self) -> bool:
        return self.config.fp8_recipe == "delayed"

    def history(self, ctx: ParallelContext) -> AmaxHistory:
        """Amax history of one layer."""
        return AmaxHistory(self.config.fp8_amax_history_len, self.config.fp8_amax_compute_algo, ctx)

    def multiply(self, module: LinearModule, history: AmaxHistory | None) -> Multiply:
        """The product of a layer."""
        if self.implementation in MODULES:
            # The other packages' products and casts are one module.
            return borrowed_linear(self.implementation, module.weight, module.cut, self.config)
        product = PRODUCTS[self.implementation]
        scaling = self._nvfp4(module) if self.config.fp8_recipe == "nvfp4" else self.scaling(history)
        return Fp8Multiply(scaling, product, module.cut, self.config.fp8_wgrad)

    def _nvfp4(self, module: LinearModule) -> Scaling:
        rounding = GradientRounding(module) if self.config.fp4_stochastic_rounding else None
        if rounding is not None:
            # A child, so that its random numbers are those of the layer's name.
            module.add_module("rounding", rounding)
        return Nvfp4Scaling(rounding, self.config.fp4_hadamard, self.config.fp4_square_weight_blocks)

    def scaling(self, history: AmaxHistory | None) -> Scaling:
        """history: of the layer, for delayed scaling."""
        if self.config.fp8_recipe == "delayed":
            assert history is not None  # `history` above, for every layer with delayed scaling
            return DelayedScaling(self.dtypes, history, self.margin, self.casts)
        if self.config.fp8_recipe == "mxfp8":
            return MxScaling(self.dtypes, self.margin)
        return SCALINGS[self.config.fp8_recipe](self.dtypes, self.margin, self.casts)

    @property
    def multiple(self) -> int:
        """What divides the sizes of matrices that the recipe can cast."""
        return MULTIPLES.get(self.config.fp8_recipe, ALIGNMENT)

    def objection(self, sizes: Sequence[int], multiple: int) -> str | None:
        """Why a matrix of these sizes on a process stays in 16 bits; None: it does not."""
        for features in sizes:
            # Sizes on this process: tensor parallelism may leave a fraction that cannot be cast.
            if features % multiple:
                return f"{features} features are no multiple of {multiple}"
            if features < self.min_features:
                return f"{features} features are below precision.fp8_min_features={self.min_features}"
        return None


def resolve_options(config: PrecisionConfig, ctx: ParallelContext, kernels: Kernels) -> Fp8Options:
    """Raises ConfigError where the device or what is installed cannot do what is requested."""
    on_gpu = ctx.device.type == "cuda"
    wanted = config.fp8_implementation
    implementation = ("torch" if on_gpu else "emulated") if wanted == "auto" else wanted
    problem = None
    if implementation in MODULES:
        problem = external_objection(implementation, config, ctx.device)
    elif implementation == "torch":
        problem = _torch_objection(config, ctx.device)
    if problem is not None:
        raise ConfigError(f"precision.fp8_implementation={wanted} cannot serve: {problem}")
    automatic = SLOWER_UP_TO + 1 if on_gpu else 1
    # Picked only where they are used: a pick is a line of the run's summary, and a key of `kernels` that nothing picks
    # is an error.
    has_casts = implementation in PRODUCTS and config.fp8_recipe not in MICROSCALED
    casts: Casts = kernels.pick("fp8_cast")() if has_casts else TORCH_CASTS
    return Fp8Options(config, implementation, config.fp8_min_features or automatic, casts)


def _torch_objection(config: PrecisionConfig, device: torch.device) -> str | None:
    """Why torch's scaled products cannot serve on this device; None: they can."""
    blockwise = config.fp8_recipe == "blockwise"
    if device.type != "cuda":
        if not has_scaled_mm_on_cpu():
            return f"torch {torch.__version__} has no scaled_mm on a CPU; use emulated"
        lacks = "torch's scaled_mm has no blocks on a CPU; use emulated or another precision.fp8_recipe"
        return lacks if blockwise or config.fp8_recipe in MICROSCALED else None
    if config.dtype != "bf16":
        return f"its products on a GPU give bf16, and precision.dtype={config.dtype}; set precision.dtype=bf16"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 9):
        return f"it needs compute capability 8.9, and this GPU has {capability[0]}.{capability[1]}; set fp8_format=none"
    if config.fp8_recipe in MICROSCALED and capability < (10, 0):
        return (
            f"tensor cores have the products of {config.fp8_recipe} from compute capability 10.0 on (Blackwell), and "
            f"this GPU has {capability[0]}.{capability[1]}; set precision.fp8_implementation=emulated (slow), or "
            "precision.fp8_format=e4m3 with another precision.fp8_recipe"
        )
    # cuBLAS has the scales of DeepSeek-V3's blocks on compute capability 9 only.
    if blockwise and capability[0] != 9:
        return "torch's scaled_mm has blocks on Hopper alone; set precision.fp8_recipe=tensorwise or rowwise"
    if blockwise and config.fp8_format != "e4m3":
        return f"its blocks are of e4m3 alone, and precision.fp8_format={config.fp8_format}; set fp8_format=e4m3"
    return None
