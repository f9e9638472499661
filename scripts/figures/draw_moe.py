"""Mixture of experts: routing, permutation, capacity, and loads of recorded runs."""

from __future__ import annotations

import numpy as np
import torch
from scripts.figures.axes import Axes, heat
from scripts.figures.registry import figure, recorded
from scripts.figures.svg import Canvas

from mt_moe.config import MoeConfig
from mt_moe.permutation import Routing, RowKernels, sort_by_expert
from mt_moe.routing.selection import choose_experts, expert_capacity, expert_weights, keep_within

TOKENS, EXPERTS, TOPK, RANKS = 12, 8, 2, 4


def routed() -> tuple[torch.Tensor, Routing]:
    """Logits of 12 tokens for 8 experts, uneven on purpose, and their routing."""
    # NumPy's generator, whose numbers do not change with versions.
    random = np.random.Generator(np.random.PCG64(3))
    logits = random.normal(size=(TOKENS, EXPERTS)) + np.linspace(0.9, -0.9, EXPERTS)
    values = torch.from_numpy(logits.astype(np.float32))
    experts = choose_experts(values, MoeConfig(num_experts=EXPERTS, moe_router_topk=TOPK), None)
    return values, Routing(experts, expert_weights(values, experts, "softmax", False), EXPERTS)


@figure("moe-scores")
def scores() -> Canvas:
    """Probabilities of the experts and the choice of two."""
    logits, routing = routed()
    canvas = Canvas(660, 330, "Scores of 12 tokens for 8 experts; frames show the two that each token chooses")
    canvas.text(70, 20, "scores of the router (stronger colour: higher) and the two experts of each token", style="big")
    heat(canvas, 70, 40, (60, 22), logits.softmax(-1).tolist(), title="score ")
    for expert in range(EXPERTS):
        canvas.text(100 + expert * 60, 34, f"expert {expert}", anchor="middle", style="small muted")
    for token in range(TOKENS):
        canvas.text(62, 56 + token * 22, f"token {token}", anchor="end", style="small muted")
        for expert, weight in zip(routing.experts[token].tolist(), routing.weights[token].tolist(), strict=True):
            canvas.rect(71 + expert * 60, 41 + token * 22, 58, 20, stroke="edge")
            canvas.text(100 + expert * 60, 56 + token * 22, f"{weight:.2f}", anchor="middle", style="small")
    counts = torch.bincount(routing.experts.flatten(), minlength=EXPERTS).tolist()
    for expert, count in enumerate(counts):
        canvas.text(100 + expert * 60, 322, str(count), anchor="middle")
    canvas.text(62, 322, "load", anchor="end", style="muted")
    return canvas


@figure("moe-dispatch")
def dispatch() -> Canvas:
    """Tokens in the order of their experts, and the ranks that they go to."""
    _, routing = routed()
    order, counts = sort_by_expert(routing, RowKernels())
    rows = order.order.tolist()
    canvas = Canvas(
        860, 246, "Copies of tokens sorted by expert and sent to the ranks of an expert-parallel group of four"
    )
    canvas.text(
        12,
        20,
        "two copies of 12 tokens, and the same sorted by expert; an all-to-all sends each colour to its rank",
        style="big",
    )
    width = 34.0
    chosen = routing.experts.flatten().tolist()
    for copy, expert in enumerate(chosen):
        canvas.cell(
            12 + copy * width, 30, width - 2, 26, f"t{copy // TOPK}", f"c{expert * RANKS // EXPERTS}", style="small"
        )
    for place, copy in enumerate(rows):
        canvas.cell(
            12 + place * width,
            106,
            width - 2,
            26,
            f"t{copy // TOPK}",
            f"c{chosen[copy] * RANKS // EXPERTS}",
            style="small",
        )
        canvas.line(12 + copy * width + 16, 57, 12 + place * width + 16, 105, "rule")
    x = 12.0
    for expert, count in enumerate(counts.tolist()):
        if count:
            canvas.text(x + count * width / 2, 146, f"e{expert}", anchor="middle", style="small muted")
        x += count * width
    canvas.text(12, 180, "rows that each rank's experts multiply", style="big")
    for rank in range(RANKS):
        own = counts[rank * EXPERTS // RANKS : (rank + 1) * EXPERTS // RANKS].tolist()
        words = ", ".join(f"e{rank * EXPERTS // RANKS + n}: {count}" for n, count in enumerate(own))
        canvas.rect(12 + rank * 208, 192, max(sum(own) * 12, 1), 22, f"c{rank}", stroke="rule")
        canvas.text(12 + rank * 208, 232, f"rank {rank}: {sum(own)} ({words})", style="small muted")
    return canvas


@figure("moe-capacity")
def capacity() -> Canvas:
    """The same routing with a capacity factor of 1: what is kept and what is dropped, under both policies."""
    _, routing = routed()
    limit = expert_capacity(TOKENS, TOPK, EXPERTS, 1.0)
    canvas = Canvas(860, 236, f"Capacity of {limit} rows an expert: rows that are kept and dropped under two policies")
    for place, policy in enumerate(("probs", "position")):
        kept = keep_within(routing.experts, routing.weights, EXPERTS, limit, policy)  # type: ignore[arg-type]
        left = 40 + 430 * place
        canvas.text(left, 20, f'moe_token_drop_policy = "{policy}"', style="big")
        for expert in range(EXPERTS):
            y, x = 32 + expert * 24, float(left)
            canvas.text(left - 8, y + 15, f"e{expert}", anchor="end", style="small muted")
            for token, slot in (routing.experts == expert).nonzero().tolist():
                fill = "c0" if kept[token, slot] else "c4"
                canvas.cell(x, y, 39, 21, f"t{token} {float(routing.weights[token, slot]):.1f}", fill, style="small")
                x += 40
            canvas.line(left + limit * 40 - 0.5, y - 1, left + limit * 40 - 0.5, y + 23, "edge dash")
    canvas.legend(70, 232, [("c0", "kept"), ("c4", "dropped")])
    return canvas


@figure("moe-balance")
def balance() -> Canvas:
    """Largest load over mean load of recorded runs."""
    runs = recorded("moe")
    canvas = Canvas(680, 320, "Largest load over mean load in a small Mixtral under three ways of balancing")
    largest = 1.0
    curves = {}
    for name, run in runs.items():
        keys = [key for key in run if key.endswith("load_max_over_mean")]
        curves[name] = [(step, sum(run[key][n] for key in keys) / len(keys)) for n, step in enumerate(run["iteration"])]
        largest = max(largest, *(y for _, y in curves[name]))
    axes = Axes(canvas, (0, curves["none"][-1][0]), (1, largest * 1.03))
    axes.frame("step", "largest load / mean load", "mean of the layers; 1 is an even load")
    for colour, points in enumerate(curves.values()):
        axes.curve(points, colour)
    axes.legend(["no balancing", "aux_loss, 0.01", "expert bias, rate 0.01"])
    return canvas


@figure("moe-load-by-layer")
def load_by_layer() -> Canvas:
    """The run with the auxiliary loss, layer by layer."""
    run = recorded("moe")["aux_loss"]
    keys = sorted(key for key in run if key.endswith("load_max_over_mean"))
    canvas = Canvas(
        860, 50 + 30 * len(keys) + 30, "Largest load over mean load by layer and step, with the auxiliary loss"
    )
    canvas.text(
        80,
        20,
        "largest load / mean load, by layer (rows) and step (columns); a stronger colour is more uneven",
        style="big",
    )
    steps = len(run["iteration"])
    excess = [[value - 1 for value in run[key]] for key in keys]
    heat(canvas, 80, 34, (740 / steps, 28), excess, 3, largest=max(max(row) for row in excess), title="load - 1: ")
    for row, key in enumerate(keys):
        canvas.text(72, 52 + 28 * row, key.split("/")[1].replace("_", " "), anchor="end", style="small muted")
    canvas.text(80, 34 + 28 * len(keys) + 18, f"steps 1 to {steps}", style="small muted")
    return canvas
