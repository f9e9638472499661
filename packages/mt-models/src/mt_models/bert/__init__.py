"""BERT: a bidirectional encoder with MLM and sentence-order heads, post-norm (published) or pre-norm (Megatron)."""

from mt_core.kinds import Lazy
from mt_core.specs import LossSpec, ModelSpec

SPEC = ModelSpec(
    name="bert",
    doc="BERT, Megatron's BERT: bidirectional encoder with masked-word and sentence-order heads",
    config_type=Lazy("mt_models.bert.config:BertConfig"),
    build=Lazy("mt_models.bert.model:build_bert"),
    default_loss="bert",
    check=Lazy("mt_models.bert.config:check_bert"),
    presets=Lazy("mt_models.bert.config:PRESETS"),
    name_maps={
        "hf": Lazy("mt_models.bert.hugging_face:HUGGING_FACE"),
        "gguf": Lazy("mt_models.bert.gguf:GGUF"),
        "megatron": Lazy("mt_models.bert.megatron:MEGATRON"),
    },
    training_flops=Lazy("mt_models.bert.config:training_flops"),
)
LOSS = LossSpec(
    name="bert",
    doc="Cross entropy of masked words and of the order of two texts",
    build=Lazy("mt_models.bert.model:build_bert_loss"),
)
