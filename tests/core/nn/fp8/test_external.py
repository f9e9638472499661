"""Layers of other packages: refused by name where they cannot be, and called as they are documented, by fakes."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from mt_core.config.schema import PrecisionConfig
from mt_core.errors import ConfigError
from mt_core.nn.fp8 import external
from mt_core.nn.fp8.external import borrowed_linear, external_objection
from mt_core.nn.fp8.options import Fp8Options, resolve_options
from mt_core.nn.kernels.choice import Kernels
from mt_core.parallel.context import ParallelContext
from mt_moe.experts.fp8 import fp8_grouped_product

GPU = torch.device("cuda")


def precision(name: str = "te", fp8_format: str = "hybrid", recipe: str = "tensorwise", **keys) -> PrecisionConfig:
    return PrecisionConfig(fp8_format=fp8_format, fp8_recipe=recipe, fp8_implementation=name, **keys)


@pytest.mark.parametrize(("name", "title"), [("te", "Transformer Engine"), ("torchao", "torchao")])
def test_a_package_that_is_not_there_is_named(name, title, monkeypatch) -> None:
    monkeypatch.setattr(external, "find_spec", lambda module: None)
    words = rf"precision.fp8_implementation={name} cannot serve: {title} is not installed; use auto or torch"
    with pytest.raises(ConfigError, match=words):
        resolve_options(precision(name), ParallelContext(), Kernels({}, "cpu", "bfloat16"))


def test_what_a_package_lacks_is_reported(monkeypatch) -> None:
    monkeypatch.setattr(external, "find_spec", lambda module: ModuleSpec(module, None))
    assert "not on cpu" in external_objection("te", precision(), torch.device("cpu"))
    assert "serves fp8_recipe=tensorwise" in external_objection("te", precision(recipe="delayed"), GPU)
    assert "rowwise with fp8_format=e4m3" in external_objection("torchao", precision(recipe="blockwise"), GPU)
    assert "fp8_margin" in external_objection("te", precision(fp8_margin=2), GPU)
    assert "fp8_wgrad" in external_objection("torchao", precision(fp8_wgrad=False), GPU)
    assert external_objection("te", precision(), GPU) is None
    assert external_objection("torchao", precision(fp8_format="e4m3", recipe="rowwise"), GPU) is None
    options = Fp8Options(precision(), "te", 1)
    assert "not one of te" in fp8_grouped_product(options, torch.zeros(2, 16, 16))


def fake_te(monkeypatch, calls: list[str]) -> None:
    """A transformer_engine with plain products."""

    class Linear(nn.Linear):
        def __init__(self, in_features, out_features, *, bias, params_dtype, device) -> None:
            super().__init__(in_features, out_features, bias=bias, dtype=params_dtype, device=device)

    @contextmanager
    def fp8_autocast(*, enabled, fp8_recipe):
        calls.append(f"{enabled} {fp8_recipe}")
        yield

    formats = SimpleNamespace(HYBRID="hybrid", E4M3="e4m3")
    recipe = SimpleNamespace(
        Format=formats,
        Float8CurrentScaling=lambda fp8_format: f"current {fp8_format}",
        Float8BlockScaling=lambda fp8_format: f"block {fp8_format}",
    )
    modules = {name: ModuleType(name) for name in ("transformer_engine", "transformer_engine.pytorch")}
    modules["transformer_engine"].pytorch = modules["transformer_engine.pytorch"]
    modules["transformer_engine.pytorch"].Linear = Linear
    modules["transformer_engine.pytorch"].fp8_autocast = fp8_autocast
    modules["transformer_engine.common"] = ModuleType("transformer_engine.common")
    modules["transformer_engine.common"].recipe = recipe
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)


def fake_torchao(monkeypatch, calls: list[str]) -> None:
    class Float8LinearConfig:
        @staticmethod
        def from_recipe_name(name: str) -> str:
            calls.append(name)
            return name

    float8 = ModuleType("torchao.float8")
    float8.Float8LinearConfig = Float8LinearConfig
    float8.convert_to_float8_training = lambda module, *, config: module
    monkeypatch.setitem(sys.modules, "torchao", ModuleType("torchao"))
    monkeypatch.setitem(sys.modules, "torchao.float8", float8)


@pytest.mark.parametrize(
    ("name", "fake", "expected"),
    [("te", fake_te, ["True current hybrid"]), ("torchao", fake_torchao, ["tensorwise"])],
)
def test_their_layer_multiplies_by_our_weight(name, fake, expected, monkeypatch) -> None:
    calls: list[str] = []
    fake(monkeypatch, calls)
    weight = torch.randn(32, 16, requires_grad=True)
    x, bias = torch.randn(2, 3, 16, requires_grad=True), torch.randn(32)
    multiply = borrowed_linear(name, weight, "output", precision(name))
    out = multiply(x, weight, bias, ParallelContext())
    assert torch.allclose(out, x @ weight.T + bias, atol=1e-6)
    out.sum().backward()
    assert torch.allclose(weight.grad, x.detach().sum((0, 1)).expand(32, 16), atol=1e-5)
    assert calls == expected
