"""GPT in its several shapes against `transformers`: logits, loss and every gradient, with one set of weights.

The weights are the reference's, drawn at random and copied by the maps below, which were written from the
two definitions and serve this test alone.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

transformers = pytest.importorskip("transformers")

VOCAB, HIDDEN, HEADS, LAYERS, HEAD = 101, 32, 4, 2, 8


def group_qkv(q: Tensor, k: Tensor, v: Tensor, groups: int) -> Tensor:
    """Rows of three matrices (or biases) in the order group by group: queries, key, value."""
    parts = [x.unflatten(0, (groups, -1)) for x in (q, k, v)]
    return torch.cat(parts, dim=1).flatten(0, 1)


def gpt2(reference) -> dict[str, Tensor]:
    state = reference.state_dict()
    mapped = {
        "embedding.word_embeddings.weight": state["transformer.wte.weight"],
        "embedding.position_embeddings.weight": state["transformer.wpe.weight"],
    }
    for i in range(LAYERS):
        theirs, ours = f"transformer.h.{i}.", f"decoder.layers.{i}."
        for kind in ("weight", "bias"):
            # GPT-2's Conv1D stores [in, out].
            turned = {
                name: state[f"{theirs}{name}.{kind}"]
                for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
            }
            turned = {name: x.T if kind == "weight" else x for name, x in turned.items()}
            mapped[f"{ours}input_layernorm.{kind}"] = state[f"{theirs}ln_1.{kind}"]
            mapped[f"{ours}pre_mlp_layernorm.{kind}"] = state[f"{theirs}ln_2.{kind}"]
            mapped[f"{ours}self_attention.linear_qkv.{kind}"] = group_qkv(*turned["attn.c_attn"].chunk(3), groups=HEADS)
            mapped[f"{ours}self_attention.linear_proj.{kind}"] = turned["attn.c_proj"]
            mapped[f"{ours}mlp.linear_fc1.{kind}"] = turned["mlp.c_fc"]
            mapped[f"{ours}mlp.linear_fc2.{kind}"] = turned["mlp.c_proj"]
    return mapped | {
        f"decoder.final_layernorm.{kind}": state[f"transformer.ln_f.{kind}"] for kind in ("weight", "bias")
    }


def llama(
    reference, groups: int = 2, qkv_bias: bool = False, qk_norm: bool = False, tied: bool = False
) -> dict[str, Tensor]:
    state = reference.state_dict()
    mapped = {
        "embedding.word_embeddings.weight": state["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": state["model.norm.weight"],
    }
    if not tied:
        mapped["output_layer.weight"] = state["lm_head.weight"]
    for i in range(LAYERS):
        theirs, ours = f"model.layers.{i}.", f"decoder.layers.{i}."
        mapped[f"{ours}input_layernorm.weight"] = state[f"{theirs}input_layernorm.weight"]
        mapped[f"{ours}pre_mlp_layernorm.weight"] = state[f"{theirs}post_attention_layernorm.weight"]
        for kind in ("weight", "bias") if qkv_bias else ("weight",):
            rows = [state[f"{theirs}self_attn.{name}_proj.{kind}"] for name in "qkv"]
            mapped[f"{ours}self_attention.linear_qkv.{kind}"] = group_qkv(*rows, groups=groups)
        if qk_norm:
            mapped[f"{ours}self_attention.q_layernorm.weight"] = state[f"{theirs}self_attn.q_norm.weight"]
            mapped[f"{ours}self_attention.k_layernorm.weight"] = state[f"{theirs}self_attn.k_norm.weight"]
        mapped[f"{ours}self_attention.linear_proj.weight"] = state[f"{theirs}self_attn.o_proj.weight"]
        gate_up = [state[f"{theirs}mlp.{name}_proj.weight"] for name in ("gate", "up")]
        mapped[f"{ours}mlp.linear_fc1.weight"] = torch.cat(gate_up)
        mapped[f"{ours}mlp.linear_fc2.weight"] = state[f"{theirs}mlp.down_proj.weight"]
    return mapped


def bloom(reference) -> dict[str, Tensor]:
    state = reference.state_dict()
    mapped = {"embedding.word_embeddings.weight": state["transformer.word_embeddings.weight"]}
    for i in range(LAYERS):
        theirs, ours = f"transformer.h.{i}.", f"decoder.layers.{i}."
        for kind in ("weight", "bias"):
            mapped[f"{ours}input_layernorm.{kind}"] = state[f"{theirs}input_layernorm.{kind}"]
            mapped[f"{ours}pre_mlp_layernorm.{kind}"] = state[f"{theirs}post_attention_layernorm.{kind}"]
            mapped[f"{ours}self_attention.linear_qkv.{kind}"] = state[f"{theirs}self_attention.query_key_value.{kind}"]
            mapped[f"{ours}self_attention.linear_proj.{kind}"] = state[f"{theirs}self_attention.dense.{kind}"]
            mapped[f"{ours}mlp.linear_fc1.{kind}"] = state[f"{theirs}mlp.dense_h_to_4h.{kind}"]
            mapped[f"{ours}mlp.linear_fc2.{kind}"] = state[f"{theirs}mlp.dense_4h_to_h.{kind}"]
    return mapped | {
        f"decoder.final_layernorm.{kind}": state[f"transformer.ln_f.{kind}"] for kind in ("weight", "bias")
    }


SHAPE = {"num_layers": LAYERS, "hidden_size": HIDDEN, "num_attention_heads": HEADS, "vocab_size": VOCAB}
LLAMA = {
    **SHAPE,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "norm_epsilon": 1e-6,
    "activation": "swiglu",
    "add_bias_linear": False,
    "num_query_groups": 2,
    "ffn_hidden_size": 48,
    "untie_embeddings_and_output_weights": True,
}
LLAMA_REFERENCE = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "rms_norm_eps": 1e-6,
    "attn_implementation": "eager",
}


def make_gpt2():
    config = transformers.GPT2Config(
        vocab_size=VOCAB,
        n_embd=HIDDEN,
        n_layer=LAYERS,
        n_head=HEADS,
        n_positions=16,
        attn_implementation="eager",
        embd_pdrop=0,
        attn_pdrop=0,
        resid_pdrop=0,
    )
    return transformers.GPT2LMHeadModel(config)


def make_llama(**keys):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA_REFERENCE, **keys))


def make_qwen2():
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**LLAMA_REFERENCE, tie_word_embeddings=True))


def make_qwen3():
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**LLAMA_REFERENCE, head_dim=16))


def make_bloom():
    config = transformers.BloomConfig(vocab_size=VOCAB, hidden_size=HIDDEN, n_layer=LAYERS, n_head=HEADS)
    model = transformers.BloomForCausalLM(config)
    model.transformer.word_embeddings_layernorm = torch.nn.Identity()  # Bloom's own addition
    return model


CASES: dict[str, tuple[Callable, Callable, dict]] = {
    "GPT-2": (make_gpt2, gpt2, {**SHAPE, "max_position_embeddings": 16, "activation": "gelu_tanh"}),
    "Llama": (make_llama, llama, LLAMA),
    "Llama, rotary base and one key head": (
        lambda: make_llama(rope_parameters={"rope_type": "default", "rope_theta": 500.0}),
        llama,
        {**LLAMA, "rotary_base": 500.0},
    ),
    "Qwen 2: biases on queries, keys and values, tied": (
        make_qwen2,
        lambda reference: llama(reference, qkv_bias=True, tied=True),
        {**LLAMA, "add_qkv_bias": True, "untie_embeddings_and_output_weights": False},
    ),
    "Qwen 3: normalized queries and keys, wide heads": (
        make_qwen3,
        lambda reference: llama(reference, qk_norm=True),
        {**LLAMA, "qk_layernorm": True, "kv_channels": 16},
    ),
    "Bloom: ALiBi": (make_bloom, bloom, {**SHAPE, "position_embedding_type": "alibi", "activation": "gelu_tanh"}),
}


def canonical(model, name: str) -> Tensor:
    parameter = dict(model.named_parameters())[name]
    return parameter[:VOCAB] if "word_embeddings" in name or "output_layer" in name else parameter


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_logits_loss_and_gradients_equal_the_reference(build, randomize, case, backend) -> None:
    make, mapping, keys = CASES[case]
    reference = make().float().eval()
    randomize(reference)
    model = build(**keys, attention_backend=backend)
    mapped = mapping(reference)
    assert mapped.keys() == dict(model.named_parameters()).keys()
    with torch.no_grad():
        for name, value in mapped.items():
            target = canonical(model, name)
            assert target.shape == value.shape, name
            target.copy_(value)

    tokens = torch.randint(0, VOCAB, (3, 13), generator=torch.Generator().manual_seed(2))
    theirs = reference(tokens).logits
    ours = model(tokens)
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() < 1e-4 * max(1.0, theirs.abs().max().item())
    assert (ours - theirs).abs().mean() < 1e-5 * max(1.0, theirs.abs().max().item())

    losses = [F.cross_entropy(x[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()) for x in (ours, theirs)]
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-5)
    for loss in losses:
        loss.backward()
    # The map is linear: it carries gradients as it carries weights.
    gradients = {name: parameter.grad for name, parameter in reference.named_parameters()}
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            parameter.copy_(gradients[name])
    parameters = dict(model.named_parameters())
    for name, expected in mapping(reference).items():
        gradient = parameters[name].grad[: len(expected)]
        torch.testing.assert_close(
            gradient, expected, atol=2e-5 * expected.abs().max().item() + 1e-7, rtol=1e-3, msg=name
        )
