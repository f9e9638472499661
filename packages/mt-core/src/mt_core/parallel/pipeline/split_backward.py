"""Split backward pass: first the gradients of a stage's inputs, later those of its weights.

Zero-bubble schedules (Qi et al., 2024) send the input gradients immediately and fill bubbles with the weight gradients.
The autograd graph is cut where it branches: nodes between the output and an input are *on path*; at some of them, the
*forks*, a branch leads to weights. The first part runs only the nodes on path and records the gradient that arrives at
each fork; the second runs the branches from there. Weights receive their gradients through autograd, so that hooks on
them (fp32 main_grad, buckets for reduction) fire as in an ordinary backward pass.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Gradients = tuple[Tensor | None, ...]


@dataclass
class Branches:
    """Weights, and the forks (or outputs) from which they are reached. Groups are disjoint in both."""

    weights: dict[Node, Tensor] = field(default_factory=dict)
    starts: set[Node] = field(default_factory=set)


@dataclass
class WeightBackward:
    """The deferred weight gradients after `backward_of_inputs`. A call accumulates them; call it once."""

    groups: list[Branches]
    arrived: dict[Node, Gradients]
    """For each start, the gradients of the node's outputs."""
    forks: set[Node]
    edges: Sequence[GradientEdge]
    """Edges of the outputs. They own the graph: with torch 2.11 nodes of autograd functions in Python do not."""

    def __call__(self) -> None:
        for group in self.groups:
            self._run(group)
        self.groups, self.arrived, self.edges = [], {}, ()  # frees the graph

    def _run(self, group: Branches) -> None:
        edges, gradients = [], []
        for node in group.starts:
            # A fork that no gradient reached has no entry: its weights get no gradient, as in an ordinary backward
            # pass.
            for number, gradient in enumerate(self.arrived.get(node, ())):
                if gradient is not None:
                    edges.append(GradientEdge(node, number))
                    gradients.append(gradient)
        if not edges:
            return
        # With weights used in several places the way from one fork may lead through another, whose gradient is known.
        handles = [self._fix(node) for node in group.starts & self.forks] if len(group.starts) > 1 else []
        try:
            weights = list(group.weights.values())
            # The graph is kept since a group may run over nodes of another; it goes with the references to it.
            torch.autograd.backward(edges, gradients, retain_graph=True, inputs=weights)
        finally:
            for handle in handles:
                handle.remove()

    def _fix(self, node: Node) -> Any:
        known = self.arrived[node]
        # A prehook's return value replaces the gradients that arrive at the node. Those would be counted twice: once as
        # the root gradient of the fork, once through the other fork.
        return node.register_prehook(lambda gradients: known)


def backward_of_inputs(
    edges: Sequence[GradientEdge], gradients: Sequence[Tensor], leaves: Sequence[Tensor]
) -> tuple[Gradients, WeightBackward]:
    """Gradients of `leaves` given those of the outputs at `edges`, and the deferred work for the weights.

    A leaf that no output depends on has the gradient None.
    """
    # Example: y = f(x, w1), z = g(y, w2), leaf x. On path: g, f and x's AccumulateGrad node. Forks: g, from which a
    # branch leads to w2, and f, from which one leads to w1. The first part computes dx and records dz at g and dy at f.
    outputs = {edge.node for edge in edges}
    users = _users(outputs)
    # The AccumulateGrad nodes of the leaves.
    leaf_nodes = {get_gradient_edge(leaf).node for leaf in leaves}
    # All users of a node on path are on path too. The gradient that arrives at a fork in the first part is therefore
    # complete: no contribution comes later from a branch.
    on_path = _reach(leaf_nodes & users.keys(), users)
    groups = _branches(users, on_path | outputs, leaf_nodes)
    forks = {node for group in groups for node in group.starts} & on_path
    arrived: dict[Node, Gradients] = {}
    # Prehooks receive the gradients of the node's outputs, after the engine has summed them over all users.
    handles = [node.register_prehook(_noting(arrived, node)) for node in forks]
    try:
        # grad() runs only the nodes between the outputs and the leaves, so hooks and accumulation of the weights do not
        # fire. The graph is retained for the second part.
        leaf_gradients = torch.autograd.grad(
            list(edges), list(leaves), list(gradients), retain_graph=True, allow_unused=True
        )
    finally:
        for handle in handles:
            handle.remove()
    arrived.update(_of_outputs(edges, gradients, on_path))
    return tuple(leaf_gradients), WeightBackward(groups, arrived, forks, edges)


def _noting(arrived: dict[Node, Gradients], node: Node) -> Any:
    def note(gradients: Gradients) -> None:
        arrived[node] = gradients

    return note


def _of_outputs(
    edges: Sequence[GradientEdge], gradients: Sequence[Tensor], on_path: set[Node]
) -> dict[Node, Gradients]:
    """Gradients of outputs that depend on weights alone: the nodes are starts themselves."""
    sums: dict[Node, dict[int, Tensor]] = defaultdict(dict)
    for edge, gradient in zip(edges, gradients, strict=True):
        # The engine does not visit these nodes in the first part, so no prehook records what arrives.
        if edge.node not in on_path:
            # A tensor may be among the outputs twice.
            before = sums[edge.node].get(edge.output_nr)
            sums[edge.node][edge.output_nr] = gradient if before is None else before + gradient
    return {
        node: tuple(by_number.get(number) for number in range(1 + max(by_number))) for node, by_number in sums.items()
    }


def _users(outputs: Iterable[Node]) -> dict[Node, list[Node]]:
    """Every node of the graph, and the nodes that pass gradients to it."""
    # Iterative: graphs of many layers are deeper than Python's recursion limit.
    users: dict[Node, list[Node]] = {node: [] for node in outputs}
    todo = list(users)
    while todo:
        node = todo.pop()
        for source, _ in node.next_functions:
            if source is None:
                continue
            if source not in users:
                users[source] = []
                todo.append(source)
            users[source].append(node)
    return users


def _reach(starts: Iterable[Node], users: dict[Node, list[Node]]) -> set[Node]:
    """The nodes from which gradients come to the given ones, these included."""
    reached = set(starts)
    todo = list(reached)
    while todo:
        for user in users[todo.pop()]:
            if user not in reached:
                reached.add(user)
                todo.append(user)
    return reached


def _branches(users: dict[Node, list[Node]], starts: set[Node], inputs: set[Node]) -> list[Branches]:
    """The weights of the graph, those that share a start together.

    starts: where the gradient is known. inputs: leaves that are no weights.
    """
    group_of: dict[Node, Branches] = {}
    for node in users:
        # Only AccumulateGrad nodes have it: they are the leaves of the graph.
        weight = getattr(node, "variable", None)
        if weight is None or node in inputs:
            continue
        group = Branches({node: weight}, _nearest(node, users, starts))
        # Merge all groups that share a start with this weight, before any start is assigned to the merged group.
        for other in [group_of[start] for start in group.starts if start in group_of]:
            group.weights.update(other.weights)
            group.starts.update(other.starts)
        group_of.update(dict.fromkeys(group.starts, group))
    # A group with several starts occurs several times. Branches is a mutable dataclass and not hashable, hence the ids.
    return list({id(group): group for group in group_of.values()}.values())


def _nearest(weight: Node, users: dict[Node, list[Node]], starts: set[Node]) -> set[Node]:
    """The first nodes among `starts` on each path from a weight towards the outputs."""
    # A weight that is an output of the stage itself.
    if weight in starts:
        return {weight}
    nearest: set[Node] = set()
    seen, todo = {weight}, [weight]
    while todo:
        for user in users[todo.pop()]:
            # The search ends here: the gradient is known at this node.
            if user in starts:
                nearest.add(user)
            elif user not in seen:
                seen.add(user)
                todo.append(user)
    return nearest
