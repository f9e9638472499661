"""A gpt that is a Llama or a Qwen in all but name, and one that no format can hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.ckpt.conftest import assert_same_state, tensors_of

from mt_ckpt.convert import convert
from mt_ckpt.native.read import open_checkpoint
from mt_core.errors import ConfigError
from mt_core.train.trained_model import load_trained_model

TINY = {
    "family": "gpt",
    "num_layers": 3,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "vocab_size": 101,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "activation": "swiglu",
    "add_bias_linear": False,
}
"""As the preset gpt-tiny."""
WIDE = {
    **TINY,
    "num_query_groups": 2,
    "kv_channels": 12,
    "ffn_hidden_size": 40,
    "untie_embeddings_and_output_weights": True,
    "rotary_base": 500.0,
    "norm_epsilon": 1e-3,
}
CASES = {
    "tiny": (TINY, "LlamaForCausalLM"),
    "wide": (WIDE, "LlamaForCausalLM"),
    "biased": ({**WIDE, "add_bias_linear": True}, "LlamaForCausalLM"),
    "qkv bias": ({**WIDE, "add_qkv_bias": True}, "Qwen2ForCausalLM"),
    "qk norms": ({**WIDE, "qk_layernorm": True}, "Qwen3ForCausalLM"),
}


@pytest.mark.parametrize("case", CASES)
def test_transformers_computes_the_same_and_the_way_back_gives_the_same_bits(
    make_model, host, tmp_path: Path, case: str
) -> None:
    from transformers import AutoModelForCausalLM

    keys, architecture = CASES[case]
    source = make_model(**keys)
    report = convert(source, tmp_path / "hf", saver="hf", verify=True, host=host)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
    assert type(theirs).__name__ == architecture
    ours = load_trained_model(source, host).model.eval()
    tokens = torch.randint(0, 101, (2, 17), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-4)
    convert(tmp_path / "hf", tmp_path / "back", saver="mt", host=host)
    assert_same_state(tensors_of(open_checkpoint(source)), tensors_of(open_checkpoint(tmp_path / "back")))
    assert report.verification is not None
    assert report.verification.num_outputs
    assert report.verification.changed_settings == {
        "family": f"gpt -> {'llama' if architecture.startswith('Llama') else 'qwen'}",
        "max_position_embeddings": "None -> 4096",
    }


@pytest.mark.parametrize("biased", [False, True])
def test_trtllm_gets_what_it_gets_of_the_llama(make_model, host, tmp_path: Path, biased: bool) -> None:
    convert(make_model(**{**WIDE, "add_bias_linear": biased}), tmp_path / "gpt", saver="trtllm", host=host)
    convert(tmp_path / "source", tmp_path / "hf", saver="hf", host=host)
    convert(tmp_path / "hf", tmp_path / "llama", saver="trtllm", host=host)
    first, second = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("gpt", "llama"))
    assert first == second
    assert (first["architecture"], first["attn_bias"], first["mlp_bias"]) == ("LlamaForCausalLM", biased, biased)
    assert_same_state(*(load_file(tmp_path / name / "rank0.safetensors") for name in ("gpt", "llama")))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rotary_percent": 0.5}, "llama and qwen2 and qwen3 and granite (model.rotary_percent=0.5; it can be 1.0)"),
        ({"activation": "geglu"}, "(model.activation=geglu; it can be swiglu)"),
        ({"hidden_dropout": 0.1}, "(model.hidden_dropout=0.1; it can be 0.0)"),
        ({"add_qkv_bias": True, "qk_layernorm": True}, "qwen2 (model.qk_layernorm=True; it can be False)"),
        (
            {"rotary_interleaved": True},
            "gpt_neox and llama and qwen2 and qwen3 and granite (model.rotary_interleaved=True; it can be False)",
        ),
    ],
)
def test_what_no_format_holds_names_those_that_were_tried(
    make_model, host, tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        convert(make_model(**{**TINY, **change}), tmp_path / "hf", saver="hf", host=host)
    message = str(caught.value)
    assert words in message
    assert all(kind in message for kind in ("gpt2", "gpt_bigcode", "bloom", "gpt_neox", "llama", "qwen2", "qwen3"))
    assert not (tmp_path / "hf").exists()


def test_trtllm_refuses_by_key(make_model, host, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model.qk_layernorm=True cannot .* TensorRT-LLM's LlamaForCausalLM"):
        convert(make_model(**TINY, qk_layernorm=True), tmp_path / "x", saver="trtllm", host=host)


def test_a_head_that_chooses_has_no_such_format(make_model, host, tmp_path: Path) -> None:
    keys = {**TINY, "family": "gpt_classification", "num_classes": 3}
    with pytest.raises(
        ConfigError, match=r"this gpt_classification cannot be written .* gpt_neox \(model.activation=swiglu"
    ):
        convert(make_model(**keys), tmp_path / "x", saver="hf", host=host)
