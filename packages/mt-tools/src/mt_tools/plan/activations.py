"""One micro-batch through a stage on the meta device: activations saved for backward, messages and FLOPs."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from mt_core._torch_compat import UncompiledDispatchMode
from mt_core.parallel.pipeline.stage import Activations, ActivationsForm, form_of, tensors_of
from mt_tools.plan.fakes import PlannedKernels
from mt_tools.plan.ledger import Flow, Ledger
from mt_tools.plan.result_cache import tensors_in
from mt_tools.plan.routing import RoutedTokens

# -- bytes of living tensors on the meta device ------------------------------------------------------


class LiveMemory(UncompiledDispatchMode):
    """Counts the storages that are made on the meta device while it is active, each until it is freed.

    Numbers of experts, which have values in a plan, are on the CPU and left out: 8 bytes beside a row of a token.

    bytes: of those alive. peak: the most that were alive at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._makes_new: dict[Any, bool] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out_tensor = kwargs.get("out")
        # Products into given memory make nothing; torch 2.11 has some of them on no meta device.
        out = out_tensor if isinstance(out_tensor, Tensor) and out_tensor.is_meta else func(*args, **kwargs)
        if func not in self._makes_new:
            self._makes_new[func] = all(returned.alias_info is None for returned in func._schema.returns)
        if self._makes_new[func]:
            for tensor in tensors_in((out,)):
                if tensor.is_meta:
                    self._add(tensor.untyped_storage())
        return out

    def bytes_without(self, others: Collection[StorageWeakRef]) -> int:
        """Bytes of the living storages that are not among `others`."""
        alive = (reference() for reference in self._alive.values())
        return sum(each.nbytes() for each in alive if each is not None and StorageWeakRef(each) not in others)

    def reset_peak(self) -> None:
        self.peak = self.bytes

    def _add(self, storage: torch.UntypedStorage) -> None:
        address, size = storage._cdata, storage.nbytes()
        # An operation may return its argument, whatever its schema says.
        if address in self._alive:
            return

        def free(reference: object) -> None:
            del self._alive[address]
            self.bytes -= size

        # torch keeps the Python object of a storage for as long as the storage lives.
        self._alive[address] = weakref.ref(storage, free)
        self.bytes += size
        self.peak = max(self.peak, self.bytes)


def bytes_of(tensors: Collection[Tensor]) -> float:
    """Bytes of the elements of all tensors."""
    return float(sum(tensor.numel() * tensor.element_size() for tensor in tensors))


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
class TemporaryMemory:
    """Bytes that a stage holds at most while it runs, above what it keeps between forward and backward. gradients: of
    the weights, as far as autograd allocates them; they are there from the backward pass on."""

    forward: float = 0.0
    backward: float = 0.0
    gradients: float = 0.0

    def times(self, factor: float) -> TemporaryMemory:
        """For as many times the samples; gradients have the size of the weights."""
        without_gradients = self.backward - self.gradients
        return TemporaryMemory(self.forward * factor, self.gradients + without_gradients * factor, self.gradients)


def temporary_of_sequence(pieces: Sequence[tuple[float, TemporaryMemory]]) -> TemporaryMemory:
    """Temporary memory of pieces that run in sequence, forward and then backward.

    pieces: (bytes that the piece keeps, its temporary memory).
    """
    kept, all_kept = 0.0, sum(size for size, _ in pieces)
    behind = total = sum(temporary.gradients for _, temporary in pieces)
    forward = backward = 0.0
    for size, temporary in pieces:
        # Behind this piece nothing is kept yet in the forward pass, and nothing but gradients is left in the backward.
        kept, behind = kept + size, behind - temporary.gradients
        forward = max(forward, kept + temporary.forward - all_kept)
        backward = max(backward, kept + temporary.backward + behind - all_kept)
    return TemporaryMemory(forward, backward, total)


@dataclass(frozen=True)
class StageCost:
    """The cost of one micro-batch in one stage, on one rank. kept: bytes by part between forward and backward."""

    kept: Mapping[str, float] = field(default_factory=dict)
    temporary: TemporaryMemory = field(default_factory=TemporaryMemory)
    forward: Flow = field(default_factory=Flow)
    backward: Flow = field(default_factory=Flow)
    sent: float = 0.0
    """Bytes of the hidden states for the next stage; their gradients are as many."""

    @property
    def kept_bytes(self) -> float:
        return sum(self.kept.values())

    def plus(self, other: StageCost, factor: float) -> StageCost:
        """self + factor x other; temporary memory and what is sent to the next stage are unchanged."""
        parts = dict.fromkeys([*self.kept, *other.kept])
        return StageCost(
            {part: self.kept.get(part, 0) + factor * other.kept.get(part, 0) for part in parts},
            self.temporary,
            self.forward.plus(other.forward, factor),
            self.backward.plus(other.backward, factor),
            self.sent,
        )

    def added_to(self, other: StageCost) -> StageCost:
        """What this one adds to `other`, the cost of its first pieces."""
        gradients = self.temporary.gradients - other.temporary.gradients
        return replace(self.plus(other, -1), temporary=replace(self.temporary, gradients=gradients))

    def of_samples(self, factor: float) -> StageCost:
        """The cost of a micro-batch of `samples` times the samples."""
        return StageCost(
            {part: count * factor for part, count in self.kept.items()},
            self.temporary.times(factor),
            self.forward.with_bytes_times(factor),
            self.backward.with_bytes_times(factor),
            self.sent * factor,
        )


def sum_of(pieces: Iterable[StageCost]) -> StageCost:
    """Cost of the pieces of a stage, which run in sequence."""
    costs = list(pieces)
    total = StageCost()
    for piece in costs:
        total = total.plus(piece, 1)
    return replace(
        total,
        temporary=temporary_of_sequence([(piece.kept_bytes, piece.temporary) for piece in costs]),
        sent=costs[-1].sent,
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
        self.seen = {StorageWeakRef(parameter.untyped_storage()) for parameter in model.parameters()}
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

    def saving(self, *, on_host: bool = False) -> saved_tensors_hooks:
        """on_host: tensors are copied to host memory, and back for each use (recompute.cpu_offloading_num_layers)."""
        return saved_tensors_hooks(_to_host, _from_host) if on_host else saved_tensors_hooks(self._keep, _itself)

    def _keep(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        reference = StorageWeakRef(storage)
        # Several operations save the same tensor; its memory is held once.
        if reference not in self.seen:
            self.seen.add(reference)
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


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _to_host(tensor: Tensor) -> tuple[torch.Size, torch.dtype] | Tensor:
    # Numbers of experts have values, which are needed.
    return (tensor.shape, tensor.dtype) if tensor.is_meta else tensor


def _from_host(packed: tuple[torch.Size, torch.dtype] | Tensor) -> Tensor:
    return packed if isinstance(packed, Tensor) else torch.empty(packed[0], dtype=packed[1], device="meta")


class _Rest(torch.autograd.Function):
    """What follows a stage. It holds nothing of the stage's outputs, and makes their gradients in its backward pass."""

    @staticmethod
    def forward(ctx: Any, *outputs: Tensor) -> Tensor:
        ctx.forms = [(output.shape, output.dtype) for output in outputs]
        return outputs[0].new_empty(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in ctx.forms)


def measure(
    model: nn.Module,
    run: Callable[[], Activations],
    kernels: PlannedKernels,
    routed: RoutedTokens,
    *,
    with_backward: bool = True,
    on_host: bool = False,
) -> tuple[StageCost, ActivationsForm]:
    """run() returns the output of a stage, or its loss. routed: the assignment of tokens to experts, for MoE models.
    with_backward: run the backward pass too, which takes about as long; its cost is otherwise 0. on_host: what is saved
    for it is offloaded.

    Returns the cost, and the form of the output.
    """
    ledger, live = kernels.ledger, LiveMemory()
    ledger.take()  # what building the model recorded
    kept = KeptStorages(model, kernels)
    without_gradient = [parameter for parameter in model.parameters() if parameter.grad is None]
    with kept.following_modules(), routed, live:
        # The hooks end before the backward pass: tensors that a recomputed layer saves again are not kept.
        with kept.saving(on_host=on_host), kernels.entered():
            output: Activations = run()
        forward, form = ledger.take(), form_of(output)
        outputs = [tensor for tensor in tensors_of(output) if tensor.requires_grad]
        is_loss = isinstance(output, Tensor) and output.dim() == 0
        sent = 0.0 if is_loss else bytes_of(outputs)
        rest = _Rest.apply(*outputs) if outputs else None
        # From here on the autograd graph holds what it needs, and nothing else does.
        del output, outputs
        held, peak = live.bytes, live.peak
        if is_loss:
            # Gradients that it has made in the forward pass, which autograd did not save.
            kept.bytes[OUTPUT] += live.bytes_without(kept.seen)
        live.reset_peak()
        backward = _backward(rest, forward, ledger) if with_backward and rest is not None else Flow()
    gradients = bytes_of([parameter.grad for parameter in without_gradient if parameter.grad is not None])
    temporary = TemporaryMemory(max(peak - held, 0), max(live.peak - held, 0), gradients)
    return StageCost(dict(kept.bytes), temporary, forward, backward, sent), form


def _backward(rest: Tensor, forward: Flow, ledger: Ledger) -> Flow:
    # Run for its messages, its memory and recomputation. Products of the backward pass itself are outside of the mode.
    rest.backward()
    again = ledger.take()
    # Two products, dx and dW, for each of the forward pass; `again` has the products of recomputed layers.
    return Flow(2 * forward.flops + again.flops, again.bytes, again.calls)


class _Before(torch.autograd.Function):
    """What precedes a stage. It makes hidden states, which nothing but their users hold, and drops their gradients."""

    @staticmethod
    def forward(ctx: Any, differentiable: Tensor, form: ActivationsForm) -> tuple[Tensor, ...]:
        tensors = [
            torch.empty(tensor_form.shape, dtype=tensor_form.dtype, device="meta") for tensor_form in form.tensors
        ]
        pairs = zip(tensors, form.tensors, strict=True)
        ctx.mark_non_differentiable(*(tensor for tensor, tensor_form in pairs if not tensor_form.has_gradient))
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        return None, None


def empty_hidden(form: ActivationsForm) -> Activations:
    """Hidden states of the given form, on the meta device, as a stage receives them."""
    return form.pack(list(_Before.apply(torch.empty((), device="meta", requires_grad=True), form)))
