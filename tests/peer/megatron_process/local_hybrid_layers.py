"""Hybrid models on a CPU: Megatron's mixer with plain scans, and its layers with the names of Transformer Engine.

Megatron has hybrid layers for Transformer Engine only, whose linear layers hold the norm in front of them, and takes
the kernels of `mamba_ssm` and `causal_conv1d`. Both are replaced by what they compute, written out.
"""

from __future__ import annotations

import inspect
import sys
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class GatedNorm(nn.Module):
    """RMS norm over groups, of the input times the gate's SiLU. x, z: [..., width]."""

    def __init__(self, hidden_size: int, eps: float, group_size: int, **unused: Any) -> None:
        super().__init__()
        self.eps, self.group_size = eps, group_size
        self.weight = nn.Parameter(torch.ones(hidden_size))

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        groups = (x * F.silu(z)).unflatten(-1, (-1, self.group_size))
        scale = torch.rsqrt(groups.square().mean(-1, keepdim=True) + self.eps)
        return (groups * scale).flatten(-2) * self.weight


def convolve(x: Tensor, weight: Tensor, bias: Tensor, activation: str, seq_idx: object = None) -> Tensor:
    """Causal convolution of each channel. x: [batch, channels, sequence]; weight: [channels, width]."""
    padded = F.pad(x, (weight.shape[1] - 1, 0))
    return F.silu(F.conv1d(padded, weight[:, None], bias, groups=x.shape[1]))


def scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    chunk_size: int,
    D: Tensor,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = True,
    return_final_states: bool = False,
    initial_states: Tensor | None = None,
) -> Tensor:
    """The recurrence of Mamba 2, a position after the other.

    x: [batch, sequence, heads, head dim]; dt: [batch, sequence, heads]; a, D: [heads]; b, c: [batch, sequence, groups,
    state]. Returns the shape of x.
    """
    heads_per_group = x.shape[2] // b.shape[2]
    b, c = (part.repeat_interleave(heads_per_group, dim=2) for part in (b, c))
    dt = F.softplus(dt + dt_bias)
    state = x.new_zeros(x.shape[0], x.shape[2], x.shape[3], b.shape[3])
    outputs = []
    for t in range(x.shape[1]):
        decay = torch.exp(dt[:, t] * a)[..., None, None]
        state = state * decay + (dt[:, t, :, None] * x[:, t])[..., None] * b[:, t, :, None]
        outputs.append((state * c[:, t, :, None]).sum(-1) + D[:, None] * x[:, t])
    return torch.stack(outputs, dim=1)


def install_kernels() -> None:
    """Put the scans where `megatron.core.ssm.mamba_mixer` looks for kernels; to be called before it is imported."""
    for name in ("mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton", "causal_conv1d"):
        sys.modules[name] = ModuleType(name)
    _module("mamba_ssm.ops.triton.layernorm_gated", RMSNorm=GatedNorm)
    _module(
        "mamba_ssm.ops.triton.ssd_combined", mamba_chunk_scan_combined=scan, mamba_split_conv1d_scan_combined=_no_kernel
    )
    sys.modules["causal_conv1d"].causal_conv1d_fn = convolve  # type: ignore[attr-defined]
    _module("causal_conv1d.causal_conv1d_varlen", causal_conv1d_varlen_states=_no_kernel)


def _module(name: str, **content: Any) -> None:
    sys.modules[name] = ModuleType(name)
    sys.modules[name].__dict__.update(content)


def _no_kernel(*args: Any, **kwargs: Any) -> None:
    raise NotImplementedError("a kernel that runs on a GPU only")


def local_hybrid_stack_spec() -> Any:
    """Attention, feed-forward and mixer layers, with the names that Transformer Engine's layers have."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.tensor_parallel.layers import RowParallelLinear
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    hybrid_block.TENorm = WrappedTorchNorm
    norm_linear = _norm_linear()
    mixer = MambaMixerSubmodules(in_proj=norm_linear, out_proj=RowParallelLinear)
    attention = SelfAttentionSubmodules(
        linear_qkv=norm_linear, core_attention=DotProductAttention, linear_proj=RowParallelLinear
    )
    feed_forward = MLPSubmodules(linear_fc1=norm_linear, linear_fc2=RowParallelLinear)
    layers = {
        "mamba_layer": ModuleSpec(
            module=MambaLayer,
            submodules=MambaLayerSubmodules(
                mixer=ModuleSpec(module=MambaMixer, submodules=mixer), mamba_bda=get_bias_dropout_add
            ),
        ),
        "attention_layer": ModuleSpec(
            module=TransformerLayer,
            submodules=TransformerLayerSubmodules(
                self_attention=ModuleSpec(
                    module=SelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=attention
                ),
                self_attn_bda=get_bias_dropout_add,
            ),
        ),
        "mlp_layer": ModuleSpec(
            module=MLPLayer,
            submodules=TransformerLayerSubmodules(
                mlp=partial(MLP.as_mlp_submodule, submodules=feed_forward), mlp_bda=get_bias_dropout_add
            ),
        ),
    }
    submodules = hybrid_block.HybridStackSubmodules(**layers)
    return ModuleSpec(module=hybrid_block.HybridStack, submodules=submodules)


def modelopt_hybrid_stack_spec() -> Any:
    """Megatron's own layers, which it has for ModelOpt, with torch's norms for Transformer Engine's. Of any version."""
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    try:
        from megatron.core.models.hybrid import hybrid_block as block
        from megatron.core.post_training.modelopt.hybrid import model_specs
    except ImportError:
        from megatron.core.post_training.modelopt.mamba import model_specs
        from megatron.core.ssm import mamba_block as block
    block.TENorm = model_specs.Norm = WrappedTorchNorm
    make = getattr(model_specs, "get_hybrid_stack_modelopt_spec", None) or model_specs.get_mamba_stack_modelopt_spec
    known = inspect.signature(make).parameters
    given = {"local_core_attention": True, "remap_te_layernorm": False}
    return make(**{name: value for name, value in given.items() if name in known})


def _norm_linear() -> type:
    """A linear layer that holds the norm in front of it, as `layer_norm_weight` and `layer_norm_bias`."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    class NormColumnParallelLinear(ColumnParallelLinear):  # type: ignore[misc]
        def __init__(self, input_size: int, output_size: int, *, config: Any, **given: Any) -> None:
            given.pop("name", None)
            super().__init__(input_size, output_size, config=config, **given)
            self.eps, self.rms = config.layernorm_epsilon, config.normalization == "RMSNorm"
            self.layer_norm_weight = nn.Parameter(torch.ones(input_size))
            if not self.rms:
                self.layer_norm_bias = nn.Parameter(torch.zeros(input_size))
            for parameter in (self.layer_norm_weight, getattr(self, "layer_norm_bias", None)):
                if parameter is not None:
                    parameter.sequence_parallel = config.sequence_parallel

        def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
            width = (x.shape[-1],)
            if self.rms:
                normed = F.rms_norm(x, width, self.layer_norm_weight, self.eps)
            else:
                normed = F.layer_norm(x, width, self.layer_norm_weight, self.layer_norm_bias, self.eps)
            return super().forward(normed, *args, **kwargs)

    return NormColumnParallelLinear
