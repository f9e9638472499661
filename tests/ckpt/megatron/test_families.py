"""Mamba, hybrid and latent-attention models as Megatron's ranks hold them, cut by hand and written by torch.save."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.ckpt.megatron.conftest import MODELS, RandomCheckpoint
from tests.ckpt.megatron.handmade import arguments, save_rank
from torch import Tensor

from mt_ckpt.megatron.reader import open_checkpoint
from mt_core import checkpoint_lookup
from mt_core.checkpoint_specs import CHECKPOINT_LOADERS, CHECKPOINT_SAVERS, ConvertOptions
from mt_core.config.loading import config_from_dict
from mt_core.errors import CheckpointError, ConfigError

HIDDEN, HEADS, VOCAB = 16, 4, 40
INNER, SHARED, MAMBA_HEADS = 24, 8, 6
"""Channels of a mixer with 6 heads of 4, and of its 2 groups with states of 4."""
SECTIONS = {"z": INNER, "x": INNER, "B": SHARED, "C": SHARED, "dt": MAMBA_HEADS}
CONVOLVED = ("x", "B", "C")
LATENT, ROTATED, PLAIN, VALUE, RANK = 12, 4, 8, 6, 10
"""Of latent attention: channels of the keys' and values' latent, of rotated and other key channels, of values; of the
queries' latent."""

HYBRID_ARGS: dict[str, Any] = {
    "is_hybrid_model": True,
    "hybrid_override_pattern": "M*",
    "num_layers": 2,
    "normalization": "RMSNorm",
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "position_embedding_type": "none",
    "add_bias_linear": False,
    "squared_relu": True,
    "ffn_hidden_size": 32,
    "untie_embeddings_and_output_weights": True,
    "mamba_head_dim": 4,
    "mamba_state_dim": 4,
    "mamba_num_groups": 2,
    "mamba_num_heads": MAMBA_HEADS,
}
LATENT_ARGS: dict[str, Any] = {
    "multi_latent_attention": True,
    "num_layers": 2,
    "encoder_num_layers": None,
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "qk_layernorm": True,
    "position_embedding_type": "rope",
    "untie_embeddings_and_output_weights": True,
    "ffn_hidden_size": 24,
    "q_lora_rank": RANK,
    "kv_lora_rank": LATENT,
    "qk_head_dim": PLAIN,
    "qk_pos_emb_head_dim": ROTATED,
    "v_head_dim": VALUE,
    "rope_type": "rope",
    "mtp_num_layers": 1,
    "mtp_loss_scaling_factor": 0.3,
}


def randoms(seed: int = 0) -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(shape, generator=generator)


def rows(tensor: Tensor, rank: int) -> Tensor:
    return tensor.chunk(2, 0)[rank].clone()


def columns(tensor: Tensor, rank: int) -> Tensor:
    return tensor.chunk(2, 1)[rank].clone()


def assert_is(reader, tensors: Mapping[str, Tensor]) -> None:
    names = {name.removeprefix("model.") for name in reader.shapes() if name.startswith("model.")}
    assert names == set(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(reader.read(f"model.{name}"), tensor), name


# -- a Mamba layer and an attention layer ------------------------------------------------------------


def hybrid() -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """All parameters by canonical names, and those of the mixer that are packed, by section."""
    random = randoms()
    packed = {
        "in_proj.weight": {name: random(size, HIDDEN) for name, size in SECTIONS.items()},
        "conv1d.weight": {name: random(SECTIONS[name], 1, 4) for name in CONVOLVED},
        "conv1d.bias": {name: random(SECTIONS[name]) for name in CONVOLVED},
    }
    mixer, attention = "decoder.layers.0.mixer.", "decoder.layers.1.self_attention."
    whole = {
        "embedding.word_embeddings.weight": random(VOCAB, HIDDEN),
        "decoder.layers.0.norm.weight": random(HIDDEN),
        **{mixer + name: random(MAMBA_HEADS) for name in ("A_log", "D", "dt_bias")},
        **{mixer + name: torch.cat(list(parts.values())) for name, parts in packed.items()},
        f"{mixer}norm.weight": random(INNER),
        f"{mixer}out_proj.weight": random(HIDDEN, INNER),
        "decoder.layers.1.input_layernorm.weight": random(HIDDEN),
        f"{attention}linear_qkv.weight": random(3 * HIDDEN, HIDDEN),
        f"{attention}linear_proj.weight": random(HIDDEN, HIDDEN),
        "decoder.final_layernorm.weight": random(HIDDEN),
        "output_layer.weight": random(VOCAB, HIDDEN),
    }
    return whole, packed


def hybrid_of_rank(whole: Mapping[str, Tensor], packed: Mapping[str, Mapping[str, Tensor]], rank: int) -> dict:
    """Of two tensor-parallel ranks, with Transformer Engine's names: each has half of every section."""
    mixer, attention = "decoder.layers.0.mixer.", "decoder.layers.1.self_attention."
    return {
        "embedding.word_embeddings.weight": rows(whole["embedding.word_embeddings.weight"], rank),
        **{mixer + name: rows(whole[mixer + name], rank) for name in ("dt_bias", "A_log", "D")},
        f"{mixer}in_proj.layer_norm_weight": whole["decoder.layers.0.norm.weight"],
        **{mixer + name: torch.cat([rows(part, rank) for part in parts.values()]) for name, parts in packed.items()},
        f"{mixer}norm.weight": rows(whole[f"{mixer}norm.weight"], rank),
        f"{mixer}out_proj.weight": columns(whole[f"{mixer}out_proj.weight"], rank),
        f"{attention}linear_qkv.layer_norm_weight": whole["decoder.layers.1.input_layernorm.weight"],
        f"{attention}linear_qkv.weight": rows(whole[f"{attention}linear_qkv.weight"], rank),
        f"{attention}linear_proj.weight": columns(whole[f"{attention}linear_proj.weight"], rank),
        "decoder.final_norm.weight": whole["decoder.final_layernorm.weight"],
        "output_layer.weight": rows(whole["output_layer.weight"], rank),
        f"{mixer}in_proj._extra_state": None,
    }


def save_hybrid(folder: Path, rename=str, **changes: Any) -> dict[str, Tensor]:
    whole, packed = hybrid()
    args = arguments(tensor_model_parallel_size=2, **{**HYBRID_ARGS, **changes})
    for rank in range(2):
        model = {rename(name): tensor for name, tensor in hybrid_of_rank(whole, packed, rank).items()}
        save_rank(folder, f"mp_rank_{rank:02d}", {"args": args, "model": model})
    return whole


def newer_convolution(name: str) -> str:
    return name.replace("conv1d.", "conv1d_")


def local_norm(name: str) -> str:
    return name.replace("layers.0.mixer.in_proj.layer_norm_", "layers.0.norm.")


@pytest.mark.parametrize("rename", [str, newer_convolution, local_norm])
def test_the_sections_of_a_mixer_are_cut_one_by_one(rename, tmp_path, host) -> None:
    whole = save_hybrid(tmp_path, rename)
    reader = open_checkpoint(tmp_path, host)
    assert_is(reader, whole)
    model = config_from_dict({"model": reader.metadata["config"]["model"]}, host).model
    assert (model.family, model.hybrid_layer_pattern, model.activation) == ("hybrid", "M*", "squared_relu")
    assert (model.mamba_heads, model.mamba_inner_size, model.mamba_state_dim) == (MAMBA_HEADS, INNER, 4)


def test_the_newer_name_of_the_pattern_and_its_stages(tmp_path, host) -> None:
    whole = save_hybrid(tmp_path, hybrid_override_pattern=None, hybrid_layer_pattern="M|*")
    reader = open_checkpoint(tmp_path, host)
    assert_is(reader, whole)
    assert reader.metadata["config"]["model"]["hybrid_layer_pattern"] == "M*"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"norm_epsilon": 1e-6}, "norm_epsilon=1e-06 is not read of a model with Mamba layers, whose inner norms have"),
        ({"hybrid_override_pattern": "MG"}, r"pattern 'MG' has 'G', which is not read; a layer can be M \(Mamba-2\)"),
        ({"hybrid_override_pattern": None, "hybrid_attention_ratio": 0.5}, "hybrid_attention_ratio=0.5 does not say"),
        ({"mtp_num_layers": 1}, "mtp_num_layers=1 of the pattern .* is not read"),
        ({"mtp_num_layers": 1, "hybrid_override_pattern": "M*/*/*"}, "mtp_num_layers=1 of the pattern .* is not read"),
        ({"hybrid_override_pattern": "M*/*/-"}, "mtp_num_layers=2 of the pattern .* is not read"),
        ({"position_embedding_type": "relative"}, "position_embedding_type='relative' is not read"),
    ],
)
def test_hybrids_that_are_not_read(changes, words, tmp_path, host) -> None:
    save_hybrid(tmp_path, **changes)
    with pytest.raises(ConfigError, match=words):
        open_checkpoint(tmp_path, host)


def save_distributed(folder: Path, tensors: Mapping[str, Tensor], args: Any) -> None:
    """A torch_dist checkpoint, by torch's own writer."""
    iteration = folder / "iter_0000005"
    dcp.save(dict(tensors), storage_writer=dcp.FileSystemWriter(iteration), no_dist=True)
    torch.save({"args": args, "iteration": 5, "checkpoint_version": 3.0}, iteration / "common.pt")
    (iteration / "metadata.json").write_text(
        json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1})
    )
    (folder / "latest_checkpointed_iteration.txt").write_text("5")


def distributed_hybrid() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Canonical parameters, and the tensors of torch_dist: a mixer's sections apart, the layers numbered."""
    whole, packed = hybrid()
    mixer = "decoder.layers.0.mixer."
    keys = {
        "decoder.layers.0.norm.weight": f"{mixer}in_proj.layer_norm_weight",
        "decoder.layers.1.input_layernorm.weight": "decoder.layers.1.self_attention.linear_qkv.layer_norm_weight",
        "decoder.final_layernorm.weight": "decoder.final_norm.weight",
    }
    stored = {keys.get(name, name): tensor for name, tensor in whole.items()}
    for name, parts in packed.items():
        del stored[mixer + name]
        stored |= {f"{mixer}{name}.{section}": part for section, part in parts.items()}
    return whole, stored


def test_a_distributed_checkpoint_has_the_sections_apart(tmp_path, host) -> None:
    whole, stored = distributed_hybrid()
    save_distributed(tmp_path, stored, arguments(**HYBRID_ARGS))
    assert_is(checkpoint_lookup.open_checkpoint(tmp_path, host), whole)


def test_a_section_that_is_missing(tmp_path, host) -> None:
    _, stored = distributed_hybrid()
    del stored["decoder.layers.0.mixer.conv1d.weight.B"]
    save_distributed(tmp_path, stored, arguments(**HYBRID_ARGS))
    with pytest.raises(CheckpointError, match=r"0.mixer.conv1d.weight: has the sections C, x, not B, C, x"):
        checkpoint_lookup.open_checkpoint(tmp_path, host)


def test_what_is_written_of_a_hybrid_has_these_keys(tmp_path, host) -> None:
    """And these values, read by torch: the same tensors as those made by hand."""
    _, stored = distributed_hybrid()
    save_distributed(tmp_path / "a", stored, arguments(**HYBRID_ARGS))
    source = checkpoint_lookup.open_checkpoint(tmp_path / "a", host)
    host[CHECKPOINT_SAVERS].get("megatron-dist").convert.load()(tmp_path / "b", source, ConvertOptions(), host)
    listing = dcp.FileSystemReader(tmp_path / "b/iter_0000005").read_metadata().state_dict_metadata
    written = {key: torch.empty(entry.size) for key, entry in listing.items() if hasattr(entry, "size")}
    assert written.keys() == stored.keys()
    dcp.load(written, checkpoint_id=str(tmp_path / "b/iter_0000005"), no_dist=True)
    for key, tensor in stored.items():
        assert torch.equal(written[key], tensor), key


@pytest.mark.parametrize(("version", "rename"), [("0.18", str), (None, newer_convolution)])
def test_ranks_of_a_written_hybrid_hold_these_slices(version, rename, tmp_path, host) -> None:
    whole, packed = hybrid()
    save_hybrid(tmp_path / "a")
    source = open_checkpoint(tmp_path / "a", host)
    options = ConvertOptions(
        target_tensor_parallel_size=2, make_vocab_size_divisible_by=4, target_megatron_version=version
    )
    host[CHECKPOINT_SAVERS].get("megatron").convert.load()(tmp_path / "b", source, options, host)
    for rank in range(2):
        held = hybrid_of_rank(whole, packed, rank)
        expected = {rename(name): tensor for name, tensor in held.items() if tensor is not None}
        found = written_model(tmp_path / "b" / f"iter_0000005/mp_rank_{rank:02d}")
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), name


def written_model(rank: Path) -> dict[str, Tensor]:
    from argparse import Namespace

    with torch.serialization.safe_globals([Namespace]):
        content = torch.load(rank / "model_optim_rng.pt", weights_only=True)
    return {name: tensor for name, tensor in content["model"].items() if tensor is not None}


# -- latent attention and multi-token prediction -----------------------------------------------------

ATTENTION: Mapping[str, tuple[tuple[int, ...], Callable[[Tensor, int], Tensor] | None]] = {
    "linear_q_down_proj.weight": ((RANK, HIDDEN), None),
    "linear_q_up_proj.weight": ((HEADS * (PLAIN + ROTATED), RANK), rows),
    "linear_kv_down_proj.weight": ((LATENT + ROTATED, HIDDEN), None),
    "linear_kv_up_proj.weight": ((HEADS * (PLAIN + VALUE), LATENT), rows),
    "linear_proj.weight": ((HIDDEN, HEADS * VALUE), columns),
    "q_layernorm.weight": ((RANK,), None),
    "kv_layernorm.weight": ((LATENT,), None),
}
"""Shapes of the parameters of an attention, and how two ranks of Transformer Engine's layers divide them."""
FUSED = {
    "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
    "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}


def latent_layer(random: Callable[..., Tensor], stem: str) -> dict[str, Tensor]:
    return {
        f"{stem}input_layernorm.weight": random(HIDDEN),
        **{f"{stem}self_attention.{name}": random(*shape) for name, (shape, _) in ATTENTION.items()},
        f"{stem}pre_mlp_layernorm.weight": random(HIDDEN),
        f"{stem}mlp.linear_fc1.weight": random(48, HIDDEN),
        f"{stem}mlp.linear_fc2.weight": random(HIDDEN, 24),
    }


def latent() -> dict[str, Tensor]:
    random = randoms(1)
    return {
        "embedding.word_embeddings.weight": random(VOCAB, HIDDEN),
        **latent_layer(random, "decoder.layers.0."),
        **latent_layer(random, "decoder.layers.1."),
        "decoder.final_layernorm.weight": random(HIDDEN),
        "mtp.layers.0.enorm.weight": random(HIDDEN),
        "mtp.layers.0.hnorm.weight": random(HIDDEN),
        "mtp.layers.0.eh_proj.weight": random(HIDDEN, 2 * HIDDEN),
        **latent_layer(random, "mtp.layers.0.mtp_model_layer."),
        "mtp.layers.0.final_layernorm.weight": random(HIDDEN),
        "output_layer.weight": random(VOCAB, HIDDEN),
    }


def latent_of_rank(name: str, tensor: Tensor, rank: int, *, cut_down: bool) -> Tensor:
    """Half a parameter. cut_down: the ways down to the latents are divided too, as by column-parallel layers."""
    leaf = name.rpartition("self_attention.")[2]
    if leaf in ATTENTION:
        cut = rows if cut_down and "_down_" in leaf else ATTENTION[leaf][1]
        return tensor if cut is None else cut(tensor, rank)
    if name.endswith(("word_embeddings.weight", "output_layer.weight", "eh_proj.weight")):
        return rows(tensor, rank)
    if name.endswith("mlp.linear_fc1.weight"):
        gate, up = tensor.chunk(2)
        return torch.cat([rows(gate, rank), rows(up, rank)])
    return columns(tensor, rank) if name.endswith("mlp.linear_fc2.weight") else tensor


def fused(name: str) -> str:
    for plain, inside in FUSED.items():
        name = name.replace(plain, inside)
    return name


def latent_stages(tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Two pipeline stages of a layer each; the last one embeds the tokens that are predicted further ahead."""
    first = {name: t for name, t in tensors.items() if name.startswith(("embedding.", "decoder.layers.0."))}
    last = {name: t for name, t in tensors.items() if name not in first or name.startswith("embedding.")}
    return [first, {name.replace("decoder.layers.1.", "decoder.layers.0."): t for name, t in last.items()}]


@pytest.mark.parametrize("cut_down", [False, True])
@pytest.mark.parametrize("rename", [fused, lambda name: name.replace("mtp_model_layer", "transformer_layer")])
def test_latent_attention_and_predicted_layers(rename, cut_down, tmp_path, host) -> None:
    tensors = latent()
    args = arguments(tensor_model_parallel_size=2, pipeline_model_parallel_size=2, **LATENT_ARGS)
    for stage, parameters in enumerate(latent_stages(tensors)):
        for rank in range(2):
            model = {rename(name): latent_of_rank(name, t, rank, cut_down=cut_down) for name, t in parameters.items()}
            save_rank(tmp_path, f"mp_rank_{rank:02d}_{stage:03d}", {"args": args, "model": model})
    reader = open_checkpoint(tmp_path, host)
    assert_is(reader, tensors)
    model = config_from_dict({"model": reader.metadata["config"]["model"]}, host).model
    assert (model.family, model.q_lora_rank, model.kv_lora_rank, model.v_head_dim) == ("deepseek", RANK, LATENT, VALUE)
    assert (model.mtp_num_layers, model.mtp_loss_scaling_factor, model.rope_scaling_type) == (1, 0.3, "none")


def test_predicted_layers_on_a_stage_of_their_own(tmp_path, host) -> None:
    """Which holds no layer of the decoder, and the token embeddings a second time."""
    tensors = latent()
    first, last = latent_stages(tensors)
    beyond = ("embedding.", "mtp.", "output_layer.")
    stages = [first, {n: t for n, t in last.items() if not n.startswith(beyond)}]
    stages.append({n: t for n, t in last.items() if n.startswith(beyond)})
    args = arguments(pipeline_model_parallel_size=3, pipeline_model_parallel_layout="Et|t|mL", **LATENT_ARGS)
    for stage, parameters in enumerate(stages):
        model = {fused(name): tensor for name, tensor in parameters.items()}
        save_rank(tmp_path, f"mp_rank_00_{stage:03d}", {"args": args, "model": model})
    assert_is(open_checkpoint(tmp_path, host), tensors)


@pytest.mark.parametrize(("impl", "rename", "cut_down"), [("transformer_engine", fused, False), ("local", str, True)])
def test_ranks_of_written_latent_attention_hold_these_slices(impl, rename, cut_down, tmp_path, host) -> None:
    tensors = latent()
    args = arguments(transformer_impl=impl, **LATENT_ARGS)
    save_rank(tmp_path / "a", "mp_rank_00", {"args": args, "model": {rename(n): t for n, t in tensors.items()}})
    source = open_checkpoint(tmp_path / "a", host)
    options = ConvertOptions(
        target_tensor_parallel_size=2, target_pipeline_parallel_size=2, make_vocab_size_divisible_by=4
    )
    host[CHECKPOINT_SAVERS].get("megatron").convert.load()(tmp_path / "b", source, options, host)
    for stage, parameters in enumerate(latent_stages(tensors)):
        for rank in range(2):
            found = written_model(tmp_path / "b" / f"iter_0000005/mp_rank_{rank:02d}_{stage:03d}")
            assert found.keys() == {rename(name) for name in parameters}
            for name, tensor in parameters.items():
                expected = latent_of_rank(name, tensor, rank, cut_down=cut_down)
                assert torch.equal(found[rename(name)], expected), name


def test_yarn_of_latent_attention(tmp_path, host) -> None:
    """Unless the run asked for plain positions; its other numbers are fixed in Megatron."""
    changes = {"rope_type": None, "rotary_scaling_factor": 40.0, "mscale": 0.7, "mscale_all_dim": 0.5}
    args = arguments(**{**LATENT_ARGS, **changes})
    save_rank(tmp_path, "mp_rank_00", {"args": args, "model": latent()})
    model = open_checkpoint(tmp_path, host).metadata["config"]["model"]
    assert (model["rope_scaling_type"], model["rope_scaling_factor"]) == ("yarn", 40.0)
    assert (model["rope_mscale"], model["rope_mscale_all_dim"]) == (0.7, 0.5)
    assert model["original_max_position_embeddings"] == 4096


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"qk_layernorm": False}, "qk_layernorm=False is not read of a model with multi-latent attention; it can be T"),
        ({"mtp_use_repeated_layer": True}, "mtp_use_repeated_layer=True is not read of a model with multi-latent"),
        ({"linear_attention_freq": 4}, "linear_attention_freq=4 stands for linear attention"),
    ],
)
def test_latent_attention_that_is_not_read(changes, words, tmp_path, host) -> None:
    args = arguments(**{**LATENT_ARGS, **changes})
    save_rank(tmp_path, "mp_rank_00", {"args": args, "model": latent()})
    with pytest.raises(ConfigError, match=words):
        open_checkpoint(tmp_path, host)


def test_experts_under_predicted_layers_in_a_distributed_checkpoint(tmp_path, host) -> None:
    """Layers of two kinds: numbers stand in the keys, experts are stacked within each. The layer of a depth keeps the
    name that it had before it was called mtp_model_layer in the modules."""
    source = RandomCheckpoint(MODELS["deepseek_v3"], host)
    host[CHECKPOINT_SAVERS].get("megatron-dist").convert.load()(tmp_path, source, ConvertOptions(), host)
    listing = dcp.FileSystemReader(tmp_path / "iter_0000007").read_metadata().state_dict_metadata
    shapes = {key: tuple(entry.size) for key, entry in listing.items() if hasattr(entry, "size")}
    layer = "mtp.layers.1.transformer_layer."
    assert shapes[f"{layer}mlp.experts.experts.linear_fc1.weight"] == (4, 48, 32)
    assert shapes[f"{layer}mlp.router.expert_bias"] == (4,)
    assert shapes[f"{layer}self_attention.linear_kv_up_proj.layer_norm_weight"] == (12,)
    assert shapes["decoder.layers.0.mlp.linear_fc1.layer_norm_weight"] == (32,)
    assert shapes["decoder.layers.1.pre_mlp_layernorm.weight"] == (32,)
    assert f"{layer}mlp.experts.experts.linear_fc2._extra_state/shard_3_4" in listing


# -- what has no place -------------------------------------------------------------------------------


def test_a_model_of_images_and_text_is_refused_with_the_reason(tmp_path, host) -> None:
    """Names as in checkpoints of Megatron's multimodal example."""
    random = randoms()
    tensors = {
        "vision_model.class_token": random(1, 1, HIDDEN),
        "vision_model.decoder.layers.0.self_attention.linear_qkv.weight": random(3 * HIDDEN, HIDDEN),
        "vision_projection.encoder.linear_fc1.weight": random(32, HIDDEN),
        "language_model.embedding.word_embeddings.weight": random(VOCAB, HIDDEN),
    }
    save_rank(tmp_path / "megatron", "mp_rank_00", {"args": arguments(), "model": tensors})
    save_distributed(tmp_path / "megatron-dist", tensors, arguments())
    for name in ("megatron", "megatron-dist"):
        with pytest.raises(
            ConfigError, match=r"has vision_model\..*, of a model with an image tower, .* in sizes that"
        ):
            checkpoint_lookup.open_with(host[CHECKPOINT_LOADERS].get(name), tmp_path / name, host)


@pytest.mark.parametrize("name", ["apply_layernorm_1p", "layernorm_zero_centered_gamma"])
def test_norms_stored_less_one_are_refused_with_the_reason(name, tmp_path, host) -> None:
    save_hybrid(tmp_path, **{name: True})
    with pytest.raises(ConfigError, match=f"{name}=True stands for norm weights stored less one .*would round them"):
        open_checkpoint(tmp_path, host)
