"""Names of hyper-connections in Megatron's files: those of HyperConnectionModule, in GPT and in hybrids."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.ckpt.megatron.conftest import MODELS, RandomCheckpoint, assert_same_tensors

from mt_core.checkpoint_lookup import open_checkpoint
from mt_core.checkpoint_specs import CHECKPOINT_SAVERS, ConvertOptions
from mt_core.errors import ConfigError

LEAVES = ("mapping_proj.weight", "bias", "alpha_pre", "alpha_post", "alpha_res")
HEAD = {"decoder.hc_head_fn": (3, 96), "decoder.hc_head_base": (3,), "decoder.hc_head_scale": (1,)}


@pytest.mark.parametrize(
    ("model", "stems", "others"),
    [
        (
            "gpt_streams",
            ("decoder.layers.self_attention_hyper_connection.", "decoder.layers.mlp_hyper_connection."),
            {"decoder.layers.self_attention.linear_qkv.weight", "decoder.final_layernorm.weight"},
        ),
        (
            "hybrid_streams",
            ("decoder.layers.0.hyper_connection.", "decoder.layers.7.hyper_connection."),
            {
                "decoder.layers.0.inner_layer.mixer.in_proj.weight.x",
                "decoder.layers.0.inner_layer.mixer.in_proj.layer_norm_weight",
                "decoder.layers.3.inner_layer.self_attention.linear_proj.weight",
                "decoder.layers.1.inner_layer.mlp.linear_fc1.layer_norm_weight",
                "decoder.final_norm.weight",
            },
        ),
    ],
)
def test_what_is_written_has_megatrons_names(model, stems, others, tmp_path, host) -> None:
    source = RandomCheckpoint(MODELS[model], host)
    host[CHECKPOINT_SAVERS].get("megatron-dist").convert.load()(tmp_path, source, ConvertOptions(), host)
    (folder,) = tmp_path.glob("iter_*")
    listing = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    shapes = {key: tuple(entry.size) for key, entry in listing.items() if hasattr(entry, "size")}
    assert shapes.keys() >= {f"{stem}{leaf}" for stem in stems for leaf in LEAVES} | others
    assert {key: shapes[key] for key in HEAD} == HEAD
    assert_same_tensors(open_checkpoint(tmp_path, host), source)


def test_depths_of_prediction_have_megatrons_names(tmp_path, host) -> None:
    """With two projections in place of eh_proj, sharded by rows, and a sum of their own."""
    source = RandomCheckpoint(MODELS["gpt_streams_predicting"], host)
    for name in ("megatron-dist", "megatron"):
        host[CHECKPOINT_SAVERS].get(name).convert.load()(
            tmp_path / name, source, ConvertOptions(target_tensor_parallel_size=2), host
        )
        assert_same_tensors(open_checkpoint(tmp_path / name, host), source)
    (folder,) = (tmp_path / "megatron-dist").glob("iter_*")
    listing = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    shapes = {key: tuple(entry.size) for key, entry in listing.items() if hasattr(entry, "size")}
    stem = "mtp.layers.1."
    assert {key: shapes[f"{stem}{key}"] for key in ("hc_head_fn", "hc_head_base", "hc_head_scale")} == {
        key.removeprefix("decoder."): shape for key, shape in HEAD.items()
    }
    connections = {f"{stem}transformer_layer.self_attention_hyper_connection.{leaf}" for leaf in LEAVES}
    assert shapes.keys() >= {f"{stem}{leaf}" for leaf in ("enorm.weight", "hnorm.bias")} | connections
    (first,) = (tmp_path / "megatron").glob("iter_*/mp_rank_00/*.pt")
    held = torch.load(first, weights_only=False)["model"]
    assert {held[f"{stem}{name}.weight"].shape for name in ("e_proj", "h_proj")} == {(16, 32)}


def test_a_version_without_them_is_refused(tmp_path, host) -> None:
    options = ConvertOptions(target_megatron_version="0.17")
    with pytest.raises(ConfigError, match="enable_mhc_connections=True"):
        host[CHECKPOINT_SAVERS].get("megatron-dist").convert.load()(
            tmp_path, RandomCheckpoint(MODELS["gpt_streams"], host), options, host
        )
