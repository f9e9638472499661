"""RETRO: a GPT with cross attention to neighbours of its text, retrieved from a database of chunks."""

from mt_core.kinds import Lazy
from mt_core.specs import ModelSpec, StartsFrom

ADDED = ("encoder.*", "decoder.layers.*.cross_attention.*", "decoder.layers.*.pre_cross_attn_layernorm.*")
"""Parameters that a GPT does not have."""

SPEC = ModelSpec(
    name="retro",
    doc="RETRO: GPT that attends to neighbours of its text, chunk by chunk, from a database",
    config_type=Lazy("mt_models.retro.config:RetroConfig"),
    build=Lazy("mt_models.retro.model:build_retro"),
    check=Lazy("mt_models.retro.config:check_retro"),
    presets=Lazy("mt_models.retro.config:PRESETS"),
    name_maps={"megatron": Lazy("mt_models.retro.config:MEGATRON")},
    starts_from=(
        StartsFrom(family="gpt", initialized=ADDED),
        StartsFrom(family="llama", initialized=ADDED, keys=Lazy("mt_models.retro.config:retro_keys_of_llama")),
    ),
    shrink=Lazy("mt_models.retro.config:shrink_retro"),
    training_flops=Lazy("mt_models.retro.config:training_flops"),
)
