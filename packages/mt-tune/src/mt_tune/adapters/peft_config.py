"""adapter_config.json of PEFT and the section [adapter], in both directions.

A key that is not known here is an error unless it is turned off: PEFT's reader drops it with a warning, and the model
computes something else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mt_core.errors import ConfigError

CONFIG = "adapter_config.json"
PREFIX = "base_model.model."
TYPES = {"LORA": "lora", "VERA": "vera", "IA3": "ia3", "TRAINABLE_TOKENS": "trainable_tokens"}

STACKED = (".experts.w1", ".experts.w2", ".experts.w3")
"""Ends of names of modules that hold a stack of matrices of all experts."""
IGNORED = frozenset(
    {
        "peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision",
        "inference_mode", "target_modules", "exclude_modules", "target_parameters", "layers_to_transform",
        "layers_pattern", "modules_to_save", "r", "lora_alpha", "lora_dropout", "use_rslora", "use_dora",
        "rank_pattern", "alpha_pattern", "trainable_token_indices", "init_lora_weights", "fan_in_fan_out",
        "megatron_core", "megatron_config", "projection_prng_key", "save_projection", "vera_dropout", "d_initial",
        "feedforward_modules", "init_ia3_weights", "init_weights", "token_indices", "qalora_group_size",
        "loftq_config", "runtime_config", "ensure_weight_tying", "bias",
    }
)  # fmt: skip
"""Keys that are read here, or that change nothing that a saved adapter computes."""


def read_config(folder: Path) -> dict[str, Any]:
    """The contents of adapter_config.json. Raises ConfigError for a file that is none, and for keys that change what
    the adapter computes and are not supported."""
    file = folder / CONFIG
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read as the configuration of a PEFT adapter: {error}") from None
    if not isinstance(content, dict) or content.get("peft_type") not in TYPES:
        peft_type = content.get("peft_type") if isinstance(content, dict) else None
        raise ConfigError(f"{file}: peft_type={peft_type!r} is not supported; it can be {', '.join(TYPES)}")
    unknown = [f"{key}={value!r}" for key, value in content.items() if key not in IGNORED and _is_on(value)]
    if unknown:
        raise ConfigError(f"{file}: {', '.join(unknown)} changes what the adapter computes and is not supported")
    _require_plain(file, content)
    return content


def _is_on(value: Any) -> bool:
    return value not in (None, False, 0, 0.0, "", [], {})


def _require_plain(file: Path, content: Mapping[str, Any]) -> None:
    if content.get("bias", "none") != "none":
        raise ConfigError(f"{file}: bias={content['bias']!r} is not supported; it can be 'none'")
    init = content.get("init_lora_weights", True)
    reduces = isinstance(init, str) and init.split("_niter")[0] in ("pissa", "olora", "corda", "loftq", "lora_ga")
    if reduces:
        raise ConfigError(
            f"{file}: init_lora_weights={init!r}: the adapter belongs to a base that was reduced by its initial "
            "values, not to the original one; save it with path_initial_model_for_weight_conversion, which converts it"
        )


def section_of(content: Mapping[str, Any], modules: Iterable[str]) -> dict[str, Any]:
    """Keys of [adapter] that describe the adapter. modules: names of modules that the folder has tensors of."""
    kind, modules = TYPES[content["peft_type"]], {re.sub(r"\.experts\.\d+\.", ".experts.0.", name) for name in modules}
    section: dict[str, Any] = {"type": "dora" if content.get("use_dora") else kind}
    if kind in ("lora", "vera"):
        section["rank"] = int(content.get("r", 8))
    if kind == "lora":
        section |= {
            "alpha": float(content.get("lora_alpha", 8)),
            "rslora": bool(content.get("use_rslora", False)),
            "rank_pattern": dict(content.get("rank_pattern") or {}),
            "alpha_pattern": {key: float(value) for key, value in (content.get("alpha_pattern") or {}).items()},
        }
    if kind == "vera":
        section |= {"projection_prng_key": int(content.get("projection_prng_key") or 0)}
    if kind == "ia3":
        section["feedforward_targets"] = _feedforward(content.get("feedforward_modules"), modules)
    if kind != "trainable_tokens":
        section["targets"] = _targets(content, list(modules))
    if any(".experts.0." in name for name in modules):
        section["experts"] = "per_expert"
    if any(name.endswith(STACKED) for name in modules):
        section["experts"] = "shared_outer"
    tokens = content.get("token_indices" if kind == "trainable_tokens" else "trainable_token_indices")
    if tokens:
        section["trainable_token_indices"] = list(next(iter(tokens.values())) if isinstance(tokens, dict) else tokens)
    if content.get("modules_to_save"):
        section["modules_to_save"] = list(content["modules_to_save"])
    return section


def _targets(content: Mapping[str, Any], modules: list[str]) -> list[str]:
    """Names of targets. A list of PEFT's means ends of names, as targets do; an expression is replaced by the names of
    the modules that have tensors."""
    named, parameters = content.get("target_modules"), content.get("target_parameters") or []
    plain = (
        isinstance(named, list) and content.get("layers_to_transform") is None and not content.get("exclude_modules")
    )
    of_parameters = [_target_of(name, modules) for name in parameters]
    if plain:
        assert isinstance(named, list)
        return [*sorted(named), *sorted(of_parameters)]
    fused = {name.rpartition(".")[0] for name in parameters}
    return [*sorted(name for name in modules if not any(name.endswith(f) for f in fused)), *sorted(of_parameters)]


def _target_of(parameter: str, modules: Iterable[str]) -> str:
    """A target that means a parameter alone, where a module may have a name that ends like it (down_proj)."""
    if "." not in parameter and any(name.endswith(".experts") for name in modules):
        return f"experts.{parameter}"
    return parameter.removesuffix(".weight")


def _feedforward(value: Any, modules: Iterable[str]) -> list[str]:
    """A list of ends of names, or an expression of whole names."""
    if isinstance(value, str):
        return sorted(name for name in modules if re.fullmatch(value, name))
    return sorted(value or [])


# -- writing ----------------------------------------------------------------------------------------------


def written_config(peft_type: str, keys: Mapping[str, Any], base: str | None) -> dict[str, Any]:
    """The contents of adapter_config.json. base: path of the model that the adapter belongs to."""
    return {
        "peft_type": peft_type,
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "modules_to_save": None,
        **keys,
    }


def shortened(names: Iterable[str], others: Iterable[str]) -> list[str]:
    """Ends of names, which PEFT takes as targets, where no other module ends so too; else whole names."""
    chosen, rest = sorted(set(names)), set(others)
    ends = {name.rpartition(".")[2] for name in chosen}
    if any(name.rpartition(".")[2] in ends for name in rest):
        return chosen
    return sorted(ends)
