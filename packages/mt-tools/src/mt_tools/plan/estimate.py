"""Memory of a model by dtype: its weights, its training with Adam, and a rank of a layout with activations."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod
from pathlib import Path
from tempfile import TemporaryDirectory

from torch import nn

from mt_core.config.checks import as_world
from mt_core.config.loading import load_config
from mt_core.config.schema import Config
from mt_core.config.sources import find_preset
from mt_core.config_map import model_section, read_hf_config
from mt_core.errors import ConfigError, did_you_mean
from mt_core.nn.layout import parameter_layouts
from mt_core.plugins import PluginHost
from mt_tools.plan.layouts import LayoutPlan, Planner
from mt_tools.plan.machines import Machine

BITS: Mapping[str, int] = {"float32": 32, "bfloat16": 16, "float16": 16, "int8": 8, "int4": 4}
TRAINED: Mapping[str, str] = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
"""dtype -> precision.dtype, of those that mt trains in."""
ADAM_BYTES = {"float32": 4 + 4 + 8, "bfloat16": 2 + 4 + 2 + 8, "float16": 2 + 4 + 4 + 8}
"""Bytes of a parameter: weight, fp32 gradient, what 16-bit training keeps beside the weight (the other 16 bits of bf16,
or an fp32 copy of fp16), two fp32 moments."""
LONGEST_SEQUENCE = 4096
"""Tokens of a sequence of a Hugging Face model that can take longer ones, unless another length is requested."""


@dataclass(frozen=True)
class ModelSize:
    """Parameters without padding, shared ones once. largest_layer: its name and parameters. A layer of a stack counts
    as one, and so does each module outside of stacks."""

    parameters: int
    largest_layer: tuple[str, int]


@dataclass(frozen=True)
class DtypeEstimate:
    """Bytes. training: weights, gradients, master weights and moments in one process; None: mt does not train in it.
    rank: the layout's plan; None without one."""

    dtype: str
    largest_layer: int
    total: int
    training: int | None
    rank: LayoutPlan | None


@dataclass(frozen=True)
class Estimate:
    """not_planned: why there are no plans of ranks."""

    model: str
    family: str
    seq_length: int
    size: ModelSize
    dtypes: Sequence[DtypeEstimate]
    not_planned: str | None


def estimate(
    name: str,
    dtypes: Sequence[str],
    host: PluginHost,
    machine: Machine,
    *,
    world: int = 1,
    overrides: Sequence[str] = (),
) -> Estimate:
    """name: a preset, a config.json, or the folder of one. overrides: "section.key=value", of the layout for instance.

    Raises ConfigError for an unknown name or dtype, a model that no family can be, and a layout that is not legal.
    """
    for dtype in dtypes:
        if dtype not in BITS:
            raise ConfigError(f"--dtypes {dtype}{did_you_mean(dtype, BITS)}: it can be {', '.join(BITS)}")
    configs = {dtype: _configured(name, dtype, overrides, world, host) for dtype in dict.fromkeys(dtypes)}
    # Parameters do not depend on the dtype: counted once.
    first = Planner(next(iter(configs.values())), host, machine)
    size = model_size(first.whole_model)
    reason = first.unsuitable_data()
    rows = [
        DtypeEstimate(
            dtype,
            ceil(size.largest_layer[1] * BITS[dtype] / 8),
            ceil(size.parameters * BITS[dtype] / 8),
            size.parameters * ADAM_BYTES[dtype] if dtype in ADAM_BYTES else None,
            Planner(config, host, machine).plan(config, world) if dtype in TRAINED and reason is None else None,
        )
        for dtype, config in configs.items()
    ]
    return Estimate(name, first.config.model.family, first.config.data.seq_length, size, rows, reason)


def model_size(model: nn.Module) -> ModelSize:
    """model: whole, possibly on the meta device."""
    layers: Counter[str] = Counter()
    for name, layout in parameter_layouts(model).items():
        layers[layer_of(name)] += prod(layout.shape)
    return ModelSize(layers.total(), layers.most_common(1)[0])


def layer_of(name: str) -> str:
    """ "decoder.layers.3.mlp.linear_fc1.weight" -> "decoder.layers.3"; "output_layer.weight" -> "output_layer"."""
    parts = name.split(".")
    # The first number: experts have a second one.
    number = next((place for place, part in enumerate(parts) if part.isdigit()), None)
    return ".".join(parts[: number + 1] if number is not None else parts[:-1])


def _configured(name: str, dtype: str, overrides: Sequence[str], world: int, host: PluginHost) -> Config:
    """The model with one sample at a time, unless overrides say otherwise."""
    # Before the overrides, which win.
    usual = ["train.train_iters=1", "train.micro_batch_size=1", "train.global_batch_size=null"]
    usual += [f"precision.dtype={TRAINED.get(dtype, 'bf16')}"]
    path = Path(name)
    if not path.exists():
        find_preset(name, host)  # raises for a name that is neither a file nor a preset
        with as_world(world):
            return load_config(preset=name, overrides=[*usual, *overrides], host=host).config
    section = model_section(read_hf_config(path), host)
    length = min(section.get("max_position_embeddings") or LONGEST_SEQUENCE, LONGEST_SEQUENCE)
    with as_world(world), TemporaryDirectory(prefix="mt-estimate-") as folder:
        file = Path(folder) / "model.json"
        file.write_text(json.dumps({"model": section, "data": {"seq_length": length}}), encoding="utf-8")
        return load_config(file, overrides=[*usual, *overrides], host=host).config
