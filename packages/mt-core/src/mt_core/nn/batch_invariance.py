"""Batch invariance on CPUs: each row of a result is a function of its own inputs, to the last bit.

Kernels choose how they compute by the shape that they are given, so that a token's result depends on what else is in
the batch (He, Defeating Nondeterminism in LLM Inference, 2025). Within `batch_invariant`, operators of torch
are computed in forms that do not:

products        in 16 rows or more, for which the order of additions does not depend on their number; checked once for
                every shape of the second factor, on this machine, with random matrices. Narrow factors are widened by
                zeros.
functions       (exp, silu, ...) on whole vectors: other code computes the elements at the end of a kernel's range.
convolutions    depthwise ones tap by tap, others sample by sample.
all-reduce      in the order of the ranks.

Sums and softmax over the last dimension are computed row by row anyway. Attention needs a core of its own, see
`attention_backends.batch_invariant`; layers with two forms (of one result) call `is_batch_invariant`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mt_core.config.schema import Config
from mt_core.errors import ConfigError
from mt_core.parallel.reductions import sum_in_rank_order_

aten = torch.ops.aten
_ACTIVE: ContextVar[bool] = ContextVar("batch_invariant", default=False)

ROWS = 16
"""Rows of a product are filled up to a multiple."""
MOST_ROWS = 512
"""Rows of one product: the check is made with as many."""
COLUMNS = 64
"""Columns of a narrow second factor."""
VECTOR = 64
"""Elements that a kernel computes alike; a multiple of every CPU's vector."""
RANGE = 32768
"""Elements that one thread computes (torch's grain size)."""

FUNCTIONS = frozenset(
    {
        "exp", "exp2", "expm1", "log", "log1p", "log2", "tanh", "sigmoid", "silu", "gelu", "softplus", "erf", "sin",
        "cos", "rsqrt", "pow", "log_sigmoid_forward", "logit", "elu", "mish",
    }
)  # fmt: skip
"""Functions of one tensor, element by element, and not exact: an exact one has one result."""


def is_batch_invariant() -> bool:
    return _ACTIVE.get()


@contextmanager
def batch_invariant(active: bool = True) -> Iterator[None]:
    """Within it, torch computes batch invariantly (see above); inactive: nothing changes."""
    if not active or is_batch_invariant():
        yield
        return
    token = _ACTIVE.set(True)
    try:
        with _mode():
            yield
    finally:
        _ACTIVE.reset(token)


def require_batch_invariance(config: Config, device: torch.device) -> None:
    """Raises ConfigError where numerics.batch_invariant is set for something that cannot provide it."""
    if not config.numerics.batch_invariant:
        return
    key, parallel = "numerics.batch_invariant=true", config.parallel
    if device.type != "cpu":
        raise ConfigError(
            f"{key} on {device.type}: matrix products there (cuBLAS) choose their order of additions by the number of "
            "rows; set train.device=cpu, or the key to false"
        )
    refused = [
        (
            parallel.context_parallel_size > 1,
            "parallel.context_parallel_size",
            "1: attention over shares of a sequence",
        ),
        (
            parallel.sequence_parallel,
            "parallel.sequence_parallel",
            "false: reduce-scatter adds in an order by position",
        ),
        (config.precision.fp8_format != "none", "precision.fp8_format", "none: scales depend on the whole batch"),
    ]
    for is_set, name, allowed in refused:
        if is_set:
            raise ConfigError(f"{key} needs {name} to be {allowed}")


def require_invariant_products(factors: Iterable[Tensor]) -> None:
    """Checks the products x b for each second factor b [K, N], before they are computed for anybody.

    Raises ConfigError for one whose rows depend on their number on this machine.
    """
    for factor in factors:
        _mode().width(factor[None])


class _BatchInvariance(TorchDispatchMode):
    """Replaces operators. See the module."""

    def __init__(self) -> None:
        super().__init__()
        self._widths: dict[tuple[Any, ...], int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name, kwargs = func._schema.name, dict(kwargs or {})
        if replacement := self._replacement(name, args):
            return _into(kwargs.pop("out", None), replacement(func, *args, **kwargs))
        # Elsewhere autograd has taken composite operators (linear, matmul) apart before this mode sees them.
        if torch.is_inference_mode_enabled():
            # Composite operators arrive whole there.
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return func(*args, **kwargs)

    def _replacement(self, name: str, args: Sequence[Any]) -> Callable[..., Any] | None:
        """What computes an operator batch invariantly; None: the operator itself does."""
        if name == "c10d::allreduce_":
            return _all_reduce
        if not args or not isinstance(args[0], Tensor) or not args[0].is_floating_point():
            return None
        operator = name.removeprefix("aten::")
        products = {"mm": self._mm, "addmm": self._addmm, "bmm": self._bmm, "baddbmm": self._baddbmm}
        if operator in products:
            return products[operator]  # type: ignore[return-value]
        if operator == "convolution":
            return self._convolution
        # A function of two tensors, such as pow, is left as it is.
        single = args[0].numel() and not any(isinstance(other, Tensor) for other in args[1:])
        if operator.removesuffix("_") in FUNCTIONS and single:
            return _in_place if operator.endswith("_") else _elementwise
        return None

    # -- products ---------------------------------------------------------------------------------

    def _mm(self, func: Any, a: Tensor, b: Tensor) -> Tensor:
        """a [R, K], b [K, N] -> [R, N]"""
        if not a.numel() or not b.numel():
            return func(a, b)
        columns = b.shape[1]
        wide = _widened(b, self.width(b[None]))  # [K, width]
        # At most as many rows as were checked. Rows of zeros do not change others.
        pieces = [torch.mm(_filled(piece, 0), wide)[: len(piece), :columns] for piece in a.split(MOST_ROWS)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _addmm(self, func: Any, bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        product = self._mm(torch.mm, a, b)
        return product * alpha + bias * beta if (alpha, beta) != (1, 1) else product + bias

    def _bmm(self, func: Any, a: Tensor, b: Tensor) -> Tensor:
        """a [B, R, K], b [B, K, N] -> [B, R, N]"""
        if not a.numel() or not b.numel():
            return func(a, b)
        columns = b.shape[2]
        # Strides are part of what was checked.
        b = b.contiguous()
        wide = _widened(b, self.width(b[:1]))
        pieces = [
            torch.bmm(_filled(piece, 1), wide)[:, : piece.shape[1], :columns] for piece in a.split(MOST_ROWS, dim=1)
        ]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)

    def _baddbmm(self, func: Any, added: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        product = self._bmm(torch.bmm, a, b)
        return product * alpha + added * beta

    def width(self, b: Tensor) -> int:
        """Columns for which rows of a product with b [1, K, N] do not depend on their number and place.

        Raises ConfigError when there are none.
        """
        # Kernels choose by shape, order in memory, dtype and threads.
        key = (*b.shape, b.stride()[1:], b.dtype, torch.get_num_threads())
        if key not in self._widths:
            columns = b.shape[2]
            # As it is, or else filled up with columns of zeros, for which libraries have regular kernels.
            widths = [columns, -(-columns // COLUMNS) * COLUMNS]
            full = _random_like(b)
            able = next((width for width in widths if _is_invariant(_widened(full, width))), None)
            if able is None:
                raise ConfigError(
                    f"numerics.batch_invariant=true: on this machine a row of a product with a matrix of "
                    f"{list(b.shape[1:])} in {str(b.dtype).removeprefix('torch.')} depends on how many rows there are "
                    "(with OMP_NUM_THREADS=1 it may not)"
                )
            self._widths[key] = able
        return self._widths[key]

    def _convolution(self, func: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *options: Any) -> Tensor:
        """x [B, C, S], weight [out, C / groups, k]"""
        stride, padding, dilation, transposed, _, groups = options
        plain = (list(stride), list(padding), list(dilation), transposed) == ([1], [0], [1], False)
        if plain and groups == weight.shape[0] and weight.shape[1] == 1:
            return _depthwise(x, weight[:, 0], bias)
        # One sample at a time: the algorithm is chosen by the batch size.
        return torch.cat([func(sample, weight, bias, *options) for sample in x.split(1)])


def _random_like(b: Tensor) -> Tensor:
    """Random matrix of b's shape, strides and dtype. The verdict holds for every later factor of this shape, so that it
    may not depend on the first one's values: in one that is padded with zeros, orders of addition that differ give one
    sum."""
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(b.shape, generator=generator).to(b.dtype)
    # Elements that share memory (an expanded factor) cannot be written apart.
    return values if 0 in b.stride() else torch.empty_strided(b.shape, b.stride(), dtype=b.dtype).copy_(values)


def _is_invariant(b: Tensor) -> bool:
    """Whether rows of a [R, K] x b [1, K, N] are the same in products of other sizes, and of several matrices."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randn((1, MOST_ROWS, b.shape[1]), generator=generator).to(b.dtype)
    whole = torch.mm(a[0], b[0])
    spans = ((0, 16), (3, 16), (5, 32), (20, 48), (37, 80), (1, 256))  # (first row, rows)
    parts = [(first, torch.mm(a[0, first : first + rows].contiguous(), b[0])) for first, rows in spans]
    three = torch.bmm(a[:, :48].expand(3, -1, -1).contiguous(), b.expand(3, -1, -1).contiguous())
    return all(torch.equal(part, whole[first : first + len(part)]) for first, part in parts) and all(
        torch.equal(product, whole[:48]) for product in three
    )


def _into(out: Tensor | None, result: Any) -> Any:
    return result if out is None else out.copy_(result)


def _filled(a: Tensor, dim: int) -> Tensor:
    """Rows along dim filled up with zeros."""
    missing = -a.shape[dim] % ROWS
    return (
        a.contiguous()
        if not missing
        else torch.cat([a, a.new_zeros((*a.shape[:dim], missing, *a.shape[dim + 1 :]))], dim)
    )


def _widened(b: Tensor, width: int) -> Tensor:
    missing = width - b.shape[-1]
    return b if not missing else torch.cat([b, b.new_zeros((*b.shape[:-1], missing))], -1)


def _depthwise(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [B, C, S], weight [C, k] -> [B, C, S - k + 1]"""
    length = x.shape[2] - weight.shape[1] + 1
    y = x[:, :, :length] * weight[:, :1]
    # Additions in the order of taps, for every element alike.
    for tap in range(1, weight.shape[1]):
        y = y + x[:, :, tap : tap + length] * weight[:, tap : tap + 1]
    return y if bias is None else y + bias[:, None]


# -- functions -------------------------------------------------------------------------------------


def _elementwise(func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """A function of x, element by element, in pieces whose elements all take the vectorized code."""
    flat = x.reshape(-1)
    missing = -len(flat) % VECTOR
    if missing:
        # Ones: every function is finite there.
        flat = torch.cat([flat, flat.new_ones(missing)])
    # One thread a piece, so that no thread's range ends within a vector.
    pieces = [func(piece.contiguous(), *args, **kwargs) for piece in flat.split(RANGE)]
    if isinstance(pieces[0], tuple):
        return tuple(_shaped([piece[i] for piece in pieces], x) for i in range(len(pieces[0])))
    return _shaped(pieces, x)


def _in_place(func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    packet = getattr(aten, func._schema.name.removeprefix("aten::").removesuffix("_"))
    return x.copy_(_elementwise(getattr(packet, func._overloadname), x, *args, **kwargs))


def _shaped(pieces: list[Tensor], like: Tensor) -> Tensor:
    flat = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    # What a function keeps for its backward pass may be empty.
    return flat[: like.numel()].reshape(like.shape) if flat.numel() else flat


# -- sums over ranks -------------------------------------------------------------------------------


def _all_reduce(func: Any, tensors: list[Tensor], group: Any, operation: Any, *options: Any, **kwargs: Any) -> Any:
    """Sums in the order of the ranks."""
    members = dist.ProcessGroup.unbox(group)
    # Of two ranks the sum is the same in either order, a + b = b + a; three and more have to be ordered.
    is_sum = operation.op() == dist.ReduceOp.SUM  # torch 2.11 has no ReduceOp.unbox
    if members.size() <= 2 or not is_sum or not tensors[0].is_floating_point():
        return func(tensors, group, operation, *options, **kwargs)
    return tensors, sum_in_rank_order_(tensors, group)


@cache
def _mode() -> _BatchInvariance:
    """One for the process: what it has checked holds for the machine."""
    return _BatchInvariance()
