"""Outputs of a model's modules in the first step of a run on several ranks, as the tensors that one process has.

A rank has the samples of its data-parallel place, the positions of its context-parallel place, with sequence
parallelism a part of these, and of a column-parallel layer a part of the features. What it has of each is known from
the step's batch, from the axes, and from the layer's layout of weights; outputs of other forms are left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mt_core.nn.context_parallel.zigzag import shard_sequence
from mt_core.nn.dropout import SAMPLE
from mt_core.nn.layout import Split, parameter_layouts
from mt_core.nn.linear import LinearModule
from mt_core.parallel.context import ParallelContext
from mt_core.parallel.first_rank import all_gather_objects
from mt_core.train.trainer import Trainer


@dataclass(frozen=True)
class Piece:
    """A part of a module's output. values: [rows, positions, features]. first: number of the first row's sample.
    positions: numbers in the sequence. tp_rank: of the rank that has it. split: of the features over tp; None where a
    rank has all."""

    name: str
    first: int
    positions: tuple[int, ...]
    tp_rank: int
    split: Split | None
    values: Tensor


class LayerOutputs:
    """Records the first step of a run, from before it trains."""

    def __init__(self, run: Trainer) -> None:
        self.run, self.pieces = run, list[Piece]()
        launch = run.engine.launch_step

        def first_step(*args: Any, **kwargs: Any) -> Any:
            run.engine.launch_step = launch  # type: ignore[method-assign]
            with self._hooks():
                return launch(*args, **kwargs)

        run.engine.launch_step = first_step  # type: ignore[method-assign]

    def gather(self) -> dict[str, Tensor]:
        """Name of the module -> [samples, sequence, features], in the order of the forward pass. Collective."""
        everyone = all_gather_objects(self.pieces, self.run.ctx.world)
        pieces = [piece for of_rank in everyone for piece in of_rank]
        return assembled(pieces, self.run.config.data.seq_length)

    @contextmanager
    def _hooks(self) -> Iterator[None]:
        splits = feature_splits(self.run.model)
        hidden = int(getattr(self.run.config.model, "hidden_size", 0))
        places = Positions(self.run.ctx, self.run.config.data.seq_length)
        with ExitStack() as stack:
            for name, module in self.run.model.named_modules():
                handle = module.register_forward_hook(self._keep(name, places, splits.get(name), hidden))
                stack.callback(handle.remove)
            yield

    def _keep(self, name: str, places: Positions, split: Split | None, hidden: int) -> Callable[..., None]:
        ctx = self.run.ctx

        def keep(module: nn.Module, inputs: Any, output: Any) -> None:
            if not isinstance(output, Tensor) or not output.is_floating_point() or output.ndim != 3:
                return
            positions = places.of(output.shape[1])
            if positions is None or (split is None and output.shape[2] != hidden):
                return
            values = output.detach().float().clone()
            # A recomputed pass finds the number of the first one, and gives the same again.
            self.pieces.append(Piece(name, SAMPLE.get(), positions, ctx.tp.rank, split, values))

        return keep


def feature_splits(model: nn.Module) -> dict[str, Split]:
    """Names of layers whose output features are divided over tensor-parallel ranks, and how."""
    layouts, splits = parameter_layouts(model), dict[str, Split]()
    for name, module in model.named_modules():
        layout = layouts.get(f"{name}.weight") if isinstance(module, LinearModule) and module.cut == "output" else None
        if layout is not None and not layout.padded:
            for split in layout.splits:
                if split.dim == 0 and split.axis == "tp":
                    splits[name] = split
    return splits


class Positions:
    """Which positions of a sequence a rank has in an output of so many."""

    def __init__(self, ctx: ParallelContext, length: int) -> None:
        self.ctx = ctx
        self.whole = shard_sequence(torch.arange(length), 0, ctx.cp)

    def of(self, count: int) -> tuple[int, ...] | None:
        """None for an output that is none of positions."""
        if count == len(self.whole):
            return tuple(self.whole.tolist())
        size = self.ctx.tp.size
        if self.ctx.sequence_parallel and count * size == len(self.whole):
            return tuple(self.whole.chunk(size)[self.ctx.tp.rank].tolist())
        return None


def assembled(pieces: Sequence[Piece], length: int) -> dict[str, Tensor]:
    """Whole tensors by name. Of one that every tensor-parallel rank has, those that differ from the first rank's are
    there too, as `NAME (copy N)`."""
    by_name: defaultdict[str, list[Piece]] = defaultdict(list)
    for piece in pieces:
        by_name[piece.name].append(piece)
    whole = {name: _whole(parts, length) for name, parts in by_name.items()}
    return dict(sorted(_named(whole), key=lambda item: _place(item[0], pieces)))


def _named(whole: Mapping[str, Sequence[Tensor]]) -> Iterator[tuple[str, Tensor]]:
    for name, (first, *copies) in whole.items():
        if bool(first.isnan().any()):
            continue  # no rank has the rest of it
        yield name, first
        different = [copy for copy in copies if not bool(copy.isnan().any()) and not torch.equal(copy, first)]
        yield from ((f"{name} (copy {number})", copy) for number, copy in enumerate(different, start=1))


def _place(name: str, pieces: Sequence[Piece]) -> tuple[int, int]:
    """Order of the forward pass: layers by their numbers, and within a layer as the first rank that has it ran."""
    plain = name.partition(" (")[0]
    numbers = [int(part) for part in plain.split(".") if part.isdigit()]
    order = next(number for number, piece in enumerate(pieces) if piece.name == plain)
    before = 0 if plain.startswith("embedding") else 1
    return (numbers[0] + before if numbers else (0 if before == 0 else 10**6)), order


def _whole(parts: Sequence[Piece], length: int) -> list[Tensor]:
    """[samples, length, features]: the tensor, and where every tensor-parallel rank has it the copies of others."""
    shares = {rank: [part for part in parts if part.tp_rank == rank] for rank in sorted({p.tp_rank for p in parts})}
    split = parts[0].split
    if split is not None:
        return [split_of_features(split).join([_filled(share, length, parts) for share in shares.values()])]
    covered = {part.positions for part in shares[0]} if 0 in shares else set()
    if len(shares) > 1 and {part.positions for part in parts} != covered:
        return [_filled(parts, length, parts)]  # sequence parallelism: each rank has other positions
    return [_filled(share, length, parts) for share in shares.values()]


def split_of_features(split: Split) -> Split:
    """Split of the outputs [samples, sequence, features], whose last dimension is the first of the weight."""
    return Split(2, split.axis, split.sections)


def _filled(parts: Sequence[Piece], length: int, everyone: Sequence[Piece]) -> Tensor:
    """NaN where no part is."""
    samples = max(part.first + len(part.values) for part in everyone)
    whole = torch.full((samples, length, parts[0].values.shape[2]), torch.nan)
    for part in parts:
        rows = torch.arange(part.first, part.first + len(part.values))
        whole[rows[:, None], torch.tensor(part.positions)[None]] = part.values
    return whole
