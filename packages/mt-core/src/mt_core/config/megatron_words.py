"""Words of Megatron's options and converters that people write here from habit, and keys of earlier versions.

A value or key that can only mean one of ours is taken, with a note that names ours. Keys without a counterpart are
refused in `messages`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from mt_core.config.layers import Layer
from mt_core.errors import ConfigError

VALUES: Mapping[tuple[str, str], Mapping[str, str]] = {
    ("model", "position_embedding_type"): {"rotary": "rope", "absolute": "learned_absolute"},
}
"""(section, key) -> their word -> ours."""

TRACKER_KEYS = (
    *("tensorboard_dir", "tensorboard_queue_size", "wandb_project", "wandb_entity", "wandb_exp_name", "wandb_save_dir"),
    *("mlflow_tracking_uri", "mlflow_experiment", "mlflow_run_name", "trackio_project", "trackio_name"),
    *("comet_workspace", "comet_project", "comet_experiment_name"),
)
"""Former keys of [logging]; what stands before the first underscore is a section of mt-ops now."""
KEYS: Mapping[tuple[str, str], tuple[str, str]] = {
    ("train", "late_metrics"): ("train", "deferred_metrics"),
    ("inference", "batch_invariant"): ("numerics", "batch_invariant"),
    **{("logging", former): (former.partition("_")[0], former.partition("_")[2]) for former in TRACKER_KEYS},
}
"""(section, key) of earlier versions -> what has replaced it."""

CONVERTED_FORMATS: Mapping[str, str] = {
    "torch_dist": "megatron-dist",
    "torch": "megatron",
    "core": "megatron",
    "legacy": "megatron-legacy",
}
"""Megatron's word for a checkpoint format -> the saver of `mt convert` that writes it."""


def translate(layers: Sequence[Layer]) -> tuple[list[Layer], list[str]]:
    """The layers in our words, and a note for each value and key that was another's word."""
    notes: list[str] = []
    return [_translate_values(_translate_keys(layer, notes), notes) for layer in layers], notes


def _translate_keys(layer: Layer, notes: list[str]) -> Layer:
    values: dict[str, Any] = dict(layer.values)
    for (section, former), (home, key) in KEYS.items():
        keys = values.get(section)
        if isinstance(keys, Mapping) and former in keys:
            values[section] = {name: value for name, value in keys.items() if name != former}
            values[home] = {**values.get(home, {}), key: keys[former]}
            notes.append(f"{section}.{former} (from {layer.origin}) is called {home}.{key} now")
    return Layer(layer.origin, values)


def _translate_values(layer: Layer, notes: list[str]) -> Layer:
    values: dict[str, Any] = dict(layer.values)
    for (section, key), words in VALUES.items():
        keys = values.get(section)
        if not isinstance(keys, Mapping):
            continue
        value = keys.get(key)
        if isinstance(value, str) and value in words:
            values[section] = {**keys, key: words[value]}
            notes.append(f"{section}.{key}={value} (from {layer.origin}) is called {words[value]} here")
    return Layer(layer.origin, values)


def refuse_foreign_formats(ckpt_format: str, savers: Collection[str]) -> None:
    """Raise ConfigError for one of Megatron's formats, unless an installed saver has that name."""
    if ckpt_format in CONVERTED_FORMATS and ckpt_format not in savers:
        raise ConfigError(
            f"checkpoint.ckpt_format={ckpt_format} is a format of Megatron's that training does not write; train with "
            f"mt, and write it with mt convert --saver {CONVERTED_FORMATS[ckpt_format]}"
        )
