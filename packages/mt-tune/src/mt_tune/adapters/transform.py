"""The model transform of [adapter]: the base is frozen, and layers get adapters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from mt_core.config.schema import Config
from mt_core.errors import ConfigError
from mt_core.nn.build_context import ModelBuildContext
from mt_core.nn.layout import LayoutModule
from mt_core.parallel.context import ParallelContext
from mt_core.train.checkpoint.state import merged_over_stages
from mt_tune.adapters.base import Adapter, adapter_of, attach
from mt_tune.adapters.config import AdapterConfig
from mt_tune.adapters.low_rank import ExpertsAdapter, LowRankAdapter, MagnitudeAdapter, RouterAdapter, with_parts
from mt_tune.adapters.targets import Layer, adaptable_layers, fits, is_selected

Build = Callable[[Layer, AdapterConfig, ParallelContext], Adapter]
BUILD: dict[tuple[str, str], Build] = {
    ("lora", "linear"): LowRankAdapter,
    ("lora", "experts"): ExpertsAdapter,
    ("lora", "router"): RouterAdapter,
    ("dora", "linear"): MagnitudeAdapter,
}
"""(adapter.type, kind of layer) -> the adapter."""


def add_adapters(model: nn.Module, config: Config, context: ModelBuildContext) -> nn.Module:
    """The model with a frozen base and an adapter of every selected layer. Collective over pipeline stages.

    Raises ConfigError for targets that no layer has, and for layers that the type of adapter does not serve.
    """
    options = config.section(AdapterConfig)
    freeze_base(model, options)
    used: dict[str, bool] = {}
    for layer in adaptable_layers(model, config, context.host):
        chosen = [part for part in layer.parts if _chosen(layer, part, options, used)]
        if chosen:
            _attach(with_parts(layer, chosen), options, context.parallel)
    _require_used(options, merged_over_stages(used, context.parallel))
    return model


def _chosen(layer: Layer, part: Any, options: AdapterConfig, used: dict[str, bool]) -> bool:
    found = is_selected(layer, part, options.targets)
    used |= dict.fromkeys(found, True)
    return bool(found) and not any(fits(name, pattern) for name in part.names for pattern in options.excluded)


def _attach(layer: Layer, options: AdapterConfig, ctx: ParallelContext) -> None:
    build = BUILD.get((options.type, layer.kind))
    if build is None:
        raise ConfigError(
            f"adapter.targets selects {layer.path} ({layer.kind}), which adapter.type={options.type} does not serve; "
            "add it to adapter.excluded"
        )
    adapter = build(layer, options, ctx)
    if layer.kind != "router":
        attach(layer.module, adapter)
        return
    layer.module.add_module("adapter", adapter)
    # Called inside of the layer's own forward pass, whose result is the choice of experts.
    layer.module.logits = partial(_router_logits, layer.module, layer.module.logits)  # type: ignore[assignment]


def _router_logits(router: nn.Module, logits: Callable[[Any], Any], tokens: Any) -> Any:
    adapter, plain = adapter_of(router), logits(tokens)
    assert adapter is not None
    return adapter.after(tokens.to(plain.dtype), plain, router) if adapter.is_on else plain  # type: ignore[arg-type]


def _require_used(options: AdapterConfig, used: dict[str, bool]) -> None:
    unused = [pattern for pattern in options.targets if pattern not in used]
    if unused and options.type != "trainable_tokens":
        raise ConfigError(
            f"adapter.targets: no layer has the name {', '.join(unused)}; names are those of mt ckpt inspect or of "
            "Hugging Face's modules, such as linear_qkv, q_proj, or all-linear"
        )


# -- the base -----------------------------------------------------------------------------------------


def freeze_base(model: nn.Module, options: AdapterConfig) -> None:
    """No parameter of the model is trained but those of modules_to_save."""
    for path, module in model.named_modules():
        if not isinstance(module, LayoutModule) or any(fits(path, pattern) for pattern in options.modules_to_save):
            continue
        for name, layout in module.layouts.items():
            module.layouts[name] = replace(layout, trained=False)
            getattr(module, name).requires_grad_(False)
        _keep_balance(module)


def _keep_balance(module: Any) -> None:
    """The bias by which a router balances its experts is moved after each step without a gradient: it is the base's."""
    if getattr(module, "expert_bias", None) is not None:
        module.config = module.config.model_copy(update={"moe_router_bias_update_rate": 0.0})
