"""Hugging Face's image processors, whose file is preprocessor_config.json, and the keys of [data] that do the same.

A field that a file leaves out has the value of the family's published files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mt_core.config_map import require_known
from mt_core.errors import ConfigError
from mt_models.llava.config import VisionLanguageConfig

RESAMPLE = {"3": "bicubic", "1": "lanczos"}
"""Pillow's numbers of filters -> data.resample."""
FIXED: Mapping[str, Any] = {"do_resize": True, "do_rescale": True, "do_normalize": True, "rescale_factor": 1 / 255}
"""Fields that every processor has."""
COLOURS = ("image_mean", "image_std")


def trained_keys(
    config: VisionLanguageConfig, data: Mapping[str, Any], one_view: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The keys of [data] by which the images of a run were made; as published where it had none.

    one_view: keys in place of the published ones for a data set that does not cut images.
    """
    keys = config.image_data_keys
    # The run had no images in its data (it was converted, or trained on text): the published values are all there is.
    if COLOURS[0] not in data:
        return keys
    return {**keys, **(one_view or {}), **{key: data[key] for key in keys if data.get(key) is not None}}


def written_processor(image_processor: str, processor: str, keys: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that every processor has. image_processor, processor: names of classes."""
    numbers = {name: int(number) for number, name in RESAMPLE.items()}
    return {
        "image_processor_type": image_processor,
        "processor_class": processor,
        "do_convert_rgb": True,
        **FIXED,
        "resample": numbers[keys["resample"]],
        **{key: keys[key] for key in COLOURS},
    }


def read_processor(
    config: VisionLanguageConfig, external: Mapping[str, Any], fixed: Mapping[str, Any]
) -> dict[str, Any]:
    """[data] as the family's published files have it, with the colours and the filter of this file. Conversations are
    put into text by the tokenizer's own template.

    fixed: fields that can have one value. Raises ConfigError for others.
    """
    require_fields(external, {**FIXED, **fixed})
    keys = {"dataset_type": "image_text", "chat_template": "tokenizer", **config.image_data_keys}
    keys |= {key: list(external[key]) for key in COLOURS if external.get(key) is not None}
    if external.get("resample") is not None:
        keys["resample"] = RESAMPLE[require_known("resample", str(external["resample"]), RESAMPLE)]
    return keys


def require_fields(external: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raises ConfigError for a field that is given with another value."""
    for key, value in wanted.items():
        actual = external.get(key)
        if actual is not None and actual != value:
            raise ConfigError(f"preprocessor_config.json: {key}={actual!r} does not fit the model; it can be {value!r}")


def square(size: Any) -> Any:
    """A size in pixels as a pair, from any of the forms that files have: a number, or a table of sides."""
    if not isinstance(size, Mapping):
        return (size, size)
    edge = size.get("shortest_edge", size.get("longest_edge"))
    return (size.get("height", edge), size.get("width", edge))


def require_size(config: VisionLanguageConfig, key: str, size: Any) -> None:
    """Raises ConfigError for another size than that of the tower's images. None: the file has no such field."""
    wanted = (config.vision_model.img_h, config.vision_model.img_w)
    if size is not None and square(size) != wanted:
        raise ConfigError(
            f"preprocessor_config.json: {key}={size!r} does not fit the model, whose tower takes images of "
            f"{wanted[0]} by {wanted[1]} pixels"
        )
