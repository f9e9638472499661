"""PEFT folders: adapter_config.json and adapter_model.safetensors, read and written."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from mt_ckpt.megatron_dist.bridge_adapter import detect as detect_bridge
from mt_ckpt.model import build_model, model_config
from mt_ckpt.writing.options import refuse_layout
from mt_ckpt.writing.output_folders import output_folder
from mt_core.checkpoint_lookup import MODEL
from mt_core.checkpoint_specs import CheckpointReader, ConvertOptions
from mt_core.config.schema import Config
from mt_core.errors import CheckpointError, ConfigError
from mt_core.parallel.context import ParallelContext
from mt_core.plugins import PluginHost
from mt_core.train.checkpoint.state import merged_over_stages
from mt_tune.adapters.base import NAME, Adapter, Names, Values, adapters
from mt_tune.adapters.bridge_values import bridge_values
from mt_tune.adapters.config import AdapterConfig
from mt_tune.adapters.kinds import main_type
from mt_tune.adapters.peft_config import CONFIG, PREFIX, shortened, written_config
from mt_tune.adapters.peft_reading import SHARED, WEIGHTS, PeftFolder
from mt_tune.adapters.targets import Part, adaptable_layers, external_copies, external_rules, saved_parameters

RENAMED = frozenset({"gate_proj", "up_proj", "down_proj", "gate", "w1", "w2", "w3"})
"""Ends of target modules of a model with experts that PEFT takes for the fused experts, wherever they stand: dense
layers and shared experts are named by their parameters instead."""


def stored_names(all_adapters: Iterable[Adapter]) -> Names:
    """Part -> the module by whose name PEFT stores its adapter. Adapters of several parameters of one module nest: the
    last one is the outermost, and each other is the `base_layer` of the next."""
    parts = [part for adapter in all_adapters for part in adapter.parts]
    on_parameters: dict[str, list[Part]] = {}
    for part in parts:
        if part.name is None:
            raise ConfigError(f"{part.names[0]} has no name in Hugging Face's format, by which PEFT stores adapters")
        if part.parameter is not None:
            on_parameters.setdefault(part.name, []).append(part)
    return {part: f"{part.name}{'.base_layer' * _depth(part, on_parameters)}" for part in parts}


def _depth(part: Part, on_parameters: Mapping[str, list[Part]]) -> int:
    if part.parameter is None or part.name is None:
        return 0
    nested = on_parameters[part.name]
    return len(nested) - 1 - nested.index(part)


# -- reading ------------------------------------------------------------------------------------------


ReadBase = Callable[[str], Tensor | None]
"""Canonical name of a parameter of the base -> its canonical value; None: it is not on this process."""


def read_values(
    path: Path, model: nn.Module, config: Config, host: PluginHost, ctx: ParallelContext, read_base: ReadBase
) -> Iterator[tuple[str, Tensor]]:
    """(canonical name, canonical value) of the adapters of this process. Collective over pipeline stages.

    Raises CheckpointError for tensors that are missing or of another shape, and for those that nothing takes.
    """
    if detect_bridge(path):
        yield from bridge_values(path, model, ctx)
        return
    folder = PeftFolder(path)
    taken: dict[str, bool] = {}

    def take(name: str) -> Tensor:
        taken[name] = True
        return folder.read(name)

    all_adapters = adapters(model)
    names = stored_names(all_adapters.values())
    values = {f"{at}.{n}": v for at, adapter in all_adapters.items() for n, v in adapter.imported(take, names)}
    values |= dict(_saved_modules(model, config, host, take))
    for name, value in main_type(config.section(AdapterConfig)).shared_tensors(list(all_adapters.values())).items():
        require_equal_projection(folder, name, value, taken)
    take_copies(folder, values, taken)
    take_base_matrices(folder, config, host, read_base, taken)
    left = sorted(folder.names.keys() - merged_over_stages(taken, ctx).keys())
    if left:
        more = f" and {len(left) - 5} more" if len(left) > 5 else ""
        raise CheckpointError(
            f"{path}: nothing takes {', '.join(left[:5])}{more}; adapter.targets have to name what the adapter has, "
            "and the base has to be the one that it was made for"
        )
    yield from values.items()


def take_copies(folder: PeftFolder, values: Values, taken: dict[str, bool]) -> None:
    """Rows of trained tokens that a tied LM head repeats. Raises CheckpointError where they differ."""
    rows = next((value for name, value in values.items() if name.endswith(f"{NAME}.rows")), None)
    for name in folder.names.keys() - taken.keys():
        if rows is not None and name.endswith("trainable_tokens_delta"):
            taken[name] = True
            if not torch.equal(folder.read(name).to(rows.dtype), rows):
                raise CheckpointError(
                    f"{folder.path}: {name} differs from the rows of the embedding, which it is tied to"
                )


def take_base_matrices(
    folder: PeftFolder, config: Config, host: PluginHost, read_base: ReadBase, taken: dict[str, bool]
) -> None:
    """Embeddings and heads of the base, which PEFT stores beside their adapters. Raises CheckpointError where the base
    has others."""
    names = {rule.sources[0]: ours for ours, rule in external_rules(config, host).items() if len(rule.sources) == 1}
    copies = external_copies(config, host)
    for name in sorted(folder.names.keys() - taken.keys()):
        external = name.replace(".base_layer.", ".")
        ours = names.get(copies.get(external, external))
        if not name.endswith(".base_layer.weight") or ours is None:
            continue
        value = read_base(ours)
        if value is None:
            continue
        taken[name] = True
        stored = folder.read(name)
        if stored.shape != value.shape or not torch.equal(stored, value.to(stored.dtype)):
            raise CheckpointError(f"{folder.path}: {name} is not the {ours} of the base: the adapter is of another one")


def require_equal_projection(folder: PeftFolder, name: str, value: Tensor, taken: dict[str, bool]) -> None:
    """Raise CheckpointError for a frozen matrix in the folder that is not what its key draws."""
    if name not in folder.names:  # save_projection=false
        return
    taken[name] = True
    stored = folder.read(name)
    if stored.shape != value.shape or not torch.equal(stored.to(value.dtype), value):
        raise CheckpointError(
            f"{folder.path}: {name} {list(stored.shape)} is not the matrix {list(value.shape)} that "
            "adapter.projection_prng_key draws for these targets"
        )


def _saved_modules(model: nn.Module, config: Config, host: PluginHost, take: Any) -> Iterator[tuple[str, Tensor]]:
    rules = external_rules(config, host)
    for name in _saved_parameters(model, config, host):
        rule = rules[name]
        yield name, rule.import_value([take(source) for source in rule.sources])


def _saved_parameters(model: nn.Module, config: Config, host: PluginHost) -> list[str]:
    """Canonical names of the parameters of modules_to_save."""
    names = [name for name, _ in model.named_parameters() if f".{NAME}." not in name]
    return list(saved_parameters(names, external_rules(config, host), config.section(AdapterConfig).modules_to_save))


# -- writing ------------------------------------------------------------------------------------------


def convert_checkpoint(path: Path, source: CheckpointReader, options: ConvertOptions, host: PluginHost) -> None:
    """Write the adapter of a run as a folder that `PeftModel.from_pretrained` loads. The base is left out.

    Raises ConfigError for a run without an adapter, and for one that PEFT's format cannot express.
    """
    refuse_layout("peft", options)
    config = model_config(source, host)
    if not config.section(AdapterConfig).is_on:
        raise ConfigError("--saver peft writes adapters, and this checkpoint has none ([adapter] has type=none)")
    model = build_model(config, host, "meta")
    if getattr(model, "score_head", None) is not None:
        raise ConfigError(
            "--saver peft writes adapters alone, and this model has a trained score head beside its adapter "
            "(score_head.type); merge the adapter (mt ckpt merge-adapter) and convert with --saver hf"
        )
    if hasattr(source, "omit"):  # of a conversion, which requires that each tensor of the model is accounted for
        written = written_names(model, config, host)
        source.omit(name for name in source.shapes() if name.startswith(MODEL) and name not in written)
    tensors = {f"{PREFIX}{n}": t for n, t in exported(model, config, source, host)}
    all_adapters = list(adapters(model).values())
    tensors |= {
        f"{SHARED}{n}": t for n, t in main_type(config.section(AdapterConfig)).shared_tensors(all_adapters).items()
    }
    tensors = {name: tensor.contiguous().clone() for name, tensor in tensors.items()}
    content = adapter_config(model, config, host, source.metadata["config"].get("checkpoint", {}).get("load"))
    with closing(output_folder(path, None)) as folder:
        folder.write_small(WEIGHTS, safetensors.torch.save(tensors, metadata={"format": "pt"}))
        folder.write_small(CONFIG, (json.dumps(content, indent=2, sort_keys=True) + "\n").encode())
        folder.commit({WEIGHTS, CONFIG})


def written_names(model: nn.Module, config: Config, host: PluginHost) -> set[str]:
    """Canonical names of what the folder holds: parameters of adapters, and those that are saved whole."""
    of_adapters = {f"{MODEL}{at}.{name}" for at, adapter in adapters(model).items() for name in adapter.layouts}
    return of_adapters | {MODEL + name for name in _saved_parameters(model, config, host)}


def exported(
    model: nn.Module, config: Config, source: CheckpointReader, host: PluginHost
) -> Iterator[tuple[str, Tensor]]:
    """(name in PEFT's format without the prefix, tensor)"""
    all_adapters = adapters(model)
    names = stored_names(all_adapters.values())
    for at, adapter in all_adapters.items():
        yield from adapter.exported(values_of(at, adapter, source), names)
    rules = external_rules(config, host)
    for name in _saved_parameters(model, config, host):
        yield from zip(rules[name].sources, rules[name].export_value(source.read(MODEL + name)), strict=True)


def values_of(path: str, adapter: Adapter, source: CheckpointReader) -> Values:
    return {name: source.read(f"{MODEL}{path}.{name}") for name in adapter.layouts}


def adapter_config(model: nn.Module, config: Config, host: PluginHost, base: str | None) -> dict[str, Any]:
    """The contents of adapter_config.json."""
    options, all_adapters = config.section(AdapterConfig), list(adapters(model).values())
    rows = "TRAINABLE_TOKENS" if options.type != "trainable_tokens" else None  # named by a key of their own
    parts = [part for adapter in all_adapters if adapter.peft_type != rows for part in adapter.parts]
    layers = adaptable_layers(model, config, host)
    is_renamed = options.type == "lora" and any(layer.kind == "experts" for layer in layers)
    renamed = RENAMED if is_renamed else frozenset()
    named = [part.name for part in parts if part.parameter is None and part.name is not None]
    modules = [name for name in named if name.rpartition(".")[2] not in renamed]
    others = {p.name for layer in layers for p in layer.parts if p.parameter is None and p.name} - set(named)
    main = main_type(options)
    keys = main.peft_keys([adapter for adapter in all_adapters if adapter.peft_type == main.peft_type], options)
    parameters = {f"{part.name}.{part.parameter}" for part in parts if part.parameter is not None}
    parameters |= {f"{name}.weight" for name in named if name not in modules and not _is_of_expert(name)}
    of_experts = {name.rpartition(".")[2] for name in named if _is_of_expert(name)}
    targets = sorted({*shortened([name for name in modules if not _is_of_expert(name)], others), *of_experts})
    return written_config(
        main.peft_type,
        {
            "target_modules": targets,
            **({"target_parameters": shortened_parameters(parameters)} if parameters else {}),
            **keys,
            "fan_in_fan_out": any(part.transposed for part in parts if part.parameter is None),
            "modules_to_save": saved_modules(model, config, host) or None,
            **_token_keys(options, all_adapters),
        },
        base,
    )


def _token_keys(options: AdapterConfig, all_adapters: list[Adapter]) -> dict[str, Any]:
    rows = [part.name for adapter in all_adapters if adapter.peft_type == "TRAINABLE_TOKENS" for part in adapter.parts]
    if not rows or options.type == "trainable_tokens":
        return {}
    return {"trainable_token_indices": {str(rows[0]).rpartition(".")[2]: options.trainable_token_indices}}


def saved_modules(model: nn.Module, config: Config, host: PluginHost) -> list[str]:
    """Names of modules_to_save in Hugging Face's format."""
    rules = external_rules(config, host)
    names = _saved_parameters(model, config, host)
    return sorted({source.rpartition(".")[0] for name in names for source in rules[name].sources})


def _is_of_expert(name: str) -> bool:
    return ".experts." in name


def shortened_parameters(names: Iterable[str]) -> list[str]:
    """The module and the parameter, as ends of names."""
    return sorted({".".join(name.split(".")[-3:]) for name in names})
