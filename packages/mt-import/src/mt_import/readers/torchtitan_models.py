"""Models that torchtitan's configurations name by `model.name` and `model.flavor`, and the presets that they are here.

Sizes are those of torchtitan 0.2 (`models/*/__init__.py`), and of its first configurations for Llama 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mt_core.errors import ConfigError, did_you_mean
from mt_core.plugins import PluginHost
from mt_core.specs import MODELS

Keys = dict[str, Any]
PRESETS: Mapping[tuple[str, str], tuple[str, str]] = {
    ("llama3", "8B"): ("llama", "llama3-8b"),
    ("llama3", "70B"): ("llama", "llama3-70b"),
    ("llama3", "405B"): ("llama", "llama3.1-405b"),
    ("llama3", "debugmodel"): ("llama", "llama3-8b"),
    ("deepseek_v3", "16B"): ("deepseek", "deepseek-v2-lite"),
    ("deepseek_v3", "236B"): ("deepseek", "deepseek-v2"),
    ("deepseek_v3", "671B"): ("deepseek", "deepseek-v3"),
    ("deepseek_v3", "debugmodel"): ("deepseek", "deepseek-v2-lite"),
    **{("qwen3", size): ("qwen", f"qwen3-{size.lower()}") for size in ("0.6B", "1.7B", "4B", "8B", "14B", "32B")},
    **{("qwen3", size): ("qwen_moe", f"qwen3-{size.lower()}") for size in ("30B-A3B", "235B-A22B")},
    ("qwen3", "debugmodel"): ("qwen", "qwen3-0.6b"),
    ("qwen3", "debugmodel_moe"): ("qwen_moe", "qwen3-30b-a3b"),
    **{("gpt_oss", size): ("gpt_oss", f"gpt-oss-{size}") for size in ("20b", "120b")},
    ("gpt_oss", "debugmodel"): ("gpt_oss", "gpt-oss-20b"),
    **{("llama4", f"17bx16e{kind}"): ("llama4", "llama4-scout") for kind in ("", "_irope")},
    **{("llama4", f"17bx128e{kind}"): ("llama4", "llama4-maverick") for kind in ("", "_irope")},
    **{("llama4", f"debugmodel{kind}"): ("llama4", "llama4-maverick") for kind in ("", "_irope")},
    **{("llama2", size): ("llama", f"llama2-{size.lower()}") for size in ("7B", "13B", "70B")},
}
"""(model, flavor) -> (family, preset), where both have the same sizes but for those of SIZES."""
MASKS: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("llama3", "debugmodel"): ("debugmodel_flex_attn", "debugmodel_varlen_attn"),
    ("llama3", "8B"): ("8B_flex", "8B_varlen"),
    ("deepseek_v3", "debugmodel"): ("debugmodel_flex_attn",),
}
"""(model, flavor) -> flavors of the same sizes, whose positions see their own document alone."""
WITHIN_DOCUMENTS = {
    *((model, flavor) for (model, _), flavors in MASKS.items() for flavor in flavors),
    *(("deepseek_v3", size) for size in ("16B", "236B", "671B")),
    *(("llama4", f"{size}_irope") for size in ("debugmodel", "17bx16e", "17bx128e")),
}
"""(model, flavor) with torchtitan's mask `block_causal`."""
LLAMA4: Keys = {"qk_l2_norm": False, "query_scaling_beta": 0.0}
"""torchtitan's attention has no norm of queries and keys, and scales no queries."""
LLAMA4_SCALED: Keys = {
    "rope_scaling_type": "llama3",
    "rope_scaling_factor": 16.0,
    "rope_low_freq_factor": 1.0,
    "rope_high_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
}
LLAMA4_DEBUG: Keys = {
    **LLAMA4,
    **LLAMA4_SCALED,
    "num_layers": 6,
    "hidden_size": 256,
    "num_attention_heads": 16,
    "num_query_groups": 16,
    "kv_channels": 16,
    "ffn_hidden_size": 768,
    "vocab_size": 2048,
    "moe": {
        "num_experts": 8,
        "moe_ffn_hidden_size": 512,
        "moe_shared_expert_intermediate_size": 512,
        "moe_layer_freq": "([0]*1+[1]*1)*3",
    },
}
EVERYWHERE = 10485760
"""A chunk longer than any sequence, for flavors whose layers all see everything before."""
SIZES: Mapping[tuple[str, str], Keys] = {
    ("llama4", "17bx16e"): {**LLAMA4, **LLAMA4_SCALED, "no_rope_freq": "([0]*48)", "attention_chunk_size": EVERYWHERE},
    ("llama4", "17bx16e_irope"): {**LLAMA4, **LLAMA4_SCALED, "no_rope_freq": "([1]*1+[0]*3)*12"},
    ("llama4", "17bx128e"): {**LLAMA4, "no_rope_freq": "([0]*48)", "attention_chunk_size": EVERYWHERE},
    ("llama4", "17bx128e_irope"): {**LLAMA4, "no_rope_freq": "([1]*1+[0]*3)*12"},
    ("llama4", "debugmodel"): {**LLAMA4_DEBUG, "no_rope_freq": "([0]*6)", "attention_chunk_size": EVERYWHERE},
    ("llama4", "debugmodel_irope"): {
        **LLAMA4_DEBUG,
        "no_rope_freq": "([1]*1+[0]*3+[1]*1+[0]*1)",
        "attention_chunk_size": 256,
    },
    ("llama3", "debugmodel"): {
        "num_layers": 6,
        "hidden_size": 256,
        "num_attention_heads": 16,
        "num_query_groups": 16,
        "ffn_hidden_size": 768,
        "vocab_size": 2048,
    },
    ("deepseek_v3", "debugmodel"): {
        "num_layers": 6,
        "hidden_size": 256,
        "num_attention_heads": 16,
        "ffn_hidden_size": 1024,
        "vocab_size": 2048,
        "rope_mscale": 0.7,
        "rope_mscale_all_dim": 0.7,
        "moe": {
            "num_experts": 8,
            "moe_router_topk": 3,
            "moe_ffn_hidden_size": 256,
            "moe_shared_expert_intermediate_size": 512,
            "moe_layer_freq": "([0]*1+[1]*5)",
        },
    },
    ("qwen3", "debugmodel"): {
        "num_layers": 8,
        "hidden_size": 256,
        "num_attention_heads": 16,
        "vocab_size": 2048,
    },
    ("qwen3", "debugmodel_moe"): {
        "num_layers": 8,
        "hidden_size": 256,
        "num_attention_heads": 16,
        "num_query_groups": 8,
        "ffn_hidden_size": 3072,
        "vocab_size": 2048,
        "moe": {"num_experts": 64},
    },
    ("qwen3", "235B-A22B"): {"rotary_base": 5000000.0},  # that of its later release
    ("gpt_oss", "debugmodel"): {"num_layers": 4, "hidden_size": 256, "moe": {"num_experts": 8}},
}
"""(model, flavor) -> values of the preset that are others there."""
NOT_HERE: Mapping[str, str] = {
    "flux": "images from text are in no family here",
    "transformers_modeling_backend": "it is the model of [hf_transformers] model; mt convert reads its checkpoint, and "
    "its configuration is the [model] section",
}
"""torchtitan's models that no preset can be -> why."""


def without_mask(name: str, flavor: str) -> str:
    """The flavor that has the sizes of this one."""
    same = {(model, one): base for (model, base), flavors in MASKS.items() for one in flavors}
    return same.get((name, flavor), flavor)


def family_of(name: str, flavor: str) -> str:
    return PRESETS[name, without_mask(name, flavor)][0]


def model_section(name: str, flavor: str, host: PluginHost) -> Keys:
    """Section [model]. Raises ConfigError for a model or flavor that no preset is."""
    flavor = without_mask(name, flavor)
    if (name, flavor) not in PRESETS:
        if name in NOT_HERE:
            raise ConfigError(f"model.name={name} cannot be imported: {NOT_HERE[name]}")
        known = [f"{model} {size}" for model, size in PRESETS]
        raise ConfigError(
            f"model.name={name} with flavor={flavor} is the size of no preset; it can be {', '.join(known)}"
            f"{did_you_mean(f'{name} {flavor}', known)}"
        )
    family, preset = PRESETS[name, flavor]
    presets: Any = host[MODELS].get(family).presets
    presets = presets.load() if hasattr(presets, "load") else presets
    values, sizes = presets[preset]["model"], SIZES.get((name, flavor), {})
    section = {"family": family, **values, **sizes}
    if "moe" in sizes:
        section["moe"] = {**values["moe"], **sizes["moe"]}
    return section


def note_on_model(name: str, flavor: str) -> str:
    flavor = without_mask(name, flavor)
    preset = PRESETS[name, flavor][1]
    sizes = f" with {', '.join(sorted(SIZES[name, flavor]))} of {flavor}" if (name, flavor) in SIZES else ""
    return f"[model] is the preset {preset}{sizes}: the published model, with its routing and scaling of positions"
