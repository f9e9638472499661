"""How a run was trained: Megatron's arguments and our sections beside [model], both ways.

How ranks share the work is not among them: a checkpoint is read and written for any layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mt_ckpt.megatron.arguments import Arguments

DTYPE_NAMES = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16"}
"""Name of a torch.dtype -> ours, so that a configuration is translated without torch."""
ADAM = ("adam_beta1", "adam_beta2", "adam_eps")
LION = ("lion_beta1", "lion_beta2")
MUON = (
    "muon_momentum",
    "muon_nesterov",
    "muon_num_ns_steps",
    "muon_coefficient_type",
    "muon_scale_mode",
    "muon_extra_scale_factor",
    "muon_split_qkv",
    "muon_fp32_matmul_prec",
    "muon_scalar_optimizer",
)
OPTIMIZERS: Mapping[str, tuple[str, ...]] = {
    "adam": ADAM,
    "sgd": ("sgd_momentum",),
    "lion": LION,
    "muon": (*MUON, *ADAM, *LION),
}
"""Optimizers that both have -> their own arguments."""
SAME_OPTIMIZER: Mapping[str, str] = {"dist_muon": "muon"}
"""Megatron's name for another way to share the work of an optimizer."""
RATES = ("lr", "min_lr", "decoupled_lr", "decoupled_min_lr", "clip_grad")
DATA = ("seq_length", "reset_position_ids", "reset_attention_mask", "eod_mask_loss")
TRAIN = ("micro_batch_size", "global_batch_size", "train_samples", "train_iters", "seed")
LOSS_SCALE = ("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
TOKENIZER_FILES = ("vocab_file", "merge_file", "tokenizer_model")
RECOMPUTED = ("core_attn", "layernorm", "mhc", "mlp", "moe", "moe_act", "shared_experts")
"""Modules that both can recompute."""
WRITTEN: Mapping[str, tuple[str, ...]] = {
    "data": DATA,
    "train": (*TRAIN, "rampup_batch_size"),
    "optimizer": (
        "optimizer",
        *RATES,
        "weight_decay",
        "weight_decay_incr_style",
        "start_weight_decay",
        "end_weight_decay",
        "sgd_momentum",
        *ADAM,
        *LION,
        *MUON,
    ),
    "lr_schedule": (
        "lr_decay_style",
        "lr_warmup_iters",
        "lr_warmup_samples",
        "lr_warmup_fraction",
        "lr_warmup_init",
        "lr_decay_iters",
        "lr_decay_samples",
        "lr_wsd_decay_style",
        "lr_wsd_decay_iters",
        "lr_wsd_decay_samples",
    ),
    "precision": (*LOSS_SCALE, "accumulate_allreduce_grads_in_fp32", "grad_reduce_in_bf16"),
    "recompute": ("recompute_modules", "recompute_num_layers", "distribute_saved_activations"),
    "tokenizer": ("tokenizer_type", *TOKENIZER_FILES),
}
"""Keys of our sections that are Megatron's arguments of the same name."""


# -- read --------------------------------------------------------------------------------------------


def run_sections(args: Arguments) -> dict[str, dict[str, Any]]:
    """Sections beside [model], as far as Megatron's arguments and ours agree."""
    sections: dict[str, dict[str, Any]] = {
        "data": _given(args, DATA),
        "train": _train(args),
        "precision": _precision(args),
        "optimizer": _optimizer(args),
        "lr_schedule": _schedule(args),
        "recompute": _recompute(args),
        "tokenizer": _tokenizer(args),
    }
    return {name: values for name, values in sections.items() if values}


def _given(args: Arguments, names: tuple[str, ...]) -> dict[str, Any]:
    """The arguments that are set."""
    return {name: args.values[name] for name in names if args.values.get(name) is not None}


def _train(args: Arguments) -> dict[str, Any]:
    section = _given(args, TRAIN)
    # Megatron computes train_iters from train_samples; our section takes one of the two.
    if "train_samples" in section:
        section.pop("train_iters", None)
    if (rampup := args.values.get("rampup_batch_size")) is not None:
        section["rampup_batch_size"] = [int(number) for number in rampup]
    return section


def dtype_name(args: Arguments) -> str:
    """precision.dtype: that of the weights in training."""
    # The flags set params_dtype, and stand alone where it is not there.
    by_flag = "bf16" if args.get("bf16", False) else "fp16" if args.get("fp16", False) else "fp32"
    return DTYPE_NAMES.get(str(args.values.get("params_dtype")), by_flag)


def _precision(args: Arguments) -> dict[str, Any]:
    """Keys that the dtype makes use of."""
    dtype = dtype_name(args)
    section: dict[str, Any] = {"dtype": dtype}
    if dtype != "fp32":
        section |= _given(args, ("accumulate_allreduce_grads_in_fp32",))
    if dtype == "bf16":
        section |= _given(args, ("grad_reduce_in_bf16",))
    if dtype == "fp16":
        section |= _given(args, LOSS_SCALE)
    return section


def _optimizer(args: Arguments) -> dict[str, Any]:
    name = args.get("optimizer", "adam")
    kind = SAME_OPTIMIZER.get(name, name)
    if kind not in OPTIMIZERS:
        return {}
    keys = OPTIMIZERS[kind]
    if kind == "muon":
        keys = (*MUON, *(LION if args.get("muon_scalar_optimizer", "adam") == "lion" else ADAM))
    return {"optimizer": kind, **_given(args, (*RATES, *keys)), **_weight_decay(args)}


def _weight_decay(args: Arguments) -> dict[str, Any]:
    style = args.get("weight_decay_incr_style", "constant")
    if style == "constant":
        return _given(args, ("weight_decay",))
    return {"weight_decay_incr_style": style, **_given(args, ("start_weight_decay", "end_weight_decay"))}


def _schedule(args: Arguments) -> dict[str, Any]:
    style = args.get("lr_decay_style")
    if style is None:
        return {}
    by_samples = args.values.get("train_samples") is not None
    section: dict[str, Any] = {"lr_decay_style": style, "lr_warmup_init": float(args.get("lr_warmup_init", 0.0))}
    if (fraction := args.values.get("lr_warmup_fraction")) is not None:
        section["lr_warmup_fraction"] = float(fraction)
    kinds = ["warmup", "decay"] + (["wsd_decay"] if style == "WSD" else [])
    for kind in kinds:
        # Of the run's unit only; the other arguments are None or left from the launch script.
        key = f"lr_{kind}_{'samples' if by_samples else 'iters'}"
        # lr_warmup_fraction and a number of steps exclude each other in our section.
        if args.get(key, 0) and not (kind == "warmup" and fraction is not None):
            section[key] = int(args.values[key])
    if style == "WSD":
        section["lr_wsd_decay_style"] = args.get("lr_wsd_decay_style", "exponential")
    return section


def _recompute(args: Arguments) -> dict[str, Any]:
    """What we can recompute too; the rest is kept, which changes memory and no number."""
    granularity = args.get("recompute_granularity")
    if granularity == "full":
        keys = ("recompute_method", "recompute_num_layers", "distribute_saved_activations")
        return {"recompute_granularity": "full", **_given(args, keys)}
    modules = [module for module in args.get("recompute_modules", ["core_attn"]) if module in RECOMPUTED]
    if granularity == "selective" and modules:
        return {"recompute_granularity": "selective", "recompute_modules": modules}
    return {}


def _tokenizer(args: Arguments) -> dict[str, Any]:
    kind = args.get("tokenizer_type")
    if kind is None:
        return {}
    if kind == "NullTokenizer":
        return {"tokenizer_type": kind, "vocab_size": int(args.need("vocab_size", "padded_vocab_size"))}
    return {"tokenizer_type": kind, **{name: args.values[name] for name in TOKENIZER_FILES if args.get(name)}}


# -- write -------------------------------------------------------------------------------------------


def run_arguments(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """metadata: of an open checkpoint, with its configuration under `config`."""
    stored = metadata.get("config", {})
    args: dict[str, Any] = {
        "iteration": int(metadata.get("iteration", 0)),
        "consumed_train_samples": int(metadata.get("consumed_samples", 0)),
        "consumed_valid_samples": 0,
        "skipped_train_samples": 0,
    }
    for section, keys in WRITTEN.items():
        args |= {key: stored[section][key] for key in keys if stored.get(section, {}).get(key) is not None}
    args |= _recompute_arguments(stored.get("recompute", {}))
    if args.get("tokenizer_type") == "NullTokenizer":
        args.setdefault("null_tokenizer_eod_id", None)  # its presence says that vocab_size counts every id
    return args


def _recompute_arguments(section: Mapping[str, Any]) -> dict[str, Any]:
    """Megatron says None for nothing, and has a method with full layers only."""
    granularity = section.get("recompute_granularity", "none")
    if granularity == "none":
        return {}
    method = section.get("recompute_method") if granularity == "full" else None
    return {"recompute_granularity": granularity, "recompute_method": method}
