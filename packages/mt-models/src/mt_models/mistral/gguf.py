"""Mistral in GGUF, where it is a Llama: such a file is read as one."""

from __future__ import annotations

from typing import Any

from mt_core.name_map import NameMap
from mt_models.blocks.gguf_decoder import (
    DENSE,
    PRE_NORMS,
    attention,
    decoder_map,
    feed_forward,
    frequency_factors,
    norms,
    read_shape,
    refuse_window,
    tied_output,
    write_shape,
)
from mt_models.gguf import External, GGUFArchitecture, GGUFFamily
from mt_models.mistral.config import MistralConfig


def name_map(config: MistralConfig) -> NameMap:
    return decoder_map(config, [*norms(PRE_NORMS), *attention(config, neighbours=True), *feed_forward()])


def write(external: External) -> dict[str, Any]:
    refuse_window(external, "llama")
    return write_shape(external)


MISTRAL = GGUFArchitecture(
    name="llama",
    model_type="mistral",
    keys=DENSE,
    read=read_shape,
    write=write,
    fits=lambda metadata: False,
    further=frequency_factors,
)

GGUF = GGUFFamily(family="mistral", architectures=(MISTRAL,), name_map=name_map, copies=tied_output)
