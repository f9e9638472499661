"""DCP folders that torch.distributed.checkpoint writes, from several ranks, under the names of other trainers."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.ckpt.conftest import assert_same_state, tensors_of
from tests.ckpt.test_ckpt_commands import run as run_ckpt
from tests.ckpt.test_convert_command import run_convert
from tests.ckpt.test_convert_meta import PARAMS, logits, make_state, reference
from torch import Tensor, nn

from mt_ckpt.commands.convert import describe
from mt_ckpt.convert import convert
from mt_ckpt.native.read import open_checkpoint
from mt_core.errors import CheckpointError, ConfigError
from mt_core.testing import run_ranks

TITAN = make_state()
"""A Llama by Meta's names, which are torchtitan's too."""
del TITAN["rope.freqs"]
CONFIG = {
    "model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "rms_norm_eps": 1e-5,
    "num_key_value_heads": 2, "intermediate_size": 48, "vocab_size": 60, "max_position_embeddings": 64,
    "rope_theta": 500000.0, "tie_word_embeddings": False,
}  # fmt: skip
TOKENS = torch.randint(0, 60, (2, 7), generator=torch.Generator().manual_seed(1))


class Tree(nn.Module):
    """A module whose parameters have the given names and values."""

    def __init__(self, state: dict[str, Tensor]) -> None:
        super().__init__()
        for name, value in state.items():
            *folders, leaf = name.split(".")
            module: nn.Module = self
            for folder in folders:
                if folder not in module._modules:
                    module.add_module(folder, nn.Module())
                module = module._modules[folder]  # type: ignore[assignment]
            module.register_parameter(leaf, nn.Parameter(value.clone()))


def save_with_fsdp2(rank: int, world: int, state: dict[str, Tensor], folder: str, kind: str) -> None:
    """As the trainers do: layers and the rest sharded by FSDP2, Adam's state after a step, the trainer's own state.

    kind: torchtitan flattens the model into the dictionary, OLMo-core keeps it under "model".
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
    from torch.distributed.fsdp import fully_shard

    model = Tree(state)
    layers = model.get_submodule("layers" if kind == "torchtitan" else "blocks")
    for layer in layers.children():
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    weights, moments = get_state_dict(
        model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=kind == "torchtitan")
    )
    if kind == "torchtitan":
        saved = {**weights, "optimizer": moments, "train_state": {"step": torch.tensor(7), "note": "seven"}}
    else:
        saved = {"model": weights, "optim": moments}
    dcp.save(saved, checkpoint_id=folder)


def save_in_two_directions(rank: int, world: int, state: dict[str, Tensor], folder: str) -> None:
    """Rows of some tensors, columns of others and whole copies of the rest on each rank, in bf16."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world,))
    kinds = {True: [Shard(1)], False: [Shard(0)]}
    saved = {
        name: distribute_tensor(
            value.bfloat16(), mesh, [Replicate()] if value.ndim == 1 else kinds[".wo." in name or ".w2." in name]
        )
        for name, value in state.items()
    }
    dcp.save({"model": saved}, checkpoint_id=folder)


def olmo_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Hugging Face's names of a Llama -> OLMo-core's of its block with norms before attention and feed-forward."""
    words = {
        "lm_head.": "lm_head.w_out.", "model.embed_tokens": "embeddings", "model.norm": "lm_head.norm",
        "model.layers": "blocks", "self_attn.q_proj": "attention.w_q", "self_attn.k_proj": "attention.w_k",
        "self_attn.v_proj": "attention.w_v", "self_attn.o_proj": "attention.w_out", "mlp.gate_proj": "feed_forward.w1",
        "mlp.down_proj": "feed_forward.w2", "mlp.up_proj": "feed_forward.w3", "input_layernorm": "attention_norm",
        "post_attention_layernorm": "feed_forward_norm", "self_attn.q_norm": "attention.q_norm",
        "self_attn.k_norm": "attention.k_norm",
    }  # fmt: skip
    renamed = {}
    for name, value in state.items():
        for theirs, ours in words.items():
            name = name.replace(theirs, ours)
        renamed[name] = value
    return renamed


def transformers_model(**keys: Any) -> Any:
    """Random weights, in float32."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    kind, *_ = (keys.pop("model_type"),)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **keys), attn_implementation="eager").eval()


def written_config(folder: Path, config: dict[str, Any], name: str = "config.json") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(config))
    return folder / name


@pytest.fixture(scope="module")
def titan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("titan") / "step-7"
    run_ranks(2, save_with_fsdp2, TITAN, str(folder), "torchtitan")
    return folder


@pytest.mark.dist
def test_torchtitan_computes_what_metas_formulas_say(host, titan: Path, tmp_path: Path) -> None:
    """Saved by two ranks under FSDP2; the shape of the model from Meta's params.json, then from Hugging Face's."""
    expected = reference(TITAN, TOKENS, 500000.0)
    assert len(list(titan.glob("*.distcp"))) >= 2
    for name, content in (("params.json", PARAMS), ("config.json", CONFIG)):
        config = written_config(tmp_path / "c", content, name)
        report = convert(titan, tmp_path / name, saver="mt", config=config, verify=True, host=host)
        assert report.read_from == {
            "config": str(config),
            "names": "torchtitan",
            "left_out": ["optimizer", "train_state"],
        }
        torch.testing.assert_close(logits(tmp_path / name, host, TOKENS), expected, atol=2e-4, rtol=1e-4)
        assert open_checkpoint(tmp_path / name).metadata["iteration"] == 7
    lines = describe(report, "x", "mt", dry_run=False)
    assert f"the model is what {config} says; its tensors have the names of torchtitan" in lines
    assert "not read: optimizer, train_state" in lines


def test_the_command_says_where_the_shape_comes_from(tmp_path: Path) -> None:
    dcp.save(TITAN, checkpoint_id=tmp_path / "d", no_dist=True)
    config = written_config(tmp_path / "c", PARAMS, "params.json")
    asked = ("--load-dir", tmp_path / "d", "--save-dir", tmp_path / "x", "--saver", "hf", "--dry-run", "--nproc", "2")
    result = run_convert(*asked, "--config", config)
    assert result.exit_code == 0, result.exception
    assert f"the model is what {config} says" in result.output
    assert isinstance(run_convert(*asked).exception, ConfigError)


@pytest.mark.dist
def test_rows_and_columns_on_ranks_come_together(host, tmp_path: Path) -> None:
    run_ranks(2, save_in_two_directions, TITAN, str(tmp_path / "d"))
    written_config(tmp_path / "d", PARAMS, "params.json")
    convert(tmp_path / "d", tmp_path / "mt", saver="mt", host=host)
    single = tmp_path / "meta"
    single.mkdir()
    torch.save({name: value.bfloat16() for name, value in TITAN.items()}, single / "consolidated.00.pth")
    written_config(single, PARAMS, "params.json")
    convert(single, tmp_path / "once", saver="mt", host=host)
    found, wanted = (tensors_of(open_checkpoint(tmp_path / name)) for name in ("mt", "once"))
    assert_same_state(found, wanted)


def test_later_names_of_torchtitan(host, tmp_path: Path) -> None:
    """lm_head for output, and queries, keys and values one module further down."""
    later = {}
    for name, value in TITAN.items():
        for kind in "qkv":
            name = name.replace(f"attention.w{kind}.", f"attention.qkv_linear.w{kind}.")
        later[name.replace("output.weight", "lm_head.weight")] = value
    dcp.save(later, checkpoint_id=tmp_path / "d", no_dist=True)
    written_config(tmp_path / "d", PARAMS, "params.json")
    convert(tmp_path / "d", tmp_path / "mt", saver="mt", host=host)
    expected = reference(TITAN, TOKENS, 500000.0)
    torch.testing.assert_close(logits(tmp_path / "mt", host, TOKENS), expected, atol=2e-4, rtol=1e-4)


def test_qwen3_of_torchtitan_is_in_hugging_faces_order(host, tmp_path: Path) -> None:
    keys = {**CONFIG, "model_type": "qwen3", "head_dim": 8}
    model = transformers_model(**keys)
    words = {
        "model.embed_tokens": "tok_embeddings", "model.norm": "norm", "model.layers": "layers",
        "self_attn.q_proj": "attention.wq", "self_attn.k_proj": "attention.wk", "self_attn.v_proj": "attention.wv",
        "self_attn.o_proj": "attention.wo", "self_attn.q_norm": "attention.q_norm",
        "self_attn.k_norm": "attention.k_norm", "mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2", "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
    }  # fmt: skip
    state = {}
    for name, value in model.state_dict().items():
        for theirs, titans in words.items():
            name = name.replace(theirs, titans)
        state[name] = value
    dcp.save({"model": state}, checkpoint_id=tmp_path / "d", no_dist=True)
    convert(tmp_path / "d", tmp_path / "mt", saver="mt", config=written_config(tmp_path / "c", keys), host=host)
    with torch.no_grad():
        expected = model(TOKENS).logits
    torch.testing.assert_close(logits(tmp_path / "mt", host, TOKENS), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_olmo_core_computes_what_transformers_does(host, tmp_path: Path, kind: str) -> None:
    """Its step folder: the model and the optimizer within, its own config.json beside, which is not Hugging Face's."""
    keys = {**CONFIG, "model_type": kind, "head_dim": 8}
    model = transformers_model(**keys)
    step = tmp_path / "step1000"
    run_ranks(2, save_with_fsdp2, olmo_names(model.state_dict()), str(step / "model_and_optim"), "OLMo-core")
    written_config(step, {"model": {"d_model": 32, "n_layers": 2}, "trainer": {}})
    with pytest.raises(ConfigError, match=r"does not say what its model is; give --config FILE"):
        convert(step, tmp_path / "mt", saver="mt", host=host)
    config = written_config(tmp_path / "c", keys)
    report = convert(step, tmp_path / "mt", saver="mt", config=config, host=host)
    assert (report.read_from["names"], report.read_from["left_out"]) == ("OLMo-core", ["optim"])
    assert open_checkpoint(tmp_path / "mt").metadata["iteration"] == 1000
    with torch.no_grad():
        expected = model(TOKENS).logits
    torch.testing.assert_close(logits(tmp_path / "mt", host, TOKENS), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("prefix", ["", "model", "app.model"])
def test_hugging_faces_names(host, tmp_path: Path, prefix: str) -> None:
    model = transformers_model(**CONFIG)
    saved: dict[str, Any] = dict(model.state_dict())
    for key in reversed(prefix.split(".") if prefix else []):
        saved = {key: saved}
    dcp.save(saved, checkpoint_id=tmp_path / "d", no_dist=True)
    written_config(tmp_path / "d", CONFIG)
    assert run_ckpt("verify", tmp_path / "d").exit_code == 0
    convert(tmp_path / "d", tmp_path / "mt", saver="mt", host=host)
    with torch.no_grad():
        expected = model(TOKENS).logits
    torch.testing.assert_close(logits(tmp_path / "mt", host, TOKENS), expected, atol=1e-5, rtol=1e-5)


# -- refusals ---------------------------------------------------------------------------------------


def refusal(host, folder: Path, kind: type[Exception], config: Path | None = None) -> str:
    with pytest.raises(kind) as caught:
        convert(folder, folder.with_name("x"), saver="mt", config=config, host=host)
    return str(caught.value)


@pytest.mark.dist
def test_refusals(host, titan: Path, tmp_path: Path) -> None:
    assert f"--config {tmp_path / 'no'}: no such file" in refusal(host, titan, ConfigError, tmp_path / "no")
    other = written_config(tmp_path / "c", {"d_model": 3})
    assert "neither a config.json of Hugging Face's format" in refusal(host, titan, ConfigError, other)
    fewer = written_config(tmp_path / "f", {**CONFIG, "num_hidden_layers": 1})
    assert "model.layers.1." in refusal(host, titan, CheckpointError, fewer)
    wider = written_config(tmp_path / "w", {**CONFIG, "intermediate_size": 49})
    assert "linear_fc1" in refusal(host, titan, CheckpointError, wider)
    wrong = written_config(tmp_path / "k", {**CONFIG, "model_type": "qwen3"})
    assert "self_attn.q_norm.weight is missing" in refusal(host, titan, CheckpointError, wrong)
    convert(titan, tmp_path / "hf", saver="hf", config=written_config(tmp_path / "p", PARAMS, "params.json"), host=host)
    assert "checkpoints of the format hf say what their model is" in refusal(host, tmp_path / "hf", ConfigError, other)


def test_names_of_other_models_are_refused(host, tmp_path: Path) -> None:
    experts = {**TITAN, "layers.0.moe.experts.w1": torch.zeros(2, 3, 4)}
    dcp.save(experts, checkpoint_id=tmp_path / "d", no_dist=True)
    written_config(tmp_path / "d", PARAMS, "params.json")
    assert "tensor layers.0.moe.experts.w1 is not one of the dense models of torchtitan" in refusal(
        host, tmp_path / "d", CheckpointError
    )


def test_a_missing_file_and_a_truncated_one_are_named(host, tmp_path: Path) -> None:
    dcp.save(TITAN, checkpoint_id=tmp_path / "d", no_dist=True)
    written_config(tmp_path / "d", PARAMS, "params.json")
    (file,) = (tmp_path / "d").glob("*.distcp")
    data = file.read_bytes()
    file.write_bytes(data[:-10])
    assert f"{file}: truncated" in refusal(host, tmp_path / "d", CheckpointError)
    file.unlink()
    assert f"{file}: missing" in refusal(host, tmp_path / "d", CheckpointError)


class Harmful:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return Path.touch, (self.target,)


def test_no_pickle_is_executed(host, tmp_path: Path) -> None:
    dcp.save(TITAN, checkpoint_id=tmp_path / "d", no_dist=True)
    written_config(tmp_path / "d", PARAMS, "params.json")
    (tmp_path / "d" / ".metadata").write_bytes(pickle.dumps(Harmful(tmp_path / "touched")))
    assert "refused, nothing in it was executed" in refusal(host, tmp_path / "d", CheckpointError)
    assert not (tmp_path / "touched").exists()
