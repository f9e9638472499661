"""Parameters that our model replicates on every tensor-parallel rank, and Megatron shards by rows.

The down projections of latent attention are sharded by Megatron's own layers and by its older ones of Transformer
Engine; newer ones replicate them. The input projection (eh_proj) of an MTP depth is sharded by all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mt_ckpt.megatron.versions import Conventions
from mt_core.nn.layout import ParameterLayout, Split

DOWN = ("self_attention.linear_q_down_proj.weight", "self_attention.linear_kv_down_proj.weight")
MERGING = (".eh_proj.weight",)


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
