"""Adapters of experts: what they compute, by formulas in plain torch, and the folders that hold them."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from tests.tune.adapters.models import InMemory, adapted, base_of, loaded, reader_of, write_peft

from mt_ckpt.model import model_config
from mt_core.errors import ConfigError
from mt_core.plugins import load_plugins
from mt_tune.adapters.config import check_adapter
from mt_tune.adapters.merge import MergedCheckpoint
from mt_tune.adapters.on_base import AdaptedCheckpoint
from mt_tune.adapters.vectors import projections

OLMOE = {
    "family": "olmoe",
    "num_layers": 1,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "vocab_size": 101,
    "max_position_embeddings": 64,
    "ffn_hidden_size": 16,
    "moe": {"num_experts": 4, "moe_router_topk": 2},
}
ADAPTERS = {
    "lora": {"type": "lora", "rank": 4, "alpha": 8.0, "experts": "per_expert"},
    "rslora": {"type": "lora", "rank": 4, "alpha": 8.0, "rslora": True},
    "pissa": {"type": "lora", "rank": 4, "alpha": 8.0, "init": "pissa"},
    "shared_outer": {"type": "lora", "rank": 4, "alpha": 8.0, "experts": "shared_outer"},
    "dora": {"type": "dora", "rank": 4, "alpha": 8.0, "experts": "per_expert"},
    "vera": {"type": "vera", "rank": 8, "experts": "per_expert"},
    "ia3": {"type": "ia3", "experts": "per_expert"},
    "dora of fused matrices": {"type": "dora", "rank": 4, "alpha": 8.0},
}
EXPERTS = "decoder.layers.0.mlp.experts"
ON_EXPERTS = {"targets": [f"{EXPERTS}.linear_fc1", f"{EXPERTS}.linear_fc2"]}
TOKENS = torch.arange(24).view(2, 12)


@pytest.fixture(scope="module")
def host():
    return load_plugins()


@pytest.fixture(scope="module")
def base(host):
    return base_of(host, OLMOE)


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(TOKENS)


def changed_weight(kind: str, name: str, weight: torch.Tensor, own: dict[str, torch.Tensor]) -> torch.Tensor:
    """The matrices [E, out, in] that compute the same, one expert after another. own: parameters of the adapter."""
    is_first, found = name == "linear_fc1", []
    # Gate and up apart, or as one matrix: the rows, and the columns of A.
    halves = [(slice(0, 16), slice(0, 4)), (slice(16, 32), slice(4, 8))] if is_first else [(slice(None), slice(0, 4))]
    if kind in ("rslora", "pissa", "dora of fused matrices"):
        halves = [(slice(None), slice(0, 4))]
    for expert, matrix in enumerate(weight):
        new = matrix.clone()
        for number, (rows, columns) in enumerate(halves):
            if kind == "ia3":
                continue
            if kind == "vera":
                a, b = projections(0, 8, 32, 32)
                d = own["lambda_d"][expert, 8 * number : 8 * number + 8]
                low = (d[:, None] * a)[:, : matrix.shape[1]]
                new[rows] += own["lambda_b"][expert, rows, None] * (b[: len(matrix[rows])] @ low)
                continue
            a = own["lora_A"] if own["lora_A"].ndim == 2 else own["lora_A"][expert]
            b = own["lora_B"] if own["lora_B"].ndim == 2 else own["lora_B"][expert]
            if kind == "pissa":  # the initial update is taken off
                new[rows] -= 2.0 * own["initial_B"][expert][rows] @ own["initial_A"][expert][columns]
            new[rows] += (8.0 / 4**0.5 if kind == "rslora" else 2.0) * b[rows] @ a[columns]
        if kind.startswith("dora"):
            new *= (own["magnitude"][expert] / new.norm(dim=1))[:, None]
        if kind == "ia3":
            new *= own["scaling"][expert][:, None] if is_first else own["scaling"][expert][None]
        found.append(new)
    return torch.stack(found)


@pytest.mark.parametrize("kind", ADAPTERS)
def test_experts_compute_what_the_formula_gives(host, base, tmp_path, kind) -> None:
    """Logits of a base with these matrices; and of the merged model, and of the folder that is written and read."""
    model, config = adapted(host, base, {**ADAPTERS[kind], **ON_EXPERTS})
    values = {name: parameter.detach() for name, parameter in model.named_parameters()}
    weights = dict(base.values)
    for name in ("linear_fc1", "linear_fc2"):
        own = {n.rpartition(".")[2]: v for n, v in values.items() if n.startswith(f"{EXPERTS}.{name}.adapter.")}
        weight = weights[f"model.{EXPERTS}.{name}.weight"]
        weights[f"model.{EXPERTS}.{name}.weight"] = changed_weight(kind, name, weight, own)
    expected = logits(loaded(host, InMemory(base.metadata["config"], {n[6:]: v for n, v in weights.items()})))
    found = logits(model)
    assert (found - logits(loaded(host, base))).abs().max() > 1e-3
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=0)
    merged = logits(loaded(host, MergedCheckpoint(reader_of(model, config), host)))
    torch.testing.assert_close(merged, expected, atol=2e-6, rtol=0)
    if "fused" in kind:
        with pytest.raises(ConfigError, match=r"DoRA.*adapter.experts=per_expert"):
            write_peft(tmp_path / "adapter", model, config, host)
        return
    folder = write_peft(tmp_path / "adapter", model, config, host)
    read = logits(loaded(host, AdaptedCheckpoint(base, folder, host)))
    torch.testing.assert_close(read, found, atol=2e-6 if kind == "pissa" else 0, rtol=0)


@pytest.mark.parametrize("kind", ADAPTERS)
def test_products_that_permute_rows_have_the_same_gradients(host, base, kind) -> None:
    """With model.moe.moe_permute_fusion, which adapters that multiply rows turn off, and without."""
    from mt_moe.experts.loop import PermutingLoop

    def gradients(permute: bool) -> dict[str, torch.Tensor]:
        model, _ = adapted(host, base, {**ADAPTERS[kind], **ON_EXPERTS})
        experts = model.get_submodule(EXPERTS)
        if permute:
            for layer in (experts.linear_fc1, experts.linear_fc2):
                layer.product = layer.adapter.product = PermutingLoop()
            experts.permute_fusion = experts.permute_fusion or kind in ("lora", "rslora", "shared_outer")
        model.eval()(TOKENS).square().mean().backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    plain, permuting = gradients(False), gradients(True)
    assert plain.keys() == permuting.keys()
    assert len(plain) >= 2
    for name, value in plain.items():
        torch.testing.assert_close(permuting[name], value, msg=name)


def test_shared_outer_folders_have_stacks_of_one_matrix_or_of_all(host, base, tmp_path) -> None:
    model, config = adapted(host, base, {**ADAPTERS["shared_outer"], "targets": ["gate_proj", "down_proj"]})
    folder = write_peft(tmp_path / "adapter", model, config, host)
    stored = load_file(folder / "adapter_model.safetensors")
    prefix = "base_model.model.model.layers.0.mlp.experts"
    assert {name.removeprefix(f"{prefix}."): list(tensor.shape) for name, tensor in stored.items()} == {
        "w1.lora_A.weight": [1, 4, 32],
        "w1.lora_B.weight": [4, 16, 4],
        "w2.lora_A.weight": [4, 4, 16],
        "w2.lora_B.weight": [1, 32, 4],
    }
    assert json.loads((folder / "adapter_config.json").read_text())["target_modules"] == ["down_proj", "gate_proj"]


@pytest.mark.parametrize(
    ("adapter", "words"),
    [
        ({"type": "dora", "experts": "shared_outer"}, "shared_outer with adapter.type=dora"),
        ({"type": "lora", "init": "pissa", "experts": "shared_outer"}, "shared_outer with adapter.init=pissa"),
    ],
)
def test_sharing_of_other_types_is_refused(host, base, adapter, words) -> None:
    config = model_config(InMemory({**base.metadata["config"], "adapter": adapter}, {}), host)
    with pytest.raises(ConfigError, match=words):
        check_adapter(config)
