"""Step-3.5 and Step-3.7, text: gated heads, more query heads in windows, norms of 1 + weight, limited activations."""

from mt_core.kinds import Lazy
from mt_core.specs import ModelSpec

SPEC = ModelSpec(
    name="step3p7",
    doc="Step-3.5 and 3.7, text: gated heads, more of them in windows, 288 experts, limits of activations",
    config_type=Lazy("mt_models.step3p7.config:Step3p7Config"),
    build=Lazy("mt_models.step3p7.model:build_step3p7"),
    check=Lazy("mt_models.step3p7.config:check_step3p7"),
    shrink=Lazy("mt_models.step3p7.config:shrink_step3p7"),
    presets=Lazy("mt_models.step3p7.config:PRESETS"),
    name_maps={
        "hf": Lazy("mt_models.step3p7.hugging_face:HUGGING_FACE"),
        "gguf": Lazy("mt_models.step3p7.gguf:GGUF"),
        "megatron": Lazy("mt_models.step3p7.config:MEGATRON"),
    },
    training_flops=Lazy("mt_models.step3p7.flops:training_flops"),
)
