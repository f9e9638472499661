"""Hashes of weights that do not depend on how ranks divide them: those of trainer and generator are equal.

The hash of a tensor is the sum over its elements of (bits of the value in fp32) * m(number of the element) modulo 2^64,
with m odd and scrambled, so that ranks add up what they have. Any change of one element changes it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from mt_core.checkpoint_specs import Fragment
from mt_core.errors import TrainingError
from mt_core.nn.layout import parameter_layouts
from mt_core.parallel.context import Axis, ParallelContext
from mt_core.parallel.first_rank import all_gather_objects
from mt_core.tensor_slice import TensorSlice
from mt_core.train.checkpoint.local_shards import LocalShard, identity
from mt_core.train.engine import Engine

FACTORS = (-7046029254386353131, -4417276706812531889)
"""0x9E3779B97F4A7C15 and 0xC2B2AE3D27D4EB4F, as signed numbers."""
MOST_ELEMENTS = 1 << 20
Hashes = Mapping[str, int]


Dtypes = Mapping[str, torch.dtype]


def trained_hashes(engine: Engine, dtypes: Dtypes) -> Hashes:
    """Hashes of the weights that are trained, rounded to the dtypes of a copy's weights by name. Collective over the
    world."""
    return hashes_of(trained_fragments(engine), engine.ctx.world, dtypes)


def module_dtypes(model: nn.Module, world: Axis) -> Dtypes:
    """Dtypes of the weights of all stages. Collective over the world."""
    local_dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    return {name: dtype for of_rank in all_gather_objects(local_dtypes, world) for name, dtype in of_rank.items()}


def module_hashes(model: nn.Module, ctx: ParallelContext) -> Hashes:
    """Hashes of a model in the layout of `ctx`. Collective over the world."""
    return hashes_of(module_fragments(model, ctx), ctx.world)


def require_equal(trained: Hashes, copied: Hashes, version: int) -> None:
    """Raises TrainingError, which names the tensors, for a copy that is not the trained weights."""
    different = [name for name, value in copied.items() if trained.get(name) != value]
    if different:
        raise TrainingError(
            f"after step {version} the weights that generate are not those that are trained: {', '.join(different[:3])}"
            f"{f' and {len(different) - 3} more' if len(different) > 3 else ''} of {len(copied)} tensors differ. "
            "Completions would be those of another policy, so that the run stops; resume it from its last checkpoint"
        )


def digest(hashes: Hashes) -> str:
    """16 hexadecimal digits for all tensors."""
    text = "".join(f"{name}:{value & (1 << 64) - 1:016x}\n" for name, value in sorted(hashes.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def hashes_of(fragments: Iterable[Fragment], world: Axis, dtypes: Dtypes | None = None) -> Hashes:
    """Slices that several ranks have count once."""
    rounded = dtypes or {}
    local_hashes = {(part.name, part.tensor_slice): fragment_hash(part, rounded.get(part.name)) for part in fragments}
    together: dict[tuple[str, TensorSlice], int] = {}
    for parts in all_gather_objects(local_hashes, world):
        together |= parts
    sums: dict[str, int] = {}
    for (name, _), value in together.items():
        sums[name] = (sums.get(name, 0) + value) % (1 << 64)
    return sums


@torch.no_grad()
def fragment_hash(fragment: Fragment, dtype: torch.dtype | None = None) -> int:
    """The part of the tensor's hash that these elements are, rounded to `dtype`."""
    values, start, shape = fragment.tensor(), fragment.tensor_slice.start, fragment.shape
    if values.ndim < 2:
        values, start, shape = values.reshape(1, -1), (0, *(start or (0,))), (1, *(shape or (1,)))
    width, total = math.prod(shape[1:]), 0
    of_row = element_numbers(start[1:], tuple(values.shape[1:]), shape[1:], values.device)
    # So many rows at once that integers of 8 bytes take little memory.
    each = max(MOST_ELEMENTS // max(math.prod(values.shape[1:]), 1), 1)
    for first in range(0, len(values), each):
        rows = values[first : first + each].to(dtype or values.dtype).float().contiguous()
        numbers = torch.arange(start[0] + first, start[0] + first + len(rows), device=rows.device) * width
        factors = multipliers(numbers.view(-1, *[1] * of_row.ndim) + of_row)
        total += int((rows.view(torch.int32) * factors).sum())
    return total % (1 << 64)


def element_numbers(
    start: tuple[int, ...], shape: tuple[int, ...], whole: tuple[int, ...], device: torch.device
) -> Tensor:
    """[*shape] numbers of the elements of a slice in the row-major order of the whole tensor."""
    numbers = torch.zeros((), dtype=torch.int64, device=device)
    for first, size, length in zip(start, shape, whole, strict=True):
        numbers = numbers[..., None] * length + torch.arange(first, first + size, device=device)
    return numbers


def multipliers(numbers: Tensor) -> Tensor:
    """An odd factor of each number; products wrap around."""
    scrambled = numbers * FACTORS[0]
    scrambled = (scrambled ^ (scrambled >> 29)) * FACTORS[1]
    return scrambled ^ (scrambled >> 32) | 1


def trained_fragments(engine: Engine) -> Iterator[Fragment]:
    for name, layout in engine.layouts.items():
        slices, part = engine.weights.owned_weight(name)
        yield from LocalShard(name, layout, part.dtype, slices, partial(identity, part)).fragments(engine.ctx)


def module_fragments(model: nn.Module, ctx: ParallelContext) -> Iterator[Fragment]:
    layouts = parameter_layouts(model)
    for name, parameter in model.named_parameters():
        part = parameter.detach()
        whole = [TensorSlice.whole(tuple(part.shape))]
        yield from LocalShard(name, layouts[name], part.dtype, whole, partial(identity, part)).fragments(ctx)
