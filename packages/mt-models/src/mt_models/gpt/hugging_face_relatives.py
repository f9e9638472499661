"""Exports a GPT that is equivalent to a Llama, a Qwen or a Granite as a model of that family.

The parameters have the same canonical names and shapes in both, so that the other family's name map applies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mt_models.blocks.config import DecoderConfig
from mt_models.gpt.config import FACTORS, SAME_KEYS, GPTConfig
from mt_models.granite.config import GraniteConfig
from mt_models.granite.hugging_face import HUGGING_FACE as GRANITE
from mt_models.hugging_face import HuggingFaceFamily
from mt_models.llama.config import LlamaConfig
from mt_models.llama.hugging_face import HUGGING_FACE as LLAMA
from mt_models.qwen.config import QwenConfig
from mt_models.qwen.hugging_face import HUGGING_FACE as QWEN


@dataclass(frozen=True)
class Relative:
    """A family whose format can hold a GPT.

    demands: keys of a GPT's [model] and the values that this takes. translate: from its [model] to the family's.
    """

    family: HuggingFaceFamily
    demands: Mapping[str, tuple[Any, ...]]
    translate: Callable[[GPTConfig], DecoderConfig]


def as_llama(config: GPTConfig) -> LlamaConfig:
    # A GPT has one switch for all biases, a Llama one for attention and one for the feed-forward.
    biased = config.add_bias_linear
    return LlamaConfig(family="llama", attention_bias=biased, mlp_bias=biased, **_decoder_keys(config))


def as_qwen(config: GPTConfig) -> QwenConfig:
    return QwenConfig(
        family="qwen", add_qkv_bias=config.add_qkv_bias, qk_layernorm=config.qk_layernorm, **_decoder_keys(config)
    )


def as_granite(config: GPTConfig) -> GraniteConfig:
    biased = config.add_bias_linear
    return GraniteConfig(
        family="granite",
        attention_bias=biased,
        mlp_bias=biased,
        embedding_multiplier=config.embedding_multiplier,
        attention_multiplier=config.query_scale / math.sqrt(config.head_dim),
        logits_scaling=config.logits_divisor,
        **_decoder_keys(config),
    )


def _decoder_keys(config: GPTConfig) -> dict[str, Any]:
    # ffn_size is written as a number: the default widths of the families differ.
    keys = {**{key: getattr(config, key) for key in SAME_KEYS}, "ffn_hidden_size": config.ffn_size}
    longest = config.max_position_embeddings
    return keys if longest is None else {**keys, "max_position_embeddings": longest}


_DECODER: Mapping[str, tuple[Any, ...]] = {
    "position_embedding_type": ("rope",),
    "normalization": ("RMSNorm",),
    "activation": ("swiglu",),
    "rotary_percent": (1.0,),
    "rotary_interleaved": (False,),
    "embedding_layernorm": (False,),
    "parallel_residual": (False,),
    "hidden_dropout": (0.0,),
    "moe": (None,),
    "mtp_num_layers": (0,),
}
_QWEN: Mapping[str, tuple[Any, ...]] = {**_DECODER, **FACTORS, "add_bias_linear": (False,)}
_NO_QUERY_CHANGES: Mapping[str, tuple[Any, ...]] = {"add_qkv_bias": (False,), "qk_layernorm": (False,)}
RELATIVES: Mapping[str, Relative] = {
    "llama": Relative(LLAMA, {**_DECODER, **FACTORS, **_NO_QUERY_CHANGES}, as_llama),
    "qwen2": Relative(QWEN, {**_QWEN, "add_qkv_bias": (True,), "qk_layernorm": (False,)}, as_qwen),
    "qwen3": Relative(QWEN, {**_QWEN, "add_qkv_bias": (False,), "qk_layernorm": (True,)}, as_qwen),
    "granite": Relative(GRANITE, {**_DECODER, **_NO_QUERY_CHANGES}, as_granite),
}
"""`model_type` -> the values that a GPT needs for it."""
