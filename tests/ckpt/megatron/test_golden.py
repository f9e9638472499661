"""What Megatron itself wrote is read bit for bit, in every format and layout, and computes what Megatron computed."""

from __future__ import annotations

import json
import re
import shutil
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.ckpt.megatron.conftest import assert_same_tensors
from tests.covering import covering

from mt_ckpt.model import build_model
from mt_ckpt.pickles.torch_file import open_torch_file
from mt_core.checkpoint_lookup import open_checkpoint
from mt_core.checkpoint_specs import CHECKPOINT_LOADERS, CHECKPOINT_SAVERS, CheckpointReader, ConvertOptions
from mt_core.config.loading import config_from_dict
from mt_core.nn.layout import parameter_layouts
from mt_core.nn.loss import cross_entropy
from mt_core.parallel.context import ParallelContext
from mt_core.plugins import PluginHost
from mt_core.train.checkpoint.state import load_parameters

FOLDERS = {
    "gpt": ["legacy_tp1_pp1", "legacy_tp2_pp1", "legacy_tp2_pp2", "dist_tp1_pp1", "dist_tp2_pp1", "dist_tp1_pp2"],
    "bert": ["legacy_tp1_pp1", "dist_tp1_pp1"],
    "moe": ["legacy_tp1_pp1", "legacy_tp1_pp1_ep2", "dist_tp1_pp1", "dist_tp1_pp1_ep2"],
    "gpt_distopt": ["legacy_dp2", "dist_dp2_fully_reshardable", "dist_dp2_dp_reshardable"],
}
PADDED = {"gpt": 256, "bert": 128, "moe": 128, "gpt_distopt": 128}
TRUE = {"gpt": 250, "bert": 100, "moe": 100, "gpt_distopt": 100}
LAYERS = {"gpt": 4, "bert": 2, "moe": 4, "gpt_distopt": 1}
CASES = [(model, folder) for model, folders in FOLDERS.items() for folder in folders]


def opened(path: Path, host, vocab_size: int | None = None):
    """By the loader that takes the path for its own."""
    (spec,) = [spec for spec in host[CHECKPOINT_LOADERS] if spec.detect.load()(path)]
    return spec.open.load()(path, host, vocab_size)


def weights_of(reader) -> dict[str, torch.Tensor]:
    return {name.removeprefix("model."): reader.read(name) for name in reader.shapes() if name.startswith("model.")}


# Of gpt_distopt no sums were printed.
@pytest.mark.parametrize(("model", "folder"), [case for case in CASES if case[0] != "gpt_distopt"])
def test_tensors_have_the_sums_that_megatron_printed(model, folder, golden, host) -> None:
    sums = json.loads((golden / model / "expected.json").read_text())["checkpoint_param_sums"]
    tensors = weights_of(opened(golden / model / folder, host, PADDED[model]))
    seen = set()
    for stored, (total, magnitude) in sums.items():
        match = re.fullmatch(r"(.*\.experts)\.local_experts\.(\d+)(\..*)", stored)
        name, tensor = (
            (match[1] + match[3], tensors[match[1] + match[3]][int(match[2])]) if match else (stored, tensors[stored])
        )
        assert tensor.double().sum().item() == pytest.approx(total, rel=1e-12, abs=1e-12), stored
        assert tensor.double().abs().sum().item() == pytest.approx(magnitude, rel=1e-12), stored
        seen.add(name)
    assert seen == set(tensors)


@pytest.mark.parametrize("model", FOLDERS)
def test_every_format_and_layout_gives_the_same_tensors(model, golden, host) -> None:
    readers = [opened(golden / model / folder, host) for folder in FOLDERS[model]]
    first = weights_of(readers[0])
    assert first["embedding.word_embeddings.weight"].shape[0] == TRUE[model]
    for reader in readers[1:]:
        assert reader.metadata["config"]["model"] == readers[0].metadata["config"]["model"]
        tensors = weights_of(reader)
        assert tensors.keys() == first.keys()
        for name, tensor in tensors.items():
            assert torch.equal(tensor, first[name]), name


def test_the_optimizer_in_three_formats_is_one(golden, host) -> None:
    """Flat buffers of the torch format, flat buckets and model-shaped tensors of torch_dist."""
    legacy, full, flat = (opened(golden / "gpt_distopt" / folder, host) for folder in FOLDERS["gpt_distopt"])
    assert_same_tensors(full, legacy)
    assert_same_tensors(flat, legacy)
    assert sum(name.startswith("optimizer.") for name in legacy.shapes()) == 3 * len(weights_of(legacy))
    assert legacy.read("optimizer.step.decoder.final_layernorm.bias") == 3
    assert legacy.read("optimizer.exp_avg_sq.embedding.word_embeddings.weight").any()


def test_tensors_are_those_that_torch_reads(golden, host) -> None:
    """Against torch's own reader of distributed checkpoints, stacked as they are."""
    folder = golden / "gpt/dist_tp2_pp1/iter_0000003"
    state = {"decoder.layers.self_attention.linear_qkv.weight": torch.empty(4, 192, 64)}
    dcp.load(state, checkpoint_id=str(folder), no_dist=True)
    reader = opened(golden / "gpt/dist_tp2_pp1", host)
    for layer, expected in enumerate(state["decoder.layers.self_attention.linear_qkv.weight"]):
        assert torch.equal(reader.read(f"model.decoder.layers.{layer}.self_attention.linear_qkv.weight"), expected)


@pytest.mark.parametrize(("model", "folder"), [case for case in CASES if case[0] in ("gpt", "moe")])
def test_logits_and_losses_are_megatrons(model, folder, golden, host) -> None:
    """The losses are over the padded vocabulary, as Megatron's are."""
    archive = np.load(golden / model / "logits.npz")
    reader = opened(golden / model / folder, host, PADDED[model])
    built = build_model(config_from_dict(reader.metadata["config"], host), host)
    load_parameters(built.named_parameters(), reader, parameter_layouts(built), "model.", ParallelContext())
    ids = torch.from_numpy(archive["tokens"].astype(np.int64))
    with torch.no_grad():
        logits = built.eval()(ids[:, :-1])
    losses = cross_entropy(logits, {"labels": ids[:, 1:]})
    assert np.abs(logits[..., : TRUE[model]].numpy() - archive["logits"]).max() < 1e-4
    assert np.abs(losses.numpy() - archive["token_losses"]).max() < 1e-4
    assert losses.mean().item() == pytest.approx(float(archive["loss"]), abs=1e-5)


@pytest.mark.parametrize("folder", FOLDERS["bert"])
def test_the_heads_of_bert_are_megatrons(folder, golden, host) -> None:
    archive = np.load(golden / "bert/logits.npz")
    reader = opened(golden / "bert" / folder, host)
    built = build_model(config_from_dict(reader.metadata["config"], host), host)
    load_parameters(built.named_parameters(), reader, parameter_layouts(built), "model.", ParallelContext())
    ids = torch.from_numpy(archive["tokens"].astype(np.int64))[:, :-1]
    types, padding = (torch.from_numpy(archive[key].astype(np.int64)) for key in ("tokentype_ids", "attention_mask"))
    with torch.no_grad():
        output = built.eval()(ids, types, padding)
    seen = padding.bool().numpy()
    assert np.abs(output.logits.numpy() - archive["logits"])[seen].max() < 1e-4
    assert np.abs(output.binary_logits.numpy() - archive["binary_logits"]).max() < 1e-4


def test_metadata_says_where_the_run_stood(golden, host) -> None:
    for folder in FOLDERS["gpt_distopt"]:
        metadata = open_checkpoint(golden / "gpt_distopt" / folder, host).metadata
        json.dumps(metadata)
        assert metadata["iteration"] == 3
        assert metadata["consumed_samples"] == 12
        schedule = metadata["megatron"]["opt_param_scheduler"]
        assert (schedule["num_steps"], schedule["lr_decay_style"], schedule["max_lr"]) == (12, "cosine", 1e-3)
        config = config_from_dict(metadata["config"], host)
        assert config.optimizer.adam_beta2 == 0.95
        assert config.lr_schedule.lr_warmup_iters == 2
        assert config.train.global_batch_size == 4
        assert config.tokenizer.vocab_size == 100


# -- and what is written is what Megatron wrote -----------------------------------------------------


def converted(path: Path, saver: str, reader, host, **options) -> Path:
    shutil.rmtree(path, ignore_errors=True)
    host[CHECKPOINT_SAVERS].get(saver).convert.load()(path, reader, ConvertOptions(**options), host)
    return path


def dcp_listing(folder: Path) -> dict[str, object]:
    found = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    return {
        key: (tuple(entry.size), entry.properties.dtype) if hasattr(entry, "size") else "bytes"
        for key, entry in found.items()
    }


@pytest.mark.parametrize(
    ("model", "folder"),
    [
        ("gpt", "dist_tp2_pp1"),
        ("moe", "dist_tp1_pp1"),
        ("bert", "dist_tp1_pp1"),
        ("gpt_distopt", "dist_dp2_fully_reshardable"),
    ],
)
def test_a_distributed_checkpoint_has_megatrons_keys_shapes_and_values(model, folder, golden, host, tmp_path) -> None:
    """Listed and read by torch. Megatron's random streams are the only thing that is not written."""
    theirs = golden / model / folder / "iter_0000003"
    reader = opened(golden / model / folder, host, PADDED[model])
    ours = converted(tmp_path / "a", "megatron-dist", reader, host) / "iter_0000003"
    listing = {key: value for key, value in dcp_listing(theirs).items() if not key.startswith("rng_state/")}
    assert dcp_listing(ours) == listing
    states = []
    for place in (theirs, ours):
        state = {key: torch.empty(value[0], dtype=value[1]) for key, value in listing.items() if value != "bytes"}
        dcp.load(state, checkpoint_id=str(place), no_dist=True)
        states.append(state)
    for key, tensor in states[0].items():
        assert torch.equal(states[1][key], tensor), key


@pytest.mark.parametrize(
    ("model", "folder", "layout"),
    [
        ("gpt", "legacy_tp2_pp2", {"target_tensor_parallel_size": 2, "target_pipeline_parallel_size": 2}),
        ("moe", "legacy_tp1_pp1_ep2", {"target_expert_parallel_size": 2}),
        ("bert", "legacy_tp1_pp1", {}),
    ],
)
def test_rank_files_have_megatrons_entries(model, folder, layout, golden, host, tmp_path) -> None:
    """Read by torch, with what it lets through: names, order, shapes, values, and the arguments that make the model."""
    from argparse import Namespace

    reader = opened(golden / model / folder, host, PADDED[model])
    ours = converted(tmp_path / "a", "megatron", reader, host, **layout)
    keys = json.loads((golden / model / folder / "keys.json").read_text())
    files = sorted((ours / "iter_0000003").iterdir())
    assert [file.name for file in files] == sorted(keys)
    assert (ours / "latest_checkpointed_iteration.txt").read_text() == "3"
    for file in files:
        with torch.serialization.safe_globals([Namespace]):
            content = torch.load(file / "model_optim_rng.pt", weights_only=True)
        found = {
            name: [list(t.shape), str(t.dtype)] if t is not None else "NoneType" for name, t in content["model"].items()
        }
        assert found == keys[file.name]
        weights = [name for name, value in found.items() if value != "NoneType"]
        assert weights == [name for name, value in keys[file.name].items() if value != "NoneType"]
        assert content["checkpoint_version"] == 3.0
        assert content["iteration"] == 3
        args = vars(content["args"])
        theirs = reader.metadata["megatron"]["args"]
        for name in (
            "num_layers",
            "hidden_size",
            "num_attention_heads",
            "padded_vocab_size",
            "swiglu",
            "normalization",
        ):
            assert args[name] == theirs[name], name
        assert args["params_dtype"] is torch.float32


def test_flat_buffers_are_megatrons(golden, host, tmp_path) -> None:
    """`distrib_optim.pt`, read by torch: keys, sizes, and every element, those between parameters included; and what
    stands in the model's file of the optimizer."""
    from argparse import Namespace

    theirs = golden / "gpt_distopt/legacy_dp2/iter_0000003/mp_rank_00"
    reader = opened(golden / "gpt_distopt/legacy_dp2", host, PADDED["gpt_distopt"])
    ours = converted(tmp_path / "a", "megatron", reader, host) / "iter_0000003/mp_rank_00"
    found, expected = (torch.load(place / "distrib_optim.pt", weights_only=True) for place in (ours, theirs))
    assert found.keys() == expected.keys()
    assert found[0].keys() == expected[0].keys()
    buffers, wanted = (value[0][torch.float32, torch.float32] for value in (found, expected))
    assert buffers.pop("numel_unpadded") == wanted.pop("numel_unpadded") == 43840
    assert buffers.keys() == wanted.keys()
    for name, buffer in wanted.items():
        assert torch.equal(buffers[name], buffer), name
    with torch.serialization.safe_globals([Namespace]):
        content = torch.load(ours / "model_optim_rng.pt", weights_only=True)
    groups = content["optimizer"]["optimizer"]["param_groups"]
    assert [(group["wd_mult"], group["step"]) for group in groups] == [(1.0, 3.0), (0.0, 3.0)]
    written = open_torch_file(theirs / "model_optim_rng.pt").value["optimizer"]["optimizer"]["param_groups"]
    assert [group["lr"] for group in groups] == pytest.approx([group["lr"] for group in written])
    assert content["args"].use_distributed_optimizer is True


GRIDS = [(1, 1, 1, 1), (2, 1, 1, 1), (2, 2, 1, 1), (4, 1, 1, 1), (2, 2, 2, 1)]
OF_EXPERTS = [(1, 1, 1, 2), (1, 2, 1, 4), (2, 2, 2, 2)]


@cache
def first_of(model: str, golden: Path, host: PluginHost) -> CheckpointReader:
    return opened(golden / model / FOLDERS[model][0], host)


def has_stages(model: str, layout: tuple[int, int, int, int]) -> bool:
    _, pp, vpp, _ = layout
    return LAYERS[model] % (pp * vpp) == 0


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        *(case for case in covering(list(FOLDERS), GRIDS, 2) if has_stages(*case.values)),
        *(("moe", layout) for layout in OF_EXPERTS),
    ],
)
def test_what_megatron_wrote_survives_every_layout(model, layout, golden, host, tmp_path) -> None:
    """Model and optimizer, read, written for a layout, and read again."""
    reader, (tp, pp, vpp, ep) = first_of(model, golden, host), layout
    options = {
        "target_tensor_parallel_size": tp,
        "target_pipeline_parallel_size": pp,
        "target_virtual_pipeline_parallel_size": vpp,
        "target_expert_parallel_size": ep,
    }
    for saver in ("megatron", "megatron-dist"):
        assert_same_tensors(opened(converted(tmp_path / saver, saver, reader, host, **options), host), reader)
