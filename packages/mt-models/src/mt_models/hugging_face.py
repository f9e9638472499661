"""What the Hugging Face maps of all families share: which `model_type` is which family, configurations, tensors.

A family declares one `HuggingFaceFamily`. Everything here reads that declaration in both directions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mt_core.config.schema import ModelConfig
from mt_core.config_map import PARTS, ConfigMap, Fixed, require_known
from mt_core.errors import CheckpointError, ConfigError
from mt_core.name_map import NameMap
from mt_core.nn.layout import LayoutModule, parameter_layouts
from mt_core.parallel.context import ParallelContext
from mt_models.kept_token_ids import KEY as KEPT_IDS
from mt_models.kept_token_ids import OF_GENERATION as IDS_OF_GENERATION
from mt_models.kept_token_ids import kept_ids, still_null, token_ids, with_kept_ids

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Preprocessor:
    """The contents of preprocessor_config.json, by which processors make images for a model.

    write: from the model's configuration and the keys of its [data].
    read: the keys of [data] that make the same images, from the model's configuration and the contents; raises
    ConfigError for what the model or mt cannot do.
    """

    write: Callable[[Any, Mapping[str, Any]], Mapping[str, Any]]
    read: Callable[[Any, Mapping[str, Any]], Mapping[str, Any]]


@dataclass(frozen=True)
class HuggingFaceFamily:
    """How a family is mapped to Hugging Face's format.

    family: `model.family`. model_types: Hugging Face's `model_type` -> the map of its configuration.
    name_map: the names and operations for a model of this configuration. model_type_of: the type in which a
    configuration is written; needed when there are several, and raises ConfigError for one that none can express.
    copies: tensors that repeat another one in the external state (tied embeddings), name -> the one it repeats.
    spelling: the name that the name map uses for a tensor, from its name in any version.
    architectures: model_type -> the Python class that other programs look for in config.json.
    preprocessor: how images are made for a model of this configuration; None where the family takes none.
    held: the configuration of what a file holds, from that of config.json and the names of its tensors: where the class
    leaves layers out that config.json counts.
    left_out_copies: tensors that are left out since another one is used in their place, name -> that one; a conversion
    says where the two differ.
    ids_read: paths of ids of tokens within parts of config.json that other keys of [model] have than kept_token_ids.
    within: model_type that is written as a part of another one -> the path of the part.
    with_one_end: types whose class takes one eos_token_id in config.json and no list, which generation_config.json has.
    """

    family: str
    model_types: Mapping[str, ConfigMap]
    name_map: Callable[[Any], NameMap]
    model_type_of: Callable[[Any], str] | None = None
    copies: Callable[[Any], Mapping[str, str]] = lambda config: {}
    spelling: Callable[[Any, str], str] = lambda config, name: name
    architectures: Mapping[str, str] = field(default_factory=dict)
    preprocessor: Preprocessor | None = None
    held: Callable[[Mapping[str, Any], Iterable[str]], Mapping[str, Any]] = lambda external, names: external
    left_out_copies: Callable[[Any], Mapping[str, str]] = lambda config: {}
    ids_read: tuple[tuple[str, ...], ...] = ()
    within: Mapping[str, str] = field(default_factory=dict)
    with_one_end: tuple[str, ...] = ()

    def read_config(self, external: Mapping[str, Any]) -> dict[str, Any]:
        """Keys of [model], `family` included, from the contents of config.json.

        Raises ConfigError for a model_type of another family, an unknown field or an unsupported value.
        """
        kind = require_known("model_type", str(external.get("model_type")), self.model_types)
        chosen = self.model_types[kind]
        values = {"family": self.family, **self._imported(chosen, external)}
        kept = self._kept_ids(kind, external) if chosen.written else {}
        return {**values, KEPT_IDS: kept} if kept else values

    def _imported(self, chosen: ConfigMap, external: Mapping[str, Any]) -> dict[str, Any]:
        """Keys of [model]. Raises ConfigError, which names the parts that are null where what they stand for does not
        fit."""
        try:
            return chosen.import_value(external)
        except ConfigError as error:
            null = (key for key in PARTS if key in external and external[key] is None)
            part = next((key for key in null if key in str(error) and f"{key}=null" not in str(error)), None)
            if part is None:
                raise
            raise ConfigError(
                f"{part}=null stands for the defaults of that part, which do not fit: {error}; {part} can be a JSON "
                "object with the keys of that part"
            ) from error

    def _kept_ids(self, kind: str, external: Mapping[str, Any]) -> dict[str, Any]:
        part, chosen = self.within.get(kind), self.model_types[kind]
        read = {f.theirs for f in chosen.fields} | {*chosen.spellings, *chosen.import_extra_keys}
        kept = kept_ids(external, {*((key,) for key in read), *self.ids_read}, chosen.ignored)
        return kept if part is None or not kept else {part: kept}

    def left_out_ids(self, external: Mapping[str, Any]) -> list[str]:
        """A sentence about ids of tokens that a file with further parts names and the type that is written has not."""
        kind = str(external.get("model_type"))
        if self.model_types[kind].written:
            return []
        left_out = [
            f"{'.'.join(path)}={value}"
            for path, value in token_ids(external)
            if value is not None and ".".join(path).removeprefix("text_config.") not in IDS_OF_GENERATION
        ]
        why = f"left out, since of this {kind} the text alone is read and written as a type without such keys"
        return [f"config.json: {why}: {', '.join(left_out)}"] if left_out else []

    def left_out_experts(self, external: Mapping[str, Any], config: ModelConfig) -> list[str]:
        """A sentence about fields of experts that a file names and that are not in the one that is written, since no
        layer of the model has experts."""
        text = getattr(config, "decoder", config)
        if getattr(text, "moe", None) is not None:
            return []
        ignored = self.model_types[str(external.get("model_type"))].ignored
        written = self.write_config(config)
        left_out = [
            f"{'.'.join(path)}={value!r:.80}"
            for path, value in fields_of_experts(external)
            if path[0] not in ignored and value is not None and _at(written, path) != value
        ]
        why = "left out, since no layer has experts and nothing is computed with them"
        return [f"config.json: {why}: {', '.join(left_out)}"] if left_out else []

    def ids_of_generation(self, external: Mapping[str, Any]) -> Mapping[str, Any]:
        """config.json with the ids that a text begins, ends and is padded with at its top, where a type of which the
        text alone is read has them in `text_config`."""
        text = external.get("text_config")
        if self.model_types[str(external.get("model_type"))].written or not isinstance(text, Mapping):
            return external
        stated = {key: text[key] for key in IDS_OF_GENERATION if external.get(key) is None and key in text}
        return {**external, **stated}

    def write_config(self, config: ModelConfig) -> dict[str, Any]:
        """The contents of config.json for a model with a known vocabulary."""
        kind = self.model_type(config)
        chosen = self.model_types[kind]
        external = chosen.export_value(config.model_dump(mode="json"))
        named = {"architectures": [self.architectures[kind]]} if kind in self.architectures else {}
        kept = still_null(config.kept_token_ids, external, self.ids_read)
        return with_kept_ids({**named, "model_type": kind, **external}, kept, kind)

    def model_type(self, config: ModelConfig) -> str:
        if self.model_type_of is not None:
            return self.model_type_of(config)
        (only,) = self.model_types
        return only


_OF_EXPERTS = re.compile(
    r"(?!.*(implementation|dtype)).*expert.*|moe_(intermediate_size|k|top_?k)|n_group|topk_group|top_k_experts"
)


def fields_of_experts(
    external: Mapping[str, Any], within: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """(path, value) of numbers and sizes of experts in a config.json and in the configurations of its texts."""
    for key, value in external.items():
        if key in PARTS and isinstance(value, Mapping):
            yield from fields_of_experts(value, (*within, key))
        elif _OF_EXPERTS.fullmatch(key):
            yield (*within, key), value


def _at(external: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    value: Any = external
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def load_reference(model: nn.Module, tensors: Tensors, family: HuggingFaceFamily) -> None:
    """Copy the tensors of a Hugging Face state dict into a model built from the same configuration.

    Under a layout of several ranks each takes its slice. Raises CheckpointError for tensors that are missing, left
    over, of another shape, or named as copies of a tensor from which they differ.
    """
    # In order: published names of all tensors; the form of each rule that these names have (a file may hold
    # experts in one tensor or one by one); copies of tied tensors compared and set aside; the rest matched
    # with the parameters one to one. Only then is a parameter written.
    config, ctx = _config_of(model), _context_of(model)
    names, layouts = family.name_map(config), parameter_layouts(model)
    tensors = {family.spelling(config, name): tensor for name, tensor in tensors.items()}
    names = names.reading(tensors)
    copies = family.copies(config)
    require_copies(tensors, copies)
    names.check(layouts, [name for name in tensors if name not in copies])
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in names.import_value(tensors.__getitem__):
            # The canonical shape: vocabulary without padding, all ranks' rows.
            # to_local cuts this rank's slice and pads it.
            if tuple(tensor.shape) != layouts[name].shape:
                raise CheckpointError(
                    f"{name} has the shape {list(tensor.shape)} in the checkpoint; the configuration makes it "
                    f"{list(layouts[name].shape)}"
                )
            parameters[name].copy_(layouts[name].to_local(tensor, ctx))


def to_reference(model: nn.Module, family: HuggingFaceFamily) -> dict[str, Tensor]:
    """The Hugging Face state dict of a model that one process holds, copies of tied tensors left out."""
    layouts = parameter_layouts(model)
    # Without a context: there are no other ranks to gather from. mt-ckpt writes sharded models.
    ours = {name: layouts[name].to_canonical(parameter.detach()) for name, parameter in model.named_parameters()}
    return dict(family.name_map(_config_of(model)).export_value(ours))


def require_copies(tensors: Tensors, copies: Mapping[str, str]) -> None:
    """Raises CheckpointError if a tensor that should repeat another one holds something else."""
    for name, original in copies.items():
        # Files may leave a copy out, or hold it. One that differs means that the two were trained apart.
        if name in tensors and original in tensors and not torch.equal(tensors[name], tensors[original]):
            raise CheckpointError(
                f"the configuration ties {name} to {original}, but the two differ in the checkpoint; "
                "set tie_word_embeddings to false in its config.json if the first is to be used"
            )


def tied_output(config: Any) -> Mapping[str, str]:
    """`copies` of decoders: the LM head repeats the embedding when the two are tied."""
    if config.untie_embeddings_and_output_weights:
        return {}
    return {"lm_head.weight": "model.embed_tokens.weight"}


def per_layer(names: Iterable[str], num_layers: int) -> list[str]:
    """Names with `{i}` expanded for every layer."""
    return [name.replace("{i}", str(i)) for name in names for i in range(num_layers)]


def require_value(config: ModelConfig, key: str, values: tuple[Any, ...], kind: str) -> None:
    """Raises ConfigError unless a key of [model] has a value that the external format can express."""
    value = getattr(config, key)
    if value not in values:
        legal = " or ".join(str(x) for x in values)
        raise ConfigError(f"model.{key}={value} cannot be written as a Hugging Face {kind}; it can be {legal}")


def _config_of(model: nn.Module) -> ModelConfig:
    config = model.config
    assert isinstance(config, ModelConfig)
    return config


def _context_of(model: nn.Module) -> ParallelContext:
    # All layers of a model are built with one context.
    return next(module.ctx for module in model.modules() if isinstance(module, LayoutModule))


# -- configuration fields that mean the same in every family ---------------------------------------

FURTHER_ACTIVATIONS: Mapping[str, str] = {
    "gelu_python": "gelu",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "swish": "silu",
}
"""Further names of transformers for activations -> ours. Each computes the same, and none is written."""
GELU_TANH = (
    "gelu_pytorch_tanh",
    "gelu_new",
    *(key for key, ours in FURTHER_ACTIVATIONS.items() if ours == "gelu_tanh"),
)
"""Names of one activation; the first is written."""

CLASS_KEYS = ("id2label", "label2id", "num_labels")
DEFAULT_CLASSES = 2
"""The number of classes of a configuration that does not say it."""


def num_classes(external: Mapping[str, Any]) -> int:
    """From the list of labels, or the bare number that older files have. Raises ConfigError where the two differ, and
    for no classes."""
    labels, number = external.get("id2label"), external.get("num_labels")
    classes = int(number if number is not None else DEFAULT_CLASSES) if labels is None else len(labels)
    if classes < 1 or number not in (None, classes):
        raise ConfigError(
            f"id2label has {'no list' if labels is None else len(labels)} and num_labels={number}: a classifier has at "
            "least one class, and where both are given they are as many"
        )
    return classes


SPECIAL_IDS = "ids of special tokens belong to the tokenizer; which positions count is the loss mask's"
OF_GENERATION = "a default of text generation; the weights do not depend on it"
OF_PYTHON = "how the Python class answers, not what it computes"
OF_HEADS = "of classification heads"

IGNORED: Mapping[str, str] = {
    "model_type": "chose this map",
    "transformers_version": "which version wrote the file",
    "architectures": "the Python class; the family is model_type",
    "_name_or_path": "where the file came from",
    "_commit_hash": "where the file came from",
    "auto_map": "names Python code on a hub, which is never run",
    "dtype": "dtype of the stored weights; precision.dtype chooses that of training",
    "torch_dtype": "dtype of the stored weights; precision.dtype chooses that of training",
    "attn_implementation": "which kernel computed attention; model.attention_backend chooses one",
    "_attn_implementation": "which kernel computed attention; model.attention_backend chooses one",
    "_attn_implementation_autoset": "which kernel computed attention; model.attention_backend chooses one",
    **dict.fromkeys(
        ("experts_implementation", "_experts_implementation"),  # Transformers 5.0 writes it for dense models too
        "which kernel multiplied the experts' matrices; model.moe.moe_grouped_gemm chooses one",
    ),
    "allow_global_per_layer_attribute_access": "which attributes the Python class lets be read",
    "use_cache": "decoding has a cache whenever it is asked for one",
    "output_past": "decoding has a cache whenever it is asked for one",
    "cache_implementation": OF_GENERATION,
    "chunk_size_feed_forward": "computes the same feed-forward in pieces",
    "tie_encoder_decoder": "of a class that joins two models; no family here is one",
    "cross_attention_hidden_size": "of a class that joins two models; no family here is one",
    "add_cross_attention": "layers beside the model's own, whose tensors are refused by name",
    "is_encoder_decoder": "of the class, which the type decides",
    "use_bfloat16": "of models in TensorFlow, which no version reads any more",
    "tf_legacy_loss": "of models in TensorFlow, which no version reads any more",
    "pretraining_tp": "splits the same products into chunks, which changes rounding only",
    "gradient_checkpointing": "saves memory in training; recompute.recompute_granularity does here",
    "transformers.js_config": "of a runtime for browsers",
    "custom_pipelines": "names Python code beside the weights, which is never run",
    "tokenizer_class": "of the tokenizer, whose files say it",
    "unsloth_version": "which tool wrote the file",
    "unsloth_fixed": "which tool wrote the file",
    **dict.fromkeys(
        ("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id", "decoder_start_token_id"),
        SPECIAL_IDS,
    ),
    **dict.fromkeys(("output_hidden_states", "output_attentions", "return_dict", "torchscript"), OF_PYTHON),
    **dict.fromkeys(("problem_type", "id2label", "label2id", "num_labels", "_num_labels", "finetuning_task"), OF_HEADS),
    **dict.fromkeys(
        (
            "max_length", "min_length", "max_new_tokens", "do_sample", "early_stopping", "num_beams",
            "num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p", "typical_p",
            "repetition_penalty", "length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size",
            "bad_words_ids", "num_return_sequences", "output_scores", "return_dict_in_generate",
            "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values", "suppress_tokens",
            "begin_suppress_tokens", "exponential_decay_length_penalty", "task_specific_params", "prefix",
        ),
        OF_GENERATION,
    ),
}  # fmt: skip
"""Fields of every Hugging Face configuration that change nothing that a model computes."""

NOT_A_CHOICE: tuple[Fixed, ...] = (
    Fixed("is_decoder", (True, False), written=False),
    Fixed("pruned_heads", ({}, None), written=False),
)
"""Fields of every Hugging Face configuration that models leave at these values."""
