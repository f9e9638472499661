"""Adapters of Megatron-Bridge in folders that torch's distributed checkpoint writes, and the formula in plain torch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.tune.adapters.models import LLAMA, InMemory, base_of, loaded

from mt_core.errors import CheckpointError, ConfigError
from mt_core.plugins import load_plugins
from mt_tune.adapters.merge import MergedCheckpoint
from mt_tune.adapters.on_base import AdaptedCheckpoint, detect
from mt_tune.adapters.peft_reading import described_section

RANK, ALPHA, LAYERS = 4, 8.0, 2
SCALE = ALPHA / RANK
QKV, PROJ = "self_attention.linear_qkv", "self_attention.linear_proj"
FC1, FC2, EXPERTS = "mlp.linear_fc1", "mlp.linear_fc2", "mlp.experts"
OLMOE = {
    "family": "olmoe", "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 101,
    "max_position_embeddings": 64, "ffn_hidden_size": 16, "moe": {"num_experts": 4, "moe_router_topk": 2},
}  # fmt: skip
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
TOKENS = torch.arange(24).view(2, 12)


@pytest.fixture(scope="module")
def host():
    return load_plugins()


@pytest.fixture(scope="module")
def base(host):
    return base_of(host, LLAMA)


def random(*shape: int) -> torch.Tensor:
    return 0.2 * torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def written(path: Path, kind: str, tensors: dict[str, torch.Tensor], model: str = "") -> Path:
    """A folder of a run: layers stacked, as Megatron's torch_dist stacks layers that are alike."""
    folder = path / "iter_0000005"
    stored = {f"decoder.layers.{name}": tensor for name, tensor in tensors.items()}
    dcp.save(stored, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    (folder / "run_config.yaml").write_text(
        f"checkpoint:\n  pretrained_checkpoint: /nowhere\nmodel:\n  num_layers: 2\n{model}"
        f"peft:\n  _target_: megatron.bridge.peft.{kind}\n  alpha: {ALPHA}\n  dim: {RANK}\n"
    )
    (path / "latest_checkpointed_iteration.txt").write_text("5")
    return path


def pairs(name: str, inputs: int, outputs: int, *stack: int) -> dict[str, torch.Tensor]:
    """A and B of all layers."""
    return {
        f"{name}.linear_in.weight": random(LAYERS, *stack, RANK, inputs),
        f"{name}.linear_out.weight": random(LAYERS, *stack, outputs, RANK),
    }


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(TOKENS)


def with_weights(host, base, changes) -> torch.Tensor:
    """Logits of the base with changed matrices. changes: layer -> name -> the matrix from its own."""
    values = {name[6:]: value.clone() for name, value in base.values.items()}
    for layer in range(LAYERS):
        for name, change in changes.items():
            key = f"decoder.layers.{layer}.{name}.weight"
            values[key] = change(layer, values[key])
    return logits(loaded(host, InMemory(base.metadata["config"], values)))


def adds(tensors: dict[str, torch.Tensor], name: str):
    a, b = (tensors[f"{name}.adapter.linear_{end}.weight"] for end in ("in", "out"))
    return lambda layer, weight: weight + SCALE * b[layer] @ a[layer]


def test_lora_of_fused_layers(host, base, tmp_path) -> None:
    """One A for queries, keys and values; B in the order of Megatron's rows."""
    sizes = {QKV: (32, 64), PROJ: (32, 32), FC1: (32, 96), FC2: (48, 32)}
    tensors: dict[str, torch.Tensor] = {}
    for name, (inputs, outputs) in sizes.items():
        tensors |= pairs(f"{name}.adapter", inputs, outputs)
    path = written(tmp_path, "lora.LoRA", tensors)
    assert detect(path)
    reader = AdaptedCheckpoint(base, path, host)
    expected = with_weights(host, base, {name: adds(tensors, name) for name in sizes})
    assert (expected - logits(loaded(host, base))).abs().max() > 1e-2
    torch.testing.assert_close(logits(loaded(host, reader)), expected, atol=2e-6, rtol=0)
    torch.testing.assert_close(logits(loaded(host, MergedCheckpoint(reader, host))), expected, atol=2e-6, rtol=0)


def test_canonical_lora_has_a_pair_for_each_part(host, base, tmp_path) -> None:
    """Two groups of two query heads, a key and a value head of 8 features; keys have no adapter."""
    tensors = pairs(f"{QKV}.adapter.adapter_q", 32, 32) | pairs(f"{QKV}.adapter.adapter_v", 32, 16)
    tensors |= pairs(f"{FC1}.adapter.adapter_gate", 32, 48) | pairs(f"{FC1}.adapter.adapter_up", 32, 48)
    for number, name in enumerate(tensors):  # none equals another
        tensors[name] = tensors[name] + 0.01 * number

    def delta(name: str, layer: int) -> torch.Tensor:
        a, b = (tensors[f"{name}.linear_{end}.weight"][layer] for end in ("in", "out"))
        return SCALE * b @ a

    def attention(layer: int, weight: torch.Tensor) -> torch.Tensor:
        q, v = delta(f"{QKV}.adapter.adapter_q", layer), delta(f"{QKV}.adapter.adapter_v", layer)
        groups = [torch.cat((q[16 * g : 16 * g + 16], torch.zeros(8, 32), v[8 * g : 8 * g + 8])) for g in range(2)]
        return weight + torch.cat(groups)

    def feed_forward(layer: int, weight: torch.Tensor) -> torch.Tensor:
        return weight + torch.cat([delta(f"{FC1}.adapter.adapter_{part}", layer) for part in ("gate", "up")])

    path = written(tmp_path, "canonical_lora.CanonicalLoRA", tensors)
    expected = with_weights(host, base, {QKV: attention, FC1: feed_forward})
    found = logits(loaded(host, AdaptedCheckpoint(base, path, host)))
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=0)


def test_dora_has_a_magnitude_of_each_row(host, base, tmp_path) -> None:
    tensors = pairs(f"{QKV}.adapter", 32, 64)
    tensors[f"{QKV}.adapter.weight_magnitude"] = random(LAYERS, 64).abs() + 0.5

    def change(layer: int, weight: torch.Tensor) -> torch.Tensor:
        changed = adds(tensors, QKV)(layer, weight)
        return tensors[f"{QKV}.adapter.weight_magnitude"][layer, :, None] * changed / changed.norm(dim=1, keepdim=True)

    path = written(tmp_path, "dora.DoRA", tensors)
    found = logits(loaded(host, AdaptedCheckpoint(base, path, host)))
    torch.testing.assert_close(found, with_weights(host, base, {QKV: change}), atol=2e-6, rtol=0)


@pytest.mark.parametrize("stack", [(4,), (1,), ()], ids=["each its own", "one for all", "older, one for all"])
def test_experts_have_their_own_adapters_or_share_one(host, tmp_path, stack) -> None:
    """normalize_moe_lora: their rank is another, and with it the scale."""
    base = base_of(host, OLMOE)
    stored = {
        f"{EXPERTS}.experts.{name}.adapter.linear_{end}.weight": random(LAYERS, *stack, *shape)
        for name, inputs, outputs in (("linear_fc1", 32, 32), ("linear_fc2", 16, 32))
        for end, shape in (("in", (2, inputs)), ("out", (outputs, 2)))
    }
    router, attention = pairs("mlp.router.adapter", 32, 4), pairs(f"{PROJ}.adapter", 32, 32)
    path = written(tmp_path, "lora.LoRA", stored | router | attention)

    def change(name: str):
        a, b = (stored[f"{EXPERTS}.experts.{name}.adapter.linear_{end}.weight"] for end in ("in", "out"))
        return lambda layer, weight: weight + ALPHA / 2 * b[layer] @ a[layer]

    changes = {f"{EXPERTS}.{name}": change(name) for name in ("linear_fc1", "linear_fc2")}
    changes |= {"mlp.router": adds(router, "mlp.router"), PROJ: adds(attention, PROJ)}
    found = logits(loaded(host, AdaptedCheckpoint(base, path, host)))
    torch.testing.assert_close(found, with_weights(host, base, changes), atol=2e-6, rtol=0)


@pytest.mark.parametrize(
    ("kind", "tensors", "model", "words"),
    [
        ("lora.LoRA", {f"{QKV}.adapter.linear_middle.weight": (4, 4)}, "", "nothing takes .*linear_middle"),
        ("lora.LoRA", {f"{QKV}.weight": (64, 32)}, "", "nothing takes decoder.layers.self_attention.linear_qkv.weight"),
        ("lora.LoRA", pairs("mlp.linear_fc3.adapter", 32, 32), "", "no layer has the name .*linear_fc3"),
        ("mystery.BottleneckAdapter", pairs(f"{PROJ}.adapter", 32, 32), "", "BottleneckAdapter.* is not supported"),
        (
            "canonical_lora.CanonicalLoRA",
            pairs(f"{FC1}.adapter.adapter_up", 32, 48),
            "  tensor_model_parallel_size: 2\n",
            "tensor_model_parallel_size=2",
        ),
        ("lora.LoRA", pairs(f"{PROJ}.adapter", 32, 40), "", "adapter has"),
    ],
)
def test_what_is_not_known_is_refused_by_name(host, base, tmp_path, kind, tensors, model, words) -> None:
    stored = {name: random(LAYERS, *v) if isinstance(v, tuple) else v for name, v in tensors.items()}
    path = written(tmp_path, kind, stored, model)
    with pytest.raises((CheckpointError, ConfigError), match=words):
        AdaptedCheckpoint(base, path, host)


def test_a_run_takes_what_the_folder_says(tmp_path) -> None:
    path = written(tmp_path, "lora.LoRA", pairs(f"{PROJ}.adapter", 32, 32))
    targets = [f"decoder.layers.{layer}.{PROJ}" for layer in range(LAYERS)]
    expected = {"type": "lora", "rank": RANK, "alpha": ALPHA, "targets": targets, "rank_pattern": {}}
    assert described_section(path) == expected
