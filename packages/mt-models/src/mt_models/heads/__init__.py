"""Classification and multiple-choice models, on BERT's encoder and on causal decoders."""

from typing import Any

from mt_core.specs import Lazy, LossSpec, ModelSpec


def _spec(name: str, config: str, build: str, name_map: str | None = None) -> ModelSpec:
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
        presets=Lazy("mt_models.heads.presets:PRESETS"),
        name_maps={"megatron": Lazy("mt_models.megatron:HEADS"), **hugging_face},
    )


SPECS = (
    _spec("bert_classification", "BertClassificationConfig", "build_bert_classifier", "BERT_CLASSIFICATION"),
    _spec("bert_multiple_choice", "BertMultipleChoiceConfig", "build_bert_chooser", "BERT_MULTIPLE_CHOICE"),
    _spec("gpt_classification", "GPTClassificationConfig", "build_gpt_classifier", "GPT_CLASSIFICATION"),
    _spec("gpt_multiple_choice", "GPTMultipleChoiceConfig", "build_gpt_chooser"),
    _spec("llama_classification", "LlamaClassificationConfig", "build_llama_classifier", "LLAMA_CLASSIFICATION"),
    _spec("llama_multiple_choice", "LlamaMultipleChoiceConfig", "build_llama_chooser"),
)
LOSS = LossSpec(
    name="classification",
    doc="Cross entropy of the right class or text, one number a sample",
    build=Lazy("mt_models.heads.loss:build_classification_loss"),
)
