"""How the families are mapped to Megatron-Core's arguments.

Families of one set differ in the values of the same arguments; mt-ckpt writes and reads the sets.
"""

from __future__ import annotations

from mt_core.name_map import MegatronMap

GPT = MegatronMap(arguments="gpt")
ROTARY = MegatronMap(arguments="rotary")
"""Llama-like families, dense or with experts."""
GRANITE_MOE = MegatronMap(arguments="granite")
GPT_OSS = MegatronMap(arguments="gpt_oss")
DEEPSEEK = MegatronMap(arguments="latent")
MAMBA = MegatronMap(arguments="mamba")
HYBRID = MegatronMap(arguments="hybrid")
BERT = MegatronMap(arguments="bert")
T5 = MegatronMap(arguments="t5")

GEMMA = MegatronMap(
    unsupported="Megatron has its zero-centered norms (apply_layernorm_1p), but no norms behind attention and "
    "feed-forward, no gated tanh GELU, no rotary base for each kind of layer and no scale on token embeddings"
)
OLMOE = MegatronMap(
    unsupported="Megatron normalizes queries and keys head by head, this family over all heads together"
)
RETRO = MegatronMap(
    unsupported="Megatron-Core removed RETRO in January 2026, and its chunked attention had other parameters"
)
BIENCODER = MegatronMap(
    unsupported="Megatron-Core never had two encoders in one checkpoint; Megatron-LM removed its biencoder"
)
VISION = MegatronMap(unsupported="Megatron-Core has image towers only within a model of images and text")
LLAVA = MegatronMap(
    unsupported="Megatron's models of images and text are made by its example scripts, in sizes that these list by "
    "name; all their projections have a norm in front or another inner width than the decoder's, and which id stands "
    "for an image only their tokenizer says"
)
IMAGE_TILES = MegatronMap(
    unsupported="Megatron's models of images and text are made by its example scripts, in sizes that these list by "
    "name, and which id stands for an image only their tokenizer says"
)
QWEN_VL = MegatronMap(unsupported="Megatron-Core has no vision transformer with windows and rotary positions")
HEADS = MegatronMap(unsupported="Megatron-Core has no heads that choose a class or a text")
