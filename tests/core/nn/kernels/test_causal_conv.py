"""The short convolution: its reference against conv1d in fp64, mt's Triton kernel in Triton's interpreter against the
reference, and compiled for Hopper."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from tests.core.nn.kernels.interpreter import fused, implementation, run_interpreted
from torch import Tensor

from mt_core.nn.kernels.reference.causal_conv import causal_conv, causal_conv_step


class Case(NamedTuple):
    rows: int
    length: int
    channels: int
    taps: int
    has_bias: bool
    is_packed: bool
    silu: bool
    dtype: torch.dtype = torch.float32


CASES = {
    "documents": Case(2, 37, 20, 4, True, True, True),
    "several programs": Case(1, 270, 130, 4, False, False, True),
    "fewer positions than taps": Case(2, 2, 16, 3, True, False, False),
    "bf16": Case(1, 40, 24, 4, True, True, True, torch.bfloat16),
}


class Drawn(NamedTuple):
    x: Tensor
    weight: Tensor
    bias: Tensor | None
    segment_ids: Tensor | None
    dy: Tensor


def draw(case: Case) -> Drawn:
    """x is a slice of the channels of a wider tensor, as a projection leaves it."""
    generator = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(case.dtype)

    wide = normal(case.rows, case.length, case.channels + 8)
    ids = torch.bucketize(torch.arange(case.length), torch.tensor([2, case.length // 2]), right=True)
    return Drawn(
        wide[..., 3 : 3 + case.channels],
        normal(case.channels, case.taps),
        normal(case.channels) if case.has_bias else None,
        ids.expand(case.rows, -1) if case.is_packed else None,
        normal(case.rows, case.length, case.channels),
    )


def outputs_and_gradients(function: Any, drawn: Drawn, silu: bool, dtype: torch.dtype | None = None) -> list[Tensor]:
    leaves = [x.detach().to(dtype or x.dtype).requires_grad_() for x in drawn[:3] if x is not None]
    y = function(*leaves[:2], leaves[2] if len(leaves) > 2 else None, drawn.segment_ids, silu)
    return [y, *torch.autograd.grad(y, leaves, drawn.dy.to(y.dtype))]


@pytest.mark.parametrize("is_packed", [False, True])
def test_the_reference_is_conv1d_of_each_document(is_packed: bool) -> None:
    drawn = draw(Case(1, 11, 6, 4, True, is_packed, True))
    x, weight, bias, ids, _ = (part if part is None or part.dtype == torch.int64 else part.double() for part in drawn)
    assert x is not None
    assert weight is not None
    documents = [x[:, ids[0] == number] for number in range(3)] if ids is not None else [x]
    padded = [F.pad(document.transpose(1, 2), (3, 0)) for document in documents]
    expected = [F.silu(F.conv1d(document, weight[:, None], bias, groups=6)).transpose(1, 2) for document in padded]
    torch.testing.assert_close(causal_conv(x, weight, bias, ids, True), torch.cat(expected, 1))


def test_a_step_goes_on_from_the_inputs_before() -> None:
    x, weight, bias, _, _ = draw(Case(2, 9, 6, 4, True, False, True))
    whole = causal_conv(x, weight, bias, silu=True)
    for new in (1, 2, 5):
        y, kept = causal_conv_step(x[:, -new:], weight, bias, x[:, -new - 3 : -new], silu=True)
        torch.testing.assert_close(y, whole[:, -new:])
        assert torch.equal(kept, x[:, -3:])


def error_of(x: Tensor, exact: Tensor) -> float:
    """Largest error, as a part of the largest number."""
    return float((x - exact).detach().abs().max() / exact.detach().abs().max())


def errors_of_kernels(rank: int, world: int) -> dict[str, float]:
    errors = {}
    for name, case in CASES.items():
        drawn = draw(case)
        pairs = zip(
            outputs_and_gradients(implementation("causal_conv", "triton"), drawn, case.silu),
            outputs_and_gradients(causal_conv, drawn, case.silu, torch.float64),
            strict=True,
        )
        errors[name] = max(map(error_of, *zip(*pairs, strict=True)))
        past = draw(case._replace(length=case.taps - 1)).x
        for new in (1, case.length):
            inputs = (drawn.x[:, :new], drawn.weight, drawn.bias, past)
            steps = zip(fused("causal_conv")(*inputs, case.silu), causal_conv_step(*inputs, case.silu), strict=True)
            errors[f"{name}, {new} behind others"] = max(map(error_of, *zip(*steps, strict=True)))
    return errors


@pytest.mark.long
def test_kernels_compute_the_reference() -> None:
    (errors,) = run_interpreted(errors_of_kernels)
    assert len(errors) == 3 * len(CASES)
    limits = {name: 2e-2 if name.startswith("bf16") else 3e-6 for name in errors}
    assert {name: error for name, error in errors.items() if not error < limits[name]} == {}


def launched(taps: int, is_packed: bool) -> None:
    """A convolution, its gradients and a step of decoding."""
    from mt_core.nn.kernels.triton_kernels import causal_conv as kernels

    half = {"device": "meta", "dtype": torch.bfloat16}
    x, weight = (torch.empty(*shape, **half, requires_grad=True) for shape in ((2, 4096, 8192), (8192, taps)))
    ids = torch.empty(2, 4096, device="meta", dtype=torch.int64) if is_packed else None
    y = kernels.causal_conv(x, weight, None, ids, silu=True)
    torch.autograd.grad(y, (x, weight), torch.empty_like(y))
    kernels.causal_conv_step(x[:, :1].detach(), weight, None, torch.empty(2, taps - 1, 8192, **half), silu=True)


@pytest.mark.long
@pytest.mark.parametrize("is_packed", [False, True])
def test_kernels_compile_for_hopper_without_spills(is_packed: bool, tmp_path, monkeypatch) -> None:
    pytest.importorskip("triton")
    from tests.core.nn.kernels.recorded_launches import compiled, launches_of

    from mt_core.nn.kernels.request import MOST_TAPS

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    launches = launches_of(lambda: launched(MOST_TAPS, is_packed), monkeypatch.setattr)
    assert len(launches) == 3
    for kernel in (compiled(launch, tmp_path) for launch in launches):
        assert kernel.stack == 0, kernel.name
        assert "ld.global.v4.b32" in kernel.ptx or kernel.name == "_causal_conv_step", kernel.name
