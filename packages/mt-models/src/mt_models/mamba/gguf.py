"""Mamba-2 in GGUF."""

from __future__ import annotations

from typing import Any

from mt_core.name_map import NameMap
from mt_models.blocks.gguf_decoder import decoder_map, norms, tied_output
from mt_models.blocks.gguf_mamba import mixer
from mt_models.gguf import External, GGUFArchitecture, GGUFFamily, Key, Metadata, require
from mt_models.mamba.config import MambaConfig

CONTEXT = 1 << 20
"""A state has no longest sequence; llama.cpp wants a number."""


def name_map(config: MambaConfig) -> NameMap:
    return decoder_map(config, [*norms({"norm": "attn_norm"}), *mixer(config)])


def read(metadata: Metadata) -> dict[str, Any]:
    inner, heads = metadata.need("ssm.inner_size", int), metadata.need("ssm.time_step_rank", int)
    return {
        "vocab_size": metadata.shape("token_embd.weight")[0],
        "tie_word_embeddings": not metadata.has_tensor("output.weight"),
        "head_dim": inner // heads,
        "expand": inner // metadata.need("embedding_length", int),
        "residual_in_fp32": False,
    }


def write(external: External) -> dict[str, Any]:
    require(external, "use_conv_bias", (True,), "mamba2")
    require(external, "use_bias", (False,), "mamba2")
    return {
        "context_length": CONTEXT,
        "feed_forward_length": 0,
        "attention.head_count": 0,
        "vocab_size": external["vocab_size"],
        "ssm.inner_size": external["num_heads"] * external["head_dim"],
    }


MAMBA2 = GGUFArchitecture(
    name="mamba2",
    model_type="mamba2",
    keys=(
        Key("block_count", "num_hidden_layers"),
        Key("embedding_length", "hidden_size"),
        Key("attention.layer_norm_rms_epsilon", "layer_norm_epsilon", float),
        Key("ssm.conv_kernel", "conv_kernel"),
        Key("ssm.state_size", "state_size"),
        Key("ssm.time_step_rank", "num_heads"),
        Key("ssm.group_count", "n_groups"),
    ),
    read=read,
    write=write,
)

GGUF = GGUFFamily(family="mamba", architectures=(MAMBA2,), name_map=name_map, copies=tied_output)
