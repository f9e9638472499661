"""The parameters of a configured model, and how Megatron's ranks hold them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch

from mt_ckpt.megatron.versions import Conventions
from mt_core.config.loading import config_from_dict
from mt_core.config.schema import Config
from mt_core.errors import ConfigError
from mt_core.nn.build_context import ModelBuildContext
from mt_core.nn.layout import ParameterLayout, Split, parameter_layouts
from mt_core.parallel.context import Axis, AxisName, ParallelContext
from mt_core.plugins import PluginHost
from mt_core.specs import MODELS

AXES: tuple[AxisName, ...] = ("tp", "ep", "etp")
BACKEND = "attention_backend"


@dataclass(frozen=True)
class Grid:
    """How a pipeline stage is sharded: over tensor-parallel ranks, and its experts over `ep` and `etp` ranks.

    A process has a place on each axis: process r of a stage has tensor rank r mod tp, expert tensor rank r mod etp,
    expert rank (r div etp) mod ep.
    """

    tp: int = 1
    ep: int = 1
    etp: int = 1

    def __post_init__(self) -> None:
        if self.tp % self.etp:
            raise ConfigError(
                f"expert_tensor_parallel_size={self.etp} does not divide tensor_model_parallel_size={self.tp}; "
                "Megatron's torch format has one file for a tensor rank and an expert rank, which would be several then"
            )

    def places(self) -> Iterator[Mapping[AxisName, int]]:
        """The place of each file: each pair of a tensor rank and an expert rank that processes can have."""
        seen = set()
        # tp * etp * ep processes include every combination that a run has; etp divides tp, so that a pair of tp and ep
        # fixes etp.
        for process in range(self.tp * self.etp * self.ep):
            place = {"tp": process % self.tp, "ep": process // self.etp % self.ep, "etp": process % self.etp}
            if (pair := (place["tp"], place["ep"])) not in seen:
                seen.add(pair)
                yield place  # type: ignore[misc]

    def place_of_tensor_rank(self, number: int) -> Mapping[AxisName, int]:
        """The first process with a tensor rank."""
        return {"tp": number, "ep": 0, "etp": number % self.etp}

    def place_of_expert_rank(self, number: int) -> Mapping[AxisName, int]:
        """The rank with other parts of a stage's experts that Megatron gives this number: expert tensor ranks first.

        Its tensor rank, on which experts do not depend, is left at 0.
        """
        return {"tp": 0, "ep": number // self.etp, "etp": number % self.etp}

    def context(self, place: Mapping[AxisName, int] | None = None) -> ParallelContext:
        """For layouts: the context of a process at `place`. It has no process groups."""
        sizes = {"tp": self.tp, "ep": self.ep, "etp": self.etp}
        return ParallelContext(axes={name: Axis(sizes[name], (place or {}).get(name, 0)) for name in AXES})

    def combinations(self, layout: ParameterLayout) -> Iterator[Mapping[AxisName, int]]:
        """Ranks on the axes that shard a parameter, in the order that `ParameterLayout.gather` takes."""
        ctx = self.context()
        axes = [split.axis for split in layout.splits]
        # product: the last split changes fastest.
        for ranks in product(*(range(ctx.axis(axis).size) for axis in axes)):
            yield dict(zip(axes, ranks, strict=True))


def load_model_config(section: Mapping[str, Any], host: PluginHost) -> Config:
    """The configuration with this [model] section and the defaults of all others. Raises ConfigError."""
    return config_from_dict({"model": section}, host)


def layouts_of(
    config: Config, host: PluginHost, vocab_size: int, padded: int | None = None
) -> dict[str, ParameterLayout]:
    """Canonical name -> layout of every parameter, for a vocabulary of exactly `vocab_size` rows, without memory.

    padded: rows in memory, `vocab_size` at least; default: no more than these.
    """
    # Divisible by 1: the model adds no padding of its own to the given rows.
    changes: dict[str, Any] = {"vocab_size": vocab_size, "make_vocab_size_divisible_by": padded or 1}
    if BACKEND in type(config.model).model_fields:
        changes[BACKEND] = "eager"  # serves every request; attention has no parameters
    chosen = config.model_copy(update={"model": config.model.model_copy(update=changes)})
    # Parameters on the meta device have shapes and layouts, and no memory.
    ctx = ParallelContext(device=torch.device("meta"))
    spec = host[MODELS].get(chosen.model.family, key="model.family")
    return parameter_layouts(spec.build.load()(chosen.model, ModelBuildContext(chosen, ctx, host)))


def as_stored(layout: ParameterLayout) -> ParameterLayout:
    """The layout of the parameter with its padding, for a file that holds that too."""
    shape = tuple(layout.padded.get(dim, size) for dim, size in enumerate(layout.shape))
    return replace(layout, shape=shape, padded={})


def require_divisible(layouts: Mapping[str, ParameterLayout], grid: Grid, asked: Mapping[AxisName, str]) -> None:
    """Raises ConfigError for a parameter that cannot be sharded over the grid. asked: axis -> the option of its
    size."""
    ctx = grid.context()
    for name, layout in layouts.items():
        sizes = [layout.padded.get(dim, size) for dim, size in enumerate(layout.shape)]
        for split in layout.splits:
            parts = ctx.axis(split.axis).size
            blocks = split.block_sizes(sizes[split.dim])
            if any(block % parts for block in blocks):
                raise ConfigError(
                    f"{asked[split.axis]}={parts} does not divide dimension {split.dim} of {name}, "
                    f"{' + '.join(map(str, sorted(set(blocks))))}"
                )
            # A later split may cut the same dimension again, of what the first left.
            sizes[split.dim] //= parts


def offsets_of(counts: Sequence[Mapping[str, int]]) -> list[dict[str, int]]:
    """For each of consecutive parts of a model, stack -> number of its first layer."""
    total: dict[str, int] = {}
    offsets = []
    for count in counts:
        offsets.append({stack: total.get(stack, 0) for stack in count})
        for stack, number in count.items():
            total[stack] = total.get(stack, 0) + number
    return offsets


# -- parameters that mt replicates on tensor-parallel ranks, and Megatron shards by rows -------------
#
# The down projections of latent attention are sharded by Megatron's own layers and by its older ones of Transformer
# Engine; newer ones replicate them. The input projections of an MTP depth are sharded by all.

DOWN = ("self_attention.linear_q_down_proj.weight", "self_attention.linear_kv_down_proj.weight")
MERGING = (".eh_proj.weight", ".e_proj.weight", ".h_proj.weight")


def as_written(
    layouts: Mapping[str, ParameterLayout], version: Conventions, *, local: bool
) -> dict[str, ParameterLayout]:
    """Layouts as a version of Megatron-Core shards them. local: with Megatron's own layers."""
    cut = MERGING if version.latent_projections_whole and not local else (*DOWN, *MERGING)
    return {name: by_rows(layout) if name.endswith(cut) else layout for name, layout in layouts.items()}


def as_held(name: str, layout: ParameterLayout, rows: int) -> ParameterLayout:
    """The layout by which a rank has `rows` rows of the parameter."""
    # Decided by the rows: a file does not say which version wrote it.
    return by_rows(layout) if name.endswith((*DOWN, *MERGING)) and rows < layout.shape[0] else layout


def by_rows(layout: ParameterLayout) -> ParameterLayout:
    return replace(layout, splits=(Split(dim=0, axis="tp"),))
