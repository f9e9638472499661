"""RWKV-7 in GGUF."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mt_core.errors import ConfigError
from mt_core.name_map import NameMap, Rule, Same
from mt_models.blocks.gguf_decoder import OURS, THEIRS, norms
from mt_models.gguf import External, GGUFArchitecture, GGUFFamily, Key, Metadata, Reshaped, require
from mt_models.rwkv7.config import Rwkv7Config

AROUND = {"embedding.layernorm": "token_embd_norm", "decoder.final_layernorm": "output_norm"}
NORMS = {
    "input_layernorm": "attn_norm",
    "pre_mlp_layernorm": "attn_norm_2",
    "time_mixing.out_norm": "time_mix_ln",
}
MIXING = {
    "key_scale": "k_k",
    "key_rate": "k_a",
    "linear_r.weight": "receptance",
    "linear_k.weight": "key",
    "linear_v.weight": "value",
    "linear_proj.weight": "output",
    "decay.down.weight": "w1",
    "decay.up.weight": "w2",
    "decay.up.bias": "w0",
    "rate.down.weight": "a1",
    "rate.up.weight": "a2",
    "rate.up.bias": "a0",
    "gate.down.weight": "g1",
    "gate.up.weight": "g2",
}
VALUE_MIX = {"down.weight": "v1", "up.weight": "v2", "up.bias": "v0"}
CHANNELS = {"mix": "lerp_k", "linear_fc1.weight": "key", "linear_fc2.weight": "value"}
HEAD_EPSILON = 64e-5
"""What llama.cpp adds to the variance of heads."""


def name_map(config: Rwkv7Config) -> NameMap:
    mixing = f"{OURS}time_mixing."
    rules: list[Rule] = [
        Same("embedding.word_embeddings.weight", "token_embd.weight"),
        *norms(AROUND, bias=True, ours="", theirs=""),
        *norms(NORMS, bias=True),
        *(Same(mixing + ours, f"{THEIRS}time_mix_{theirs}.weight") for ours, theirs in MIXING.items()),
        *(Same(f"{OURS}mlp.{ours}", f"{THEIRS}channel_mix_{theirs}.weight") for ours, theirs in CHANNELS.items()),
        # [6, hidden] and [heads, size] here.
        Reshaped(
            f"{mixing}mix",
            f"{THEIRS}time_mix_lerp_fused.weight",
            here=(config.hidden_size,),
            there=(1, 1, config.hidden_size),
        ),
        Reshaped(f"{mixing}bonus", f"{THEIRS}time_mix_r_k.weight", here=(config.head_size,)),
    ]
    rules += [
        Same(f"{mixing}value_mix.{ours}", f"{THEIRS}time_mix_{theirs}.weight").for_layer(layer)
        for layer in range(1, config.num_layers)
        for ours, theirs in VALUE_MIX.items()
    ]
    if config.untie_embeddings_and_output_weights:
        rules.append(Same("output_layer.weight", "output.weight"))
    return NameMap(rules, config.num_layers, ignored=[f"blk.0.time_mix_{name}.weight" for name in VALUE_MIX.values()])


def unused_mix(external: External) -> Mapping[str, Tensor]:
    """`further`: the mix of the first layer's values, which has none before it, and which llama.cpp asks for."""
    hidden, rank = external["hidden_size"], external["a_low_rank_dim"]
    shapes = {"v0": (hidden,), "v1": (rank, hidden), "v2": (hidden, rank)}
    return {f"blk.0.time_mix_{name}.weight": torch.zeros(shape) for name, shape in shapes.items()}


# -- configuration -----------------------------------------------------------------------------------


def read(metadata: Metadata) -> dict[str, Any]:
    return {
        "vocab_size": metadata.shape("token_embd.weight")[0],
        "tie_word_embeddings": not metadata.has_tensor("output.weight"),
    }


def write(external: External) -> dict[str, Any]:
    require(external, "tie_word_embeddings", (False,), "rwkv7")
    epsilon = external["norm_eps"] * external["head_dim"]
    if not math.isclose(epsilon, HEAD_EPSILON):
        raise ConfigError(
            f"norm_eps={external['norm_eps']} with head_dim={external['head_dim']} cannot be written as GGUF of the "
            f"architecture rwkv7, whose norms of heads add {HEAD_EPSILON} to the variance; their product has to be that"
        )
    return {"attention.head_count": 0, "vocab_size": external["vocab_size"]}


RWKV7 = GGUFArchitecture(
    name="rwkv7",
    model_type="rwkv7",
    keys=(
        Key("block_count", "num_hidden_layers"),
        Key("embedding_length", "hidden_size"),
        Key("context_length", "max_position_embeddings"),
        Key("feed_forward_length", "intermediate_size"),
        Key("attention.layer_norm_epsilon", "norm_eps", float),
        Key("wkv.head_size", "head_dim"),
        Key("attention.decay_lora_rank", "decay_low_rank_dim"),
        Key("attention.iclr_lora_rank", "a_low_rank_dim"),
        Key("attention.value_residual_mix_lora_rank", "v_low_rank_dim"),
        Key("attention.gate_lora_rank", "gate_low_rank_dim"),
    ),
    read=read,
    write=write,
    further=unused_mix,
)

GGUF = GGUFFamily(family="rwkv7", architectures=(RWKV7,), name_map=name_map)
