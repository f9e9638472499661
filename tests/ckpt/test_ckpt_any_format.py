"""`mt ckpt inspect` and `mt ckpt verify` of checkpoints that are not mt's own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.ckpt.convert_cases import GPT2, LLAMA, MODELS
from tests.ckpt.test_ckpt_commands import refusal, run
from tests.ckpt.test_convert_gguf import to_gguf
from tests.ckpt.test_convert_grid import write_meta

from mt_ckpt.convert import convert
from mt_ckpt.files.checksum_file import CHECKSUMS
from mt_ckpt.model import expected_parameters, model_config
from mt_ckpt.native.read import open_checkpoint
from mt_core.checkpoint_specs import ConvertOptions

CUT = ConvertOptions(target_tensor_parallel_size=2, target_pipeline_parallel_size=2)
LAYOUTS = {
    "hf": ConvertOptions(max_shard_size=30_000),
    "megatron": CUT,
    "megatron-dist": ConvertOptions(target_tensor_parallel_size=2),
    "megatron-legacy": CUT,
    "transformers-megatron": CUT,
}
READABLE = [*LAYOUTS, "meta", "gguf"]
NUM_TENSORS = {"llama": 2 * 6 + 3, "gpt": 2 * 12 + 4}


@pytest.fixture
def written(make_model, host, tmp_path: Path) -> Callable[[str], Path]:
    """A model of two layers in the format that is asked for, as other programs write it: without mt's checksums."""

    def write(name: str) -> Path:
        keys = {**(GPT2 if name == "transformers-megatron" else LLAMA), "num_layers": 2}
        source, path = make_model(norm_epsilon=1e-5, **keys), tmp_path / "given"
        if name == "meta":
            write_meta(path, {key: open_checkpoint(source).read(key) for key in open_checkpoint(source).shapes()})
        elif name == "gguf":
            convert(source, tmp_path / "plain", saver="hf", host=host)
            to_gguf(tmp_path / "plain", path / "m.gguf", "llama", {**keys, "norm_epsilon": 1e-5})
        else:
            convert(source, path, saver=name, options=LAYOUTS[name], host=host)
            (path / CHECKSUMS).unlink()
        return path

    return write


def test_a_run_that_another_saver_wrote(written, host, tmp_path: Path) -> None:
    """`latest` names a checkpoint in the saver's own format, which its loader recognizes."""
    checkpoints = tmp_path / "run" / "checkpoints"
    checkpoints.mkdir(parents=True)
    written("hf").rename(checkpoints / "iter_0000003")
    (checkpoints / "latest").write_text("iter_0000003\n")
    for path in (tmp_path / "run", checkpoints):
        inspected = run("inspect", path)
        assert inspected.exit_code == 0, inspected.exception
        assert str(checkpoints / "iter_0000003") in inspected.output
        verified = run("verify", path)
        assert verified.exit_code == 0, verified.exception
    convert(tmp_path / "run", tmp_path / "converted", saver="mt", host=host)
    assert len(open_checkpoint(tmp_path / "converted").shapes()) == NUM_TENSORS["llama"]
    (checkpoints / "latest").write_text("iter_0000009\n")
    assert "names 'iter_0000009', which is not a checkpoint in" in refusal("inspect", tmp_path / "run")


@pytest.mark.parametrize("name", READABLE)
def test_inspect(written, host, name: str) -> None:
    path = written(name)
    result = run("inspect", path)
    assert result.exit_code == 0, result.exception
    facts = dict(line.strip().split(maxsplit=1) for line in result.output.splitlines() if line.strip())
    assert facts["checkpoint"] == str(path)
    assert facts["format"].startswith(f"{name}: ")
    files = [file for file in path.rglob("*") if file.is_file()]
    assert facts["size"].endswith(f" in {len(files)} file{'s' * (len(files) != 1)}")
    config = model_config(open_checkpoint(path.parent / "source"), host)
    elements = sum(torch.Size(layout.shape).numel() for layout in expected_parameters(config, host).values())
    number, count, dtype, *_ = facts["model"].split()
    assert (number, count, dtype) == (str(NUM_TENSORS[config.model.family]), f"{elements:,}", "F32")
    layouts = {"megatron": "tensor 2, pipeline 2", "megatron-legacy": "tensor 2, pipeline 2"}
    assert facts.get("layout", "") == {**layouts, "megatron-dist": "tensor 2"}.get(name, "")
    lines = [line.split() for line in run("inspect", path, "--tensors").output.splitlines()]
    words = ["model.embedding.word_embeddings.weight", "F32", "101", "x", "32", "12.6", "KiB"]
    assert words in lines


@pytest.mark.parametrize("name", READABLE)
def test_verify_a_whole_one(written, name: str) -> None:
    path = written(name)
    result = run("verify", path)
    assert result.exit_code == 0, result.exception
    assert f"{path}: whole as far as {name} shows" in result.output
    assert ("their checksums are right" in result.output) == (name not in ("hf", "gguf", "megatron-dist"))


def test_experts_over_ranks_are_shown(make_model, host, tmp_path: Path) -> None:
    source = make_model(**MODELS["mixtral"] | {"moe": {"num_experts": 4}})
    cut = ConvertOptions(target_tensor_parallel_size=2, target_expert_parallel_size=4)
    convert(source, tmp_path / "cut", saver="megatron", options=cut, host=host)
    lines = run("inspect", tmp_path / "cut").output.splitlines()
    assert ["layout", "tensor", "2,", "expert", "4,", "expert", "tensor", "2"] in [line.split() for line in lines]


def test_iterations_of_a_run_of_megatrons(written) -> None:
    path = written("megatron")
    (path / "iter_0000020").mkdir()
    (path / "iter_0000300").mkdir()
    assert ["iterations", "3,", "20,", "300"] in [line.split() for line in run("inspect", path).output.splitlines()]


def test_verify_names_the_member_whose_checksum_is_wrong(written) -> None:
    path = written("megatron")
    file = next(path.rglob("mp_rank_01_001/model_optim_rng.pt"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    message = refusal("verify", path)
    assert str(file) in message
    assert "mp_rank_00" not in message


def test_verify_of_missing_and_unknown_tensors(written) -> None:
    path = written("hf")
    index = path / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"]
    file = path / places.pop("model.layers.1.mlp.down_proj.weight")
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.down_proj.weight"]
    save_file(tensors, file, {"format": "pt"})
    assert "model.layers.1.mlp.down_proj.weight" in refusal("verify", path)
    index.write_text(json.dumps({"weight_map": places}))
    assert "model.layers.1.mlp.down_proj.weight is missing in the checkpoint" in refusal("verify", path)


def test_verify_of_a_shard_that_is_gone(written) -> None:
    path = written("hf")
    shard = sorted(path.glob("*.safetensors"))[1]
    shard.unlink()
    assert f"lists files that are not there: {shard.name}" in refusal("verify", path)


def test_verify_of_another_configuration(written) -> None:
    path = written("hf")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "intermediate_size": 64}))
    assert "mlp.linear_fc2.weight has shape [32, 48] in the checkpoint, [32, 64] in the model" in refusal(
        "verify", path
    )


def test_a_format_that_is_not_there(written) -> None:
    result = run("inspect", written("hf"), "--loader", "nemo")
    assert "--loader=nemo needs a checkpoint loader named" in str(result.exception)
