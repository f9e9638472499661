"""Generation: how the sampling parameters change a distribution."""

from __future__ import annotations

import torch
from scripts.figures.registry import figure
from scripts.figures.svg import Canvas

from mt_infer.sampling.logits_processors import keep_min_p, keep_top_k, keep_top_p

LOGITS = torch.tensor([[3.0, 2.6, 2.1, 1.2, 1.0, 0.4, 0.1, -0.5, -1.2, -2.0]])


@figure("sampling-truncation")
def truncation() -> Canvas:
    """Probabilities of ten tokens under each parameter alone."""
    limit = torch.tensor([[0.0]])
    kinds = (
        ("temperature 1", LOGITS), ("temperature 0.5", LOGITS / 0.5), ("temperature 2", LOGITS / 2.0),
        ("top_k 4", keep_top_k(LOGITS.clone(), limit.new_tensor([[4]]).long())),
        ("top_p 0.8", keep_top_p(LOGITS.clone(), limit.new_tensor([[0.8]]))),
        ("min_p 0.1", keep_min_p(LOGITS.clone(), limit.new_tensor([[0.1]]))),
    )  # fmt: skip
    canvas = Canvas(800, 330, "Probabilities of ten tokens under temperature, top_k, top_p and min_p")
    for place, (name, logits) in enumerate(kinds):
        left, bottom = 20 + 262 * (place % 3), 140 + 160 * (place // 3)
        canvas.text(left, bottom - 112, name, style="big")
        for token, probability in enumerate(logits.softmax(-1)[0].tolist()):
            height = 130 * probability
            canvas.rect(left + token * 24, bottom - height, 20, height, "c0" if probability else "none")
            words = f"{probability:.2f}".removeprefix("0") if probability else "-"
            canvas.text(left + token * 24 + 10, bottom + 13, words, anchor="middle", style="small muted")
        canvas.line(left - 4, bottom, left + 240, bottom, "edge")
    return canvas
