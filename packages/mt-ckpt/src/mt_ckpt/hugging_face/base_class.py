"""Folders that the class without a head wrote, such as Qwen3Model: names without the prefix `model.`, and no LM head.

Models of embeddings are published so (Qwen3-Embedding, what sentence-transformers saves).
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

from mt_ckpt.files.external_tensors import ExternalTensors
from mt_ckpt.hugging_face.tensors import Renamed

log = logging.getLogger(__name__)
PREFIX = "model."
EMBEDDINGS = frozenset({"embed_tokens.weight", "language_model.embed_tokens.weight"})
"""Names of the embeddings of a text model, and of one with pictures."""
HEADS = ("lm_head.", "score.", "classifier.")
"""Beginnings of names that have the prefix in no class."""
TIED = "tie_word_embeddings"


def is_without_prefix(names: Collection[str]) -> bool:
    """Whether names of decoders, whose class with a head writes them behind `model.`, stand without it."""
    return not EMBEDDINGS.isdisjoint(names) and not any(name.startswith(PREFIX) for name in names)


def with_prefix(tensors: ExternalTensors) -> ExternalTensors:
    """The same under the names of the class with a head."""
    if not is_without_prefix(tensors.infos):
        return tensors
    return Renamed(tensors, {name if name.startswith(HEADS) else PREFIX + name: name for name in tensors.infos})


def without_head(external: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    """config.json of a folder of these names (as the files have them), where the embeddings are used in place of an LM
    head that it does not have; a warning says so."""
    text = external.get("text_config")
    tables = {"": external, "text_config.": text if isinstance(text, Mapping) else {}}
    untied = [within for within, table in tables.items() if table.get(TIED) is False]
    if not untied or not is_without_prefix(names) or any(name.startswith(HEADS) for name in names):
        return external
    log.warning(
        "config.json: %s%s=false, and the folder, which a class without an LM head wrote, has none: the embeddings are "
        "used in its place. Vectors of texts are those of the published model; texts that it continues mean nothing.",
        untied[-1],
        TIED,
    )
    changed = {**external, TIED: True} if "" in untied else dict(external)
    if isinstance(text, Mapping) and "text_config." in untied:
        changed["text_config"] = {**text, TIED: True}
    return changed
