"""RETRO written out with loops over chunks and positions, after Borgeaud et al. (2022), algorithm 1."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

Weights = dict[str, Tensor]
EPSILON = 1e-5


class Retro:
    """weights: by name. One sequence at a time, one head at a time, one position at a time."""

    def __init__(self, weights: Weights, *, heads: int, chunk: int, layers: int, retrieving: list[int], rope: bool):
        self.w, self.heads, self.chunk = weights, heads, chunk
        self.layers, self.retrieving, self.rope = layers, retrieving, rope

    def logits(self, tokens: Tensor, neighbors: Tensor, mask: Tensor) -> Tensor:
        """tokens [S], neighbors and mask [L, K, r] -> [S, V]"""
        x = self.embed(tokens)
        encoded: list[Tensor | None] | None = None
        for number in range(self.layers):
            name = f"decoder.layers.{number}"
            x = x + self.self_attention(name, self.norm(f"{name}.input_layernorm", x), causal=True, seen=None)
            if number in self.retrieving:
                normed = self.norm(f"{name}.pre_cross_attn_layernorm", x)
                if encoded is None:
                    encoded = [
                        self.encode(normed[u * self.chunk : (u + 1) * self.chunk], neighbors[u], mask[u])
                        for u in range(len(neighbors))
                    ]
                x = x + self.chunked_cross_attention(f"{name}.cross_attention", normed, encoded)
            x = x + self.feed_forward(name, self.norm(f"{name}.pre_mlp_layernorm", x))
        return self.norm("decoder.final_layernorm", x) @ self.w["embedding.word_embeddings.weight"].T

    def encode(self, text: Tensor, neighbors: Tensor, mask: Tensor) -> Tensor | None:
        """text [m, H], of one chunk; neighbors and mask [K, r] -> the tokens of them that are no padding, [n, H]"""
        states = []
        for tokens, seen in zip(neighbors, mask.bool(), strict=True):
            x = self.embed(tokens)
            number = 0
            while f"encoder.layers.{number}.input_layernorm.weight" in self.w:
                name = f"encoder.layers.{number}"
                if seen.any():
                    x = x + self.self_attention(name, self.norm(f"{name}.input_layernorm", x), causal=False, seen=seen)
                if number == 0:
                    normed = self.norm(f"{name}.pre_cross_attn_layernorm", x)
                    x = x + self.attend_to(f"{name}.cross_attention", normed, text)
                x = x + self.feed_forward(name, self.norm(f"{name}.pre_mlp_layernorm", x))
                number += 1
            states.append(x[seen])
        found = torch.cat(states)
        return found if len(found) else None

    def chunked_cross_attention(self, name: str, x: Tensor, encoded: list[Tensor | None]) -> Tensor:
        rows = []
        for position in range(len(x)):
            # The chunk whose last token is this one or before it.
            chunk = (position + 1) // self.chunk - 1
            memory = encoded[chunk] if 0 <= chunk < len(encoded) else None
            rows.append(
                torch.zeros_like(x[0]) if memory is None else self.attend_to(name, x[position, None], memory)[0]
            )
        return torch.stack(rows)

    def attend_to(self, name: str, x: Tensor, memory: Tensor) -> Tensor:
        q = self.linear(f"{name}.linear_q", x)
        pairs = self.linear(f"{name}.linear_kv", memory).view(len(memory), self.heads, 2, -1)
        size = pairs.shape[-1]
        out = []
        for head in range(self.heads):
            mine = q[:, head * size : (head + 1) * size]
            weights = torch.softmax(mine @ pairs[:, head, 0].T / math.sqrt(size), -1)
            out.append(weights @ pairs[:, head, 1])
        return self.linear(f"{name}.linear_proj", torch.cat(out, -1))

    def self_attention(self, name: str, x: Tensor, *, causal: bool, seen: Tensor | None) -> Tensor:
        parts = self.linear(f"{name}.self_attention.linear_qkv", x).view(len(x), self.heads, 3, -1)
        hidden = torch.zeros(len(x), len(x), dtype=torch.bool)
        if causal:
            hidden |= ~torch.ones(len(x), len(x)).tril().bool()
        if seen is not None:
            hidden |= ~seen[None]
        out = []
        for head in range(self.heads):
            q, k, v = parts[:, head].unbind(1)
            if self.rope:
                q, k = turned(q), turned(k)
            scores = (q @ k.T / math.sqrt(q.shape[-1])).masked_fill(hidden, float("-inf"))
            out.append(torch.softmax(scores, -1) @ v)
        return self.linear(f"{name}.self_attention.linear_proj", torch.cat(out, -1))

    def feed_forward(self, name: str, x: Tensor) -> Tensor:
        return self.linear(f"{name}.mlp.linear_fc2", F.gelu(self.linear(f"{name}.mlp.linear_fc1", x)))

    def embed(self, tokens: Tensor) -> Tensor:
        x = self.w["embedding.word_embeddings.weight"][tokens]
        return x if self.rope else x + self.w["embedding.position_embeddings.weight"][: len(tokens)]

    def norm(self, name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.w[f"{name}.weight"], self.w[f"{name}.bias"], EPSILON)

    def linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.w[f"{name}.weight"], self.w[f"{name}.bias"])


def turned(x: Tensor) -> Tensor:
    """[S, D], channel pairs (i, i + D / 2) turned by position * 10000^(-2i / D)."""
    half = x.shape[-1] // 2
    angles = torch.arange(len(x))[:, None] * 10000.0 ** (-torch.arange(half) / half)
    pair = torch.complex(x[:, :half], x[:, half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([pair.real, pair.imag], -1)
