"""Mistral Large 3 in Mistral's own layout: what `Mistral4ForCausalLM` computes with the same weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.ckpt.test_convert_meta import logits
from torch import Tensor

from mt_ckpt.convert import convert
from mt_ckpt.meta.latent_params import to_mistral4
from mt_core.errors import CheckpointError, ConfigError
from mt_models.mistral4.hugging_face import HUGGING_FACE

PARAMS: dict[str, Any] = {
    "dim": 32,
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 4,
    "head_dim": 18,
    "hidden_dim": 40,
    "norm_eps": 1e-6,
    "vocab_size": 60,
    "rope_theta": 10000.0,
    "tied_embeddings": False,
    "max_position_embeddings": 64,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 6,
    "v_head_dim": 8,
    "llama_4_scaling": {"beta": 0.3, "original_max_position_embeddings": 4},
    "yarn": {"alpha": 1, "apply_scale": False, "beta": 32, "factor": 8, "original_max_position_embeddings": 4},
    "moe": {
        "expert_hidden_dim": 16, "expert_model_parallel": 1, "expert_parallel": 1, "first_k_dense_replace": 1,
        "num_expert_groups": 1, "num_expert_groups_per_tok": 1, "num_experts": 3, "num_experts_per_tok": 2,
        "num_shared_experts": 1, "route_every_n": 1, "routed_scale": 1.0,
    },
    "vision_encoder": {"hidden_size": 16},
}  # fmt: skip
GATED = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
ATTENTION = {
    "attention.wq_a": "self_attn.q_a_proj",
    "attention.q_a_norm": "self_attn.q_a_layernorm",
    "attention.wq_b": "self_attn.q_b_proj",
    "attention.wkv_a_with_mqa": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_a_norm": "self_attn.kv_a_layernorm",
    "attention.wkv_b": "self_attn.kv_b_proj",
    "attention.wo": "self_attn.o_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def reference_of(params: dict[str, Any]) -> Any:
    transformers = pytest.importorskip("transformers")
    external = {key: value for key, value in to_mistral4(params).items() if key != "model_type"}
    config = transformers.Mistral4Config(**external, attn_implementation="eager", experts_implementation="eager")
    model = transformers.Mistral4ForCausalLM(config).float().eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def under_mistrals_names(model: Any) -> dict[str, Tensor]:
    state = model.state_dict()
    found = {
        "tok_embeddings.weight": state["model.embed_tokens.weight"],
        "norm.weight": state["model.norm.weight"],
        "output.weight": state["lm_head.weight"],
        "vision_encoder.ln_pre.weight": torch.ones(16),
        "patch_merger.merging_layer.weight": torch.ones(16, 64),
    }
    for number in range(model.config.num_hidden_layers):
        own, theirs = f"layers.{number}.", f"model.layers.{number}."
        found |= {f"{own}{name}.weight": state[f"{theirs}{other}.weight"] for name, other in ATTENTION.items()}
        if number < model.config.first_k_dense_replace:
            found |= {f"{own}feed_forward.{w}.weight": state[f"{theirs}mlp.{n}.weight"] for w, n in GATED.items()}
            continue
        found[f"{own}gate.weight"] = state[f"{theirs}mlp.gate.weight"]
        shared = f"{theirs}mlp.shared_experts."
        found |= {f"{own}shared_experts.{w}.weight": state[f"{shared}{n}.weight"] for w, n in GATED.items()}
        gate_up, down = state[f"{theirs}mlp.experts.gate_up_proj"], state[f"{theirs}mlp.experts.down_proj"]
        for e, (both, last) in enumerate(zip(gate_up, down, strict=True)):
            first, third = both.chunk(2)
            parts = {"w1": first, "w2": last, "w3": third}
            found |= {f"{own}experts.{e}.{w}.weight": x for w, x in parts.items()}
    return {name: x.contiguous().clone() for name, x in found.items()}


def write(folder: Path, tensors: dict[str, Tensor], params: dict[str, Any], files: int = 2) -> Path:
    folder.mkdir()
    names = [f"consolidated-{i + 1:05}-of-{files:05}.safetensors" for i in range(files)]
    places = {name: names[place % files] for place, name in enumerate(tensors)}
    for file in names:
        save_file({name: x for name, x in tensors.items() if places[name] == file}, folder / file)
    (folder / "consolidated.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    (folder / "params.json").write_text(json.dumps(params))
    return folder


def test_the_published_layout_computes_what_transformers_does(host, tmp_path: Path) -> None:
    model = reference_of(PARAMS)
    folder = write(tmp_path / "large", under_mistrals_names(model), PARAMS)
    assert convert(folder, tmp_path / "mt", saver="mt", host=host).family == "mistral4"
    tokens = torch.randint(0, 60, (2, 11), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(tokens).logits
    torch.testing.assert_close(logits(tmp_path / "mt", host, tokens), expected, atol=1e-5, rtol=1e-5)


def test_mt_models_check_reads_params_json(host, tmp_path: Path) -> None:
    from mt_cli.model_check import check_model

    tensors = under_mistrals_names(reference_of(PARAMS))
    found = check_model(write(tmp_path / "large", tensors, PARAMS), host)
    assert (found.taken, found.model_type, found.family) == (True, "meta", "mistral4")
    assert found.left_out == {"vision_encoder.*": 1, "patch_merger.*": 1}
    tower = ("vision_encoder.", "patch_merger.")
    assert found.parameters == sum(x.numel() for name, x in tensors.items() if not name.startswith(tower))
    damaged = write(tmp_path / "damaged", {name: x for name, x in tensors.items() if name != "norm.weight"}, PARAMS)
    (problem,) = check_model(damaged, host).problems
    assert "norm.weight is missing" in problem.why
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "params.json").write_text(json.dumps(PARAMS))
    with pytest.raises(ConfigError, match=r"params\.json, is read together with the weights"):
        check_model(tmp_path / "alone", host)


BLOCK = 8
QUANTIZATION = {
    "config_groups": {
        "FP8_BLOCK": {
            "format": "float-quantized",
            "targets": ["Linear"],
            "weights": {
                "block_structure": [BLOCK, BLOCK], "dynamic": False, "num_bits": 8, "strategy": "block",
                "symmetric": True, "type": "float",
            },
        }
    },
    "format": "float-quantized",
    "ignore": [
        "model.embed_tokens", "re:patch_merger.*", "re:vision_encoder.*", "re:.*kv_a_proj_with_mqa$", "re:.*q_a_proj$",
        "re:.*gate$", "lm_head",
    ],
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}  # fmt: skip
PLAIN = ("tok_embeddings", "output", "vision_encoder", "patch_merger", "norm", "wkv_a_with_mqa", "wq_a", ".gate.")


def in_blocks(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Codes of FP8 and a power of two for each block, as the published model has them; what is left alone in bf16."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if any(part in name for part in PLAIN):
            found[name] = tensor.bfloat16()
            continue
        rows, columns = tensor.shape[0] // BLOCK, tensor.shape[1] // BLOCK
        scale = 2.0 ** -(5 + torch.arange(rows * columns, dtype=torch.float32).view(rows, columns) % 3)
        whole = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        found[name] = (tensor / whole).to(torch.float8_e4m3fn)
        found[f"{name}_scale"] = scale
    return found


def plain_values(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    values = {}
    for name, tensor in tensors.items():
        if name.endswith("_scale"):
            continue
        scale = tensors.get(f"{name}_scale")
        whole = 1.0 if scale is None else scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        values[name] = tensor.float() * whole
    return values


def test_blocks_in_fp8_are_what_their_scales_say(host, tmp_path: Path) -> None:
    from mt_ckpt.meta.reader import open_checkpoint

    stored = in_blocks(under_mistrals_names(reference_of(PARAMS)))
    assert sum(name.endswith("_scale") for name in stored) == 3 * 2 + 3 + 3 + 9
    quantized = write(tmp_path / "fp8", stored, {**PARAMS, "quantization_config": QUANTIZATION})
    plain = write(tmp_path / "plain", plain_values(stored), PARAMS)
    found, expected = open_checkpoint(quantized, host), open_checkpoint(plain, host)
    assert set(found.shapes()) == set(expected.shapes())
    for name in expected.shapes():
        assert torch.equal(found.read(name).float(), expected.read(name).float()), name


def test_published_parameters_are_the_preset() -> None:
    from mt_models.mistral4.config import PRESETS

    own = {"dim": 7168, "n_layers": 61, "n_heads": 128, "n_kv_heads": 128, "head_dim": 192, "hidden_dim": 16384}
    own |= {"vocab_size": 131072, "max_position_embeddings": 294912, "q_lora_rank": 1536, "kv_lora_rank": 512}
    own |= {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    own["llama_4_scaling"] = {"beta": 0.1, "original_max_position_embeddings": 8192}
    own["yarn"] = {**PARAMS["yarn"], "factor": 36, "original_max_position_embeddings": 8192}
    own["moe"] = {**PARAMS["moe"], "expert_hidden_dim": 4096, "first_k_dense_replace": 3, "num_experts": 128}
    own["moe"] |= {"num_experts_per_tok": 4}
    read = HUGGING_FACE.read_config(to_mistral4({**PARAMS, **own}))
    preset = PRESETS["mistral-large-3-675b"]["model"]
    assert {key: read[key] for key in preset if key != "moe"} == {key: preset[key] for key in preset if key != "moe"}
    assert {key: read["moe"][key] for key in preset["moe"]} == preset["moe"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"norm_eps": 1e-5}, "norm_eps=1e-05 is not supported; it can be 1e-06"),
        ({"quantization": {"qformat_weight": "fp8_e4m3"}}, "quantization=.* is not supported"),
        ({"rope_kind": "new"}, "rope_kind='new' is not known"),
        ({"moe": {**PARAMS["moe"], "route_every_n": 2}}, "moe.route_every_n=2 is not supported; it can be 1"),
        ({"llama_4_scaling": {"beta": 0.1, "original_max_position_embeddings": 8}}, "it can be that of yarn, 4"),
        ({"yarn": None}, "yarn.factor, yarn.original_max_position_embeddings, yarn.beta, yarn.alpha is missing"),
    ],
)
def test_parameters_that_cannot_be_read(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        to_mistral4({**PARAMS, **change})


def test_a_tensor_that_is_not_of_the_layout_is_refused(host, tmp_path: Path) -> None:
    tensors = {"tok_embeddings.weight": torch.zeros(60, 32), "layers.0.attention.wz.weight": torch.zeros(2)}
    folder = write(tmp_path / "large", tensors, PARAMS)
    with pytest.raises(CheckpointError, match=r"layers\.0\.attention\.wz\.weight is not one of Mistral's layout"):
        convert(folder, tmp_path / "mt", saver="mt", host=host)
