"""Qwen4-Exp's decoder in Hugging Face's format.

Files hold the decoder beside an image tower, which is left out; it is written as the type of the decoder alone,
`qwen4_exp_text`. The tables of n-grams are in several tensors there, beside numbers that follow from the configuration.
The layer of multi-token prediction is `mtp`, as vLLM reads it (vllm/models/qwen4_exp); transformers leaves it out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mt_core.config_map import ConfigMap, Field, Fixed
from mt_core.errors import CheckpointError, ConfigError
from mt_core.name_map import NameMap, Rule, Same
from mt_models.blocks.hugging_face_decoder import (
    FULL,
    OURS,
    QK_NORMS,
    ROPE_KEYS,
    THEIRS,
    decoder_fields,
    export_rope,
    export_shape,
    import_rope,
    norm_rules,
    rope_table,
)
from mt_models.blocks.hugging_face_delta_net import (
    Blocks,
    GatedGroupedQKV,
    export_kinds,
    import_kinds,
    rows_of_key_head,
)
from mt_models.blocks.hugging_face_moe import (
    MOE_IGNORED,
    SILU,
    ExpertNames,
    expert_rules,
    export_balance,
    import_balance,
)
from mt_models.blocks.hugging_face_tower import decoder_within
from mt_models.blocks.moe import ANY, MoEOptions
from mt_models.blocks.ngram_ids import NGramTable
from mt_models.hugging_face import IGNORED, NOT_A_CHOICE, HuggingFaceFamily, tied_output
from mt_models.qwen4_exp.config import Qwen4ExpConfig

TEXT = "qwen4_exp_text"
NAMES = ExpertNames(shared="mlp.shared_expert")
MIXER = {"norm": "hc_norm", "mix_down_proj": "input_mix_weight_down", "mix_up_proj": "input_mix_weight_up"}
CONNECTION = {**MIXER, "inject_proj": "block_inject_weight"}
PREDICTION = {
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "e_proj": "fc_embedding",
    "h_proj": "fc_hidden",
}
"""Parts of the layer of multi-token prediction around the layer itself -> their names in files."""
NGRAMS = {
    "key_proj": "key_proj",
    "value_proj": "value_proj",
    "key_norm": "norm_key",
    "query_norm": "norm_query",
    "conv_norm": "norm_conv",
    "conv": "conv1d",
}
INDEXER = {
    "self_attention.indexer.linear_qk": "self_attn.indexer.index_qk_proj",
    "self_attention.indexer.q_layernorm": "self_attn.indexer.q_layernorm",
    "self_attention.indexer.k_layernorm": "self_attn.indexer.k_layernorm",
}


# -- tensors -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TableParts(Rule):
    """The tables of a layer's n-grams in several tensors there, and behind them their multipliers, sizes and offsets.

    Raises CheckpointError for numbers that are not those of the configuration: the tables would be read elsewhere.
    """

    table: NGramTable | None = None

    def import_value(self, tensors: Sequence[Tensor]) -> Tensor:
        *parts, multipliers, sizes, offsets = tensors
        for tensor, expected, name in zip(
            (multipliers, sizes, offsets), self._numbers(), self.sources[-3:], strict=True
        ):
            # Meta tensors carry shapes only: a plan of a conversion reads no values.
            # Zeros are no numbers: gradients that the map carries have none there.
            if not tensor.is_meta and tensor.any() and tensor.tolist() != list(expected):
                raise CheckpointError(
                    f"{name} is not what the configuration makes of seed, ngram_vocab_size_base, ngram_size and "
                    "heads_per_ngram"
                )
        return torch.cat(list(parts))

    def export_value(self, tensor: Tensor) -> Sequence[Tensor]:
        parts = [part.contiguous() for part in tensor.chunk(len(self.sources) - 3)]
        return [*parts, *(torch.tensor(values, device=tensor.device) for values in self._numbers())]

    def _numbers(self) -> tuple[tuple[int, ...], ...]:
        assert self.table is not None
        return self.table.multipliers, self.table.sizes, self.table.offsets


def name_map(config: Qwen4ExpConfig) -> NameMap:
    rules: list[Rule] = [Same("embedding.word_embeddings.weight", "model.embed_tokens.weight")]
    rules += [rule for number in range(config.num_layers) for rule in _layer_rules(config, number)]
    rules += _matrices("decoder.final_layernorm.", "model.hyper_connection_mixer.", MIXER)
    if config.untie_embeddings_and_output_weights:
        rules.append(Same("output_layer.weight", "lm_head.weight"))
    # The image tower, which this family does not have.
    if not config.mtp_num_layers:
        return NameMap(rules, 0, {"model.visual.*", "mtp.*"})
    return NameMap([*rules, *_prediction_rules(config)], 0, {"model.visual.*"})


def _layer_rules(config: Qwen4ExpConfig, number: int) -> list[Rule]:
    block = _delta_net_rules(config) if config.linear_layers[number] else _attention_rules(config)
    ngrams = _ngram_rules(config, number) if number in config.layers_with_ngrams else []
    return [rule.for_layer(number) for rule in (*ngrams, *block, *_common_rules(config))]


def _common_rules(config: Qwen4ExpConfig) -> list[Rule]:
    """Connections and experts, which every layer has."""
    return [
        *_matrices(f"{OURS}attention_connection.", f"{THEIRS}attn_hyper_connection.", CONNECTION),
        *_matrices(f"{OURS}mlp_connection.", f"{THEIRS}mlp_hyper_connection.", CONNECTION),
        *expert_rules(MoEOptions(config), NAMES),
    ]


def _prediction_rules(config: Qwen4ExpConfig) -> list[Rule]:
    layer = (*_attention_rules(config), *_common_rules(config))
    return [
        *_matrices("mtp.layers.0.", "mtp.", PREDICTION),
        *_matrices("mtp.layers.0.final_layernorm.", "mtp.hyper_connection_mixer.", MIXER),
        *(_moved(rule, "mtp.layers.0.mtp_model_layer.", "mtp.layers.0.") for rule in layer),
    ]


def _moved(rule: Rule, ours: str, theirs: str) -> Rule:
    """The rule of a layer under other prefixes."""
    return replace(
        rule,
        ours=ours + rule.ours.removeprefix(OURS),
        theirs=tuple(theirs + name.removeprefix(THEIRS) for name in rule.sources),
        others=tuple(_moved(other, ours, theirs) for other in rule.others),
    )


def _matrices(ours: str, theirs: str, names: Mapping[str, str]) -> list[Rule]:
    return [Same(f"{ours}{canonical}.weight", f"{theirs}{external}.weight") for canonical, external in names.items()]


def _attention_rules(config: Qwen4ExpConfig) -> list[Rule]:
    qkv = tuple(f"{THEIRS}self_attn.{name}_proj.weight" for name in "qkv")
    return [
        *norm_rules(QK_NORMS),
        *norm_rules(INDEXER),
        GatedGroupedQKV(
            f"{OURS}self_attention.linear_qkv.weight", qkv, groups=config.query_groups, heads=config.num_attention_heads
        ),
        Same(f"{OURS}self_attention.linear_proj.weight", f"{THEIRS}self_attn.o_proj.weight"),
    ]


def _delta_net_rules(config: Qwen4ExpConfig) -> list[Rule]:
    ours, theirs = f"{OURS}self_attention.", f"{THEIRS}linear_attn."
    same = {"conv1d.weight": "conv1d.weight", "A_log": "A_log", "dt_bias": "dt_bias"}
    same |= {"out_norm.weight": "norm.weight", "out_proj.weight": "out_proj.weight"}
    q, k, v, z, b, a = (config.linear_num_key_heads * rows for rows in rows_of_key_head(config))
    names = tuple(f"{theirs}in_proj_{name}.weight" for name in ("qkv", "z", "b", "a"))
    projection = Blocks(f"{ours}in_proj.weight", names, sizes=(q + k + v, z, b, a))
    return [projection, *(Same(ours + canonical, theirs + external) for canonical, external in same.items())]


def _ngram_rules(config: Qwen4ExpConfig, number: int) -> list[Rule]:
    ours, theirs, table = f"{OURS}ngrams.", f"{THEIRS}ple.", config.ngram_table_of(number)
    names = ("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets")
    numbers = tuple(f"{theirs}ple_embedding.{name}" for name in names)
    embedding, weight = f"{ours}embedding.weight", f"{theirs}ple_embedding.ngram_embedding"
    rows, wanted = table.rows(config.ngram_rows_divisible_by), config.ngram_file_parts
    # As torch.chunk divides: parts of equal size, maybe fewer than wanted.
    count = -(-rows // -(-rows // wanted))
    parts = tuple(f"{weight}.shard_{part}.weight" for part in range(count))
    in_memory = TableParts(embedding, (f"{weight}.weight", *numbers), table)
    return [
        TableParts(embedding, (*parts, *numbers), table, others=(in_memory,)),
        *_matrices(ours, theirs, NGRAMS),
    ]


def spelling(config: Qwen4ExpConfig, name: str) -> str:
    """Files with an image tower have the decoder one level deeper."""
    return name.replace("model.language_model.", "model.", 1) if name.startswith("model.language_model.") else name


def held(external: Mapping[str, Any], names: Iterable[str]) -> Mapping[str, Any]:
    """With the layer of multi-token prediction where a file has its tensors, and without it where it has not."""
    count = len({name.split(".")[2] for name in names if name.startswith("mtp.layers.")})
    if isinstance(text := external.get("text_config"), Mapping):
        return {**external, "text_config": {**text, MTP: count}}
    return {**external, MTP: count}


# -- configuration -----------------------------------------------------------------------------------

MTP, OF_MTP, ALSO_MTP = "mtp_num_hidden_layers", "mtp", "num_nextn_predict_layers"
INDEXED = "indexed_attention"
"""How the class names layers of attention; files have FULL."""
KEYS = (
    *ROPE_KEYS, "partial_rotary_factor", "layer_types", "full_attention_interval", "num_hidden_layers", "num_experts",
    "num_experts_per_tok", "norm_topk_prob", "moe_intermediate_size", "shared_expert_intermediate_size",
    "router_aux_loss_coef", "ple_layer_ids", "eos_token_id", "output_gate_type", "num_local_experts", MTP, OF_MTP,
    ALSO_MTP,
)  # fmt: skip
LAYERS = 40
"""Default of the class."""


def import_extra(external: Mapping[str, Any]) -> dict[str, Any]:
    positions = import_positions(external)
    predicted = import_prediction(external, positions["rotary_base"])
    return {**positions, **import_layers(external), **predicted, "moe": import_moe(external)}


def import_positions(external: Mapping[str, Any]) -> dict[str, Any]:
    table = rope_table(external, partial_rotary_factor=external.get("partial_rotary_factor", 1.0))
    share = float(table.pop("partial_rotary_factor"))
    # Which channels turn by the time, height and width of a picture. The three are equal in text.
    table.pop("mrope_interleaved", None)
    return {**import_rope({"rope_parameters": table}), "rotary_percent": share}


def import_layers(external: Mapping[str, Any]) -> dict[str, Any]:
    kinds, layers = external.get("layer_types"), external.get("num_hidden_layers", LAYERS)
    named = external if kinds is None else {**external, "layer_types": [FULL if k == INDEXED else k for k in kinds]}
    gate = external.get("output_gate_type") or "silu"
    if gate not in ("silu", "sigmoid"):
        raise ConfigError(f"output_gate_type={gate!r} is not supported; it can be silu or sigmoid")
    ends = external.get("eos_token_id")
    return {
        "linear_attention_freq": import_kinds(named, layers),
        "linear_output_gate": gate,
        "ngram_layers": sorted(set(external.get("ple_layer_ids") or [])) or None,
        "ngram_end_of_text_id": ends[0] if isinstance(ends, list) else ends,
    }


def import_prediction(external: Mapping[str, Any], rotary_base: float) -> dict[str, Any]:
    count = int(external.get(MTP, external.get(ALSO_MTP)) or 0)
    supported = {
        "hybrid": (None, True),
        "layer_types": (None, [FULL], [INDEXED]),
        "mtp_use_hidden_state_from_layer": (None,),
        "num_hidden_layers": (None, count),
        "rope_theta": (None, rotary_base),
    }
    stated = (external.get(OF_MTP) or {}) if count else {}
    for key, value in stated.items():
        if key not in supported or value not in supported[key]:
            legal = f"; it can be {supported[key][-1]!r}" if key in supported else ""
            raise ConfigError(f"{OF_MTP}.{key}={value!r} is not supported{legal}")
    return {"mtp_num_layers": count}


def import_moe(external: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "num_experts": external.get("num_experts", 512),
        "moe_router_topk": external.get("num_experts_per_tok", 10),
        "moe_router_pre_softmax": not external.get("norm_topk_prob", True),
        "moe_ffn_hidden_size": external.get("moe_intermediate_size", 512),
        "moe_shared_expert_intermediate_size": external.get("shared_expert_intermediate_size", 512),
        "moe_shared_expert_gate": True,
        **import_balance(external, default=0.001),
    }


def export_extra(model: Mapping[str, Any]) -> dict[str, Any]:
    config = Qwen4ExpConfig.model_validate(model)
    moe = MoEOptions(config)
    sizes = dict.fromkeys(("moe_ffn_hidden_size", "moe_router_topk", "moe_router_pre_softmax"), ANY)
    moe.require(TEXT, **sizes, moe_shared_expert_intermediate_size=ANY, moe_shared_expert_gate=(True,))
    if moe.shared_size is None:
        raise ConfigError(
            f"model.moe.moe_shared_expert_intermediate_size is not set: a Hugging Face {TEXT} has a shared expert"
        )
    shape = export_shape(config)
    # No layer is dense.
    del shape["intermediate_size"]
    return {
        **shape,
        **export_rope(config),
        **export_balance(moe),
        "partial_rotary_factor": config.rotary_percent,
        "layer_types": export_kinds(config),
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.topk,
        "norm_topk_prob": not moe["moe_router_pre_softmax"],
        "moe_intermediate_size": moe.ffn_size,
        "shared_expert_intermediate_size": moe.shared_size,
        "output_gate_type": config.linear_output_gate,
        "ple_layer_ids": [layer + 1 for layer in config.layers_with_ngrams],
        **({"eos_token_id": config.ngram_end_of_text_id} if config.layers_with_ngrams else {}),
        MTP: config.mtp_num_layers,
    }


def needed(name: str) -> Any:
    """For a field of the indexer, which the class cannot be built without."""

    def value(setting: Any) -> Any:
        if setting is None:
            raise ConfigError(f"{name} is not set; layers of attention have an indexer, which needs it")
        return setting

    return value


SIZES = {
    "linear_num_key_heads": ("linear_num_key_heads", 16),
    "linear_num_value_heads": ("linear_num_value_heads", 32),
    "linear_key_head_dim": ("linear_key_head_dim", 128),
    "linear_value_head_dim": ("linear_value_head_dim", 128),
    "linear_conv_kernel_dim": ("linear_conv_kernel_dim", 4),
    "hc_count": ("residual_streams", 4),
    "hc_lowrank": ("residual_mix_rank", 320),
    "ple_embed_dim": ("ngram_embed_dim", None),
    "ple_conv_kernel_size": ("ngram_conv_kernel", 4),
    "ngram_size": ("ngram_max_length", 3),
    "heads_per_ngram": ("ngram_heads", 8),
    "ngram_vocab_size_base": ("ngram_vocab_size_base", 20000000),
    "make_ngram_vocab_size_divisible_by": ("ngram_rows_divisible_by", 128),
    "seed": ("ngram_seed", 1234),
    "split_ngram_parts": ("ngram_file_parts", 512),
}
INDEXER_SIZES = {
    "indexer_n_heads": "qsa_indexer_n_heads",
    "indexer_head_dim": "qsa_indexer_head_dim",
    "indexer_budget": "qsa_budget",
    "indexer_compress_ratio": "qsa_compress_ratio",
}
QWEN4_EXP = ConfigMap(
    architecture=TEXT,
    fields=(
        *(entry for entry in decoder_fields(tied=False, positions=32768) if entry.theirs != "intermediate_size"),
        Field("num_key_value_heads", "num_query_groups", default=2),
        Field("head_dim", "kv_channels", default=256),
        *(Field(theirs, ours, default=default) for theirs, (ours, default) in SIZES.items()),
        *(Field(theirs, ours, import_value=needed(theirs)) for theirs, ours in INDEXER_SIZES.items()),
    ),
    fixed=(
        SILU,
        Fixed("attention_bias", (False,)),
        Fixed("indexer_kv_heads", (1,)),
        Fixed("attn_output_gate", (True,), written=False),
        Fixed("mtp_use_dedicated_embeddings", (False,), written=False),
        *NOT_A_CHOICE,
    ),
    ignored={
        **IGNORED,
        **MOE_IGNORED,
        "number_of_conv_states": "what the class keeps of a sequence in its cache, by its other fields",
        "mamba_ssm_dtype": "states are fp32 here whatever it says",
    },
    import_extra=import_extra,
    import_extra_keys=KEYS,
    export_extra=export_extra,
)

HUGGING_FACE = HuggingFaceFamily(
    family="qwen4_exp",
    model_types={TEXT: QWEN4_EXP, "qwen4_exp": decoder_within("qwen4_exp", QWEN4_EXP, TEXT)},
    name_map=name_map,
    model_type_of=lambda config: TEXT,
    copies=tied_output,
    spelling=spelling,
    architectures={TEXT: "Qwen4ExpForCausalLM"},
    held=held,
)
