"""Names and fields that Llama-like families share in Hugging Face's format."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from mt_core.config.layer_pattern import pattern_of
from mt_core.config_map import Field, require_known
from mt_core.errors import ConfigError
from mt_core.name_map import Concatenate, GroupedQKV, NameMap, Rule, Same
from mt_models.blocks.config import DecoderConfig
from mt_models.hugging_face import per_layer

FULL, SLIDING = "full_attention", "sliding_attention"
"""Values of `layer_types`."""

OURS = "decoder.layers.{i}."
THEIRS = "model.layers.{i}."


class Heads(Protocol):
    """Fields from which the head size is computed."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def num_attention_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


def decoder_name_map(config: DecoderConfig, layer: list[Rule]) -> NameMap:
    """Embedding, final norm and LM head, around the rules of a layer."""
    rules: list[Rule] = [
        Same("embedding.word_embeddings.weight", "model.embed_tokens.weight"),
        *layer,
        Same("decoder.final_layernorm.weight", "model.norm.weight"),
    ]
    if config.untie_embeddings_and_output_weights:
        rules.append(Same("output_layer.weight", "lm_head.weight"))
    # Buffers that older versions of transformers stored; they follow from the configuration.
    frequencies = per_layer([f"{THEIRS}self_attn.rotary_emb.inv_freq"], config.num_layers)
    return NameMap(rules, config.num_layers, ignored=frequencies)


class GroupedHeads(Protocol):
    """What the names of attention depend on."""

    @property
    def num_attention_heads(self) -> int: ...
    @property
    def query_groups(self) -> int: ...


def attention_rules(config: GroupedHeads, *, qkv_bias: bool = False, output_bias: bool = False) -> list[Rule]:
    """q_proj, k_proj and v_proj in one matrix; o_proj."""
    rules: list[Rule] = []
    for kind in ("weight", "bias") if qkv_bias else ("weight",):
        rules.append(
            GroupedQKV(
                f"{OURS}self_attention.linear_qkv.{kind}",
                tuple(f"{THEIRS}self_attn.{name}_proj.{kind}" for name in "qkv"),
                groups=config.query_groups,
                heads=config.num_attention_heads,
            )
        )
    for kind in ("weight", "bias") if output_bias else ("weight",):
        rules.append(Same(f"{OURS}self_attention.linear_proj.{kind}", f"{THEIRS}self_attn.o_proj.{kind}"))
    return rules


def feed_forward_rules(*, bias: bool = False) -> list[Rule]:
    """gate_proj and up_proj in one matrix; down_proj."""
    rules: list[Rule] = []
    for kind in ("weight", "bias") if bias else ("weight",):
        halves = (f"{THEIRS}mlp.gate_proj.{kind}", f"{THEIRS}mlp.up_proj.{kind}")
        rules.append(Concatenate(f"{OURS}mlp.linear_fc1.{kind}", halves))
        rules.append(Same(f"{OURS}mlp.linear_fc2.{kind}", f"{THEIRS}mlp.down_proj.{kind}"))
    return rules


def norm_rules(norms: Mapping[str, str]) -> list[Rule]:
    """Our name -> Hugging Face's, within a layer."""
    return [Same(f"{OURS}{ours}.weight", f"{THEIRS}{theirs}.weight") for ours, theirs in norms.items()]


PRE_NORMS = {"input_layernorm": "input_layernorm", "pre_mlp_layernorm": "post_attention_layernorm"}
BRANCH_NORMS = {
    "post_self_attn_layernorm": "post_attention_layernorm",
    "post_mlp_layernorm": "post_feedforward_layernorm",
}
QK_NORMS = {"self_attention.q_layernorm": "self_attn.q_norm", "self_attention.k_layernorm": "self_attn.k_norm"}


# -- configuration ---------------------------------------------------------------------------------


def negated(value: Any) -> Any:
    return None if value is None else not value


def one_of(external: Mapping[str, Any], keys: Sequence[str], default: Any) -> Any:
    """The value under any of several spellings. Raises ConfigError if they contradict one another."""
    present = {key: external[key] for key in keys if external.get(key) is not None}
    values = list(present.values())
    # Files written by several versions repeat a value under the old and the new key. Where they
    # differ, which one a reader takes depends on its version.
    if any(value != values[0] for value in values):
        listed = " and ".join(f"{key}={value!r}" for key, value in present.items())
        raise ConfigError(f"{listed} contradict each other; they mean the same, so remove what is wrong")
    return values[0] if values else default


POSITIONS = "max_position_embeddings"


def longest_sequence(values: Mapping[str, Any]) -> dict[str, Any]:
    """`max_position_embeddings` of a model without a table of positions, where it is known, in either direction."""
    return {} if values.get(POSITIONS) is None else {POSITIONS: values[POSITIONS]}


def decoder_fields(*, tied: bool, epsilon: float = 1e-6, positions: int) -> tuple[Field, ...]:
    """Fields that all these families have. tied, epsilon, positions: Hugging Face's defaults for the family."""
    return (
        Field("vocab_size", "vocab_size"),
        Field("num_hidden_layers", "num_layers"),
        Field("hidden_size", "hidden_size"),
        Field("num_attention_heads", "num_attention_heads"),
        Field("intermediate_size", "ffn_hidden_size"),
        Field("max_position_embeddings", "max_position_embeddings", default=positions),
        Field("rms_norm_eps", "norm_epsilon", import_value=float, default=epsilon),
        Field("initializer_range", "init_method_std", import_value=float, default=0.02),
        Field("attention_dropout", "attention_dropout", import_value=lambda rate: float(rate or 0.0), default=0.0),
        Field("tie_word_embeddings", "untie_embeddings_and_output_weights", negated, negated, default=tied),
    )


def export_shape(config: DecoderConfig) -> dict[str, Any]:
    """Sizes whose defaults differ between the formats are written explicitly."""
    return {
        "num_key_value_heads": config.query_groups,
        "head_dim": config.head_dim,
        "intermediate_size": config.ffn_size,
    }


# -- which layers have a window --------------------------------------------------------------------


def layer_types(config: DecoderConfig) -> list[str]:
    return [FULL if config.window_of(i) is None else SLIDING for i in range(config.num_layers)]


def import_pattern(external: Mapping[str, Any], default: int) -> int | str:
    """sliding_window_pattern from layer_types, if it is given: every so many layers one has no window, else a pattern.
    Raises ConfigError for another kind of layer, or another number of them."""
    kinds = external.get("layer_types")
    if kinds is None:
        return external.get("sliding_window_pattern") or external.get("_sliding_window_pattern") or default
    # The first global layer gives the period. Without any, a period beyond the last layer says the same.
    pattern = kinds.index(FULL) + 1 if FULL in kinds else len(kinds) + 1
    if list(kinds) == [SLIDING if (i + 1) % pattern else FULL for i in range(len(kinds))]:
        return pattern
    layers = external.get("num_hidden_layers", len(kinds))
    if len(kinds) != layers or set(kinds) - {FULL, SLIDING}:
        raise ConfigError(
            f"layer_types={kinds} is not supported; it can be {FULL} or {SLIDING} for each of num_hidden_layers="
            f"{layers}"
        )
    return pattern_of([kind == SLIDING for kind in kinds])


def require_full_attention(external: Mapping[str, Any]) -> None:
    """Raises ConfigError for a layer_types with another kind."""
    others = {kind for kind in external.get("layer_types") or () if kind != FULL}
    if others:
        raise ConfigError(f"layer_types has {', '.join(sorted(others))}, which is not supported; it can be {FULL}")


# -- rope scaling ----------------------------------------------------------------------------------

ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters")

_SCALING_FIELDS: Mapping[str, Mapping[str, str]] = {
    "default": {},
    "linear": {"factor": "rope_scaling_factor"},
    "dynamic": {"factor": "rope_scaling_factor"},
    "llama3": {
        "factor": "rope_scaling_factor",
        "original_max_position_embeddings": "original_max_position_embeddings",
        "low_freq_factor": "rope_low_freq_factor",
        "high_freq_factor": "rope_high_freq_factor",
    },
    "yarn": {
        "factor": "rope_scaling_factor",
        "original_max_position_embeddings": "original_max_position_embeddings",
        "attention_factor": "rope_attention_factor",
        "beta_fast": "rope_beta_fast",
        "beta_slow": "rope_beta_slow",
        "mscale": "rope_mscale",
        "mscale_all_dim": "rope_mscale_all_dim",
        "truncate": "rope_truncate",
    },
    "longrope": {
        "factor": "rope_scaling_factor",
        "original_max_position_embeddings": "original_max_position_embeddings",
        "short_factor": "rope_short_factor",
        "long_factor": "rope_long_factor",
        "attention_factor": "rope_attention_factor",
    },
}
"""rope_type -> its parameters in Hugging Face's format -> keys of [model]."""


def require_even_heads(config: Heads, name: str) -> None:
    """Raises ConfigError for an explicit head size, which a Hugging Face model `name` has no key for."""
    even = config.hidden_size // config.num_attention_heads
    if config.head_dim != even:
        raise ConfigError(
            f"model.kv_channels={config.head_dim} cannot be written as a Hugging Face {name}, whose heads have "
            f"hidden_size / num_attention_heads = {even} channels"
        )


SCALING_PARAMETERS = {key for table in _SCALING_FIELDS.values() for key in table}
"""Parameters of all types of transformers, also of those that no family here has."""


def rope_table(external: Mapping[str, Any], default_base: float = 10000.0, **class_defaults: Any) -> dict[str, Any]:
    """`rope_parameters` (transformers 5) or `rope_scaling` (before) in the form of the former: with rope_type and
    rope_theta, and without parameters that are null or do not count. class_defaults: parameters of the class beside
    those of the scalings, with what they are where no table says it.

    Raises ConfigError where a file has both and they differ: which one counts depends on the version that reads it.
    """
    # Where a table does not say the base, it stands beside it.
    beside = {"rope_type": "default", "rope_theta": external.get("rope_theta", default_base), **class_defaults}
    tables = {key: _current_table(external[key], class_defaults) for key in _TABLES if external.get(key)}
    parameters = one_of({key: {**beside, **table} for key, table in tables.items()}, _TABLES, beside)
    return dict(parameters)


_TABLES = ("rope_parameters", "rope_scaling")


def _current_table(table: Mapping[str, Any], class_parameters: Collection[str]) -> dict[str, Any]:
    """Under current names, without parameters that are null or those of other types or classes."""
    kind = str(table.get("rope_type", table.get("type", "default")))
    others = SCALING_PARAMETERS - set(_SCALING_FIELDS.get(kind, SCALING_PARAMETERS)) | {"mrope_section"}
    if kind == "default":
        # A class that rotates whole heads reads it for scaled frequencies alone.
        others.add("partial_rotary_factor")
    left_out = others - set(class_parameters) | {"type"}
    return {
        **{key: value for key, value in table.items() if value is not None and key not in left_out},
        "rope_type": kind,
    }


def import_rope(external: Mapping[str, Any], default_base: float = 10000.0) -> dict[str, Any]:
    """Keys of [model] from `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (before)."""
    table = rope_table(external, default_base)
    name = next((key for key in _TABLES if external.get(key)), "rope_theta")
    return {"rotary_base": float(table.pop("rope_theta")), **import_scaling(table, name)}


def import_rope_and_share(
    external: Mapping[str, Any], default_share: float, default_base: float = 10000.0
) -> dict[str, Any]:
    """The same for a class that rotates a share of each head, which stands in the table or beside it."""
    table = rope_table(
        external, default_base, partial_rotary_factor=external.get("partial_rotary_factor", default_share)
    )
    share = float(table.pop("partial_rotary_factor"))
    return {**import_rope({"rope_parameters": table}), "rotary_percent": share}


def import_partial_rope(
    external: Mapping[str, Any], family: str, shares: tuple[str, ...], bases: tuple[str, ...], default_share: float
) -> dict[str, Any]:
    """Keys of [model] for a family that rotates a share of each head and has no scaled frequencies.

    Up to three generations of keys say the share and the base: those named in `shares` and `bases`, and both within
    rope_parameters or rope_scaling. Raises ConfigError for a file in which they differ.
    """
    outside = {
        "rope_theta": one_of(external, bases, 10000.0),
        "partial_rotary_factor": float(one_of(external, shares, default_share)),
    }
    table = rope_table({**external, **outside}, partial_rotary_factor=outside["partial_rotary_factor"])
    stated = {**external, **{f"rope_parameters.{key}": value for key, value in table.items()}}
    share = float(one_of(stated, ("rope_parameters.partial_rotary_factor", *shares), default_share))
    base = one_of(stated, ("rope_parameters.rope_theta", *bases), 10000.0)
    table.pop("partial_rotary_factor", None)
    values = import_rope({"rope_parameters": {**table, "rope_theta": base}})
    if "rope_scaling_type" in values:
        raise ConfigError(
            f"rope_parameters or rope_scaling of type {values['rope_scaling_type']} is not supported in a {family}; it "
            "can be null or default"
        )
    return {**values, "rotary_percent": share, "position_embedding_type": "rope"}


def import_scaling(table: Mapping[str, Any], name: str = "rope_scaling") -> dict[str, Any]:
    """Keys of [model] from the parameters of one scaling, which stands under `name`. Raises ConfigError for an unknown
    type or parameter."""
    parameters = _current_table(table, ())
    kind = str(parameters.pop("rope_type", "default"))
    fields = _SCALING_FIELDS[require_known(f"{name}.rope_type", kind, _SCALING_FIELDS)]
    if (share := parameters.pop("partial_rotary_factor", 1.0)) != 1.0:
        raise ConfigError(f"{name}.partial_rotary_factor={share!r} is not supported; it can be 1.0")
    # A parameter that is not known may change frequencies: reading on would give a model that is subtly wrong.
    if unknown := sorted(set(parameters) - set(fields)):
        raise ConfigError(
            f"{name} of type {kind} has parameters that are not known: "
            f"{', '.join(f'{key}={parameters[key]!r}' for key in unknown)}; known are {', '.join(fields) or 'none'}"
        )
    if kind == "default":
        return {}
    values = {ours: _number(key, parameters[key]) for key, ours in fields.items() if key in parameters}
    return {"rope_scaling_type": kind, **values}


def export_rope(config: DecoderConfig) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling`, which every version of transformers reads."""
    return {"rope_theta": config.rotary_base, "rope_scaling": export_scaling(config)}


def export_scaling(config: DecoderConfig) -> dict[str, Any] | None:
    if config.rope_scaling_type == "none":
        return None
    require_known("model.rope_scaling_type", config.rope_scaling_type, ("none", *_SCALING_FIELDS))
    fields = _SCALING_FIELDS[config.rope_scaling_type]
    values = {theirs: getattr(config, ours) for theirs, ours in fields.items()}
    if "original_max_position_embeddings" in fields:
        # Here null means max_position_embeddings; the reader there would take a default of its own.
        values["original_max_position_embeddings"] = (
            config.original_max_position_embeddings or config.max_position_embeddings
        )
    return {"rope_type": config.rope_scaling_type, **{key: value for key, value in values.items() if value is not None}}


def _number(key: str, value: Any) -> Any:
    """Whole numbers of real-valued parameters are often written without a point."""
    if key in ("original_max_position_embeddings", "truncate"):
        return value
    return [float(number) for number in value] if isinstance(value, list) else float(value)
