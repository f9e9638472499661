"""Gradients of inputs first and of weights later, against one ordinary backward pass."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

from mt_core.parallel.pipeline import split_backward
from mt_core.parallel.pipeline.schedule_run import StageGraph
from mt_core.parallel.pipeline.split_backward import backward_of_inputs


class Net(nn.Module):
    """What a stage may hold: weights used once, used twice, shared through a tensor made once, and frozen ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.norm, self.frozen = nn.LayerNorm(6), nn.Linear(6, 6).requires_grad_(False)
        self.table, self.scale = nn.Embedding(4, 6), nn.Parameter(torch.ones(6))
        self.alone = nn.Parameter(torch.randn(3))

    def block(self, x: Tensor, shared: Tensor) -> Tensor:
        return torch.tanh(self.twice(self.norm(x)) + shared) + x * (1 + self.scale)

    def forward(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """An output of the input, the second input as it was, and an output of weights alone."""
        shared = self.table(torch.tensor([0, 1, 3])).mean(0)
        x = self.frozen(F.gelu(self.first(x)))
        x = self.block(x, shared)
        x = checkpoint(self.block, x, shared, use_reentrant=False)
        return self.last(x) * memory.sigmoid(), memory, self.alone.exp()


def case(seed: int = 0) -> tuple[Net, list[Tensor], list[Tensor]]:
    """The net, its inputs as leaves, and gradients of its outputs."""
    torch.manual_seed(seed)
    net = Net()
    leaves = [torch.randn(2, 6).requires_grad_(), torch.randn(2, 6).requires_grad_()]
    return net, leaves, [torch.randn(2, 6), torch.randn(2, 6), torch.randn(3)]


def in_one(net: Net, leaves: list[Tensor], gradients: list[Tensor]) -> dict[str, Tensor]:
    torch.autograd.backward(net(*leaves), gradients)
    found = {name: p.grad for name, p in net.named_parameters() if p.requires_grad}
    return found | {f"leaf {number}": leaf.grad for number, leaf in enumerate(leaves)}


def in_two(net: Net, leaves: list[Tensor], gradients: list[Tensor]) -> dict[str, Tensor]:
    edges = [get_gradient_edge(output) for output in net(*leaves)]
    of_leaves, weights = backward_of_inputs(edges, gradients, leaves)
    assert all(p.grad is None for p in net.parameters())
    weights()
    found = {name: p.grad for name, p in net.named_parameters() if p.requires_grad}
    return found | {f"leaf {number}": gradient for number, gradient in enumerate(of_leaves)}


def difference(first: dict[str, Tensor], second: dict[str, Tensor]) -> float:
    assert first.keys() == second.keys()
    return max((first[name] - second[name]).abs().max().item() for name in first)


def test_two_parts_give_the_gradients_of_one() -> None:
    assert difference(in_one(*case()), in_two(*case())) < 1e-6


def test_weights_used_twice_count_once_for_each_use(monkeypatch) -> None:
    """The test of the test: without fixing the known gradients, the way through both uses is counted again."""
    expected = in_one(*case())
    monkeypatch.setattr(
        split_backward.WeightBackward, "_fix", lambda self, node: node.register_prehook(lambda gradients: None)
    )
    assert difference(expected, in_two(*case())) > 1e-3


def test_gradients_are_added_to_those_that_are_there_and_hooks_see_them() -> None:
    """Main gradients in fp32 and buckets live by such hooks."""
    net, leaves, gradients = case()
    alone = in_two(*case())
    seen: list[str] = []
    for name, parameter in net.named_parameters():
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)
            parameter.register_post_accumulate_grad_hook(lambda p, name=name: seen.append(name))
    found = in_two_with(net, leaves, gradients)
    assert sorted(seen) == sorted(found)
    assert max((found[name] - 1 - alone[name]).abs().max().item() for name in found) < 1e-6


def in_two_with(net: Net, leaves: list[Tensor], gradients: list[Tensor]) -> dict[str, Tensor]:
    edges = [get_gradient_edge(output) for output in net(*leaves)]
    backward_of_inputs(edges, gradients, leaves)[1]()
    return {name: p.grad for name, p in net.named_parameters() if p.requires_grad}


def test_the_first_part_computes_no_gradient_of_a_weight() -> None:
    """Counted in matrix products: for y = x W^T one in each part."""
    layer, x = nn.Linear(5, 5, bias=False), torch.randn(3, 5).requires_grad_()
    edge = get_gradient_edge(layer(x))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as first:
        _, weights = backward_of_inputs([edge], [torch.ones(3, 5)], [x])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as second:
        weights()
    assert [sum(event.name == "aten::mm" for event in part.events()) for part in (first, second)] == [1, 1]


def test_an_input_that_nothing_depends_on_has_gradient_zero() -> None:
    x, unused = torch.randn(2, 3).requires_grad_(), torch.randn(2, 3).requires_grad_()
    weight = nn.Parameter(torch.randn(3, 3))
    graph = StageGraph((x, unused), x @ weight)
    found = graph.backward_input([torch.ones(2, 3)])
    graph.backward_weight()
    assert torch.equal(found[1], torch.zeros(2, 3))
    assert torch.allclose(found[0], torch.ones(2, 3) @ weight.T)
    assert torch.allclose(weight.grad, x.T @ torch.ones(2, 3))


def test_a_first_stage_does_all_of_its_backward_for_the_weights() -> None:
    weight = nn.Parameter(torch.randn(3, 3))
    graph = StageGraph(None, (torch.ones(2, 3) @ weight).exp())
    assert graph.backward_input([torch.ones(2, 3)]) == []
    assert weight.grad is None
    graph.backward_weight()
    assert weight.grad is not None


@pytest.mark.parametrize("split", [False, True])
def test_a_stage_without_anything_to_train_passes_nothing_back(split) -> None:
    graph = StageGraph(None, torch.ones(2, 3))
    if split:
        assert graph.backward_input([]) == []
        graph.backward_weight()
    else:
        assert graph.backward([]) == []


def test_a_weight_that_ties_branches_together_loses_none_of_them() -> None:
    """Each branch has a start and a weight of its own, and one weight is in all: they become one group."""
    x = torch.randn(3).requires_grad_()
    own, common = [nn.Parameter(torch.randn(3)) for _ in range(6)], nn.Parameter(torch.randn(3))
    out = sum(x * (weight + common) for weight in own)
    _, weights = backward_of_inputs([get_gradient_edge(out)], [torch.ones(3)], [x])
    weights()
    for weight in own:
        assert torch.equal(weight.grad, x.detach())
    assert torch.allclose(common.grad, 6 * x.detach())
