"""A GPT and its training loop in plain torch: the baseline for our step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class PlainShape:
    layers: int
    hidden: int
    heads: int
    vocabulary: int
    sequence: int
    batch: int

    def settings(self) -> list[str]:
        """The equivalent mt configuration."""
        return [
            "model.family=gpt",
            f"model.num_layers={self.layers}",
            f"model.hidden_size={self.hidden}",
            f"model.num_attention_heads={self.heads}",
            f"model.vocab_size={self.vocabulary}",
            "model.make_vocab_size_divisible_by=1",
            f"model.max_position_embeddings={self.sequence}",
            f"data.seq_length={self.sequence}",
            f"train.micro_batch_size={self.batch}",
        ]


class PlainBlock(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        # [B, heads, S, D] each
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class PlainGPT(nn.Module):
    """GPT-2 with tied embeddings: tokens [B, S] -> logits [B, S, vocabulary]."""

    def __init__(self, shape: PlainShape) -> None:
        super().__init__()
        self.words = nn.Embedding(shape.vocabulary, shape.hidden)
        self.positions = nn.Embedding(shape.sequence, shape.hidden)
        self.blocks = nn.ModuleList(PlainBlock(shape.hidden, shape.heads) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.hidden)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.words(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.words.weight)


class PlainLoop:
    """Masked mean of the losses, backward, clip by the global norm, fused AdamW."""

    def __init__(self, shape: PlainShape) -> None:
        self.model = PlainGPT(shape)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def step(self, batch: dict[str, Tensor]) -> float:
        self.optimizer.zero_grad(set_to_none=True)
        logits, mask = self.model(batch["tokens"], batch["position_ids"]), batch["loss_mask"]
        losses = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none").view_as(mask)
        loss = (losses * mask).sum() / mask.sum().clamp(min=1.0)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.item()  # waits for the device, as a loop that logs each step
