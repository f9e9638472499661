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
        for part, reader in parts.items():
            for name in reader.shapes():
                if name.startswith(MODEL):
                    self._sources[MODEL + name_within(part, name.removeprefix(MODEL))] = reader, name
        sections = {part: reader.metadata["config"] for part, reader in parts.items()}
        config: dict[str, Any] = {"model": {part: dict(section["model"]) for part, section in sections.items()}}
        self.of_tokenizer: CheckpointReader | None = None
        for part, reader in parts.items():
            if sections[part].get("tokenizer"):
                config["tokenizer"] = sections[part]["tokenizer"]
                self.of_tokenizer = reader
        self.metadata: Mapping[str, Any] = {"iteration": 0, "config": config}

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: reader.shapes()[source] for name, (reader, source) in self._sources.items()}

    def dtypes(self) -> Mapping[str, dtype]:
        return {name: reader.dtypes()[source] for name, (reader, source) in self._sources.items()}

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
