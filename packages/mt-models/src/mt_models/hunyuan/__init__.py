"""Hunyuan: Llama with norms of heads behind the rotation, dense or with experts."""

from mt_core.kinds import Lazy
from mt_core.specs import ModelSpec

SPEC = ModelSpec(
    name="hunyuan",
    doc="Hunyuan: Llama with norms of heads behind the rotary positions, dense or with experts and a shared one",
    config_type=Lazy("mt_models.hunyuan.config:HunyuanConfig"),
    build=Lazy("mt_models.blocks.decoder:build_rotary_decoder"),
    check=Lazy("mt_models.blocks.config:check_decoder"),
    presets=Lazy("mt_models.hunyuan.config:PRESETS"),
    name_maps={
        "hf": Lazy("mt_models.hunyuan.hugging_face:HUGGING_FACE"),
        "gguf": Lazy("mt_models.hunyuan.gguf:GGUF"),
        "megatron": Lazy("mt_models.hunyuan.config:MEGATRON"),
    },
    training_flops=Lazy("mt_models.flops:training_flops"),
)
