"""Classification and multiple-choice models, on BERT's encoder and on causal decoders."""

from typing import Any

from mt_core.kinds import Lazy
from mt_core.specs import LossSpec, Metric, ModelSpec, StartsFrom

HEADS_OF_PRETRAINING = ("lm_head.*", "output_layer.*", "binary_head.*")
KEYS_OF_PRETRAINING = ("add_lm_head", "bert_binary_head", "add_pooler", "output_bias")


def _spec(
    name: str,
    config: str,
    build: str,
    name_map: str | None = None,
    presets: str = "NONE",
    left_out: tuple[str, ...] = HEADS_OF_PRETRAINING,
) -> ModelSpec:
    base, _, task = name.partition("_")
    hugging_face: dict[str, Lazy[Any]] = {"hf": Lazy(f"mt_models.heads.hugging_face:{name_map}")} if name_map else {}
    chosen = "a class for each text" if task == "classification" else "one of several texts"
    return ModelSpec(
        name=name,
        doc=f"The family {base} with a head that chooses {chosen}",
        config_type=Lazy(f"mt_models.heads.config:{config}"),
        build=Lazy(f"mt_models.heads.model:{build}"),
        default_loss="classification",
        check=Lazy("mt_models.heads.config:check_choice"),
        presets=Lazy(f"mt_models.heads.config:{presets}"),
        name_maps={"megatron": Lazy("mt_models.heads.config:MEGATRON"), **hugging_face},
        training_flops=Lazy("mt_models.heads.config:training_flops"),
        starts_from=(
            StartsFrom(
                family=base,
                initialized=("classification_head.*", "multichoice_head.*"),
                left_out=left_out,
                own_keys=KEYS_OF_PRETRAINING,
            ),
        ),
    )


def _metrics(*names: str) -> dict[str, Lazy[Metric]]:
    return {name: Lazy(f"mt_models.heads.metrics:{name}") for name in names}


SPECS = (
    _spec(
        "bert_classification",
        "BertClassificationConfig",
        "build_bert_classifier",
        "BERT_CLASSIFICATION",
        "CLASSIFICATION",
    ),
    _spec(
        "bert_multiple_choice",
        "BertMultipleChoiceConfig",
        "build_bert_chooser",
        "BERT_MULTIPLE_CHOICE",
        "MULTIPLE_CHOICE",
    ),
    _spec(
        "modernbert_classification",
        "ModernBertClassificationConfig",
        "build_modernbert_classifier",
        "MODERNBERT_CLASSIFICATION",
        # The head's first layer is that of masked words.
        left_out=("output_layer.*",),
    ),
    _spec("gpt_classification", "GPTClassificationConfig", "build_gpt_classifier", "GPT_CLASSIFICATION"),
    _spec("gpt_multiple_choice", "GPTMultipleChoiceConfig", "build_gpt_chooser"),
    _spec("llama_classification", "LlamaClassificationConfig", "build_llama_classifier", "LLAMA_CLASSIFICATION"),
    _spec("llama_multiple_choice", "LlamaMultipleChoiceConfig", "build_llama_chooser"),
)
LOSSES = (
    LossSpec(
        name="classification",
        doc="Cross entropy of the right class or text, one number a sample",
        build=Lazy("mt_models.heads.model:build_classification_loss"),
        metrics=_metrics("accuracy", "f1", "matthews"),
    ),
    LossSpec(
        name="regression",
        doc="Squared error of a predicted number, one number a sample",
        build=Lazy("mt_models.heads.model:build_regression_loss"),
        metrics=_metrics("pearson", "spearman"),
    ),
)
