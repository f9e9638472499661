"""Models with scores in Hugging Face's format: ForSequenceClassification and ForTokenClassification."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mt_core.config.schema import Config
from mt_core.config_map import ConfigMap
from mt_core.errors import ConfigError
from mt_core.name_map import NameMap, Rule, Same
from mt_models.hugging_face import CLASS_KEYS, HuggingFaceFamily, num_classes
from mt_tune.reward_models.config import ScoreHeadConfig
from mt_tune.reward_models.model import NAME

SEQUENCE = frozenset(
    (
        *("gpt2", "gpt_neox", "gpt_bigcode", "bloom", "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen2_moe"),
        *("qwen3_moe", "gemma2", "gemma3_text", "phi3", "olmo2", "olmo3", "deepseek_v2", "deepseek_v3", "exaone4"),
        *("hunyuan_v1_dense", "seed_oss", "smollm3", "ministral3", "gpt_oss"),
    )
)
"""model_type of the classes ForSequenceClassification of transformers that read `score` at the last token."""
TOKEN = SEQUENCE - {"gemma3_text", "olmo2", "olmo3", "deepseek_v2", "hunyuan_v1_dense"}
"""The same of ForTokenClassification."""
STEMS = {"gemma3_text": "Gemma3Text"}
"""Beginnings of classes that are not those of the class for text."""
CLASSIFIER = frozenset({"gpt2", "gpt_neox", "gpt_bigcode", "bloom"})
"""Types whose class for tokens calls its head `classifier`."""
HEADS = frozenset({"score", "classifier"})
CLASS = re.compile(r"For(Sequence|Token)Classification$")
HEADS_OF_FAMILIES = ("_classification", "_multiple_choice")
"""Ends of the names of families that have a head of their own."""


def written_family(family: Any, config: Config) -> HuggingFaceFamily | None:
    """See `mt_ckpt.variant_specs.WriteVariant`."""
    head = config.section(ScoreHeadConfig)
    if not head.is_on:
        return None
    if not isinstance(family, HuggingFaceFamily):
        raise ConfigError(f"model.family={config.model.family} has no names of a score head in Hugging Face's format")
    kind = family.model_type(config.model)
    classes = SEQUENCE if head.type == "sequence" else TOKEN
    if kind not in classes:
        raise ConfigError(
            f"transformers has no {class_of(family, kind, head.type)}, which a {kind} with score_head.type={head.type} "
            f"would be; it has one of {', '.join(sorted(classes))}"
        )
    return scored_family(family, head.type, head.outputs)


def read_family(families: Sequence[Any], external: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]] | None:
    """See `mt_ckpt.variant_specs.ReadVariant`."""
    listed, kind = external.get("architectures"), str(external.get("model_type"))
    named = CLASS.search(str(listed[0])) if isinstance(listed, list) and listed else None
    if named is None or kind not in SEQUENCE or external.get("problem_type") == "regression":
        return None
    type_ = named[1].lower()
    base = next((f for f in families if kind in f.model_types and not f.family.endswith(HEADS_OF_FAMILIES)), None)
    # Several scores of a text are classes, which families with heads of their own choose from.
    outputs = num_classes(external)
    if base is None or (type_ == "sequence" and outputs != 1):
        return None
    section = {"score_head": {"type": type_, "num_labels": outputs}}
    return scored_family(base, type_, outputs), section


def class_of(family: HuggingFaceFamily, kind: str, type_: str) -> str:
    stem = STEMS.get(kind) or re.sub("(LMHeadModel|ForCausalLM)$", "", family.architectures.get(kind, kind))
    return f"{stem}For{type_.capitalize()}Classification"


def scored_family(family: HuggingFaceFamily, type_: str, outputs: int) -> HuggingFaceFamily:
    """The family's maps without its LM head, and with a head of scores."""

    def name_map(config: Any) -> NameMap:
        below = family.name_map(config)
        kept: list[Rule] = [rule for rule in below.rules if not rule.ours.startswith("output_layer.")]
        theirs = "classifier" if type_ == "token" and family.model_type(config) in CLASSIFIER else "score"
        parts = ("weight", "bias") if type_ == "token" else ("weight",)
        head = [Same(f"{NAME}.{part}", f"{theirs}.{part}") for part in parts]
        return NameMap([*kept, *head], config.num_layers, ignored=below.ignored)

    return replace(
        family,
        model_types={kind: _with_labels(mapped, outputs) for kind, mapped in family.model_types.items()},
        name_map=name_map,
        copies=lambda config: {},
        # Names of the head have no prefix, which some versions leave out of others.
        spelling=lambda config, name: name if name.partition(".")[0] in HEADS else family.spelling(config, name),
        architectures={kind: class_of(family, kind, type_) for kind in family.architectures},
    )


def _with_labels(base: ConfigMap, outputs: int) -> ConfigMap:
    """The map of a configuration that says how many scores there are. Classes of transformers read no other key of it:
    their dropout is that of training."""

    def export_extra(model: Mapping[str, Any]) -> dict[str, Any]:
        below = base.export_extra(model) if base.export_extra is not None else {}
        names = [f"LABEL_{number}" for number in range(outputs)]
        labels = {"id2label": dict(enumerate(names)), "label2id": {name: i for i, name in enumerate(names)}}
        return {**below, **labels}

    ignored = {**base.ignored, **dict.fromkeys(CLASS_KEYS, "read as score_head.num_labels")}
    return replace(base, ignored=ignored, export_extra=export_extra)
