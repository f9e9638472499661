"""MXFP8 and NVFP4 against the published formulas, written out with NumPy: casts, rounding, which product has what."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.core.nn.fp8 import formulas
from torch import Tensor

from mt_core.config.schema import PrecisionConfig
from mt_core.errors import ConfigError
from mt_core.nn.dropout import SAMPLE, DropoutStreams, use_streams
from mt_core.nn.fp8.microscaling import GradientRounding
from mt_core.nn.fp8.multiply import in_scale_tiles
from mt_core.nn.fp8.options import Fp8Options, resolve_options
from mt_core.nn.kernels.choice import Kernels
from mt_core.nn.kernels.reference.fp8_casts import E4M3, E5M2, unpack_e2m1
from mt_core.nn.kernels.reference.microscaling import (
    cast_mx,
    cast_nvfp4,
    e2m1_codes,
    hadamard_matrix,
    noise_at,
    pack_nibbles,
    transformed,
)
from mt_core.nn.layout import initialize, normal
from mt_core.nn.linear import ColumnParallelLinear
from mt_core.parallel.context import ParallelContext

GRID = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)


def wide_values(rows: int, columns: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    x = x * torch.exp2(torch.randint(-12, 5, (rows, columns), generator=generator).float())
    x[0] = 0.0
    return x.bfloat16()


# -- casts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "dtype"), [("e4m3", E4M3), ("e5m2", E5M2)])
def test_mx_blocks_are_scaled_by_the_smallest_power_of_two_that_holds_them(name, dtype) -> None:
    x = wide_values(24, 96)
    scaled = cast_mx(x, dtype)
    values, limit = x.double().numpy(), formulas.FORMATS[name]["largest"]
    for row in range(24):
        for block in range(3):
            numbers = values[row, 32 * block : 32 * block + 32]
            amax = np.abs(numbers).max()
            scale = 2.0 ** np.ceil(np.log2(amax / limit)) if amax else 2.0**-127
            assert scaled.scale[row, block].float().item() == scale
            expected = formulas.rounded(numbers / scale, name) if amax else numbers
            assert np.array_equal(scaled.data[row, 32 * block : 32 * block + 32].double().numpy(), expected)


def test_mx_scales_of_powers_of_two_and_their_neighbours() -> None:
    """448 fits with scale 1; the next number in bf16 takes 2. What is not finite becomes NaN."""
    amax = torch.tensor([448.0, 450.0, 224.0, 7.0, 1e-38, float("inf"), float("nan")])
    scaled = cast_mx(amax[:, None].expand(-1, 32), E4M3)
    assert scaled.scale.flatten()[:4].float().tolist() == [1.0, 2.0, 0.5, 2.0**-6]
    assert bool(scaled.decode()[:5].isfinite().all())
    assert bool(scaled.decode()[5:].isnan().all())


def nvfp4_by_formula(x: np.ndarray, square: bool) -> tuple[np.ndarray, np.ndarray]:
    """(numbers of E2M1, scales of blocks at every element) by the paper's appendix, every step in fp32."""
    one, amax = np.float32(1.0), np.abs(x).max()
    encode = np.float32(6.0 * 448.0) / amax
    numbers, scales = np.empty_like(x), np.empty_like(x)
    for i in range(0, x.shape[0], 16 if square else 1):
        for j in range(0, x.shape[1], 16):
            place = np.s_[i : i + (16 if square else 1), j : j + 16]
            block = x[place]
            scale = np.float32(formulas.rounded(np.abs(block).max() / np.float32(6.0) * encode, "e4m3"))
            with np.errstate(divide="ignore"):
                factor = min(one / (scale * (one / encode)), np.finfo(np.float32).max)
            scaled = np.clip(block * np.float32(factor), -6.0, 6.0)
            middles = (GRID[1:] + GRID[:-1]) / 2
            # A tie goes to the even code: up from an odd one, down from an even one.
            up = np.where(np.arange(7) % 2, np.abs(scaled)[..., None] >= middles, np.abs(scaled)[..., None] > middles)
            numbers[place], scales[place] = np.sign(scaled) * GRID[up.sum(-1)], scale
    return numbers, scales


@pytest.mark.parametrize("square", [False, True])
def test_nvfp4_is_the_published_formula_to_the_last_bit(square) -> None:
    x = wide_values(32, 64, seed=3 + square)
    scaled = cast_nvfp4(x, x.abs().max().float(), square=square)
    numbers, scales = nvfp4_by_formula(x.float().numpy(), square)
    assert np.array_equal(unpack_e2m1(scaled.data).numpy(), numbers)
    assert np.array_equal(scaled.scale.float().repeat_interleave(16, 1).numpy(), scales)
    assert scaled.whole.item() == pytest.approx(x.abs().max().item() / 2688.0)
    error = (scaled.decode() - x.float()).norm() / x.float().norm()
    assert error.item() < 0.15


def test_a_matrix_of_zeros_stays_and_one_that_is_not_finite_becomes_nan() -> None:
    zeros = torch.zeros(16, 32)
    assert not cast_nvfp4(zeros, zeros.max()).decode().any()
    zeros[3, 4] = torch.inf
    assert bool(cast_nvfp4(zeros, zeros.max()).decode().isnan().all())


def test_codes_and_packing() -> None:
    numbers = torch.cat([torch.from_numpy(GRID), -torch.from_numpy(GRID)])
    assert e2m1_codes(numbers).tolist() == list(range(16))
    assert torch.equal(unpack_e2m1(pack_nibbles(e2m1_codes(numbers)[None])), numbers[None])
    middles = torch.from_numpy((GRID[1:] + GRID[:-1]) / 2)
    assert bool((e2m1_codes(middles) % 2 == 0).all())


def test_stochastic_rounding_has_the_exact_mean() -> None:
    """And gives the two neighbours alone."""
    x = torch.linspace(-6.0, 6.0, 97)[None].expand(20_000, -1)
    noise = noise_at(5, torch.arange(20_000), torch.arange(97))
    found = torch.tensor([*GRID, *-GRID])[e2m1_codes(x, noise).long()]
    assert (found.mean(0) - x[0]).abs().max().item() < 0.04  # 2 / sqrt(12 * 20,000) is 0.004 for the widest step
    lower = torch.from_numpy(GRID)[(torch.bucketize(x[0].abs(), torch.from_numpy(GRID), right=True) - 1)]
    upper = torch.from_numpy(GRID)[torch.bucketize(x[0].abs(), torch.from_numpy(GRID)).clamp(max=7)]
    assert bool(((found.abs() == lower) | (found.abs() == upper)).all())


def test_noise_is_uniform_and_that_of_its_place() -> None:
    noise = noise_at(2**62 + 3, torch.arange(512), torch.arange(256))
    assert torch.equal(noise[100:130, 32:64], noise_at(2**62 + 3, torch.arange(100, 130), torch.arange(32, 64)))
    counts = torch.histc(noise, 16, 0.0, 1.0)
    assert (counts / counts.mean() - 1.0).abs().max().item() < 0.06  # five deviations of 8192 in a bin
    for other in (noise_at(2**62 + 4, torch.arange(512), torch.arange(256)), noise.roll(1, 0), noise.roll(1, 1)):
        correlation = torch.corrcoef(torch.stack([noise.flatten(), other.flatten()]))[0, 1]
        assert abs(correlation.item()) < 0.015


def test_the_hadamard_transform_keeps_products_and_spreads_an_outlier() -> None:
    matrix = hadamard_matrix(torch.device("cpu"))
    assert torch.equal(matrix @ matrix.T, torch.eye(16))
    assert set(matrix.abs().flatten().tolist()) == {0.25}
    a, b = (torch.randn(8, 40, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    assert torch.allclose(transformed(a) @ transformed(b).T, a @ b.T, atol=1e-5)
    outlier = torch.zeros(1, 16)
    outlier[0, 3] = 16.0
    assert transformed(outlier).abs().tolist() == [[4.0] * 16]


def test_scales_in_tiles_are_where_cublas_reads_them() -> None:
    """Offset of the scale of row r and block c in a tile: (r % 32) * 16 + (r // 32) * 4 + c; tiles row by row."""
    scale = torch.arange(200 * 6).remainder(251).to(torch.uint8).view(200, 6)
    flat = in_scale_tiles(scale)
    assert flat.shape == (256 * 8,)
    for row, column in ((0, 0), (31, 3), (33, 5), (127, 4), (128, 0), (199, 5)):
        tile = (row // 128) * 2 + column // 4
        offset = tile * 512 + (row % 32) * 16 + (row % 128) // 32 * 4 + column % 4
        assert flat[offset] == scale[row, column]


# -- products of a layer --------------------------------------------------------------------------------


def layer(**keys) -> ColumnParallelLinear:
    ctx = ParallelContext()
    module = ColumnParallelLinear(64, 96, ctx, bias=False, init=normal(0.1))
    options = Fp8Options(PrecisionConfig(fp8_format="e2m1", fp8_recipe="nvfp4", **keys), "emulated", 1)
    module.multiply = options.multiply(module, None)
    use_streams(module, DropoutStreams(7))
    initialize(module, 3, ctx)
    return module


def tensors() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(8)
    x = torch.randn(3, 20, 64, generator=generator).requires_grad_()
    return x, torch.randn(3, 20, 96, generator=generator) * 1e-3


def gradients(module: ColumnParallelLinear) -> tuple[Tensor, Tensor, Tensor]:
    x, grad = tensors()
    out = module(x)
    module.weight.grad = None
    out.backward(grad)
    return out.detach(), x.grad, module.weight.grad


def nearest(x: Tensor, square: bool = False) -> Tensor:
    numbers, scales = nvfp4_by_formula(x.detach().numpy(), square)
    return torch.from_numpy(numbers * scales) * (x.detach().abs().max() / 2688.0)


def test_each_product_has_the_operands_of_the_paper() -> None:
    """Weights in squares, inputs and gradients in rows; transformed are both operands of the weight's gradient."""
    module = layer(fp4_stochastic_rounding=False)
    out, dx, dweight = gradients(module)
    x, grad = (t.detach().flatten(0, 1) for t in tensors())
    weight = nearest(module.weight, square=True)
    spread = [nearest(transformed(t.T.contiguous())) for t in (grad, x)]
    for found, expected in (
        (out.flatten(0, 1), nearest(x) @ weight.T),
        (dx.flatten(0, 1), nearest(grad) @ weight),
        (dweight, spread[0] @ spread[1].T),
    ):
        assert ((found - expected).norm() / expected.norm()).item() < 1e-5
    rows = layer(fp4_stochastic_rounding=False, fp4_hadamard=False, fp4_square_weight_blocks=False)
    out, dx, dweight = gradients(rows)
    expected = nearest(grad) @ nearest(rows.weight.T.contiguous()).T
    assert ((dx.flatten(0, 1) - expected).norm() / expected.norm()).item() < 1e-5
    expected = nearest(grad.T.contiguous()) @ nearest(x.T.contiguous()).T
    assert ((dweight - expected).norm() / expected.norm()).item() < 1e-5


def test_gradients_alone_are_rounded_at_random_by_the_sample() -> None:
    """The mean over samples is the gradient of the cast weight."""
    module = layer()
    exact, token = layer(fp4_stochastic_rounding=False), SAMPLE.set(0)
    try:
        out, first, _ = gradients(module)
        assert torch.equal(out, gradients(exact)[0])
        assert torch.equal(first, gradients(module)[1])
        found = []
        for sample in range(1, 65):
            SAMPLE.set(sample)
            found.append(gradients(module)[1])
        assert not torch.equal(found[0], first)
    finally:
        SAMPLE.reset(token)
    _, grad = tensors()
    expected = grad @ nearest(module.weight, square=True)
    off = [((t - expected).norm() / expected.norm()).item() for t in (found[0], torch.stack(found).mean(0))]
    assert off[1] < off[0] / 5  # 8 for independent errors; what is beyond 6 after the scale's rounding stays off


def test_rounding_depends_on_the_layer_and_on_the_run() -> None:
    module = layer()
    rounding = module.rounding
    assert isinstance(rounding, GradientRounding)
    assert torch.equal(rounding.places, torch.arange(96))
    draws = [rounding.noise(32, "columns", 0), rounding.noise(32, "rows", 0).T]
    rounding.site = "another layer"
    draws.append(rounding.noise(32, "columns", 0))
    rounding.streams = DropoutStreams(8)
    draws.append(rounding.noise(32, "columns", 0))
    assert len({float(draw.sum()) for draw in draws}) == 4


# -- words ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("recipe", "form"), [("mxfp8", "e4m3"), ("nvfp4", "e2m1")])
def test_gpus_without_the_products_are_refused_by_name(monkeypatch, recipe, form) -> None:
    ctx = ParallelContext(device=torch.device("cuda"), params_dtype=torch.bfloat16)
    config = PrecisionConfig(dtype="bf16", fp8_format=form, fp8_recipe=recipe)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    kernels = Kernels({}, "cpu", "bfloat16")
    with pytest.raises(ConfigError, match=rf"products of {recipe} from .* 10.0 .*this GPU has 9.0; .*emulated"):
        resolve_options(config, ctx, kernels)
    emulated = config.model_copy(update={"fp8_implementation": "emulated"})
    assert resolve_options(emulated, ctx, kernels).implementation == "emulated"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert resolve_options(config, ctx, kernels).implementation == "torch"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (("fp8_format=e2m1",), "e2m1 does not go with precision.fp8_recipe=tensorwise"),
        (("fp8_format=hybrid", "fp8_recipe=nvfp4"), "hybrid does not go with .*nvfp4 is the recipe of e2m1"),
        (("fp8_format=e4m3", "fp8_recipe=mxfp8", "fp4_hadamard=false"), "fp4_hadamard .* would be ignored"),
    ],
)
def test_what_cannot_go_together_is_refused(tiny, settings, words) -> None:
    with pytest.raises(ConfigError, match=words):
        tiny(*(f"precision.{setting}" for setting in settings))


def test_compilation_with_random_rounding_is_refused(tiny) -> None:
    keys = ("precision.fp8_format=e2m1", "precision.fp8_recipe=nvfp4", "train.compile=blocks")
    with pytest.raises(ConfigError, match="train.compile=blocks would make a constant"):
        tiny(*keys)
    tiny(*keys, "precision.fp4_stochastic_rounding=false")
