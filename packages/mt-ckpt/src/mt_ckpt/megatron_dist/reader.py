"""An open checkpoint of Megatron's `torch_dist` format, as canonical tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mt_ckpt.megatron.arguments import Arguments
from mt_ckpt.megatron.families import model_section, refuse_images
from mt_ckpt.megatron.folder import find_iteration
from mt_ckpt.megatron.metadata import KEY, LEFT_OUT, metadata_of, true_vocab_size
from mt_ckpt.megatron.model import as_stored, layouts_of, load_model_config
from mt_ckpt.megatron.names import EMBEDDING
from mt_ckpt.megatron.optimizer import MAIN, STEP
from mt_ckpt.megatron.pieces import Entry, Number, Piece, RowsBeyond, cropped, hold
from mt_ckpt.megatron.rank_files import namespace_attributes
from mt_ckpt.megatron.reader import OPTIMIZER, require_same_names
from mt_ckpt.megatron.vocabulary_padding import PADDING
from mt_ckpt.megatron_dist.index import METADATA_FILE, Index, read_common, read_index, require_backend
from mt_ckpt.megatron_dist.keys import entries_of, pack, parse, require_sections
from mt_ckpt.megatron_dist.reshardable import OPTIMIZER_OBJECT, flat_optimizer, has_flat_optimizer, reason_not_read
from mt_ckpt.pickles.torch_file import StoredTensor
from mt_core.checkpoint_lookup import MODEL
from mt_core.errors import CheckpointError, did_you_mean
from mt_core.plugins import PluginHost


def open_checkpoint(path: Path, host: PluginHost, vocab_size: int | None = None) -> DistReader:
    """Open the iteration at `path`, or the one that the tracker in `path` names.

    vocab_size: see `mt_ckpt.megatron.reader.open_checkpoint`. Raises CheckpointError and ConfigError as that does.
    """
    folder = find_iteration(Path(path))
    require_backend(folder)
    return DistReader(read_index(folder), host, vocab_size)


@dataclass(frozen=True)
class Cropped:
    """A tensor without the padding of its vocabulary."""

    piece: Piece
    shape: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        return self.piece.dtype

    def read(self) -> Tensor:
        return cropped(self.piece.read(), self.shape)


class DistReader:
    """A `CheckpointReader`. Threads may read from it at the same time."""

    def __init__(self, index: Index, host: PluginHost, vocab_size: int | None) -> None:
        self.folder = index.folder
        common = read_common(index)
        args = Arguments(namespace_attributes(common, index.folder), index.folder)
        weights, states = _sorted_tensors(index)
        refuse_images(index.folder, weights, host)
        require_sections(index.folder, weights, args.tensor_parallel)
        if EMBEDDING not in weights:
            raise CheckpointError(f"{index.folder}: has no {EMBEDDING}")
        padded = weights[EMBEDDING].shape[0]
        true = true_vocab_size(args, padded, vocab_size)
        section = model_section(args, weights.keys(), true, host)
        config = load_model_config(section, host)
        # Two sets of shapes: with the padded vocabulary, as stored, and with the true one, as read.
        layouts = layouts_of(config, host, true, padded)
        self._stored = {name: as_stored(layout) for name, layout in layouts.items()}
        self._shapes = {name: layout.shape for name, layout in layouts.items()}
        require_same_names(index.folder, self._stored, weights)
        self._tensors: dict[str, Piece] = {MODEL + name: self._cropped(name, weights[name]) for name in self._stored}
        self.metadata: dict[str, Any] = metadata_of(args, common, section)
        step = _step(common, index)
        if has_flat_optimizer(index):
            # The weights serve to check where the buckets begin, see `_require_same_weights`.
            if (reason := reason_not_read(index, args)) is None:
                states = flat_optimizer(index, args, self._stored, weights)
            else:
                self.metadata[KEY][LEFT_OUT] = reason
        for name, piece in weights.items():
            if piece.dtype == torch.float32:
                states.get(MAIN, {}).pop(name, None)  # the copy of fp32 weights is the weights themselves
        # Before `_add_padding`, which adds the rows beyond the vocabulary of the states as well.
        self._add_optimizer(states, step)
        self._add_padding()

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def dtypes(self) -> Mapping[str, torch.dtype]:
        return {name: tensor.dtype for name, tensor in self._tensors.items()}

    def read(self, name: str) -> Tensor:
        """One tensor on CPU, contiguous. Raises CheckpointError for an unknown name and for a damaged file."""
        if name not in self._tensors:
            raise CheckpointError(f"{self.folder}: has no tensor {name}{did_you_mean(name, self._tensors)}")
        return self._tensors[name].read()

    def files(self) -> Mapping[str, bytes]:
        """None: the format carries no tokenizer."""
        return {}

    def _cropped(self, name: str, piece: Piece) -> Cropped:
        expected = self._stored[name].shape
        if tuple(piece.shape) != expected:
            raise CheckpointError(
                f"{self.folder}: {name} has shape {list(piece.shape)}, by the args it is {list(expected)}"
            )
        return Cropped(piece, self._shapes[name])

    def _add_padding(self) -> None:
        """Padding rows of the vocabulary, which Megatron trains like all others."""
        for name, tensor in list(self._tensors.items()):
            if isinstance(tensor, Cropped) and tensor.shape != tuple(tensor.piece.shape):
                self._tensors[PADDING + name] = RowsBeyond(tensor.piece, tensor.shape[0])

    def _add_optimizer(self, states: Mapping[str, Mapping[str, Piece]], step: float | None) -> None:
        for state, pieces in states.items():
            for name, piece in pieces.items():
                if name not in self._stored:
                    raise CheckpointError(
                        f"{self.folder}: the optimizer has {state} of {name}, which the model does not have"
                    )
                self._tensors[f"{OPTIMIZER}{state}.{name}"] = self._cropped(name, piece)
        if step is not None:
            # The format has one step; the canonical state has one for each parameter.
            for name in states.get("exp_avg", ()):
                self._tensors[f"{OPTIMIZER}{STEP}.{name}"] = Number(step)


def _sorted_tensors(index: Index) -> tuple[dict[str, Piece], dict[str, dict[str, Piece]]]:
    """Canonical name -> weights, and state -> name -> the optimizer's."""
    entries: dict[str | None, list[Entry]] = {}
    for key, tensor in index.tensors.items():
        if (parsed := parse(key)) is not None:
            entries.setdefault(parsed.state, []).extend(entries_of(parsed.model_key, tensor))
    pieces = {
        # inv_freq is a buffer of rotary positions that old versions saved; it follows from the arguments.
        state: pack(
            {name: held[0].piece for name, held in hold(state_entries).items() if not name.endswith("inv_freq")}
        )
        for state, state_entries in entries.items()
    }
    return pieces.pop(None, {}), {state: state_pieces for state, state_pieces in pieces.items() if state is not None}


def _step(common: Mapping[str, Any], index: Index) -> float | None:
    """Number of optimizer steps: one for all parameters, or one per group."""
    optimizer = common.get("optimizer")
    candidates = list(optimizer) if isinstance(optimizer, list) else [optimizer]
    candidates += [index.objects[key].value() for key in index.objects if OPTIMIZER_OBJECT in key]
    # Of one optimizer the largest: one that counts for each parameter (common_step) leaves the number that its groups
    # had when they were loaded, one that counts in its groups leaves the other.
    optimizers = [entry for candidate in candidates for entry in _optimizers_in(candidate)]
    steps = {max(numbers) for entry in optimizers if (numbers := _steps_in(entry))}
    # Also with experts, whose optimizer counts its own steps, all have to agree.
    if len(steps) > 1:
        raise CheckpointError(f"{index.folder / METADATA_FILE}: its optimizers made {sorted(steps)} steps")
    return steps.pop() if steps else None


def _optimizers_in(value: Any) -> list[Any]:
    """Those of a chain, which are numbered."""
    numbered = isinstance(value, dict) and bool(value) and all(isinstance(key, int) for key in value)
    return list(value.values()) if numbered else [value]


def _steps_in(value: Any) -> list[float]:
    if isinstance(value, list):
        return [number for entry in value for number in _steps_in(entry)]
    if not isinstance(value, dict):
        return []
    # "step" of torch's and Apex's groups, "common_step" of versions that store one for all.
    steps = [value[name] for name in ("step", "common_step") if value.get(name) is not None]
    numbers = [float(entry.read()) if isinstance(entry, StoredTensor) else float(entry) for entry in steps]
    return numbers + [number for entry in value.values() for number in _steps_in(entry)]
