"""LongCat-Flash: two latent attentions and two feed-forwards in a layer, and experts beside the second of them."""

from mt_core.kinds import Lazy
from mt_core.specs import ModelSpec

SPEC = ModelSpec(
    name="longcat_flash",
    doc="LongCat-Flash: two latent attentions and feed-forwards a layer, experts as a shortcut, some return the token",
    config_type=Lazy("mt_models.longcat_flash.config:LongcatFlashConfig"),
    build=Lazy("mt_models.longcat_flash.model:build_longcat_flash"),
    check=Lazy("mt_models.longcat_flash.config:check_longcat_flash"),
    presets=Lazy("mt_models.longcat_flash.config:PRESETS"),
    name_maps={
        "hf": Lazy("mt_models.longcat_flash.hugging_face:HUGGING_FACE"),
        "megatron": Lazy("mt_models.longcat_flash.config:MEGATRON"),
    },
    shrink=Lazy("mt_models.deepseek.config:shrink_deepseek"),
    training_flops=Lazy("mt_models.longcat_flash.config:training_flops"),
)
