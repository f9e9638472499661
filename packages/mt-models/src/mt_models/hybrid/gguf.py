"""Hybrids in GGUF: NemotronH with and without experts, GraniteMoeHybrid."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mt_core.errors import ConfigError
from mt_core.name_map import GroupedQKV, NameMap, Rule, Same
from mt_models.blocks.gguf_decoder import (
    EPSILON,
    GRANITE_FACTORS,
    OURS,
    SIGMOID,
    THEIRS,
    attention,
    decoder_map,
    experts,
    feed_forward,
    norms,
    tied_output,
)
from mt_models.blocks.gguf_mamba import mixer
from mt_models.blocks.hugging_face_moe import BIAS_KEY
from mt_models.blocks.moe import MoEOptions
from mt_models.gguf import External, GGUFArchitecture, GGUFFamily, Key, Metadata, require
from mt_models.hybrid import granite
from mt_models.hybrid.config import ATTENTION, EXPERTS, FEED_FORWARD, MAMBA, HybridConfig
from mt_models.hybrid.nemotron_h import NORMS

GROUPS, WIDTHS = "attention.head_count_kv", "feed_forward_length"
"""One for each layer: 0 for layers without attention, or without a feed-forward."""
CONTEXT = 1 << 20
"""Where a model does not say for which length it was trained."""


def name_map(config: HybridConfig) -> NameMap:
    rules = granite_rules(config) if granite.fits(config) else nemotron_rules(config)
    return decoder_map(config, rules)


def moved(rule: Rule, ours: int, theirs: int) -> Rule:
    """The rule of a layer that has another number there."""
    names = tuple(name.replace("{i}", str(theirs)) for name in rule.sources)
    return replace(rule, ours=rule.ours.replace("{i}", str(ours)), theirs=names)


# -- GraniteMoeHybrid: a block and a feed-forward are two layers here, one there ------------------------


def granite_rules(config: HybridConfig) -> list[Rule]:
    second = feed_forward() if config.moe is None else experts(MoEOptions(config))
    rules: list[Rule] = []
    for number, kind in enumerate(config.layers[0::2]):
        norm = "norm" if kind == MAMBA else "input_layernorm"
        # Neighbours are paired in the file even where no position rotates them.
        block = mixer(config) if kind == MAMBA else attention(config, neighbours=True)  # type: ignore[arg-type]
        rules += [moved(rule, 2 * number, number) for rule in (*norms({norm: "attn_norm"}), *block)]
        behind = (*norms({"pre_mlp_layernorm": "ffn_norm"}), *second)
        rules += [moved(rule, 2 * number + 1, number) for rule in behind]
    return rules


def read_granite(metadata: Metadata) -> dict[str, Any]:
    groups, rotates = metadata.numbers(GROUPS), metadata.get("rope.scaling.finetuned", bool)
    experts_there = metadata.get("expert_count", int) or 0
    width = metadata.get("expert_shared_feed_forward_length", int) or metadata.need(WIDTHS, int)
    return {
        **_read_mixers(metadata, "mamba_expand", "mamba_d_head"),
        "num_key_value_heads": max(groups),
        "layer_types": ["attention" if number else "mamba" for number in groups],
        "shared_intermediate_size": width,
        "intermediate_size": metadata.need(WIDTHS, int),
        "num_local_experts": experts_there,
        "num_experts_per_tok": metadata.get("expert_used_count", int) or 0,
        "position_embedding_type": None if rotates is False else "rope",
        "rope_theta": metadata.get("rope.freq_base", float) or 10000.0,
    }


def write_granite(external: External) -> dict[str, Any]:
    _require_mixers(external, "mamba_conv_bias", "mamba_proj_bias", "granitehybrid")
    require(external, "time_step_limit", ([0.0, float("inf")],), "granitehybrid")
    kinds, groups = list(external["layer_types"]), external["num_key_value_heads"]
    if "mamba" not in kinds:
        raise ConfigError("a granitemoehybrid without mamba layers cannot be written as GGUF; use granite")
    size = external["hidden_size"] // external["num_attention_heads"]
    values = {
        "context_length": external.get("max_position_embeddings") or CONTEXT,
        GROUPS: [groups if kind == "attention" else 0 for kind in kinds],
        WIDTHS: external["intermediate_size"],
        "vocab_size": external["vocab_size"],
        "ssm.inner_size": external["mamba_expand"] * external["hidden_size"],
        "rope.dimension_count": size,
        "rope.scaling.finetuned": external["position_embedding_type"] == "rope",
        "rope.freq_base": float(external.get("rope_theta", 10000.0)),
    }
    if external["num_local_experts"]:
        values |= {
            "expert_count": external["num_local_experts"],
            "expert_used_count": external["num_experts_per_tok"],
            "expert_shared_feed_forward_length": external["shared_intermediate_size"],
        }
    return values


# -- NemotronH: a layer is one block ---------------------------------------------------------------------


def nemotron_rules(config: HybridConfig) -> list[Rule]:
    qkv = GroupedQKV(
        f"{OURS}self_attention.linear_qkv.weight",
        tuple(f"{THEIRS}attn_{part}.weight" for part in "qkv"),
        groups=config.query_groups,
        heads=config.num_attention_heads,
    )
    blocks: dict[str, list[Rule]] = {
        MAMBA: mixer(config),
        ATTENTION: [qkv, *norms({"self_attention.linear_proj": "attn_output"})],
        FEED_FORWARD: norms({"mlp.linear_fc1": "ffn_up", "mlp.linear_fc2": "ffn_down"}),
        EXPERTS: [] if config.moe is None else ungated_experts(MoEOptions(config)),
    }
    return [
        rule.for_layer(number)
        for number, kind in enumerate(config.layers)
        for rule in (*norms({NORMS[kind]: "attn_norm"}), *blocks[kind])
    ]


def ungated_experts(moe: MoEOptions) -> list[Rule]:
    names = {
        "mlp.router": "ffn_gate_inp",
        "mlp.experts.linear_fc1": "ffn_up_exps",
        "mlp.experts.linear_fc2": "ffn_down_exps",
        "mlp.shared_experts.linear_fc1": "ffn_up_shexp",
        "mlp.shared_experts.linear_fc2": "ffn_down_shexp",
    }
    if moe["moe_latent_size"]:
        names |= {"mlp.fc1_latent_proj": "ffn_latent_down", "mlp.fc2_latent_proj": "ffn_latent_up"}
    bias = [Same(f"{OURS}mlp.router.expert_bias", f"{THEIRS}exp_probs_b.bias")]
    return [*norms(names), *(bias if moe["moe_router_enable_expert_bias"] else [])]


def read_nemotron(metadata: Metadata) -> dict[str, Any]:
    groups, widths = metadata.numbers(GROUPS), metadata.numbers(WIDTHS)
    heads = metadata.need("ssm.time_step_rank", int)
    return {
        **_read_mixers(metadata, None, "mamba_head_dim"),
        "mamba_num_heads": heads,
        "num_key_value_heads": max(groups),
        "head_dim": metadata.get("attention.key_length", int)
        or metadata.need("embedding_length", int) // metadata.need("attention.head_count", int),
        "intermediate_size": max(widths),
        "hybrid_override_pattern": "".join(_kind(metadata, i, groups[i], widths[i]) for i in range(len(groups))),
        "mlp_hidden_act": "relu2",
        "time_step_min": 0.0,
    }


def _kind(metadata: Metadata, layer: int, groups: int, width: int) -> str:
    if groups:
        return ATTENTION
    if metadata.has_tensor(f"blk.{layer}.ffn_gate_inp.weight"):
        return EXPERTS
    return FEED_FORWARD if width else MAMBA


def read_nemotron_moe(metadata: Metadata) -> dict[str, Any]:
    return {
        **read_nemotron(metadata),
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": bool(metadata.get("expert_weights_norm", bool)),
        "moe_latent_size": metadata.get("moe_latent_size", int),
    }


def write_nemotron(external: External) -> dict[str, Any]:
    _require_mixers(external, "use_conv_bias", "use_bias", "nemotron_h")
    require(external, "mlp_hidden_act", ("relu2",), "nemotron_h")
    pattern, groups = external["hybrid_override_pattern"], external["num_key_value_heads"]
    widths = {FEED_FORWARD: external["intermediate_size"], EXPERTS: external.get("moe_intermediate_size")}
    return {
        "context_length": external.get("max_position_embeddings") or CONTEXT,
        GROUPS: [groups if kind == ATTENTION else 0 for kind in pattern],
        WIDTHS: [widths.get(kind, 0) for kind in pattern],
        "vocab_size": external["vocab_size"],
        # llama.cpp asks for both kinds of norms, and uses that of RMSNorm.
        "attention.layer_norm_epsilon": float(external["layer_norm_epsilon"]),
        "attention.key_length": external["head_dim"],
        "attention.value_length": external["head_dim"],
        "rope.dimension_count": external["head_dim"],
        "ssm.inner_size": external["mamba_num_heads"] * external["mamba_head_dim"],
    }


def write_nemotron_moe(external: External) -> dict[str, Any]:
    require(external, "n_group", (1,), "nemotron_h_moe")
    require(external, BIAS_KEY, (True, None), "nemotron_h_moe")
    latent = external.get("moe_latent_size")
    return {
        **write_nemotron(external),
        "expert_shared_count": 1,
        "expert_group_count": 1,
        "expert_group_used_count": 1,
        "expert_weights_norm": bool(external["norm_topk_prob"]),
        "expert_gating_func": SIGMOID,
        **({} if latent is None else {"moe_latent_size": latent}),
    }


# -- mixers ------------------------------------------------------------------------------------------


def _read_mixers(metadata: Metadata, expand: str | None, head: str) -> dict[str, Any]:
    inner, heads = metadata.need("ssm.inner_size", int), metadata.need("ssm.time_step_rank", int)
    return {
        "vocab_size": metadata.shape("token_embd.weight")[0],
        "tie_word_embeddings": not metadata.has_tensor("output.weight"),
        head: inner // heads,
        **({expand: inner // metadata.need("embedding_length", int)} if expand else {}),
    }


def _require_mixers(external: External, convolution: str, projection: str, architecture: str) -> None:
    require(external, convolution, (True,), architecture)
    require(external, projection, (False,), architecture)


SIZES = (
    Key("block_count", "num_hidden_layers"),
    Key("embedding_length", "hidden_size"),
    Key("attention.head_count", "num_attention_heads"),
    Key("context_length", "max_position_embeddings"),
)


def _mixer_keys(kernel: str, state: str, heads: str, groups: str) -> tuple[Key, ...]:
    return (
        Key("ssm.conv_kernel", kernel),
        Key("ssm.state_size", state),
        Key("ssm.time_step_rank", heads),
        Key("ssm.group_count", groups),
    )


GRANITE = GGUFArchitecture(
    name="granitehybrid",
    model_type=granite.KIND,
    keys=(
        *SIZES,
        EPSILON,
        *GRANITE_FACTORS,
        *_mixer_keys("mamba_d_conv", "mamba_d_state", "mamba_n_heads", "mamba_n_groups"),
    ),
    read=read_granite,
    write=write_granite,
)
NEMOTRON_KEYS = (
    *SIZES,
    Key("attention.layer_norm_rms_epsilon", "layer_norm_epsilon", float),
    *_mixer_keys("conv_kernel", "ssm_state_size", "mamba_num_heads", "n_groups"),
)
NEMOTRON = GGUFArchitecture(
    name="nemotron_h",
    model_type="nemotron_h",
    keys=NEMOTRON_KEYS,
    read=read_nemotron,
    write=write_nemotron,
    predicts=False,
)
NEMOTRON_MOE = GGUFArchitecture(
    name="nemotron_h_moe",
    model_type="nemotron_h",
    predicts=False,
    keys=(
        *NEMOTRON_KEYS,
        Key("expert_count", "n_routed_experts"),
        Key("expert_used_count", "num_experts_per_tok"),
        Key("expert_feed_forward_length", "moe_intermediate_size"),
        Key("expert_shared_feed_forward_length", "moe_shared_expert_intermediate_size"),
        Key("expert_weights_scale", "routed_scaling_factor", float, 1.0),
    ),
    read=read_nemotron_moe,
    write=write_nemotron_moe,
    applies=lambda external: bool(external.get("n_routed_experts")),
)

GGUF = GGUFFamily(
    family="hybrid", architectures=(NEMOTRON_MOE, NEMOTRON, GRANITE), name_map=name_map, copies=tied_output
)
