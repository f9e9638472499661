"""`--verify` judges names by what a strict load of the target's version and layers wants, not by what mt can read.

What the versions want is compared with Megatron-Core's own packages in test_megatron_versions.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.ckpt.megatron.conftest import RandomCheckpoint
from tests.ckpt.megatron.test_megatron_versions import MODELS, source_of
from tests.ckpt.megatron.test_round_trip import through

from mt_ckpt.convert import convert
from mt_core.checkpoint_specs import CHECKPOINT_SAVERS, ConvertOptions
from mt_core.errors import CheckpointError
from mt_core.plugins import PluginHost


def asked(version: str, implementation: Any = "transformer_engine", **more: Any) -> ConvertOptions:
    return ConvertOptions(target_megatron_version=version, target_transformer_impl=implementation, **more)


WRONG = {
    "another version's convolution": ("megatron", "hybrid", asked("0.18"), asked("0.19"), "mixer.conv1d_weight is mis"),
    "another version's prediction": (
        "megatron",
        "prediction",
        asked("0.16"),
        asked("0.17"),
        "mtp_model_layer.* is mis",
    ),
    "another version's shape": (
        "megatron",
        "latent",
        asked("0.13", target_tensor_parallel_size=2),
        asked("0.14", target_tensor_parallel_size=2),
        r"linear_q_down_proj.weight has the shape \(10, 32\), wanted is \(20, 32\)",
    ),
    "other layers": ("megatron", "llama", asked("0.19"), asked("0.19", "local"), "input_layernorm.weight is missing"),
    "other layers, shared": (
        "megatron-dist",
        "hybrid",
        asked("0.19", "local"),
        asked("0.19"),
        "layer_norm_weight is mi",
    ),
    "another version's state": (
        "megatron-dist",
        "gpt",
        asked("0.14"),
        asked("0.15"),
        "core_attention.* is there and not",
    ),
    "another version's copy": (
        "megatron-dist",
        "t5",
        asked("0.8"),
        asked("0.9"),
        "position_embeddings.weight is missing",
    ),
}
"""Format, model, what is written, what was asked for, what is said."""


@pytest.mark.parametrize("name", WRONG)
def test_names_that_mt_reads_and_the_version_does_not(name: str, host: PluginHost, tmp_path: Path) -> None:
    saver, model, written, wanted, words = WRONG[name]
    spec = host[CHECKPOINT_SAVERS].get(saver)
    spec.convert.load()(tmp_path / "out", source_of(model, host), written, host)
    check = spec.require_strict_names.load()
    assert check(tmp_path / "out", source_of(model, host), written, host).number > 10
    version = wanted.target_megatron_version
    with pytest.raises(CheckpointError, match=rf"a strict load of Megatron-Core {version} with .* fail: .*{words}"):
        check(tmp_path / "out", source_of(model, host), wanted, host)


LAYOUTS = {
    "tensor and pipeline": ("llama", {"target_tensor_parallel_size": 2, "target_pipeline_parallel_size": 2}),
    "expert": ("mixtral", {"target_expert_parallel_size": 2}),
    "interleaved": (
        "llama_of_four",
        {"target_pipeline_parallel_size": 2, "target_virtual_pipeline_parallel_size": 2},
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_rank_has_what_its_part_of_the_model_requires(name: str, host: PluginHost, tmp_path: Path) -> None:
    model, sizes = LAYOUTS[name]
    keys = {**MODELS["llama"], "num_layers": 4} if model == "llama_of_four" else MODELS[model]
    source, options = RandomCheckpoint(keys, host), ConvertOptions(**sizes)
    spec = host[CHECKPOINT_SAVERS].get("megatron")
    spec.convert.load()(tmp_path / "out", source, options, host)
    assert spec.require_strict_names.load()(tmp_path / "out", source, options, host).number > 10


def test_a_stage_in_the_place_of_another_is_named(host: PluginHost, tmp_path: Path) -> None:
    options = ConvertOptions(target_pipeline_parallel_size=2)
    spec = host[CHECKPOINT_SAVERS].get("megatron")
    spec.convert.load()(tmp_path, source_of("llama", host), options, host)
    first, second = sorted(tmp_path.rglob("*.pt"))
    first.write_bytes(second.read_bytes())
    with pytest.raises(CheckpointError, match=f"{first}: a strict load .* embedding.word_embeddings.weight is missing"):
        spec.require_strict_names.load()(tmp_path, source_of("llama", host), options, host)


@pytest.mark.parametrize("saver", ["torch", "torch_dist"])
def test_verify_of_a_conversion_refuses_them(saver: str, host: PluginHost, tmp_path: Path, monkeypatch: Any) -> None:
    """A saver that ignores the version: its own loader reads the result, Megatron would not. Megatron's names of the
    formats mean the same."""
    through("mt", source_of("hybrid", host), ConvertOptions(), tmp_path / "mt", host)
    spec = host[CHECKPOINT_SAVERS].get(saver)
    good = convert(tmp_path / "mt", tmp_path / "good", saver=saver, options=asked("0.14"), verify=True, host=host)
    assert good.verification.strict_names.reader == "Megatron-Core 0.14 with --transformer-impl transformer_engine"
    assert good.verification.loss.num_padding_rows == 27

    def ignoring(path: Any, source: Any, options: Any, host: Any) -> None:
        spec.convert.load()(path, source, replace(options, target_transformer_impl="local"), host)

    monkeypatch.setattr("mt_ckpt.convert.engine._writer", lambda *_: ignoring)
    with pytest.raises(CheckpointError, match="layer_norm_weight is missing"):
        convert(tmp_path / "mt", tmp_path / "bad", saver=saver, options=asked("0.14"), verify=True, host=host)
