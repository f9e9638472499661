"""One micro-batch through a stage on the meta device: activations saved for backward, messages and FLOPs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from mt_core.parallel.pipeline.activations import Activations, ActivationsForm, form_of, tensors_of
from mt_tools.plan.fakes import PlannedKernels
from mt_tools.plan.ledger import Flow, Ledger
from mt_tools.plan.routing import RoutedTokens

PARTS: Mapping[str, str] = {
    "norm": "norms",
    "attention": "attention",
    "mixer": "mixer",
    "router": "router",
    "shared_experts": "shared_experts",
    "experts": "experts",
    "mlp": "feed_forward",
    "embedding": "embeddings",
}
"""Substring of a module's name -> the part of the model that it belongs to."""
PERMUTED = ".experts.linear_fc1", "permuted_tokens"
"""The first matrix of the experts saves its input: rows in the order of experts, or as other ranks sent them where the
product permutes them."""
REST_OF_LAYERS = "residual"
OUTPUT = "logits_and_loss"


@dataclass(frozen=True)
class StageCost:
    """The cost of one micro-batch in one stage, on one rank. kept: bytes by part between forward and backward."""

    kept: Mapping[str, float] = field(default_factory=dict)
    forward: Flow = field(default_factory=Flow)
    backward: Flow = field(default_factory=Flow)
    sent: float = 0.0
    """Bytes of the hidden states for the next stage; their gradients are as many."""

    @property
    def kept_bytes(self) -> float:
        return sum(self.kept.values())

    def plus(self, other: StageCost, factor: float) -> StageCost:
        """self + factor x other, except what is sent to the next stage, which is unchanged."""
        parts = dict.fromkeys([*self.kept, *other.kept])
        return StageCost(
            {part: self.kept.get(part, 0) + factor * other.kept.get(part, 0) for part in parts},
            self.forward.plus(other.forward, factor),
            self.backward.plus(other.backward, factor),
            self.sent,
        )

    def of_samples(self, factor: float) -> StageCost:
        """The cost of a micro-batch of `samples` times the samples."""
        return StageCost(
            {part: count * factor for part, count in self.kept.items()},
            self.forward.with_bytes_times(factor),
            self.backward.with_bytes_times(factor),
            self.sent * factor,
        )


def part_of(path: str) -> str:
    """ "decoder.layers.3.mlp.linear_fc1" -> "feed_forward"."""
    # Before the marks: its name has "experts" in it, but what it saves was received from other ranks.
    end, permuted = PERMUTED
    if path.endswith(end):
        return permuted
    # The innermost module that has a mark.
    for name in reversed(path.split(".")):
        for mark, part in PARTS.items():
            if mark in name:
                return part
    return REST_OF_LAYERS if ".layers." in f".{path}." else OUTPUT


class KeptStorages:
    """Bytes of the storages that autograd saves, each counted once, under the part that saved it first.

    Parameters are not activations: their storages are not counted.
    """

    def __init__(self, model: nn.Module, kernels: PlannedKernels) -> None:
        self.model, self.kernels = model, kernels
        self.bytes: Counter[str] = Counter()
        # By storage: views of a parameter are not counted either.
        self._seen = {StorageWeakRef(parameter.untyped_storage()) for parameter in model.parameters()}
        self._paths = [""]
        self._computing = ExitStack()

    @contextmanager
    def following_modules(self) -> Iterator[None]:
        handles = [
            handle
            for path, module in self.model.named_modules()
            for handle in (
                module.register_forward_pre_hook(self._entering(path)),
                module.register_forward_hook(self._leaving, always_call=True),
            )
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def saving(self) -> saved_tensors_hooks:
        return saved_tensors_hooks(self._keep, lambda tensor: tensor)

    def _keep(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        reference = StorageWeakRef(storage)
        # Several operations save the same tensor; its memory is held once.
        if reference not in self._seen:
            self._seen.add(reference)
            self.bytes[part_of(self._paths[-1])] += storage.nbytes()
        # If the result is saved by the function that made it, a reference to the result would be a reference cycle.
        return tensor.detach()

    def _entering(self, path: str) -> Callable[[nn.Module, object], None]:
        def enter(module: nn.Module, inputs: object) -> None:
            self._paths.append(path)
            # In the forward pass the mode is entered already, and this does nothing.
            if len(self._paths) == 2:  # in the backward pass, to recompute
                self._computing.enter_context(self.kernels.entered())

        return enter

    def _leaving(self, module: nn.Module, inputs: object, output: object) -> None:
        self._paths.pop()
        if len(self._paths) == 1:  # the outermost module: [""] is left
            self._computing.close()


def measure(
    model: nn.Module,
    run: Callable[[], Activations],
    kernels: PlannedKernels,
    routed: RoutedTokens,
    *,
    with_backward: bool = True,
) -> tuple[StageCost, ActivationsForm]:
    """run() returns the output of a stage, or its loss. routed: the assignment of tokens to experts, for MoE models.
    with_backward: run the backward pass too, which takes about as long; its cost is otherwise 0.

    Returns the cost, and the form of the output.
    """
    ledger = kernels.ledger
    ledger.take()  # what building the model recorded
    kept = KeptStorages(model, kernels)
    with kept.following_modules(), routed:
        # The hooks end before the backward pass: tensors that a recomputed layer saves again are held for that layer
        # alone (`Planner.recomputed`).
        with kept.saving(), kernels.entered():
            output: Activations = run()
        forward = ledger.take()
        outputs = [tensor for tensor in tensors_of(output) if tensor.requires_grad]
        backward = _backward(outputs, forward, ledger) if with_backward else Flow()
    return StageCost(dict(kept.bytes), forward, backward, _bytes_of(outputs)), form_of(output)


def _backward(outputs: Sequence[Tensor], forward: Flow, ledger: Ledger) -> Flow:
    # Run for its messages and for recomputation. Products of the backward pass itself are outside of the mode.
    torch.autograd.backward(outputs, [torch.empty_like(tensor) for tensor in outputs])
    again = ledger.take()
    # Two products, dx and dW, for each of the forward pass; `again` has the products of recomputed layers.
    return Flow(2 * forward.flops + again.flops, again.bytes, again.calls)


def empty_hidden(form: ActivationsForm) -> Activations:
    """Hidden states of the given form, on the meta device, as a stage receives them."""
    tensors = [torch.empty(own.shape, dtype=own.dtype, device="meta") for own in form.tensors]
    for tensor, own in zip(tensors, form.tensors, strict=True):
        tensor.requires_grad_(own.has_gradient)
    return form.pack(tensors)


def bytes_of_form(form: ActivationsForm) -> float:
    """Of the hidden states that have gradients."""
    return float(sum(math.prod(own.shape) * own.dtype.itemsize for own in form.tensors if own.has_gradient))


def _bytes_of(tensors: Sequence[Tensor]) -> float:
    return float(sum(tensor.numel() * tensor.element_size() for tensor in tensors))
