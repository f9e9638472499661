"""The torch_dist format, from folders that torch's own distributed checkpoint wrote with Megatron's keys."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.ckpt.megatron.conftest import GPT, RandomCheckpoint, assert_same_tensors
from tests.ckpt.megatron.handmade import LAYERS, arguments, gpt, part_of_rank, run_of
from tests.ckpt.megatron.test_optimizer import MOMENTS, assert_states, megatrons_buffer
from tests.ckpt.megatron.test_rank_files import assert_is, te_name
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from mt_ckpt.megatron_dist.reader import open_checkpoint
from mt_ckpt.megatron_dist.save import convert_checkpoint
from mt_core import checkpoint_lookup
from mt_core.checkpoint_specs import ConvertOptions
from mt_core.errors import CheckpointError


def stacked(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Layers on a new leading axis, norms under the linear layers behind them."""
    found: dict[str, Any] = {}
    for name, tensor in tensors.items():
        key = te_name(name)
        for layer in range(LAYERS):
            key = key.replace(f"decoder.layers.{layer}.", "decoder.layers.")
        if "decoder.layers." in key:
            found.setdefault(key, []).append(tensor)
        else:
            found[key] = tensor
    return {key: torch.stack(value) if isinstance(value, list) else value for key, value in found.items()}


def save_dist(
    folder: Path, tensors: Mapping[str, Any], *, common: Mapping[str, Any] | None = None, as_file: bool = False
) -> Path:
    """A `--save` folder with iteration 5."""
    iteration = folder / "iter_0000005"
    state = {"args": arguments(ckpt_format="torch_dist"), "iteration": 5, "checkpoint_version": 3.0, **(common or {})}
    values = dict(tensors) if as_file else {**tensors, "common_state/shard_0_1": [state]}
    planner = DefaultSavePlanner(flatten_state_dict=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(values, checkpoint_id=iteration, planner=planner, no_dist=True)
    if as_file:
        torch.save(state, iteration / "common.pt")
    (iteration / "metadata.json").write_text(
        json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1})
    )
    (folder / "latest_checkpointed_iteration.txt").write_text("5")
    return iteration


@pytest.mark.parametrize("as_file", [False, True])
@pytest.mark.parametrize("kind", ["stacked", "by layer"])
def test_keys_of_both_kinds_with_both_common_states(kind, as_file, tmp_path, host) -> None:
    tensors = gpt()
    stored = stacked(tensors) if kind == "stacked" else {te_name(name): tensor for name, tensor in tensors.items()}
    save_dist(tmp_path, stored, as_file=as_file)
    reader = checkpoint_lookup.open_checkpoint(tmp_path, host)
    assert_is(reader, tensors)
    assert reader.metadata["iteration"] == 5


def test_the_optimizer_of_mixed_precision_without_the_distributed_one(tmp_path, host) -> None:
    weights, moments = gpt(), {state: gpt(seed=seed) for seed, state in enumerate(MOMENTS, 1)}
    stored = {key: value.bfloat16() for key, value in stacked(weights).items()}
    for name, tensors in {"fp32_param": weights, **moments}.items():
        stored |= {f"optimizer.state.{name}.{key}": value for key, value in stacked(tensors).items()}
    common = {"optimizer": {"optimizer": {"state": {"common_step": torch.tensor(4.0)}, "param_groups": [{}]}}}
    save_dist(tmp_path, stored, common=common)
    assert_states(open_checkpoint(tmp_path, host), {"main": weights, **moments}, 4.0)


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("impl", ["local", "transformer_engine"])
def test_flat_buckets_of_ranks(impl, tp, pp, tmp_path, host) -> None:
    """dp_reshardable: what each tensor and pipeline rank had, parameters in the order of Megatron's modules."""
    states = {"param": gpt(), "exp_avg": gpt(seed=1), "exp_avg_sq": gpt(seed=2)}
    stored: dict[str, Any] = stacked(states["param"])
    for stage in range(pp):
        layers = list(range(stage * LAYERS // pp, (stage + 1) * LAYERS // pp))
        for rank in range(tp):
            group = stage * tp + rank
            stem = f"optimizer.distributed.dp_group_idx_{group}.gbuf_idx_0.dtype_(torch.float32, torch.float32)."
            for state, tensors in states.items():
                run = run_of(tensors, layers, first=stage == 0, last=stage == pp - 1)
                own = {name: part_of_rank(name, tensor, rank, tp) for name, tensor in run.items()}
                own = {name: own[name] for name in (sorted(own, key=fused_order) if impl != "local" else own)}
                for number, bucket in enumerate(buckets(own, pp)):
                    stored[f"{stem}bucket_idx_{number}.{state}"] = bucket
            stored[f"optimizer.distributed.dp_group_idx_{group}.optimizer/shard_0_1"] = [
                {"param_groups": [{"step": 4.0}]}
            ]
    args = arguments(
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, data_parallel_size=2, transformer_impl=impl
    )
    save_dist(tmp_path, stored, common={"args": args})
    assert_states(open_checkpoint(tmp_path, host), {state: states[state] for state in MOMENTS}, 4.0)


def fused_order(name: str) -> tuple[int, int, bool]:
    """Transformer Engine's layers own the norm before: linear_proj, then norm and linear_qkv, norm and fc1, fc2."""
    if not name.startswith("decoder.layers."):
        kinds = ["embedding.word", "embedding.position", "decoder.final", "output_layer"]
        kind = next(i for i, prefix in enumerate(kinds) if name.startswith(prefix))
        return (3 * (kind > 1), kind, name.endswith("bias"))
    parts = ["linear_proj", "input_layernorm", "linear_qkv", "pre_mlp_layernorm", "linear_fc1", "linear_fc2"]
    number = int(name.split(".")[2])
    place = next(i for i, part in enumerate(parts) if part in name)
    return (2, 10 * number + place, name.endswith("bias"))


def buckets(own: Mapping[str, torch.Tensor], pp: int) -> list[torch.Tensor]:
    """The token embeddings that two stages share have a separate bucket, made last on the first stage and first on the
    last, as buffers go backwards."""
    shared = [name for name in own if pp > 1 and name.endswith(("word_embeddings.weight", "output_layer.weight"))]
    rest = {name: tensor for name, tensor in own.items() if name not in shared}
    whole = megatrons_buffer(rest, bucket_size=None, data_parallel=2)
    if not shared:
        return [whole]
    (name,) = shared
    return [own[name].flatten(), whole] if name == "output_layer.weight" else [whole, own[name].flatten()]


def test_flat_buckets_in_another_order_are_noticed(tmp_path, host) -> None:
    tensors = gpt()
    stem = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.float32, torch.float32).bucket_idx_0."
    buffer = megatrons_buffer(dict(reversed(tensors.items())), bucket_size=None, data_parallel=1)
    stored = stacked(tensors) | {f"{stem}{state}": buffer for state in ("param", "exp_avg", "exp_avg_sq")}
    save_dist(tmp_path, stored, common={"args": arguments(transformer_impl="local")})
    with pytest.raises(
        CheckpointError, match="the optimizer's buckets of rank 0 have|is not where the arguments of the run"
    ):
        open_checkpoint(tmp_path, host)


def test_flat_buckets_that_are_ambiguous_are_named(tmp_path, host) -> None:
    stem = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.float32, torch.float32).bucket_idx_0."
    args = arguments(pipeline_model_parallel_size=2, decoder_first_pipeline_num_layers=1)
    save_dist(tmp_path, stacked(gpt()) | {f"{stem}param": torch.ones(9)}, common={"args": args})
    reader = open_checkpoint(tmp_path, host)
    assert_is(reader, gpt())
    assert "pipeline stages that are not alike" in reader.metadata["megatron"]["optimizer_left_out"]


# -- what is missing, damaged or malicious -----------------------------------------------------------


def test_without_the_mark_of_completeness(tmp_path, host) -> None:
    (save_dist(tmp_path, stacked(gpt())) / "metadata.json").unlink()
    with pytest.raises(CheckpointError, match="incomplete: it has no metadata.json, which Megatron writes last"):
        open_checkpoint(tmp_path, host)


def test_another_backend(tmp_path, host) -> None:
    (save_dist(tmp_path, stacked(gpt())) / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    with pytest.raises(CheckpointError, match="sharded_backend is not torch_dist"):
        open_checkpoint(tmp_path, host)


def test_a_missing_and_a_truncated_data_file(tmp_path, host) -> None:
    folder = save_dist(tmp_path, stacked(gpt()))
    (file,) = folder.glob("*.distcp")
    data = file.read_bytes()
    file.write_bytes(data[:-100])
    with pytest.raises(CheckpointError, match=f"{file}: truncated: {len(data) - 100} bytes instead of"):
        open_checkpoint(tmp_path, host)
    file.unlink()
    with pytest.raises(CheckpointError, match=f"{file}: missing or unreadable"):
        open_checkpoint(tmp_path, host)


def test_a_flipped_byte_in_a_tensor_is_named(tmp_path, host) -> None:
    tensors = gpt()
    folder = save_dist(tmp_path, stacked(tensors))
    (file,) = folder.glob("*.distcp")
    data = bytearray(file.read_bytes())
    data[data.index(tensors["decoder.final_layernorm.weight"].numpy().tobytes()) + 5] ^= 1
    file.write_bytes(data)
    reader = open_checkpoint(tmp_path, host)
    with pytest.raises(CheckpointError, match=f"{file}: damaged: the checksum of the 64 bytes"):
        reader.read("model.decoder.final_layernorm.weight")


def test_a_layer_that_is_missing(tmp_path, host) -> None:
    stored = stacked(gpt())
    stored["decoder.layers.mlp.linear_fc2.weight"] = stored["decoder.layers.mlp.linear_fc2.weight"][:3].clone()
    save_dist(tmp_path, stored)
    with pytest.raises(CheckpointError, match="decoder.layers.3.mlp.linear_fc2.weight is missing"):
        open_checkpoint(tmp_path, host)


@pytest.mark.parametrize("where", [".metadata", "common.pt"])
def test_a_malicious_pickle_is_refused_and_named(where, tmp_path, host) -> None:
    class Attack:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'executed'}",)

    import pickle

    folder = save_dist(tmp_path, stacked(gpt()), as_file=True)
    if where == ".metadata":
        (folder / where).write_bytes(pickle.dumps(Attack()))
    else:
        torch.save({"args": Attack()}, folder / where)
    with pytest.raises(CheckpointError, match=f"{folder / where}: refused, nothing in it was executed: .*posix.system"):
        checkpoint_lookup.open_checkpoint(tmp_path, host)
    assert not (tmp_path / "executed").exists()


def test_an_index_that_leads_out_of_the_folder(tmp_path, host) -> None:
    folder = save_dist(tmp_path, stacked(gpt()))
    data = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(data.replace(b"__0_0.distcp", b"../../../etc"))
    with pytest.raises(CheckpointError, match="refers to '../../../etc', which is not a file beside it"):
        open_checkpoint(tmp_path, host)


# -- writing -----------------------------------------------------------------------------------------


def test_a_conversion_that_was_killed_is_gone_on_with(tmp_path, host) -> None:
    """Data files that were finished are not read from the source again."""
    source = RandomCheckpoint(GPT, host)
    source.identity = "one"
    options = ConvertOptions(max_shard_size=20_000)
    reads: list[str] = []
    original = source.read

    def failing(name: str) -> torch.Tensor:
        reads.append(name)
        if len(reads) == 30:
            raise KeyboardInterrupt
        return original(name)

    source.read = failing
    with pytest.raises(KeyboardInterrupt):
        convert_checkpoint(tmp_path / "out", source, options, host)
    assert not (tmp_path / "out").exists()
    convert_checkpoint(tmp_path / "out", source, options, host)
    assert len(reads) < 30 + len(source.tensors)
    source.read = original
    assert_same_tensors(open_checkpoint(tmp_path / "out", host), source)
    assert not list(tmp_path.glob(".mt-convert*"))
