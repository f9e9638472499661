"""Layers that are adapted, and the external modules that a fused layer consists of.

A fused projection here (queries, keys and values; gate and up) is several modules in Hugging Face's format, of which
PEFT adapts each by itself. The rows of each are found by carrying out the rule of the family's name map on row numbers,
so that no second table of names exists.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal, TypeVar

import torch
from torch import Tensor, nn

from mt_core.config.schema import Config
from mt_core.config_map import HF_FORMAT
from mt_core.errors import ConfigError
from mt_core.name_map import Rule
from mt_core.nn.embedding import VocabParallelEmbedding, VocabParallelOutput
from mt_core.nn.layout import LayoutModule, ParameterLayout
from mt_core.nn.linear import LinearModule
from mt_core.plugins import PluginHost
from mt_core.specs import MODELS
from mt_tune.adapters.config import ALL_LINEAR, AdapterConfig
from mt_tune.quantized_weights.weight import QuantizedWeight

Kind = Literal["linear", "experts", "router", "embedding", "output"]
WEIGHT = "weight"
FIRST_EXPERT = ".experts.0."
"""Mark of a part's name where Hugging Face's format has modules of single experts."""
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Part:
    """Rows of a layer's matrix that have an adapter of their own.

    name: of the module in Hugging Face's format; None: the family has no such format. parameter: of that module, where
    PEFT targets a parameter of it. aliases: further names by which it is selected. rows: [n] int64 of the canonical
    matrix, in the order of the external one. transposed: whether the external matrix is [in, out].
    """

    name: str | None
    rows: Tensor
    aliases: tuple[str, ...] = ()
    parameter: str | None = None
    transposed: bool = False
    halves: tuple[str, ...] = ()
    """Names of modules that files of older versions have in place of this one, all of which select it."""

    @property
    def names(self) -> tuple[str, ...]:
        named = () if self.name is None else (self.name if self.parameter is None else f"{self.name}.{self.parameter}",)
        return (*named, *self.aliases)


@dataclass(frozen=True, eq=False)
class Layer:
    """A layer that can be adapted: its canonical path, the module, and its parts."""

    path: str
    module: LayoutModule
    kind: Kind
    parts: tuple[Part, ...]
    is_tied: bool = False
    """Whether the LM head is the matrix of the token embeddings."""

    @property
    def layout(self) -> ParameterLayout:
        layout = weight_layout(self.module)
        assert layout is not None
        return layout


def weight_layout(module: nn.Module) -> ParameterLayout | None:
    """Layout of the weight of a module, also of a quantized one; None: it has none."""
    if isinstance(quantized := module._modules.get(WEIGHT), QuantizedWeight):
        return quantized.layout
    return module.layouts.get(WEIGHT) if isinstance(module, LayoutModule) else None


def kind_of(path: str, module: nn.Module) -> Kind | None:
    """None: a module without a matrix that adapters serve."""
    layout = weight_layout(module)
    if layout is None:
        return None
    if isinstance(module, VocabParallelEmbedding):
        return "embedding"
    if isinstance(module, VocabParallelOutput):
        return "output"
    # Recognized by what they have, since this package does not import mt_moe.
    if len(layout.shape) == 3:
        return "experts" if hasattr(module, "product") else None
    if hasattr(module, "logits") and hasattr(module, "choose"):
        return "router"
    return "linear" if isinstance(module, LinearModule) else None


def adaptable_layers(model: nn.Module, config: Config, host: PluginHost) -> list[Layer]:
    """The layers of this process, in the order of the model."""
    rules, experts = external_rules(config, host), config.section(AdapterConfig).experts
    layers: list[Layer] = []
    for path, module in model.named_modules():
        kind = kind_of(path, module)
        if kind is not None:
            layout = weight_layout(module)
            assert isinstance(module, LayoutModule)
            assert layout is not None
            rule = rules.get(f"{path}.{WEIGHT}")
            layers.append(Layer(path, module, kind, _parts(path, layout, kind, rule, experts)))
    return layers


def tied_output(model: nn.Module, config: Config, host: PluginHost) -> Layer | None:
    """The LM head of a model that has the token embeddings in its place. None: it has one of its own."""
    if getattr(config.model, "untie_embeddings_and_output_weights", True):
        return None
    embeddings = [(p, m) for p, m in model.named_modules() if isinstance(m, VocabParallelEmbedding)]
    if len(embeddings) != 1:
        return None
    ((path, module),) = embeddings
    name = next((_module_of(copy) for copy in external_copies(config, host)), None)
    rows = torch.arange(module.layouts[WEIGHT].shape[0])
    part = Part(name, rows, ("output_layer",))
    return Layer(f"{path.rpartition('.')[0]}.output_adapter", module, "output", (part,), is_tied=True)


def external_rules(config: Config, host: PluginHost) -> Mapping[str, Rule]:
    """Canonical name -> rule of Hugging Face's format; none for a model that it cannot express."""
    spec = host[MODELS].get(config.model.family, key="model.family")
    if HF_FORMAT not in spec.name_maps:
        return {}
    try:
        names = spec.name_maps[HF_FORMAT].load().name_map(config.model)
    except ConfigError:
        return {}
    return {rule.ours: rule for rule in names.rules}


def external_copies(config: Config, host: PluginHost) -> Mapping[str, str]:
    """Name of a tied tensor in Hugging Face's format -> the one that it repeats."""
    if not external_rules(config, host):
        return {}
    family = host[MODELS].get(config.model.family, key="model.family").name_maps[HF_FORMAT].load()
    copies: Mapping[str, str] = family.copies(config.model)
    return copies


def _parts(path: str, layout: ParameterLayout, kind: Kind, rule: Rule | None, experts: str) -> tuple[Part, ...]:
    rows = layout.shape[-2]
    whole = Part(None, torch.arange(rows), (path,))
    if rule is None or kind == "embedding":
        name = None if rule is None else _module_of(rule.sources[0])
        return (Part(name, whole.rows, (path,)),)
    if kind == "experts" and experts == "fused":
        return _fused_experts(path, layout, rule)
    form = (rule.others or (rule,))[0] if kind == "router" else rule
    parts = [
        Part(
            _module_of(name),
            source_rows.flatten(),
            (path, *_old_names(form, rule)),
            None,
            _is_transposed(source_rows, rows),
        )
        for name, source_rows in _rows_by_source(form, layout)
    ]
    if kind == "router":
        return (Part(parts[0].name, parts[0].rows, parts[0].aliases, WEIGHT),)
    if kind == "experts" and experts == "shared_outer":
        return tuple(replace(part, aliases=(*part.aliases, _stack(part, layout))) for part in parts)
    return tuple(parts)


def _stack(part: Part, layout: ParameterLayout) -> str:
    """Name of the matrices of all experts as one stack, in files of shared-outer adapters: w1 of the gate or of a first
    matrix without one, w3 of the other rows of the first matrix, w2 of the second."""
    is_first = any(split.dim == 1 for split in layout.splits)
    matrix = ("w1" if int(part.rows.min()) == 0 else "w3") if is_first else "w2"
    return f"{str(part.name).rpartition(FIRST_EXPERT)[0]}.experts.{matrix}"


def _old_names(form: Rule, rule: Rule) -> tuple[str, ...]:
    return () if form is rule else tuple(_module_of(name) for name in rule.sources if name.endswith(WEIGHT))


def _fused_experts(path: str, layout: ParameterLayout, rule: Rule) -> tuple[Part, ...]:
    """All experts' matrices as one parameter of a module, as transformers holds them."""
    form = next((form for form in (*rule.others, rule) if len(form.sources) == 1), None)
    if form is None:
        return (Part(None, torch.arange(layout.shape[-2]), (path,)),)
    ((source, numbers),) = _rows_by_source(form, layout)
    module, _, parameter = source.rpartition(".")
    single = {_module_of(name) for name in rule.sources if ".0." in name[name.find("experts") :]} - {source}
    transposed = _is_transposed(numbers[0], layout.shape[-2])
    return (Part(module, numbers[0].flatten(), (path,), parameter, transposed, tuple(sorted(single))),)


def _rows_by_source(rule: Rule, layout: ParameterLayout) -> list[tuple[str, Tensor]]:
    """External name -> numbers of the canonical rows that it consists of, in its shape with one input feature."""
    *leading, rows, _ = layout.shape
    numbers = torch.arange(rows).unsqueeze(-1).expand(*leading, rows, 1)
    exported = zip(rule.sources, rule.export_value(numbers), strict=True)
    by_source = [(name, part) for name, part in exported if not name.endswith("bias")]
    if len(leading) == 1 and len(by_source) > 1:  # one tensor for each expert: those of the first one say it all
        by_source = by_source[: len(by_source) // leading[0]]
    return by_source


def _is_transposed(numbers: Tensor, rows: int) -> bool:
    return numbers.shape[-1] > 1 and rows > 1


def _module_of(name: str) -> str:
    return name.removesuffix(f".{WEIGHT}")


def saved_parameters(names: Iterable[str], rules: Mapping[str, Rule], patterns: Sequence[str]) -> dict[str, list[str]]:
    """Canonical name of a parameter of modules_to_save -> the patterns that name its module here or in Hugging Face's
    format."""
    saved: dict[str, list[str]] = {}
    for name in names:
        sources = rules[name].sources if name in rules else ()
        modules = [spelled.rpartition(".")[0] for spelled in (name, *sources)]
        if matching := [pattern for pattern in patterns if any(fits(module, pattern) for module in modules)]:
            saved[name] = matching
    return saved


# -- selection by the configuration ------------------------------------------------------------------


def fits(name: str, pattern: str) -> bool:
    """Whether a pattern is the name, or the end of it behind a dot; * stands for any characters."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def is_selected(layer: Layer, part: Part, patterns: Sequence[str]) -> list[str]:
    """The patterns that select a part. Raises ConfigError for one that means a part of it."""
    selecting = [pattern for pattern in patterns if pattern != ALL_LINEAR and any(fits(n, pattern) for n in part.names)]
    by_halves = {half: [p for p in patterns if fits(half, p)] for half in part.halves}
    used = [pattern for patterns_of in by_halves.values() for pattern in patterns_of]
    if used and not all(by_halves.values()):
        missing = ", ".join(half for half, matching in by_halves.items() if not matching)
        raise ConfigError(
            f"adapter.targets selects {used[0]} of {layer.path}, whose adapter is shared with {missing}; name both, or "
            "set adapter.experts=per_expert"
        )
    is_plain = layer.kind in ("linear", "experts") and not layer.path.startswith("mtp.")
    return [*selecting, *used, *([ALL_LINEAR] if ALL_LINEAR in patterns and is_plain else [])]


def by_pattern(patterns: Mapping[str, T], names: Iterable[str], default: T) -> T:
    """The value of the first regular expression that is the end of one of the names, as in PEFT."""
    listed = list(names)
    for pattern, value in patterns.items():
        if any(re.match(rf"(.*\.)?({pattern})$", name) for name in listed):
            return value
    return default
