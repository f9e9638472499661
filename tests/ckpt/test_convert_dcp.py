"""DCP folders that torch.distributed.checkpoint writes, from several ranks, under the names of other trainers."""

from __future__ import annotations

import json
import pickle
import re
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


OF_OLMO = ("llama", "qwen3")


def olmo_model(kind: str) -> Any:
    return transformers_model(**{**CONFIG, "model_type": kind, "head_dim": 8})


def save_all(rank: int, world: int, titan: dict[str, Tensor], olmo: dict[str, dict[str, Tensor]], folder: Path) -> None:
    save_with_fsdp2(rank, world, titan, str(folder / "step-7"), "torchtitan")
    for kind, state in olmo.items():
        save_with_fsdp2(rank, world, state, str(folder / kind / "step1000" / "model_and_optim"), "OLMo-core")
    save_in_two_directions(rank, world, titan, str(folder / "two directions"))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Has the folders that two ranks wrote, one after another."""
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(2, save_all, TITAN, {kind: olmo_names(olmo_model(kind).state_dict()) for kind in OF_OLMO}, folder)
    return folder


@pytest.fixture
def titan(saved: Path) -> Path:
    return saved / "step-7"


@pytest.mark.slow
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
    lines = describe(report, "x", dry_run=False)
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


@pytest.mark.slow
@pytest.mark.dist
def test_rows_and_columns_on_ranks_come_together(host, saved: Path, tmp_path: Path) -> None:
    written_config(saved / "two directions", PARAMS, "params.json")
    convert(saved / "two directions", tmp_path / "mt", saver="mt", host=host)
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


def test_fused_queries_keys_and_values_of_torchtitan(host, tmp_path: Path) -> None:
    """Rows by key-value head: its queries, then its key, then its value."""
    fused = {name: value for name, value in TITAN.items() if not re.search(r"attention\.w[qkv]\.", name)}
    for layer in range(2):
        of_group = [
            part
            for group in range(2)
            for part in (
                TITAN[f"layers.{layer}.attention.wq.weight"][16 * group : 16 * group + 16],
                TITAN[f"layers.{layer}.attention.wk.weight"][8 * group : 8 * group + 8],
                TITAN[f"layers.{layer}.attention.wv.weight"][8 * group : 8 * group + 8],
            )
        ]
        fused[f"layers.{layer}.attention.qkv_linear.wqkv.weight"] = torch.cat(of_group)
    dcp.save(fused, checkpoint_id=tmp_path / "d", no_dist=True)
    written_config(tmp_path / "d", PARAMS, "params.json")
    convert(tmp_path / "d", tmp_path / "mt", saver="mt", host=host)
    expected = reference(TITAN, TOKENS, 500000.0)
    torch.testing.assert_close(logits(tmp_path / "mt", host, TOKENS), expected, atol=2e-4, rtol=1e-4)


EXPERTS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        **CONFIG, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "mlp_only_layers": [0], "norm_topk_prob": True,
    },
    "deepseek_v3": {
        **CONFIG, "rms_norm_eps": 1e-6, "num_key_value_heads": 4, "q_lora_rank": 20, "kv_lora_rank": 12,
        "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "n_routed_experts": 4, "n_group": 1,
        "topk_group": 1, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 24,
        "first_k_dense_replace": 1, "num_nextn_predict_layers": 0, "routed_scaling_factor": 2.5, "norm_topk_prob": True,
    },
}  # fmt: skip
TITAN_WORDS = {
    "model.embed_tokens": "tok_embeddings", "model.norm": "norm", "model.layers": "layers",
    "mlp.gate.e_score_correction_bias": "moe.expert_bias", "mlp.gate.weight": "moe.router.gate.weight",
    "self_attn.q_a_proj": "attention.wq_a", "self_attn.q_a_layernorm": "attention.q_norm",
    "self_attn.q_b_proj": "attention.wq_b", "self_attn.kv_a_proj_with_mqa": "attention.wkv_a",
    "self_attn.kv_a_layernorm": "attention.kv_norm", "self_attn.kv_b_proj": "attention.wkv_b",
    "self_attn.q_proj": "attention.wq", "self_attn.k_proj": "attention.wk", "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo", "self_attn.": "attention.", "mlp.shared_experts.gate_proj":
    "moe.shared_experts.w1", "mlp.shared_experts.down_proj": "moe.shared_experts.w2", "mlp.shared_experts.up_proj":
    "moe.shared_experts.w3", "mlp.experts.down_proj": "moe.experts.w2", "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3", "mlp.down_proj": "feed_forward.w2", "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def titan_experts(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """transformers' names -> torchtitan's; gate and up of all experts [experts, 2 width, hidden] become w1 and w3."""
    renamed = {}
    for name, value in state.items():
        for theirs, titans in TITAN_WORDS.items():
            name = name.replace(theirs, titans)
        if name.endswith("mlp.experts.gate_up_proj"):
            stem = name.replace("mlp.experts.gate_up_proj", "moe.experts.")
            renamed[f"{stem}w1"], renamed[f"{stem}w3"] = value.chunk(2, dim=1)
        else:
            renamed[name] = value
    return renamed


@pytest.mark.parametrize("suffixed", [False, True])
@pytest.mark.parametrize("kind", EXPERTS)
def test_experts_of_torchtitan_compute_what_transformers_does(host, tmp_path: Path, kind: str, suffixed: bool) -> None:
    """Stacked experts under their older names and their newer ones, which tell their dimensions."""
    keys = {**EXPERTS[kind], "model_type": kind}
    model = transformers_model(**keys)
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if name.endswith("e_score_correction_bias"):
                value.copy_(torch.tensor([0.3, -0.2, 0.1, 0.0]))
    state = titan_experts(model.state_dict())
    if kind == "qwen3_moe":
        state["layers.1.moe.expert_bias"] = torch.zeros(4)
    if suffixed:
        newer = {"experts.w1": "experts.w1_EFD", "experts.w2": "experts.w2_EDF", "experts.w3": "experts.w3_EFD"}
        newer["expert_bias"] = "expert_bias_E"
        state = {
            re.sub(r"(?<!shared_)(experts\.w.|expert_bias)$", lambda m: newer[m[0]], n): v for n, v in state.items()
        }
    dcp.save({name: value.contiguous() for name, value in state.items()}, checkpoint_id=tmp_path / "d", no_dist=True)
    convert(tmp_path / "d", tmp_path / "mt", saver="mt", config=written_config(tmp_path / "c", keys), host=host)
    with torch.no_grad():
        expected = model(TOKENS).logits
    torch.testing.assert_close(logits(tmp_path / "mt", host, TOKENS), expected, atol=1e-5, rtol=1e-5)


def olmo_experiment(norm: str = "default", **attention: Any) -> dict[str, Any]:
    """What OLMo-core writes beside `model_and_optim`, of the model that CONFIG is."""
    layer_norm = {"name": "rms", "eps": 1e-5, "bias": False, "_CLASS_": "olmo_core.nn.layer_norm.LayerNormConfig"}
    rope = {"name": "default", "theta": 500000, "full_precision": True, "_CLASS_": "olmo_core.nn.rope.RoPEConfig"}
    if attention.get("qk_norm"):
        attention["qk_norm"] = layer_norm
    mixer = {"name": "default", "n_heads": 4, "n_kv_heads": 2, "bias": False, "rope": rope, "use_flash": False}
    block = {
        "name": norm,
        "attention": {**mixer, "dtype": "float32", **attention},
        "layer_norm": layer_norm,
        "feed_forward": {"hidden_size": 48, "bias": False, "name": "default", "dtype": "float32"},
    }
    head = {"name": "default", "layer_norm": layer_norm, "bias": False, "dtype": "float32"}
    model = {"d_model": 32, "vocab_size": 60, "n_layers": 2, "block": block, "lm_head": head, "name": "default"}
    more = {"init_method": "normal", "init_std": 0.02, "_CLASS_": "olmo_core.nn.transformer.config.TransformerConfig"}
    return {"model": {**model, **more}, "train_module": {"max_sequence_length": 64}, "trainer": {}}


@pytest.mark.parametrize("kind", OF_OLMO)
def test_the_configuration_that_olmo_core_writes(host, tmp_path: Path, kind: str) -> None:
    model = olmo_model(kind)
    step = tmp_path / "step5"
    dcp.save({"model": olmo_names(model.state_dict())}, checkpoint_id=step / "model_and_optim", no_dist=True)
    keys = {"qk_norm": True, "use_head_qk_norm": True} if kind == "qwen3" else {}
    config = written_config(step, olmo_experiment(**keys))
    report = convert(step, tmp_path / "mt", saver="mt", host=host)
    assert report.read_from["config"] == str(config)
    with torch.no_grad():
        expected = model(TOKENS).logits
    torch.testing.assert_close(logits(tmp_path / "mt", host, TOKENS), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("kind", OF_OLMO)
def test_olmo_core_computes_what_transformers_does(host, saved: Path, tmp_path: Path, kind: str) -> None:
    """Its step folder: the model and the optimizer within, its own config.json beside, which is not Hugging Face's."""
    model, step = olmo_model(kind), saved / kind / "step1000"
    written_config(step, {"model": {"d_model": 32, "n_layers": 2}, "trainer": {}})
    with pytest.raises(ConfigError, match=r"does not say what its model is; give --config FILE"):
        convert(step, tmp_path / "mt", saver="mt", host=host)
    config = written_config(tmp_path / "c", {**CONFIG, "model_type": kind, "head_dim": 8})
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


@pytest.mark.slow
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
    words = refusal(host, tmp_path / "d", CheckpointError)
    assert "tensor layers.0.moe.experts.w1 is not known of the models of torchtitan" in words


def test_a_bias_that_no_router_of_the_model_has_is_refused(host, tmp_path: Path) -> None:
    state = {**TITAN, "layers.1.moe.expert_bias_E": torch.tensor([0.0, 0.1])}
    dcp.save(state, checkpoint_id=tmp_path / "d", no_dist=True)
    config = written_config(tmp_path / "c", {**EXPERTS["qwen3_moe"], "model_type": "qwen3_moe"})
    assert "layers.1.moe.expert_bias_E is not zero" in refusal(host, tmp_path / "d", CheckpointError, config)


OLMO_REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "OLMo 2": (olmo_experiment("reordered_norm"), "OLMo 2 normalizes what attention and feed-forward return"),
    "another block": (olmo_experiment("peri_norm"), "model.block.name=peri_norm is not read; it can be default"),
    "wide norm": (olmo_experiment(qk_norm=True), "qk_norm without use_head_qk_norm normalizes"),
    "a window": (olmo_experiment(window_size=16), "model.block.attention.window_size=16 is not read"),
    "scaled": (
        olmo_experiment(rope={"theta": 1, "scaling": {"factor": 2}}),
        "attention.rope.scaling={'factor': 2} is not",
    ),
    "no rotation": (olmo_experiment(rope=None), "model.block.attention.rope is missing"),
    "no positions": ({**olmo_experiment(), "train_module": {}}, "neither train_module.max_sequence_length"),
}


@pytest.mark.parametrize("case", OLMO_REFUSALS)
def test_models_of_olmo_core_that_no_family_is_are_refused(host, tmp_path: Path, case: str) -> None:
    content, words = OLMO_REFUSALS[case]
    step = tmp_path / "step5"
    dcp.save(
        {"model": {"embeddings.weight": torch.zeros(60, 32)}}, checkpoint_id=step / "model_and_optim", no_dist=True
    )
    written_config(step, content)
    assert words in refusal(host, step, ConfigError)


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
