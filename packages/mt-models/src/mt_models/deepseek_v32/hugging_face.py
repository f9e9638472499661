"""DeepSeek-V3.2 (`deepseek_v32`) and GLM-5 (`glm_moe_dsa`) in Hugging Face's format: DeepSeek-V3's names and keys, and
those of the indexer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mt_core.config.layer_pattern import pattern_of
from mt_core.config_map import ConfigMap, Field, Fixed
from mt_core.errors import ConfigError
from mt_core.name_map import NameMap, Rule, Same
from mt_models.blocks.hugging_face_decoder import OURS, ROPE_KEYS, THEIRS, decoder_fields, decoder_name_map
from mt_models.blocks.hugging_face_moe import BIAS_KEY, MOE_IGNORED
from mt_models.blocks.moe import MoEOptions
from mt_models.deepseek import hugging_face as deepseek
from mt_models.deepseek_v32.config import DeepseekV32Config
from mt_models.hugging_face import IGNORED, HuggingFaceFamily, require_value

DEEPSEEK, GLM = "deepseek_v32", "glm_moe_dsa"
FULL, SHARED = "full", "shared"
"""Values of `indexer_types`."""

# -- tensors -----------------------------------------------------------------------------------------

INDEXER = {
    "linear_wq_b.weight": "wq_b.weight",
    "linear_wk.weight": "wk.weight",
    "k_norm.weight": "k_norm.weight",
    "k_norm.bias": "k_norm.bias",
    "linear_weights_proj.weight": "weights_proj.weight",
}


def name_map(config: DeepseekV32Config) -> NameMap:
    layers = [rule for number in range(config.num_layers) for rule in layer_rules(config, number)]
    return decoder_name_map(config, [*layers, *deepseek.prediction_rules(config, layer_rules)])


def layer_rules(config: DeepseekV32Config, number: int) -> list[Rule]:
    rules = deepseek.layer_rules(config, number)
    if config.indexer_of(number) != number:
        return rules
    ours, theirs = f"{OURS}self_attention.core_attention.indexer.", f"{THEIRS}self_attn.indexer."
    return [
        *rules,
        *(Same(ours + canonical, theirs + external).for_layer(number) for canonical, external in INDEXER.items()),
    ]


# -- configuration -----------------------------------------------------------------------------------

SHARING = ("indexer_types", "index_topk_pattern", "index_topk_freq", "index_skip_topk_offset")


def model_type_of(config: DeepseekV32Config) -> str:
    return GLM if config.dsa_indexer_rope_interleaved else DEEPSEEK


def import_extra(external: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """defaults: of the class, for what a file leaves out and DeepSeek-V3 has another default for."""
    if external.get("q_lora_rank", 1) is None:
        raise ConfigError("q_lora_rank=None is not supported: the queries of the indexer come from the same latent")
    with_defaults = {**defaults, **{key: value for key, value in external.items() if value is not None}}
    if with_defaults.get(deepseek.KINDS) is not None:
        # The classes read it alone, and write the other beside it.
        with_defaults.pop("first_k_dense_replace", None)
    # These classes set it to qk_rope_head_dim, whatever a file says.
    with_defaults.pop("head_dim", None)
    kinds = with_defaults.pop("layer_types", None)
    if kinds is not None and set(kinds) != {"indexed_attention"}:
        raise ConfigError(f"layer_types={kinds} is not supported; every layer can be indexed_attention alone")
    return deepseek.v3_import_extra(with_defaults)


def import_sharing(external: Mapping[str, Any]) -> dict[str, Any]:
    """Which layers of a GLM-5 have an indexer: a period, or a pattern. Raises ConfigError for other kinds of layers,
    and for a first layer without one."""
    layers = external.get("num_hidden_layers", 78)
    kinds = _indexer_types(external, layers)
    for freq, offset in _periods(layers):
        if kinds == _types(layers, freq, offset):
            return {"dsa_indexer_topk_freq": freq, "dsa_indexer_skip_topk_offset": offset} if freq > 1 else {}
    if len(kinds) != layers or set(kinds) - {FULL, SHARED} or kinds[0] != FULL:
        raise ConfigError(
            f"indexer_types={kinds} is not supported; it needs {FULL} or {SHARED} for each of num_hidden_layers="
            f"{layers}, and {FULL} for the first"
        )
    return {"dsa_indexer_pattern": pattern_of([kind == FULL for kind in kinds])}


def _periods(layers: int) -> list[tuple[int, int]]:
    return [(1, 0), *((freq, offset) for freq in range(2, layers + 1) for offset in range(1, layers + 1))]


def _types(layers: int, freq: int, offset: int) -> list[str]:
    return [FULL if max(layer + 1 - offset, 0) % freq == 0 else SHARED for layer in range(layers)]


def _indexer_types(external: Mapping[str, Any], layers: int) -> list[str]:
    if (indexer_types := external.get("indexer_types")) is not None:
        return list(indexer_types)
    if (pattern := external.get("index_topk_pattern")) is not None:
        names = {"F": FULL, "S": SHARED}
        return [names.get(kind, kind) for kind in pattern]
    return _types(layers, max(external.get("index_topk_freq", 1), 1), external.get("index_skip_topk_offset", 2))


def import_deepseek(external: Mapping[str, Any]) -> dict[str, Any]:
    return import_extra(external, {})


GLM_DEFAULTS = {
    "num_hidden_layers": 78,
    "n_group": 1,
    "topk_group": 1,
    "rms_norm_eps": 1e-5,
}


def import_glm(external: Mapping[str, Any]) -> dict[str, Any]:
    values = import_extra(external, GLM_DEFAULTS)
    return {**values, **import_sharing(external), "dsa_indexer_rope_interleaved": True}


def export_extra(model: Mapping[str, Any]) -> dict[str, Any]:
    config = DeepseekV32Config.model_validate(model)
    kind = model_type_of(config)
    require_value(config, "dsa_indexer_k_norm_epsilon", (1e-6,), kind)
    require_value(config, "dsa_dense_warmup", (False,), kind)
    ordered = config.moe is None or MoEOptions(config).first_dense is not None
    own_keys = {key for key in DeepseekV32Config.model_fields if key.startswith("dsa_")}
    # Dense layers behind others: the list of the classes says it, which no number can.
    values = deepseek.v3_export_extra(config.model_dump(mode="json", exclude=own_keys), kind, listed=not ordered)
    values["head_dim"] = config.qk_pos_emb_head_dim
    if kind == GLM:
        values["indexer_types"] = [
            FULL if config.indexer_of(layer) == layer else SHARED for layer in range(config.num_layers)
        ]
    else:
        require_value(config, "dsa_indexer_topk_freq", (1,), kind)
        require_value(config, "dsa_indexer_pattern", (None,), kind)
    return values


def _map(kind: str, *, positions: int, epsilon: float, heads: int, sizes: Mapping[str, int], **parts: Any) -> ConfigMap:
    """The map of one class. positions, epsilon, heads (of the indexer), sizes: its defaults."""
    overridden = ("q_lora_rank", "qk_nope_head_dim", "v_head_dim")
    return ConfigMap(
        architecture=kind,
        fields=(
            *decoder_fields(tied=False, positions=positions, epsilon=epsilon),
            *(field for field in deepseek.FIELDS if field.theirs not in overridden),
            Field("q_lora_rank", "q_lora_rank", default=sizes["q_lora_rank"]),
            Field("qk_nope_head_dim", "qk_head_dim", default=sizes["qk_nope_head_dim"]),
            Field("v_head_dim", "v_head_dim", default=sizes["v_head_dim"]),
            Field("index_n_heads", "dsa_indexer_n_heads", default=heads),
            Field("index_head_dim", "dsa_indexer_head_dim", default=128),
            Field("index_topk", "dsa_indexer_topk", default=2048),
        ),
        ignored={**IGNORED, **MOE_IGNORED, **deepseek.DERIVED, **NOT_READ},
        spellings={**deepseek.SPELLINGS, "num_experts": "n_routed_experts"},
        export_extra=export_extra,
        **parts,
    )


NOT_READ = {
    "rope_interleave": "the class has interleaved rotary positions in attention whatever it says",
}
EXTRA_KEYS = (
    *ROPE_KEYS, *deepseek.MOE_KEYS, *deepseek.ATTENTION_KEYS, "norm_topk_prob", BIAS_KEY, deepseek.KINDS, "layer_types"
)  # fmt: skip
FIXED = (*deepseek.FIXED, Fixed("scoring_func", ("sigmoid",)), Fixed("mlp_bias", (False,)))

V32 = _map(
    DEEPSEEK,
    positions=163840,
    epsilon=1e-6,
    heads=64,
    sizes={"q_lora_rank": 1536, "qk_nope_head_dim": 128, "v_head_dim": 128},
    fixed=(*FIXED, Fixed("indexer_rope_interleave", (False,), written=False)),
    import_extra=import_deepseek,
    import_extra_keys=EXTRA_KEYS,
)
GLM_5 = _map(
    GLM,
    positions=202752,
    epsilon=1e-5,
    heads=32,
    sizes={"q_lora_rank": 2048, "qk_nope_head_dim": 192, "v_head_dim": 256},
    fixed=(*FIXED, Fixed("indexer_rope_interleave", (True,))),
    import_extra=import_glm,
    import_extra_keys=(*EXTRA_KEYS, *SHARING),
)

HUGGING_FACE = HuggingFaceFamily(
    family="deepseek_v32",
    model_types={DEEPSEEK: V32, GLM: GLM_5},
    name_map=name_map,
    model_type_of=model_type_of,
    copies=deepseek.copies,
    architectures={DEEPSEEK: "DeepseekV32ForCausalLM", GLM: "GlmMoeDsaForCausalLM"},
    held=deepseek.held,
)
