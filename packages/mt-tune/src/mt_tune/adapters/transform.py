"""The model transform of [adapter]: the base is frozen, and layers get adapters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from mt_core.config.schema import Config
from mt_core.errors import ConfigError
from mt_core.nn.build_context import ModelBuildContext
from mt_core.nn.layout import LayoutModule
from mt_core.train.checkpoint.state import merged_over_stages
from mt_tune.adapters.base import NAME, Adapter, adapter_of, attach
from mt_tune.adapters.config import AdapterConfig
from mt_tune.adapters.embedding import TokenRowsAdapter, adapt_output
from mt_tune.adapters.kinds import adapter_type
from mt_tune.adapters.low_rank import with_parts
from mt_tune.adapters.targets import (
    FIRST_EXPERT,
    Layer,
    Part,
    adaptable_layers,
    external_rules,
    fits,
    is_selected,
    saved_parameters,
    tied_output,
)
from mt_tune.adapters.vectors import VectorAdapter


def add_adapters(model: nn.Module, config: Config, context: ModelBuildContext) -> nn.Module:
    """The model with a frozen base and an adapter of every selected layer. Collective over pipeline stages.

    Raises ConfigError for targets that no layer has, and for layers that the type of adapter does not serve.
    """
    options = config.section(AdapterConfig)
    freeze_base(model, options, config, context)
    layers = adaptable_layers(model, config, context.host)
    if context.has_last and (tied := tied_output(model, config, context.host)) is not None:
        layers.append(tied)
    used: dict[str, bool] = {}
    chosen = [with_parts(layer, parts) for layer in layers if (parts := _chosen(layer, options, used))]
    if not is_part_of_plan(context):
        _require_used(options, merged_over_stages(used, context.parallel))
    # A tied head has a copy of the embedding, which is no embedding on the last stage.
    on_this_stage = [layer for layer in chosen if layer.kind != "embedding" or context.has_first]
    sizes = _largest(chosen, context) if options.type == "vera" else {}
    for layer in on_this_stage:
        _attach(model, layer, options, context, sizes)
    _train_rows(model, layers, options, context)
    return model


def is_part_of_plan(context: ModelBuildContext) -> bool:
    """Whether the model is one kind of stage that a plan counts, which need not have what a key names."""
    return context.parallel.device.type == "meta" and context.stages is not None


def _chosen(layer: Layer, options: AdapterConfig, used: dict[str, bool]) -> list[Part]:
    parts: list[Part] = []
    patterns = options.targets if options.type != "trainable_tokens" else []
    for part in layer.parts:
        selecting = is_selected(layer, part, patterns)
        used |= dict.fromkeys(selecting, True)
        if selecting and not any(fits(name, pattern) for name in part.names for pattern in options.excluded):
            parts.append(part)
    return parts


def _largest(layers: list[Layer], context: ModelBuildContext) -> dict[str, int]:
    """Inputs and outputs of the largest adapted modules of all stages."""
    local_sizes = {
        f"{layer.path}.{n}": (layer.layout.shape[-1], len(p.rows))
        for layer in layers
        for n, p in enumerate(layer.parts)
    }
    sizes = [(0, 0), *merged_over_stages(local_sizes, context.parallel).values()]  # a plan may have no layer
    return {"inputs": max(inputs for inputs, _ in sizes), "outputs": max(outputs for _, outputs in sizes)}


def _attach(
    model: nn.Module, layer: Layer, options: AdapterConfig, context: ModelBuildContext, sizes: Mapping[str, int]
) -> None:
    kind, module = adapter_type(layer, options), layer.module
    if layer.kind == "experts":
        _require_single_experts(layer, options)
    if kind.multiplies_rows and layer.kind == "experts":
        # Products that permute rows sum those of a token before the adapter could multiply each.
        model.get_submodule(layer.path.rpartition(".")[0]).permute_fusion = False  # type: ignore[assignment]
    # The constructors of the subclasses take an AdapterConfig, that of Adapter does not.
    build: Callable[..., Adapter] = kind
    adapter = build(layer, options, context.parallel, **sizes if issubclass(kind, VectorAdapter) else {})
    if layer.kind == "output":
        adapt_output(model, adapter, module, is_tied=layer.is_tied)
    elif layer.kind == "router":
        module.add_module(NAME, adapter)
        # Called inside of the layer's own forward pass, whose result is the choice of experts.
        module.logits = partial(_router_logits, module, module.logits)  # type: ignore[assignment, arg-type]
    else:
        attach(module, adapter)


def _require_single_experts(layer: Layer, options: AdapterConfig) -> None:
    if options.experts != "fused" and any(part.name and FIRST_EXPERT not in part.name for part in layer.parts):
        raise ConfigError(
            f"adapter.experts={options.experts}: Hugging Face's format has no modules of single experts for "
            f"{layer.path} but {layer.parts[0].name}; set adapter.experts=fused"
        )


def _router_logits(router: Any, logits: Callable[[Any], Any], tokens: Any) -> Any:
    adapter, plain = adapter_of(router), logits(tokens)
    assert adapter is not None
    return adapter.after(tokens.to(plain.dtype), plain, router) if adapter.is_on else plain


def _train_rows(model: nn.Module, layers: list[Layer], options: AdapterConfig, context: ModelBuildContext) -> None:
    """Single rows of the embedding, also beside adapters of other layers."""
    embedding = next((layer for layer in layers if layer.kind == "embedding"), None)
    if not options.trainable_token_indices or embedding is None:
        return
    if adapter_of(embedding.module) is not None:
        raise ConfigError(
            "adapter.targets and adapter.trainable_token_indices both change the embedding; leave one out"
        )
    rows: Adapter = TokenRowsAdapter(embedding, options, context.parallel)
    attach(embedding.module, rows)
    if context.has_last and any(layer.is_tied for layer in layers):
        adapt_output(model, rows, embedding.module, is_tied=True)


def _require_used(options: AdapterConfig, used: dict[str, bool]) -> None:
    unused = [pattern for pattern in options.targets if pattern not in used]
    if unused and options.type != "trainable_tokens":
        raise ConfigError(
            f"adapter.targets: no layer has the name {', '.join(unused)}; names are those of mt ckpt inspect or of "
            "Hugging Face's modules, such as linear_qkv, q_proj, or all-linear"
        )


# -- the base -----------------------------------------------------------------------------------------


def freeze_base(model: nn.Module, options: AdapterConfig, config: Config, context: ModelBuildContext) -> None:
    """No parameter of the model is trained but those of modules_to_save. Raises ConfigError for one that is none."""
    names = [name for name, _ in model.named_parameters()]
    saved = saved_parameters(names, external_rules(config, context.host), options.modules_to_save)
    used = merged_over_stages({p: True for patterns in saved.values() for p in patterns}, context.parallel)
    unused = [pattern for pattern in options.modules_to_save if pattern not in used]
    if unused and not is_part_of_plan(context):
        raise ConfigError(f"adapter.modules_to_save: no module with parameters has the name {', '.join(unused)}")
    for path, module in model.named_modules():
        if isinstance(module, LayoutModule):
            _freeze(path, module, saved)
            _keep_balance(module)


def _freeze(path: str, module: LayoutModule, saved: Collection[str]) -> None:
    for name, layout in module.layouts.items():
        if f"{path}.{name}" not in saved:
            module.layouts[name] = replace(layout, trained=False)
            getattr(module, name).requires_grad_(False)


def _keep_balance(module: Any) -> None:
    """The bias by which a router balances its experts is moved after each step without a gradient: it is the base's."""
    if getattr(module, "expert_bias", None) is not None:
        module.config = module.config.model_copy(update={"moe_router_bias_update_rate": 0.0})
