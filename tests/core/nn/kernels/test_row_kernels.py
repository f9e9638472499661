"""Norms, rotary embedding, activations, the residual sum and the softmax: each implementation against a formula in
fp64, over odd sizes, one row and none."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.core.nn.kernels.comparison import assert_agrees, random
from tests.core.nn.kernels.interpreter import fused, implementation, run_interpreted
from torch import Tensor

from mt_core.nn.kernels.reference.layers import HeadNorms
from mt_core.nn.kernels.request import KernelName

IMPLEMENTATIONS = ("torch", "triton")
SHAPES = ((5, 3, 37), (1, 1), (7, 128), (2, 2100), (0, 16))


# -- formulas, written apart from the implementations ---------------------------------------------


def rms_norm(x: Tensor, weight: Tensor, eps: float, zero_centered: bool) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * (weight + float(zero_centered))


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, zero_centered: bool) -> Tensor:
    centered = x - x.mean(-1, keepdim=True)
    return centered / (centered.pow(2).mean(-1, keepdim=True) + eps).sqrt() * (weight + float(zero_centered)) + bias


def add_rms_norm(
    x: Tensor, branch: Tensor | None, weight: Tensor, eps: float, zero_centered: bool
) -> tuple[Tensor, Tensor]:
    total = x if branch is None else x + branch
    return total, rms_norm(total, weight, eps, zero_centered)


def add_layer_norm(
    x: Tensor, branch: Tensor | None, weight: Tensor, bias: Tensor, eps: float, zero_centered: bool
) -> tuple[Tensor, Tensor]:
    total = x if branch is None else x + branch
    return total, layer_norm(total, weight, bias, eps, zero_centered)


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """As multiplication by e^(i angle) of complex numbers."""
    turn, half = torch.complex(cos, sin), cos.shape[-1]

    def one(x: Tensor) -> Tensor:
        pairs = x[..., : 2 * half]
        pairs = pairs.unflatten(-1, (half, 2)) if interleaved else pairs.unflatten(-1, (2, half)).transpose(-1, -2)
        turned = torch.view_as_real(torch.complex(pairs[..., 0], pairs[..., 1]) * turn)
        turned = turned if interleaved else turned.transpose(-1, -2)
        return torch.cat([turned.flatten(-2), x[..., 2 * half :]], -1)

    return one(q), one(k)


def activation(x: Tensor, bias: Tensor | None, name: str) -> Tensor:
    x = x if bias is None else x + bias
    if name == "squared_relu":
        return torch.where(x > 0, x * x, 0.0)
    width = x.shape[-1] // 2
    gate, up = x[..., :width], x[..., width:]
    if name == "swiglu":
        return gate / (1 + torch.exp(-gate)) * up
    if name == "geglu":
        return gate * 0.5 * (1 + torch.erf(gate / math.sqrt(2))) * up
    if name == "clamped_swiglu":
        gate = torch.where(gate > 7, 7.0, gate)
        up = torch.where(up.abs() > 7, 7.0 * up.sign(), up)
        return gate / (1 + torch.exp(-1.702 * gate)) * (up + 1)
    return gate * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up


def residual_sum(x: Tensor, bias: Tensor | None, residual: Tensor, probability: float) -> Tensor:
    return residual + x + (0 if bias is None else bias)


def softmax(scores: Tensor, scale: float, mask: Tensor | None, causal: bool) -> Tensor:
    queries, keys = scores.shape[-2:]
    seen = torch.ones_like(scores, dtype=torch.bool) if mask is None else mask.expand(scores.shape)
    if causal:
        positions = torch.arange(keys, device=scores.device)
        seen = seen & (positions <= positions[keys - queries :, None])
    powers = torch.exp(scale * scores) * seen
    return powers / powers.sum(-1, keepdim=True).clamp(min=1e-300)


# -- tests -----------------------------------------------------------------------------------------


def check_norms(rank: int, world: int, name: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for shape in SHAPES:
            x, weight, bias = (random(*s, dtype=dtype, seed=i) for i, s in enumerate((shape, shape[-1:], shape[-1:])))
            for zero_centered in (False, True):
                assert_agrees(implementation("rms_norm", name), rms_norm, x, weight, 1e-5, zero_centered)
                assert_agrees(implementation("layer_norm", name), layer_norm, x, weight, bias, 1e-3, zero_centered)


@pytest.mark.slow
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_norms(name: str) -> None:
    run_interpreted(check_norms, name)


def check_norms_with_residual(rank: int, world: int) -> None:
    for dtype, shape in (
        (torch.float32, (5, 3, 37)),
        (torch.bfloat16, (7, 128)),
        (torch.float32, (0, 16)),
        (torch.float32, (9, 8200)),
    ):
        x, branch, weight, bias = (
            random(*s, dtype=dtype, seed=i) for i, s in enumerate((shape, shape, shape[-1:], shape[-1:]))
        )
        for addend in (branch, None):
            assert_agrees(fused("rms_norm"), add_rms_norm, x, addend, weight, 1e-5, addend is None)
            assert_agrees(fused("layer_norm"), add_layer_norm, x, addend, weight, bias, 1e-3, addend is None)
    # A stream in fp32 keeps its dtype, and each operand gets a gradient in its own.
    x, branch, weight = random(4, 16), random(4, 16, dtype=torch.bfloat16, seed=1), random(16, seed=2)
    total, normed = fused("rms_norm")(x, branch, weight, 1e-5)
    normed.sum().backward()  # the stream is not used: its gradient is None
    assert (total.dtype, normed.dtype) == (torch.float32, torch.float32)
    assert x.grad is not None
    assert branch.grad is not None
    assert torch.equal(branch.grad, x.grad.bfloat16())


@pytest.mark.slow
def test_norms_of_a_sum_with_the_residual_stream() -> None:
    run_interpreted(check_norms_with_residual)


def check_wide_rows(rank: int, world: int) -> None:
    """Columns in blocks; several tiles of rows for each program, the last of which is not full."""
    for rows, width, zero_centered in ((9, 8200, False), (9, 8200, True), (1, 16400, False)):
        x, weight, bias = (random(*shape, seed=i) for i, shape in enumerate(((rows, width), (width,), (width,))))
        assert_agrees(implementation("rms_norm", "triton"), rms_norm, x, weight, 1e-5, zero_centered)
        assert_agrees(implementation("layer_norm", "triton"), layer_norm, x, weight, bias, 1e-3, zero_centered)
    assert_agrees(implementation("softmax", "triton"), softmax, random(1, 2, 1, 16400), 0.3, None, False)


@pytest.mark.slow
def test_rows_wider_than_registers() -> None:
    run_interpreted(check_wide_rows)


def check_strided_norm(rank: int, world: int, name: str) -> None:
    """Heads cut out of a wider projection, as norms of queries and keys get them."""
    whole = random(2, 3, 24)

    def heads(kernel):
        return lambda x, weight: kernel(x[..., 4:16].unflatten(-1, (3, 4)), weight, 1e-6, False)

    assert_agrees(heads(implementation("rms_norm", name)), heads(rms_norm), whole, random(4))


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_norm_of_a_strided_view(name: str) -> None:
    run_interpreted(check_strided_norm, name)


def check_rotary(rank: int, world: int, name: str) -> None:
    for heads, groups, head_dim, half, batch in ((3, 1, 10, 3, 1), (4, 2, 8, 4, 2), (1, 1, 2, 1, 1), (33, 3, 16, 4, 1)):
        q, k = random(2, 3, heads, head_dim), random(2, 3, groups, head_dim)
        angles = random(batch, 3, 1, half).detach()
        for interleaved in (False, True):
            assert_agrees(implementation("rotary", name), rotary, q, k, angles.cos(), angles.sin(), interleaved)
    nothing = implementation("rotary", name)(random(0, 5, 2, 4), random(0, 5, 1, 4), *torch.ones(2, 1, 5, 1, 2))
    assert [x.shape for x in nothing] == [(0, 5, 2, 4), (0, 5, 1, 4)]
    torch.autograd.backward(nothing, [torch.ones_like(x) for x in nothing])


@pytest.mark.slow
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_rotary_of_every_variant(name: str) -> None:
    run_interpreted(check_rotary, name)


def check_rotary_of_views(rank: int, world: int, name: str) -> None:
    """Queries and keys as slices of one projection, which have strides of their own."""
    qkv, angles = random(2, 4, 4, 6), random(1, 4, 1, 3).detach()

    def sliced(kernel):
        return lambda x: kernel(x[:, :, :3], x[:, :, 3:], angles.cos().to(x.dtype), angles.sin().to(x.dtype), False)

    assert_agrees(sliced(implementation("rotary", name)), sliced(rotary), qkv)


@pytest.mark.slow
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_rotary_of_strided_views(name: str) -> None:
    run_interpreted(check_rotary_of_views, name)


def turned_parts(qkv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = qkv.split((qkv.shape[3] - 2, 1, 1), dim=3)
    return *rotary(q.flatten(2, 3), k.squeeze(3), cos, sin, interleaved), v.squeeze(3)


def check_rotary_of_qkv(rank: int, world: int) -> None:
    for groups, per_group, head_dim, half, batch in (
        (1, 3, 10, 3, 1),
        (2, 2, 8, 4, 2),
        (3, 11, 4, 1, 1),
        (33, 1, 2, 1, 1),
    ):
        qkv = random(2, 3, groups, per_group + 2, head_dim)
        angles = random(batch, 3, 1, half).detach()
        for interleaved in (False, True):
            assert_agrees(fused("rotary"), turned_parts, qkv, angles.cos(), angles.sin(), interleaved)


@pytest.mark.slow
def test_rotary_of_qkv_in_one_pass() -> None:
    """Queries, keys and values of groups, all in tensors of their own."""
    run_interpreted(check_rotary_of_qkv)


def normed_parts(
    qkv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, q_weight: Tensor, k_weight: Tensor, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = qkv.split((qkv.shape[3] - 2, 1, 1), dim=3)
    q = 0.75 * rms_norm(q.flatten(2, 3), q_weight, *options)
    return *rotary(q, rms_norm(k.squeeze(3), k_weight, *options), cos, sin, interleaved), v.squeeze(3)


def normed_in_one_pass(
    qkv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, q_weight: Tensor, k_weight: Tensor, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return fused("rotary")(qkv, cos, sin, interleaved, HeadNorms(q_weight, k_weight, 0.75, *options))


def check_normed_rotary_of_qkv(rank: int, world: int) -> None:
    from mt_core.nn.kernels.triton_kernels import rotary_of_qkv

    rotary_of_qkv._PROGRAMS_PER_MULTIPROCESSOR = 1  # 4 programs in all: fewer than tokens
    for dtype, eps, (groups, per_group, head_dim, half, batch) in (
        (torch.float32, 0.0, (1, 17, 10, 3, 1)),
        (torch.bfloat16, 1e-2, (2, 2, 8, 4, 2)),
    ):
        qkv = random(2, 3, groups, per_group + 2, head_dim, dtype=dtype)
        q_weight, k_weight = (random(head_dim, dtype=dtype, seed=i) for i in (1, 2))
        angles = random(batch, 3, 1, half).detach()
        for interleaved in (False, True):
            given = qkv, angles.cos(), angles.sin(), interleaved, q_weight, k_weight, eps, interleaved
            assert_agrees(normed_in_one_pass, normed_parts, *given)


@pytest.mark.slow
def test_normed_rotary_of_qkv_in_one_pass() -> None:
    """Partial rotary, grouped heads, angles of each sequence, weights that are zero-centred or not."""
    run_interpreted(check_normed_rotary_of_qkv)


def check_activations(rank: int, world: int, name: str) -> None:
    for kind in ("swiglu", "geglu", "geglu_tanh", "clamped_swiglu", "squared_relu"):
        for shape in ((3, 4, 26), (1, 2), (2, 2060), (0, 8)):
            x = random(*shape)
            if kind == "clamped_swiglu":
                x = 5 * x  # a part of both halves beyond the clamp
            for bias in (None, random(shape[-1], seed=1)):
                assert_agrees(implementation("activation", name), activation, x, bias, kind)
        x = random(3, 26, dtype=torch.bfloat16)
        assert_agrees(implementation("activation", name), activation, x, None, kind)


@pytest.mark.slow
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_activations(name: str) -> None:
    run_interpreted(check_activations, name)


def weighted_activation(x: Tensor, weights: Tensor, name: str) -> Tensor:
    return activation(x, None, name) * weights[:, None]


def check_weighted_activation(rank: int, world: int) -> None:
    for kind in ("swiglu", "clamped_swiglu", "squared_relu"):
        for shape in ((5, 26), (1, 2), (3, 2060), (0, 8)):
            weights = random(shape[0], seed=1)
            assert_agrees(fused("activation"), weighted_activation, 3 * random(*shape), weights, kind)
    x, weights = random(5, 26, dtype=torch.bfloat16), random(5, seed=1)
    assert fused("activation")(x, weights, "swiglu").dtype == torch.bfloat16


@pytest.mark.slow
def test_activations_times_a_weight_of_each_row_in_one_pass() -> None:
    run_interpreted(check_weighted_activation)


def check_residual(rank: int, world: int, name: str) -> None:
    kernel = implementation("bias_dropout_add", name)
    for shape in ((3, 4, 26), (1, 1), (0, 8)):
        x, residual = random(*shape), random(*shape, seed=1)
        for bias in (None, random(shape[-1], seed=2)):
            assert_agrees(kernel, residual_sum, x, bias, residual, 0.0)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_residual_sum_without_dropout(name: str) -> None:
    run_interpreted(check_residual, name)


def check_dropout(rank: int, world: int, name: str) -> None:
    kernel, probability = implementation("bias_dropout_add", name), 0.3
    x, bias, residual = (
        torch.ones(40, 100, requires_grad=True),
        torch.ones(100, requires_grad=True),
        torch.zeros(40, 100),
    )
    torch.manual_seed(7)
    out = kernel(x, bias, residual, probability)
    kept = out > 0
    # 4000 draws: four standard deviations are 0.03
    assert abs(kept.double().mean().item() - 0.7) < 0.03
    assert torch.allclose(out[kept], torch.tensor(2 / 0.7))
    out.sum().backward()
    assert x.grad is not None
    assert bias.grad is not None
    # the gradient passes where the value did, and nowhere else
    assert torch.allclose(x.grad, kept / 0.7)
    assert torch.allclose(bias.grad, kept.sum(0) / 0.7)
    torch.manual_seed(7)
    assert torch.equal(kernel(x, bias, residual, probability), out)
    assert not torch.equal(kernel(x, bias, residual, probability), out)


@pytest.mark.slow
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_dropout_follows_the_stream_and_its_gradient_the_mask(name: str) -> None:
    run_interpreted(check_dropout, name)


def check_softmax(rank: int, world: int, name: str) -> None:
    kernel = implementation("softmax", name)
    for shape in ((2, 2, 3, 7), (1, 1, 1, 1), (2, 1, 3, 3), (0, 2, 3, 3)):
        scores = random(*shape)
        batch, _, queries, keys = shape
        generator = torch.Generator().manual_seed(1)
        for mask in (None, *(torch.rand(*s, generator=generator) > 0.5 for s in (
            (batch, 1, queries, keys), (1, 1, 1, keys), shape, (1, 1, keys, queries)
        ))):  # fmt: skip
            if mask is not None and mask.shape[-2:] == (keys, queries):
                mask = mask.transpose(-1, -2)  # a mask whose keys are not next to one another
            for causal in (False, True):
                assert_agrees(kernel, softmax, scores, 0.3, mask, causal)


@pytest.mark.slow
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_softmax_with_masks_and_rows_that_see_nothing(name: str) -> None:
    run_interpreted(check_softmax, name)


def check_large_scores(rank: int, world: int, name: str) -> None:
    scores = torch.tensor([[[[1e4, 1e4 - 1.0, -1e4]]]])
    weights = implementation("softmax", name)(scores, 1.0, None, False)
    assert torch.allclose(weights.flatten(), torch.tensor([0.731058, 0.268941, 0.0]), atol=1e-5)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_softmax_of_large_scores_does_not_overflow(name: str) -> None:
    run_interpreted(check_large_scores, name)


def check_half_precision_statistics(rank: int, world: int, name: str, kernel: KernelName) -> None:
    """Squares of 300 are more than fp16 holds."""
    x, weight = torch.full((2, 8), 300.0, dtype=torch.float16), torch.ones(8, dtype=torch.float16)
    x[:, ::2] *= -1
    extra = (torch.zeros(8, dtype=torch.float16),) if kernel == "layer_norm" else ()
    y = implementation(kernel, name)(x, weight, *extra, 1e-5)
    assert torch.equal(y, torch.sign(x))


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("kernel", ["rms_norm", "layer_norm"])
def test_norms_take_their_statistics_in_fp32(name: str, kernel: KernelName) -> None:
    run_interpreted(check_half_precision_statistics, name, kernel)
