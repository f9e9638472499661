"""Rotary positions of Hugging Face's classes with a table for each kind of layer: those that see everything, whose
frequencies may be a share of a whole head's ("proportional"), and those with a window.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from mt_core.errors import ConfigError
from mt_models.blocks.hugging_face_decoder import FULL, SCALING_PARAMETERS, SLIDING, rope_table


class RotaryByKind(Protocol):
    """Keys of [model]."""

    @property
    def rotary_base(self) -> float: ...
    @property
    def rotary_base_local(self) -> float: ...
    @property
    def rotary_percent(self) -> float: ...
    @property
    def rope_scaling_factor(self) -> float | None: ...


def import_rope_by_kind(external: Mapping[str, Any], bases: tuple[float, float], share: float) -> dict[str, Any]:
    """Keys of [model] from `rope_parameters`. bases: of layers that see everything and of those with a window, and
    share: of the frequencies of the former, where there are no tables. Raises ConfigError for a table that says
    something else."""
    proportional = {"rope_type": "proportional", "partial_rotary_factor": share}
    kinds = external.get("rope_parameters") or {FULL: proportional}
    if set(kinds) - {FULL, SLIDING}:
        raise ConfigError(f"rope_parameters={dict(kinds)} is not supported: it has the keys {FULL} and {SLIDING}")
    whole = rope_of_kind(kinds.get(FULL), bases[0], FULL, ("default", "proportional"))
    local = rope_of_kind(kinds.get(SLIDING), bases[1], SLIDING, ("default",))
    return {**whole, "rotary_base_local": local["rotary_base"]}


def rope_of_kind(parameters: Mapping[str, Any] | None, base: float, kind: str, types: Sequence[str]) -> dict[str, Any]:
    """Keys of [model] of one kind of layer: base, share of rotated frequencies, linear factor."""
    table = rope_table({"rope_parameters": parameters or {}}, base, partial_rotary_factor=1.0, factor=1.0)
    name, share, factor = table.pop("rope_type"), table.pop("partial_rotary_factor"), table.pop("factor")
    theta = float(table.pop("rope_theta"))
    # Those of other types do not count.
    if name not in types or set(table) - SCALING_PARAMETERS:
        further = ", and for proportional partial_rotary_factor and factor" if "proportional" in types else ""
        raise ConfigError(
            f"rope_parameters.{kind}={dict(parameters or {})} is not supported: rope_type can be {' or '.join(types)}, "
            f"with rope_theta{further}"
        )
    # The frequencies of the type default depend on neither.
    share, factor = (share, factor) if name == "proportional" else (1.0, 1.0)
    scaled = {} if factor == 1.0 else {"rope_scaling_type": "linear", "rope_scaling_factor": float(factor)}
    return {"rotary_base": theta, "rotary_percent": float(share), **scaled}


def export_rope_by_kind(config: RotaryByKind) -> dict[str, Any]:
    """`rope_parameters`."""
    whole: dict[str, Any] = {"partial_rotary_factor": config.rotary_percent, "rope_theta": config.rotary_base}
    if config.rope_scaling_factor is not None:
        whole["factor"] = config.rope_scaling_factor
    return {
        FULL: {"rope_type": "proportional", **whole},
        SLIDING: {"rope_type": "default", "rope_theta": config.rotary_base_local},
    }
