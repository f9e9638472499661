"""The checkpoint that a run starts from: one (`checkpoint.load`), or one for each part of the model
(`checkpoint.load_parts`). Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mt_core.checkpoint_lookup import find_checkpoint, open_checkpoint
from mt_core.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor, dtype

    from mt_core.plugins import PluginHost
    from mt_core.specs import CheckpointReader

MODEL = "model."


def open_start(load: str | Mapping[str, str], host: PluginHost) -> CheckpointReader:
    """The checkpoint of checkpoint.load, or of checkpoint.load_parts."""
    if isinstance(load, str):
        return open_checkpoint(find_checkpoint(load), host)
    return CheckpointParts({part: open_checkpoint(find_checkpoint(path), host) for part, path in load.items()})


class CheckpointParts:
    """Several checkpoints as that of a model of which each is a part (a mt_core.specs.CheckpointReader).

    The parameters of a part have its name before their own, if they do not begin with it already. The [model] section
    has the section of each checkpoint under the name of its part; tokenizer and files are those of the last part that
    has a tokenizer. Optimizers are left out.
    """

    def __init__(self, parts: Mapping[str, CheckpointReader]) -> None:
        self._sources: dict[str, tuple[CheckpointReader, str]] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._dtypes: dict[str, dtype] = {}
        config: dict[str, Any] = {"model": {}}
        self.of_tokenizer: CheckpointReader | None = None
        for part, reader in parts.items():
            self._add_tensors(part, reader)
            section = reader.metadata["config"]
            config["model"][part] = dict(section["model"])
            if section.get("tokenizer"):
                config["tokenizer"] = section["tokenizer"]
                self.of_tokenizer = reader
        self.metadata: Mapping[str, Any] = {"iteration": 0, "config": config}

    def _add_tensors(self, part: str, reader: CheckpointReader) -> None:
        dtypes = reader.dtypes()
        for source, shape in reader.shapes().items():
            # Optimizer state and random streams are left out.
            if source.startswith(MODEL):
                name = MODEL + name_within(part, source.removeprefix(MODEL))
                self._sources[name], self._shapes[name], self._dtypes[name] = (reader, source), shape, dtypes[source]

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def dtypes(self) -> Mapping[str, dtype]:
        return self._dtypes

    def read(self, name: str) -> Tensor:
        if name not in self._sources:
            raise CheckpointError(f"none of the checkpoints of checkpoint.load_parts has the tensor {name}")
        reader, source = self._sources[name]
        return reader.read(source)

    def files(self) -> Mapping[str, bytes]:
        return {} if self.of_tokenizer is None else self.of_tokenizer.files()


def name_within(part: str, name: str) -> str:
    """Of a parameter, in the whole model."""
    return name if name.startswith(f"{part}.") else f"{part}.{name}"
