"""Triton kernels of the recurrence of Mamba-2: in Triton's interpreter against a formula in fp64, compiled for Hopper,
and refused where they do not serve."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from tests.core.nn.kernels.interpreter import run_interpreted
from torch import Tensor

from mt_core.errors import ConfigError
from mt_core.parallel.context import ParallelContext
from mt_models.blocks.mamba_backends import STATE_SPACE, build_scans
from mt_models.blocks.state_space import chunked_scan


class Case(NamedTuple):
    length: int
    groups: int
    heads: int
    state_dim: int
    value: int
    documents: tuple[int, ...] = ()
    """Where the second and later ones begin."""
    has_state: bool = False
    dtype: torch.dtype = torch.float32
    rows: int = 1


CASES = {
    "two chunks, the second of 6 positions": Case(70, 1, 1, 16, 32),
    "odd sizes, heads that share a group": Case(37, 1, 2, 20, 33, has_state=True, rows=2),
    "documents in and at the end of chunks": Case(130, 1, 1, 16, 16, (3, 64, 65, 128), has_state=True),
    "few positions, two groups": Case(5, 2, 4, 64, 64, rows=2),
    "128 numbers in bf16": Case(70, 1, 2, 128, 64, (50,), has_state=True, dtype=torch.bfloat16),
}
LARGEST = {torch.float32: 5e-6, torch.bfloat16: 3e-2}
"""Error, as a part of the largest number of each result. The products of bf16 have 8 bits, of truncated numbers in the
interpreter."""
LARGEST_OF_SUM = {"da": 5e-5}
"""Error in fp32 of a sum over all positions that cancels: that of torch's chunks has 1.3e-5 here."""
NAMES = ("y", "last", "dx", "ddt", "da", "db", "dc", "dstate")


class Drawn(NamedTuple):
    inputs: list[Tensor]
    """x, dt, a, b, c, and the state where there is one"""
    documents: Tensor | None
    gradients: tuple[Tensor, Tensor]
    """Gradients of outputs and of the last state"""


def draw(case: Case) -> Drawn:
    """x, b and c side by side in one tensor, as a convolution leaves them."""
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    rows, values, keys = case.rows, case.heads * case.value, case.groups * case.state_dim
    x, b, c = normal(rows, case.length, values + 2 * keys).to(case.dtype).split((values, keys, keys), -1)
    dt, a = 0.1 * normal(rows, case.length, case.heads).exp(), -3.0 * normal(case.heads).exp()
    state = normal(rows, case.heads, case.value, case.state_dim)
    documents = torch.bucketize(torch.arange(case.length), torch.tensor(case.documents), right=True).expand(rows, -1)
    by_head = x.unflatten(-1, (case.heads, -1))
    inputs = [by_head, dt, a, b.unflatten(-1, (case.groups, -1)), c.unflatten(-1, (case.groups, -1))]
    return Drawn(
        [*inputs, state] if case.has_state else inputs,
        documents if case.documents else None,
        (normal(*by_head.shape), normal(*state.shape)),
    )


def formula(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor | None, documents: Tensor | None
) -> tuple[Tensor, Tensor]:
    """One position after the other in fp64."""
    b, c = (part.repeat_interleave(x.shape[2] // b.shape[2], 2) for part in (b, c))
    s = x.new_zeros(x.shape[0], *x.shape[2:], b.shape[3]) if state is None else state
    outputs = []
    for t in range(x.shape[1]):
        if documents is not None and t:
            s = s * (documents[:, t] == documents[:, t - 1])[:, None, None, None]
        added = (dt[:, t, :, None] * x[:, t])[..., None] * b[:, t, :, None]
        s = s * (dt[:, t] * a).exp()[..., None, None] + added
        outputs.append(torch.einsum("bhpn,bhn->bhp", s, c[:, t]))
    return torch.stack(outputs, 1), s


def results(scan: Any, drawn: Drawn, dtype: torch.dtype | None) -> list[Tensor]:
    """Outputs and gradients; dtype: of all inputs, in place of their own."""
    leaves = [x.detach().to(dtype or x.dtype).requires_grad_() for x in drawn.inputs]
    y, last = scan(*leaves[:5], leaves[5] if len(leaves) > 5 else None, drawn.documents)
    dy, dlast = (x.to(like.dtype) for x, like in zip(drawn.gradients, (y, last), strict=True))
    return [x.detach() for x in (y, last, *torch.autograd.grad((y, last), leaves, (dy, dlast)))]


def errors_of_scans(rank: int, world: int) -> dict[str, dict[str, float]]:
    from mt_models.blocks.triton_kernels.state_space import triton_scan

    def scan(*inputs: Any) -> tuple[Tensor, Tensor]:
        *tensors, state, documents = inputs
        return triton_scan(*tensors, chunk_size=64, state=state, segment_ids=documents)

    errors = {}
    for name, case in CASES.items():
        drawn = draw(case)
        both = zip(results(scan, drawn, None), results(formula, drawn, torch.float64), strict=True)
        errors[name] = {n: float((x - y).abs().max() / y.abs().max()) for n, (x, y) in zip(NAMES, both, strict=False)}
    return errors


@pytest.mark.long
def test_kernels_compute_the_formula_and_its_gradients() -> None:
    (errors,) = run_interpreted(errors_of_scans)
    assert errors.keys() == CASES.keys()
    for name, of_results in errors.items():
        limit = LARGEST[CASES[name].dtype]
        limits = {n: max(limit, LARGEST_OF_SUM.get(n, 0.0)) for n in of_results}
        assert {n: error for n, error in of_results.items() if not error < limits[n]} == {}, name


def launched() -> None:
    """A scan of a layer of Nemotron-H 8B, and its gradients."""
    from mt_models.blocks.triton_kernels.state_space import triton_scan

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(*shape, device="meta", dtype=dtype, requires_grad=True)

    x, b, c = empty(2, 4096, 128, 64), empty(2, 4096, 8, 128), empty(2, 4096, 8, 128)
    dt, a = empty(2, 4096, 128, dtype=torch.float32), empty(128, dtype=torch.float32)
    documents = torch.empty(2, 4096, device="meta", dtype=torch.int64)
    y, last = triton_scan(
        x, dt, a, b, c, chunk_size=128, state=torch.empty(2, 128, 64, 128, device="meta"), segment_ids=documents
    )
    torch.autograd.grad((y, last), (x, dt, a, b, c), (torch.empty_like(y), torch.empty_like(last)))


@pytest.mark.long
def test_kernels_compile_for_hopper_without_spills(tmp_path, monkeypatch) -> None:
    """232,448: bytes of shared memory that a program can have on an H100."""
    pytest.importorskip("triton")
    from tests.core.nn.kernels.recorded_launches import compiled, launches_of

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    launches = launches_of(launched, monkeypatch.setattr)
    assert len(launches) == 2 + 5  # backward computes states again
    for kernel in {compiled(launch, tmp_path) for launch in launches}:
        assert kernel.stack == 0, kernel.name
        assert kernel.shared <= 232_448, kernel.name
        assert "wgmma.mma_async" in kernel.ptx, kernel.name


def test_kernels_that_do_not_serve_are_refused() -> None:
    pytest.importorskip("triton")
    cpu = ParallelContext(torch.device("cpu"), torch.bfloat16)
    with pytest.raises(ConfigError, match=r'mamba_scan_backend="triton" cannot serve \(cpu, bfloat16, .*CUDA device'):
        build_scans(STATE_SPACE, "triton", cpu, 128)
    single = ParallelContext(torch.device("meta"), torch.float32)
    with pytest.raises(ConfigError, match="set precision.dtype=bf16"):
        build_scans(STATE_SPACE, "triton", single, 128)
    half = ParallelContext(torch.device("meta"), torch.bfloat16)
    with pytest.raises(ConfigError, match="at most 128 numbers for each channel; change model.mamba_state_dim"):
        build_scans(STATE_SPACE, "triton", half, 256)
    assert build_scans(STATE_SPACE, "auto", half, 128).whole is chunked_scan
