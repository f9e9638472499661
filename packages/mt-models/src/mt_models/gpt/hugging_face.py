"""GPT-2, GPTBigCode (multi-query), BLOOM (ALiBi), GPT-NeoX (parallel residual) and dense Nemotron in Hugging Face's
format.

A GPT that is equivalent to a Llama or a Qwen is exported as that, and is imported as that family.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mt_core.config.schema import ModelConfig
from mt_core.errors import ConfigError
from mt_core.name_map import GroupedQKV, NameMap, Rule, Same, Transpose
from mt_models.gpt import nemotron
from mt_models.gpt.config import FACTORS, GPTConfig
from mt_models.gpt.hugging_face_config import CONFIG_MAPS
from mt_models.gpt.hugging_face_relatives import RELATIVES, Relative
from mt_models.hugging_face import HuggingFaceFamily, per_layer

KINDS = ("weight", "bias")
OURS = "decoder.layers.{i}."


@dataclass(frozen=True)
class Names:
    """Names of the parts in one of the formats; `block` is the prefix of a layer, `stem` of the model."""

    stem: str
    block: str
    words: str
    positions: str | None
    embedding_norm: str | None
    first_norm: str
    second_norm: str
    qkv: str
    projection: str
    fc1: str
    fc2: str
    final_norm: str
    output: str


GPT2_NAMES = Names(
    stem="transformer.",
    block="h.{i}.",
    words="wte",
    positions="wpe",
    embedding_norm=None,
    first_norm="ln_1",
    second_norm="ln_2",
    qkv="attn.c_attn",
    projection="attn.c_proj",
    fc1="mlp.c_fc",
    fc2="mlp.c_proj",
    final_norm="ln_f",
    output="lm_head",
)
BLOOM_NAMES = Names(
    stem="transformer.",
    block="h.{i}.",
    words="word_embeddings",
    positions=None,
    embedding_norm="word_embeddings_layernorm",
    first_norm="input_layernorm",
    second_norm="post_attention_layernorm",
    qkv="self_attention.query_key_value",
    projection="self_attention.dense",
    fc1="mlp.dense_h_to_4h",
    fc2="mlp.dense_4h_to_h",
    final_norm="ln_f",
    output="lm_head",
)
NEOX_NAMES = Names(
    stem="gpt_neox.",
    block="layers.{i}.",
    words="embed_in",
    positions=None,
    embedding_norm=None,
    first_norm="input_layernorm",
    second_norm="post_attention_layernorm",
    qkv="attention.query_key_value",
    projection="attention.dense",
    fc1="mlp.dense_h_to_4h",
    fc2="mlp.dense_4h_to_h",
    final_norm="final_layer_norm",
    output="embed_out",
)
NAMES = {"gpt2": GPT2_NAMES, "gpt_bigcode": GPT2_NAMES, "bloom": BLOOM_NAMES, "gpt_neox": NEOX_NAMES}

BUFFERS = {
    "gpt2": ("attn.bias", "attn.masked_bias"),
    "gpt_bigcode": ("attn.bias", "attn.masked_bias"),
    "bloom": (),
    "gpt_neox": ("attention.bias", "attention.masked_bias", "attention.rotary_emb.inv_freq"),
}
"""Buffers (masks, frequencies) that older versions stored with each layer."""


def name_map(config: GPTConfig) -> NameMap:
    if (relative := relative_of(config)) is not None:
        # A GPT with a Llama's layers has the same canonical names, so that the other family's rules apply as they are.
        return relative.family.name_map(relative.translate(config))
    kind = model_type_of(config)
    if kind == nemotron.MODEL_TYPE:
        return nemotron.name_map(config)
    names = NAMES[kind]
    block = names.stem + names.block
    rules: list[Rule] = [Same("embedding.word_embeddings.weight", f"{names.stem}{names.words}.weight")]
    if names.positions is not None:
        rules.append(Same("embedding.position_embeddings.weight", f"{names.stem}{names.positions}.weight"))
    rules += _norm_rules(names)
    rules += [_qkv_rule(config, kind, part, block + names.qkv) for part in KINDS]
    rules += _matrix_rules(names, Transpose if kind == "gpt2" else Same)
    if config.untie_embeddings_and_output_weights:
        rules.append(Same("output_layer.weight", f"{names.output}.weight"))
    return NameMap(rules, config.num_layers, ignored=per_layer([block + x for x in BUFFERS[kind]], config.num_layers))


def _norm_rules(names: Names) -> list[Rule]:
    block = names.stem + names.block
    norms = {
        f"{OURS}input_layernorm": block + names.first_norm,
        f"{OURS}pre_mlp_layernorm": block + names.second_norm,
        "decoder.final_layernorm": names.stem + names.final_norm,
    }
    if names.embedding_norm is not None:
        norms["embedding.layernorm"] = names.stem + names.embedding_norm
    return [Same(f"{ours}.{part}", f"{theirs}.{part}") for ours, theirs in norms.items() for part in KINDS]


def _matrix_rules(names: Names, matrix: type[Rule]) -> list[Rule]:
    """matrix: Transpose for GPT-2, whose Conv1D stores [in, out]."""
    rules: list[Rule] = []
    for ours, theirs in (
        ("self_attention.linear_proj", names.projection),
        ("mlp.linear_fc1", names.fc1),
        ("mlp.linear_fc2", names.fc2),
    ):
        stem = names.stem + names.block + theirs
        rules += [matrix(f"{OURS}{ours}.weight", f"{stem}.weight"), Same(f"{OURS}{ours}.bias", f"{stem}.bias")]
    return rules


def _qkv_rule(config: GPTConfig, kind: str, part: str, theirs: str) -> Rule:
    """GPT-2 and GPTBigCode store all queries, then keys, then values; BLOOM and GPT-NeoX group by head, as we do."""
    names = (f"{OURS}self_attention.linear_qkv.{part}", f"{theirs}.{part}")
    if kind in ("bloom", "gpt_neox"):
        # [heads, (q, k, v), head size] there: with one query head for each group this is the canonical order.
        return Same(*names)
    heads, groups = config.num_attention_heads, config.query_groups
    return GroupedQKV(*names, groups=groups, heads=heads, transposed=kind == "gpt2")


def copies(config: GPTConfig) -> Mapping[str, str]:
    if (relative := relative_of(config)) is not None:
        return relative.family.copies(relative.translate(config))
    tied = not config.untie_embeddings_and_output_weights
    kind = model_type_of(config)
    if kind == nemotron.MODEL_TYPE:
        return {f"{nemotron.OUTPUT}.weight": f"{nemotron.STEM}embed_tokens.weight"} if tied else {}
    names = NAMES[kind]
    return {f"{names.output}.weight": f"{names.stem}{names.words}.weight"} if tied else {}


def spelling(config: GPTConfig, name: str) -> str:
    """GPT-2's own files leave out `transformer.`; transformers 5 calls GPT-NeoX's output lm_head in memory."""
    if (relative := relative_of(config)) is not None:
        return relative.family.spelling(relative.translate(config), name)
    kind = model_type_of(config)
    if kind == "gpt_neox":
        return name.replace("lm_head.", "embed_out.")
    if kind == nemotron.MODEL_TYPE:
        return name
    names = NAMES[kind]
    return name if name.startswith((names.stem, names.output)) else names.stem + name


class GPTFamily(HuggingFaceFamily):
    """Exports a GPT that is equivalent to a model of another family as one."""

    def write_config(self, config: ModelConfig) -> dict[str, Any]:
        assert isinstance(config, GPTConfig)
        relative = relative_of(config)
        if relative is None:
            return super().write_config(config)
        return relative.family.write_config(relative.translate(config))


# -- what a configuration is written as -------------------------------------------------------------


Demands = Mapping[str, tuple[Any, ...]]
"""Keys of [model] and the values that a format can express."""


def model_type_of(config: GPTConfig) -> str:
    """One of the five. Raises ConfigError, with the reasons, for a GPT that none of them can express."""
    demands = _demands(config)
    kind = _first_fit(config, demands)
    if kind is None:
        raise _nothing_fits(config, demands)
    return kind


def relative_of(config: GPTConfig) -> Relative | None:
    """Which other family's format a GPT is written in, None: in one of the five.

    Raises ConfigError, with the reasons, for a GPT that no format can express.
    """
    demands, others = _demands(config), {kind: relative.demands for kind, relative in RELATIVES.items()}
    # Own formats come first, so that a GPT that was imported as one is exported as one.
    if _first_fit(config, demands) is not None:
        return None
    first_fit = _first_fit(config, others)
    if first_fit is None:
        raise _nothing_fits(config, {**demands, **others})
    return RELATIVES[first_fit]


def _demands(config: GPTConfig) -> dict[str, Demands]:
    heads = config.num_attention_heads
    # These formats have no key for a head's size: it may be stated only if it is the quotient.
    head_sizes = (None,) if config.hidden_size % heads else (None, config.hidden_size // heads)
    common: Demands = {**_COMMON, "kv_channels": head_sizes}
    multi_head: Demands = {"num_query_groups": (None, heads)}
    return {
        "gpt2": {**_LEARNED, **common, **multi_head},
        "gpt_bigcode": {**_LEARNED, **common, "num_query_groups": (1,)},
        "bloom": {**_ALIBI, **common, **multi_head},
        "gpt_neox": {**_ROTARY, **common, **multi_head},
        nemotron.MODEL_TYPE: nemotron.DEMANDS,
    }


def _first_fit(config: GPTConfig, demands: Mapping[str, Demands]) -> str | None:
    return next((kind for kind, wanted in demands.items() if _obstacle(config, wanted) is None), None)


def _obstacle(config: GPTConfig, demands: Demands) -> str | None:
    """The first key that a format cannot express, as a message."""
    for key, values in demands.items():
        value = getattr(config, key)
        if value not in values:
            return f"model.{key}={value}; it can be {' or '.join(str(legal) for legal in values)}"
    return None


def _nothing_fits(config: GPTConfig, demands: Mapping[str, Demands]) -> ConfigError:
    # Formats that fail for the same reason are named together.
    kinds: dict[str | None, list[str]] = {}
    for kind, wanted in demands.items():
        kinds.setdefault(_obstacle(config, wanted), []).append(kind)
    tried = ", ".join(f"{' and '.join(names)} ({reason})" for reason, names in kinds.items())
    return ConfigError(f"this {config.family} cannot be written in Hugging Face's format; tried: {tried}")


_COMMON: Demands = {
    "normalization": ("LayerNorm",),
    "qk_layernorm": (False,),
    "add_bias_linear": (True,),
    "moe": (None,),
    "parallel_residual_norms": (2,),
    **FACTORS,
}
_PLAIN: Demands = {"embedding_layernorm": (False,), "activation": ("gelu", "gelu_tanh", "relu", "silu")}
_LEARNED: Demands = {"position_embedding_type": ("learned_absolute",), "parallel_residual": (False,), **_PLAIN}
_ALIBI: Demands = {
    "position_embedding_type": ("alibi",),
    "embedding_layernorm": (True,),
    "parallel_residual": (False,),
    "activation": ("gelu_tanh",),
}
_ROTARY: Demands = {"position_embedding_type": ("rope",), "rotary_interleaved": (False,), **_PLAIN}


HUGGING_FACE = GPTFamily(
    family="gpt",
    model_types={**CONFIG_MAPS, nemotron.MODEL_TYPE: nemotron.CONFIG_MAP},
    name_map=name_map,
    model_type_of=model_type_of,
    copies=copies,
    spelling=spelling,
    architectures={
        "gpt2": "GPT2LMHeadModel",
        "gpt_bigcode": "GPTBigCodeForCausalLM",
        "bloom": "BloomForCausalLM",
        "gpt_neox": "GPTNeoXForCausalLM",
        nemotron.MODEL_TYPE: "NemotronForCausalLM",
    },
)
