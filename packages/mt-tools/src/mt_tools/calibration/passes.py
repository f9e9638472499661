"""Forward passes for calibration: through all stages, and through a stage one layer after the other."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from mt_core.nn.model import NumberedLayers, is_pipelined
from mt_core.parallel.context import ParallelContext
from mt_core.parallel.pipeline.p2p_communicator import P2PCommunicator
from mt_core.parallel.pipeline.schedule_tables import ranks_of_stages
from mt_core.parallel.pipeline.stage import Stage
from mt_core.train.pipelining import Stages
from mt_core.train.step.forward_backward import Batch
from mt_core.train.trained_model import TrainedModel
from mt_tools.calibration.samples import inputs_of

Visit = Callable[[Collection[nn.Module], Callable[[], None]], None]
"""Called with the modules of a layer, or with those that are in no layer, and a function that computes them for all
batches."""


class Passes:
    """The forward passes of this rank. Construction and passes are collective over pp."""

    def __init__(self, trained: TrainedModel) -> None:
        self.model, self.ctx, self.stages = trained.model, trained.ctx, trained.stages
        self._p2p = None if self.stages is None else P2PCommunicator(self.ctx.pp, self.ctx.device)
        self._keys = 0

    @property
    def has_output(self) -> bool:
        """Whether this rank computes the model's output."""
        return self.stages is None or _ranks(self.stages, self.ctx)[-1] == self.ctx.pp.rank

    @torch.no_grad()
    def outputs(self, batches: Sequence[Batch]) -> Iterator[tuple[Batch, Any]]:
        """Each batch with the model's output; without it on ranks of other stages."""
        for batch in batches:
            yield batch, self._through([batch], partial(self._run_all, [batch]))[0]

    @torch.no_grad()
    def by_layer(self, batches: Sequence[Batch], visit: Visit) -> None:
        """`visit` each layer of this rank, in order: its inputs are those that the layers before it give as they are
        then. A model whose layers are no chain is visited once, as a whole."""
        self._through(batches, lambda stage, hidden: self._layers(stage, hidden, batches, visit))

    def _through(self, batches: Sequence[Batch], run: Callable[[Stage | None, list[Any]], list[Any]]) -> list[Any]:
        """Hidden states of all batches through this rank's stages, in turn with those of others."""
        hidden: list[Any] = [None] * len(batches)
        if self.stages is None:
            return run(None, hidden)
        assert self._p2p is not None
        ranks, own_rank, self._keys = _ranks(self.stages, self.ctx), self.ctx.pp.rank, self._keys + 1
        for number, (stage, rank) in enumerate(zip(self.stages.all, ranks, strict=True)):
            if rank != own_rank:
                continue
            # A key for each pass: batches of several data sets have other shapes.
            if number and ranks[number - 1] != own_rank:
                received = [
                    self._p2p.receive_hidden(ranks[number - 1], (self._keys, number, place))
                    for place in range(len(batches))
                ]
                hidden = [incoming.form.pack(incoming.wait()) for incoming in received]
            hidden = run(stage, hidden)
            if number + 1 < len(ranks) and ranks[number + 1] != own_rank:
                for place, state in enumerate(hidden):
                    self._p2p.send_hidden(state, ranks[number + 1], (self._keys, number + 1, place))
        self._p2p.finish()
        return hidden

    def _run_all(self, batches: Sequence[Batch], stage: Stage | None, hidden: Sequence[Any]) -> list[Any]:
        return [self._run(stage, state, batch) for state, batch in zip(hidden, batches, strict=True)]

    def _run(self, stage: Stage | None, hidden: Any, batch: Batch) -> Any:
        inputs = inputs_of(self.model, batch)
        if stage is None:
            return self.model(**inputs)
        assert is_pipelined(self.model)
        return self.model.run_stage(stage, hidden, **inputs)  # type: ignore[operator]

    def _layers(self, stage: Stage | None, hidden: list[Any], batches: Sequence[Batch], visit: Visit) -> list[Any]:
        def compute_all() -> None:
            for state, batch in zip(hidden, batches, strict=True):
                self._run(stage, state, batch)

        layers = _layers_of(self.model, stage)
        # Of the last stage nobody needs the outputs, which are logits of a whole vocabulary.
        is_last, calls, outputs = stage is None or stage.last, [], []
        for state, batch in zip(hidden, batches, strict=True):
            with _recorded_calls(layers) as recorded:
                output = self._run(stage, state, batch)
            outputs.append(None if is_last else output)
            calls.append(recorded)
        everything = set(self.model.modules())
        if not all(_is_chain(recorded, layers) for recorded in calls):
            # All inputs are those of the model as it was.
            visit(everything, compute_all)
            return outputs if is_last else self._run_all(batches, stage, hidden)
        visit(everything.difference(*(layer.modules() for layer in layers)), compute_all)
        states = [recorded[0].first for recorded in calls]
        for number, layer in enumerate(layers):
            visit(set(layer.modules()), partial(_compute, states, calls, number))
            states = [recorded[number].repeat(state) for state, recorded in zip(states, calls, strict=True)]
        return outputs if is_last else states


def _compute(states: list[Tensor], calls: list[list[_Call]], number: int) -> None:
    for state, recorded in zip(states, calls, strict=True):
        recorded[number].repeat(state)


def _ranks(stages: Stages, ctx: ParallelContext) -> tuple[int, ...]:
    return ranks_of_stages(len(stages.all), ctx.pp.size, stages.schedule.placement)


# -- calls of layers ------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Call:
    """A layer's call: its first input, by which layers are chained, the others, and its output while it is needed."""

    layer: nn.Module
    first: Any
    others: tuple[Any, ...]
    keywords: dict[str, Any]
    output: Any = None

    def repeat(self, state: Tensor) -> Tensor:
        result: Tensor = self.layer(state, *self.others, **self.keywords)
        return result


def _layers_of(model: nn.Module, stage: Stage | None) -> list[nn.Module]:
    stacks = [module for module in model.modules() if isinstance(module, NumberedLayers)]
    numbers = None if stage is None else set(stage.layers)
    return [
        layer
        for stack in stacks
        for number, layer in zip(stack.numbers(), stack, strict=True)
        if numbers is None or number in numbers
    ]


@contextmanager
def _recorded_calls(layers: Sequence[nn.Module]) -> Iterator[list[_Call]]:
    calls: list[_Call] = []

    def before(layer: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        first, others = (inputs[0], inputs[1:]) if inputs else (None, ())
        calls.append(_Call(layer, first, others, keywords))

    def after(layer: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        calls[-1].output = output

    hooks = [layer.register_forward_pre_hook(before, with_kwargs=True) for layer in layers]
    hooks += [layer.register_forward_hook(after) for layer in layers]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def _is_chain(calls: list[_Call], layers: Sequence[nn.Module]) -> bool:
    """Whether each layer was called once, in order, with the output of the one before. Outputs are dropped."""
    in_order = [call.layer for call in calls] == list(layers)
    chained = all(after.first is before.output for before, after in pairwise(calls))
    tensors = all(isinstance(call.first, Tensor) and isinstance(call.output, Tensor) for call in calls)
    for number, call in enumerate(calls):
        call.output = None
        if number:
            call.first = None
    return bool(calls) and in_order and chained and tensors
