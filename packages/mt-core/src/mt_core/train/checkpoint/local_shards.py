"""The shards that a rank holds, as slices of canonical tensors: the source when saving, the target when loading."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from mt_core.checkpoint_specs import CheckpointReader, Fragment, ReadsSlices
from mt_core.nn.layout import ParameterLayout
from mt_core.parallel.context import ParallelContext
from mt_core.tensor_slice import TensorSlice


@dataclass(frozen=True)
class LocalShard:
    """This rank's part of a tensor that is laid out like a parameter.

    slices: of the local tensor, in the order of their elements in `part`. part: a callable that returns the memory
    itself, or a copy made at the call.
    """

    name: str
    layout: ParameterLayout
    dtype: torch.dtype
    slices: Sequence[TensorSlice]
    part: Callable[[], Tensor]

    def fragments(self, ctx: ParallelContext) -> Iterator[Fragment]:
        """The same as slices of the canonical tensor; those of padding are left out."""
        regions = self.layout.regions(ctx)
        # A rank's part of an optimizer buffer is a range of elements, which is up to three rectangles of a matrix. A
        # region is a slice of the local tensor and the same slice of the canonical one. Intersections are fragments.
        for number, owned_slice in enumerate(self.slices):
            for region in regions:
                common = owned_slice.meet(TensorSlice(region.local, region.canonical.shape))
                if common is not None:
                    yield Fragment(
                        name=self.name,
                        shape=self.layout.shape,
                        dtype=self.dtype,
                        tensor_slice=common.relative_to(region.local).placed_at(region.canonical.start),
                        # Lazy: nothing is copied or converted until the fragment is written.
                        tensor=partial(self._cut, number, common.relative_to(owned_slice.start)),
                    )

    def _cut(self, number: int, tensor_slice: TensorSlice) -> Tensor:
        part = self.part()
        # `part` then holds the elements of the slices one after another; with one slice it may have the slice's shape
        # and any strides.
        if len(self.slices) > 1:
            sizes = [owned_slice.numel for owned_slice in self.slices]
            part = part.view(-1).split(sizes)[number]
        return part.view(self.slices[number].shape)[tensor_slice.slices]


def identity(tensor: Tensor) -> Tensor:
    """Identity. With functools.partial: a callable that returns an existing tensor."""
    return tensor


def whole_fragment(name: str, tensor: Tensor) -> Fragment:
    """An unsharded tensor. Other ranks that hold it hold the same values."""
    shape = tuple(tensor.shape)
    return Fragment(
        name=name,
        shape=shape,
        dtype=tensor.dtype,
        tensor_slice=TensorSlice.whole(shape),
        tensor=partial(identity, tensor),
    )


@torch.no_grad()
def fill(shard: LocalShard, reader: CheckpointReader, ctx: ParallelContext) -> None:
    """Read this rank's shard of a tensor into `shard.part()`, converting dtype and device."""
    fragments = list(shard.fragments(ctx))
    for fragment, values in zip(
        fragments, read_slices(reader, shard.name, [f.tensor_slice for f in fragments]), strict=True
    ):
        # tensor() is a view of part(), so this writes into the rank's memory.
        fragment.tensor().copy_(values)


def read_slices(reader: CheckpointReader, name: str, slices: Sequence[TensorSlice]) -> list[Tensor]:
    """Read slices of one tensor. A format without partial reads reads the whole tensor."""
    if not slices:
        return []
    if isinstance(reader, ReadsSlices):
        return reader.read_slices(name, slices)
    whole = reader.read(name)
    return [whole[tensor_slice.slices] for tensor_slice in slices]
