"""A training step of mt against a hand-written plain PyTorch loop of the same model, on the same batches.

    uv run python bench/train_step.py [--steps 30] [--threads 2]

Both do: forward, cross entropy, backward, clip by global norm, fused AdamW, in fp32 on CPU. Steps are
interleaved, one of each in turn; the ratio is the median of the ratios of pairs.
"""

from __future__ import annotations

import argparse
import math
import platform
import statistics
import time

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mt_core.config.loading import load_config
from mt_core.data.loader import RankBatch, collate
from mt_core.train.trainer import Trainer

SHAPES = {
    "small GPT, wide vocabulary": {"layers": 6, "hidden": 384, "heads": 6, "vocab": 50304, "sequence": 256, "batch": 4},
    "tiny GPT, bytes": {"layers": 4, "hidden": 128, "heads": 4, "vocab": 261, "sequence": 128, "batch": 16},
}


class PlainBlock(nn.Module):
    """Pre-norm attention and MLP, as anybody would write them."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, hidden = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, sequence, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(batch, sequence, hidden))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class PlainGPT(nn.Module):
    """GPT-2 with tied embeddings."""

    def __init__(self, layers: int, hidden: int, heads: int, vocab: int, sequence: int, batch: int) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(vocab, hidden), nn.Embedding(sequence, hidden)
        self.blocks = nn.ModuleList(PlainBlock(hidden, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.words.weight)


class Tokens:
    """Random ids as samples."""

    def __init__(self, vocab: int, sequence: int) -> None:
        self.rng, self.vocab, self.sequence = np.random.default_rng(0), vocab, sequence

    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        ids = self.rng.integers(0, self.vocab, self.sequence + 1)
        mask = np.ones(self.sequence, np.float32)
        return {"tokens": ids[:-1], "labels": ids[1:], "loss_mask": mask, "position_ids": np.arange(self.sequence)}


def build_trainer(shape: dict[str, int]) -> Trainer:
    overrides = [
        f"model.num_layers={shape['layers']}",
        f"model.hidden_size={shape['hidden']}",
        f"model.num_attention_heads={shape['heads']}",
        f"model.vocab_size={shape['vocab']}",
        "model.make_vocab_size_divisible_by=1",
        f"model.max_position_embeddings={shape['sequence']}",
        f"data.seq_length={shape['sequence']}",
        f"train.micro_batch_size={shape['batch']}",
        "train.train_iters=100000",
        "train.eval_interval=null",
        "checkpoint.save_interval=null",
        "logging.progress=none",
        "model.family=gpt",
        "optimizer.lr=1e-4",
    ]
    data = Tokens(shape["vocab"], shape["sequence"])
    return Trainer(load_config(overrides=overrides), train_data=data, valid_data={})


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor]) -> float:
    optimizer.zero_grad(set_to_none=True)
    loss = F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def compare(name: str, shape: dict[str, int], steps: int) -> None:
    torch.manual_seed(0)
    trainer, plain = build_trainer(shape), PlainGPT(**shape)
    trainer.model.train()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-4, fused=True)
    count = sum(p.numel() for p in plain.parameters())
    assert count == sum(p.numel() for p in trainer.model.parameters())
    pairs: list[tuple[float, float]] = []
    for step in range(steps + 3):
        arrays = collate(trainer.train_data[i] for i in range(shape["batch"]))
        rank_batch = RankBatch([arrays], [range(shape["batch"])])
        tensors = {key: torch.from_numpy(array) for key, array in arrays.items()}
        started = time.perf_counter()
        trainer.take_step(rank_batch)
        ours = time.perf_counter() - started
        started = time.perf_counter()
        loss = plain_step(plain, optimizer, tensors)
        theirs = time.perf_counter() - started
        assert math.isfinite(loss)
        if step >= 3:
            pairs.append((ours, theirs))
    ratio = statistics.median(a / b for a, b in pairs)
    tokens = shape["batch"] * shape["sequence"]
    ours, theirs = (statistics.median(column) for column in zip(*pairs, strict=True))
    print(f"{name}: {count / 1e6:.1f} M parameters, {tokens} tokens a step")
    print(f"  mt {tokens / ours:,.0f} tokens/s | plain loop {tokens / theirs:,.0f} tokens/s | time ratio {ratio:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(
        f"torch {torch.__version__}, {platform.machine()}, {arguments.threads} threads, {arguments.steps} pairs, fp32"
    )
    for name, shape in SHAPES.items():
        compare(name, shape, arguments.steps)


if __name__ == "__main__":
    main()
