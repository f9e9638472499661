"""GPT-2 and its relatives in GGUF: StarCoder (gpt_bigcode), BLOOM, GPT-NeoX, Nemotron."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mt_core.name_map import GroupedQKV, NameMap, Rule, Same
from mt_models.blocks.gguf_decoder import OURS, THEIRS, decoder_map, norms, tied_output
from mt_models.gguf import External, GGUFArchitecture, GGUFFamily, Key, Metadata, require
from mt_models.gpt.config import GPTConfig
from mt_models.gpt.hugging_face import HUGGING_FACE

NORMS = {"input_layernorm": "attn_norm", "pre_mlp_layernorm": "ffn_norm"}
MATRICES = {"self_attention.linear_proj": "attn_output", "mlp.linear_fc1": "ffn_up", "mlp.linear_fc2": "ffn_down"}
SEPARATE = ("nemotron",)
"""Types whose queries, keys and values are three tensors."""


def name_map(config: GPTConfig) -> NameMap:
    bias = config.add_bias_linear
    kinds = ("weight", "bias") if bias else ("weight",)
    layer: list[Rule] = [*norms(NORMS, bias=True), *norms(MATRICES, bias=bias)]
    layer += [_query_key_value(config, kind) for kind in kinds]
    if config.position_embedding_type == "learned_absolute":
        layer.append(Same("embedding.position_embeddings.weight", "position_embd.weight"))
    if config.embedding_layernorm:
        layer += norms({"embedding.layernorm": "token_embd_norm"}, bias=True, ours="", theirs="")
    return decoder_map(config, layer, norm_bias=True)


def _query_key_value(config: GPTConfig, kind: str) -> Rule:
    separate = HUGGING_FACE.model_type(config) in SEPARATE
    theirs = tuple(f"{THEIRS}attn_{part}.{kind}" for part in (("q", "k", "v") if separate else ("qkv",)))
    ours = f"{OURS}self_attention.linear_qkv.{kind}"
    return GroupedQKV(ours, theirs, groups=config.query_groups, heads=config.num_attention_heads)


# -- configuration -----------------------------------------------------------------------------------

DEFAULT_LENGTH = 2048
"""Context of models that have no table of positions and do not say what they were trained with."""
GPT2_KEYS = (
    Key("block_count", "n_layer"),
    Key("context_length", "n_positions"),
    Key("embedding_length", "n_embd"),
    Key("attention.head_count", "n_head"),
    Key("attention.layer_norm_epsilon", "layer_norm_epsilon", float),
    Key("feed_forward_length", "n_inner"),
)


def _shared(metadata: Metadata) -> dict[str, Any]:
    return {
        "vocab_size": metadata.shape("token_embd.weight")[0],
        "tie_word_embeddings": not metadata.has_tensor("output.weight"),
    }


def read_gpt2(metadata: Metadata) -> dict[str, Any]:
    return {**_shared(metadata), "activation_function": "gelu_new"}


def write_gpt2(external: External) -> dict[str, Any]:
    require(external, "activation_function", ("gelu_new", "gelu_pytorch_tanh"), "gpt2")
    require(external, "scale_attn_by_inverse_layer_idx", (False, None), "gpt2")
    return {"vocab_size": external["vocab_size"]}


def read_starcoder(metadata: Metadata) -> dict[str, Any]:
    return {**_shared(metadata), "activation_function": "gelu_pytorch_tanh", "multi_query": True}


def write_starcoder(external: External) -> dict[str, Any]:
    require(external, "multi_query", (True,), "starcoder")
    return {**write_gpt2(external), "attention.head_count_kv": 1}


def read_bloom(metadata: Metadata) -> dict[str, Any]:
    return _shared(metadata)


def write_bloom(external: External) -> dict[str, Any]:
    require(external, "apply_residual_connection_post_layernorm", (False, None), "bloom")
    width = external["hidden_size"]
    sizes = {"context_length": DEFAULT_LENGTH, "feed_forward_length": 4 * width, "vocab_size": external["vocab_size"]}
    return {**sizes, "attention.head_count_kv": external["n_head"]}


def read_neox(metadata: Metadata) -> dict[str, Any]:
    head_dim = metadata.need("embedding_length", int) // metadata.need("attention.head_count", int)
    return {
        **_shared(metadata),
        "hidden_act": "gelu",
        "rotary_pct": metadata.need("rope.dimension_count", int) / head_dim,
        "rotary_emb_base": metadata.get("rope.freq_base", float) or 10000.0,
        "use_parallel_residual": bool(metadata.get("use_parallel_residual", bool)),
    }


def write_neox(external: External) -> dict[str, Any]:
    head_dim = external["hidden_size"] // external["num_attention_heads"]
    return {
        "context_length": external.get("max_position_embeddings") or DEFAULT_LENGTH,
        "vocab_size": external["vocab_size"],
        "rope.dimension_count": int(external["rotary_pct"] * head_dim),
        "rope.freq_base": float(external["rotary_emb_base"]),
        "use_parallel_residual": bool(external["use_parallel_residual"]),
        # llama.cpp wants the key, and alibi's bias to be off.
        "attention.max_alibi_bias": 0.0,
    }


def read_nemotron(metadata: Metadata) -> dict[str, Any]:
    heads = metadata.need("attention.head_count", int)
    head_dim = metadata.get("attention.key_length", int) or metadata.need("embedding_length", int) // heads
    return {
        **_shared(metadata),
        "num_key_value_heads": metadata.get("attention.head_count_kv", int) or heads,
        "head_dim": head_dim,
        "partial_rotary_factor": metadata.need("rope.dimension_count", int) / head_dim,
        "rope_theta": metadata.get("rope.freq_base", float) or 10000.0,
        "max_position_embeddings": metadata.need("context_length", int),
        "hidden_act": "relu2",
        "mlp_bias": metadata.has_tensor("blk.0.ffn_up.bias"),
        "attention_bias": metadata.has_tensor("blk.0.attn_q.bias"),
    }


def write_nemotron(external: External) -> dict[str, Any]:
    require(external, "hidden_act", ("relu2",), "nemotron")
    head_dim = external.get("head_dim") or external["hidden_size"] // external["num_attention_heads"]
    return {
        "context_length": external.get("max_position_embeddings") or DEFAULT_LENGTH,
        "attention.head_count_kv": external["num_key_value_heads"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "vocab_size": external["vocab_size"],
        "rope.dimension_count": int(external["partial_rotary_factor"] * head_dim),
        "rope.freq_base": float(_base(external)),
    }


def _base(external: External) -> float:
    table: Mapping[str, Any] = external.get("rope_parameters") or external
    return float(table.get("rope_theta", 10000.0))


DECODER_KEYS = (
    Key("block_count", "num_hidden_layers"),
    Key("embedding_length", "hidden_size"),
    Key("attention.head_count", "num_attention_heads"),
    Key("feed_forward_length", "intermediate_size"),
)
BLOOM_KEYS = (
    Key("block_count", "n_layer"),
    Key("embedding_length", "hidden_size"),
    Key("attention.head_count", "n_head"),
    Key("attention.layer_norm_epsilon", "layer_norm_epsilon", float),
)
ARCHITECTURES = (
    GGUFArchitecture("gpt2", "gpt2", GPT2_KEYS, read_gpt2, write_gpt2),
    GGUFArchitecture("starcoder", "gpt_bigcode", GPT2_KEYS, read_starcoder, write_starcoder),
    GGUFArchitecture("bloom", "bloom", BLOOM_KEYS, read_bloom, write_bloom),
    GGUFArchitecture(
        "gptneox",
        "gpt_neox",
        (*DECODER_KEYS, Key("attention.layer_norm_epsilon", "layer_norm_eps", float)),
        read_neox,
        write_neox,
    ),
    GGUFArchitecture(
        "nemotron",
        "nemotron",
        (*DECODER_KEYS, Key("attention.layer_norm_epsilon", "norm_eps", float)),
        read_nemotron,
        write_nemotron,
    ),
)

GGUF = GGUFFamily(family="gpt", architectures=ARCHITECTURES, name_map=name_map, copies=tied_output)
