"""Hyper-connections: the reference and mt's Triton kernels in Triton's interpreter against formulas in fp64, with all
gradients, and compiled for Hopper."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from tests.core.nn.kernels.interpreter import fused, implementation, run_interpreted
from torch import Tensor

from mt_core.nn.kernels.reference.hyper_connection import Connection, mixed_streams, read_streams


class Case(NamedTuple):
    rows: int
    length: int
    streams: int
    hidden: int
    connection: Connection
    dtype: torch.dtype = torch.float32


CASES = {
    "several tiles": Case(2, 7, 4, 150, Connection(1e-6, 1e-6, 5)),
    "one iteration": Case(1, 3, 4, 20, Connection(1e-5, 1e-3, 1)),
    "two streams": Case(1, 5, 2, 33, Connection(1e-6, 1e-6, 20)),
    "eight streams": Case(1, 2, 8, 70, Connection(1e-6, 1e-2, 3)),
    "bf16": Case(1, 9, 4, 64, Connection(1e-6, 1e-6, 20), torch.bfloat16),
}
LARGEST = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""Error, as a part of the largest number of each result."""
NAMES = ("input", "post", "C", "dx", "dproducts", "dbias", "dscale")
NAMES_OF_WRITING = ("streams", "doutput", "dpost", "dC", "dx")


def drawn(case: Case) -> tuple[list[Tensor], list[Tensor]]:
    """Streams, products, bias and scale; output, post, C and streams."""
    generator, n = torch.Generator().manual_seed(3), case.streams

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    shape = (case.rows, case.length)
    streams = normal(*shape, n * case.hidden).to(case.dtype)
    products, bias, scale = normal(*shape, (2 + n) * n), normal((2 + n) * n), normal(3)
    output, post, mixing = normal(*shape, case.hidden).to(case.dtype), normal(*shape, n), normal(*shape, n, n)
    return [streams, products, bias, scale], [output, post, mixing, streams]


def read_formula(
    x: Tensor, products: Tensor, bias: Tensor, scale: Tensor, connection: Connection
) -> tuple[Tensor, ...]:
    """Token by token."""
    n, (epsilon, floor, iterations, _) = int(products.shape[-1] ** 0.5), connection
    inputs, posts, matrices = [], [], []
    for token, numbers in zip(x.flatten(0, 1), products.flatten(0, 1), strict=True):
        z = numbers / (token @ token / len(token) + epsilon).sqrt()
        pre, post = (1 / (1 + (-(z[i * n :][:n] * scale[i] + bias[i * n :][:n])).exp()) for i in (0, 1))
        c = (z[2 * n :] * scale[2] + bias[2 * n :]).view(n, n).exp()
        c = c / c.sum(1, keepdim=True) + floor
        for step in range(2 * iterations - 1):
            c = c / (c.sum(step % 2, keepdim=True) + floor)
        inputs.append((pre + floor) @ token.view(n, -1))
        posts.append(2 * post)
        matrices.append(c)
    return tuple(torch.stack(part).unflatten(0, x.shape[:2]) for part in (inputs, posts, matrices))


def write_formula(output: Tensor, post: Tensor, mixing: Tensor, x: Tensor) -> Tensor:
    streams = x.unflatten(-1, (post.shape[-1], -1))
    mixed = torch.einsum("bsij,bsih->bsjh", mixing, streams) + torch.einsum("bsj,bsh->bsjh", post, output)
    return mixed.flatten(-2)


def results(function: Any, inputs: list[Tensor], dtype: torch.dtype | None, *others: Any) -> list[Tensor]:
    """Results and gradients; dtype: of all inputs, in place of their own."""
    leaves = [x.detach().to(dtype or x.dtype).requires_grad_() for x in inputs]
    values = function(*leaves, *others)
    values = values if isinstance(values, tuple) else (values,)
    generator = torch.Generator().manual_seed(4)
    # Rounded to the dtype of the kernel's result for both: that is no error of the kernel.
    kinds = (inputs[0].dtype, torch.float32, torch.float32)
    grads = [
        torch.randn(x.shape, generator=generator).to(kind).to(x.dtype) for x, kind in zip(values, kinds, strict=False)
    ]
    return [x.detach() for x in (*values, *torch.autograd.grad(values, leaves, grads))]


def errors_of(read: Any, write: Any, case: Case) -> dict[str, float]:
    reading, writing = drawn(case)
    errors = {}
    for names, function, formula, inputs, others in (
        (NAMES, read, read_formula, reading, (case.connection,)),
        (NAMES_OF_WRITING, write, write_formula, writing, ()),
    ):
        exact_results = results(formula, inputs, torch.float64, *others)
        both = zip(results(function, inputs, None, *others), exact_results, strict=True)
        for name, (x, exact) in zip(names, both, strict=True):
            assert x.shape == exact.shape, name
            errors[f"{function.__name__} {name}"] = float((x - exact).abs().max() / exact.abs().max())
    return errors


def errors_of_kernels(rank: int, world: int) -> dict[str, dict[str, float]]:
    kernels = implementation("hyper_connection", "triton"), fused("hyper_connection")
    return {name: errors_of(*kernels, case) for name, case in CASES.items()}


def assert_small(errors: dict[str, dict[str, float]]) -> None:
    assert errors.keys() == CASES.keys()
    for name, of_results in errors.items():
        assert len(of_results) == len(NAMES) + len(NAMES_OF_WRITING)
        limit = LARGEST[CASES[name].dtype]
        assert {part: error for part, error in of_results.items() if not error < limit} == {}, name


def test_the_reference_is_the_formula() -> None:
    assert_small({name: errors_of(read_streams, mixed_streams, case) for name, case in CASES.items()})


@pytest.mark.long
def test_kernels_compute_the_formulas_and_their_gradients() -> None:
    (errors,) = run_interpreted(errors_of_kernels)
    assert_small(errors)


def launched() -> None:
    """The connection of a block of DeepSeek-V4, and its gradients."""
    from mt_core.nn.kernels.triton_kernels import hyper_connection as kernels

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(*shape, device="meta", dtype=dtype, requires_grad=True)

    for n, hidden in ((4, 7168), (8, 4096)):
        streams, output = (empty(1, 4096, width, dtype=torch.bfloat16) for width in (n * hidden, hidden))
        inputs = [streams, empty(1, 4096, (2 + n) * n), empty((2 + n) * n), empty(3)]
        values = kernels.read_streams(*inputs, Connection(1e-6, 1e-6, 20))
        torch.autograd.grad(values, inputs, [torch.empty_like(x) for x in values])
        mixed = kernels.mixed_streams(output, *(x.detach().requires_grad_() for x in values[1:]), streams)
        torch.autograd.grad(mixed, (output, streams), torch.empty_like(mixed))


@pytest.mark.long
def test_kernels_compile_for_hopper_without_spills(tmp_path, monkeypatch) -> None:
    pytest.importorskip("triton")
    from tests.core.nn.kernels.recorded_launches import compiled, launches_of

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    launches = launches_of(launched, monkeypatch.setattr)
    assert len(launches) == 10
    for kernel in (compiled(launch, tmp_path) for launch in launches):
        assert kernel.stack == 0, kernel.name
