"""Presets of `mt bench train`: models, with the batch and the options that fit on one GPU of 141 GB."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

COMMON = (
    "train.train_iters=1000000",
    "train.eval_interval=null",
    "train.eval_iters=0",
    "train.sample_prompt=null",
    "checkpoint.save_interval=null",
    "logging.progress=none",
    "lr_schedule.lr_decay_style=constant",
    "optimizer.lr=1e-4",
)
TEN_BYTES = (
    "optimizer.main_weights=remainders",
    "optimizer.exp_avg_dtype=bf16",
    "precision.accumulate_allreduce_grads_in_fp32=false",
)
"""Weights, remainders, two moments and gradients, 2 bytes each."""
PRECISIONS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "bf16": ("precision.dtype=bf16",),
        "fp8": ("precision.dtype=bf16", "precision.fp8_format=hybrid", "precision.fp8_recipe=tensorwise"),
        "mxfp8": ("precision.dtype=bf16", "precision.fp8_format=e4m3", "precision.fp8_recipe=mxfp8"),
        "nvfp4": ("precision.dtype=bf16", "precision.fp8_format=e2m1", "precision.fp8_recipe=nvfp4"),
        "fp32": ("precision.dtype=fp32",),
    }
)
"""Settings of `--precision`; another FP8 recipe is a `--set`."""
SMALL = (
    "model.num_layers=2",
    "model.hidden_size=64",
    "model.num_attention_heads=4",
    "model.vocab_size=512",
    "data.seq_length=32",
    "train.micro_batch_size=2",
)
"""Sizes for a CPU in place of the preset's, with the same options."""
SMALL_FP8 = ("precision.fp8_min_features=1",)
"""Recipes leave layers as small as those of SMALL in bf16."""


@dataclass(frozen=True)
class BenchPreset:
    """goals: reference tokens/s on one H200, by precision, where there is one."""

    preset: str
    overrides: tuple[str, ...]
    goals: Mapping[str, float]
    small: tuple[str, ...] = SMALL

    def settings(self, precision: str, *, small: bool) -> list[str]:
        fp8 = SMALL_FP8 if precision not in ("bf16", "fp32") else ()
        sizes = (*self.small, *fp8) if small else ()
        return [*self.overrides, *COMMON, *PRECISIONS[precision], *sizes]


def _preset(
    preset: str, sequence: int, micro: int, goals: Mapping[str, float], *more: str, **small: object
) -> BenchPreset:
    sizes = (f"data.seq_length={sequence}", f"train.micro_batch_size={micro}")
    return BenchPreset(
        preset, (*sizes, *more), goals, (*SMALL, *(f"model.{key}={value}" for key, value in small.items()))
    )


LLAMA = {"ffn_hidden_size": 128, "num_query_groups": 2}
EXPERTS = {"ffn_hidden_size": 32, "num_query_groups": 4, "moe.num_experts": 8, "moe.moe_ffn_hidden_size": 32}

PRESETS: Mapping[str, BenchPreset] = MappingProxyType(
    {
        "124m": _preset("gpt2-124m", 1024, 32, {"bf16": 620e3}, "model.vocab_size=50304"),
        "1.2b": _preset(
            "llama3.2-1b", 4096, 4, {"bf16": 70e3, "fp8": 87.5e3}, "train.loss=linear_cross_entropy_sum", **LLAMA
        ),
        "3b": _preset("llama3.2-3b", 4096, 2, {"bf16": 27.8e3}, "train.loss=linear_cross_entropy_sum", **LLAMA),
        "8b": _preset(
            "llama3-8b",
            8192,
            1,
            {"bf16": 11.5e3, "fp8": 15e3},
            "train.loss=linear_cross_entropy_sum",
            *TEN_BYTES,
            **LLAMA,
        ),
        "7b-a1b": _preset(
            "olmoe-1b-7b", 4096, 4, {"bf16": 50.2e3}, "train.loss=linear_cross_entropy_sum", *TEN_BYTES, **EXPERTS
        ),
    }
)
