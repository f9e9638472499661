"""Parallel layouts: ranks and groups, slices of weights, memory and speed."""

from __future__ import annotations

import torch
from scripts.figures.axes import Axes
from scripts.figures.registry import figure, recorded
from scripts.figures.svg import Canvas

from mt_core.config.loading import load_config
from mt_core.nn.layout import ParameterLayout, parameter_layouts
from mt_core.parallel.context import Axis, AxisSizes, ParallelContext, axis_members
from mt_core.parallel.plot import places
from mt_core.plugins import load_plugins
from mt_core.train.build import build_model

GIB = 2**30


def ranks_drawn(canvas: Canvas, sizes: AxisSizes, world: int, left: float, top: float) -> None:
    """A column for each pipeline rank, a row for each replica, a box for each rank, its colour the slice of tensors."""
    copies = sizes.dp(world)
    column, row = sizes.tp * 52 + 22, sizes.cp * 36 + 22
    for stage in range(sizes.pp):
        canvas.text(left + stage * column, top - 12, f"pipeline rank {stage}", style="muted small")
    for rank, at in enumerate(places(sizes, world)):
        x, y = left + at["pp"] * column + at["tp"] * 52, top + at["dp"] * row + at["cp"] * 36
        if at["tp"] == at["cp"] == 0:
            canvas.rect(x - 6, y - 6, sizes.tp * 52 + 8, sizes.cp * 36 + 8, stroke="edge", radius=5)
        label = f"{rank} e{at['ep']}" if sizes.ep > 1 else str(rank)
        canvas.cell(x, y, 48, 32, label, f"c{at['tp']}")
    for copy in range(copies):
        canvas.text(left - 14, top + copy * row + 20, f"replica {copy}", anchor="end", style="small muted")


@figure("layout-ranks")
def layout() -> Canvas:
    canvas = Canvas(660, 268, "16 ranks: tensor 2, context 2, data 2, pipeline 2")
    canvas.text(12, 22, "16 ranks = tensor 2 x context 2 x data 2 x pipeline 2", style="big")
    ranks_drawn(canvas, AxisSizes(tp=2, cp=2, pp=2), 16, 90, 62)
    for row, words in enumerate(
        (
            "frame: a replica's pipeline stage",
            "colour: slice of every matrix",
            "row in a frame: part of the sequence",
            "frames of a column: the same",
            "weights, other samples",
        )
    ):
        canvas.text(390, 80 + 20 * row, words, style="muted")
    return canvas


@figure("layout-groups")
def groups() -> Canvas:
    """The same 16 ranks, coloured by their group on each axis."""
    canvas = Canvas(760, 250, "Groups of 16 ranks along each axis")
    members = axis_members(16, AxisSizes(tp=2, cp=2, pp=2))
    shown = (
        ("tp", "tensor"),
        ("cp", "context"),
        ("dp", "data"),
        ("pp", "pipeline"),
        ("dp_cp", "gradients (dp and cp)"),
    )
    for row, (axis, name) in enumerate(shown):
        y = 20 + row * 46
        canvas.text(12, y + 20, name)
        for group, ranks in enumerate(members[axis]):  # type: ignore[index]
            for rank in ranks:
                canvas.cell(170 + rank * 36, y, 34, 30, str(rank), f"c{group % 8}", style="small")
    canvas.text(170, 250 - 6, "ranks of one colour form a group; colours mean nothing across rows", style="muted small")
    return canvas


@figure("layout-experts")
def experts() -> Canvas:
    """Dense and expert grids over the same 8 ranks."""
    canvas = Canvas(700, 176, "Eight ranks of a pipeline stage: the dense grid and the grid of experts")
    sizes = AxisSizes(tp=2, ep=4, etp=1)
    members = axis_members(8, sizes)
    rows = (
        ("tp", "dense weights: tensor 2"),
        ("dp", "dense weights: data 4"),
        ("ep", "experts: expert 4"),
        ("edp", "experts: data 2"),
    )
    for row, (axis, name) in enumerate(rows):
        y = 12 + row * 40
        canvas.text(12, y + 20, name)
        for group, ranks in enumerate(members[axis]):  # type: ignore[index]
            for rank in ranks:
                canvas.cell(210 + rank * 58, y, 54, 28, str(rank), f"c{group}", style="small")
    return canvas


def tensor_context(rank: int, size: int) -> ParallelContext:
    return ParallelContext(torch.device("meta"), axes={"tp": Axis(size, rank, None, tuple(range(size)))})


def small_llama():  # type: ignore[no-untyped-def]
    """Layouts of the parameters of a Llama with two layers, 8 heads and 4 key-value heads."""
    config = load_config(
        preset="llama3.2-1b",
        overrides=[
            "train.train_iters=1",
            "model.num_layers=2",
            "model.hidden_size=64",
            "model.num_attention_heads=8",
            "model.num_query_groups=4",
            "model.ffn_hidden_size=96",
            "model.vocab_size=1000",
        ],
    ).config
    return parameter_layouts(build_model(config, ParallelContext(torch.device("meta")), load_plugins()))


@figure("layout-slices")
def slices() -> Canvas:
    """Which rows and columns of a layer's matrices each of two tensor-parallel ranks holds."""
    layouts = small_llama()
    names = {
        "self_attention.linear_qkv.weight": "queries, keys, values",
        "self_attention.linear_proj.weight": "projection",
        "mlp.linear_fc1.weight": "gate and up",
        "mlp.linear_fc2.weight": "down",
    }
    canvas = Canvas(740, 290, "Slices of the matrices of a layer over two tensor-parallel ranks")
    x = 24.0
    for name, title in names.items():
        layout = layouts[f"decoder.layers.0.{name}"]
        rows, columns = layout.shape
        scale = 0.95
        canvas.text(x, 24, title, style="big")
        canvas.text(x, 40, f"{rows} x {columns}", style="muted small")
        for rank in range(2):
            for region in layout.regions(tensor_context(rank, 2)):
                (top, left), (height, width) = region.canonical.start, region.canonical.shape
                canvas.rect(
                    x + left * scale, 50 + top * scale, width * scale, height * scale, f"c{rank}", stroke="rule"
                )
        canvas.rect(x, 50, columns * scale, rows * scale, stroke="edge")
        x += max(columns * scale, 140) + 46
    canvas.legend(24, 276, [("c0", "rank 0"), ("c1", "rank 1")])
    canvas.text(170, 276, "rows are outputs, columns are inputs", style="muted")
    return canvas


@figure("layout-vocabulary")
def vocabulary() -> Canvas:
    """Embedding rows over four ranks, with the padding that makes them equal."""
    layouts = small_llama()
    layout: ParameterLayout = layouts["embedding.word_embeddings.weight"]
    vocab = layout.shape[0]
    canvas = Canvas(700, 96, f"{vocab} rows of the embedding over four tensor-parallel ranks")
    each = -(-vocab // (4 * 16)) * 16
    canvas.text(
        12, 20, f"{vocab} rows over 4 ranks, padded to {each * 4} in memory; checkpoints hold {vocab}", style="big"
    )
    for rank in range(4):
        first, last = rank * each, min((rank + 1) * each, vocab)
        x, scale = 12 + rank * 166, 160 / each
        canvas.cell(x, 34, (last - first) * scale, 30, f"{first} to {last - 1}", f"c{rank}", style="small")
        if last - first < each:
            canvas.rect(x + (last - first) * scale, 34, (each - last + first) * scale, 30, "grey", stroke="rule")
        canvas.text(x, 82, f"rank {rank}", style="muted small")
    return canvas


PARTS = (
    ("weights", "weights", 0), ("gradients", "gradients", 1), ("main_weights", "master weights", 4),
    ("optimizer_state", "optimizer state", 2), ("activations", "activations", 3), ("temporary", "temporary", 7),
    ("communication_buffers", "buffers", 5), ("optimizer_update", "update", 6),
)  # fmt: skip


@figure("layout-memory")
def memory() -> Canvas:
    """Memory of each pipeline rank, as `mt plan` computes it."""
    canvas = Canvas(760, 330, "GiB of a rank: Llama 3 8B on 64 ranks, with and without recomputation")
    plans = recorded("plan")
    most = max(rank["gib"] for ranks in plans.values() for rank in ranks)
    axes = Axes(
        canvas,
        (-0.6, 8.1),
        (0, most * 1.08),
        x_ticks=[*range(4), *range(5, 9)][:8],
        right=150,
        names={**{n: f"pp {n}" for n in range(4)}, **{n + 4.5: "" for n in range(4)}},
    )
    axes.x_ticks = [0, 1, 2, 3, 4.5, 5.5, 6.5, 7.5]
    axes.names = {0: "pp 0", 1: "pp 1", 2: "pp 2", 3: "pp 3", 4.5: "pp 0", 5.5: "pp 1", 6.5: "pp 2", 7.5: "pp 3"}
    axes.frame(
        "nothing recomputed (left), every layer recomputed (right)",
        "GiB of a rank",
        "llama3-8b, tensor 2 x pipeline 4 x data 8, distributed optimizer",
    )
    for place, ranks in enumerate(plans.values()):
        for number, rank in enumerate(ranks):
            low = 0.0
            for key, name, colour in PARTS:
                size = rank["bytes"][key]
                high = low + (sum(size.values()) if isinstance(size, dict) else size) / GIB
                axes.bar(number + 4.5 * place, low, high, 0.7, f"c{colour}", f"{name}: {high - low:.1f} GiB")
                low = high
    for row, (_, name, colour) in enumerate(reversed(PARTS)):
        canvas.rect(624, 44 + 20 * row, 12, 12, f"c{colour}", stroke="rule")
        canvas.text(642, 54 + 20 * row, name)
    return canvas


@figure("layout-search")
def search() -> Canvas:
    """Layouts of 64 ranks: memory and estimated speed."""
    found = recorded("plan_search")
    layouts = found["layouts"]
    canvas = Canvas(700, 350, "Every layout of Llama 3 8B on 64 H100 that fits: memory and estimated tokens a second")
    most = max(one["estimated_tokens_per_second"] for one in layouts)
    axes = Axes(canvas, (0, 80), (0, most * 1.1), left=80)
    axes.frame(
        "GiB of the fullest rank",
        "tokens a second, estimated",
        f"{found['legal']} legal layouts, {found['fitting']} fit",
    )
    sizes = sorted({one["tensor_model_parallel_size"] for one in layouts})
    for one in layouts:
        colour = sizes.index(one["tensor_model_parallel_size"])
        axes.points([(one["gib"], one["estimated_tokens_per_second"])], colour, 2.6)
    axes.legend([f"tensor {size}" for size in sizes])
    return canvas


@figure("layout-zero")
def zero() -> Canvas:
    """Bytes of a parameter on a rank over the number of data-parallel ranks."""
    from mt_core.optim import param_and_grad_buffer

    canvas = Canvas(640, 330, "Bytes a parameter takes on each rank, bf16 with AdamW, over the data-parallel size")
    ranks = [1, 2, 4, 8, 16, 32, 64]
    axes = Axes(canvas, (1, 64), (0, 20), x_log=True, x_ticks=ranks)
    axes.frame("data-parallel ranks", "bytes a parameter", "bf16 weights, fp32 gradients, AdamW")
    # The table of the module: replicated state, and state that is sharded over d ranks.
    assert "6 + 12/d" in str(param_and_grad_buffer.__doc__)
    curves = {
        "replicated": lambda d: 18.0,
        "distributed optimizer (ZeRO-1)": lambda d: 6 + 12 / d,
        "the same with remainders": lambda d: 6 + 10 / d,
    }
    for colour, curve in enumerate(curves.values()):
        axes.curve([(d, curve(d)) for d in ranks], colour)
        axes.points([(d, curve(d)) for d in ranks], colour)
    axes.legend(list(curves), y=150)
    return canvas
