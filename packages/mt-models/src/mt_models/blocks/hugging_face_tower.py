"""Decoders within files of images and text in Hugging Face's format: the decoder alone is read, and written under a
type of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mt_core.config_map import ConfigMap
from mt_core.errors import ConfigError
from mt_models.hugging_face import IGNORED

OF_PICTURES = "of the image tower, which this family does not have: text alone is computed"
TOWER_KEYS = ("vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


def import_placeholders(
    external: Mapping[str, Any], defaults: Mapping[str, int], vocab_size: int, padding: int = 0
) -> dict[str, Any]:
    """`PlaceholderKeys` from the outer configuration. defaults: of keys with such tokens. padding: the token as which
    they are embedded. An id beyond the vocabulary is in no text."""
    ids = {external.get(key, default) for key, default in defaults.items()} - {None}
    tokens = sorted(number for number in ids if 0 <= number < vocab_size)
    return {"placeholder_token_ids": tokens, "placeholder_embedding_id": padding} if tokens else {}


def decoder_within(
    kind: str,
    decoder: ConfigMap,
    written_as: str,
    further: tuple[str, ...] = (),
    placeholders: Mapping[str, int] | None = None,
) -> ConfigMap:
    """The map of a type that has the decoder's configuration in `text_config`. written_as: the types of the decoder
    alone, for messages. further: keys of the image tower beside those that all such types have. placeholders: keys of
    tokens that the class embeds as token 0 in a text without images, and their defaults."""
    placeholders = placeholders or {}
    of_tower = [key for key in (*TOWER_KEYS, *further) if key not in placeholders]

    def import_extra(external: Mapping[str, Any]) -> dict[str, Any]:
        text = dict(external.get("text_config") or {})
        # The outer class ties its LM head by its own key.
        text["tie_word_embeddings"] = external.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
        values = decoder.import_value(text)
        return {**values, **import_placeholders(external, placeholders, values["vocab_size"])}

    def export_extra(model: Mapping[str, Any]) -> dict[str, Any]:
        raise ConfigError(f"a decoder without its image tower is written as {written_as}")

    return ConfigMap(
        architecture=kind,
        fields=(),
        ignored={**IGNORED, **dict.fromkeys(of_tower, OF_PICTURES)},
        import_extra=import_extra,
        import_extra_keys=("text_config", "tie_word_embeddings", *placeholders),
        export_extra=export_extra,
        written=False,
    )
