"""Whether a checkpoint of any format is whole, as far as its format can tell."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mt_ckpt.contents import AUTO, Entry, Opened, files_of, open_any
from mt_ckpt.convert.model import expected_parameters, model_config
from mt_ckpt.convert.source import MODEL
from mt_core.errors import CheckpointError
from mt_core.plugins import PluginHost
from mt_core.specs import CheckpointReader
from mt_core.train.checkpoint.state import require_fit

WITH_CHECKSUMS = {".bin", ".pt", ".pth"}
"""Archives of torch.save, whose members have a CRC-32 that is compared on reading."""


def find_problems(
    opened: Opened, tensors: list[Entry], host: PluginHost, progress: Callable[[int], None] = lambda num_bytes: None
) -> list[str]:
    """One sentence for each: tensors that are not those of the configuration, and those that cannot be read.

    `progress` is called with the number of bytes just read.
    """
    reader = opened.reader
    problems = _misfits(reader, host)
    for entry in tensors:
        # One damaged tensor does not end the check: all are listed.
        try:
            value = reader.read(entry.name)
        except CheckpointError as error:
            problems.append(str(error))
        else:
            if tuple(value.shape) != entry.shape:
                problems.append(f"{entry.name}: read as {list(value.shape)}, listed as {list(entry.shape)}")
        progress(entry.num_bytes)
    return problems


def configuration_problems(path: Path, host: PluginHost, loader: str) -> list[str]:
    """What is wrong with the names and shapes of the checkpoint at `path`, of which no tensor is read.

    Nothing is checked of a format that no installed loader reads, unless one is named.
    """
    if loader == AUTO and not any(spec.detect.load()(path) for spec in host.checkpoint_loaders):
        return []
    return _misfits(open_any(path, host, loader).reader, host)


def _misfits(reader: CheckpointReader, host: PluginHost) -> list[str]:
    try:
        parameters = expected_parameters(model_config(reader, host), host)
        require_fit(reader, {name: layout.shape for name, layout in parameters.items()}, MODEL)
    except CheckpointError as error:
        return [str(error)]
    return []


def has_checksums(opened: Opened) -> bool:
    """Whether the weights' files have checksums, so that changed values would have been seen."""
    # Only the suffixes of files with weights count. A .pt beside safetensors says nothing of those.
    weights = {Path(file).suffix for file in files_of(opened)} & {*WITH_CHECKSUMS, ".safetensors", ".gguf", ".distcp"}
    return bool(weights) and weights <= WITH_CHECKSUMS
