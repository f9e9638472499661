"""Layers whose norms add to the residual stream in their kernel compute what plain layers do, with fewer passes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from tests.core.nn.kernels.interpreter import run_interpreted
from torch.utils._python_dispatch import TorchDispatchMode

from mt_core.config.loading import load_config
from mt_core.nn.build_context import ModelBuildContext
from mt_core.nn.kernels.choice import use_kernels
from mt_core.nn.layout import initialize
from mt_core.nn.model import Model
from mt_core.parallel.context import ParallelContext
from mt_core.plugins import load_plugins
from mt_core.specs import MODELS
from mt_models.blocks.attention import SelfAttention
from mt_models.blocks.rotary import RotaryAngles, inverse_frequencies

LAYERS, WIDTH = 2, 32
SIZES = [f"num_layers={LAYERS}", f"hidden_size={WIDTH}", "num_attention_heads=4", "vocab_size=48"]
FAMILIES = {
    "llama": ["family=llama", "ffn_hidden_size=48"],
    "gemma": ["family=gemma", "ffn_hidden_size=48", "query_pre_attn_scalar=5", "num_query_groups=2"],
    "gpt": ["family=gpt", "normalization=LayerNorm", "position_embedding_type=rope"],
    "gpt, parallel": [
        "family=gpt",
        "normalization=LayerNorm",
        "position_embedding_type=rope",
        "parallel_residual=true",
    ],
}
SUMS = {"llama": (2, 1), "gemma": (2, 1), "gpt": (2, 1), "gpt, parallel": (2, 2)}
"""Of tensors of the residual stream's size in a layer, forward: with torch's norms, and with ours, whose backward
pass has none."""


class CountSums(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.sums = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.sums += func in (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor) and result.shape == (2, 2, WIDTH)
        return result


def built(keys: list[str], *overrides: str) -> Model:
    host, ctx = load_plugins(), ParallelContext()
    settings = [f"model.{key}" for key in (*keys, *SIZES)]
    config = load_config(
        overrides=[*settings, "data.seq_length=8", "train.train_iters=1", *overrides], host=host
    ).config
    environment = ModelBuildContext(config, ctx, host)
    model = host[MODELS].get(config.model.family).build.load()(config.model, environment)
    initialize(model, 1, ctx)
    use_kernels(model.modules(), environment.kernels)
    return model


def step(model: Model) -> tuple[torch.Tensor, list[torch.Tensor], tuple[int, int]]:
    tokens = torch.arange(4).view(2, 2)
    with CountSums() as forward:
        logits = model(tokens)
    with CountSums() as backward:
        (logits * torch.linspace(-1, 1, logits.numel()).view_as(logits)).sum().backward()
    return logits, [p.grad for p in model.parameters()], (forward.sums, backward.sums)


def check(rank: int, world: int, family: str) -> tuple[tuple[int, int], tuple[int, int]]:
    """Sums forward and backward, with torch's norms and with ours."""
    norm = f"kernels.{'layer_norm' if 'gpt' in family else 'rms_norm'}=triton"
    kernels = [norm, *(["kernels.rotary=triton"] if family == "gemma" else [])]
    plain, wanted, separate = step(built(FAMILIES[family]))
    full = ["recompute.recompute_granularity=full", "recompute.recompute_method=uniform"]
    recomputed, fused = (step(built(FAMILIES[family], *kernels, *more)) for more in (full, []))
    for logits, gradients, _ in (recomputed, fused):
        assert torch.allclose(logits, plain, atol=1e-5)
        for one, other in zip(gradients, wanted, strict=True):
            assert torch.allclose(one, other, atol=1e-5 * max(other.abs().max().item(), 1.0))
    return separate, fused[2]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_layers_add_to_the_residual_stream_in_their_norms(family: str) -> None:
    ((separate, joined),) = run_interpreted(check, family)
    before, after = SUMS[family]
    assert (separate[0], *joined) == (LAYERS * before, LAYERS * after, 0)
    # LayerNorm is one operator of torch's; the backward pass of its RMSNorm has sums itself.
    assert "gpt" not in family or separate[1] == LAYERS * 2


def launches_of_attention(rank: int, world: int, *kernels: str) -> dict[str, int]:
    """By kernel, of a Qwen3 layer between the product of queries, keys and values and the attention, both ways."""
    from triton.runtime import interpreter

    names: Counter[str] = Counter()
    launch = interpreter.GridExecutor.__call__

    def counting(self: Any, *given: Any, **named: Any) -> None:
        names[self.fn.__name__] += 1
        launch(self, *given, **named)

    interpreter.GridExecutor.__call__ = counting
    model = built(["family=qwen", "ffn_hidden_size=48", "num_query_groups=2"], *kernels)
    attention = next(module for module in model.modules() if isinstance(module, SelfAttention))
    angles = RotaryAngles(torch.arange(2)[None], inverse_frequencies(WIDTH // 4, 1e4))
    parts = attention.project_and_rotate(torch.randn(1, 2, WIDTH), angles)
    torch.stack([part.sum() for part in parts]).sum().backward()
    return dict(names)


@pytest.mark.slow
def test_norms_of_heads_and_positions_are_one_launch_each_way() -> None:
    (apart,) = run_interpreted(launches_of_attention, "kernels.rms_norm=torch", "kernels.rotary=triton")
    assert apart == {"_rotary": 2}
    (joined,) = run_interpreted(launches_of_attention, "kernels.rms_norm=triton", "kernels.rotary=triton")
    assert joined == {"_normed_rotary_of_qkv_forward": 1, "_normed_rotary_of_qkv_backward": 1}
