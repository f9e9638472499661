"""Gradient buckets of a real model: their parameters, their shards, and when the backward pass fills them."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from scripts.figures.registry import figure
from scripts.figures.svg import Canvas

from mt_core.config.loading import load_config
from mt_core.nn.layout import parameter_layouts
from mt_core.nn.main_grad import call_after_gradient
from mt_core.optim.buckets import Bucket
from mt_core.optim.param_and_grad_buffer import BufferOptions, build_buckets
from mt_core.parallel.context import Axis, ParallelContext
from mt_core.plugins import load_plugins
from mt_core.train.build import build_model

LIMIT = 220_000


@cache
def bucketed() -> tuple[torch.nn.Module, list[Bucket]]:
    """gpt-tiny, and its buckets for four data-parallel ranks with sharded optimizer state."""
    config = load_config(preset="gpt-tiny", overrides=["train.train_iters=1", "model.vocab_size=261"]).config
    model = build_model(config, ParallelContext(), load_plugins())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.01)
    axis = Axis(4, 1, None, (0, 1, 2, 3))
    ctx = ParallelContext(axes={"shard": axis})
    return model, list(build_buckets(model, parameter_layouts(model), ctx, BufferOptions(True, LIMIT), ()))


def short(name: str) -> str:
    parts = name.removeprefix("decoder.").split(".")
    return ".".join(part for part in parts if part not in ("layers", "self_attention", "mlp"))


@figure("buckets-parameters")
def parameters() -> Canvas:
    _, buckets = bucketed()
    canvas = Canvas(
        860, 40 + 62 * len(buckets), "Parameters of gpt-tiny in its gradient buckets, in the order of the buffer"
    )
    canvas.text(
        12, 20, f"gpt-tiny, buckets of at least {LIMIT:,} elements: the last parameters come first", style="big"
    )
    widest = max(bucket.size for bucket in buckets)
    for number, bucket in enumerate(buckets):
        y = 34 + 62 * number
        canvas.text(12, y + 20, f"bucket {number}")
        for slot in bucket.slots:
            x, width = 80 + slot.start * 760 / widest, (slot.stop - slot.start) * 760 / widest
            fill = f"c{layer_of(slot.name)}"
            canvas.rect(
                x, y, max(width, 0.6), 30, fill, stroke="rule", title=f"{slot.name}: {slot.stop - slot.start:,}"
            )
            if width > 6.4 * len(short(slot.name)):
                canvas.text(x + 3, y + 19, short(slot.name), style="small")
        canvas.text(80, y + 44, f"{bucket.size:,} elements, {len(bucket.slots)} parameters", style="small muted")
    return canvas


def layer_of(name: str) -> int:
    """A colour for each layer; the embedding and the final norm share one."""
    return int(name.split(".")[2]) if name.startswith("decoder.layers.") else 5


@figure("buckets-shards")
def shards() -> Canvas:
    """The first bucket cut into the shards of four ranks."""
    _, buckets = bucketed()
    bucket = buckets[0]
    canvas = Canvas(860, 150, "Shards of a bucket over four ranks: a shard begins and ends anywhere in a parameter")
    canvas.text(
        12, 20, "bucket 0 with the distributed optimizer: equal shards, whatever parameters they cut", style="big"
    )
    scale, share = 836 / bucket.size, bucket.size // 4
    for slot in bucket.slots:
        x, width = 12 + slot.start * scale, (slot.stop - slot.start) * scale
        canvas.rect(x, 34, max(width, 0.6), 30, f"c{layer_of(slot.name)}", stroke="rule", title=slot.name)
        if width > 6.4 * len(short(slot.name)):
            canvas.text(x + 3, 53, short(slot.name), style="small")
    for rank in range(4):
        x = 12 + rank * share * scale
        canvas.rect(x, 76, share * scale, 30, f"c{rank}", stroke="edge")
        canvas.text(x + 6, 95, f"rank {rank} updates {share:,} elements", style="small")
    canvas.text(
        12,
        132,
        "reduce-scatter: each rank gets the sum of its shard; "
        "all-gather: each rank gets the updated weights of the others",
        style="muted small",
    )
    return canvas


@figure("buckets-order")
def order() -> Canvas:
    """When the gradient of each parameter is ready in the backward pass, and when a bucket is full."""
    model, buckets = bucketed()
    ready: list[tuple[int, str]] = []
    hooks = []
    for number, bucket in enumerate(buckets):
        for slot in bucket.slots:
            hooks.append(call_after_gradient(slot.parameter, lambda n=number, name=slot.name: ready.append((n, name))))
    tokens = torch.from_numpy(np.arange(32).reshape(1, 32) % 7)
    model(tokens).sum().backward()
    canvas = Canvas(
        860, 66 + 34 * len(buckets), "Order in which the backward pass of gpt-tiny completes gradients, by bucket"
    )
    canvas.text(
        12,
        20,
        "gradients in the order in which the backward pass completes them; a bar: the bucket is full",
        style="big",
    )
    step = 740 / len(ready)
    for number, bucket in enumerate(buckets):
        y = 32 + 34 * number
        canvas.text(12, y + 19, f"bucket {number}")
        places = [place for place, (owner, _) in enumerate(ready) if owner == number]
        for place in places:
            canvas.rect(90 + place * step, y, step - 1, 28, f"c{layer_of(ready[place][1])}", title=ready[place][1])
        full = 90 + (max(places) + 1) * step
        if len(places) == len(bucket.slots):
            canvas.rect(full, y - 1, 3, 30, "ink")
    canvas.text(90, 32 + 34 * len(buckets) + 18, "beginning of the backward pass", style="small muted")
    canvas.text(830, 32 + 34 * len(buckets) + 18, "end", anchor="end", style="small muted")
    return canvas
