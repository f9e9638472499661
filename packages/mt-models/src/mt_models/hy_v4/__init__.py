"""Hy4: gated latent attention with sinks over chosen keys, residual streams that are not mixed, experts."""

from mt_core.kinds import Lazy
from mt_core.specs import ModelSpec

SPEC = ModelSpec(
    name="hy_v4",
    doc="Hy4: gated latent attention with sinks over chosen keys, four residual streams, 256 experts",
    config_type=Lazy("mt_models.hy_v4.config:HyV4Config"),
    build=Lazy("mt_models.hy_v4.model:build_hy_v4"),
    check=Lazy("mt_models.hy_v4.config:check_hy_v4"),
    shrink=Lazy("mt_models.hy_v4.config:shrink_hy_v4"),
    presets=Lazy("mt_models.hy_v4.config:PRESETS"),
    name_maps={
        "hf": Lazy("mt_models.hy_v4.hugging_face:HUGGING_FACE"),
        "megatron": Lazy("mt_models.hy_v4.config:MEGATRON"),
    },
    training_flops=Lazy("mt_models.hy_v4.flops:training_flops"),
)
