"""The one declaration of a parameter: its canonical shape, how it is split, and how it is initialized.

Checkpoints, conversion, optimizer state and initialization read it; there is no second table.

A parameter has a canonical tensor (what one process without padding would hold) and a local tensor
(this rank's slice of it, vocabulary padded). `to_local` and `to_canonical` go from one to the other.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product

import torch
from torch import Tensor, nn

from mt_core.parallel.collectives import all_gather
from mt_core.parallel.context import SINGLE, AxisName, ParallelContext
from mt_core.tensor_slice import TensorSlice

Init = Callable[[Tensor, torch.Generator], object]
"""Fills a canonical tensor, or a block of one if it is an `Elementwise`."""
BLOCK_ELEMENTS = 2**26
"""256 MiB in fp32: what a rank draws at a time of a tensor that may be larger than a device, such as the experts of a
layer."""


@dataclass(frozen=True)
class Split:
    """Dimension `dim` is sharded over `axis`.

    sections: the dimension is this many equal blocks laid end to end, or blocks of these sizes, and a rank holds
    its share of each. A gated MLP's first matrix has two, all gate rows and then all up rows.
    """

    dim: int
    axis: AxisName
    sections: int | tuple[int, ...] = 1

    def block_sizes(self, size: int) -> tuple[int, ...]:
        """Sizes of the blocks of a dimension of `size`."""
        return (size // self.sections,) * self.sections if isinstance(self.sections, int) else self.sections

    def cut(self, tensor: Tensor, ranks: int) -> list[Tensor]:
        """Each rank's share of a whole tensor."""
        if ranks == 1:
            return [tensor]
        # sections=2, 2 ranks: [g0 g1 g2 g3 u0 u1 u2 u3] -> [g0 g1 u0 u1], [g2 g3 u2 u3]
        blocks = tensor.split(self.block_sizes(tensor.shape[self.dim]), self.dim)
        shares = zip(*(block.chunk(ranks, self.dim) for block in blocks), strict=True)
        return [torch.cat(share, self.dim) if len(share) > 1 else share[0] for share in shares]

    def join(self, shares: Sequence[Tensor]) -> Tensor:
        """The whole tensor from the ranks' shares; the inverse of `cut`."""
        if len(shares) == 1:
            return shares[0]
        size = shares[0].shape[self.dim] * len(shares)
        sizes = [block // len(shares) for block in self.block_sizes(size)]  # a share's part of each block
        blocks = zip(*(share.split(sizes, self.dim) for share in shares), strict=True)
        return torch.cat([part for block in blocks for part in block], self.dim)


@dataclass(frozen=True)
class LocalRegion:
    """A slice of a canonical tensor that is contiguous in a rank's local tensor, starting at `local`."""

    canonical: TensorSlice
    local: tuple[int, ...]

    def within(self, tensor_slice: TensorSlice) -> LocalRegion | None:
        """Its intersection with a slice of the canonical tensor."""
        common = self.canonical.meet(tensor_slice)
        if common is None:
            return None
        return LocalRegion(common, common.relative_to(self.canonical.start).placed_at(self.local).start)


@dataclass(frozen=True)
class ParameterLayout:
    """shape: canonical. padded: dimension -> its size in memory over all ranks, if larger.

    partial_gradient: axes on which each rank's gradient is only a part (it saw other positions or heads), so
    that they have to be summed.
    replicas: the axis of the ranks that hold the same slice and see other samples or positions, over which
    gradients are summed and the optimizer's state may be sharded: "edp" for what experts own.
    dtype: in memory; None: as the context's params_dtype. trained: whether the optimizer updates it; one that it
    does not (a state that the model keeps by itself) is stored and resumed like any other. lr_mult, eps_mult:
    factors of its learning rate and of the optimizer's epsilon. added: by a model transform, so that the checkpoint
    that a run starts from may lack it.
    """

    shape: tuple[int, ...]
    init: Init
    splits: tuple[Split, ...] = ()
    padded: Mapping[int, int] = field(default_factory=dict)
    partial_gradient: tuple[AxisName, ...] = ()
    replicas: AxisName = "dp_cp"
    dtype: torch.dtype | None = None
    trained: bool = True
    lr_mult: float = 1.0
    eps_mult: float = 1.0
    added: bool = False

    def local_shape(self, ctx: ParallelContext) -> tuple[int, ...]:
        """Shape of this rank's tensor."""
        # Padding first: ranks share the padded size evenly.
        sizes = [self.padded.get(dim, size) for dim, size in enumerate(self.shape)]
        for split in self.splits:
            sizes[split.dim] //= ctx.axis(split.axis).size
        return tuple(sizes)

    def to_local(self, canonical: Tensor, ctx: ParallelContext) -> Tensor:
        """This rank's slice of a canonical tensor; padding is zero."""
        tensor = canonical
        for dim, size in self.padded.items():
            filler = tensor.new_zeros([*tensor.shape[:dim], size - tensor.shape[dim], *tensor.shape[dim + 1 :]])
            tensor = torch.cat([tensor, filler], dim)
        for split in self.splits:
            axis = ctx.axis(split.axis)
            tensor = split.cut(tensor, axis.size)[axis.rank]
        return tensor

    def to_canonical(self, local: Tensor, ctx: ParallelContext | None = None) -> Tensor:
        """The canonical tensor. Collective over the axes that split it: all their ranks get it, and need `ctx`."""
        tensor = local
        # In the opposite order of to_local: the last cut is joined first.
        for split in reversed(self.splits):
            axis = ctx.axis(split.axis) if ctx is not None else SINGLE
            if axis.size > 1:
                tensor = split.join(all_gather(tensor, split.dim, axis).chunk(axis.size, split.dim))
        for dim in self.padded:
            tensor = tensor.narrow(dim, 0, self.shape[dim])
        return tensor

    def regions(self, ctx: ParallelContext) -> list[LocalRegion]:
        """The regions of the canonical tensor that this rank's local tensor consists of, without padding."""
        runs = [self._runs(dim, ctx) for dim in range(len(self.shape))]
        return [
            LocalRegion(
                TensorSlice(tuple(run.canonical for run in combined), tuple(run.length for run in combined)),
                tuple(run.local for run in combined),
            )
            for combined in product(*runs)
        ]

    def _runs(self, dim: int, ctx: ParallelContext) -> list[_Run]:
        """Neighbours of the canonical tensor that are neighbours in the local one, along one dimension."""
        cuts = [split for split in self.splits if split.dim == dim and ctx.axis(split.axis).size > 1]
        if not cuts:  # as most are: the tensor itself, then padding
            return [_Run(0, 0, self.shape[dim])] if self.shape[dim] else []
        # The positions of a dimension are cut as the tensor would be, and runs are read from the result. shape 8 in 2
        # sections, rank 1 of 2: places 2 3 6 7, so runs (2 -> 0, length 2) and (6 -> 2, length 2).
        places = torch.arange(self.padded.get(dim, self.shape[dim]))
        for split in cuts:
            axis = ctx.axis(split.axis)
            places = replace(split, dim=0).cut(places, axis.size)[axis.rank]
        local = (places < self.shape[dim]).nonzero().flatten()  # without padding
        places = places[local]
        # A run ends where either side jumps.
        breaks = ((places.diff() != 1) | (local.diff() != 1)).nonzero().flatten() + 1
        starts, ends = [0, *breaks.tolist()], [*breaks.tolist(), len(places)]
        return [_Run(int(places[a]), int(local[a]), b - a) for a, b in zip(starts, ends, strict=True) if b > a]

    def gather(self, slices: Sequence[Tensor], ctx: ParallelContext) -> Tensor:
        """The canonical tensor of all ranks' local ones: what `to_local` cuts, put together again.

        slices: of every combination of ranks on the axes of `splits`, the last axis fastest.
        """
        tensors = list(slices)
        for split in reversed(self.splits):
            # The last axis is the fastest: neighbours in the list are its ranks.
            size = ctx.axis(split.axis).size
            tensors = [split.join(tensors[i : i + size]) for i in range(0, len(tensors), size)]
        (whole,) = tensors
        # Without a context to_canonical only removes the padding.
        return self.to_canonical(whole)


@dataclass(frozen=True)
class _Run:
    canonical: int
    local: int
    length: int


class LayoutModule(nn.Module):
    """A module whose own parameters are made by `declare`."""

    def __init__(self, ctx: ParallelContext) -> None:
        super().__init__()
        self.ctx = ctx
        self.layouts: dict[str, ParameterLayout] = {}

    def declare(self, name: str, layout: ParameterLayout | None) -> None:
        """Make the parameter `name` with uninitialized memory of this rank's shape; None: leave it None."""
        if layout is None:
            self.register_parameter(name, None)
            return
        shape = layout.local_shape(self.ctx)
        tensor = torch.empty(shape, dtype=layout.dtype or self.ctx.params_dtype, device=self.ctx.device)
        self.register_parameter(name, nn.Parameter(tensor, requires_grad=layout.trained))
        self.layouts[name] = layout


def parameter_layouts(model: nn.Module) -> dict[str, ParameterLayout]:
    """Canonical name -> layout, for every parameter of a model.

    Raises ValueError for a parameter that was made without `declare`: it would have no known layout.
    """
    layouts = declared_layouts(model)
    # A parameter that two modules share counts once, under the name that PyTorch lists.
    names = [name for name, _ in model.named_parameters()]
    for name in names:
        if name not in layouts:
            raise ValueError(f"parameter {name} has no layout; make it with LayoutModule.declare")
    return {name: layouts[name] for name in names}


def declared_layouts(model: nn.Module) -> dict[str, ParameterLayout]:
    """Canonical name -> layout, for the parameters that were made with `LayoutModule.declare`."""
    return {
        f"{path}.{name}" if path else name: layout
        for path, module in model.named_modules()
        for name, layout in getattr(module, "layouts", {}).items()
    }


@torch.no_grad()
def initialize(model: nn.Module, seed: int, ctx: ParallelContext) -> None:
    """Initialize every parameter from separate RNG streams, seeded by (seed, canonical name, block index).

    So the weights do not depend on the layout, nor on the order in which layers are built. A rank draws the blocks
    that it has elements of, one at a time: never more than BLOCK_ELEMENTS of a large tensor.
    """
    layouts = parameter_layouts(model)
    for name, parameter in model.named_parameters():
        _fill(parameter, layouts[name], partial(_block_seed, seed, name), ctx)


def _fill(parameter: Tensor, layout: ParameterLayout, seed_of: Callable[[int], int], ctx: ParallelContext) -> None:
    """parameter: this rank's tensor, padding included. seed_of: number of a block -> seed of its stream."""
    if layout.padded:
        parameter.zero_()
    for number, block, regions in drawn_blocks(layout, ctx):
        generator = torch.Generator(device=parameter.device)
        generator.manual_seed(seed_of(number))
        # fp32 whatever the parameter's dtype, so that runs in other dtypes start from the same numbers, rounded.
        drawn = torch.empty(block.shape, dtype=torch.float32, device=parameter.device)
        layout.init(drawn, generator)
        for region in regions:
            target = parameter[TensorSlice(region.local, region.canonical.shape).slices]
            target.copy_(drawn[region.canonical.relative_to(block.start).slices])


def drawn_blocks(layout: ParameterLayout, ctx: ParallelContext) -> Iterator[tuple[int, TensorSlice, list[LocalRegion]]]:
    """The blocks that this rank draws: number, elements of the canonical tensor, and what of them the rank holds."""
    regions = layout.regions(ctx)
    for number, block in enumerate(blocks_of(layout)):
        # A block without elements of this rank is not drawn: its stream is not a continuation of the one before.
        local_regions = [region.within(block) for region in regions]
        if within := [region for region in local_regions if region is not None]:
            yield number, block, within


def blocks_of(layout: ParameterLayout) -> list[TensorSlice]:
    """The parts of a canonical tensor that are drawn from a stream each. They depend on its shape alone."""
    if not isinstance(layout.init, Elementwise):
        return [TensorSlice.whole(layout.shape)]
    return list(_blocks(layout.shape))


def _blocks(shape: tuple[int, ...]) -> Iterator[TensorSlice]:
    """Runs along the first dimension of at most BLOCK_ELEMENTS, or blocks of each row where a row is larger."""
    if math.prod(shape) <= BLOCK_ELEMENTS:
        yield TensorSlice.whole(shape)
        return
    rows = BLOCK_ELEMENTS // math.prod(shape[1:])  # of the first dimension in a block; 0: a row is larger
    for start in range(0, shape[0], max(rows, 1)):
        if rows:
            yield TensorSlice((start,) + (0,) * (len(shape) - 1), (min(rows, shape[0] - start), *shape[1:]))
        else:
            yield from (TensorSlice((start, *block.start), (1, *block.shape)) for block in _blocks(shape[1:]))


def _block_seed(seed: int, name: str, number: int) -> int:
    """The first block has the stream of the tensor's name: most tensors are a single block."""
    return stream_seed(seed, name if number == 0 else f"{name} block {number}")


def stream_seed(seed: int, name: str) -> int:
    """A 63-bit seed for the random stream `name` of a run."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1  # torch's seeds are signed


def sequence_axes(ctx: ParallelContext) -> tuple[AxisName, ...]:
    """Axes on which a parameter that is applied to sharded sequences has a partial gradient."""
    return ("tp",) if ctx.sequence_parallel else ()


@dataclass(frozen=True)
class Elementwise:
    """An `Init` that draws all elements alike, whatever their places, so that a tensor can be drawn in blocks."""

    fill: Init

    def __call__(self, tensor: Tensor, generator: torch.Generator) -> object:
        return self.fill(tensor, generator)


def normal(std: float) -> Init:
    """Initialization from a normal distribution with mean 0."""
    return Elementwise(lambda tensor, generator: tensor.normal_(0.0, std, generator=generator))


def zeros(tensor: Tensor, generator: torch.Generator) -> None:
    """Initialization with 0."""
    tensor.zero_()


def ones(tensor: Tensor, generator: torch.Generator) -> None:
    """Initialization with 1."""
    tensor.fill_(1.0)


def constant(value: float) -> Init:
    """Initialization with one value."""
    return lambda tensor, generator: tensor.fill_(value)
