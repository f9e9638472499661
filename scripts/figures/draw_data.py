"""Data: documents, samples, blends, and which rank reads which samples."""

from __future__ import annotations

import numpy as np
from scripts.figures.axes import Axes
from scripts.figures.registry import figure
from scripts.figures.svg import Canvas

from mt_core.data.loader import micro_batch_samples
from mt_core.data.training_length import BatchSizeSchedule
from mt_data.datasets.blend import build_blend_index
from mt_data.datasets.gpt_index import GPTIndexPlan, build_gpt_index

LENGTHS = np.array([9, 4, 13, 6, 11, 7], dtype=np.int32)
SEQUENCE = 8


@figure("data-samples")
def samples() -> Canvas:
    """Documents, their shuffled stream, and the samples that are cut out of it."""
    plan = GPTIndexPlan(int(LENGTHS.sum()), SEQUENCE, None, seed=1234)
    index = build_gpt_index(range(len(LENGTHS)), LENGTHS, plan)
    canvas = Canvas(860, 236, "Six documents, the stream of an epoch, and the samples of eight tokens cut out of it")
    scale = 16.0
    canvas.text(12, 20, "documents", style="big")
    x = 12.0
    for document, length in enumerate(LENGTHS):
        canvas.cell(
            x,
            28,
            length * scale,
            24,
            f"{document}: {length} tokens" if length > 5 else str(document),
            f"c{document}",
            style="small",
        )
        x += length * scale + 3
    canvas.text(12, 84, "document_index: the order of the epoch", style="big")
    x = 12.0
    for document in index.document_index:
        canvas.cell(x, 92, LENGTHS[document] * scale, 24, str(document), f"c{document}", style="small")
        x += LENGTHS[document] * scale
    canvas.text(
        12, 148, "sample_index: windows of 8 tokens and the next one; shuffle_index: the order of training", style="big"
    )
    order = {int(row): place for place, row in enumerate(index.shuffle_index)}
    ends = np.concatenate([[0], np.cumsum(LENGTHS[index.document_index])])
    for sample in range(len(index.sample_index) - 1):
        (position, offset), row = index.sample_index[sample], sample
        start = ends[position] + offset
        y = 158 + 28 * (sample % 2)
        canvas.cell(
            12 + start * scale,
            y,
            (SEQUENCE + 1) * scale - 1,
            24,
            f"sample {row}, turn {order[row]}",
            "grey",
            style="small",
        )
    canvas.text(
        12,
        230,
        "Neighbouring samples share one token: the last label of one is the first input of the next.",
        style="muted small",
    )
    return canvas


WEIGHTS = (0.6, 0.3, 0.1)


@figure("data-blend")
def blend() -> Canvas:
    """The first draws of a blend of three data sets."""
    index = build_blend_index(WEIGHTS, 60)
    canvas = Canvas(860, 130, "The first 60 draws of a blend with weights 0.6, 0.3 and 0.1")
    canvas.text(12, 20, "weights 0.6, 0.3, 0.1: the data set of each draw, and which of its samples", style="big")
    for place, (dataset, sample) in enumerate(zip(index.dataset_index, index.dataset_sample_index, strict=True)):
        x, y = 12 + (place % 30) * 28, 34 + (place // 30) * 40
        canvas.cell(x, y, 26, 30, str(sample), f"c{dataset}", style="small")
    canvas.legend(12, 124, [(f"c{number}", f"data set {number}") for number in range(3)])
    return canvas


@figure("data-blend-shares")
def blend_shares() -> Canvas:
    """Share of each data set among the first draws."""
    count = 200
    index = build_blend_index(WEIGHTS, count)
    canvas = Canvas(660, 300, "Share of each data set among the first draws of the blend")
    axes = Axes(canvas, (1, count), (0, 1))
    axes.frame("draws", "share so far", "weights 0.6, 0.3, 0.1")
    for dataset, weight in enumerate(WEIGHTS):
        drawn = np.cumsum(index.dataset_index == dataset) / np.arange(1, count + 1)
        axes.curve([(1, weight), (count, weight)], dataset, 1, "dash")
        axes.curve([(n + 1, float(share)) for n, share in enumerate(drawn)], dataset)
    axes.legend([f"data set {number}" for number in range(3)])
    return canvas


@figure("data-ranks")
def ranks() -> Canvas:
    """The samples of two steps and who reads them, for three data-parallel sizes."""
    canvas = Canvas(
        800, 250, "Samples of two steps with 16 samples each: the data-parallel rank and micro-batch of each"
    )
    for row, size in enumerate((1, 2, 4)):
        y = 40 + row * 70
        canvas.text(12, y - 10, f"{size} data-parallel rank{'s' if size > 1 else ''}, micro-batches of 2", style="big")
        for step in range(2):
            for rank in range(size):
                for number, batch in enumerate(micro_batch_samples(step * 16, 16, 2, rank, size)):
                    for sample in batch:
                        x = 12 + sample * 24 + step * 14
                        title = f"step {step}, rank {rank}, micro-batch {number}"
                        canvas.cell(x, y, 23, 26, str(sample), f"c{rank}", style="small", title=title)
                    canvas.text(
                        12 + batch.start * 24 + step * 14 + 23,
                        y + 40,
                        f"m{number}",
                        anchor="middle",
                        style="small muted",
                    )
    canvas.legend(12, 244, [(f"c{rank}", f"rank {rank}") for rank in range(4)])
    return canvas


@figure("data-batch-ramp-up")
def ramp_up() -> Canvas:
    canvas = Canvas(660, 280, "Global batch size with rampup_batch_size = [32, 32, 20000]")
    schedule = BatchSizeSchedule(full=256, start=32, increment=32, ramp_samples=20000)
    steps = list(schedule.steps(0, 40000))
    axes = Axes(canvas, (0, len(steps)), (0, 280))
    axes.frame("step", "samples of a step", "rampup_batch_size = [32, 32, 20000], global_batch_size = 256")
    points = [point for step, (_, size) in enumerate(steps) for point in ((step, size), (step + 1, size))]
    axes.curve(points, 0)
    return canvas
