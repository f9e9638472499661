"""In which order buckets are sent and waited for, noted down by functions in place of torch.distributed's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mt_core.nn.layout import LayoutModule, ParameterLayout, initialize, normal
from mt_core.nn.model import NumberedLayers
from mt_core.optim import buckets
from mt_core.optim.param_and_grad_buffer import BufferOptions, ParamAndGradBuffer
from mt_core.parallel.context import Axis, ParallelContext

WIDTH = 4
NAMES = ["embedding", "layer 0", "layer 1", "layer 2", "output"]
Events = list[tuple[str, str]]


class Matrix(LayoutModule):
    weight: Tensor

    def __init__(self, ctx: ParallelContext) -> None:
        super().__init__(ctx)
        self.declare("weight", ParameterLayout((WIDTH, WIDTH), normal(0.5)))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class Model(nn.Module):
    """Its LM head is used without a call of its module, as a loss from hidden states does."""

    def __init__(self, ctx: ParallelContext) -> None:
        super().__init__()
        self.embedding = Matrix(ctx)
        self.layers = NumberedLayers((number, Matrix(ctx)) for number in range(3))
        self.output = Matrix(ctx)

    def forward(self, x: Tensor, used: Callable[[str], None]) -> Tensor:
        used("embedding")
        x = self.embedding(x)
        for number, layer in enumerate(self.layers):
            used(f"layer {number}")
            x = layer(x)
        used("output")
        return F.linear(x, self.output.weight)


class Work:
    def __init__(self, wait: Callable[[], object]) -> None:
        self.wait = wait


class Run:
    """A model on rank 0 of 2 shards, replicated twice, each weight in a bucket, and what is sent for it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, overlap_gather: bool) -> None:
        self.events: Events = []
        axes = {name: Axis(2, 0, object(), (0, 1)) for name in ("shard", "replicate", "dp_cp")}  # type: ignore[arg-type]
        ctx = ParallelContext(axes=axes)  # type: ignore[arg-type]
        self.model = Model(ctx)
        initialize(self.model, 0, ctx)
        options = BufferOptions(sharded=True, bucket_elements=1, overlap_gather=overlap_gather)
        self.weights = ParamAndGradBuffer(self.model, ctx, options)
        self.names = {
            bucket.weights.untyped_storage().data_ptr(): name
            for bucket, name in zip(self.weights.buckets, reversed(NAMES), strict=True)
        } | {
            bucket.gradients.untyped_storage().data_ptr(): name
            for bucket, name in zip(self.weights.buckets, reversed(NAMES), strict=True)
        }
        for call, short in (
            ("all_gather_into_tensor", "gather"),
            ("reduce_scatter_tensor", "shard sum"),
            ("all_reduce", "instance sum"),
        ):
            monkeypatch.setattr(buckets.dist, call, self._noting(short))

    def _noting(self, operation: str) -> Callable[..., Work]:
        def call(out: Tensor, *rest: Any, group: object, async_op: bool, **options: Any) -> Work:
            assert async_op
            name = self.names[out.untyped_storage().data_ptr()]
            self.events.append((operation, name))
            return Work(lambda: self.events.append((f"wait for {operation}", name)))

        return call

    def forward(self) -> Tensor:
        return self.model(torch.ones(2, WIDTH), lambda name: self.events.append(("use", name)))

    def take_events(self) -> Events:
        events, self.events = self.events, []
        return events


def test_weights_are_collected_in_the_order_of_use_and_waited_for_at_their_use(monkeypatch) -> None:
    run = Run(monkeypatch, overlap_gather=True)
    run.weights.copy_to_model()
    assert run.take_events() == [("gather", name) for name in NAMES], "not launched in the order of use"
    run.weights.expect(1)
    run.forward()
    events = run.take_events()
    assert [name for kind, name in events if kind == "wait for gather"] == NAMES, "not waited for in the order of use"
    for before, after in zip(NAMES, NAMES[1:], strict=False):
        assert events.index(("use", before)) < events.index(("wait for gather", after)), "waited for too early"
    assert events.index(("wait for gather", "embedding")) < events.index(("use", "embedding"))
    assert events.index(("wait for gather", "output")) < events.index(("use", "output"))
    run.forward()
    assert not [kind for kind, _ in run.take_events() if kind != "use"]  # the next micro-batch has nothing to wait for


def test_without_overlap_all_weights_are_there_after_the_step(monkeypatch) -> None:
    run = Run(monkeypatch, overlap_gather=False)
    run.weights.copy_to_model()
    assert {("wait for gather", name) for name in NAMES} <= set(run.take_events())


def test_sums_over_instances_run_while_the_backward_pass_does(monkeypatch) -> None:
    """Each begins when the next bucket is full, behind the sum over its shards."""
    run = Run(monkeypatch, overlap_gather=False)
    run.weights.zero_grad()
    run.weights.expect(1)
    loss = run.forward().sum()
    run.take_events()
    loss.backward()
    during = run.take_events()
    run.weights.reduce()
    after = run.take_events()
    backward = list(reversed(NAMES))
    assert [name for kind, name in during if kind == "shard sum"] == backward, "not in the order of the backward pass"
    sums = [name for kind, name in during if kind == "instance sum"]
    assert sums == backward[:-1], "the sum over instances does not begin one bucket later"
    assert [name for kind, name in after if kind == "instance sum"] == backward[-1:], "the last one has no sum"
    for name, following in zip(backward, backward[1:], strict=False):
        places = [
            during.index(event)
            for event in (("shard sum", following), ("wait for shard sum", name), ("instance sum", name))
        ]
        assert places == sorted(places), "no wait for the sum over shards, or before the next one has begun"
    assert {name for kind, name in after if kind == "wait for instance sum"} == set(NAMES)


@pytest.mark.parametrize("unused", [False, True])
def test_buckets_are_sent_in_one_order_although_they_fill_in_another(monkeypatch, unused: bool) -> None:
    """A rank whose samples take another way through the model would else send other buckets than its peers."""
    run = Run(monkeypatch, overlap_gather=False)
    run.weights.zero_grad()
    run.weights.expect(1)
    x = torch.ones(2, WIDTH)
    modules = [run.model.embedding, *run.model.layers, run.model.output]
    for module in reversed(modules[:-1] if unused else modules):  # the embedding last, so that its gradient is first
        x = module(x)
    run.take_events()
    x.sum().backward()
    during = [name for kind, name in run.take_events() if kind == "shard sum"]
    run.weights.reduce()
    after = [name for kind, name in run.take_events() if kind == "shard sum"]
    assert during + after == list(reversed(NAMES)), "another order than that of the other ranks"
    assert (during == []) is unused, "sent before it was full, or not during the backward pass"
