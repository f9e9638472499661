"""Inkling (text): short convolutions behind every block, relative positions from the queries' side, shared experts that
the router scores."""

from mt_core.kinds import Lazy
from mt_core.specs import ModelSpec

SPEC = ModelSpec(
    name="inkling",
    doc="Inkling, text: short convolutions behind blocks, relative positions, windows, 256 experts, scored shared ones",
    config_type=Lazy("mt_models.inkling.config:InklingConfig"),
    build=Lazy("mt_models.inkling.model:build_inkling"),
    check=Lazy("mt_models.inkling.config:check_inkling"),
    presets=Lazy("mt_models.inkling.config:PRESETS"),
    name_maps={
        "hf": Lazy("mt_models.inkling.hugging_face:HUGGING_FACE"),
        "megatron": Lazy("mt_models.inkling.config:MEGATRON"),
    },
    training_flops=Lazy("mt_models.inkling.flops:training_flops"),
    shrink=Lazy("mt_models.inkling.config:shrink_inkling"),
)
