"""Experts in FP8: grouped products against a formula in fp64, the layouts of a GPU's kernel, and an MoE model."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.core.nn.fp8 import formulas
from torch import Tensor

from mt_core.config.schema import PrecisionConfig
from mt_core.nn.fp8.options import Fp8Options
from mt_core.nn.fp8.use import fp8_report
from mt_core.nn.kernels.reference.fp8_casts import cast_rows
from mt_core.nn.kernels.reference.microscaling import cast_mx
from mt_core.parallel.context import ParallelContext
from mt_core.plugins import load_plugins
from mt_core.train import Trainer
from mt_core.train.build import build_model
from mt_moe.experts import fp8
from mt_moe.experts.fp8 import EmulatedGroups, Fp8GroupedProduct, TorchGroups, fp8_grouped_product
from mt_moe.experts.loop import Groups, loop_product

COUNTS = (5, 0, 33, 1, 16)
"""Rows of each expert: none, one, and no multiples of 16."""
IN, OUT = 48, 32
MOE = "model.moe={num_experts = 4, moe_router_topk = 2}"


def case(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Groups]:
    """x [R, in], weight [E, out, in], gradient [R, out]"""
    generator = torch.Generator().manual_seed(2)
    rows = sum(COUNTS)
    x = torch.randn(rows, IN, generator=generator) * torch.logspace(-2, 2, rows)[:, None]
    weight = torch.randn(len(COUNTS), OUT, IN, generator=generator)
    grad = torch.randn(rows, OUT, generator=generator) * 1e-4
    return x.to(dtype), weight.to(dtype), grad.to(dtype), Groups(torch.tensor(COUNTS))


def rounded_rows(x: np.ndarray) -> np.ndarray:
    """Each row in e4m3 by its largest magnitude."""
    return formulas.cast(x, np.abs(x).max(1, keepdims=True), "e4m3") if x.size else x


def in_fp64(x: Tensor, weight: Tensor, grad: Tensor, rounded=rounded_rows) -> dict[str, np.ndarray]:
    """One expert after another, each operand rounded along the dimension that is summed over."""
    found: dict[str, list[np.ndarray]] = {"out": [], "dx": [], "dweight": []}
    start = 0
    for expert, count in enumerate(COUNTS):
        rows, g = (t[start : start + count].double().numpy() for t in (x, grad))
        w = weight[expert].double().numpy()
        found["out"].append(rounded(rows) @ rounded(w).T)
        found["dx"].append(rounded(g) @ rounded(w.T).T)
        found["dweight"].append((rounded(g.T) @ rounded(rows.T).T)[None])
        start += count
    return {name: np.concatenate(parts) for name, parts in found.items()}


def computed(product, x: Tensor, weight: Tensor, grad: Tensor, groups: Groups) -> dict[str, Tensor]:
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    out = product(x, weight, groups)
    out.backward(grad)
    return {"out": out.detach(), "dx": x.grad, "dweight": weight.grad}


def off(mine: Tensor, reference: np.ndarray) -> float:
    return float(np.linalg.norm(mine.double().numpy() - reference) / np.linalg.norm(reference))


def rounded_mx(x: np.ndarray) -> np.ndarray:
    """Every 32 numbers of a row in e4m3, by the smallest power of two that holds them."""
    found = x.copy()
    for start in range(0, x.shape[1], 32):
        block = x[:, start : start + 32]
        amax = np.abs(block).max(1, keepdims=True)
        scale = 2.0 ** np.ceil(np.log2(np.where(amax == 0, 1.0, amax) / 448.0))
        found[:, start : start + 32] = formulas.rounded(block / scale, "e4m3") * scale
    return found


@pytest.mark.parametrize(("cast", "rounded"), [(cast_rows, rounded_rows), (cast_mx, rounded_mx)])
def test_emulated_experts_are_the_formula(cast, rounded) -> None:
    x, weight, grad, groups = case()
    found = computed(Fp8GroupedProduct(EmulatedGroups(cast), 0, True), x, weight, grad, groups)
    expected = in_fp64(x, weight, grad, rounded)
    for name, value in found.items():
        # A number in the middle of two may fall to the other side, as scales are rounded to fp32.
        assert off(value, expected[name]) < 2e-3, name
    assert not found["dweight"][1].any()


def test_they_are_near_products_without_fp8_and_not_equal() -> None:
    found, wide = (
        computed(product, *case()) for product in (Fp8GroupedProduct(EmulatedGroups(), 0, True), loop_product)
    )
    for name, value in wide.items():
        assert 1e-3 < off(found[name], value.double().numpy()) < 0.06, name
    of_wide = computed(Fp8GroupedProduct(EmulatedGroups(), 0, False), *case())
    assert torch.equal(of_wide["dweight"], wide["dweight"])
    assert torch.equal(of_wide["dx"], found["dx"])


def as_hopper_wants_it(a, b, scales, offs, output_dtype, *, fast) -> Tensor:
    """In place of scaled_grouped_mm of a GPU: checks what its documentation and its kernel ask for, and multiplies."""
    e4m3, (scale_a, scale_b) = torch.float8_e4m3fn, scales
    assert (a.dtype, b.dtype, output_dtype, offs.dtype) == (e4m3, e4m3, torch.bfloat16, torch.int32)
    assert scale_a.dtype == scale_b.dtype == torch.float32
    assert a.stride(-1) == 1
    assert b.stride(-2) == 1
    assert a.shape[-1] % 16 == 0
    bounds = [0, *offs.tolist()]
    pairs = list(zip(bounds[:-1], bounds[1:], strict=True))
    if b.dim() == 3:
        assert b.shape[1] % 16 == b.shape[2] % 16 == 0
        assert scale_a.shape == (len(a),)
        assert scale_b.shape == (len(b), b.shape[2])
        out = torch.zeros(len(a), b.shape[2])
        for expert, (first, end) in enumerate(pairs):
            rows = a[first:end].float() * scale_a[first:end, None]
            out[first:end] = rows @ (b[expert].float() * scale_b[expert])
        return out.to(output_dtype)
    assert all(bound % 16 == 0 for bound in bounds)
    assert scale_a.shape == (len(a) * len(offs),)
    assert scale_b.shape == (b.shape[1] * len(offs),)
    left, right = scale_a.view(len(offs), -1, 1), scale_b.view(len(offs), 1, -1)
    products = [
        (a[:, first:end].float() * left[expert]) @ (b[first:end].float() * right[expert])
        for expert, (first, end) in enumerate(pairs)
    ]
    return torch.stack(products).to(output_dtype)


def test_the_products_for_a_gpu_are_those_that_are_emulated(monkeypatch) -> None:
    monkeypatch.setattr(fp8, "scaled_grouped_mm", as_hopper_wants_it)
    emulated, torchs = (
        computed(Fp8GroupedProduct(groups, 0, True), *case(torch.bfloat16))
        for groups in (EmulatedGroups(), TorchGroups())
    )
    for name, value in emulated.items():
        assert off(torchs[name], value.double().numpy()) < 1e-2, name
        assert torchs[name].dtype == torch.bfloat16
    assert not torchs["dweight"][1].any()


def options(implementation: str = "emulated", **keys) -> Fp8Options:
    return Fp8Options(PrecisionConfig(fp8_format="hybrid", **keys), implementation, 1)


def test_sizes_and_devices_that_it_cannot_serve() -> None:
    assert fp8_grouped_product(options(), torch.zeros(2, 20, 32)) == "20 features are no multiple of 16"
    assert "on a GPU alone" in fp8_grouped_product(options("torch"), torch.zeros(2, 32, 32))
    # Whatever the recipe of other layers, experts have a scale a row.
    assert fp8_grouped_product(options(fp8_recipe="mxfp8"), torch.zeros(2, 48, 64)) == (
        "48 features are no multiple of 32"
    )
    four = Fp8Options(PrecisionConfig(fp8_format="e2m1", fp8_recipe="nvfp4"), "emulated", 1)
    assert fp8_grouped_product(four, torch.zeros(2, 48, 64)) == "experts have no emulated product in nvfp4"
    assert isinstance(fp8_grouped_product(options(fp8_recipe="blockwise"), torch.zeros(2, 48, 48)), Fp8GroupedProduct)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_an_moe_model_trains_with_its_experts_in_fp8_and_its_router_not(tiny, recipe) -> None:
    keys = (MOE, "model.ffn_hidden_size=64", "train.train_iters=4")
    fp8_keys = ("precision.fp8_format=hybrid", f"precision.fp8_recipe={recipe}")
    losses = []
    for more in ((), fp8_keys):
        trainer = Trainer(tiny(*keys, *more))
        trainer.train()
        losses.append(trainer.last_evaluation.get("valid_loss"))
    assert losses[1] == pytest.approx(losses[0], rel=0.02)
    assert losses[1] != losses[0]
    assert fp8_report(trainer.model).converted == 2 * (2 + 2)
    experts = [module for name, module in trainer.model.named_modules() if ".experts.linear_fc" in name]
    assert [type(module.product) for module in experts] == [Fp8GroupedProduct] * 4


def test_first_layers_keep_their_experts(tiny) -> None:
    keys = (MOE, "model.vocab_size=256", "precision.fp8_format=hybrid", "precision.first_last_layers_bf16=true")
    loaded = tiny(*keys, "precision.num_layers_at_end_in_bf16=0", "model.ffn_hidden_size=64")
    model = build_model(loaded.config, ParallelContext(), load_plugins())
    assert fp8_report(model).converted == 4
    assert fp8_report(model).left == {"a first or last layer": 4}
