"""A model of mt, with the kernels that a GPU gets: Triton's launches are counted and not done."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from counting import FlashAttention, Launches
from shapes import LENGTH
from torch import Tensor, nn

from mt_core.config.loading import load_config
from mt_core.config.schema import Config
from mt_core.nn.attention import AttentionCore, AttentionPattern
from mt_core.nn.build_context import ModelBuildContext
from mt_core.nn.fp8.history import AmaxHistory
from mt_core.nn.fp8.options import PRODUCTS
from mt_core.nn.fp8.use import use_fp8
from mt_core.nn.kernels.choice import Kernels, use_kernels
from mt_core.nn.kernels.reference.fp8_casts import Scaled
from mt_core.nn.kernels.request import Feature, KernelName
from mt_core.nn.model import as_pipelined
from mt_core.parallel.context import ParallelContext
from mt_core.parallel.pipeline.stage import Stage
from mt_core.plugins import load_plugins
from mt_core.specs import MODELS
from mt_models.blocks.config import DecoderConfig
from mt_tools.plan.ledger import Ledger, fake_context


class OnGPU(ModelBuildContext):
    """Fused attention, counted."""

    def attention(self, backend: str, **request: Any) -> AttentionCore:
        def attend(q: Tensor, k: Tensor, v: Tensor, pattern: AttentionPattern, dropout: float) -> Tensor:
            return FlashAttention.apply(LAUNCHES[0], *(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)

        return attend


class SeparateKernels(Kernels):
    """Without the forms that take the place of two kernels: norms of heads with their positions, activations with their
    casts to FP8."""

    def pick_fused(
        self, kernel: KernelName, *features: Feature, width: int = 0, joined: KernelName | None = None
    ) -> Callable[..., tuple[Tensor, ...]] | None:
        return None if joined is not None else super().pick_fused(kernel, *features, width=width)


LAUNCHES: list[Launches] = []


def build(
    launches: Launches, layers: int, preset: str, *settings: str, separate: bool
) -> tuple[nn.Module, Callable[[Tensor], Tensor], Tensor]:
    LAUNCHES.append(launches)
    count_triton(launches)
    sizes = [f"model.num_layers={layers}", f"data.seq_length={LENGTH}", "train.micro_batch_size=1"]
    overrides = [*sizes, "precision.dtype=bf16", "train.train_iters=1", "data.dataset_type=mock", *settings]
    host = load_plugins()
    config = load_config(preset=preset, overrides=overrides, host=host).config
    wanted = cast(Mapping[KernelName, str], config.kernels.model_dump())
    kernels = (SeparateKernels if separate else Kernels)(wanted, "cuda", "bfloat16")
    ctx, stage = fake_context(config, 1, 0, Ledger()), Stage(range(layers), first=False, last=False)
    make = host[MODELS].get(config.model.family, key="model.family").build.load()
    model: nn.Module = make(config.model, OnGPU(config, ctx, host, (stage,), kernels))
    use_kernels(model.modules(), kernels)
    use_counted_fp8(launches, model, config, ctx, kernels)
    position_ids = torch.empty((1, LENGTH), dtype=torch.int64, device="meta")
    tokens = torch.empty_like(position_ids)
    staged = as_pipelined(model)
    assert staged is not None

    def run(hidden: Tensor) -> Tensor:
        return staged.run_stage(stage, hidden, tokens=tokens, position_ids=position_ids)

    shape = (1, LENGTH, cast(DecoderConfig, config.model).hidden_size)
    return model, run, torch.empty(shape, dtype=torch.bfloat16, device="meta", requires_grad=True)


def use_counted_fp8(
    launches: Launches, model: nn.Module, config: Config, ctx: ParallelContext, kernels: Kernels
) -> None:
    """FP8 as on a GPU, in a step with a history of magnitudes. Products of scaled matrices are one launch."""

    def scaled_product(a: Scaled, b: Scaled, dtype: torch.dtype, *, fast: bool) -> Tensor:
        launches.names["scaled_mm"] += 1
        return torch.empty(len(a.data), len(b.data), dtype=dtype, device="meta")

    PRODUCTS["emulated"] = scaled_product  # type: ignore[index]
    use_fp8(model, config, ctx, kernels)
    for module in model.modules():
        if isinstance(module, AmaxHistory):
            module.has_stepped = True


def count_triton(launches: Launches) -> None:
    from triton.runtime.jit import JITFunction

    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        launches.names[self.fn.__name__] += 1
        launches.move(args)

    JITFunction.run = run
