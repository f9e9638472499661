"""LoRA on one process: what is trained, what it computes, the folders that hold it."""

from __future__ import annotations

import json

import pytest
import torch
from tests.tune.adapters.models import LLAMA, adapted, base_of, loaded, reader_of, write_peft

from mt_core.errors import CheckpointError, ConfigError
from mt_core.nn.layout import parameter_layouts
from mt_core.plugins import load_plugins
from mt_tune.adapters.base import adapters, without_adapters
from mt_tune.adapters.merge import MergedCheckpoint
from mt_tune.adapters.on_base import AdaptedCheckpoint

LORA = {"type": "lora", "rank": 4, "alpha": 8.0}
TOKENS = torch.arange(24).view(2, 12)


@pytest.fixture(scope="module")
def host():
    return load_plugins()


@pytest.fixture(scope="module")
def base(host):
    return base_of(host, LLAMA)


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(TOKENS)


def test_a_fused_projection_has_pairs_of_its_parts(host, base) -> None:
    """The formula in plain torch, of the queries alone: rows of other parts are the base's."""
    adapter = {**LORA, "targets": ["q_proj"], "rslora": True}
    model, _ = adapted(host, base, adapter)
    layer = dict(model.named_modules())["decoder.layers.0.self_attention.linear_qkv"]
    x = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))
    a, b = layer.adapter.lora_A, layer.adapter.lora_B
    # Two groups of two query heads, a key and a value head of 8 features.
    is_query = torch.arange(64).view(2, 4, 8)[:, :2].flatten()
    expected = x @ layer.weight.T
    expected[..., is_query] += 8.0 / 4**0.5 * (x @ a.T @ b[is_query].T)
    torch.testing.assert_close(layer(x), expected)


def test_nothing_of_the_base_is_trained(host, base) -> None:
    model, _ = adapted(host, base, LORA)
    trained = {name for name, layout in parameter_layouts(model).items() if layout.trained}
    assert trained == {name for name, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 4 * 2
    assert all(name.endswith((".lora_A", ".lora_B")) for name in trained)


def test_turned_off_it_is_the_base(host, base) -> None:
    model, _ = adapted(host, base, LORA)
    plain = logits(loaded(host, base))
    assert not torch.allclose(logits(model), plain, atol=1e-3)
    with without_adapters(model):
        assert torch.equal(logits(model), plain)


def test_rank_and_alpha_patterns_are_those_of_peft(host, base) -> None:
    adapter = {**LORA, "rank_pattern": {"q_proj": 2, r"layers\.1\..*": 3}, "alpha_pattern": {"self_attn.q_proj": 5.0}}
    model, _ = adapted(host, base, adapter)
    qkv = [a for path, a in adapters(model).items() if "linear_qkv" in path]
    assert [[part.rank for part in adapter.ranks] for adapter in qkv] == [[2, 4, 4], [2, 3, 3]]
    assert [part.scale for part in qkv[0].ranks] == [5.0 / 2, 2.0, 2.0]


def test_a_folder_is_written_read_and_merged(host, base, tmp_path) -> None:
    adapter = {**LORA, "rank_pattern": {"q_proj": 2}, "modules_to_save": ["lm_head"]}
    model, config = adapted(host, base, {**adapter, "modules_to_save": ["output_layer"]})
    folder = write_peft(tmp_path / "adapter", model, config, host)
    read = AdaptedCheckpoint(base, folder, host)
    assert torch.equal(logits(loaded(host, read)), logits(model))
    merged = MergedCheckpoint(reader_of(model, config), host)
    assert set(merged.shapes()) == set(base.shapes())
    torch.testing.assert_close(logits(loaded(host, merged)), logits(model), atol=1e-6, rtol=0)


def test_merging_rounds_once(host, base) -> None:
    """In bf16: the sum in fp32, then one rounding."""
    model, config = adapted(host, base, LORA)
    source = reader_of(model, config)
    source.values = {n: v.bfloat16() for n, v in source.values.items()}
    name = "model.decoder.layers.0.mlp.linear_fc2"
    a, b = (source.values[f"{name}.adapter.lora_{x}"].float() for x in "AB")
    expected = (source.values[f"{name}.weight"].float() + 2.0 * b @ a).bfloat16()
    assert torch.equal(MergedCheckpoint(source, host).read(f"{name}.weight"), expected)


@pytest.mark.parametrize("target", ["output_layer", "word_embeddings"])
def test_merging_into_a_tied_matrix_is_refused(host, target) -> None:
    """One of the two layers would be changed that the adapter leaves as it is."""
    tied = base_of(host, {**LLAMA, "untie_embeddings_and_output_weights": False})
    model, config = adapted(host, tied, {**LORA, "targets": [target]})
    assert not torch.allclose(logits(model), logits(loaded(host, tied)), atol=1e-3)
    with pytest.raises(ConfigError, match="is tied: token embeddings and LM head are one matrix"):
        MergedCheckpoint(reader_of(model, config), host)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"peft_type": "OFT"}, "peft_type='OFT'"),
        ({"lora_bias": True}, "lora_bias=True"),
        ({"future_key": 3}, "future_key=3"),
        ({"bias": "all"}, "bias='all'"),
        ({"init_lora_weights": "pissa_niter_4"}, "path_initial_model_for_weight_conversion"),
        ({"r": 8}, "adapter.rank"),
    ],
)
def test_what_changes_the_arithmetic_is_refused_by_name(host, base, tmp_path, change, words) -> None:
    model, config = adapted(host, base, LORA)
    folder = write_peft(tmp_path / "adapter", model, config, host)
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(ConfigError, match=words.replace("(", r"\(")):
        AdaptedCheckpoint(base, folder, host)


def test_tensors_that_nothing_takes_are_refused(host, base, tmp_path) -> None:
    model, config = adapted(host, base, LORA)
    folder = write_peft(tmp_path / "adapter", model, config, host)
    file = folder / "adapter_config.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps({**content, "target_modules": ["q_proj", "down_proj"]}))
    with pytest.raises(CheckpointError, match=r"nothing takes .*gate_proj.lora_A"):
        AdaptedCheckpoint(base, folder, host)
    file.write_text(json.dumps({**content, "target_modules": [*content["target_modules"], "gate"]}))
    with pytest.raises(ConfigError, match="no layer has the name gate"):
        AdaptedCheckpoint(base, folder, host)


def test_an_adapter_of_another_base_is_refused(host, base, tmp_path) -> None:
    model, config = adapted(host, base, LORA)
    folder = write_peft(tmp_path / "adapter", model, config, host)
    other = base_of(host, {**LLAMA, "num_layers": 3})
    with pytest.raises(CheckpointError, match=r"no tensor .*layers\.2\."):
        AdaptedCheckpoint(other, folder, host)
