"""Models in several GGUF files, as llama.cpp's gguf-split writes them: NAME-00001-of-0000N.gguf and on.

The first file has the metadata, each file some of the tensors. `split.no`, `split.count` and `split.tensors.count` say
what belongs together.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from mt_ckpt.files.safetensors import TensorInfo
from mt_ckpt.gguf.file import GGUFFile
from mt_core.errors import CheckpointError

PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
NUMBER, COUNT, TENSORS = "split.no", "split.count", "split.tensors.count"


class GGUFTensors(Protocol):
    """One GGUF file, or several that belong together."""

    @property
    def metadata(self) -> Mapping[str, Any]: ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    def read(self, name: str) -> Tensor: ...


def file_at(path: Path) -> Path | None:
    """The .gguf file that `path` is, or the only one, or the first part of the only model, in that directory."""
    if path.is_file():
        return first_part(path) if path.suffix == ".gguf" else None
    # Of several models nothing says which is meant (one that is quantized in several ways).
    first_parts = {first_part(file) for file in path.glob("*.gguf")}
    return first_parts.pop() if len(first_parts) == 1 else None


def first_part(file: Path) -> Path:
    """The first part of the model that a file is a part of; a file that is no part itself."""
    match = PART.fullmatch(file.name)
    return file if match is None else file.with_name(f"{match['stem']}-00001-of-{match['count']}.gguf")


def open_files(file: Path) -> GGUFTensors:
    """The file, or with it the other parts. Raises CheckpointError for a part that is missing or does not belong."""
    match = PART.fullmatch(file.name)
    if match is None:
        return _whole(GGUFFile(file))
    count = int(match["count"])
    files = [file.with_name(f"{match['stem']}-{n:05d}-of-{match['count']}.gguf") for n in range(1, count + 1)]
    if missing := [part.name for part in files if not part.is_file()]:
        raise CheckpointError(f"{file}: a model in {count} files, of which {', '.join(missing)} is missing beside it")
    return SplitGGUF([GGUFFile(part) for part in files])


def _whole(file: GGUFFile) -> GGUFFile:
    """Raises CheckpointError for a part whose name does not say so."""
    count = file.metadata.get(COUNT, 1)
    if count != 1:
        raise CheckpointError(
            f"{file.file}: is one of {count} files of a model ({COUNT}); such files are named "
            f"NAME-00001-of-{int(count):05d}.gguf"
        )
    return file


class SplitGGUF:
    """The tensors of all parts with the metadata of the first."""

    def __init__(self, parts: Sequence[GGUFFile]) -> None:
        """Raises CheckpointError for parts of other models, and for a tensor that is missing or there twice."""
        self.metadata: Mapping[str, Any] = parts[0].metadata
        self._place: dict[str, GGUFFile] = {}
        for number, part in enumerate(parts):
            said = (part.metadata.get(NUMBER), part.metadata.get(COUNT))
            if said != (number, len(parts)):
                raise CheckpointError(
                    f"{part.file}: {NUMBER}={said[0]} and {COUNT}={said[1]}; its name says {number} and {len(parts)}"
                )
            if both := sorted(self._place.keys() & part.tensors.keys()):
                raise CheckpointError(f"{part.file}: {both[0]} is also in {self._place[both[0]].file.name}")
            self._place |= dict.fromkeys(part.tensors, part)
        expected = self.metadata.get(TENSORS, len(self._place))
        if expected != len(self._place):
            raise CheckpointError(f"{parts[0].file}: {TENSORS}={expected}, and its parts have {len(self._place)}")

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return {name: part.tensors[name] for name, part in self._place.items()}

    def read(self, name: str) -> Tensor:
        return self._place[name].read(name)
