"""megatron-core's local layers, with fused attention in place of theirs; Transformer Engine needs CUDA to be imported.

Functions that Megatron compiles count as one launch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from counting import FlashAttention, Launches, use_fused_norms
from shapes import FFN, GROUPS, HEADS, HIDDEN, LENGTH
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "peer" / "megatron_process"))


def build(launches: Launches, layers: int) -> tuple[nn.Module, Callable[[Tensor], Tensor], Tensor]:
    import cuda_on_cpu

    seed_all = torch.cuda.manual_seed_all
    cuda_on_cpu.apply_before_import()
    torch.cuda.manual_seed_all = seed_all  # which torch.manual_seed calls
    use_fused_norms(launches)
    torch.compile = lambda function: launches.as_one(function, function.__name__)  # type: ignore[assignment]
    cuda_on_cpu.apply_after_import()  # imports Megatron
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29556")
    torch.distributed.init_process_group("gloo")
    from megatron.core import parallel_state
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_block import TransformerBlock

    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    config = _config(layers)
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = attention_of(launches)
    # Megatron creates tensors on the device, which is the CPU here, and the meta device would refuse them.
    FakeTensorMode(allow_non_fake_inputs=True).__enter__()
    torch.set_default_dtype(torch.bfloat16)  # of the norms' weights
    block = TransformerBlock(config, spec, post_layer_norm=False)
    torch.set_default_dtype(torch.float32)
    angles = RotaryEmbedding(HIDDEN // HEADS, 1.0, rotary_base=500000, use_cpu_initialization=True)(LENGTH)

    def run(hidden: Tensor) -> Tensor:
        return block(hidden, None, rotary_pos_emb=angles)

    return block, run, torch.empty((LENGTH, 1, HIDDEN), dtype=torch.bfloat16, requires_grad=True)


def _config(layers: int) -> Any:
    import torch.nn.functional as F
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=layers,
        hidden_size=HIDDEN,
        ffn_hidden_size=FFN,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        bias_activation_fusion=True,
        bias_dropout_fusion=True,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_cpu_initialization=True,
        perform_initialization=False,
    )


def attention_of(launches: Launches) -> Callable[..., nn.Module]:
    class Flash(nn.Module):
        """q [S, B, N, D], k and v [S, B, G, D] -> [S, B, N D]"""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__()

        def forward(self, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            out = FlashAttention.apply(launches, *(x.permute(1, 2, 0, 3) for x in (q, k, v)))
            return out.permute(2, 0, 1, 3).reshape(*q.shape[:2], -1)

    return Flash
