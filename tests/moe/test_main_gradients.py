"""A 16-bit MoE layer over ranks whose gradients are added up in fp32 and reduced while the backward pass runs."""

from __future__ import annotations

import pytest
import torch
from tests.moe.moe_cases import EXPERTS, Shape, build_layer, options, tokens_of
from torch import Tensor

from mt_core.nn.layout import parameter_layouts
from mt_core.nn.main_grad import main_gradient_of
from mt_core.optim.buckets import Bucket
from mt_core.optim.master_weights import Fp32MasterWeights
from mt_core.optim.param_and_grad_buffer import BufferOptions, ParamAndGradBuffer
from mt_core.parallel.context import AxisSizes, ParallelContext, build_parallel_context
from mt_core.testing import run_ranks
from mt_moe.layer import MoeLayer

SHAPE = Shape(init_method_std=0.3, output_init_std=0.3)
PASSES = 2
KEYS = {
    "moe_shared_expert_intermediate_size": 8,
    "moe_shared_expert_gate": True,
    "moe_latent_size": 16,
    "moe_router_load_balancing_type": ["none"],
    "moe_aux_loss_coeff": [],
}


def moe_layer(ctx: ParallelContext) -> MoeLayer:
    return build_layer(options(**KEYS), ctx, SHAPE)


def micro_batch(number: int) -> Tensor:
    return tokens_of(1, 6, torch.bfloat16, seed=number)


def target(x: Tensor) -> Tensor:
    return torch.cos(torch.arange(x.numel(), dtype=torch.float64)).view_as(x)


def sharded(rank: int, world: int) -> tuple[dict[str, Tensor], list[int], list[str]]:
    """Gradients of this rank's parts, whole again; how often each bucket was sent before the step's end; names of
    weights that got a gradient of autograd's."""
    ctx = build_parallel_context(AxisSizes(ep=2), params_dtype=torch.bfloat16)
    layer = moe_layer(ctx)
    by_autograd: set[str] = set()
    for name, parameter in layer.named_parameters():
        parameter.register_hook(lambda grad, n=name: None if grad is None else by_autograd.add(n))
    weights = ParamAndGradBuffer(layer, ctx, BufferOptions(sharded=True, bucket_elements=1))
    sent: list[Bucket] = []
    send = Bucket.start_reduce
    Bucket.start_reduce = lambda bucket: (sent.append(bucket), send(bucket))[1]
    weights.zero_grad()
    weights.expect(PASSES)
    for number in range(PASSES):
        x = micro_batch(rank * PASSES + number)
        layer(x).backward(target(x).bfloat16())
    times = [sent.count(bucket) for bucket in weights.buckets]
    weights.reduce()
    layouts = parameter_layouts(layer)
    found = {name: weights.unshard(name, part.grad) for name, part in weights.named_parameters()}
    return {n: g for n, g in found.items() if layouts[n].trained}, times, sorted(by_autograd)


@pytest.mark.slow
@pytest.mark.dist
def test_experts_over_ranks_get_the_gradients_of_one_process() -> None:
    """4 ranks, of which 2 have the same experts and share the work of updating them."""
    alone = moe_layer(ParallelContext(params_dtype=torch.bfloat16)).double()
    for number in range(4 * PASSES):
        x = micro_batch(number).double()
        alone(x).backward(target(x).bfloat16().double())
    expected = {name: parameter.grad for name, parameter in alone.named_parameters()}
    for rank, (found, times, by_autograd) in enumerate(run_ranks(4, sharded)):
        assert times == [1] * len(times)
        assert by_autograd == ["router.weight"]
        own = slice(rank % 2 * EXPERTS // 2, (rank % 2 + 1) * EXPERTS // 2)
        for name, gradient in found.items():
            reference = expected[name][own] if name.startswith("experts.") else expected[name]
            off = (gradient.double() - reference).norm() / reference.norm()
            assert off < 0.03, f"{name} of rank {rank}: {off:.3f}"


def test_every_matrix_of_a_16_bit_layer_has_its_sum() -> None:
    layer = moe_layer(ParallelContext(params_dtype=torch.bfloat16))
    Fp32MasterWeights(layer)
    x = micro_batch(0)
    layer(x).sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is None
        assert main_gradient_of(parameter).total.any(), name
