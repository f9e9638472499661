"""AFMoE (Arcee Trinity): gated attention, windows and layers without positions in turn, norms behind each block,
experts with sigmoid scores."""

from mt_core.kinds import Lazy
from mt_core.specs import ModelSpec

SPEC = ModelSpec(
    name="afmoe",
    doc="AFMoE (Arcee Trinity): gated attention, windows, global layers without positions, sandwich norms, experts",
    config_type=Lazy("mt_models.afmoe.config:AfmoeConfig"),
    build=Lazy("mt_models.afmoe.model:build_afmoe"),
    check=Lazy("mt_models.blocks.config:check_moe_decoder"),
    shrink=Lazy("mt_models.afmoe.config:shrink_afmoe"),
    presets=Lazy("mt_models.afmoe.config:PRESETS"),
    name_maps={
        "hf": Lazy("mt_models.afmoe.hugging_face:HUGGING_FACE"),
        "gguf": Lazy("mt_models.afmoe.gguf:GGUF"),
        "megatron": Lazy("mt_models.afmoe.config:MEGATRON"),
    },
    training_flops=Lazy("mt_models.afmoe.flops:training_flops"),
)
