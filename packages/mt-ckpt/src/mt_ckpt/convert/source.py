"""The source checkpoint as its saver sees it: in the requested dtype, with bytes read counted."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mt_ckpt.files.safetensors import TensorInfo
from mt_ckpt.hugging_face.activation_scales import ActivationScales
from mt_ckpt.megatron.vocabulary_padding import PADDING
from mt_ckpt.writing.file_plans import PartWriter
from mt_ckpt.writing.resumable import work_key
from mt_core.checkpoint_lookup import MODEL
from mt_core.checkpoint_specs import CheckpointReader
from mt_core.errors import CheckpointError, ConfigError
from mt_core.name_map import Rule

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
BLOCK = 1 << 22
"""Elements checked at once."""
Progress = Callable[[int, int], None]
"""(bytes read so far, bytes of all that will be read)"""


class Source:
    """A `CheckpointReader` over another one.

    dtype: of floating-point weights, None: as stored. kept: parameters that keep theirs, since the model declares it.
    With a dtype only the model is shown: an optimizer's state belongs to the weights as they were.
    identity: a checksum of where the tensors come from and what is made of them.
    """

    def __init__(
        self,
        reader: CheckpointReader,
        identity: str,
        *,
        dtype: str | None = None,
        kept: Collection[str] = (),
        progress: Progress = lambda done, total: None,
    ) -> None:
        if dtype is not None and dtype not in DTYPES:
            raise ConfigError(f"--dtype {dtype}: not a dtype of weights; it can be {', '.join(DTYPES)}")
        self.identity = identity
        self.read_names: set[str] = set()
        self.omitted_names: set[str] = set()
        """Parameters of the model that the format leaves to another checkpoint, as a PEFT folder leaves the base."""
        self.notes: list[str] = []
        """What the format leaves out of files beside the tensors, and of the model's tensors, a sentence each."""
        self.dropped_names: set[str] = set()
        """Those of them that the format has no place for."""
        self.workers: PartWriter | None = None
        """Other processes that write, if any."""
        self.activation_scales: ActivationScales | None = None
        """Scales of inputs and cache that a calibrated source has."""
        self.on_read: Callable[[str, int], None] = lambda name, num_bytes: None
        """Called with each tensor that was read in this process, and its bytes."""
        self._reader, self._progress, self._done = reader, progress, 0
        self._infos = _infos(reader, DTYPES[dtype] if dtype else None, kept)
        self._shapes = {name: info.shape for name, info in self._infos.items()}
        self._dtypes = {name: info.dtype for name, info in self._infos.items()}
        # The saver shows by its first read of an optimizer's tensor whether it takes everything, see `note_read`.
        self._totals = {prefix: _stored_bytes(reader, self.names(prefix)) for prefix in ("", MODEL)}
        self._total = self._totals[MODEL]

    @property
    def metadata(self) -> Mapping[str, Any]:
        return self._reader.metadata

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def dtypes(self) -> Mapping[str, torch.dtype]:
        return self._dtypes

    def files(self) -> Mapping[str, bytes]:
        return self._reader.files()

    def read(self, name: str) -> Tensor:
        """One full tensor. Raises CheckpointError for a value that the requested dtype cannot hold."""
        stored = self._reader.read(name)
        num_bytes = stored.numel() * stored.element_size()
        self.on_read(name, num_bytes)
        self.note_read(name, num_bytes)
        info = self._infos.get(name)
        return stored if info is None else _as(name, stored, info.dtype)

    def external(self, name: str, rule: Rule) -> Mapping[str, TensorInfo] | None:
        """What a rule makes of a tensor, where the source has it just so and need not put it together: name -> what it
        is in the source."""
        external = getattr(self._reader, "external", None)
        return None if external is None else external(name, rule)

    def read_external(self, name: str, source: str) -> Tensor:
        """One of the tensors that `external` has named for `name`. Raises what `read` raises."""
        stored: Tensor = self._reader.read_external(source)  # type: ignore[attr-defined]
        info = self._infos[name]
        self.on_read(name, info.num_bytes)
        self.note_read(name, info.num_bytes)
        # Numbers of experts and the like are integers in the source, whatever dtype the canonical tensor has.
        return _as(source, stored, info.dtype) if stored.is_floating_point() else stored

    def note_read(self, name: str, num_bytes: int) -> None:
        """Count a tensor as read, here or in another process; once, though it goes into files of several processes."""
        if name in self.read_names:
            return
        self.read_names.add(name)
        self._done += num_bytes
        if not name.startswith(MODEL):  # a saver reads the model, or everything
            self._total = self._totals[""]
        self._progress(self._done, max(self._done, self._total))

    def omit(self, names: Iterable[str]) -> None:
        """Declare that the format leaves these tensors of the model to another checkpoint; before the first read."""
        self.omitted_names.update(names)

    def note(self, sentences: Iterable[str]) -> None:
        """Declare what the format has no place for; each sentence is reported once."""
        self.notes += [sentence for sentence in sentences if sentence not in self.notes]

    def drop(self, names: Collection[str], why: str) -> None:
        """Declare that the format has no place for these tensors of the model, and why; before the first read."""
        self.omit(names)
        self.dropped_names.update(names)
        self.note([why])

    def unconverted(self) -> list[str]:
        """All names of the checkpoint, including those that are hidden here."""
        return list(self._reader.shapes())

    def num_bytes(self, names: Collection[str]) -> int:
        """Bytes of tensors as they are written."""
        return sum(self._infos[name].num_bytes for name in names)

    def names(self, prefix: str = "") -> list[str]:
        return [name for name in self._infos if name.startswith(prefix)]


def identity_of(path: Path, *asked: Any) -> str:
    """A checksum of where a checkpoint lies, of its files' sizes and times, and of what is requested."""
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    # Sizes and times instead of contents, which would take a read of everything.
    stats = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return work_key(str(path.resolve()), stats, repr(asked))


def _stored_bytes(reader: CheckpointReader, names: Collection[str]) -> int:
    dtypes, shapes = reader.dtypes(), reader.shapes()
    return sum(TensorInfo(tuple(shapes[name]), dtypes[name]).num_bytes for name in names)


def _infos(reader: CheckpointReader, dtype: torch.dtype | None, kept: Collection[str]) -> dict[str, TensorInfo]:
    dtypes = reader.dtypes()
    infos = {name: TensorInfo(tuple(shape), dtypes[name]) for name, shape in reader.shapes().items()}
    if dtype is None:
        return infos
    return {
        name: replace(info, dtype=dtype)
        if info.dtype.is_floating_point and name.removeprefix(MODEL) not in kept
        else info
        for name, info in infos.items()
        if name.startswith((MODEL, PADDING + MODEL))
    }


def _as(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if tensor.dtype == dtype:
        return tensor
    cast = tensor.to(dtype)
    # In blocks, so that the masks stay small. An inf of the source may stay one; a finite value may not become one.
    for before, after in zip(tensor.reshape(-1).split(BLOCK), cast.reshape(-1).split(BLOCK), strict=True):
        if not after.isfinite().all() and before.isfinite().all():
            largest = before.abs().max().item()
            raise CheckpointError(f"tensor {name}: holds {largest:g}, which {dtype} cannot; use --dtype bf16 or fp32")
    return cast
