"""LongCat-Flash in Hugging Face's format, `longcat_flash`.

transformers 5 gives the experts that return the token a gate and an up matrix, which it never reads and without which
it loads no file; published files have none. They are written as zeros, and files with and without them are read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mt_core.config_map import ConfigMap, Field, Fixed
from mt_core.errors import ConfigError
from mt_core.name_map import Concatenate, NameMap, Rule, Same
from mt_models.blocks.hugging_face_decoder import (
    OURS,
    PRE_NORMS,
    ROPE_KEYS,
    THEIRS,
    decoder_fields,
    decoder_name_map,
    export_rope,
    import_rope,
    norm_rules,
)
from mt_models.blocks.hugging_face_moe import (
    BIAS_KEY,
    MOE_IGNORED,
    SILU,
    ExpertNames,
    StackedExperts,
    expert_rules,
    export_bias,
    import_bias,
)
from mt_models.blocks.moe import ANY, MoEOptions
from mt_models.deepseek import hugging_face as deepseek
from mt_models.hugging_face import IGNORED, NOT_A_CHOICE, HuggingFaceFamily, require_value, tied_output
from mt_models.longcat_flash.config import SUBLAYERS, LongcatFlashConfig

KIND = "longcat_flash"

# -- tensors -----------------------------------------------------------------------------------------

NAMES = ExpertNames(
    router="mlp.router.classifier.weight",
    stacked_router="mlp.router.classifier.weight",
    expert_bias="mlp.router.e_score_correction_bias",
)
COUNT, PREDICTED = "num_nextn_predict_layers", "model.mtp.layers.0."
PREDICTION = {
    "enorm": f"{PREDICTED}enorm.m",
    "hnorm": f"{PREDICTED}hnorm.m",
    "eh_proj": f"{PREDICTED}eh_proj",
    "final_layernorm": "model.mtp.norm",
}
"""Parts of the layer of multi-token prediction around the layer itself -> their names in files."""
REPEATED = frozenset({"model.mtp.embed_tokens.*"})
"""The token embeddings, in whose place programs take those of the model."""


@dataclass(frozen=True)
class ExpertsBeforeOthers(StackedExperts):
    """Matrices of the experts that have any, and behind them those of `zeros` experts that return the token, which no
    program reads."""

    zeros: int = 0

    def import_value(self, tensors: Sequence[Tensor]) -> Tensor:
        return super().import_value(tensors[: len(tensors) * self.experts // (self.experts + self.zeros)])

    def export_value(self, tensor: Tensor) -> Sequence[Tensor]:
        matrices = len(self.sources) // (self.experts + self.zeros)
        parts = [part.contiguous() for expert in tensor for part in expert.chunk(matrices)]
        return [*parts, *(torch.zeros_like(parts[0]) for _ in range(matrices * self.zeros))]


@dataclass(frozen=True)
class FirstExperts(Rule):
    """All experts in one tensor, of which the first have been used."""

    experts: int = 1

    def import_value(self, tensors: Sequence[Tensor]) -> Tensor:
        return tensors[0][: self.experts].contiguous()


def name_map(config: LongcatFlashConfig) -> NameMap:
    layer = [rule for place in range(SUBLAYERS) for rule in sublayer_rules(config, place)]
    names = decoder_name_map(config, [*layer, *moe_rules(MoEOptions(config))])
    if not config.mtp_num_layers:
        return NameMap(names.rules, 0, names.ignored | {"model.mtp.*"})
    return NameMap([*names.rules, *_prediction_rules(config)], 0, names.ignored | REPEATED)


def _prediction_rules(config: LongcatFlashConfig) -> list[Rule]:
    ours, mlp = "mtp.layers.0.mtp_model_layer.", f"{PREDICTED}transformer_layer.mlp."
    halves = (f"{mlp}gate_proj.weight", f"{mlp}up_proj.weight")
    layer = [*norm_rules(PRE_NORMS), *deepseek.latent_rules(config)]
    return [
        *(Same(f"mtp.layers.0.{canonical}.weight", f"{external}.weight") for canonical, external in PREDICTION.items()),
        *(Same(rule.ours.replace(OURS, ours), rule.sources[0].replace(THEIRS, PREDICTED)) for rule in layer),
        Concatenate(f"{ours}mlp.linear_fc1.weight", halves),
        Same(f"{ours}mlp.linear_fc2.weight", f"{mlp}down_proj.weight"),
    ]


def left_out_copies(config: LongcatFlashConfig) -> dict[str, str]:
    return {"model.mtp.embed_tokens.weight": "model.embed_tokens.weight"} if config.mtp_num_layers else {}


def held(external: Mapping[str, Any], names: Iterable[str]) -> Mapping[str, Any]:
    """With the layer of multi-token prediction where a file has its tensors, and without it where it has not."""
    return {**external, COUNT: int(any(name.startswith("model.mtp.layers.") for name in names))}


def sublayer_rules(config: LongcatFlashConfig, place: int) -> list[Rule]:
    """The rules of attention number `place` of a layer, its feed-forward and their norms."""
    ours, theirs = f"sublayers.{place}.", f"{THEIRS}mlps.{place}."
    norms = {
        f"{ours}input_layernorm": f"input_layernorm.{place}",
        f"{ours}pre_mlp_layernorm": f"post_attention_layernorm.{place}",
    }
    attention = [
        Same(rule.ours.replace(OURS, OURS + ours), rule.sources[0].replace("self_attn.", f"self_attn.{place}."))
        for rule in deepseek.latent_rules(config)
    ]
    halves = (f"{theirs}gate_proj.weight", f"{theirs}up_proj.weight")
    return [
        *norm_rules(norms),
        *attention,
        Concatenate(f"{OURS}{ours}mlp.linear_fc1.weight", halves),
        Same(f"{OURS}{ours}mlp.linear_fc2.weight", f"{theirs}down_proj.weight"),
    ]


def moe_rules(moe: MoEOptions) -> list[Rule]:
    rules = expert_rules(moe, NAMES, always_biased=True)
    zeros = moe["moe_num_zero_experts"]
    return [_with_others(rule, zeros) if rule.ours.endswith("experts.linear_fc1.weight") else rule for rule in rules]


def _with_others(rule: Rule, zeros: int) -> Rule:
    """Gate and up matrices: written for experts that return the token too, read without them and in one tensor."""
    assert isinstance(rule, StackedExperts)
    if not zeros:
        return rule
    numbers = range(rule.experts, rule.experts + zeros)
    names = [f"{THEIRS}{half}".replace("{e}", str(e)) for e in numbers for half in (NAMES.gate, NAMES.up)]
    whole = FirstExperts(rule.ours, rule.others[0].sources, experts=rule.experts)
    published = replace(rule, others=())
    return ExpertsOrFewer(
        rule.ours, (*rule.sources, *names), rule.experts, others=(published, whole), zeros=zeros, unread=tuple(names)
    )


@dataclass(frozen=True)
class ExpertsOrFewer(ExpertsBeforeOthers):
    """The same, chosen where a file has some of `unread`, matrices that no program reads; else a form of `others`."""

    unread: tuple[str, ...] = ()

    def for_layer(self, layer: int) -> Rule:
        rule = super().for_layer(layer)
        return replace(rule, unread=tuple(name.replace("{i}", str(layer)) for name in self.unread))  # type: ignore[call-arg]

    def reading(self, names: frozenset[str]) -> Rule:
        if not names.isdisjoint(self.unread):
            return self
        return next((form for form in self.others if not names.isdisjoint(form.sources)), self)


# -- configuration -----------------------------------------------------------------------------------

DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 131072,
    "num_layers": 28,
    "hidden_size": 6144,
    "num_attention_heads": 64,
    "ffn_hidden_size": 12288,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "n_routed_experts": 512,
    "zero_expert_num": 256,
    "moe_topk": 12,
    "expert_ffn_hidden_size": 2048,
    "routed_scaling_factor": 6.0,
    "rms_norm_eps": 1e-5,
}
"""Defaults of the class."""
LAYERS = "num_hidden_layers"


def import_extra(external: Mapping[str, Any]) -> dict[str, Any]:
    stated = {**DEFAULTS, **{key: value for key, value in external.items() if value is not None}}
    heads, rotated = stated["num_attention_heads"], stated["qk_rope_head_dim"]
    for key, only, why in (
        ("num_key_value_heads", heads, "num_attention_heads"),
        ("head_dim", rotated, "qk_rope_head_dim"),
        ("qk_head_dim", stated["qk_nope_head_dim"] + rotated, "qk_nope_head_dim + qk_rope_head_dim"),
        (LAYERS, SUBLAYERS * stated["num_layers"], f"{SUBLAYERS} num_layers"),
    ):
        if stated.get(key, only) != only:
            raise ConfigError(f"{key}={stated[key]} is not supported; it can be {why} = {only}")
    differs = float(stated["rms_norm_eps"]) != deepseek.NORM_EPSILON
    return {
        **import_rope(external, 10000000.0),
        # Norms of latents are built without the configuration's epsilon there.
        **({"latent_norm_epsilon": deepseek.NORM_EPSILON} if differs else {}),
        "moe": _import_experts(stated),
    }


def _import_experts(stated: Mapping[str, Any]) -> dict[str, Any]:
    # null, or a field that is not there, in a file of an older version: there are none.
    zeros = int(stated["zero_expert_num"] or 0)
    if stated["n_routed_experts"] < 1:
        raise ConfigError(f"n_routed_experts={stated['n_routed_experts']} is not supported; it can be 1 or more")
    scale = float(stated["routed_scaling_factor"])
    return {
        "num_experts": stated["n_routed_experts"],
        "moe_num_zero_experts": zeros,
        "moe_router_topk": stated["moe_topk"],
        "moe_ffn_hidden_size": stated["expert_ffn_hidden_size"],
        "moe_router_pre_softmax": True,
        # The class keeps the router's matrix in fp32.
        "moe_router_weight_in_fp32": True,
        "moe_router_load_balancing_type": ["none"],
        **({"moe_router_topk_scaling_factor": scale} if scale != 1.0 else {}),
        **import_bias(stated),
    }


def export_extra(model: Mapping[str, Any]) -> dict[str, Any]:
    config = LongcatFlashConfig.model_validate(model)
    moe = MoEOptions(config)
    require_value(config, "normalization", ("RMSNorm",), KIND)
    if config.latent_epsilon != deepseek.NORM_EPSILON:
        raise ConfigError(
            f"norms of latents with {config.latent_epsilon} cannot be written as a Hugging Face {KIND}; set "
            f"model.latent_norm_epsilon={deepseek.NORM_EPSILON}"
        )
    moe.require(
        KIND,
        moe_num_zero_experts=ANY,
        moe_ffn_hidden_size=ANY,
        moe_router_topk=ANY,
        moe_router_topk_scaling_factor=ANY,
        moe_router_enable_expert_bias=ANY,
        moe_router_pre_softmax=(True,),
        moe_layer_freq=(1, f"([1]*{config.num_layers})"),
    )
    return {
        **export_rope(config),
        **export_bias(moe),
        "num_key_value_heads": config.num_attention_heads,
        "head_dim": config.qk_pos_emb_head_dim,
        "ffn_hidden_size": config.ffn_size,
        "n_routed_experts": moe.num_experts,
        "zero_expert_num": moe["moe_num_zero_experts"],
        "moe_topk": moe.topk,
        "expert_ffn_hidden_size": moe.ffn_size,
        "routed_scaling_factor": moe["moe_router_topk_scaling_factor"] or 1.0,
    }


RENAMED = {"num_hidden_layers": "num_layers", "intermediate_size": "ffn_hidden_size"}
LONGCAT_FLASH = ConfigMap(
    architecture=KIND,
    fields=(
        *(
            Field(
                name := RENAMED.get(field.theirs, field.theirs),
                field.ours,
                field.import_value,
                field.export_value,
                DEFAULTS.get(name, field.default),
            )
            for field in decoder_fields(tied=False, positions=131072, epsilon=1e-5)
        ),
        *(
            Field(field.theirs, field.ours, default=DEFAULTS.get(field.theirs, field.default))
            for field in deepseek.FIELDS
        ),
        Field(COUNT, "mtp_num_layers", import_value=lambda count: int(count or 0), default=0),
    ),
    fixed=(
        SILU,
        Fixed("attention_bias", (False,)),
        # Fields of published files that transformers does not read; others do.
        Fixed("attention_method", ("MLA", "mla")),
        Fixed("mla_scale_q_lora", (True,)),
        Fixed("mla_scale_kv_lora", (True,)),
        Fixed("zero_expert_type", ("identity",)),
        Fixed("router_bias", (False,), written=False),
        Fixed("norm_topk_prob", (False,), written=False),
        *NOT_A_CHOICE,
    ),
    ignored={**IGNORED, **MOE_IGNORED},
    import_extra=import_extra,
    import_extra_keys=(
        *ROPE_KEYS, LAYERS, "num_key_value_heads", "head_dim", "qk_head_dim", "n_routed_experts", "zero_expert_num",
        "moe_topk", "expert_ffn_hidden_size", "routed_scaling_factor", BIAS_KEY,
    ),
    export_extra=export_extra,
    spellings={
        "num_local_experts": "n_routed_experts",
        "num_experts_per_tok": "moe_topk",
        "intermediate_size": "ffn_hidden_size",
        "moe_intermediate_size": "expert_ffn_hidden_size",
    },
)  # fmt: skip

HUGGING_FACE = HuggingFaceFamily(
    family=KIND,
    model_types={KIND: LONGCAT_FLASH},
    name_map=name_map,
    copies=tied_output,
    left_out_copies=left_out_copies,
    held=held,
    architectures={KIND: "LongcatFlashForCausalLM"},
)
