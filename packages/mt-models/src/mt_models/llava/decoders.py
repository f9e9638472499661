"""The decoders that LLaVA can have in Hugging Face's format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mt_core.config_map import require_known
from mt_core.errors import ConfigError
from mt_core.specs import Lazy
from mt_models.hugging_face import HuggingFaceFamily

DECODERS: Mapping[str, Lazy[HuggingFaceFamily]] = {
    name: Lazy(f"mt_models.{name}.hugging_face:HUGGING_FACE") for name in ("llama", "mistral", "qwen", "gemma", "gpt")
}
"""Family -> its maps. Others can be trained as LLaVA's decoder, but not exported."""

LEFT_OUT: Mapping[str, Mapping[str, Any]] = {
    "llama": {
        "vocab_size": 32000,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "intermediate_size": 11008,
    },
}
"""model_type -> what published files of LLaVA leave out, since it is the type's default."""


def decoder_maps(family: str) -> HuggingFaceFamily:
    """Raises ConfigError for a family that cannot be written as a part of LLaVA."""
    if family not in DECODERS:
        raise ConfigError(
            f"model.language_model.family={family} cannot be written as the decoder of a Hugging Face llava; it can "
            f"be {', '.join(DECODERS)}"
        )
    return DECODERS[family].load()


def read_decoder(external: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of [model.language_model] from `text_config`."""
    kinds = {kind: maps for maps in _all() for kind in maps.model_types}
    kind = require_known("text_config.model_type", str(external.get("model_type", "llama")), kinds)
    return kinds[kind].read_config({"model_type": kind, **LEFT_OUT.get(kind, {}), **external})


def _all() -> Iterator[HuggingFaceFamily]:
    return (maps.load() for maps in DECODERS.values())
