"""Kimi K3 in Hugging Face's format, `kimi_k3`: the decoder of files that hold it beside an image tower.

transformers has no class for it. Names and keys are those of published files, in which the decoder's are within
`language_model` and `text_config`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mt_core.config_map import ConfigMap, Field, Fixed
from mt_core.errors import CheckpointError, ConfigError
from mt_core.name_map import NameMap, Rule, Same
from mt_models.blocks.hugging_face_decoder import (
    OURS,
    PRE_NORMS,
    ROPE_KEYS,
    THEIRS,
    decoder_fields,
    decoder_name_map,
    feed_forward_rules,
    norm_rules,
)
from mt_models.blocks.hugging_face_moe import BIAS_KEY, MOE_IGNORED, expert_rules, first_dense
from mt_models.blocks.hugging_face_tower import OF_PICTURES, TOWER_KEYS
from mt_models.blocks.moe import ANY, MoEOptions
from mt_models.deepseek import hugging_face as deepseek
from mt_models.hugging_face import IGNORED, HuggingFaceFamily, require_value
from mt_models.kimi_k3.config import KimiK3Config
from mt_models.kimi_linear import hugging_face as kimi_linear

KIND, TEXT_KIND = "kimi_k3", "kimi_linear"
"""The type of a file, and that of its decoder, whose keys are those of Kimi Linear and further ones."""


# -- tensors -----------------------------------------------------------------------------------------

NAMES = replace(
    kimi_linear.NAMES,
    latent_down=f"{kimi_linear.MOE}routed_expert_down_proj.weight",
    latent_up=f"{kimi_linear.MOE}routed_expert_up_proj.weight",
)
WITHIN = "language_model."
TOWER = frozenset({"vision_tower.*", "mm_projector.*"})
PADDED = 128
"""Published files have A_log of 96 heads in 128 numbers, zeros behind those of heads."""


@dataclass(frozen=True)
class PaddedHeads(Rule):
    """[heads] here, there with zeros behind them up to a multiple of 128. heads: how many there are."""

    heads: int = 1

    def import_value(self, tensors: Sequence[Tensor]) -> Tensor:
        rates, padding = tensors[0][: self.heads], tensors[0][self.heads :]
        # Meta tensors carry shapes only: a plan of a conversion reads no values.
        if not padding.is_meta and padding.count_nonzero():
            raise CheckpointError(f"{self.sources[0]} has numbers behind those of its {self.heads} heads")
        return rates

    def export_value(self, tensor: Tensor) -> Sequence[Tensor]:
        return [nn.functional.pad(tensor, (0, -len(tensor) % PADDED))]


@dataclass(frozen=True)
class NormAndQuery(Rule):
    """The weight of a norm [H] and a query [1, H] there; end to end here."""

    def import_value(self, tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat([tensor.flatten() for tensor in tensors])

    def export_value(self, tensor: Tensor) -> Sequence[Tensor]:
        norm_weight, query = tensor.chunk(2)
        return [norm_weight.contiguous(), query[None].contiguous()]


def name_map(config: KimiK3Config) -> NameMap:
    rules: list[Rule] = []
    for number, linear in enumerate(config.linear_layers):
        block = _delta_rules(config) if linear else _latent_rules(config)
        layer = (*norm_rules(PRE_NORMS), *_residual_rules(), *block, *_feed_forward(config, number))
        rules += [rule.for_layer(number) for rule in layer]
    names = decoder_name_map(config, rules)
    inner = [rule for rule in names.rules if rule.ours != "decoder.final_layernorm.weight"]
    return NameMap([_within(rule) for rule in (*inner, *_output_rules())], 0, TOWER)


def _within(rule: Rule) -> Rule:
    return replace(rule, theirs=tuple(WITHIN + name for name in rule.sources), others=())


def _delta_rules(config: KimiK3Config) -> list[Rule]:
    rates = partial(PaddedHeads, heads=config.linear_num_key_heads)
    return kimi_linear.delta_rules(config, rates, {"gate_proj.weight": "g_proj.weight"})


def _latent_rules(config: KimiK3Config) -> list[Rule]:
    gate = Same(f"{OURS}self_attention.linear_gate.weight", f"{THEIRS}self_attn.g_proj.weight")
    return [*deepseek.latent_rules(config), gate]


def _residual_rules() -> list[Rule]:
    names = {"attention_residual": "self_attention", "mlp_residual": "mlp"}
    return [_residual(OURS + ours, THEIRS + theirs) for ours, theirs in names.items()]


def _residual(ours: str, theirs: str) -> Rule:
    return NormAndQuery(f"{ours}.weight", tuple(f"{theirs}_res_{part}.weight" for part in ("norm", "proj")))


def _output_rules() -> list[Rule]:
    output = "decoder.final_layernorm."
    return [Same(f"{output}norm.weight", "model.norm.weight"), _residual(f"{output}residual", "model.output_attn")]


def _feed_forward(config: KimiK3Config, number: int) -> list[Rule]:
    if config.moe is None or not MoEOptions(config).layers[number]:
        return feed_forward_rules()
    moe = MoEOptions(config)
    rules = expert_rules(moe, NAMES, always_biased=True)
    if moe["moe_latent_size"] is None:
        return rules
    norm = Same(f"{OURS}mlp.combined_layernorm.weight", f"{THEIRS}{kimi_linear.MOE}routed_expert_norm.weight")
    return [*rules, norm]


def spelling(config: KimiK3Config, name: str) -> str:
    """Files of the decoder alone have no prefix."""
    return re.sub(r"^(?=(model|lm_head)\.)", WITHIN, name)


# -- configuration of the decoder --------------------------------------------------------------------

TABLE, BOUND, FULL_RANK = kimi_linear.TABLE, "gate_lower_bound", "use_full_rank_gate"
TABLE_KEYS = (*kimi_linear.DELTA_KEYS.values(), "kda_layers", "full_attn_layers", BOUND, FULL_RANK)
LATENT = "routed_expert_hidden_size"


def import_text(external: Mapping[str, Any]) -> dict[str, Any]:
    table = external.get(TABLE) or {}
    _require_table(table)
    values = kimi_linear.import_extra({"routed_scaling_factor": 1.0, **external})
    if (bound := table.get(BOUND)) is not None:
        values["linear_decay_lower_bound"] = float(bound)
    if "moe" in values and external.get(LATENT) is not None:
        values["moe"]["moe_latent_size"] = external[LATENT]
    return values


def _require_table(table: Mapping[str, Any]) -> None:
    """Raises ConfigError for a table without the kinds of layers, with another gate, or with unknown keys."""
    if missing := [key for key in ("kda_layers", "full_attn_layers", FULL_RANK) if key not in table]:
        raise ConfigError(f"{TABLE} has no {', '.join(missing)}, which say what layers are")
    if unknown := sorted(set(table) - set(TABLE_KEYS)):
        raise ConfigError(f"{TABLE} has keys that are not known: {', '.join(unknown)}")
    if not table[FULL_RANK]:
        raise ConfigError(f"{TABLE}.{FULL_RANK}={table[FULL_RANK]} is not supported; it can be true")


def export_text(model: Mapping[str, Any]) -> dict[str, Any]:
    config = KimiK3Config.model_validate(model)
    require_value(config, "normalization", ("RMSNorm",), KIND)
    require_value(config, "untie_embeddings_and_output_weights", (True,), KIND)
    require_value(config, "latent_epsilon", (deepseek.NORM_EPSILON,), KIND)
    bound = config.linear_decay_lower_bound
    if config.moe is not None:
        first_dense(MoEOptions(config), KIND)  # raises for what the number, the only key here, cannot say
    experts = kimi_linear.export_experts(config, KIND, moe_latent_size=ANY)
    return {
        TABLE: {**kimi_linear.export_table(config), FULL_RANK: True, BOUND: bound},
        "num_key_value_heads": config.num_attention_heads,
        "intermediate_size": config.ffn_size,
        **{key: value for key, value in experts.items() if key != deepseek.KINDS},
        LATENT: None if config.moe is None else MoEOptions(config)["moe_latent_size"],
    }


SPELLINGS = {key: name for key, name in kimi_linear.SPELLINGS.items() if key != "max_position_embeddings"}
TEXT = ConfigMap(
    architecture=KIND,
    fields=(
        *(
            entry
            for entry in decoder_fields(tied=False, positions=1048576, epsilon=1e-5)
            if entry.theirs != "tie_word_embeddings"
        ),
        *deepseek.FIELDS,
        Field("attn_res_block_size", "residual_block_size", default=12),
        Field("activation_situ_beta", "situ_beta", import_value=float, default=4.0),
        Field("activation_situ_linear_beta", "situ_linear_beta", import_value=float, default=25.0),
    ),
    fixed=(
        Fixed("hidden_act", ("situ",)),
        Fixed("attention_bias", (False,), written=False),
        Fixed("tie_word_embeddings", (False,)),
        Fixed("mla_use_nope", (True,)),
        Fixed("mla_use_output_gate", (True,)),
        Fixed("latent_moe_use_norm", (True,)),
        Fixed("moe_router_activation_func", ("sigmoid",)),
        Fixed("moe_layer_freq", (1,)),
        Fixed("topk_method", ("noaux_tc",)),
        Fixed("use_grouped_topk", (True,)),
        Fixed("num_nextn_predict_layers", (0,)),
    ),
    ignored={
        **IGNORED,
        **MOE_IGNORED,
        **dict.fromkeys((*ROPE_KEYS, "rope_interleave"), kimi_linear.NO_POSITIONS),
        "head_dim": "the heads' sizes are other fields",
    },
    import_extra=import_text,
    import_extra_keys=(
        TABLE, LATENT, "num_key_value_heads", "first_k_dense_replace", BIAS_KEY, "num_experts",
        "num_experts_per_token", "num_shared_experts", "moe_intermediate_size", "moe_renormalize",
        "routed_scaling_factor", "num_expert_group", "topk_group",
    ),
    export_extra=export_text,
    spellings={**SPELLINGS, "model_max_length": "max_position_embeddings"},
)  # fmt: skip


# -- configuration of a file -------------------------------------------------------------------------


def import_file(external: Mapping[str, Any]) -> dict[str, Any]:
    text = external.get("text_config")
    if not isinstance(text, Mapping):
        raise ConfigError(f"text_config={text!r} is not the configuration of a decoder, which a {KIND} has there")
    if (kind := text.get("model_type", TEXT_KIND)) != TEXT_KIND:
        raise ConfigError(f"text_config.model_type={kind!r} is not supported; it can be {TEXT_KIND!r}")
    return TEXT.import_value(text)


def export_file(model: Mapping[str, Any]) -> dict[str, Any]:
    text = {"architectures": ["KimiLinearForCausalLM"], "model_type": TEXT_KIND, **TEXT.export_value(model)}
    return {"text_config": text}


OF_FILES = ("media_placeholder_token_id", "image_placeholder", "use_unified_vision_chunk", "ignore_index")
KIMI_K3 = ConfigMap(
    architecture=KIND,
    fields=(),
    fixed=(Fixed("tie_word_embeddings", (False,)),),
    ignored={**IGNORED, **dict.fromkeys((*TOWER_KEYS, *OF_FILES), OF_PICTURES)},
    import_extra=import_file,
    import_extra_keys=("text_config",),
    export_extra=export_file,
)

HUGGING_FACE = HuggingFaceFamily(
    family="kimi_k3",
    model_types={KIND: KIMI_K3},
    name_map=name_map,
    spelling=spelling,
    architectures={KIND: "KimiK3ForConditionalGeneration"},
)
