"""Names and metadata that decoders share in GGUF."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mt_core.errors import ConfigError
from mt_core.name_map import Concatenate, GroupedQKV, NameMap, Rule, Same
from mt_models.blocks.config import DecoderConfig
from mt_models.blocks.moe import MoEOptions
from mt_models.gguf import ExpertHalves, External, Key, Metadata, NeighboursQKV, require

OURS = "decoder.layers.{i}."
THEIRS = "blk.{i}."
FREQUENCIES = "rope_freqs.weight"
"""What each frequency is divided by, of Llama 3's scaling."""


# -- tensors -----------------------------------------------------------------------------------------


def tied_output(config: Any) -> Mapping[str, str]:
    """`copies`: some files repeat the tied embedding as LM head."""
    return {} if config.untie_embeddings_and_output_weights else {"output.weight": "token_embd.weight"}


def decoder_map(
    config: Any,
    layer: list[Rule],
    *,
    norm_bias: bool = False,
    norm_rule: type[Rule] = Same,
    final_norm: str = "output_norm",
    ignored: Sequence[str] = (),
) -> NameMap:
    """Embedding, final norm and LM head, around the rules of a layer. ignored: tensors of the file that no parameter
    holds."""
    rules: list[Rule] = [
        Same("embedding.word_embeddings.weight", "token_embd.weight"),
        *layer,
        *norms({"decoder.final_layernorm": final_norm}, bias=norm_bias, ours="", theirs="", rule=norm_rule),
    ]
    if config.untie_embeddings_and_output_weights:
        rules.append(Same("output_layer.weight", "output.weight"))
    return NameMap(rules, config.num_layers, ignored=[FREQUENCIES, *ignored])


def norms(
    names: Mapping[str, str], *, bias: bool = False, ours: str = OURS, theirs: str = THEIRS, rule: type[Rule] = Same
) -> list[Rule]:
    """Our name -> the file's, within a layer."""
    kinds = ("weight", "bias") if bias else ("weight",)
    return [
        rule(f"{ours}{canonical}.{kind}", f"{theirs}{external}.{kind}")
        for canonical, external in names.items()
        for kind in kinds
    ]


PRE_NORMS = {"input_layernorm": "attn_norm", "pre_mlp_layernorm": "ffn_norm"}
NORMS_BEHIND_ATTENTION = {**PRE_NORMS, "pre_mlp_layernorm": "post_attention_norm"}
"""The same, where llama.cpp has another name for the second."""
BRANCH_NORMS = {"post_self_attn_layernorm": "post_attention_norm", "post_mlp_layernorm": "post_ffw_norm"}
QK_NORMS = {"self_attention.q_layernorm": "attn_q_norm", "self_attention.k_layernorm": "attn_k_norm"}


def attention(
    config: DecoderConfig, *, bias: bool = False, output_bias: bool = False, neighbours: bool = False
) -> list[Rule]:
    """neighbours: the architecture rotates neighbouring channels."""
    kind_of_rule = NeighboursQKV if neighbours else GroupedQKV
    rules: list[Rule] = [
        kind_of_rule(
            f"{OURS}self_attention.linear_qkv.{kind}",
            tuple(f"{THEIRS}attn_{part}.{kind}" for part in "qkv"),
            groups=config.query_groups,
            heads=config.num_attention_heads,
        )
        for kind in (("weight", "bias") if bias else ("weight",))
    ]
    return [*rules, *norms({"self_attention.linear_proj": "attn_output"}, bias=output_bias)]


def feed_forward(*, bias: bool = False) -> list[Rule]:
    kinds = ("weight", "bias") if bias else ("weight",)
    halves = [
        Concatenate(f"{OURS}mlp.linear_fc1.{kind}", (f"{THEIRS}ffn_gate.{kind}", f"{THEIRS}ffn_up.{kind}"))
        for kind in kinds
    ]
    return [*halves, *norms({"mlp.linear_fc2": "ffn_down"}, bias=bias)]


def experts(moe: MoEOptions, *, bias: bool = False) -> list[Rule]:
    """The router and the experts of a layer, the shared one and its gate if there are any."""
    kinds = ("weight", "bias") if bias else ("weight",)
    rules: list[Rule] = norms({"mlp.router": "ffn_gate_inp", "mlp.experts.linear_fc2": "ffn_down_exps"}, bias=bias)
    for kind in kinds:
        halves = (f"{THEIRS}ffn_gate_exps.{kind}", f"{THEIRS}ffn_up_exps.{kind}")
        rules.append(ExpertHalves(f"{OURS}mlp.experts.linear_fc1.{kind}", halves))
    if moe["moe_router_enable_expert_bias"]:
        rules.append(Same(f"{OURS}mlp.router.expert_bias", f"{THEIRS}exp_probs_b.bias"))
    if moe.shared_size is not None:
        halves = (f"{THEIRS}ffn_gate_shexp.weight", f"{THEIRS}ffn_up_shexp.weight")
        rules.append(Concatenate(f"{OURS}mlp.shared_experts.linear_fc1.weight", halves))
        rules.append(Same(f"{OURS}mlp.shared_experts.linear_fc2.weight", f"{THEIRS}ffn_down_shexp.weight"))
    return rules


@dataclass(frozen=True)
class SharedGate(Rule):
    """The gate of a shared expert: [1, hidden] here, [hidden] there."""

    def import_value(self, tensors: Any) -> Tensor:
        return torch.as_tensor(tensors[0]).reshape(1, -1)

    def export_value(self, tensor: Tensor) -> Any:
        return [tensor.reshape(-1)]


def mixed_feed_forward(config: DecoderConfig) -> list[Rule]:
    """The feed-forwards of all layers, MoE or dense."""
    moe = MoEOptions(config)
    return [
        rule.for_layer(number)
        for number, sparse in enumerate(moe.layers)
        for rule in (experts(moe) if sparse else feed_forward())
    ]


# -- configuration -----------------------------------------------------------------------------------

SIZES = (
    Key("block_count", "num_hidden_layers"),
    Key("embedding_length", "hidden_size"),
    Key("attention.head_count", "num_attention_heads"),
    Key("context_length", "max_position_embeddings"),
)
FEED_FORWARD = Key("feed_forward_length", "intermediate_size")
EPSILON = Key("attention.layer_norm_rms_epsilon", "rms_norm_eps", float)
DENSE = (*SIZES, FEED_FORWARD, EPSILON)
SOFTMAX, SIGMOID = 1, 2
"""Values of expert_gating_func."""
EXPERT_COUNTS = (Key("expert_used_count", "num_experts_per_tok"),)
GRANITE_FACTORS = (
    Key("embedding_scale", "embedding_multiplier", float),
    Key("attention.scale", "attention_multiplier", float),
    Key("residual_scale", "residual_multiplier", float),
    Key("logit_scale", "logits_scaling", float),
)
ROPE_BASE = 10000.0
"""Where the file has no rope.freq_base."""


def head_size(external: External) -> int:
    return int(external.get("head_dim") or external["hidden_size"] // external["num_attention_heads"])


def read_shape(metadata: Metadata, groups: int | None = None) -> dict[str, Any]:
    """Heads, vocabulary, tying and rotary positions. groups: key-value heads, where the file has a list of them."""
    heads = metadata.need("attention.head_count", int)
    head_dim = metadata.get("attention.key_length", int) or metadata.need("embedding_length", int) // heads
    return {
        "vocab_size": metadata.shape("token_embd.weight")[0],
        "num_key_value_heads": groups or metadata.get("attention.head_count_kv", int) or heads,
        "head_dim": head_dim,
        # llama.cpp leaves the LM head out where it is tied to the embedding.
        "tie_word_embeddings": not metadata.has_tensor("output.weight"),
        **read_rope(metadata, head_dim),
    }


def read_even_shape(metadata: Metadata) -> dict[str, Any]:
    """read_shape of a class without a field for the size of a head."""
    values = read_shape(metadata)
    del values["head_dim"]
    return values


def read_attention_scale(metadata: Metadata, head_dim: int) -> dict[str, Any]:
    """Granite's factor of scores. Files hold 32 bits of it: where they are those of 1 / sqrt(head_dim), that is meant,
    which other formats need not say."""
    scale, usual = metadata.need("attention.scale", float), head_dim**-0.5
    rounded, expected = torch.tensor([scale, usual], dtype=torch.float32).tolist()
    return {"attention_multiplier": usual if rounded == expected else scale}


def refuse_window(external: External, architecture: str) -> None:
    """Raises ConfigError for a window within the context, which the architecture does not compute."""
    window, length = external.get("sliding_window"), external["max_position_embeddings"]
    if window is not None and window < length:
        raise ConfigError(
            f"model.sliding_window={window} cannot be written as GGUF of the architecture {architecture}, which has no "
            f"windows; set model.max_position_embeddings={length} to at most that, where the window has no effect"
        )


def require_scaling(external: External, allowed: Sequence[str], architecture: str) -> None:
    """Raises ConfigError for scaled rotary positions of a type that the architecture does not compute."""
    kind = (external.get("rope_scaling") or {}).get("rope_type", "default")
    if kind not in allowed:
        raise ConfigError(
            f"rope_scaling.rope_type={kind} cannot be written as GGUF of the architecture {architecture}; it can be "
            f"{', '.join(allowed)}"
        )


def write_query_scaling(table: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """Queries that grow with their positions, and the factor of YaRN beside them. table: `rope_parameters`."""
    values: dict[str, Any] = {
        "attention.temperature_scale": float(table["llama_4_scaling_beta"]),
        "attention.temperature_length": table["original_max_position_embeddings"],
    }
    if table.get("mscale") and table.get("mscale_all_dim"):
        require({"rope_parameters.mscale": table["mscale"]}, "rope_parameters.mscale", (1.0,), architecture)
        values["rope.scaling.yarn_log_multiplier"] = float(table["mscale_all_dim"])
    return values


def write_shape(external: External) -> dict[str, Any]:
    head_dim = head_size(external)
    return {
        "attention.head_count_kv": external.get("num_key_value_heads") or external["num_attention_heads"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "vocab_size": external["vocab_size"],
        "rope.dimension_count": head_dim,
        **write_rope(external),
    }


# -- rotary positions --------------------------------------------------------------------------------


def read_rope(metadata: Metadata, head_dim: int) -> dict[str, Any]:
    base = metadata.get("rope.freq_base", float)
    base = ROPE_BASE if base is None else base
    return {"rope_theta": base, "rope_scaling": _read_scaling(metadata, base, head_dim)}


def _read_scaling(metadata: Metadata, base: float, head_dim: int) -> dict[str, Any] | None:
    # Before the type: llama.cpp writes "none", or nothing, beside the factors of Llama 3.
    if metadata.has_tensor(FREQUENCIES):
        return _llama3_scaling(metadata.tensor(FREQUENCIES), base, head_dim)
    kind = metadata.get("rope.scaling.type", str) or "none"
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise ConfigError(f"rope.scaling.type={kind!r} is not supported; it can be none, linear or yarn")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": float(metadata.need("rope.scaling.factor", float))}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = metadata.need("rope.scaling.original_context_length", int)
        for theirs, ours in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
            if (value := metadata.get(f"rope.scaling.{theirs}", float)) is not None:
                scaling[ours] = value
    return scaling


def write_rope(external: External) -> dict[str, Any]:
    base = {"rope.freq_base": float(external["rope_theta"])}
    scaling = external.get("rope_scaling") or {}
    kind = scaling.get("rope_type", "default")
    if kind in ("default", "llama3"):  # llama3: see frequency_factors
        return base
    if kind not in ("linear", "yarn"):
        raise ConfigError(f"rope_scaling.rope_type={kind} cannot be written as GGUF; it can be linear, yarn or llama3")
    written = {**base, "rope.scaling.type": kind, "rope.scaling.factor": float(scaling["factor"])}
    if kind == "yarn":
        _require_usual_attention_factor(scaling)
        written["rope.scaling.original_context_length"] = scaling["original_max_position_embeddings"]
        for theirs, ours in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
            if scaling.get(ours) is not None:
                written[f"rope.scaling.{theirs}"] = float(scaling[ours])
    return written


def _require_usual_attention_factor(scaling: Mapping[str, Any]) -> None:
    """Raises ConfigError for a factor of YaRN's cosines and sines that does not follow from its other one."""
    stated, usual = scaling.get("attention_factor"), 0.1 * math.log(scaling["factor"]) + 1.0
    if stated is not None and not math.isclose(stated, usual, rel_tol=1e-6):
        raise ConfigError(
            f"rope_scaling.attention_factor={stated} cannot be written as GGUF, which has none; it can be "
            f"0.1 ln(factor) + 1 = {usual}, or null"
        )


def _llama3_scaling(factors: Tensor, base: float, head_dim: int) -> dict[str, Any]:
    """Llama 3's scaling, of which llama.cpp stores what each frequency is divided by.

    Raises ConfigError unless the published parameters give exactly these numbers.
    """
    for original in (8192, 4096, 2048, 1024, 512, 256, 128, 64, 32):
        scaling = {
            "rope_type": "llama3",
            "factor": float(factors.max()),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": original,
        }
        expected = llama3_factors(scaling, base, head_dim)
        if expected.shape == factors.shape and torch.allclose(expected, factors, rtol=1e-4):
            return scaling
    raise ConfigError(f"{FREQUENCIES} holds factors that are not those of Llama 3 with a factor of {factors.max():g}")


def llama3_factors(scaling: Mapping[str, Any], base: float, head_dim: int) -> Tensor:
    """What each of the head_dim / 2 frequencies is divided by (The Llama 3 Herd of Models, 2024)."""
    factors = []
    low, high, factor = (scaling[key] for key in ("low_freq_factor", "high_freq_factor", "factor"))
    for channel in range(0, head_dim, 2):
        # Rotations of the channel within the original context: below low_freq_factor it is scaled wholly, above
        # high_freq_factor not, between them in part.
        turns = scaling["original_max_position_embeddings"] / (2 * math.pi * base ** (channel / head_dim))
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        factors.append(1 / ((1 - smooth) / factor + smooth))
    return torch.tensor(factors)


def frequency_factors(external: External) -> Mapping[str, Tensor]:
    """`further`: the factors of Llama 3's scaling."""
    scaling = external.get("rope_scaling") or {}
    if scaling.get("rope_type") != "llama3":
        return {}
    return {FREQUENCIES: llama3_factors(scaling, float(external["rope_theta"]), head_size(external))}
