"""An open checkpoint of Megatron's `torch` format, as canonical tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mt_ckpt.megatron.families import model_section, refuse_images
from mt_ckpt.megatron.metadata import KEY, LEFT_OUT, metadata_of, true_vocab_size
from mt_ckpt.megatron.model import as_held, as_stored, layouts_of, load_model_config
from mt_ckpt.megatron.names import EMBEDDING, EXTRA_STATE, OUTPUT
from mt_ckpt.megatron.optimizer import STEP, OptimizerState, read_optimizer
from mt_ckpt.megatron.pieces import Gathered, Held, Number, RowsBeyond, choose, hold
from mt_ckpt.megatron.rank_files import Iteration, open_iteration
from mt_ckpt.megatron.vocabulary_padding import PADDING
from mt_ckpt.pickles.torch_file import StoredTensor, tensors_in
from mt_core.checkpoint_lookup import MODEL
from mt_core.errors import CheckpointError, did_you_mean
from mt_core.nn.layout import ParameterLayout
from mt_core.plugins import PluginHost

OPTIMIZER = "optimizer."
SHOWN = 6
ReadOptimizer = Callable[[Iteration, Mapping[str, ParameterLayout]], OptimizerState]
DERIVED = ("inv_freq",)
"""Ends of names of buffers that are computed from the configuration."""


def open_checkpoint(path: Path, host: PluginHost, vocab_size: int | None = None) -> MegatronReader:
    """Open the iteration at `path`, or the one that the tracker in `path` names.

    vocab_size: true number of ids, as Megatron's own converter takes by --true-vocab-size; a larger number keeps so
    much of the padding. Default: what the checkpoint's args say, else all rows.

    Raises CheckpointError for a missing or damaged file and for tensors that do not fit the args, and ConfigError for
    a model that is none of ours.
    """
    iteration = open_iteration(Path(path), core_tensors)
    return MegatronReader(iteration, host, vocab_size, read_optimizer)


def core_tensors(part: Mapping[str, Any], file: Path) -> Mapping[str, StoredTensor]:
    """The weights of a state dictionary of Megatron-Core."""
    return {name: tensor for name, tensor in tensors_in(part).items() if EXTRA_STATE not in name}


class MegatronReader:
    """A `CheckpointReader`. Threads may read from it at the same time."""

    def __init__(
        self, iteration: Iteration, host: PluginHost, vocab_size: int | None, read_optimizer: ReadOptimizer
    ) -> None:
        self.folder = iteration.folder
        weights = _weights(iteration)
        refuse_images(iteration.folder, weights, host)
        padded = _padded_vocab_size(iteration, weights)
        true = true_vocab_size(iteration.args, padded, vocab_size)
        section = model_section(iteration.args, weights.keys(), true, host)
        config = load_model_config(section, host)
        self._iteration = iteration
        layouts = layouts_of(config, host, true, padded)
        # The layouts of what is stored, padded and cut as it is; `_shapes` are those that are read.
        stored = {name: as_stored(layout) for name, layout in layouts.items()}
        self._stored = {
            name: as_held(name, layout, weights[name][0].piece.shape[0]) if name in weights else layout
            for name, layout in stored.items()
        }
        self._shapes = {name: layout.shape for name, layout in layouts.items()}
        require_same_names(iteration.folder, self._stored, weights)
        self._tensors: dict[str, Gathered | Number | RowsBeyond] = {
            MODEL + name: self._gathered(name, weights[name]) for name in self._stored
        }
        optimizer = read_optimizer(iteration, self._stored)
        self._add_optimizer(optimizer)
        self._add_padding()
        self.metadata: dict[str, Any] = metadata_of(iteration.args, iteration.common, section)
        if optimizer.left_out is not None:
            self.metadata[KEY][LEFT_OUT] = optimizer.left_out

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self._tensors.items()}

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

    def _gathered(self, name: str, held: Sequence[Held]) -> Gathered:
        layout, grid = self._stored[name], self._iteration.grid
        pieces = choose(layout, grid, held)
        if pieces is None:
            raise CheckpointError(f"{self.folder}: {name} is not in the files of all ranks that share it")
        expected = layout.local_shape(grid.context())
        # gather would join parts of any sizes: each is compared with what the arguments say before it is read.
        for piece in pieces:
            if tuple(piece.shape) != expected:
                raise CheckpointError(
                    f"{self.folder}: a rank's part of {name} has shape {list(piece.shape)}, by the args it is "
                    f"{list(expected)}"
                )
        return Gathered(layout, grid, pieces, self._shapes[name])

    def _add_padding(self) -> None:
        """Padding rows of the vocabulary, which Megatron trains like all others."""
        for name, tensor in list(self._tensors.items()):
            if isinstance(tensor, Gathered) and tensor.shape != tensor.layout.shape:
                whole = replace(tensor, shape=tensor.layout.shape)
                self._tensors[PADDING + name] = RowsBeyond(whole, tensor.shape[0])

    def _add_optimizer(self, optimizer: OptimizerState) -> None:
        for state, entries in optimizer.entries.items():
            for name, held in hold(entries).items():
                self._tensors[f"{OPTIMIZER}{state}.{name}"] = self._gathered(name, held)
        if optimizer.step is not None:
            # The files have one step for all; the canonical state has one for each parameter.
            for name in hold(optimizer.entries["exp_avg"]) if "exp_avg" in optimizer.entries else ():
                self._tensors[f"{OPTIMIZER}{STEP}.{name}"] = Number(optimizer.step)


def _weights(iteration: Iteration) -> dict[str, list[Held]]:
    """Without the last stage's copy of the token embeddings, and without what follows from the configuration."""
    held = hold(entry for entry in iteration.weights() if not entry.name.endswith(DERIVED))
    # Tied tables: the last stage has the embeddings again, for its logits.
    if not iteration.args.untied:
        held.pop(OUTPUT, None)
    return held


def _padded_vocab_size(iteration: Iteration, weights: Mapping[str, Sequence[Held]]) -> int:
    if EMBEDDING not in weights:
        raise CheckpointError(f"{iteration.folder}: has no {EMBEDDING}")
    # Every tensor rank has an equal part of the padded rows.
    return weights[EMBEDDING][0].piece.shape[0] * iteration.grid.tp


def require_same_names(origin: Path | str, layouts: Mapping[str, ParameterLayout], weights: Collection[str]) -> None:
    """Raises CheckpointError unless the stored parameters are those of the model."""
    problems = [f"{name} is missing" for name in layouts if name not in weights]
    # Both ways: a tensor that nothing reads would be lost silently.
    problems += [f"{name} is there and unknown" for name in weights if name not in layouts]
    if problems:
        more = f"; and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise CheckpointError(f"{origin}: the tensors are not those of its model: {'; '.join(problems[:SHOWN])}{more}")
