"""Parameters that our model has whole on every tensor-parallel rank, and Megatron cuts by rows.

The ways down to the latents of latent attention are cut by Megatron's own layers and by its older ones of Transformer
Engine; newer ones have them whole. The matrix in front of a depth of multi-token prediction is cut by all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mt_core.nn.layout import ParameterLayout, Split

DOWN = ("self_attention.linear_q_down_proj.weight", "self_attention.linear_kv_down_proj.weight")
MERGING = (".eh_proj.weight",)


def as_written(layouts: Mapping[str, ParameterLayout], *, local: bool) -> dict[str, ParameterLayout]:
    """Layouts as Megatron-Core 0.19 cuts them. local: with Megatron's own layers."""
    cut = (*DOWN, *MERGING) if local else MERGING
    return {name: by_rows(layout) if name.endswith(cut) else layout for name, layout in layouts.items()}


def as_held(name: str, layout: ParameterLayout, rows: int) -> ParameterLayout:
    """The layout by which a rank has `rows` rows of the parameter."""
    return by_rows(layout) if name.endswith((*DOWN, *MERGING)) and rows < layout.shape[0] else layout


def by_rows(layout: ParameterLayout) -> ParameterLayout:
    return replace(layout, splits=(Split(dim=0, axis="tp"),))
