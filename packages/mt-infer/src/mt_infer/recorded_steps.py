"""Decode steps on a CPU as recorded lists of operators, which are called again without the Python of the layers.

For one sequence the weights of a layer are read in less time than PyTorch and Python need for its small operators. A
recording holds the operators of a step with their tensors, as a CUDA graph does: views are made once, results go into
the memory of the recording, and tensors whose lifetimes do not overlap share it. What depends on the lengths of the
sequences (attention) is called as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mt_core._torch_compat import pack_linear_weight, packed_linear
from mt_infer.cache.manager import free_bytes

aten = torch.ops.aten
OUT_VARIANTS: dict[Any, Any] = {
    aten.mm.default: aten.mm.out,
    aten.addmm.default: aten.addmm.out,
    aten.bmm.default: aten.bmm.out,
    aten.add.Tensor: aten.add.out,
    aten.sub.Tensor: aten.sub.out,
    aten.mul.Tensor: aten.mul.out,
    aten.div.Tensor: aten.div.out,
    aten.cat.default: aten.cat.out,
    aten.silu.default: aten.silu.out,
    aten.gelu.default: aten.gelu.out,
    aten.tanh.default: aten.tanh.out,
    aten.sigmoid.default: aten.sigmoid.out,
    aten.neg.default: aten.neg.out,
    aten.rsqrt.default: aten.rsqrt.out,
    aten.pow.Tensor_Scalar: aten.pow.Tensor_Scalar_out,
    aten.mean.dim: aten.mean.out,
    aten.index_select.default: aten.index_select.out,
    aten.linalg_vector_norm.default: aten.linalg_vector_norm.out,
    aten._int_mm.default: aten._int_mm.out,
}
"""Operator -> its form that writes into given memory. The results of others are copied there."""
PACKED_ROWS = 3
"""Rows of a product from which on packed weights are faster."""
PACKED_FOR = 16
"""Rows for which weights are packed."""
SHARE_OF_FREE = 0.25
ALIGNMENT = 64
"""Bytes; of a cache line."""


@dataclass
class Step:
    """One call. out: where its results belong; empty for an operator that writes into its arguments."""

    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: tuple[Tensor, ...] = ()

    @property
    def tensors(self) -> list[Tensor]:
        return tensors_in((self.args, self.kwargs, self.out))


def tensors_in(tree: Any) -> list[Tensor]:
    """But for packed weights, whose memory is oneDNN's, and which no step makes."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and not leaf.is_mkldnn]


class RecordedStep(TorchDispatchMode):
    """Records while it is entered; implements mt_core.train.cuda_graphs.capture.Graph."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self._made: dict[int, Tensor] = {}
        """Tensors that the recording made, views of them included, by id()."""
        self._is_paused = False
        self._calls: list[Callable[[], object]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not self._is_paused:
            self._add(func, args, kwargs or {}, out)
        return out

    def whole(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """`function`, which is recorded as one step, with what it decides at the time of its call."""

        def call(*args: Any) -> Tensor:
            self._is_paused = True
            try:
                out = function(*args)
            finally:
                self._is_paused = False
            self._keep([out])
            self.steps.append(Step(function, args, {}, (out,)))
            return out

        return call

    def _add(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        results = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        known = {x.untyped_storage().data_ptr() for x in tensors_in((args, kwargs))}
        self._keep(results)
        if func._schema.is_mutable:
            self.steps.append(Step(func, args, kwargs))
        # In inference mode `reshape` is an operator, which may copy: a view is recognized by its memory.
        elif not all(x.untyped_storage().data_ptr() in known for x in results):
            self.steps.append(Step(func, args, kwargs, tuple(results)))

    def _keep(self, tensors: Sequence[Tensor]) -> None:
        self._made.update({id(tensor): tensor for tensor in tensors})

    def finish(self, results: Sequence[Tensor], packs: PackedWeights) -> None:
        """Ends the recording: memory is shared, and calls are prepared. results: what is read after a replay."""
        self._share_memory(results)
        self._calls = [call for step in self.steps for call in _calls_of(step, packs)]
        self._made.clear()

    def replay(self) -> None:
        for call in self._calls:
            call()

    def _share_memory(self, results: Sequence[Tensor]) -> None:
        """Moves the tensors of the recording into one allocation, in which a storage takes the place of dead ones."""
        views: dict[int, list[Tensor]] = {}
        for tensor in self._made.values():
            views.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
        lives = self._lifetimes(views, results)
        sizes = {
            storage: -(-views[storage][0].untyped_storage().nbytes() // ALIGNMENT) * ALIGNMENT for storage in lives
        }
        starts, total = place_by_lifetime(lives, sizes)
        memory = torch.zeros(total, dtype=torch.uint8).untyped_storage()
        for storage, start in starts.items():
            for tensor in views[storage]:
                offset = start // tensor.element_size() + tensor.storage_offset()
                tensor.set_(memory, offset, tensor.shape, tensor.stride())

    def _lifetimes(self, views: dict[int, list[Tensor]], results: Sequence[Tensor]) -> dict[int, tuple[int, int]]:
        """Storage -> the first and the last step that has it, of those that the recording made."""
        lives: dict[int, tuple[int, int]] = {}
        for number, step in enumerate(self.steps):
            for tensor in step.tensors:
                storage = tensor.untyped_storage().data_ptr()
                # A constant, such as a scalar that was made a tensor, is no result of a step: it stays where it is.
                if storage in views and (storage in lives or _is_in(tensor, step.out)):
                    lives[storage] = (lives.get(storage, (number, 0))[0], number)
        for tensor in results:
            storage = tensor.untyped_storage().data_ptr()
            lives[storage] = (lives[storage][0], len(self.steps))
        return lives


def _is_in(tensor: Tensor, tensors: Sequence[Tensor]) -> bool:
    return any(tensor is other for other in tensors)


def _calls_of(step: Step, packs: PackedWeights) -> Iterator[Callable[[], object]]:
    call, args, kwargs, out = step.call, step.args, step.kwargs, step.out
    if not out:
        yield lambda: call(*args, **kwargs)
    elif call in EXPANSIONS and (calls := EXPANSIONS[call](packs, out[0], *args, **kwargs)):
        yield from calls
    elif call in OUT_VARIANTS:
        into = OUT_VARIANTS[call]
        (target,) = out
        yield lambda: into(*args, **kwargs, out=target)
    else:
        yield lambda: _put(out, call(*args, **kwargs))


def _linear(
    packs: PackedWeights, out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None
) -> list[Callable[[], object]]:
    if type(weight) is not torch.nn.Parameter and type(weight) is not Tensor:
        return []  # multiplied by its own function
    rows, target, columns = x.reshape(-1, x.shape[-1]), out.view(-1, out.shape[-1]), weight.t()
    if rows.untyped_storage().data_ptr() != x.untyped_storage().data_ptr():
        return []
    if len(rows) >= PACKED_ROWS and (packed := packs.of(weight)) is not None:
        return [lambda: target.copy_(packed_linear(rows, packed, bias))]
    if bias is None:
        return [lambda: aten.mm.out(rows, columns, out=target)]
    return [lambda: aten.addmm.out(bias, rows, columns, out=target)]


def _rms_norm(
    _: PackedWeights,
    out: Tensor,
    x: Tensor,
    shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> list[Callable[[], object]]:
    if weight is None or eps is None or x.dtype != torch.float32 or len(shape) > 1:
        return []
    width = x.shape[-1]
    rows, target = x.reshape(-1, 1, width), out.view(-1, 1, width)
    if rows.untyped_storage().data_ptr() != x.untyped_storage().data_ptr():
        return []
    columns = rows.transpose(1, 2)
    scale = x.new_empty(len(rows), 1, 1)
    epsilons = torch.full_like(scale, eps)
    return [
        # The mean of squares as a product of each row with itself: a third of the time of a reduction.
        lambda: aten.baddbmm.out(epsilons, rows, columns, alpha=1 / width, out=scale),
        scale.rsqrt_,
        lambda: aten.mul.out(rows, scale, out=target),
        lambda: out.mul_(weight),
    ]


def _copied(_: PackedWeights, out: Tensor, x: Tensor, *__: Any, **___: Any) -> list[Callable[[], object]]:
    target = out.view(x.shape)
    return [lambda: target.copy_(x)]


EXPANSIONS: dict[Any, Callable[..., list[Callable[[], object]]]] = {
    aten.linear.default: _linear,
    aten.rms_norm.default: _rms_norm,
    aten.flatten.using_ints: _copied,
    aten.reshape.default: _copied,
    aten.to.dtype: _copied,
    aten._to_copy.default: _copied,
}
"""Operator -> calls that put its result into given memory; none where that is not possible."""


def _put(out: tuple[Tensor, ...], values: Any) -> None:
    for target, new in zip(out, (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)), strict=True):
        target.copy_(new)


def place_by_lifetime(lives: dict[int, tuple[int, int]], sizes: dict[int, int]) -> tuple[dict[int, int], int]:
    """Where each block of memory begins, and how much memory that takes: blocks whose lives meet do not overlap.

    lives: first and last step of each block, both included. First fit, in the order of their beginnings.
    """
    starts: dict[int, int] = {}
    for block in sorted(lives, key=lambda number: lives[number]):
        first, _ = lives[block]
        taken = sorted((starts[other], starts[other] + sizes[other]) for other in starts if lives[other][1] >= first)
        start = 0
        for low, high in taken:
            if start + sizes[block] <= low:
                break
            start = max(start, high)
        starts[block] = start
    return starts, max((starts[block] + sizes[block] for block in starts), default=0)


class PackedWeights:
    """Copies of matrices in the order in which oneDNN multiplies a few rows by them, made when they are first needed.

    MKL reorders the matrix in each product, which takes as long as the product of 4 to 32 rows. A copy is made while it
    takes at most SHARE_OF_FREE of the memory that is free.
    """

    def __init__(self) -> None:
        self._by_address: dict[int, Tensor | None] = {}

    def of(self, weight: Tensor) -> Tensor | None:
        address = weight.data_ptr()
        if address not in self._by_address:
            has_room = weight.numel() * weight.element_size() <= SHARE_OF_FREE * free_bytes(weight.device)
            self._by_address[address] = pack_linear_weight(weight.detach(), PACKED_FOR) if has_room else None
        return self._by_address[address]

    def clear(self) -> None:
        self._by_address.clear()


class CpuRecorder:
    """Implements mt_core.train.cuda_graphs.capture.Recorder."""

    def __init__(self) -> None:
        self.packs = PackedWeights()

    def new_pool(self) -> None:
        return None

    @contextmanager
    def capture(self, pool: None) -> Iterator[RecordedStep]:
        recording = RecordedStep()
        with recording:
            yield recording

    def aside(self) -> Any:
        return nullcontext()
