"""Whether a checkpoint of any format is whole, as far as its format can tell."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mt_ckpt.contents import Entry, Opened, files_of
from mt_ckpt.convert.model import expected_parameters, model_config
from mt_ckpt.convert.source import MODEL
from mt_core.errors import CheckpointError
from mt_core.plugins import PluginHost
from mt_core.specs import CheckpointReader
from mt_core.train.checkpointing import require_fit

WITH_CHECKSUMS = {".bin", ".pt", ".pth"}
"""Archives of torch.save, whose members have a CRC-32 that is compared on reading."""


def find_problems(
    opened: Opened, tensors: list[Entry], host: PluginHost, progress: Callable[[int], None] = lambda num_bytes: None
) -> list[str]:
    """One sentence for each: tensors that are not those of the configuration, and those that cannot be read.

    `progress` is called with the number of bytes just read.
    """
    reader = opened.reader
    problems = []
    try:
        _require_configured(reader, host)
    except CheckpointError as error:
        problems.append(str(error))
    for entry in tensors:
        try:
            value = reader.read(entry.name)
        except CheckpointError as error:
            problems.append(str(error))
        else:
            if tuple(value.shape) != entry.shape:
                problems.append(f"{entry.name}: read as {list(value.shape)}, listed as {list(entry.shape)}")
        progress(entry.num_bytes)
    return problems


def _require_configured(reader: CheckpointReader, host: PluginHost) -> None:
    parameters = expected_parameters(model_config(reader, host), host)
    require_fit(reader, {name: layout.shape for name, layout in parameters.items()}, MODEL)


def has_checksums(opened: Opened) -> bool:
    """Whether the weights' files have checksums, so that changed values would have been seen."""
    weights = {Path(file).suffix for file in files_of(opened)} & {*WITH_CHECKSUMS, ".safetensors", ".gguf", ".distcp"}
    return bool(weights) and weights <= WITH_CHECKSUMS
