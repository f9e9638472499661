"""An open PEFT folder: its configuration and its tensors by name; and what folders say of their adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from mt_ckpt.files.safetensors import SafetensorsFile
from mt_ckpt.megatron_dist.bridge_adapter import detect as detect_bridge
from mt_ckpt.pickles.torch_file import NamedTensorsFile
from mt_core.errors import CheckpointError
from mt_tune.adapters.bridge_reading import BridgeAdapter
from mt_tune.adapters.peft_config import PREFIX, read_config, section_of

WEIGHTS = "adapter_model.safetensors"
SHARED = PREFIX.partition(".")[0] + "."
OLD_WEIGHTS = "adapter_model.bin"


class PeftFolder:
    """An open folder. Raises ConfigError and CheckpointError for one that is none, or is damaged."""

    def __init__(self, path: Path) -> None:
        self.path, self.content = path, read_config(path)
        file = path / WEIGHTS
        self._file: Any = SafetensorsFile(file) if file.is_file() else None
        if self._file is None:
            if not (path / OLD_WEIGHTS).is_file():
                raise CheckpointError(f"{path} has neither {WEIGHTS} nor {OLD_WEIGHTS}")
            self._file = NamedTensorsFile(path / OLD_WEIGHTS)
        self.names = {name.removeprefix(PREFIX).removeprefix(SHARED): name for name in self._file.tensors}

    def read(self, name: str) -> Tensor:
        """A tensor by its name without the prefix. Raises CheckpointError for one that is not there."""
        if name not in self.names:
            raise CheckpointError(
                f"{self.path}: has no tensor {PREFIX}{name}, which [adapter] and the base make; is the adapter of "
                "another base, or do adapter.targets name more than it has?"
            )
        tensor: Tensor = self._file.read(self.names[name])
        return tensor

    def section(self) -> dict[str, Any]:
        """Keys of [adapter] that describe it."""
        return section_of(self.content, {name for tensor in self.names if (name := _module_of(tensor))})


def _module_of(name: str) -> str | None:
    """Name of a module from that of a tensor of its adapter. None: the tensor belongs to no adapter of a module."""
    for mark in (".lora_", ".vera_", ".ia3_", ".token_adapter"):
        module, separator, _ = name.partition(mark)
        if separator:
            return module.replace(".base_layer", "")
    return None


def described_section(path: Path) -> dict[str, Any]:
    """Keys of [adapter] that describe the adapter in a folder of PEFT or of Megatron-Bridge."""
    return BridgeAdapter(path).section() if detect_bridge(path) else PeftFolder(path).section()


def base_of(path: Path) -> str | None:
    """The base that a folder names."""
    if detect_bridge(path):
        return BridgeAdapter(path).base
    named: str | None = PeftFolder(path).content.get("base_model_name_or_path")
    return named
