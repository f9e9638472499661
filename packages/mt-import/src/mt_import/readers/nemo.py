"""NeMo 1.x's keys that say a thing in other words than Megatron, or that Megatron-LM has no option for.

Facts of NeMo 1.23 (`core/optim/lr_scheduler.py`, `collections/nlp/models/language_modeling`). Everything here works on
the flat form: dotted path -> value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mt_core.errors import ConfigError, did_you_mean
from mt_import.megatron_arguments.translation import Account
from mt_import.readers.nemo_gemma2 import gemma2_keys, is_of_gemma2

MISSING = "???"
"""Value that the command line has to give."""
GIVEN_LATER = ("model.data.", "model.tokenizer.")
"""Keys whose values a file may leave to the command line: data and tokenizer are added to what is imported."""
ACTIVATION, EMBEDDING = "model.activation", "model.apply_embedding_scaling"
POSITIONS = "model.position_embedding_type"
PARALLEL = "mcore_customization_config.parallel_attention"
GEGLU = ("geglu", "fast-geglu")
DATA, MOCK = "model.data.data_prefix", "model.data.mock_dataset"
SCHEDULER = "model.optim.sched"
STYLES: Mapping[str, str] = {"CosineAnnealing": "cosine", "WarmupAnnealing": "linear"}
"""Policy of the learning rate -> Megatron's lr_decay_style."""
OPTIMIZERS = ("fused_adam", "distributed_fused_adam", "megatron_fused_adam", "mcore_distributed_optim", "adamw")
DISTRIBUTED_OPTIMIZERS = ("distributed_fused_adam", "mcore_distributed_optim")
NORMALIZATIONS: Mapping[str, str] = {
    "layernorm": "LayerNorm",
    "rmsnorm": "RMSNorm",
    "layernorm1p": "LayerNorm",
    # In the precision of the activations there, with sums in fp32 here.
    "low_precision_layernorm": "LayerNorm",
}
OTHER_MODELS: Mapping[str, str] = {
    "model.encoder.": "an encoder and a decoder with options of their own; write model.family=t5",
    "model.data.seq_length_dec": "an encoder and a decoder; write model.family=t5",
    "model.retro.": "retrieval; write model.family=retro, see docs/models/retro.md",
    "model.peft.": "finetuning of a .nemo file, which is not read",
    "model.restore_from_path": "finetuning of a .nemo file, which is not read",
}
"""Beginning of keys of files that are not imported -> why. Without a value they do not count."""
CHANGES: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "model.headscale": ((False,), "a scale of each head"),
    "model.transformer_block_type": (("pre_ln",), "norms in another place"),
    "model.attention_type": (("multihead",), "heads of another kind"),
    "model.normalize_attention_scores": ((True,), "scores that are not divided by the root of the head's size"),
    "model.ffn_dropout": ((0,), "dropout within the feed-forward"),
    "model.use_scaled_init_method": ((True,), "the same deviation for all matrices at the start"),
    "mcore_customization_config.new_decoder_architecture": ((False,), "two norms side by side"),
    # A file for all of Megatron-Core's models names its own.
    **dict.fromkeys(("model.model_parent", "model.model_name", "model.data.dataset_type"), (("gpt",), "another model")),
    "model.data.drop_last": ((True,), "a last batch that is not full"),
}
"""Keys that change what is computed -> (values with which they do not, what others request)."""


OFF: Mapping[str, tuple[str, ...]] = {
    "model.fsdp": ("model.fsdp_",),
    "model.cpu_offloading": ("model.cpu_offloading_",),
    "model.data.add_fim": ("model.data.fim.",),
    "model.pipeline_model_parallel_split_rank": ("model.pipeline_model_parallel_split_rank",),
}
"""Switch -> beginnings of keys that count with it alone."""
FIM = "model.data.fim."
FIM_NAMES: Mapping[str, str] = {
    **{name: f"fim_{name}" for name in ("rate", "spm_rate", "split_sample", "fragment_rate", "no_prefix")},
    **{f"extra_tokens.{name}": f"fim_{name}_token" for name in ("prefix", "middle", "suffix", "pad", "eod")},
}
"""Key of NeMo's fill-in-the-middle -> Megatron's."""
RECOMPUTE = "model.activations_checkpoint_"
OF_SELECTIVE = "which layers recompute their attention changes memory alone; here all do"


@dataclass(frozen=True)
class NemoValues:
    """flat: with Megatron's words in place of NeMo's. entry: name of the script that trains such a model. missing: keys
    that the command line has to give. accounts: of what cannot be done or has no effect. of_gpt: keys of [model] of the
    family gpt, which Megatron has no words for. of_gemma2: keys of the family gemma, of a Gemma 2, and `positions` that
    it has."""

    flat: dict[str, Any]
    entry: str
    missing: list[str]
    accounts: list[Account]
    of_gpt: dict[str, NemoKey]
    of_gemma2: dict[str, Any] | None = None
    positions: int = 0


@dataclass(frozen=True)
class NemoKey:
    """path: NeMo's. keys: of our [model]."""

    path: str
    keys: dict[str, Any]


def in_megatrons_words(flat: Mapping[str, Any]) -> NemoValues:
    """Raises ConfigError for another kind of model, and for a schedule, optimizer or norm that is not read."""
    for beginning, why in OTHER_MODELS.items():
        if keys := [key for key, value in flat.items() if key.startswith(beginning) and value is not None]:
            raise ConfigError(f"{keys[0]}: {why}")
    flat = {key: value for key, value in flat.items() if not _is_off(key, flat)}
    missing = [key for key, value in flat.items() if value == MISSING]
    # A file may have the key as a comment alone; then there is no training without it either.
    missing += [] if flat.get(DATA) is not None or flat.get(MOCK) else [DATA]
    changed = [key for key, (same, _) in CHANGES.items() if flat.get(key) is not None and flat[key] not in same]
    accounts = [Account(f"{key} {flat[key]}", "refused", {}, CHANGES[key][1]) for key in changed]
    unused = _of_selective(flat)
    accounts += [Account(f"{key} {flat[key]}", "no effect", {}, OF_SELECTIVE) for key in unused]
    of_gpt = {setting.path: setting for setting in _beyond_megatron(flat)}
    gemma2 = gemma2_keys(flat)
    apart = {*missing, *changed, *of_gpt, *unused, *(key for key in flat if gemma2 and is_of_gemma2(key))}
    kept = {key: value for key, value in flat.items() if key not in apart}
    kept |= _schedule(kept) | _optimizer(kept) | _normalization(kept) | _fp8(kept) | _layer_pattern(kept)
    kept |= _fill_in_the_middle(kept)
    if POSITIONS in of_gpt:
        kept[POSITIONS] = "none"
    return NemoValues(kept, _entry(kept), missing, accounts, of_gpt, gemma2, _longest(flat))


def _longest(flat: Mapping[str, Any]) -> int:
    return int(flat.get("model.max_position_embeddings") or flat.get("model.encoder_seq_length") or 0)


def _is_off(key: str, flat: Mapping[str, Any]) -> bool:
    return any(not flat.get(switch) and key.startswith(parts) for switch, parts in OFF.items())


def _fill_in_the_middle(flat: Mapping[str, Any]) -> dict[str, Any]:
    if not flat.get("model.data.add_fim"):
        return {}
    keys = {key: key.removeprefix(FIM) for key in flat if key.startswith(FIM)}
    values = {f"model.data.{FIM_NAMES[name]}": flat[key] for key, name in keys.items() if name in FIM_NAMES}
    read = {key: None for key, name in keys.items() if name in FIM_NAMES}
    return {**values, **read, "model.data.fim_data": True, "model.data.add_fim": None}


def _of_selective(flat: Mapping[str, Any]) -> list[str]:
    """How layers are chosen, which NeMo reads with selective recomputation, too, and Megatron does not."""
    if flat.get(f"{RECOMPUTE}granularity") != "selective":
        return []
    keys = [f"{RECOMPUTE}{name}" for name in ("method", "num_layers")]
    return [key for key in keys if flat.get(key) is not None]


def _beyond_megatron(flat: Mapping[str, Any]) -> Iterator[NemoKey]:
    """What NeMo's GPT can be and Megatron-LM's cannot: Gemma's embedding and activation, Falcon's layers."""
    if flat.get(ACTIVATION) in GEGLU:
        # openai_gelu says which GELU is in it.
        yield NemoKey(ACTIVATION, {"activation": "geglu_tanh" if flat.get("model.openai_gelu") else "geglu"})
    if flat.get(EMBEDDING):
        yield NemoKey(EMBEDDING, {"embedding_multiplier": float(flat["model.hidden_size"]) ** 0.5})
    if flat.get(POSITIONS) == "alibi":
        yield NemoKey(POSITIONS, {"position_embedding_type": "alibi"})
    if flat.get(PARALLEL):
        yield NemoKey(PARALLEL, {"parallel_residual": True, "parallel_residual_norms": 1})


def note_on_missing(missing: list[str]) -> str:
    return f"not in the file, as NeMo's command line gives it: {', '.join(missing)}; add it to [data] or [tokenizer]"


def _entry(flat: Mapping[str, Any]) -> str:
    if "model.bert_binary_head" in flat and "model.model_name" not in flat:
        return "bert"
    return "hybrid" if "model.hybrid_override_pattern" in flat else "gpt"


def _max_steps(flat: Mapping[str, Any]) -> int:
    steps = flat.get("trainer.max_steps")
    if steps is None:
        raise ConfigError(f"{SCHEDULER} counts from the end of training, and trainer.max_steps is not set; set it")
    return int(steps)


def _decay_steps(flat: Mapping[str, Any], constant: int) -> int:
    """Steps before the constant ones at the end. Raises ConfigError where there are none."""
    steps = _max_steps(flat) - constant
    if steps <= 0:
        raise ConfigError(
            f"{SCHEDULER}.constant_steps={constant} leaves none of the trainer.max_steps={_max_steps(flat)} to a decay "
            "of the learning rate; set a smaller one, or 0 for a decay over all steps"
        )
    return steps


def _schedule(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The policy's name, and steps at the end with the least rate, of which Megatron's decay says where they begin."""
    name = flat.get(f"{SCHEDULER}.name")
    if name is None:
        return {f"{SCHEDULER}.lr_decay_style": "constant"}
    if name not in STYLES:
        raise ConfigError(
            f"{SCHEDULER}.name={name} is not read; it can be {', '.join(STYLES)}{did_you_mean(str(name), STYLES)}"
        )
    values: dict[str, Any] = {f"{SCHEDULER}.lr_decay_style": STYLES[name]}
    if constant := flat.get(f"{SCHEDULER}.constant_steps"):
        values |= {
            f"{SCHEDULER}.lr_decay_iters": _decay_steps(flat, int(constant)),
            f"{SCHEDULER}.constant_steps": None,
        }
    if ratio := flat.get(f"{SCHEDULER}.warmup_ratio"):
        values |= {f"{SCHEDULER}.warmup_steps": int(float(ratio) * _max_steps(flat)), f"{SCHEDULER}.warmup_ratio": None}
    return values


def _optimizer(flat: Mapping[str, Any]) -> dict[str, Any]:
    name = flat.get("model.optim.name", OPTIMIZERS[0])
    if name not in OPTIMIZERS:
        raise ConfigError(f"model.optim.name={name} is not read; it can be {', '.join(OPTIMIZERS)}")
    return {"model.optim.use_distributed_optimizer": True} if name in DISTRIBUTED_OPTIMIZERS else {}


def _normalization(flat: Mapping[str, Any]) -> dict[str, Any]:
    name = flat.get("model.normalization")
    if name is None:
        return {}
    if str(name).lower() not in NORMALIZATIONS:
        raise ConfigError(f"model.normalization={name} is not read; it can be {', '.join(NORMALIZATIONS)}")
    values: dict[str, Any] = {"model.normalization": NORMALIZATIONS[str(name).lower()]}
    return values | ({"model.apply_layernorm_1p": True} if str(name).lower() == "layernorm1p" else {})


def _fp8(flat: Mapping[str, Any]) -> dict[str, Any]:
    """A switch and one of two formats, in place of Megatron's format."""
    chosen = "hybrid" if flat.get("model.fp8_hybrid") else "e4m3"
    return {"model.fp8": chosen if flat.get("model.fp8") else None, "model.fp8_e4m3": None, "model.fp8_hybrid": None}


def _layer_pattern(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Without a pattern all layers of NeMo's Mamba are Mamba's, and its numbers of experts are not used."""
    if "model.hybrid_override_pattern" not in flat or flat["model.hybrid_override_pattern"] is not None:
        return {}
    unused = {key: None for key in flat if key == "model.num_moe_experts" or key.startswith("model.moe_")}
    return {**unused, "model.hybrid_override_pattern": "M" * int(flat["model.num_layers"])}
