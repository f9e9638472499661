"""Layers with a recurrence compute by the Triton kernels that a configuration names, in Triton's interpreter, what they
compute by torch; and say which they take."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.core.nn.kernels.interpreter import run_interpreted
from torch import Tensor, nn

from mt_core.nn.attention import AttentionPattern
from mt_core.nn.kernels.choice import Kernels
from mt_core.parallel.context import ParallelContext

pytestmark = pytest.mark.long
SIZES = {
    "hidden_size": 24, "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4, "linear_chunk_size": 32, "linear_allow_neg_eigval": False,
    "linear_norm_epsilon": 1e-6, "init_method_std": 0.3, "output_init_std": 0.3,
    "mamba_head_dim": 8, "mamba_state_dim": 8, "mamba_heads": 2, "mamba_inner_size": 16, "mamba_num_groups": 1,
    "mamba_proj_bias": False, "mamba_conv_kernel": 4, "mamba_conv_bias": True,
    "mamba_dt_min": 1e-3, "mamba_dt_max": 0.1,
    "mamba_dt_init_floor": 1e-4, "mamba_chunk_size": 16, "mamba_dt_lower_limit": 0.0, "mamba_dt_upper_limit": None,
    "norm_epsilon": 1e-5, "time_step_rank": 3,
}  # fmt: skip


def build(name: str, backend: str) -> nn.Module:
    from mt_models.blocks.gated_delta_net import GatedDeltaNet
    from mt_models.blocks.mamba1_mixer import Mamba1Mixer
    from mt_models.blocks.mamba_mixer import MambaMixer

    config: Any = SimpleNamespace(**SIZES, linear_attention_backend=backend, mamba_scan_backend=backend)
    ctx = ParallelContext()
    builders: dict[str, Callable[[], nn.Module]] = {
        "delta": lambda: GatedDeltaNet(config, ctx),
        "mamba": lambda: MambaMixer(config, ctx, 0.3),
        "mamba1": lambda: Mamba1Mixer(config, ctx),
    }
    layer = builders[name]()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return layer


def outputs_and_gradients(name: str, backend: str) -> tuple[list[Tensor], list[str]]:
    layer, kernels = build(name, backend), Kernels({"causal_conv": backend}, "cpu", "float32")
    layer.use_kernels(kernels)  # type: ignore[operator]
    hidden = torch.randn(1, 40, 24, generator=torch.Generator().manual_seed(2)).requires_grad_()
    ids = (torch.arange(40) // 17)[None]
    out = layer(hidden, AttentionPattern(segment_ids=ids)) if name == "delta" else layer(hidden, ids, None)
    gradients = torch.autograd.grad(out.square().sum(), (hidden, *layer.parameters()))
    return [out, *gradients, *decoded(layer, name, hidden.detach())], [*map(str, kernels.choices), *kernels.notes]


@torch.no_grad()
def decoded(layer: nn.Module, name: str, hidden: Tensor) -> list[Tensor]:
    """Outputs of a prompt and of a single position behind it."""
    cache = KeptState()
    parts = (hidden[:, :20], hidden[:, 20:21])
    return [] if name == "delta" else [layer(part, None, cache) for part in parts]


class KeptState:
    """The state of one layer, for `Cache.advance`."""

    state: tuple[Tensor, ...] | None = None

    def advance(self, layer: Any, advance: Callable[..., Any], inputs: tuple[Tensor, ...]) -> Tensor:
        if self.state is None:
            self.state = tuple(torch.zeros(1, *shape, dtype=dtype) for shape, dtype in layer.cached_state().tensors)
        out: Tensor
        out, self.state = advance(inputs, self.state)
        return out


def compared(rank: int, world: int) -> dict[str, tuple[float, list[str]]]:
    results = {}
    for name in ("delta", "mamba", "mamba1"):
        exact, _ = outputs_and_gradients(name, "torch")
        tensors, lines = outputs_and_gradients(name, "triton")
        error = max(float((x - y).detach().abs().max() / y.abs().max()) for x, y in zip(tensors, exact, strict=True))
        results[name] = (error, lines)
    return results


def test_layers_take_the_kernels_that_are_named() -> None:
    (results,) = run_interpreted(compared)
    assert {name: error for name, (error, _) in results.items() if not error < 2e-5} == {}
    for name, rule in (("delta", "gated delta rule"), ("mamba", "Mamba-2"), ("mamba1", "Mamba-1")):
        conv, line = results[name][1]
        assert conv.startswith("causal_conv: triton (as kernels.causal_conv says")
        assert line.startswith(f"{rule}: sequences by triton, steps of decoding by triton")
