"""Mamba-2: state-space layers only."""

from mt_core.kinds import Lazy
from mt_core.specs import ModelSpec

SPEC = ModelSpec(
    name="mamba",
    doc="Mamba-2: state-space layers alone, with a state of fixed size in place of attention",
    config_type=Lazy("mt_models.mamba.config:MambaConfig"),
    build=Lazy("mt_models.mamba.model:build_mamba"),
    check=Lazy("mt_models.mamba.config:check_mamba"),
    presets=Lazy("mt_models.mamba.config:PRESETS"),
    name_maps={
        "hf": Lazy("mt_models.mamba.hugging_face:HUGGING_FACE"),
        "gguf": Lazy("mt_models.mamba.gguf:GGUF"),
        "megatron": Lazy("mt_models.mamba.megatron:MEGATRON"),
    },
    training_flops=Lazy("mt_models.mamba.config:training_flops"),
)
