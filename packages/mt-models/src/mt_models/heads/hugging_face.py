"""Classification and multiple-choice models in Hugging Face's format: the base model's maps, and the head."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mt_core.config_map import ConfigMap, Field
from mt_core.name_map import NameMap, Rule, Same
from mt_models.bert.hugging_face import (
    ENCODER_FIELDS,
    ENCODER_FIXED,
    ENCODER_IGNORED,
    PLACEMENTS,
    STEMS,
    encoder_rules,
    with_bias,
)
from mt_models.bert.hugging_face import model_type_of as bert_type_of
from mt_models.gpt.hugging_face import HUGGING_FACE as GPT
from mt_models.heads.config import BertBase, ModernBertClassificationConfig
from mt_models.hugging_face import CLASS_KEYS, HuggingFaceFamily, num_classes
from mt_models.llama.hugging_face import HUGGING_FACE as LLAMA
from mt_models.modernbert import hugging_face as modernbert

HEAD_KEYS = ("num_classes", "classifier_dropout")
"""Keys of [model] that the base does not have."""


def class_names(model: Mapping[str, Any]) -> dict[str, Any]:
    names = [f"LABEL_{i}" for i in range(model["num_classes"])]
    labels: dict[str, Any] = {"id2label": dict(enumerate(names)), "label2id": {name: i for i, name in enumerate(names)}}
    # Without it a single number may also be a reward.
    return {**labels, "problem_type": "regression"} if len(names) == 1 else labels


def with_classes(base: ConfigMap) -> ConfigMap:
    """A base model's map with the number of classes."""

    def import_extra(external: Mapping[str, Any]) -> dict[str, Any]:
        below = base.import_extra(external) if base.import_extra is not None else {}
        return {**below, "num_classes": num_classes(external)}

    def export_extra(model: Mapping[str, Any]) -> dict[str, Any]:
        below = base.export_extra(model) if base.export_extra is not None else {}
        return {**below, **class_names(model)}

    return replace(
        base,
        ignored={key: why for key, why in base.ignored.items() if key not in CLASS_KEYS},
        import_extra=import_extra,
        import_extra_keys=(*base.import_extra_keys, *CLASS_KEYS),
        export_extra=export_extra,
    )


# -- BERT ---------------------------------------------------------------------------------------------


def classes_of(task: str) -> dict[str, str]:
    return {kind: f"{stem}For{task}" for kind, stem in STEMS.items()}


def bert_base(model_type: str) -> ConfigMap:
    return ConfigMap(
        architecture=model_type,
        fields=ENCODER_FIELDS,
        fixed=ENCODER_FIXED,
        ignored=ENCODER_IGNORED | {"architectures": "the task is the family's"},
        import_extra=lambda external: {
            "layernorm_placement": PLACEMENTS[model_type],
            "use_scaled_init_method": False,
            "classifier_dropout": external.get("classifier_dropout"),
        },
        import_extra_keys=("classifier_dropout",),
        export_extra=lambda model: {
            "classifier_dropout": model.get("classifier_dropout"),
            "intermediate_size": model.get("ffn_hidden_size") or 4 * model["hidden_size"],
        },
    )


def bert_names(config: BertBase, head: str) -> NameMap:
    rules = [
        *encoder_rules(config, "bert."),
        *with_bias("pooler.dense", "bert.pooler.dense"),
        *with_bias(head, "classifier"),
    ]
    return NameMap(rules, config.num_layers, ignored=["bert.embeddings.position_ids"])


BERT_CLASSIFICATION = HuggingFaceFamily(
    "bert_classification",
    {kind: with_classes(bert_base(kind)) for kind in PLACEMENTS},
    lambda config: bert_names(config, "classification_head"),
    bert_type_of,
    architectures=classes_of("SequenceClassification"),
)
BERT_MULTIPLE_CHOICE = HuggingFaceFamily(
    "bert_multiple_choice",
    {kind: bert_base(kind) for kind in PLACEMENTS},
    lambda config: bert_names(config, "multichoice_head"),
    bert_type_of,
    architectures=classes_of("MultipleChoice"),
)


# -- ModernBERT ---------------------------------------------------------------------------------------

OF_CLASSIFIER = (
    Field("classifier_dropout", "classifier_dropout", float, lambda rate: rate or 0.0, default=0.0),
    Field("classifier_pooling", "classifier_pooling", default="cls"),
)
MODERNBERT = replace(
    modernbert.CONFIG,
    fields=(*(entry for entry in modernbert.CONFIG.fields if entry != modernbert.OUTPUT_BIAS), *OF_CLASSIFIER),
    ignored={
        **{key: why for key, why in modernbert.CONFIG.ignored.items() if not key.startswith("classifier_")},
        "architectures": "the task is the family's",
        modernbert.OUTPUT_BIAS.theirs: "of logits of masked words",
    },
    import_extra=modernbert.import_layers,
    import_extra_keys=modernbert.LAYER_KEYS,
    export_extra=lambda model: modernbert.export_layers(ModernBertClassificationConfig.model_validate(model)),
)


def modernbert_names(config: ModernBertClassificationConfig) -> NameMap:
    head = with_bias("classification_head", "classifier")
    rules = [*modernbert.encoder_rules(config, "model."), *modernbert.head_rules(config), *head]
    return NameMap(rules, config.num_layers)


MODERNBERT_CLASSIFICATION = HuggingFaceFamily(
    "modernbert_classification",
    {"modernbert": with_classes(MODERNBERT)},
    modernbert_names,
    architectures={"modernbert": "ModernBertForSequenceClassification"},
)


# -- decoders -----------------------------------------------------------------------------------------


def without_head(base: ConfigMap) -> ConfigMap:
    """A base's map whose way back does not see the head's keys, which its [model] does not have."""
    export_extra = base.export_extra
    if export_extra is None:
        return base
    return replace(
        base,
        export_extra=lambda model: export_extra({key: value for key, value in model.items() if key not in HEAD_KEYS}),
    )


def on_decoder(family: str, base: HuggingFaceFamily) -> HuggingFaceFamily:
    """The base's maps without its output layer, and a `score` matrix."""

    def names(config: Any) -> NameMap:
        below = base.name_map(config)
        # transformers' classes have `score` in place of the LM head.
        kept: list[Rule] = [rule for rule in below.rules if rule.ours != "output_layer.weight"]
        head = Same("classification_head.weight", "score.weight")
        return NameMap([*kept, head], config.num_layers, ignored=below.ignored)

    maps = {kind: with_classes(without_head(mapped)) for kind, mapped in base.model_types.items()}
    # Without the base's copies: no LM head repeats the embedding here.
    stems = {kind: re.sub("(LMHeadModel|ForCausalLM)$", "", name) for kind, name in base.architectures.items()}
    classes = {kind: f"{stem}ForSequenceClassification" for kind, stem in stems.items()}
    return HuggingFaceFamily(family, maps, names, base.model_type_of, architectures=classes)


GPT_CLASSIFICATION = on_decoder("gpt_classification", GPT)
LLAMA_CLASSIFICATION = on_decoder("llama_classification", LLAMA)
