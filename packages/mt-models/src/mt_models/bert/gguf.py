"""BERT in GGUF: the encoder and the layer over the first position, without heads."""

from __future__ import annotations

from typing import Any

from mt_core.errors import ConfigError
from mt_core.name_map import GroupedQKV, NameMap, Rule, Same
from mt_models.bert.config import BertConfig
from mt_models.blocks.gguf_decoder import THEIRS, norms
from mt_models.gguf import External, GGUFArchitecture, GGUFFamily, Key, Metadata, require

OURS = "encoder.layers.{i}."
LAYER = {
    "self_attention.linear_proj": "attn_output",
    "post_attention_layernorm": "attn_output_norm",
    "mlp.linear_fc1": "ffn_up",
    "mlp.linear_fc2": "ffn_down",
    "post_mlp_layernorm": "layer_output_norm",
}
WITHOUT_HEADS = ["BertModel"]
TYPES, POOLER = "token_types.weight", "cls"


def name_map(config: BertConfig) -> NameMap:
    heads = config.num_attention_heads
    rules: list[Rule] = [
        Same("embedding.word_embeddings.weight", "token_embd.weight"),
        Same("embedding.position_embeddings.weight", "position_embd.weight"),
        *norms({"embedding.layernorm": "token_embd_norm"}, bias=True, ours="", theirs=""),
        *norms(LAYER, bias=True, ours=OURS),
    ]
    for kind in ("weight", "bias"):
        theirs = tuple(f"{THEIRS}attn_{part}.{kind}" for part in "qkv")
        rules.append(GroupedQKV(f"{OURS}self_attention.linear_qkv.{kind}", theirs, groups=heads, heads=heads))
    if config.num_tokentypes:
        rules.append(Same("embedding.tokentype_embeddings.weight", TYPES))
    if config.has_pooler:
        rules += norms({"pooler.dense": POOLER}, bias=True, ours="", theirs="")
    return NameMap(rules, config.num_layers)


# -- configuration -----------------------------------------------------------------------------------


def read(metadata: Metadata) -> dict[str, Any]:
    return {
        "architectures": WITHOUT_HEADS,
        "vocab_size": metadata.shape("token_embd.weight")[0],
        "type_vocab_size": metadata.shape(TYPES)[0] if metadata.has_tensor(TYPES) else 0,
        "hidden_act": "gelu",
        "add_pooling_layer": metadata.has_tensor(f"{POOLER}.weight"),
    }


def write(external: External) -> dict[str, Any]:
    if external["architectures"] != WITHOUT_HEADS:
        raise ConfigError(
            "model.add_lm_head and model.bert_binary_head: GGUF of the architecture bert has no such heads; a model "
            "without them can be written, as transformers' BertModel"
        )
    require(external, "hidden_act", ("gelu", "gelu_new"), "bert")
    return {
        "vocab_size": external["vocab_size"],
        "attention.causal": False,
        # Of the tokenizer's keys, which have no architecture in front.
        "tokenizer.ggml.token_type_count": external["type_vocab_size"],
    }


BERT = GGUFArchitecture(
    name="bert",
    model_type="bert",
    keys=(
        Key("block_count", "num_hidden_layers"),
        Key("context_length", "max_position_embeddings"),
        Key("embedding_length", "hidden_size"),
        Key("feed_forward_length", "intermediate_size"),
        Key("attention.head_count", "num_attention_heads"),
        Key("attention.layer_norm_epsilon", "layer_norm_eps", float),
    ),
    read=read,
    write=write,
)

GGUF = GGUFFamily(family="bert", architectures=(BERT,), name_map=name_map)
