"""Order of the all-gathers of updated weights, overlapped with the next forward pass: launched in the order of use.

    parameters     before the layers | layer 0 | layer 1 | ... | after the layers
    launched       first ------------------------------------------------> last
    waited for     before the pass   | when the layer is called | when their module is called, or after the last layer

A communicator runs its collectives in launch order, so waiting for a bucket also waits for all buckets launched
before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import nn

from mt_core.nn.numbered_layers import NumberedLayers
from mt_core.optim.buckets import Bucket


class GatherOrder:
    """Hooks on the modules of a model that wait for the buckets of their weights."""

    def __init__(self, model: nn.Module, buckets: Sequence[Bucket]) -> None:
        # Models register modules in the order of use, so the order of parameters stands for it.
        places = {id(parameter): place for place, parameter in enumerate(model.parameters())}
        self.in_order_of_use = sorted(buckets, key=lambda bucket: min(places[id(s.parameter)] for s in bucket.slots))
        self._bucket_of = {id(slot.parameter): bucket for bucket in buckets for slot in bucket.slots}
        # A stack may be empty on a pipeline stage without layers.
        stacks = [module for module in model.modules() if isinstance(module, NumberedLayers) and [*module.parameters()]]
        inside = {id(parameter) for stack in stacks for parameter in stack.parameters()}
        outside = [id(parameter) for parameter in model.parameters() if id(parameter) not in inside]
        for layer in (layer for stack in stacks for layer in stack):
            layer.register_forward_pre_hook(_waiting(self._buckets(map(id, layer.parameters()))))
        self._wait_in_modules(model, set(outside))
        self.first = self._wait_after_stacks(stacks, outside, places)

    def finish_first(self) -> None:
        """Wait for the weights that are used before any layer."""
        for bucket in self.first:
            bucket.finish_gather()

    def _wait_in_modules(self, model: nn.Module, outside: set[int]) -> None:
        """Modules outside of layers wait for their own weights when they are called."""
        for module in model.modules():
            own = [id(parameter) for parameter in module.parameters(recurse=False)]
            if buckets := self._buckets(i for i in own if i in outside):
                module.register_forward_pre_hook(_waiting(buckets))

    def _wait_after_stacks(
        self, stacks: Sequence[NumberedLayers], outside: Sequence[int], places: Mapping[int, int]
    ) -> list[Bucket]:
        """Weights may be used without a call of their module (the LM head, by a loss on hidden states): wait for them
        after the last layer before them. Returns the buckets of those that no layer precedes."""
        after: dict[int | None, list[int]] = {}
        starts = [min(places[id(parameter)] for parameter in stack.parameters()) for stack in stacks]
        for parameter in outside:
            # Numbers of the stacks that start before this parameter; an encoder-decoder model has several.
            before = [number for number, start in enumerate(starts) if start < places[parameter]]
            after.setdefault(before[-1] if before else None, []).append(parameter)
        for number, parameters in after.items():
            if number is not None:
                # A hook after the last layer: the wait then overlaps with the computation of all layers.
                last = list(stacks[number])[-1]
                last.register_forward_hook(_waiting(self._buckets(parameters)))
        return self._buckets(after.get(None, []))

    def _buckets(self, parameters: Iterable[int]) -> list[Bucket]:
        found = [self._bucket_of[i] for i in parameters if i in self._bucket_of]
        # A bucket holds several parameters of a module. Order is kept, so that waits follow the launches.
        return list({id(bucket): bucket for bucket in found}.values())


def _waiting(buckets: Sequence[Bucket]) -> Callable[..., None]:
    # Takes the arguments of forward pre-hooks and of forward hooks alike. finish_gather() does nothing the second time.
    def wait(*called: object) -> None:
        for bucket in buckets:
            bucket.finish_gather()

    return wait
