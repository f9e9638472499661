"""Inkling's decoder in Hugging Face's format.

Published files hold the decoder beside towers of images and sounds and layers of multi-token prediction, under names of
the publisher's code and with the rows of gate and up in turn; the decoder alone is read. It is written as the type of
the decoder alone, `inkling_text`, under the names of transformers' class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from mt_core.config.layer_pattern import pattern_of
from mt_core.config_map import ConfigMap, Field, Fixed
from mt_core.errors import ConfigError
from mt_core.name_map import Concatenate, NameMap, Rule, Same
from mt_models.blocks.hugging_face_decoder import (
    OURS,
    PRE_NORMS,
    QK_NORMS,
    THEIRS,
    decoder_fields,
    decoder_name_map,
    export_shape,
    norm_rules,
)
from mt_models.blocks.hugging_face_grouped_rows import GroupedRows
from mt_models.blocks.hugging_face_moe import (
    BIAS_KEY,
    MOE_IGNORED,
    SILU,
    ExpertNames,
    expert_rules,
    export_bias,
    import_bias,
    shared_experts,
    written_packed,
)
from mt_models.blocks.hugging_face_tower import decoder_within
from mt_models.blocks.moe import ANY, MoEOptions, frequency_of
from mt_models.hugging_face import IGNORED, NOT_A_CHOICE, HuggingFaceFamily, require_value
from mt_models.inkling.config import InklingConfig

KIND, TEXT = "inkling_mm_model", "inkling_text"
BESIDE = frozenset(f"model.{part}.*" for part in ("audio", "audio_tower", "visual", "vision_tower", "mtp"))
"""Tensors of towers and of layers of multi-token prediction, which this family does not have."""


# -- tensors -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RowsInTurn(Rule):
    """Rows of gate and up in turn, [..., 2 F, in], in published files; here all rows of gate come first."""

    def import_value(self, tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat([tensors[0][..., 0::2, :], tensors[0][..., 1::2, :]], -2)

    def export_value(self, tensor: Tensor) -> Sequence[Tensor]:
        return [torch.stack(tensor.chunk(2, -2), -2).flatten(-3, -2)]


@dataclass(frozen=True)
class SharedUp(Rule):
    """gate and up of n shared experts there, [n, F, in] each; one matrix here, all rows of gate first."""

    experts: int = 1

    def import_value(self, tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat([tensor.flatten(0, 1) for tensor in tensors])

    def export_value(self, tensor: Tensor) -> Sequence[Tensor]:
        return [half.unflatten(0, (self.experts, -1)).contiguous() for half in tensor.chunk(2)]


@dataclass(frozen=True)
class SharedUpInTurn(Rule):
    """The same from one tensor [n, 2 F, in] with rows of gate and up in turn."""

    experts: int = 1

    def import_value(self, tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat([tensors[0][:, first::2].flatten(0, 1) for first in (0, 1)])

    def export_value(self, tensor: Tensor) -> Sequence[Tensor]:
        halves = [half.unflatten(0, (self.experts, -1)) for half in tensor.chunk(2)]
        return [torch.stack(halves, 2).flatten(1, 2)]


@dataclass(frozen=True)
class SharedDown(Rule):
    """down of n shared experts there, [n, out, F]; [out, n F] here."""

    experts: int = 1

    def import_value(self, tensors: Sequence[Tensor]) -> Tensor:
        return tensors[0].transpose(0, 1).flatten(1).contiguous()

    def export_value(self, tensor: Tensor) -> Sequence[Tensor]:
        return [tensor.unflatten(1, (self.experts, -1)).transpose(0, 1).contiguous()]


TAPS = {
    "self_attention.k_conv": "self_attn.k_sconv",
    "self_attention.v_conv": "self_attn.v_sconv",
    "attention_conv": "attn_sconv",
    "mlp_conv": "mlp_sconv",
}


def name_map(config: InklingConfig) -> NameMap:
    layers = [rule.for_layer(number) for number in range(config.num_layers) for rule in _layer_rules(config, number)]
    names = decoder_name_map(config, layers)
    norm = Same("embedding.norm.weight", "model.embed_tokens.embed_norm.weight")
    return NameMap([*names.rules, norm], 0, names.ignored | BESIDE)


def _layer_rules(config: InklingConfig, number: int) -> list[Rule]:
    moe = MoEOptions(config)
    return [
        *norm_rules(PRE_NORMS),
        *norm_rules(QK_NORMS),
        *_attention_rules(config.of_layer(number)),
        *(Same(f"{OURS}{ours}.weight", f"{THEIRS}{theirs}.conv1d.weight") for ours, theirs in TAPS.items()),
        *(_expert_rules(moe, config.scored_shared_experts) if moe.layers[number] else _dense_rules()),
    ]


def _attention_rules(config: InklingConfig) -> list[Rule]:
    """config: with the heads of the layer."""
    heads = config.num_attention_heads // config.query_groups
    rows = (heads * config.head_dim, config.head_dim, config.head_dim, heads * config.relative_rank)
    return [
        GroupedRows(
            f"{OURS}self_attention.linear_qkv.weight",
            tuple(f"{THEIRS}self_attn.{name}_proj.weight" for name in "qkvr"),
            groups=config.query_groups,
            rows=rows,
        ),
        Same(f"{OURS}self_attention.linear_proj.weight", f"{THEIRS}self_attn.o_proj.weight"),
        Same(f"{OURS}self_attention.relative.weight", f"{THEIRS}self_attn.rel_logits_proj.proj"),
    ]


def _dense_rules() -> list[Rule]:
    fc1, halves = f"{OURS}mlp.linear_fc1.weight", tuple(f"{THEIRS}mlp.{name}_proj.weight" for name in ("gate", "up"))
    return [
        Concatenate(fc1, halves, others=(RowsInTurn(fc1, f"{THEIRS}mlp.w13_dn.weight"),)),
        Same(f"{OURS}mlp.linear_fc2.weight", f"{THEIRS}mlp.down_proj.weight"),
        Same(f"{OURS}mlp_scale.weight", f"{THEIRS}mlp.global_scale"),
    ]


def _expert_rules(moe: MoEOptions, shared: int) -> list[Rule]:
    routed = written_packed(expert_rules(moe, ExpertNames(), always_biased=True))
    fc1 = f"{OURS}mlp.experts.linear_fc1.weight"
    in_turn = RowsInTurn(fc1, f"{THEIRS}mlp.experts.w13_weight")
    return [
        *(replace(rule, others=(in_turn,)) if rule.ours == fc1 else rule for rule in routed if SHARED not in rule.ours),
        Same(f"{OURS}mlp.router.global_scale", f"{THEIRS}mlp.gate.global_scale"),
        *_shared_rules(shared),
    ]


SHARED = "mlp.shared_experts."


def _shared_rules(experts: int) -> list[Rule]:
    fc1, ups = f"{OURS}{SHARED}linear_fc1.weight", tuple(f"{THEIRS}{SHARED}{name}_proj" for name in ("gate", "up"))
    in_turn = SharedUpInTurn(fc1, f"{THEIRS}{SHARED}shared_w13_weight", experts)
    return [
        SharedUp(fc1, ups, experts, others=(in_turn,)),
        SharedDown(f"{OURS}{SHARED}linear_fc2.weight", f"{THEIRS}{SHARED}down_proj", experts),
    ]


PREFIXES = ("model.llm.", "model.language_model.")
WHOLE = {
    "model.embed.weight": "model.embed_tokens.weight",
    "model.embed_norm.weight": "model.embed_tokens.embed_norm.weight",
    "model.unembed.weight": "lm_head.weight",
}
PARTS = {
    ".attn.wq_du.": ".self_attn.q_proj.",
    ".attn.wk_dv.": ".self_attn.k_proj.",
    ".attn.wv_dv.": ".self_attn.v_proj.",
    ".attn.wr_du.": ".self_attn.r_proj.",
    ".attn.wo_ud.": ".self_attn.o_proj.",
    ".attn.k_sconv.": ".self_attn.k_sconv.conv1d.",
    ".attn.v_sconv.": ".self_attn.v_sconv.conv1d.",
    ".attn.": ".self_attn.",
    ".attn_sconv.weight": ".attn_sconv.conv1d.weight",
    ".mlp_sconv.weight": ".mlp_sconv.conv1d.weight",
    ".attn_norm.": ".input_layernorm.",
    ".mlp_norm.": ".post_attention_layernorm.",
    ".mlp.gate.bias": ".mlp.gate.e_score_correction_bias",
    ".mlp.w2_md.": ".mlp.down_proj.",
    ".mlp.experts.w2_weight": ".mlp.experts.down_proj",
    ".shared_w2_weight": ".down_proj",
}
"""Published names -> those of transformers' class."""


def spelling(config: InklingConfig, name: str) -> str:
    for prefix in PREFIXES:
        if name.startswith(prefix):
            name = f"model.{name.removeprefix(prefix)}"
    for published, transformers_name in PARTS.items():
        name = name.replace(published, transformers_name)
    return WHOLE.get(name, name)


# -- configuration -----------------------------------------------------------------------------------

LOCAL, GLOBAL = "hybrid_sliding", "hybrid"
KINDS, LAYERS, LOCAL_IDS = "mlp_layer_types", "layer_types", "local_layer_ids"
WIDTH, DENSE_WIDTH, DENSE_LAYERS = "intermediate_size", "dense_intermediate_size", "dense_mlp_idx"
TIED = "tie_word_embeddings"
SIZES: Mapping[str, Any] = {
    "num_hidden_layers": 66,
    "n_routed_experts": 256,
    "num_experts_per_tok": 6,
    "n_shared_experts": 2,
    "route_scale": 8.0,
    WIDTH: 24576,
    "moe_intermediate_size": 3072,
}
"""Defaults of the class."""
EXPRESSED = dict.fromkeys(
    (
        "moe_layer_freq", "moe_ffn_hidden_size", "moe_router_topk", "moe_router_topk_scaling_factor",
        "moe_router_enable_expert_bias", "moe_shared_expert_intermediate_size",
    ),
    ANY,
)  # fmt: skip


def import_extra(external: Mapping[str, Any]) -> dict[str, Any]:
    external = with_widths({**SIZES, **external})
    return {
        "window_attn_skip_freq": import_windows(external),
        "ffn_hidden_size": external[WIDTH],
        "moe": import_moe(external),
        "untie_embeddings_and_output_weights": True,
    }


def with_widths(external: Mapping[str, Any]) -> Mapping[str, Any]:
    """With the widths of dense layers and of experts under the class's keys: where a file has a key for the former, the
    other one is of the latter."""
    dense = external.get(DENSE_WIDTH)
    return external if dense is None else {**external, WIDTH: dense, "moe_intermediate_size": external[WIDTH]}


def import_windows(external: Mapping[str, Any]) -> int | str:
    layers, kinds, local = external["num_hidden_layers"], external.get(LAYERS), external.get(LOCAL_IDS)
    if kinds is None and local is not None:
        kinds = [LOCAL if number in local else GLOBAL for number in range(layers)]
    if kinds is None:
        return 6
    if len(kinds) != layers or set(kinds) - {LOCAL, GLOBAL}:
        raise ConfigError(
            f"{LAYERS}={kinds} is not supported; it needs {LOCAL} or {GLOBAL} for each of num_hidden_layers={layers}"
        )
    windows = [kind == LOCAL for kind in kinds]
    # 1: no layer has a window; layers + 1: all of them have. Otherwise a period, where one fits.
    for every in range(1, layers + 2):
        if windows == [(layer + 1) % every != 0 for layer in range(layers)]:
            return every
    return pattern_of(windows)


def import_moe(external: Mapping[str, Any]) -> dict[str, Any]:
    width, shared = external["moe_intermediate_size"], external["n_shared_experts"]
    if shared < 1:
        raise ConfigError(f"n_shared_experts={shared} is not supported; it can be 1 or more")
    return {
        "num_experts": external["n_routed_experts"],
        "moe_router_topk": external["num_experts_per_tok"],
        "moe_router_score_function": "sigmoid",
        "moe_router_topk_scaling_factor": float(external["route_scale"]),
        "moe_ffn_hidden_size": width,
        "moe_shared_expert_intermediate_size": width * shared,
        "moe_layer_freq": frequency_of(import_layers(external)),
        **import_bias(external),
    }


def import_layers(external: Mapping[str, Any]) -> list[bool]:
    """For each layer whether it has experts."""
    layers, kinds = external["num_hidden_layers"], external.get(KINDS)
    if kinds is None:
        return [number >= (external.get(DENSE_LAYERS) or 0) for number in range(layers)]
    if len(kinds) != layers or set(kinds) - {"dense", "sparse"}:
        raise ConfigError(
            f"{KINDS}={kinds} is not supported; it needs dense or sparse for each of num_hidden_layers={layers}"
        )
    return [kind == "sparse" for kind in kinds]


def export_extra(model: Mapping[str, Any]) -> dict[str, Any]:
    config = InklingConfig.model_validate(model)
    require_value(config, "untie_embeddings_and_output_weights", (True,), TEXT)
    moe, local = MoEOptions(config), config.in_windows
    moe.require(TEXT, **EXPRESSED, moe_router_score_function=("sigmoid",))
    return {
        **export_shape(config),
        **export_bias(moe),
        "swa_num_attention_heads": local.num_attention_heads,
        "swa_num_key_value_heads": local.query_groups,
        "swa_head_dim": local.head_dim,
        LAYERS: [LOCAL if window else GLOBAL for window in config.layers_with_window],
        KINDS: ["sparse" if experts else "dense" for experts in moe.layers],
        "n_routed_experts": moe.num_experts,
        "num_experts_per_tok": moe.topk,
        "n_shared_experts": shared_experts(moe, TEXT),
        "moe_intermediate_size": moe.ffn_size,
        "route_scale": moe["moe_router_topk_scaling_factor"] or 1.0,
    }


OF_PREDICTION = "of layers that predict further tokens, which the class leaves out, and this family too"
FIELDS = {
    "num_key_value_heads": ("num_query_groups", 8),
    "head_dim": ("kv_channels", 128),
    "swa_num_attention_heads": ("window_attention_heads", 64),
    "swa_num_key_value_heads": ("window_query_groups", 16),
    "swa_head_dim": ("window_kv_channels", 128),
    "sliding_window_size": ("sliding_window", 512),
    "d_rel": ("relative_rank", 16),
    "rel_extent": ("relative_extent", 1024),
    "conv_kernel_size": ("conv_kernel", 4),
    "log_scaling_n_floor": ("log_scaling_floor", None),
    "unpadded_vocab_size": ("unpadded_vocab_size", None),
}
"""Keys of the class -> ours, and its defaults."""
INKLING = ConfigMap(
    architecture=TEXT,
    fields=(
        *(entry for entry in decoder_fields(tied=False, positions=131072) if entry.theirs not in (WIDTH, TIED)),
        *(Field(theirs, ours, default=default) for theirs, (ours, default) in FIELDS.items()),
        Field("log_scaling_alpha", "log_scaling_alpha", import_value=float, default=0.1),
        Field("logits_mup_width_multiplier", "logits_divisor", import_value=float, default=24.0),
    ),
    # The class has no tied LM head.
    fixed=(SILU, Fixed(TIED, (False,)), Fixed("shared_expert_sink", (True,)), *NOT_A_CHOICE),
    ignored={
        **IGNORED,
        **MOE_IGNORED,
        "number_of_conv_states": "what the class keeps of a sequence in its cache, by its other fields",
        "rms_norm_eps_moe_gate": "of a norm that the class does not have",
        **dict.fromkeys(
            ("num_mtp_layers", "chain_hidden_post_norm", "mtp_hidden_states_first", "mtp_local_layer_ids"),
            OF_PREDICTION,
        ),
    },
    import_extra=import_extra,
    import_extra_keys=(*SIZES, LAYERS, LOCAL_IDS, KINDS, DENSE_WIDTH, DENSE_LAYERS, BIAS_KEY),
    export_extra=export_extra,
    spellings={
        "embedding_multiplier": "logits_mup_width_multiplier",
        "sliding_window": "sliding_window_size",
        "num_local_experts": "n_routed_experts",
        "sconv_kernel_size": "conv_kernel_size",
        "model_max_length": "max_position_embeddings",
    },
)
TOWERS = ("audio_config", "audio_token_id", "audio_bos_token_id", "image_bos_token_id", "mtp_config")

HUGGING_FACE = HuggingFaceFamily(
    family="inkling",
    model_types={TEXT: INKLING, KIND: decoder_within(KIND, INKLING, TEXT, TOWERS)},
    name_map=name_map,
    model_type_of=lambda config: TEXT,
    spelling=spelling,
    architectures={TEXT: "InklingForCausalLM"},
    with_one_end=(TEXT,),
)
