"""What a rank holds of a run's tensors, as boxes of the canonical ones: what it writes, and where it reads into."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from mt_core.nn.boxes import Box
from mt_core.nn.layout import ParameterLayout
from mt_core.parallel.context import ParallelContext
from mt_core.specs import CheckpointReader, Fragment, ReadsBoxes


@dataclass(frozen=True)
class Held:
    """This rank's part of a tensor that is laid out like a parameter.

    boxes: of the local tensor, in the order in which their elements lie in `part`. part: the memory itself, or a
    copy that is made when it is asked for.
    """

    name: str
    layout: ParameterLayout
    dtype: torch.dtype
    boxes: Sequence[Box]
    part: Callable[[], Tensor]

    def fragments(self, ctx: ParallelContext) -> Iterator[Fragment]:
        """The same as boxes of the canonical tensor; those of padding are left out."""
        patches = self.layout.patches(ctx)
        for number, own in enumerate(self.boxes):
            for patch in patches:
                common = own.meet(Box(patch.local, patch.canonical.shape))
                if common is not None:
                    yield Fragment(
                        name=self.name,
                        shape=self.layout.shape,
                        dtype=self.dtype,
                        box=common.relative_to(patch.local).placed_at(patch.canonical.start),
                        tensor=partial(self._cut, number, common.relative_to(own.start)),
                    )

    def _cut(self, number: int, box: Box) -> Tensor:
        part = self.part()
        if len(self.boxes) > 1:
            sizes = [own.numel for own in self.boxes]
            part = part.view(-1).split(sizes)[number]
        return part.view(self.boxes[number].shape)[box.slices]


def given(tensor: Tensor) -> Tensor:
    """With functools.partial: what gives a tensor that is there already."""
    return tensor


def whole_fragment(name: str, tensor: Tensor) -> Fragment:
    """A tensor that this rank holds whole; if others hold it, too, theirs is alike."""
    shape = tuple(tensor.shape)
    return Fragment(name=name, shape=shape, dtype=tensor.dtype, box=Box.whole(shape), tensor=partial(given, tensor))


@torch.no_grad()
def fill(held: Held, reader: CheckpointReader, ctx: ParallelContext) -> None:
    """Read what this rank holds of a tensor into `held.part()`, of any dtype and device."""
    fragments = list(held.fragments(ctx))
    for fragment, values in zip(fragments, read_boxes(reader, held.name, [f.box for f in fragments]), strict=True):
        fragment.tensor().copy_(values)


def read_boxes(reader: CheckpointReader, name: str, boxes: Sequence[Box]) -> list[Tensor]:
    """Boxes of one tensor; a format that cannot read parts is read whole."""
    if not boxes:
        return []
    if isinstance(reader, ReadsBoxes):
        return reader.read_boxes(name, boxes)
    whole = reader.read(name)
    return [whole[box.slices] for box in boxes]
