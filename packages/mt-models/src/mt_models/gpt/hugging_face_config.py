"""config.json of GPT-2, GPTBigCode, BLOOM and GPT-NeoX."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mt_core.config_map import ConfigMap, Field, Fixed
from mt_core.errors import ConfigError
from mt_models.blocks.hugging_face_decoder import POSITIONS, import_partial_rope, longest_sequence, negated
from mt_models.gpt.config import GPTConfig
from mt_models.hugging_face import FURTHER_ACTIVATIONS, IGNORED, NOT_A_CHOICE, OF_HEADS, require_value

ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
    "silu": "silu",
    **FURTHER_ACTIVATIONS,
}
BACK = {"gelu_tanh": "gelu_new", "gelu": "gelu", "relu": "relu", "silu": "silu"}
BIGCODE_BACK = {**BACK, "gelu_tanh": "gelu_pytorch_tanh"}  # the same function, rounded otherwise


def import_activation(name: str) -> str:
    if name not in ACTIVATIONS:
        raise ConfigError(f"{name!r} is not supported; it can be {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _common_fields(layers: str, heads: str, hidden: str, epsilon: str, *, tied: bool) -> tuple[Field, ...]:
    return (
        Field("vocab_size", "vocab_size"),
        Field(layers, "num_layers"),
        Field(hidden, "hidden_size"),
        Field(heads, "num_attention_heads"),
        Field(epsilon, "norm_epsilon", import_value=float, default=1e-5),
        Field("initializer_range", "init_method_std", import_value=float, default=0.02),
        Field("tie_word_embeddings", "untie_embeddings_and_output_weights", negated, negated, default=tied),
    )


def import_dropout(external: Mapping[str, Any]) -> dict[str, Any]:
    """embd_pdrop and resid_pdrop are one key here."""
    embedding, residual = (float(external.get(key, 0.1)) for key in ("embd_pdrop", "resid_pdrop"))
    if embedding != residual:
        raise ConfigError(f"embd_pdrop={embedding} and resid_pdrop={residual} differ; set both to one value")
    return {"hidden_dropout": residual, "attention_dropout": float(external.get("attn_pdrop", 0.1))}


def _export_ffn(model: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {key: GPTConfig.model_validate(model).ffn_size}


def _gpt2_export_extra(model: Mapping[str, Any]) -> dict[str, Any]:
    dropout = model["hidden_dropout"]
    return {
        "embd_pdrop": dropout,
        "resid_pdrop": dropout,
        "attn_pdrop": model["attention_dropout"],
        **_export_ffn(model, "n_inner"),
    }


GPT2_FIELDS = (
    *_common_fields("n_layer", "n_head", "n_embd", "layer_norm_epsilon", tied=True),
    Field("n_positions", "max_position_embeddings", default=1024),
    Field("n_inner", "ffn_hidden_size"),
)
GPT2_SPELLINGS = {
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
}
"""Names that the classes take beside those of the files."""
DROPOUTS = ("embd_pdrop", "resid_pdrop", "attn_pdrop")
IGNORED_GPT2 = {
    **IGNORED,
    "n_ctx": "repeats n_positions",
    "n_special": "of GPT-1's vocabulary; the class does not read it",
    "predict_special_tokens": "of GPT-1's vocabulary; the class does not read it",
    "reorder_and_upcast_attn": "changes rounding only; precision.attention_softmax_in_fp32 chooses it",
    **dict.fromkeys(
        (
            "summary_type",
            "summary_use_proj",
            "summary_activation",
            "summary_proj_to_labels",
            "summary_first_dropout",
        ),
        OF_HEADS,
    ),
}

GPT2 = ConfigMap(
    architecture="gpt2",
    fields=(
        *GPT2_FIELDS,
        Field("activation_function", "activation", import_activation, BACK.get, default="gelu_new"),
    ),
    fixed=(
        Fixed("scale_attn_weights", (True,)),
        Fixed("add_cross_attention", (False,), written=False),
        Fixed("scale_attn_by_inverse_layer_idx", (False,)),
        *NOT_A_CHOICE,
    ),
    ignored=IGNORED_GPT2,
    import_extra=import_dropout,
    import_extra_keys=DROPOUTS,
    export_extra=_gpt2_export_extra,
    spellings=GPT2_SPELLINGS,
)

GPT_BIGCODE = ConfigMap(
    architecture="gpt_bigcode",
    fields=(
        *GPT2_FIELDS,
        Field("activation_function", "activation", import_activation, BIGCODE_BACK.get, default="gelu_pytorch_tanh"),
    ),
    fixed=(
        Fixed("scale_attn_weights", (True,)),
        Fixed("add_cross_attention", (False,), written=False),
        Fixed("multi_query", (True,)),
        Fixed("num_key_value_heads", (1,)),
        *NOT_A_CHOICE,
    ),
    ignored={
        **IGNORED_GPT2,
        "attention_softmax_in_fp32": "changes rounding only; precision.attention_softmax_in_fp32 chooses it",
        "scale_attention_softmax_in_fp32": "changes rounding only",
        **dict.fromkeys(
            ("inference_runner", "max_batch_size", "max_sequence_length", "pad_key_length", "pre_allocate_kv_cache",
             "validate_runner_input"),
            "of an inference server",
        ),
    },
    import_extra=lambda external: {"num_query_groups": 1, **import_dropout(external)},
    import_extra_keys=DROPOUTS,
    export_extra=_gpt2_export_extra,
    spellings=GPT2_SPELLINGS,
)  # fmt: skip


def _bloom_import_extra(external: Mapping[str, Any]) -> dict[str, Any]:
    # Files of BLOOM have either name or both, depending on the version that wrote them.
    for theirs, ours in (("n_embed", "hidden_size"), ("num_attention_heads", "n_head")):
        if theirs in external and ours in external and external[theirs] != external[ours]:
            raise ConfigError(f"{theirs}={external[theirs]} and {ours}={external[ours]} should be the same number")
    hidden = external.get("n_embed", external.get("hidden_size"))
    heads = external.get("n_head", external.get("num_attention_heads"))
    inner = external.get("n_inner")
    if inner is not None and inner != 4 * hidden:
        raise ConfigError(f"n_inner={inner} is not supported; it can be null or 4 x hidden_size = {4 * hidden}")
    return {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "position_embedding_type": "alibi",
        "embedding_layernorm": True,
        "activation": "gelu_tanh",
    }


def _bloom_export_extra(model: Mapping[str, Any]) -> dict[str, Any]:
    config = GPTConfig.model_validate(model)
    require_value(config, "ffn_hidden_size", (None, 4 * config.hidden_size), "bloom")
    return {}


BLOOM = ConfigMap(
    architecture="bloom",
    fields=(
        *_common_fields("n_layer", "n_head", "hidden_size", "layer_norm_epsilon", tied=True),
        Field("hidden_dropout", "hidden_dropout", import_value=float, default=0.0),
        Field("attention_dropout", "attention_dropout", import_value=float, default=0.0),
    ),
    fixed=(Fixed("apply_residual_connection_post_layernorm", (False,)), *NOT_A_CHOICE),
    ignored={
        **IGNORED,
        "seq_length": "ALiBi has no table of positions; data.seq_length says how long samples are",
        "slow_but_exact": "changes rounding only",
        "attention_softmax_in_fp32": "changes rounding only; precision.attention_softmax_in_fp32 chooses it",
        "offset_alibi": "a constant added to all scores of a query changes nothing",
        **dict.fromkeys(
            ("bias_dropout_fusion", "masked_softmax_fusion", "skip_bias_add", "skip_bias_add_qkv"),
            "which kernels the trainer used",
        ),
    },
    import_extra=_bloom_import_extra,
    import_extra_keys=("n_embed", "num_attention_heads", "n_inner"),
    export_extra=_bloom_export_extra,
)


def _neox_import_extra(external: Mapping[str, Any]) -> dict[str, Any]:
    shares, bases = ("partial_rotary_factor", "rotary_pct"), ("rope_theta", "rotary_emb_base")
    values = import_partial_rope(external, "gpt_neox", shares, bases, 0.25)
    _require_rotated_pairs(external, values["rotary_percent"])
    return {**values, **longest_sequence(external)}


def _require_rotated_pairs(external: Mapping[str, Any], share: float) -> None:
    """Raises ConfigError for an odd number of rotated channels, of which the class makes other frequencies."""
    head = external["hidden_size"] // external["num_attention_heads"]
    if int(head * share) % 2:
        raise ConfigError(
            f"rotary_pct={share} (rope_parameters.partial_rotary_factor, in files of transformers 5) of a head of "
            f"hidden_size / num_attention_heads={head} channels are {int(head * share)}; positions turn pairs of "
            "channels, so it has to be an even number"
        )


def _neox_export_extra(model: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "rotary_pct": model["rotary_percent"],
        "rotary_emb_base": model["rotary_base"],
        **longest_sequence(model),
        **_export_ffn(model, "intermediate_size"),
    }


GPT_NEOX = ConfigMap(
    architecture="gpt_neox",
    fields=(
        *_common_fields("num_hidden_layers", "num_attention_heads", "hidden_size", "layer_norm_eps", tied=False),
        Field("intermediate_size", "ffn_hidden_size"),
        Field("hidden_act", "activation", import_activation, BACK.get, default="gelu"),
        Field("hidden_dropout", "hidden_dropout", import_value=float, default=0.0),
        Field("attention_dropout", "attention_dropout", import_value=float, default=0.0),
        Field("use_parallel_residual", "parallel_residual", default=True),
    ),
    fixed=(
        Fixed("attention_bias", (True,)),
        Fixed("hidden_dropout_prob", (0,), written=False),  # older names of the two dropouts, which are never read
        Fixed("attention_probs_dropout_prob", (0,), written=False),
        *NOT_A_CHOICE,
    ),
    ignored={**IGNORED, "classifier_dropout": OF_HEADS},
    import_extra=_neox_import_extra,
    import_extra_keys=(
        POSITIONS,
        "rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor", "rotary_pct", "rotary_emb_base",
    ),
    export_extra=_neox_export_extra,
)  # fmt: skip

CONFIG_MAPS = {"gpt2": GPT2, "gpt_bigcode": GPT_BIGCODE, "bloom": BLOOM, "gpt_neox": GPT_NEOX}
