"""ModernBERT in GGUF: the encoder, without a head of masked words."""

from __future__ import annotations

from typing import Any

from mt_core.errors import ConfigError
from mt_core.name_map import GroupedQKV, NameMap, Rule, Same
from mt_models.blocks.gguf_decoder import THEIRS, norms
from mt_models.gguf import External, GGUFArchitecture, GGUFFamily, Key, Metadata, require
from mt_models.modernbert.config import ModernBertConfig

OURS = "encoder.layers.{i}."
AROUND = {"embedding.layernorm": "token_embd_norm", "encoder.final_layernorm": "output_norm"}
MATRICES = {
    "self_attention.linear_proj": "attn_output",
    "pre_mlp_layernorm": "ffn_norm",
    "mlp.linear_fc1": "ffn_up",  # what the activation is applied to comes first
    "mlp.linear_fc2": "ffn_down",
}
WITHOUT_HEAD = ["ModernBertModel"]
ACTIVATION = "hidden_activation"


def name_map(config: ModernBertConfig) -> NameMap:
    heads = config.num_attention_heads
    qkv = f"{OURS}self_attention.linear_qkv.weight", f"{THEIRS}attn_qkv.weight"
    rules: list[Rule] = [
        Same("embedding.word_embeddings.weight", "token_embd.weight"),
        *norms(AROUND, ours="", theirs=""),
        *norms(MATRICES, ours=OURS),
        GroupedQKV(*qkv, groups=heads, heads=heads),
    ]
    # The first layer has no norm before attention.
    for layer in range(1, config.num_layers):
        rules += [rule.for_layer(layer) for rule in norms({"input_layernorm": "attn_norm"}, ours=OURS)]
    return NameMap(rules, config.num_layers)


# -- configuration -----------------------------------------------------------------------------------


def read(metadata: Metadata) -> dict[str, Any]:
    return {
        "architectures": WITHOUT_HEAD,
        "vocab_size": metadata.shape("token_embd.weight")[0],
        "global_attn_every_n_layers": metadata.get("attention.sliding_window_pattern", int) or 3,
        "global_rope_theta": metadata.get("rope.freq_base", float) or 160000.0,
        "local_rope_theta": metadata.get("rope.freq_base_swa", float) or 10000.0,
        ACTIVATION: metadata.get(ACTIVATION, str) or "gelu",
    }


def write(external: External) -> dict[str, Any]:
    if external["architectures"] != WITHOUT_HEAD:
        raise ConfigError(
            "model.add_lm_head=true: GGUF of the architecture modern-bert has no head of masked words; a model without "
            "one can be written, as transformers' ModernBertModel"
        )
    for key in ("norm_bias", "attention_bias", "mlp_bias"):
        require(external, key, (False,), "modern-bert")
    require(external, ACTIVATION, ("gelu", "silu"), "modern-bert")
    return {
        "vocab_size": external["vocab_size"],
        "attention.causal": False,
        "attention.sliding_window_pattern": external["global_attn_every_n_layers"],
        "rope.freq_base": float(external["global_rope_theta"]),
        "rope.freq_base_swa": float(external["local_rope_theta"]),
        "rope.scaling.type": "none",
        ACTIVATION: external[ACTIVATION],
    }


MODERN_BERT = GGUFArchitecture(
    name="modern-bert",
    model_type="modernbert",
    keys=(
        Key("block_count", "num_hidden_layers"),
        Key("context_length", "max_position_embeddings"),
        Key("embedding_length", "hidden_size"),
        Key("feed_forward_length", "intermediate_size"),
        Key("attention.head_count", "num_attention_heads"),
        Key("attention.layer_norm_epsilon", "norm_eps", float),
        Key("attention.sliding_window", "local_attention"),
    ),
    read=read,
    write=write,
)

GGUF = GGUFFamily(family="modernbert", architectures=(MODERN_BERT,), name_map=name_map)
