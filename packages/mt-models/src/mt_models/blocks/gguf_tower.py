"""Decoders of models with an image tower in GGUF: llama.cpp has the tower in a file of its own, which mt neither reads
nor writes. A file is read as the decoder's family, whose positions are the same in texts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from mt_core.errors import CheckpointError
from mt_core.name_map import NameMap, Rule
from mt_models.blocks.gguf_decoder import (
    DENSE,
    PRE_NORMS,
    QK_NORMS,
    attention,
    decoder_map,
    feed_forward,
    mixed_feed_forward,
    norms,
    write_shape,
)
from mt_models.gguf import External, Metadata

log = logging.getLogger(__name__)
DECODER = "language_model."


@dataclass(frozen=True)
class LeftOut(Rule):
    """A parameter that the file does not hold."""

    theirs: str | tuple[str, ...] = ()

    def import_value(self, tensors: Sequence[Tensor]) -> Tensor:
        raise CheckpointError(f"{self.ours} is in a file of its own in GGUF, which is not read")

    def export_value(self, tensor: Tensor) -> Sequence[Tensor]:
        return []


def decoder_beside_tower(decoder: Any, tower: Iterable[Rule]) -> NameMap:
    """decoder: configuration of a Qwen, dense or with experts. tower: rules, in any format, of all other parameters."""
    layer = [
        *norms(PRE_NORMS),
        *(norms(QK_NORMS) if decoder.qk_layernorm else ()),
        *attention(decoder, bias=decoder.add_qkv_bias),
        *(feed_forward() if decoder.moe is None else mixed_feed_forward(decoder)),
    ]
    names = decoder_map(decoder, layer)
    inside = [replace(rule, ours=DECODER + rule.ours) for rule in names.rules]
    return NameMap([*inside, *(LeftOut(rule.ours) for rule in tower)], 0, names.ignored)


def write_decoder(text: External, architecture: str) -> dict[str, Any]:
    """Keys and values of a decoder from its config.json, where that stands beside or within the whole one's."""
    sections = (text.get("rope_scaling") or {})["mrope_section"]
    log.warning(
        "GGUF of the architecture %s holds the decoder alone: llama.cpp reads the image tower from another file "
        "(mmproj), such as that of the model this one was trained from, if the tower was frozen",
        architecture,
    )
    return {
        **{key.theirs: key.kind(text[key.ours]) for key in DENSE},
        **write_shape(_without_sections(text)),
        # Pairs of channels that turn with time, height, width, and none with a fourth.
        "rope.dimension_sections": [*sections, 0],
    }


def read_as_text(architecture: str, read: Callable[[Metadata], dict[str, Any]]) -> Callable[[Metadata], dict[str, Any]]:
    """The reader of a decoder's family for a file of a model with an image tower, which says what is left out."""

    def read_decoder(metadata: Metadata) -> dict[str, Any]:
        log.warning(
            "GGUF of the architecture %s holds the decoder of a model with an image tower: it is read as a model of "
            "texts, without the tower (mmproj) and the sections of its positions (rope.dimension_sections)",
            architecture,
        )
        return read(metadata)

    return read_decoder


def _without_sections(text: External) -> External:
    """The scaling of frequencies, which files of these types have beside the sections."""
    scaling = {key: value for key, value in text["rope_scaling"].items() if not key.startswith("mrope")}
    kind = scaling.get("rope_type", scaling.pop("type", "default"))
    usual = {"mrope": "default"}.get(kind, kind)
    return {**text, "rope_scaling": None if usual == "default" else {**scaling, "rope_type": usual}}
