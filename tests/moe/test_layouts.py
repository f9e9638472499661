"""An MoE layer sharded over ranks against the same in one process: output, gradients, losses, load, in fp64."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import pytest
import torch
from tests.moe.moe_cases import Shape, build_layer, fp64, options, tokens_of
from torch import Tensor

from mt_core.nn.context_parallel.zigzag import shard_sequence
from mt_core.nn.dropout import AtSample, DropoutStreams, use_streams
from mt_core.nn.layout import ParameterLayout, parameter_layouts
from mt_core.parallel.collectives import all_reduce
from mt_core.parallel.context import AxisSizes, ParallelContext, build_parallel_context
from mt_core.testing import run_ranks
from mt_moe.dispatchers import alltoall
from mt_moe.experts.experts import ExpertLinear
from mt_moe.layer import MoeLayer
from mt_moe.routing import balance, router
from mt_moe.routing.balance import AuxLoss, Scored

pytestmark = pytest.mark.dist

BATCH, LENGTH = 2, 8
"""Sequences of a micro-batch and their positions."""
FULL = {
    "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss", "global_aux_loss"],
    "moe_aux_loss_coeff": [0.3, 0.2, 0.1],
    "moe_z_loss_coeff": 0.05,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_bias_update_rate": 0.1,
    "moe_shared_expert_intermediate_size": 8,
    "moe_shared_expert_gate": True,
}
SINKHORN = {
    "moe_router_load_balancing_type": ["sinkhorn"],
    "moe_aux_loss_coeff": [],
    "moe_router_score_function": "softmax",
    "moe_router_enable_expert_bias": False,
}


@dataclass(frozen=True)
class Problem:
    """What is computed, apart from the layout. keys: over those of FULL."""

    keys: dict[str, Any]
    shape: Shape = field(default_factory=Shape)
    length: int = LENGTH


def step(layer: MoeLayer, x: Tensor, ctx: ParallelContext) -> tuple[dict[int, Tensor], Tensor]:
    """Forward and backward of this rank's micro-batches; outputs by number, and the gradient of x."""
    target = torch.cos(torch.arange(x.numel(), dtype=x.dtype)).view_as(x)
    count = len(x) // BATCH
    for auxiliary in layer.router.losses.attached.values():
        auxiliary.scale = 1.0 / count
    x = x.clone().requires_grad_()
    outputs = {}
    for number in range(ctx.dp.rank, count, ctx.dp.size):
        rows = slice(number * BATCH, (number + 1) * BATCH)
        own, wanted = (cut(v[rows], ctx) for v in (x, target))
        with AtSample(number * BATCH):
            out = layer(own)
        (out * wanted).sum().backward()
        outputs[number] = out.detach()
    return outputs, x.grad


def cut(x: Tensor, ctx: ParallelContext) -> Tensor:
    """This rank's positions of a micro-batch."""
    x = shard_sequence(x, 1, ctx.cp)
    return x.chunk(ctx.tp.size, 1)[ctx.tp.rank] if ctx.sequence_parallel else x


def summed_gradients(layer: MoeLayer, ctx: ParallelContext) -> dict[str, Tensor]:
    """As the layouts declare: over the axes of partial gradients, then over the replicas."""
    found = {}
    layouts = parameter_layouts(layer)
    for name, parameter in layer.named_parameters():
        if not layouts[name].trained:
            continue
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name_of_axis in (*layouts[name].partial_gradient, layouts[name].replicas):
            if ctx.axis(name_of_axis).size > 1:
                gradient = all_reduce(gradient, ctx.axis(name_of_axis))
        found[name] = gradient
    return found


@dataclass(frozen=True)
class Computed:
    """Of a step: outputs by the number of their micro-batch, and what belongs to the layer by its name."""

    outputs: dict[int, Tensor]
    dx: Tensor
    gradients: dict[str, Tensor]
    values: dict[str, Tensor]
    """Of the auxiliary losses; means over the data-parallel ranks."""
    expert_bias: Tensor
    """Empty without one."""
    metrics: Tensor
    layouts: Mapping[str, ParameterLayout]


def micro_batches_of(ctx: ParallelContext) -> int:
    """Of a step: two on each of at most two data-parallel ranks, one on each of more."""
    return max(4 if ctx.dp.size == 2 else 2, ctx.dp.size)


def computed(problem: Problem, ctx: ParallelContext, micro_batches: int) -> Computed:
    """Gradients are the sums over all ranks; all ranks of the context call it."""
    layer = build_layer(options(**{**FULL, **problem.keys}), ctx, problem.shape)
    use_streams(layer, DropoutStreams(5))
    outputs, dx = step(layer, tokens_of(micro_batches * BATCH, problem.length), ctx)
    for axis in (ctx.cp, ctx.dp, *([ctx.tp] if ctx.sequence_parallel else [])):
        if axis.size > 1:
            dx = all_reduce(dx, axis)
    gradients, values = summed_gradients(layer, ctx), {}
    for name, attached in layer.router.losses.attached.items():
        value = torch.tensor(attached.take())
        values[name] = all_reduce(value, ctx.dp) if ctx.dp.size > 1 else value
    layer.router.after_step()
    bias = layer.router.expert_bias
    metrics = torch.tensor(list(layer.router.metrics().values()))
    bias = torch.empty(0) if bias is None else bias
    return Computed(outputs, dx, gradients, values, bias, metrics, parameter_layouts(layer))


def differences(ctx: ParallelContext, problem: Problem, expected: Computed) -> dict[str, float]:
    """Relative differences from one process by name; all ranks call it."""
    found = computed(problem, ctx, micro_batches_of(ctx))
    pairs = {f"output {number}": (out, cut(expected.outputs[number], ctx)) for number, out in found.outputs.items()}
    for name, gradient in found.gradients.items():
        pairs[name] = gradient, found.layouts[name].to_local(expected.gradients[name], ctx)
    pairs |= {f"value of {name}": (value, expected.values[name]) for name, value in found.values.items()}
    pairs["dx"] = found.dx, expected.dx
    pairs["expert bias"] = found.expert_bias, expected.expert_bias
    pairs["metrics"] = found.metrics, expected.metrics
    return {name: relative(*pair) for name, pair in pairs.items()}


def relative(mine: Tensor, reference: Tensor) -> float:
    assert mine.shape == reference.shape, (mine.shape, reference.shape)
    if mine.numel() == 0:
        return 0.0
    return ((mine - reference).abs().max() / reference.abs().max().clamp(min=1e-12)).item()


NO_GLOBAL = {
    # What global_aux_loss saw before a micro-batch is another thing where ranks take several at once.
    "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"],
    "moe_aux_loss_coeff": [0.3, 0.2],
}

Layout = tuple[AxisSizes, bool]
"""Sizes of the axes, and sequence parallelism."""

LAYOUTS: dict[int, list[Layout]] = {
    2: [
        (AxisSizes(), False),
        (AxisSizes(ep=2), False),
        (AxisSizes(tp=2), False),
        (AxisSizes(tp=2), True),
        (AxisSizes(tp=2, etp=1), False),
        (AxisSizes(tp=2, etp=1, ep=2), True),
        (AxisSizes(tp=2, etp=1, ep=2), False),
        (AxisSizes(etp=2), False),
        (AxisSizes(cp=2, ep=2), False),
        (AxisSizes(cp=2), False),
    ],
    4: [
        (AxisSizes(ep=4), False),
        (AxisSizes(ep=2), False),
        (AxisSizes(tp=2, etp=1, ep=4), True),
        (AxisSizes(tp=2, ep=2), True),
        (AxisSizes(tp=2, ep=2), False),
        (AxisSizes(tp=4, etp=2, ep=2), False),
        (AxisSizes(tp=2, cp=2, etp=1, ep=2), True),
        (AxisSizes(tp=2, cp=2, ep=2), False),
        (AxisSizes(cp=2, ep=2, etp=2), False),
    ],
    8: [
        (AxisSizes(tp=2, cp=2, ep=2, etp=2), True),
        (AxisSizes(tp=4, ep=8, etp=1), True),
        (AxisSizes(tp=2, ep=2, etp=2), False),
    ],
}


def differences_of_all(
    rank: int, world: int, layouts: list[Layout], problems: list[Problem]
) -> dict[str, dict[str, float]]:
    contexts = {
        f"{sizes} sp={sharded}": build_parallel_context(sizes, params_dtype=torch.float64, sequence_parallel=sharded)
        for sizes, sharded in layouts
    }
    found = {}
    for problem in problems:
        expected = {count: computed(problem, fp64(), count) for count in set(map(micro_batches_of, contexts.values()))}
        for name, ctx in contexts.items():
            found[f"{name} {problem.keys}"] = differences(ctx, problem, expected[micro_batches_of(ctx)])
    return found


def assert_equal_everywhere(world: int, layouts: list[Layout], problems: list[Problem]) -> None:
    for by_case in run_ranks(world, differences_of_all, layouts, problems):
        for case, found in by_case.items():
            assert max(found.values()) < 1e-6, (case, found)


DISPATCHERS = [{**NO_GLOBAL, "moe_token_dispatcher_type": name} for name in ("alltoall", "allgather")]


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4, 8])
def test_every_layout_computes_what_one_process_does(world) -> None:
    problems = [Problem(keys, Shape(add_bias_linear=True)) for keys in DISPATCHERS]
    assert_equal_everywhere(world, LAYOUTS[world], problems)


@pytest.mark.slow
def test_other_options_too() -> None:
    """On ranks that share a micro-batch in every way."""
    keys: list[dict[str, Any]] = [
        {"moe_latent_size": 4, "moe_shared_expert_overlap": True},
        {"moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_router_topk_scaling_factor": 2.5},
        {"moe_router_score_function": "sqrtsoftplus", "moe_router_topk": 3, "moe_input_jitter_eps": 0.3},
        SINKHORN,
    ]
    layouts = [(AxisSizes(tp=2, ep=2), True), (AxisSizes(tp=2, cp=2, ep=2), False)]
    assert_equal_everywhere(4, layouts, [Problem({**NO_GLOBAL, **own}) for own in keys])


@pytest.mark.slow
def test_positions_that_ranks_do_not_divide_evenly() -> None:
    """2 sequences of 3 positions on 4 tensor-parallel ranks, which take 2, 2, 2 and 0 of them."""
    layouts = [(AxisSizes(tp=4), False), (AxisSizes(tp=4, etp=1, ep=4), False), (AxisSizes(tp=4, etp=2, ep=2), False)]
    assert_equal_everywhere(4, layouts, [Problem(keys, length=3) for keys in DISPATCHERS])


@pytest.mark.slow
def test_the_global_loss_counts_all_data_parallel_ranks() -> None:
    """One micro-batch on each of 4 ranks; in one process the same sequences are one micro-batch."""
    for found in run_ranks(4, global_loss):
        assert max(found.values()) < 1e-6, found


def global_loss(rank: int, world: int) -> dict[str, float]:
    keys = {"moe_router_load_balancing_type": ["global_aux_loss"], "moe_aux_loss_coeff": [0.5]}
    ctx, alone = build_parallel_context(AxisSizes(ep=2), params_dtype=torch.float64), fp64()
    layer, reference = (build_layer(options(**keys), c) for c in (ctx, alone))
    x = tokens_of(4, LENGTH)
    value, gradient = loss_alone(layer, x[rank : rank + 1], 1.0 / world)
    values, gradients = all_reduce(value, ctx.dp), all_reduce(gradient, ctx.dp)
    expected, expected_gradient = loss_alone(reference, x, 1.0)
    return {
        "value": relative(values / world, expected),
        "router": relative(gradients, expected_gradient),
    }


def loss_alone(layer: MoeLayer, x: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The global loss and its gradient of the router, without the model's loss."""
    attached = layer.router.losses.attached["global_aux_loss"]
    attached.scale = scale
    (0.0 * layer(x.requires_grad_()).sum()).backward()
    return torch.tensor(attached.take(), dtype=torch.float64), layer.router.weight.grad


def mutations() -> dict[str, tuple[Any, str, Any, str]]:
    """What is broken -> (owner, attribute, what is put there, where it shows)."""
    init, forward = ExpertLinear.__init__, AuxLoss.forward

    def over_dense_group(self: ExpertLinear, *arguments: Any, **options: Any) -> None:
        init(self, *arguments, **options)
        self.layouts = {name: replace(layout, replicas="dp_cp") for name, layout in self.layouts.items()}

    def scaled_by_tp(self: AuxLoss, scored: Scored) -> Tensor:
        return forward(self, scored) * (2 if scored.share.axes else 1)

    return {
        "expert gradients over the dense group": (ExpertLinear, "__init__", over_dense_group, "experts.linear_fc1"),
        "balance loss scaled by tp": (AuxLoss, "forward", scaled_by_tp, "value of aux_loss"),
        "router gradients not summed over tp": (router, "partial_gradient_axes", lambda ctx: (), "router.weight"),
        "bias moved by the local load": (balance, "all_reduce", lambda x, axis: x, "expert bias"),
        "results not summed over etp": (
            alltoall,
            "sum_rows_to",
            lambda x, axis, sizes: x.split(list(sizes))[axis.rank],
            "output",
        ),
    }


def all_mutated(rank: int, world: int) -> dict[str, dict[str, float]]:
    found = {}
    sizes = AxisSizes(tp=2, ep=2, etp=2)
    ctx = build_parallel_context(sizes, params_dtype=torch.float64, sequence_parallel=True)
    problem = Problem(NO_GLOBAL)
    expected = computed(problem, fp64(), micro_batches_of(ctx))
    for name, (owner, attribute, broken, _) in mutations().items():
        with mock.patch.object(owner, attribute, broken):
            found[name] = differences(ctx, problem, expected)
    return found


@pytest.mark.slow
def test_a_broken_layer_is_noticed() -> None:
    """On 8 ranks, tp 2 x ep 2 x etp 2 with edp 2: what is broken shows where it should, far above 1e-6."""
    results = run_ranks(8, all_mutated)
    for mutation, (*_, where) in mutations().items():
        found = [max(v for name, v in by[mutation].items() if name.startswith(where)) for by in results]
        assert max(found) > 1e-2, (mutation, found)
