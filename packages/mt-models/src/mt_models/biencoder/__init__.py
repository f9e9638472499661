"""Two BERT encoders, of questions and of texts, trained to retrieve the text that a question comes from."""

from mt_core.kinds import Lazy
from mt_core.specs import LossSpec, ModelSpec

SPEC = ModelSpec(
    name="biencoder",
    doc="Megatron's retrievers: two BERT encoders that find the text a question comes from (inverse cloze task)",
    config_type=Lazy("mt_models.biencoder.config:BiencoderConfig"),
    build=Lazy("mt_models.biencoder.model:build_biencoder"),
    default_loss="retrieval",
    check=Lazy("mt_models.biencoder.config:check_biencoder"),
    adapt=Lazy("mt_models.biencoder.towers:towers_of_bert"),
    presets=Lazy("mt_models.biencoder.config:PRESETS"),
    training_flops=Lazy("mt_models.biencoder.config:training_flops"),
    name_maps={"megatron": Lazy("mt_models.biencoder.config:MEGATRON")},
)
LOSS = LossSpec(
    name="retrieval",
    doc="Cross entropy of each question's own text among those of the micro-batch on all ranks",
    build=Lazy("mt_models.biencoder.model:build_retrieval_loss"),
    compares_samples=True,
)
