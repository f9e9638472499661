"""dots.llm1 and Solar Open: grouped queries with the experts of DeepSeek-V3."""

from mt_core.kinds import Lazy
from mt_core.specs import ModelSpec

SPEC = ModelSpec(
    name="dots1",
    doc="dots.llm1 and Solar Open: grouped queries, small experts with sigmoid scores, shared ones",
    config_type=Lazy("mt_models.dots1.config:Dots1Config"),
    build=Lazy("mt_models.blocks.decoder:build_rotary_decoder"),
    check=Lazy("mt_models.blocks.config:check_moe_decoder"),
    presets=Lazy("mt_models.dots1.config:PRESETS"),
    name_maps={
        "hf": Lazy("mt_models.dots1.hugging_face:HUGGING_FACE"),
        "gguf": Lazy("mt_models.dots1.gguf:GGUF"),
        "megatron": Lazy("mt_models.dots1.config:MEGATRON"),
    },
    training_flops=Lazy("mt_models.flops:training_flops"),
)
