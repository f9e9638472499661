"""The model transform of adapter.base: frozen matrices are held as codes and scales (Dettmers et al., 2023)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from mt_core.config.schema import Config
from mt_core.errors import ConfigError
from mt_core.nn.build_context import ModelBuildContext
from mt_core.nn.layout import LayoutModule, ParameterLayout
from mt_core.nn.linear import LinearModule
from mt_core.parallel.context import ParallelContext
from mt_tune.adapters.config import AdapterConfig
from mt_tune.adapters.targets import WEIGHT, Kind, external_rules, fits, kind_of, weight_layout
from mt_tune.quantized_weights.formats import Format, format_named
from mt_tune.quantized_weights.weight import QuantizedMultiply, QuantizedWeight, quantized_product

DENSE = ("linear_kv_up_proj",)
"""Layers whose matrix latent attention takes itself while it decodes: they stay as they are."""


def configured_format(options: AdapterConfig) -> Format:
    return format_named(options.base, options.base_block_size, options.base_double_quant)


def quantize_base(model: nn.Module, config: Config, context: ModelBuildContext) -> nn.Module:
    """The model with a QuantizedWeight in place of every frozen matrix of a linear layer or of experts.

    Raises ConfigError for a matrix that the format cannot hold, or whose groups a layout would cut.
    """
    options = config.section(AdapterConfig)
    form = configured_format(options)
    for path, module in list(_matrices(model, config, context)):
        layout = weight_layout(module)
        assert layout is not None
        if len(layout.shape) > 2 and config.parallel.use_torch_fsdp2:
            raise ConfigError(
                f"adapter.base={options.base}: experts ({path}) are not held so with parallel.use_torch_fsdp2=true; "
                "use parallel.use_distributed_optimizer=true, or name them in adapter.base_excluded"
            )
        require_whole_groups(path, layout, options, form, context.parallel)
        _replace(module, layout, form, context.parallel)
    return model


def _matrices(model: nn.Module, config: Config, context: ModelBuildContext) -> Iterator[tuple[str, LayoutModule]]:
    options, rules = config.section(AdapterConfig), external_rules(config, context.host)
    for path, module in model.named_modules():
        kind: Kind | None = kind_of(path, module)
        if kind not in ("linear", "experts") or path.endswith(DENSE):
            continue
        assert isinstance(module, LayoutModule)
        rule = rules.get(f"{path}.{WEIGHT}")
        names = [path, *(name.removesuffix(f".{WEIGHT}") for name in (rule.sources if rule else ()))]
        is_excluded = any(fits(name, pattern) for name in names for pattern in options.base_excluded)
        if module.layouts[WEIGHT].trained or is_excluded:
            continue
        yield path, module


def require_whole_groups(
    path: str, layout: ParameterLayout, options: AdapterConfig, form: Format, ctx: ParallelContext
) -> None:
    columns, local_columns = layout.shape[-1], layout.local_shape(ctx)[-1]
    objection = form.objection(columns)
    group = getattr(form, "group", None)
    if objection is None and local_columns != columns and group is not None and local_columns % group:
        objection = f"groups of {group} do not fit the {local_columns} columns that a tensor-parallel rank has"
    if objection is not None:
        raise ConfigError(
            f"adapter.base={options.base}: {path} cannot be held so: {objection}; name it in adapter.base_excluded, or "
            "set another adapter.base_block_size"
        )


def _replace(module: Any, layout: ParameterLayout, form: Format, ctx: ParallelContext) -> None:
    del module._parameters[WEIGHT], module.layouts[WEIGHT]
    # Its parameters have the name of the weight before their own.
    module.add_module(WEIGHT, QuantizedWeight(layout, form, ctx))
    if isinstance(module, LinearModule):
        module.multiply = QuantizedMultiply(module.cut)
    else:
        module.product = quantized_product(module.product)


def quantized_weights(model: nn.Module) -> dict[str, QuantizedWeight]:
    """Canonical name of each quantized weight -> its module."""
    return {path: module for path, module in model.named_modules() if isinstance(module, QuantizedWeight)}
