"""Models as anybody would write them in plain torch, and their training loop with the fused AdamW."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from cases import Case
from torch import Tensor, nn


class Attention(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        bias = case.family == "gpt"
        self.width, groups = case.hidden // case.heads, case.groups or case.heads
        self.rotary = None if bias else Rotary(case)
        self.sizes = (case.hidden, groups * self.width, groups * self.width)
        self.qkv = nn.Linear(case.hidden, sum(self.sizes), bias)
        self.proj = nn.Linear(case.hidden, case.hidden, bias)
        self.is_grouped = groups < case.heads

    def forward(self, x: Tensor) -> Tensor:
        # [B, S, heads * width] -> [B, heads, S, width]
        q, k, v = (part.unflatten(-1, (-1, self.width)).transpose(1, 2) for part in self.qkv(x).split(self.sizes, -1))
        if self.rotary is not None:
            q, k = self.rotary(q), self.rotary(k)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.is_grouped)
        return self.proj(attended.transpose(1, 2).flatten(2))


class Rotary(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        width = case.hidden // case.heads
        frequencies = 10000.0 ** -(torch.arange(0, width, 2) / width)
        angles = torch.arange(case.sequence)[:, None] * frequencies.repeat(2)
        self.cos: Tensor
        self.sin: Tensor
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return (x * self.cos + torch.cat((-second, first), -1) * self.sin).to(x.dtype)


class Gelu(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(case.hidden, case.ffn), nn.Linear(case.ffn, case.hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class SwiGLU(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.gate_up = nn.Linear(case.hidden, 2 * case.ffn, bias=False)
        self.down = nn.Linear(case.ffn, case.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Experts(nn.Module):
    """Each expert takes its tokens, and adds its weighted output where they came from."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.router, self.topk = nn.Linear(case.hidden, case.experts, bias=False), case.topk
        self.experts = nn.ModuleList(SwiGLU(case) for _ in range(case.experts))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        scores, chosen = self.router(rows).topk(self.topk)
        weights, out = scores.softmax(-1), torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            tokens, place = torch.where(chosen == number)
            out = out.index_add(0, tokens, expert(rows[tokens]) * weights[tokens, place, None])
        return out.view_as(x)


class Block(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        norm = nn.RMSNorm if case.gated else nn.LayerNorm
        feed_forward = Experts if case.experts else SwiGLU if case.gated else Gelu
        self.norm1, self.norm2 = norm(case.hidden), norm(case.hidden)
        self.attention, self.feed_forward = Attention(case), feed_forward(case)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.feed_forward(self.norm2(x))


class PlainModel(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.words = nn.Embedding(case.vocab, case.hidden)
        self.positions = None if case.gated else nn.Embedding(case.sequence, case.hidden)
        self.blocks = nn.ModuleList(Block(case) for _ in range(case.layers))
        self.norm = (nn.RMSNorm if case.gated else nn.LayerNorm)(case.hidden)
        self.output = self.words if case.tied else nn.Linear(case.hidden, case.vocab, bias=False)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.logits(self.hidden(tokens))

    def hidden(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        if self.positions is not None:
            x = x + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return x

    def logits(self, x: Tensor) -> Tensor:
        return F.linear(self.norm(x), self.output.weight)


def build(case: Case) -> tuple[Callable[[Tensor], float], int]:
    """A step on ids [batch, sequence + 1], and the number of parameters."""
    model = PlainModel(case)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(ids: Tensor) -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    return step, sum(p.numel() for p in model.parameters())
