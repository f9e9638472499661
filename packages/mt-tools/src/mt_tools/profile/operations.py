"""The operations of a trace by layer, kind and direction: seconds, FLOPs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

MODULE = "module: "
BACKWARD = "autograd::engine::evaluate_function: "
KINDS = (
    ("embedding", ("embedding",)),
    ("output layer", ("output_layer", "lm_head")),
    ("mixture of experts", ("experts", "router", "moe")),
    ("attention", ("self_attention", "cross_attention", "attention")),
    ("state space", ("mixer", "mamba")),
    ("feed-forward", ("mlp", "feed_forward")),
    ("norm", ("layernorm", "norm")),
)
"""Kind -> parts of names of modules, the first that fits."""
ATTENTION_PRODUCTS = ("_scaled_dot_product", "_flash_attention", "_efficient_attention")
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "linear", "conv1d", "conv2d", *ATTENTION_PRODUCTS)


@dataclass(frozen=True)
class Operation:
    """Operations of one kind in one layer and direction, over all recorded steps, per step. seconds: of the device that
    computes; product_seconds: of these, in matrix products and attention."""

    layer: str
    kind: str
    direction: str
    seconds: float
    product_seconds: float
    flops: float


def summarize(events: Iterable[Any], steps: int, device: str) -> list[dict[str, Any]]:
    """events: of torch.profiler (FunctionEvent). Entries as `Operation`, in the order of the time they take."""
    listed = list(events)
    modules = _modules_of_sequences(listed)
    totals: dict[tuple[str, str, str], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for event in listed:
        seconds = _own_seconds(event, device)
        flops = _flops(event)
        if seconds <= 0.0 and not flops:
            continue
        module, direction = _place(event, modules)
        entry = totals[_layer(module), _kind(module, event.name), direction]
        entry[0] += seconds
        entry[1] += seconds if _is_product(event) else 0.0
        entry[2] += flops
    operations = [
        Operation(layer, kind, direction, *(value / steps for value in values))
        for (layer, kind, direction), values in totals.items()
    ]
    return [vars(operation) for operation in sorted(operations, key=lambda operation: -operation.seconds)]


def _own_seconds(event: Any, device: str) -> float:
    """Without the operations that it calls. On a GPU the time of its kernels."""
    if device == "cuda":
        return float(event.self_device_time_total) / 1e6
    # Ranges of modules are no work of their own: what is between operations belongs to the host.
    return float(event.self_cpu_time_total) / 1e6


def _modules_of_sequences(events: list[Any]) -> Mapping[int, str]:
    """Number of an operation in autograd's order -> the module whose forward pass it is in."""
    modules: dict[int, str] = {}
    for event in events:
        if event.sequence_nr >= 0 and not _backward_parent(event):
            module = _enclosing_module(event)
            if module:
                modules.setdefault(event.sequence_nr, module)
    return modules


def _place(event: Any, modules: Mapping[int, str]) -> tuple[str, str]:
    backward = _backward_parent(event)
    module = _enclosing_module(event)
    if backward is None:
        return module, "forward" if module else "other"
    if module:
        return module, "recomputed"
    return modules.get(backward.sequence_nr, ""), "backward"


def _enclosing_module(event: Any) -> str:
    while event is not None:
        if event.name.startswith(MODULE):
            return str(event.name.removeprefix(MODULE))
        event = event.cpu_parent
    return ""


def _backward_parent(event: Any) -> Any:
    while event is not None:
        if event.name.startswith(BACKWARD):
            return event
        event = event.cpu_parent
    return None


def _layer(module: str) -> str:
    parts = module.split(".")
    if "layers" not in parts:
        return ""
    place = parts.index("layers")
    return ".".join(parts[: place + 2])


def _kind(module: str, operation: str) -> str:
    if not module:
        name = operation.lower()
        if "optimizer" in name or "adam" in name or "foreach" in name:
            return "optimizer"
        if "gloo" in name or "nccl" in name or "c10d" in name:
            return "communication"
        return "loss and others"
    last = module.split(".")[-1]
    return next((kind for kind, words in KINDS if any(word in last for word in words)), "other parts of layers")


def _is_product(event: Any) -> bool:
    name = event.name.removeprefix("aten::")
    return name in PRODUCTS or any(word in name for word in ATTENTION_PRODUCTS)


def _flops(event: Any) -> float:
    if event.flops:
        return float(event.flops)
    name = event.name
    if not any(word in name for word in ATTENTION_PRODUCTS) or not event.input_shapes or "::" not in name:
        return 0.0
    # Only the innermost operation has the kernel; the outer ones call it.
    if any(any(word in child.name for word in ATTENTION_PRODUCTS) for child in event.cpu_children):
        return 0.0
    shapes = [shape for shape in event.input_shapes if len(shape) == 4]
    backward = "backward" in name
    if len(shapes) < 2:
        return 0.0
    query, key = (shapes[1], shapes[2]) if backward and len(shapes) > 2 else (shapes[0], shapes[1])
    # Two products forward, five backward; all S x S scores, of which causality needs about half.
    return (5.0 if backward else 2.0) * 2.0 * query[0] * query[1] * query[2] * key[2] * query[3]
