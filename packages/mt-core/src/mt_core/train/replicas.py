"""Checks that replicas of the weights are bitwise equal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from mt_core.errors import TrainingError
from mt_core.nn.layout import ParameterLayout
from mt_core.optim.finalize_grads import OTHER_AXES
from mt_core.parallel.context import AxisName, ParallelContext

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# The largest prime below 2^16, as in Adler-32. The factors of positions repeat with this period.
MODULUS = 65521


def check_replicas(weights: Mapping[str, Tensor], layouts: Mapping[str, ParameterLayout], ctx: ParallelContext) -> None:
    """Compare a hash of every local tensor over the axes on which it is replicated. Collective.

    Raises TrainingError, on the ranks of every axis that disagrees, with the names and the ranks.
    """
    by_axis: dict[AxisName, list[str]] = {}
    for name in weights:
        # Names are in the same order on the ranks of an axis, so that hashes are compared column by column.
        for axis in copying_axes(layouts[name]):
            if ctx.axis(axis).size > 1:
                by_axis.setdefault(axis, []).append(name)
    problems = [problem for axis, names in by_axis.items() for problem in _differing(axis, names, weights, ctx)]
    if problems:
        shown = "; ".join(problems[:3]) + (f"; and {len(problems) - 3} more" if len(problems) > 3 else "")
        raise TrainingError(
            f"ranks that should have the same weights do not: {shown}. A rank computed something else (a faulty "
            "device, or code that depends on the rank); go on from a checkpoint of before"
        )


def copying_axes(layout: ParameterLayout) -> Iterator[AxisName]:
    """The axes over which a parameter's slice is replicated."""
    yield layout.replicas
    dividing = {split.axis for split in layout.splits}
    yield from (axis for axis in OTHER_AXES[layout.replicas] if axis not in dividing)


def _differing(
    axis_name: AxisName, names: list[str], weights: Mapping[str, Tensor], ctx: ParallelContext
) -> Iterator[str]:
    axis = ctx.axis(axis_name)
    own = torch.stack([bit_hash(weights[name]) for name in names])
    # [ranks, names] int64
    hashes = own.new_empty((axis.size, len(names)))
    dist.all_gather_into_tensor(hashes.view(-1), own, group=axis.group)
    for column, name in enumerate(names):
        values = hashes[:, column].tolist()
        # The majority is taken to be right.
        usual = max(values, key=values.count)
        odd = [axis.ranks[place] for place, value in enumerate(values) if value != usual]
        if odd and values.count(usual) > len(odd):
            yield f"{name} of rank {' and '.join(map(str, odd))} among the {axis_name} ranks {list(axis.ranks)}"
        elif odd:
            yield f"{name} differs among the {axis_name} ranks {list(axis.ranks)}, and no value has a majority"


def bit_hash(tensor: Tensor) -> Tensor:
    """A 64-bit hash of the bits of a tensor and their positions."""
    # Bits and not values: 0.0 and -0.0 differ, and NaN equals itself.
    bits = tensor.detach().contiguous().view(-1).view(INTEGERS[tensor.element_size()]).long()
    places = torch.arange(len(bits), device=bits.device) % MODULUS + 1
    # Integer arithmetic modulo 2^64: exact, and independent of the order of summation on the device.
    return (bits * places).sum()
