"""Model and tokenizer of the checkpoint that checkpoint.load names, or of those of checkpoint.load_parts, as a layer
between preset and file.

Keys of a file and of --set win, as over a preset. A section for which they choose another family (another tokenizer)
than the checkpoint has takes nothing from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from mt_core.checkpoint_lookup import CheckpointParts, open_start
from mt_core.checkpoint_specs import SupportsFilesFolder
from mt_core.config.layers import Layer, Merged, merge_layers
from mt_core.config.schema import CORE_SECTIONS
from mt_core.config.sections import build_sections, section_type
from mt_core.errors import CheckpointError, ConfigError, MtError, Problems
from mt_core.paths import as_path
from mt_core.specs import MODELS, TOKENIZERS

if TYPE_CHECKING:
    from mt_core.checkpoint_specs import CheckpointReader
    from mt_core.plugins import PluginHost
    from mt_core.specs import StartsFrom

FROM_CHECKPOINT = ("model", "tokenizer")


def with_checkpoint_layer(
    layers: Sequence[Layer], names: Iterable[str], host: PluginHost, *, preset_is_default: bool
) -> list[Layer]:
    """The layers with that of checkpoint.load or load_parts, if one is set and has some of the sections `names`.

    preset_is_default: the preset was not requested; the checkpoint's model and tokenizer replace its own.
    Raises CheckpointError when nothing else names the model, or the tokenizer, and there is no checkpoint to read.
    """
    load = _start(merge_layers(layers, Problems()))
    if load is None:
        return list(layers)
    # With the default preset's sections, which are dropped only for what the checkpoint has in fact.
    whole = list(layers)
    if preset_is_default:
        layers = [_without(layer, FROM_CHECKPOINT) if layer.is_preset else layer for layer in layers]
    written = merge_layers([layer for layer in layers if not layer.is_preset], Problems())
    # A run's own config.json has every key: its checkpoint need not be opened.
    wanted = [name for name in FROM_CHECKPOINT if name in names and not _is_complete(name, written, host)]
    chosen = merge_layers(layers, Problems())
    if not wanted or _may_be_absent(load, wanted, chosen):
        return list(layers)
    stored = _stored_sections(load, host)
    # A family that starts from another family's weights (Retro from GPT) takes that one's shape.
    base = _base_of(_value(chosen, "model", "family"), stored.get("model", {}).get("family"), host)
    taken = {name: _taken(name, chosen, stored[name], base) for name in wanted if name in stored}
    values = {name: section for name, section in taken.items() if section is not None}
    if preset_is_default:  # the checkpoint's sections replace it
        layers = [_without(layer, values) if layer.is_preset else layer for layer in whole]
    if base is not None and "model" in values:
        layers = [_without_base_keys(layer, base, host) if layer.is_preset else layer for layer in layers]
    presets = [layer for layer in layers if layer.is_preset]
    origin = load if isinstance(load, str) else " and ".join(load.values())
    # Above presets, below file, program and --set.
    return [*presets, Layer(f"checkpoint {origin}", values), *layers[len(presets) :]]


def _start(merged: Merged) -> str | dict[str, str] | None:
    """checkpoint.load or load_parts. Raises ConfigError when both are set."""
    load, parts = (_value(merged, "checkpoint", key) for key in ("load", "load_parts"))
    if load is not None and parts is not None:
        raise ConfigError(
            f"checkpoint.load={load} and checkpoint.load_parts={parts} are both set; keep the one to start from"
        )
    if isinstance(parts, dict) and parts and all(isinstance(path, str) for path in parts.values()):
        return parts
    return load if isinstance(load, str) else None


def _value(merged: Merged, section: str, key: str | None) -> Any:
    return merged.get(section, {}).get(key or "", (None, ""))[0]


def _without(layer: Layer, sections: Iterable[str]) -> Layer:
    return Layer(layer.origin, {name: keys for name, keys in layer.values.items() if name not in sections})


def _is_complete(name: str, written: Merged, host: PluginHost) -> bool:
    """Whether every key of the section is written, as in the config.json of a run."""
    selected = _value(written, name, CORE_SECTIONS[name].selector)
    if not isinstance(selected, str):
        return False
    try:
        return section_type(name, selected, host).model_fields.keys() <= written[name].keys()
    except MtError:
        return False  # found again, and reported, when the section is built


def _may_be_absent(load: str | dict[str, str], wanted: Iterable[str], chosen: Merged) -> bool:
    """Whether the checkpoint cannot be read here and the configuration stands without it.

    A run that resumes from its own checkpoints no longer needs this one, and the data of a run are prepared without
    torch; training itself stops when the checkpoint is missing.
    """
    # load_parts: each part is a table of the model section.
    has_parts = isinstance(load, str) or load.keys() <= chosen.get("model", {}).keys()
    if has_parts and all(_value(chosen, name, CORE_SECTIONS[name].selector) is not None for name in wanted):
        paths = [load] if isinstance(load, str) else load.values()
        return find_spec("torch") is None or not all(as_path(path).exists() for path in paths)
    return False


def _taken(name: str, chosen: Merged, stored: Mapping[str, Any], base: StartsFrom | None) -> Mapping[str, Any] | None:
    """What a section takes from the checkpoint; None where another family (another tokenizer) is chosen.

    A family that starts from the checkpoint's takes the keys that are not its own.
    """
    selector = CORE_SECTIONS[name].selector
    assert selector is not None
    selected = _value(chosen, name, selector)
    if selector not in stored or selected in (None, stored[selector]):  # parts of a model have no family of the whole
        return stored
    if base is None or name != "model":
        return None
    keys = stored if base.keys is None else base.keys.load()(stored)
    return {key: value for key, value in keys.items() if key not in (selector, *base.own_keys)}


def _without_base_keys(preset: Layer, base: StartsFrom, host: PluginHost) -> Layer:
    """For a model that starts from another family's checkpoint: the preset without the shape of another such model."""
    model = preset.values.get("model", {})
    keys = section_type("model", base.family, host).model_fields.keys() - {"family"}
    return Layer(preset.origin, {**preset.values, "model": {key: model[key] for key in model.keys() - keys}})


def _base_of(family: Any, stored: Any, host: PluginHost) -> StartsFrom | None:
    """How a model of `family` starts from a checkpoint of the family `stored`; None if nothing is declared."""
    declared = [base for spec in host[MODELS] if spec.name == family for base in spec.starts_from]
    return next((base for base in declared if base.family == stored), None)


def _stored_sections(load: str | dict[str, str], host: PluginHost) -> dict[str, dict[str, Any]]:
    """Section -> its values in the checkpoint, of those that have some there."""
    if find_spec("torch") is None:
        raise CheckpointError(f'the checkpoint {load} needs torch to be read; pip install "mt-core[train]"')

    reader = open_start(load, host)
    config = reader.metadata["config"]
    stored = {name: dict(config[name]) for name in FROM_CHECKPOINT if config.get(name)}
    keeper = reader.of_tokenizer if isinstance(reader, CheckpointParts) else reader
    if "tokenizer" in stored and keeper is not None:
        stored["tokenizer"] = _with_own_files(stored["tokenizer"], keeper, host)
    return stored


def _with_own_files(tokenizer: dict[str, Any], reader: CheckpointReader, host: PluginHost) -> dict[str, Any]:
    """The section with paths to the files stored in the checkpoint: the original ones may be gone."""
    spec = host[TOKENIZERS].get(tokenizer["tokenizer_type"], key="tokenizer.tokenizer_type")
    if not isinstance(reader, SupportsFilesFolder) or spec.materialize is None or not reader.files():
        return tokenizer
    merged = merge_layers([Layer("stored configuration", {"tokenizer": tokenizer})])
    config = build_sections(["tokenizer"], merged, host, Problems())["tokenizer"]
    # Only the values are needed: paths into the folder are replaced by those of the checkpoint's.
    with TemporaryDirectory(prefix="mt-tokenizer-") as folder:
        laid_out = spec.materialize.load()(config, reader.files(), Path(folder)).model_dump(mode="json")
        return {key: _moved(value, folder, str(reader.files_folder)) for key, value in laid_out.items()}


def _moved(value: Any, folder: str, to: str) -> Any:
    # With the slash: /tmp/a is no part of /tmp/ab.
    is_inside = isinstance(value, str) and (value == folder or value.startswith(folder + "/"))
    return to + value.removeprefix(folder) if is_inside else value
