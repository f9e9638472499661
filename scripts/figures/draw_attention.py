"""Attention: masks as the models build them, heads, windows by layer, and what context parallelism cuts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from scripts.figures.axes import Axes
from scripts.figures.registry import figure
from scripts.figures.svg import Canvas
from torch import Tensor

from mt_core.config.loading import load_config
from mt_core.nn.attention import AttentionPattern
from mt_core.nn.context_parallel.zigzag import shard_positions, visible_rows
from mt_models.blocks.position_bias import alibi_slopes
from mt_models.blocks.rotary import inverse_frequencies, llama3_frequencies, yarn_frequencies

SIZE = 12


def mask_of(pattern: AttentionPattern, size: int = SIZE) -> Tensor:
    """[size, size]: whether a query (row) sees a key (column)."""
    return pattern.additive_mask(size, size, torch.float32, torch.device("cpu"))[0, 0].isfinite()


def draw_mask(canvas: Canvas, x: float, y: float, seen: Tensor, title: str, fills: Sequence[str] = ()) -> None:
    """fills: by key; default: all alike."""
    size = len(seen)
    cell = 192 / size
    canvas.text(x, y - 26, title, style="big")
    canvas.text(x + 96, y - 8, "keys", anchor="middle", style="muted small")
    canvas.vertical_text(x - 8, y + 96, "queries", "muted small")
    for query in range(size):
        for key in range(size):
            fill = (fills[key] if fills else "c0") if seen[query, key] else "none"
            canvas.rect(x + key * cell, y + query * cell, cell, cell, fill, stroke="rule")


def pair(
    first: tuple[AttentionPattern, str],
    second: tuple[AttentionPattern, str],
    description: str,
    fills: Sequence[str] = (),
) -> Canvas:
    canvas = Canvas(500, 256, description)
    draw_mask(canvas, 30, 52, mask_of(first[0]), first[1])
    draw_mask(canvas, 286, 52, mask_of(second[0]), second[1], fills)
    return canvas


@figure("attention-causal-window")
def causal_and_window() -> Canvas:
    return pair(
        (AttentionPattern(), "causal"),
        (AttentionPattern(window=4), "sliding window of 4"),
        "Causal attention, and a sliding window of four positions",
    )


@figure("attention-documents")
def documents() -> Canvas:
    segments = torch.tensor([[0] * 3 + [1] * 5 + [2] * 4])
    fills = [f"c{int(segment)}" for segment in segments[0]]
    return pair(
        (AttentionPattern(), "without segment ids"),
        (AttentionPattern(segment_ids=segments), "three documents"),
        "Three documents in one sample: without and with segment ids",
        fills,
    )


@figure("attention-bidirectional")
def bidirectional() -> Canvas:
    padding = torch.tensor([[True] * 9 + [False] * 3])
    return pair(
        (AttentionPattern(causal=False), "bidirectional"),
        (AttentionPattern(causal=False, key_padding=padding), "three padded keys"),
        "Bidirectional attention of encoders, and the same with padded keys",
    )


@figure("attention-alibi")
def alibi() -> Canvas:
    """Bias that ALiBi adds to the scores of two of eight heads."""
    canvas = Canvas(500, 256, "ALiBi: the bias that is added to the scores of the first and the fourth of eight heads")
    slopes = alibi_slopes(8)
    biases = AttentionPattern(alibi_slopes=slopes).additive_mask(SIZE, SIZE, torch.float32, torch.device("cpu"))[0]
    for place, head in enumerate((0, 3)):
        x, cell = 30 + 256 * place, 16
        canvas.text(x, 26, f"head {head}, slope {float(slopes[head]):g}", style="big")
        for query in range(SIZE):
            for key in range(query + 1):
                bias = float(biases[head, query, key])
                canvas.rect(
                    x + key * cell,
                    52 + query * cell,
                    cell,
                    cell,
                    "p0",
                    opacity=2 ** (bias / 1.5),
                    stroke="rule",
                    title=f"{bias:g}",
                )
    return canvas


PRESETS = (
    ("gpt2-124m", "multi-head (MHA)"),
    ("llama3.2-3b", "grouped-query (GQA)"),
    ("qwen2.5-3b", "grouped-query (GQA)"),
)


@figure("attention-heads")
def heads() -> Canvas:
    """Query heads and the key-value heads that serve them, of three presets."""
    canvas = Canvas(760, 292, "Query heads and key-value heads of three presets")
    for row, (name, kind) in enumerate(PRESETS):
        model = load_config(preset=name, overrides=["train.train_iters=1"]).config.model
        count, groups = model.num_attention_heads, getattr(model, "num_query_groups", None) or model.num_attention_heads
        y, width = 34 + 90 * row, 700 / count
        canvas.text(20, y - 10, f"{name}: {kind}, {count} query heads, {groups} key-value heads", style="muted")
        for head in range(count):
            canvas.rect(20 + head * width + 1, y, width - 2, 20, f"c{head * groups // count % 6}", stroke="rule")
        for group in range(groups):
            span = 700 / groups
            center = 20 + (group + 0.5) * span
            canvas.rect(center - 9, y + 40, 18, 18, f"p{group % 6}")
            for head in range(group * count // groups, (group + 1) * count // groups):
                canvas.line(20 + (head + 0.5) * width, y + 20, center, y + 40, "rule")
    return canvas


@figure("attention-windows-by-layer")
def windows() -> Canvas:
    """Layers with a sliding window, of presets that mix both kinds."""
    names = ("gemma2-9b", "gpt-oss-20b", "mistral-7b-v0.1", "llama3-8b")
    canvas = Canvas(760, 30 + 34 * len(names) + 24, "Which layers see a window and which see all positions, by preset")
    canvas.legend(130, 18, [("c0", "all positions"), ("c1", "a sliding window")])
    for row, name in enumerate(names):
        model = load_config(preset=name, overrides=["train.train_iters=1"]).config.model
        y = 34 + 34 * row
        canvas.text(12, y + 16, name)
        for layer in range(model.num_layers):
            window = window_of(model, layer)
            x = 130 + layer * 11.4
            canvas.rect(x, y, 10.4, 22, "c0" if window is None else "c1", title=f"layer {layer}: {window or 'all'}")
        canvas.text(136 + model.num_layers * 11.4, y + 16, f"{window_of(model, 0) or 'all'}", style="muted small")
    canvas.text(
        130,
        34 + 34 * len(names) + 12,
        "layers, the first one left; behind them the window of layer 0",
        style="muted small",
    )
    return canvas


def window_of(model, layer: int) -> int | None:  # type: ignore[no-untyped-def]
    return model.window_of(layer) if hasattr(model, "window_of") else getattr(model, "sliding_window", None)


@figure("attention-zigzag")
def zigzag() -> Canvas:
    """Causal mask of 16 positions, coloured by the rank that computes it."""
    canvas = Canvas(
        760, 292, "Causal attention over four context-parallel ranks: contiguous shards, and zig-zag shards"
    )
    ranks, length = 4, 16
    contiguous = [position * ranks // length for position in range(length)]
    owner = [0] * length
    for rank in range(ranks):
        for position in shard_positions(rank, ranks, length // (2 * ranks), torch.device("cpu")).tolist():
            owner[position] = rank
    for place, (title, owners) in enumerate((("contiguous", contiguous), ("zig-zag", owner))):
        x, cell = 24 + 250 * place, 13
        canvas.text(x, 26, title, style="big")
        for query in range(length):
            for key in range(query + 1):
                canvas.rect(x + key * cell, 40 + query * cell, cell, cell, f"c{owners[query]}", stroke="rule")
        for rank in range(ranks):
            work = sum(position + 1 for position in range(length) if owners[position] == rank)
            canvas.rect(532 + 116 * place, 60 + rank * 40, work * 1.3, 22, f"c{rank}")
            canvas.text(536 + 116 * place, 75 + rank * 40, str(work), style="small")
        canvas.text(532 + 116 * place, 44, title, style="muted")
    canvas.text(532, 26, "query-key pairs of each rank", style="big")
    for rank in range(ranks):
        canvas.rect(24 + rank * 80, 268, 12, 12, f"c{rank}", stroke="rule")
        canvas.text(42 + rank * 80, 278, f"rank {rank}")
    return canvas


@figure("attention-ring")
def ring() -> Canvas:
    """Blocks that rank 1 of 4 computes in each step of the exchange of keys."""
    canvas = Canvas(700, 196, "What context-parallel rank 1 of 4 computes with the keys of each rank")
    ranks, rank, cell = 4, 1, 44
    canvas.text(12, 22, "rank 1 holds chunks 1 and 6; keys and values of the others arrive in turn", style="big")
    for step in range(ranks):
        source = (rank - step) % ranks
        x = 40 + step * 168
        canvas.text(x, 48, f"keys of rank {source}", style="muted")
        seen = [[False, False], [False, False]]
        if source == rank:
            seen = [[True, False], [True, True]]
        else:
            queries, keys = visible_rows(source, rank, 1, True)
            for q in range(2)[queries]:
                for k in range(2)[keys]:
                    seen[q][k] = True
        chunks, mine = (source, 2 * ranks - 1 - source), (rank, 2 * ranks - 1 - rank)
        for q in range(2):
            for k in range(2):
                half = source == rank and q == k
                words = ("causal" if half else "full") if seen[q][k] else ""
                canvas.cell(
                    x + k * cell,
                    70 + q * cell,
                    cell,
                    cell,
                    words,
                    f"c{source}" if seen[q][k] else "none",
                    style="small",
                )
            canvas.text(x - 6, 96 + q * cell, str(mine[q]), anchor="end", style="small muted")
            canvas.text(x + q * cell + cell / 2, 64, str(chunks[q]), anchor="middle", style="small muted")
    canvas.text(
        40,
        182,
        "rows: chunks of queries, columns: chunks of keys; empty: nothing is visible, nothing is computed",
        style="muted small",
    )
    return canvas


@figure("rope-scaling")
def rope_scaling() -> Canvas:
    """Wavelengths of rotary channels, without scaling and as two methods stretch them by 8."""
    canvas = Canvas(680, 340, "Rotary wavelengths by channel: unscaled, linear, llama3 and YaRN with a factor of 8")
    config = load_config(preset="llama3.1-8b", overrides=["train.train_iters=1"]).config.model
    plain = inverse_frequencies(config.rotary_dim, config.rotary_base)
    yarn = yarn_frequencies(config.model_copy(update={"rope_scaling_type": "yarn"}), config.rotary_base, 8.0, 8192)
    curves = {
        "unscaled": plain,
        "linear": plain / 8,
        "llama3": llama3_frequencies(plain, 8.0, 8192, 1.0, 4.0),
        "yarn": yarn,
    }
    axes = Axes(canvas, (0, len(plain) - 1), (1, 1e8), log=True, left=106)
    axes.frame("channel", "positions of one turn", "128 channels a head, base 500,000, factor 8")
    for colour, frequencies in enumerate(curves.values()):
        axes.curve([(n, 2 * torch.pi / float(f)) for n, f in enumerate(frequencies)], colour)
    axes.curve([(0, 8192), (len(plain) - 1, 8192)], 7, style="dash")
    axes.legend([*curves, "original 8,192 positions"], [0, 1, 2, 3, 7], x=130, y=60)
    return canvas
