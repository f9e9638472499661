"""Exactness: rounding, orders of sums, layouts and resumed runs."""

from __future__ import annotations

import numpy as np
import torch
from scripts.figures.axes import Axes
from scripts.figures.registry import figure, recorded
from scripts.figures.svg import Canvas


def sums_of_orders(count: int = 400) -> np.ndarray:
    """fp32 sums of the same 4096 numbers in shuffled orders, less the exact sum, in units of the last place."""
    random = np.random.Generator(np.random.PCG64(7))
    numbers = random.normal(size=4096).astype(np.float32)
    exact = float(np.sum(numbers, dtype=np.float64))
    found = []
    for _ in range(count):
        # cumsum adds one after another; sum would add in a tree.
        found.append(float(np.cumsum(numbers[random.permutation(len(numbers))])[-1]))
    return (np.array(found) - exact) / float(np.spacing(np.float32(exact)))


@figure("exact-order-of-sums")
def order_of_sums() -> Canvas:
    offsets = sums_of_orders()
    canvas = Canvas(660, 290, "fp32 sums of the same 4096 numbers in 400 orders: distance from the exact sum")
    edge = float(np.ceil(np.abs(offsets).max() / 10) * 10)
    bins, edges = np.histogram(offsets, bins=25, range=(-edge, edge))
    axes = Axes(canvas, (-edge, edge), (0, float(bins.max()) * 1.1))
    axes.frame(
        "distance from the exact sum, in units of the last place",
        "orders",
        "4096 fp32 numbers added one after another in 400 orders",
    )
    for count, left, right in zip(bins, edges, edges[1:], strict=False):
        axes.bar((left + right) / 2, 0, float(count), (right - left) * 0.92, "c0")
    return canvas


@figure("exact-slices")
def exact_slices() -> Canvas:
    """Adding ranks' sums one after another depends on their number; a fixed tree over slices does not."""
    random = np.random.Generator(np.random.PCG64(11))
    numbers = random.normal(size=(8, 512)).astype(np.float32)
    slices = [np.float32(np.cumsum(row)[-1]) for row in numbers]

    def by_ranks(ranks: int) -> float:
        each = 8 // ranks
        parts = [np.cumsum(numbers[r * each : (r + 1) * each].reshape(-1))[-1] for r in range(ranks)]
        return float(np.cumsum(np.array(parts, np.float32))[-1])

    def by_tree(values: list[np.float32]) -> float:
        while len(values) > 1:
            values = [np.float32(a + b) for a, b in zip(values[::2], values[1::2], strict=True)]
        return float(values[0])

    canvas = Canvas(
        760, 236, "Sums of the same numbers over 1 to 8 ranks: one after another, and in a fixed tree over slices"
    )
    canvas.text(12, 22, "4096 numbers in 8 slices: the sum over 1, 2, 4 and 8 ranks, last digits", style="big")
    tree = by_tree(slices)
    for row, ranks in enumerate((1, 2, 4, 8)):
        y = 54 + 44 * row
        canvas.text(12, y + 20, f"{ranks} rank{'s' if ranks > 1 else ''}")
        for number in range(8):
            canvas.rect(90 + number * 34, y, 33, 28, f"c{number * ranks // 8}", stroke="rule")
        canvas.text(386, y + 19, f"{by_ranks(ranks):.9g}", style="mono")
        canvas.text(560, y + 19, f"{tree:.9g}", style="mono")
    canvas.text(386, 46, "each rank, then ranks", style="muted small")
    canvas.text(560, 46, "slices, then a fixed tree", style="muted small")
    return canvas


@figure("exact-formats")
def formats() -> Canvas:
    """Positive values of the 8-bit formats, and the spacing of the others."""
    canvas = Canvas(860, 190, "Values of the two 8-bit formats between 0.25 and 16, and of bf16 in the same range")
    dtypes = (("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2), ("bf16", torch.bfloat16))
    canvas.text(12, 20, "values between 1/4 and 16, on a logarithmic scale", style="big")
    for row, (name, dtype) in enumerate(dtypes):
        y = 44 + 40 * row
        canvas.text(12, y + 16, name)
        width = 1 if "float8" in str(dtype) else 2
        whole = torch.arange(2 ** (8 * width), dtype=torch.int32)
        bits = whole.to(torch.uint8) if width == 1 else whole.to(torch.int16)
        values = bits.view(dtype).float()
        inside = sorted({float(value) for value in values if 0.25 <= float(value) <= 16})
        for value in inside:
            x = 70 + 770 * np.log2(value / 0.25) / 6
            canvas.line(x, y, x, y + 22, f"s{row}", 1)
        canvas.text(
            70,
            y + 34,
            f"{len(inside)} values; largest {torch.finfo(dtype).max:,.4g}, smallest above 0 "
            f"{torch.finfo(dtype).smallest_normal / (8 if name == 'e4m3' else 4 if name == 'e5m2' else 128):.2g}",
            style="small muted",
        )
    for power in range(-2, 5):
        canvas.text(70 + 770 * (power + 2) / 6, 182, f"{2.0**power:g}", anchor="middle", style="muted small")
    return canvas


@figure("exact-layouts")
def layouts() -> Canvas:
    """Loss of four layouts less that of one process."""
    runs = recorded("layouts")
    one = runs["one process"]["loss"]
    canvas = Canvas(700, 320, "Relative difference between the loss of four layouts and that of one process, fp32")
    axes = Axes(canvas, (1, 8), (1e-9, 1e-4), log=True, left=76)
    axes.frame("step", "relative difference of the loss", "gpt-tiny in fp32; a point at the bottom: the same bits")
    others = [name for name in runs if name != "one process"]
    for colour, name in enumerate(others):
        points = [
            (step, max(abs(loss - one[n]) / one[n], 1e-9))
            for n, (step, loss) in enumerate(zip(runs[name]["iteration"], runs[name]["loss"], strict=True))
        ]
        axes.curve(points, colour)
        axes.points(points, colour)
    axes.legend(others)
    return canvas


@figure("exact-resume")
def resume() -> Canvas:
    """A run, and the same run stopped and started again."""
    runs = recorded("resume")
    canvas = Canvas(700, 300, "Loss of a run, and of the same run stopped after step 12 and resumed in a new process")
    whole, parts = runs["whole"], runs["parts"]
    difference = max(abs(a - b) for a, b in zip(whole["loss"], parts["loss"], strict=True))
    axes = Axes(canvas, (1, 24), (min(whole["loss"]) * 0.95, max(whole["loss"]) * 1.03))
    axes.frame("step", "loss", f"largest difference over 24 steps: {difference:g}")
    axes.curve(list(zip(whole["iteration"], whole["loss"], strict=True)), 0, 5)
    axes.curve(list(zip(parts["iteration"], parts["loss"], strict=True)), 1, 1.8)
    x, _ = axes.at(12.5, axes.y[0])
    canvas.line(x, axes.top, x, axes.top + axes.height, "edge dash")  # type: ignore[operator]
    canvas.text(x + 6, axes.top + 14, "stopped, new process", style="muted")
    axes.legend(["24 steps", "12 steps, then 12"], y=80)
    return canvas
