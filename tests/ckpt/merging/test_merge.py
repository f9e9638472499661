"""Merging equals formulas in plain torch on the tensors of Hugging Face's files; mergekit gives the same numbers."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from mt_ckpt.commands.ckpt import app
from mt_ckpt.merging.methods import Sparsity
from mt_core.errors import ConfigError, MtError

transformers = pytest.importorskip("transformers")
load_file = pytest.importorskip("safetensors.torch").load_file
Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A base and two models near it."""
    folder = tmp_path_factory.mktemp("models")
    config = transformers.LlamaConfig(
        vocab_size=48,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(folder / "m0")
    for number in (1, 2):
        near = transformers.LlamaForCausalLM.from_pretrained(folder / "m0")
        for parameter in near.parameters():
            parameter.data += 0.02 * torch.randn_like(parameter)
        near.save_pretrained(folder / f"m{number}")
    return [folder / f"m{number}" for number in range(3)]


@cache
def tensors(path: Path) -> Tensors:
    return load_file(path / "model.safetensors")


def merged(target: Path, *arguments: Any) -> Tensors:
    result = CliRunner().invoke(app, ["merge", *map(str, arguments), "--save-dir", str(target)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return load_file(target / "model.safetensors")


def require_equal(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(found[name], value, rtol=1e-5, atol=1e-6), name


def test_linear_and_task_arithmetic(models: list[Path], tmp_path: Path) -> None:
    base, a, b = map(tensors, models)
    weighted = merged(tmp_path / "linear", *models, "--weight", 1, "--weight", 0.5, "--weight", 0.25)
    require_equal(weighted, {name: (base[name] + 0.5 * a[name] + 0.25 * b[name]) / 1.75 for name in base})
    sums = merged(
        tmp_path / "task",
        *models[1:],
        "--method",
        "task_arithmetic",
        "--base",
        models[0],
        "--weight",
        0.7,
        "--weight",
        -0.4,
    )
    require_equal(sums, {n: base[n] + 0.7 * (a[n] - base[n]) - 0.4 * (b[n] - base[n]) for n in base})


def test_slerp_takes_each_matrix_by_itself(models: list[Path], tmp_path: Path) -> None:
    found = merged(tmp_path / "out", models[1], "--method", "slerp", "--base", models[0], "--t", 0.3)
    base, other = tensors(models[0]), tensors(models[1])

    def between(a: Tensor, b: Tensor) -> Tensor:
        x, y = a.double().flatten(), b.double().flatten()
        cosine = (x @ y) / (x.norm() * y.norm())
        if cosine.abs() > 0.9995:
            return 0.7 * a + 0.3 * b
        angle = cosine.acos()
        return ((0.7 * angle).sin() / angle.sin() * x + (0.3 * angle).sin() / angle.sin() * y).view(a.shape).float()

    require_equal(found, {name: between(base[name], other[name]) for name in base})


def test_ties_element_by_element(models: list[Path], tmp_path: Path) -> None:
    found = merged(
        tmp_path / "out", *models[1:], "--method", "ties", "--base", models[0], "--density", 0.4, "--lambda", 0.8
    )
    base = tensors(models[0])

    def of(name: str) -> Tensor:
        trimmed = []
        for model in models[1:]:
            difference = (tensors(model)[name] - base[name]).flatten()
            kept = difference.abs().topk(max(1, int(0.4 * difference.numel()))).indices
            trimmed.append(torch.zeros_like(difference).index_copy(0, kept, difference[kept]))
        merged_values = []
        for values in zip(*(x.tolist() for x in trimmed), strict=True):
            agreeing = [value for value in values if value and (value > 0) == (sum(values) >= 0)]
            merged_values.append(sum(agreeing) / max(len(agreeing), 1))
        return base[name] + 0.8 * torch.tensor(merged_values).view(base[name].shape)

    require_equal(found, {name: of(name) for name in base})


def test_dare_keeps_random_elements_at_the_size_of_all() -> None:
    difference = torch.randn(200, 50, generator=torch.Generator().manual_seed(1))
    kept = Sparsity(random=True, rescale="l1", seed=3).of(difference, 0.3, "w", 0)
    assert (kept != 0).float().mean() == pytest.approx(0.3, abs=0.02)
    assert kept.abs().sum() == pytest.approx(difference.abs().sum().item(), rel=1e-4)
    again = Sparsity(random=True, rescale="density", seed=3).of(difference, 0.3, "w", 0)
    assert torch.allclose(again[kept != 0], difference[kept != 0] / 0.3)
    other = Sparsity(random=True, seed=3).of(difference, 0.3, "w", 1)
    assert not torch.equal(other != 0, kept != 0)


def write_recipe(path: Path, **values: Any) -> Path:
    path.write_text(json.dumps(values))
    return path


def test_a_file_in_mergekits_form_stacks_layers_and_filters(models: list[Path], tmp_path: Path) -> None:
    one, two = map(str, models[1:])
    slices = [
        {"sources": [{"model": one, "layer_range": [0, 2]}]},
        {
            "sources": [
                {"model": two, "layer_range": [1, 3], "parameters": {"scale": [{"filter": "o_proj", "value": 0.5}]}}
            ]
        },
    ]
    recipe = write_recipe(tmp_path / "stack.json", merge_method="passthrough", slices=slices)
    found = merged(tmp_path / "out", recipe)
    a, b = tensors(models[1]), tensors(models[2])
    assert torch.equal(found["model.layers.1.self_attn.q_proj.weight"], a["model.layers.1.self_attn.q_proj.weight"])
    assert torch.equal(found["model.layers.3.mlp.up_proj.weight"], b["model.layers.2.mlp.up_proj.weight"])
    half = 0.5 * b["model.layers.1.self_attn.o_proj.weight"]
    assert torch.equal(found["model.layers.2.self_attn.o_proj.weight"], half)
    assert torch.equal(found["lm_head.weight"], b["lm_head.weight"])
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_hidden_layers"] == 4
    assert transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out").config.num_hidden_layers == 4


def test_a_value_goes_along_the_layers(models: list[Path], tmp_path: Path) -> None:
    entries = [{"model": str(models[0])}, {"model": str(models[1])}]
    recipe = write_recipe(
        tmp_path / "a.json",
        merge_method="linear",
        models=[{**entries[0], "parameters": {"weight": [1, 0]}}, {**entries[1], "parameters": {"weight": [0, 1]}}],
    )
    found, name = merged(tmp_path / "out", recipe), "model.layers.{}.mlp.up_proj.weight"
    base, other = tensors(models[0]), tensors(models[1])
    assert torch.equal(found[name.format(0)], base[name.format(0)])
    assert torch.allclose(found[name.format(1)], (base[name.format(1)] + other[name.format(1)]) / 2)
    assert torch.equal(found[name.format(2)], other[name.format(2)])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"merge_method": "teis", "models": []}, "did you mean"),
        ({"merge_method": "ties", "models": [{"model": "a"}]}, "needs base_model"),
        (
            {"merge_method": "linear", "models": [{"model": "a", "parameters": {"density": 1}}]},
            "density is no parameter",
        ),
        ({"merge_method": "linear", "modules": {}}, "modules is not supported"),
        ({"merge_method": "linear", "models": [{"modle": "a"}]}, "models or slices"),
        ({"merge_method": "linear", "models": [{"model": "a"}], "tokenizer_source": "union"}, "union"),
    ],
)
def test_files_that_cannot_be_followed(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        merged(tmp_path / "out", write_recipe(tmp_path / "a.json", **values))


def test_a_missing_weight_and_another_architecture_are_named(models: list[Path], tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "a.json", merge_method="linear", models=[{"model": str(m)} for m in models])
    with pytest.raises(MtError, match="needs the parameter weight"):
        merged(tmp_path / "out", recipe)
    transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=48, hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=4
        )
    ).save_pretrained(tmp_path / "wide")
    with pytest.raises(MtError, match="not of one architecture"):
        merged(tmp_path / "out", models[0], tmp_path / "wide")
