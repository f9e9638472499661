"""Muse Spark (text): Muse Glimmer with gates of the residual stream, and experts on a latent of the tokens."""

from mt_core.kinds import Lazy
from mt_core.specs import ModelSpec

SPEC = ModelSpec(
    name="muse_spark",
    doc="Muse Spark, text: gates of the residual stream, gated attention in windows, 256 experts on a latent of tokens",
    config_type=Lazy("mt_models.muse_spark.config:MuseSparkConfig"),
    build=Lazy("mt_models.muse_spark.model:build_muse_spark"),
    check=Lazy("mt_models.muse_spark.config:check_muse_spark"),
    presets=Lazy("mt_models.muse_spark.config:PRESETS"),
    name_maps={
        "hf": Lazy("mt_models.muse_spark.hugging_face:HUGGING_FACE"),
        "megatron": Lazy("mt_models.muse_spark.config:MEGATRON"),
    },
    training_flops=Lazy("mt_models.muse_glimmer.flops:training_flops"),
)
