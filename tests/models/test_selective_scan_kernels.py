"""Triton kernels of the recurrence of Mamba-1, and of steps of decoding of Mamba-1 and Mamba-2: in Triton's interpreter
against formulas in fp64, compiled for Hopper, and refused where they do not serve."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from tests.core.nn.kernels.interpreter import run_interpreted
from tests.models.test_state_space_kernels import formula as formula_of_heads
from torch import Tensor

from mt_core.errors import ConfigError
from mt_core.parallel.context import ParallelContext
from mt_models.blocks.mamba_backends import SELECTIVE, STATE_SPACE, build_scans
from mt_models.blocks.selective_scan import selective_scan
from mt_models.blocks.state_space import chunked_scan, recurrent_scan


class Case(NamedTuple):
    length: int
    channels: int
    state_dim: int
    documents: tuple[int, ...] = ()
    """Where the second and later ones begin."""
    has_state: bool = False
    dtype: torch.dtype = torch.float32
    rows: int = 1


CASES = {
    "chunks, the last of 5 positions": Case(37, 6, 4),
    "odd sizes, programs of channels": Case(33, 19, 33, has_state=True, rows=2),
    "documents in and at the end of chunks": Case(70, 5, 4, (3, 32, 33, 48), has_state=True),
    "few positions": Case(3, 8, 16, rows=2),
    "inputs in bf16": Case(40, 8, 16, (35,), has_state=True, dtype=torch.bfloat16),
}
LARGEST = {torch.float32: 2e-6, torch.bfloat16: 5e-3}
"""Error, as a part of the largest number of each result; in bf16 that of the rounded gradients"""
NAMES = ("y", "last", "dx", "ddt", "da", "db", "dc", "dstate")


class Drawn(NamedTuple):
    inputs: list[Tensor]
    """x, dt, a, b, c, and the state where there is one"""
    documents: Tensor | None
    gradients: tuple[Tensor, Tensor]
    """Gradients of outputs and of the last state"""


def draw(case: Case) -> Drawn:
    """b and c side by side in one tensor, as a projection leaves them."""
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    rows, length, channels, numbers = case.rows, case.length, case.channels, case.state_dim
    x, dt = normal(rows, length, channels).to(case.dtype), 0.1 * normal(rows, length, channels).exp()
    b, c = normal(rows, length, 2 * numbers).to(case.dtype).chunk(2, -1)
    a, state = -2.0 * normal(channels, numbers).exp(), normal(rows, channels, numbers)
    documents = torch.bucketize(torch.arange(length), torch.tensor(case.documents), right=True).expand(rows, -1)
    return Drawn(
        [x, dt, a, b, c, state] if case.has_state else [x, dt, a, b, c],
        documents if case.documents else None,
        (normal(*x.shape), normal(*state.shape)),
    )


def formula(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor | None, documents: Tensor | None
) -> tuple[Tensor, Tensor]:
    """One position after the other in fp64."""
    s = x.new_zeros(x.shape[0], *a.shape) if state is None else state
    outputs = []
    for t in range(x.shape[1]):
        if documents is not None and t:
            s = s * (documents[:, t] == documents[:, t - 1])[:, None, None]
        s = s * (dt[:, t, :, None] * a).exp() + (dt[:, t] * x[:, t])[..., None] * b[:, t, None]
        outputs.append(torch.einsum("bcn,bn->bc", s, c[:, t]))
    return torch.stack(outputs, 1), s


def results(scan: Any, drawn: Drawn, dtype: torch.dtype | None) -> list[Tensor]:
    """Outputs and gradients; dtype: of all inputs, in place of their own."""
    leaves = [x.detach().to(dtype or x.dtype).requires_grad_() for x in drawn.inputs]
    y, last = scan(*leaves[:5], leaves[5] if len(leaves) > 5 else None, drawn.documents)
    dy, dlast = (x.to(like.dtype) for x, like in zip(drawn.gradients, (y, last), strict=True))
    return [x.detach() for x in (y, last, *torch.autograd.grad((y, last), leaves, (dy, dlast)))]


def errors_of_scans(rank: int, world: int) -> dict[str, dict[str, float]]:
    from mt_models.blocks.triton_kernels.selective_scan import triton_selective_scan

    def scan(*inputs: Any) -> tuple[Tensor, Tensor]:
        *tensors, state, documents = inputs
        return triton_selective_scan(*tensors, state=state, segment_ids=documents)

    errors = {}
    for name, case in CASES.items():
        drawn = draw(case)
        both = zip(results(scan, drawn, None), results(formula, drawn, torch.float64), strict=True)
        errors[name] = {n: float((x - y).abs().max() / y.abs().max()) for n, (x, y) in zip(NAMES, both, strict=False)}
    return errors


def test_kernels_compute_the_formula_and_its_gradients() -> None:
    (errors,) = run_interpreted(errors_of_scans)
    assert errors.keys() == CASES.keys()
    for name, of_results in errors.items():
        limit = LARGEST[CASES[name].dtype]
        assert {n: error for n, error in of_results.items() if not error < limit} == {}, name


# -- steps of decoding ---------------------------------------------------------------------------------

STEPS = {"one position": (3, 1, 2, 6, 5, 7), "positions": (2, 3, 1, 3, 33, 18), "many channels": (1, 1, 1, 1, 150, 16)}
"""Sequences, positions, groups, heads, channels of a head, numbers of the state"""


def step_inputs(rows: int, length: int, groups: int, heads: int, value: int, dim: int) -> list[Tensor]:
    """x, dt, a, b, c and the state of Mamba-2; x, b and c side by side in one tensor."""
    generator = torch.Generator().manual_seed(1)
    sizes = [heads * value, groups * dim, groups * dim]
    x, b, c = torch.randn(rows, length, sum(sizes), generator=generator).split(sizes, -1)
    dt, a = torch.rand(rows, length, heads, generator=generator), -torch.rand(heads, generator=generator)
    state = torch.randn(rows, heads, value, dim, generator=generator)
    return [x.unflatten(-1, (heads, -1)), dt, a, b.unflatten(-1, (groups, -1)), c.unflatten(-1, (groups, -1)), state]


def errors_of_steps(rank: int, world: int) -> dict[str, float]:
    from mt_models.blocks.triton_kernels.state_space_step import triton_selective_step, triton_state_step

    errors = {}
    for name, shape in STEPS.items():
        *inputs, state = step_inputs(*shape)
        exact = formula_of_heads(*(x.double() for x in (*inputs, state)), None)
        pairs = list(zip(triton_state_step(*inputs, state=state), exact, strict=True))
        drawn = draw(Case(shape[1], shape[4], shape[5], has_state=True, rows=shape[0]))
        step = triton_selective_step(*drawn.inputs[:5], state=drawn.inputs[5])
        pairs += zip(step, formula(*(x.double() for x in drawn.inputs), None), strict=True)
        errors[name] = max(float((x - y).abs().max() / y.abs().max()) for x, y in pairs)
    return errors


def test_steps_compute_the_recurrences() -> None:
    (errors,) = run_interpreted(errors_of_steps)
    assert errors.keys() == STEPS.keys()
    assert {name: error for name, error in errors.items() if not error < 2e-6} == {}


# -- compiled ------------------------------------------------------------------------------------------


def launched(numbers: int) -> None:
    """A scan of a layer of the width of Jamba mini's, its gradients, and steps; and a step of Nemotron-H 8B's."""
    from mt_models.blocks.triton_kernels.selective_scan import triton_selective_scan
    from mt_models.blocks.triton_kernels.state_space_step import triton_selective_step, triton_state_step

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(*shape, device="meta", dtype=dtype, requires_grad=True)

    x, b, c = empty(2, 4096, 8192), empty(2, 4096, numbers), empty(2, 4096, numbers)
    dt, a = empty(2, 4096, 8192, dtype=torch.float32), empty(8192, numbers, dtype=torch.float32)
    state = torch.empty(2, 8192, numbers, device="meta")
    documents = torch.empty(2, 4096, device="meta", dtype=torch.int64)
    y, last = triton_selective_scan(x, dt, a, b, c, state=state, segment_ids=documents)
    torch.autograd.grad((y, last), (x, dt, a, b, c), (torch.empty_like(y), torch.empty_like(last)))
    triton_selective_step(x[:, :1], dt[:, :1], a, b[:, :1], c[:, :1], state=state)
    x, dt, b, c = empty(2, 1, 128, 64), empty(2, 1, 128, dtype=torch.float32), empty(2, 1, 8, 128), empty(2, 1, 8, 128)
    triton_state_step(x, dt, empty(128, dtype=torch.float32), b, c, state=torch.empty(2, 128, 64, 128, device="meta"))


@pytest.mark.parametrize("numbers", [16, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (1, 32, 64))])
def test_kernels_compile_for_hopper_without_spills(numbers, tmp_path, monkeypatch) -> None:
    pytest.importorskip("triton")
    from tests.core.nn.kernels.recorded_launches import compiled, launches_of

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    launches = launches_of(lambda: launched(numbers), monkeypatch.setattr)
    assert len(launches) == 2 + 3 + 2  # backward computes states again
    for kernel in {compiled(launch, tmp_path) for launch in launches}:
        assert kernel.stack == 0, kernel.name


# -- the choice ----------------------------------------------------------------------------------------


def test_kernels_that_do_not_serve_are_refused() -> None:
    pytest.importorskip("triton")
    cpu = ParallelContext(torch.device("cpu"), torch.bfloat16)
    with pytest.raises(ConfigError, match=r'mamba_scan_backend="triton" cannot serve \(cpu, bfloat16, .*CUDA device'):
        build_scans(SELECTIVE, "triton", cpu, 16)
    single = ParallelContext(torch.device("meta"), torch.float32)
    with pytest.raises(ConfigError, match="set precision.dtype=bf16"):
        build_scans(SELECTIVE, "triton", single, 16)
    half = ParallelContext(torch.device("meta"), torch.bfloat16)
    with pytest.raises(ConfigError, match="at most 64 numbers for each channel; change model.mamba_state_dim"):
        build_scans(SELECTIVE, "triton", half, 65)


def test_auto_leaves_recurrences_to_torch() -> None:
    """Until the kernels have computed on a GPU."""
    gpu = ParallelContext(torch.device("cuda"), torch.bfloat16)
    assert build_scans(SELECTIVE, "auto", gpu, 16) == (selective_scan, selective_scan, "torch")
    assert build_scans(STATE_SPACE, "auto", gpu, 128) == (chunked_scan, recurrent_scan, "torch")


def test_steps_that_learn_are_left_to_torch() -> None:
    pytest.importorskip("triton")
    gpu = ParallelContext(torch.device("cuda"), torch.bfloat16)
    *inputs, state = step_inputs(1, 1, 1, 2, 4, 4)
    inputs[0].requires_grad_()
    y, _ = build_scans(STATE_SPACE, "triton", gpu, 4).step(*inputs, state=state)
    assert y.requires_grad
