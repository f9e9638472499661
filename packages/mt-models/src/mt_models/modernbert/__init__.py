"""ModernBERT: a bidirectional encoder with rotary positions, local and global attention, and a masked-word head."""

from mt_core.kinds import Lazy
from mt_core.specs import ModelSpec

SPEC = ModelSpec(
    name="modernbert",
    doc="ModernBERT: bidirectional encoder with rotary positions and local attention in most layers",
    config_type=Lazy("mt_models.modernbert.config:ModernBertConfig"),
    build=Lazy("mt_models.modernbert.model:build_modernbert"),
    default_loss="bert",
    check=Lazy("mt_models.modernbert.config:check_modernbert"),
    presets=Lazy("mt_models.modernbert.config:PRESETS"),
    name_maps={
        "hf": Lazy("mt_models.modernbert.hugging_face:HUGGING_FACE"),
        "gguf": Lazy("mt_models.modernbert.gguf:GGUF"),
        "megatron": Lazy("mt_models.modernbert.config:MEGATRON"),
    },
    training_flops=Lazy("mt_models.modernbert.config:training_flops"),
)
