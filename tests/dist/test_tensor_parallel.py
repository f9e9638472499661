"""Layers sharded over ranks against the same layers in one process: values, every gradient, and bytes sent.

A test runs once on each number of ranks and returns differences by name; what may differ is rounding.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from mt_core.nn.embedding import VocabParallelEmbedding, VocabParallelOutput, gather_logits
from mt_core.nn.layout import LayoutModule, initialize, normal, parameter_layouts
from mt_core.nn.linear import ColumnParallelLinear, RowParallelLinear
from mt_core.nn.loss import cross_entropy, vocab_parallel_cross_entropy
from mt_core.nn.norm import build_norm
from mt_core.parallel import collectives
from mt_core.parallel.collectives import all_gather, split_to
from mt_core.parallel.context import Axis, AxisSizes, ParallelContext, build_parallel_context
from mt_core.testing import run_ranks

pytestmark = pytest.mark.dist

BATCH, SEQUENCE, HIDDEN, VOCAB, MULTIPLE = 2, 8, 12, 29, 2


class SmallModel(nn.Module):
    """Embedding, norm, a gated pair of matrices with biases, norm, logits."""

    def __init__(self, ctx: ParallelContext) -> None:
        super().__init__()
        init = normal(0.5)
        self.embed = VocabParallelEmbedding(VOCAB, HIDDEN, ctx, init=init, divisible_by=MULTIPLE)
        self.norm = build_norm("LayerNorm", HIDDEN, 1e-5, ctx)
        self.up = ColumnParallelLinear(HIDDEN, 2 * 16, ctx, bias=True, init=init, sections=2)
        self.down = RowParallelLinear(16, HIDDEN, ctx, bias=True, init=init)
        self.final = build_norm("RMSNorm", HIDDEN, 1e-5, ctx)
        self.head = VocabParallelOutput(VOCAB, HIDDEN, ctx, init=init, divisible_by=MULTIPLE)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        gate, up = self.up(self.norm(x)).chunk(2, -1)
        return self.head(self.final(x + self.down(F.silu(gate) * up)))


def batch() -> dict[str, Tensor]:
    ids = torch.randint(0, VOCAB, (BATCH, SEQUENCE + 1), generator=torch.Generator().manual_seed(5))
    return {"tokens": ids[:, :-1], "labels": ids[:, 1:]}


def loss_and_gradients(ctx: ParallelContext) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Losses [B, S], logits over the whole vocabulary, canonical gradients."""
    model = SmallModel(ctx)
    initialize(model, 3, ctx)
    data = batch()
    logits = model(data["tokens"])
    loss = cross_entropy
    if ctx.tp.size > 1:
        loss = vocab_parallel_cross_entropy(ctx.tp.rank * model.head.weight.shape[0], ctx.tp)
    losses = loss(logits, data)
    losses.mean().backward()
    layouts = parameter_layouts(model)
    gradients = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        for axis in layouts[name].partial_gradient:
            gradient = collectives.all_reduce(gradient, ctx.axis(axis))
        gradients[name] = (gradient, layouts[name])
    whole = gather_logits(logits, VOCAB, MULTIPLE, ctx)
    return losses.detach(), whole.detach(), gradients


def differences(rank: int, world: int, sequence_parallel: bool) -> dict[str, float]:
    """Largest difference from one process, relative to the largest value, by name."""
    ctx = build_parallel_context(AxisSizes(tp=world), sequence_parallel=sequence_parallel)
    losses, logits, gradients = loss_and_gradients(ctx)
    ref_losses, ref_logits, ref_gradients = loss_and_gradients(ParallelContext())
    found = {"losses": relative(losses, ref_losses), "logits": relative(logits, ref_logits)}
    for name, (gradient, layout) in gradients.items():
        reference, _ = ref_gradients[name]
        own = layout.to_local(layout.to_canonical(reference), ctx)
        found[name] = relative(gradient, own)
    return found


def relative(mine: Tensor, reference: Tensor) -> float:
    assert mine.shape == reference.shape, (mine.shape, reference.shape)
    return ((mine - reference).abs().max() / reference.abs().max().clamp(min=1e-12)).item()


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_sharded_layers_compute_what_one_process_does(world, sequence_parallel) -> None:
    """29 ids in padded tables of 32 on 4 ranks: the last rank has 5 ids and 3 rows of padding."""
    for found in run_ranks(world, differences, sequence_parallel):
        assert max(found.values()) < 1e-5, found


def mutated(rank: int, world: int, mutation: str) -> dict[str, float]:
    """The same with one thing broken in the runtime."""
    if mutation == "no sum of dx":
        dist.all_reduce = _without(dist.all_reduce)
    elif mutation == "partial gradients not summed":
        collectives.all_reduce = lambda x, axis: x
    elif mutation == "wrong shard of the sequence":
        scatter = dist.reduce_scatter_tensor
        dist.reduce_scatter_tensor = lambda out, x, **options: scatter(out, x.roll(1, 0), **options)
    return differences(rank, world, True)


def _without(collective):
    def skip(tensor, *, async_op=False, **options):
        return collective(tensor.clone(), async_op=async_op, **options)

    return skip


@pytest.mark.parametrize("mutation", ["no sum of dx", "partial gradients not summed", "wrong shard of the sequence"])
def test_a_broken_runtime_is_noticed(mutation) -> None:
    assert any(max(found.values()) > 1e-3 for found in run_ranks(2, mutated, mutation))


def sent_bytes(rank: int, world: int, sequence_parallel: bool) -> dict[str, int]:
    """Bytes of the tensors that collectives of one forward and backward of a pair of layers work on."""
    counted: dict[str, int] = {}

    def counting(name):
        collective = getattr(dist, name)

        def call(first, *rest, **options):
            whole = rest[0] if name == "reduce_scatter_tensor" else first
            counted[name] = counted.get(name, 0) + whole.numel() * whole.element_size()
            return collective(first, *rest, **options)

        setattr(dist, name, call)

    for name in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"):
        counting(name)
    ctx = build_parallel_context(AxisSizes(tp=world), sequence_parallel=sequence_parallel)
    up = ColumnParallelLinear(HIDDEN, 16, ctx, bias=False, init=normal(1.0))
    down = RowParallelLinear(16, HIDDEN, ctx, bias=False, init=normal(1.0))
    whole = torch.randn(BATCH, SEQUENCE, HIDDEN, requires_grad=True)
    x = split_to(whole, 1, ctx.tp) if sequence_parallel else whole
    counted.clear()
    out = down(up(x))
    torch.autograd.grad(out.sum(), [x, up.weight, down.weight])
    return counted


def test_a_pair_of_layers_communicates_no_more_than_it_must() -> None:
    """Without sequence parallelism: one all-reduce forward, one backward. With it: a gather and a scatter in
    place of each, and the gather of the kept shard once more for the gradient of the weight."""
    activation = BATCH * SEQUENCE * HIDDEN * 4
    assert run_ranks(2, sent_bytes, False) == [{"all_reduce": 2 * activation}] * 2
    with_sequence = {"all_gather_into_tensor": 3 * activation, "reduce_scatter_tensor": 2 * activation}
    assert run_ranks(2, sent_bytes, True) == [with_sequence] * 2


def conjugates(rank: int, world: int) -> list[float]:
    """<f(x), y> = <x, f'(y)> summed over ranks, for each collective and its backward."""
    axis = build_parallel_context(AxisSizes(tp=world)).tp
    generator = torch.Generator().manual_seed(rank)
    found = []
    cases = [
        (lambda x: collectives.gather_from(x, 1, axis), (2, 3), False, False),
        (lambda x: collectives.reduce_scatter_to(x, 1, axis), (2, 3 * world), False, False),
        (lambda x: collectives.reduce_from(x, axis), (2, 3), False, True),
        (lambda x: collectives.copy_to(x, axis), (2, 3), True, False),
        (lambda x: collectives.split_to(x, 1, axis), (2, 3 * world), True, False),
        (lambda x: collectives.gather_copies(x, 1, axis), (2, 3), False, True),
    ]
    for function, shape, same_input, same_output in cases:
        common = torch.Generator().manual_seed(99)
        x = torch.randn(shape, generator=common if same_input else generator, dtype=torch.float64, requires_grad=True)
        out = function(x)
        y = torch.randn(out.shape, generator=common if same_output else generator, dtype=torch.float64)
        (back,) = torch.autograd.grad(out, x, y)
        sides = torch.stack(
            [(out * y).sum() / (world if same_output else 1), (x * back).sum() / (world if same_input else 1)]
        )
        dist.all_reduce(sides)
        found.append((sides[0] - sides[1]).abs().item())
    return found


def test_each_collective_and_its_backward_are_adjoint() -> None:
    for found in run_ranks(3, conjugates):
        assert max(found) < 1e-12


def test_pieces_come_back_together_in_order() -> None:
    x = torch.arange(24.0).view(2, 6, 2)
    shards = collectives.split_shards(x, 1, 3)
    assert torch.equal(shards[1], x[:, 2:4])
    assert torch.equal(collectives.concat_shards(shards, 1), x)


def gathered(rank: int, world: int) -> list:
    axis = build_parallel_context(AxisSizes(tp=world)).tp
    return all_gather(torch.full((1, 2), float(rank)), 1, axis).tolist()


def test_all_gather_lays_pieces_end_to_end() -> None:
    assert run_ranks(2, gathered) == [[[0, 0, 1, 1]]] * 2


def test_one_process_communicates_nothing() -> None:
    x = torch.randn(2, 3)
    for function in (collectives.copy_to, collectives.reduce_from):
        assert function(x, Axis()) is x


def test_a_layout_module_says_which_gradients_are_partial() -> None:
    ctx = ParallelContext(axes={"tp": Axis(2, 0, None, (0, 1))}, sequence_parallel=True)
    layer: LayoutModule = RowParallelLinear(4, 4, ctx, bias=True, init=normal(1.0))
    assert layer.layouts["bias"].partial_gradient == ("tp",)
    assert layer.layouts["weight"].partial_gradient == ()
