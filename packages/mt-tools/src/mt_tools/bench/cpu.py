"""Benchmarks that need no GPU: our step beside a plain loop, operators launched, bytes held, import time."""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mt_core._torch_compat import UncompiledDispatchMode
from mt_core.data.loader import collate
from mt_core.plugins import PluginHost
from mt_tools.bench.report import Case
from mt_tools.bench.timing import alternating, ratio
from mt_tools.bench.training import RandomTokens, TimedRun
from mt_tools.bench.training_presets import COMMON, TEN_BYTES

# -- baseline: a GPT and its training loop in plain torch --------------------------------------------


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


SHAPES = {
    "wide vocabulary": PlainShape(layers=6, hidden=384, heads=6, vocabulary=50304, sequence=256, batch=4),
    "bytes": PlainShape(layers=4, hidden=128, heads=4, vocabulary=261, sequence=128, batch=16),
}
OPTIMIZERS = {
    "fp32": ("precision.dtype=fp32",),
    "bf16, fp32 copies": ("precision.dtype=bf16",),
    "bf16, remainders": (
        "precision.dtype=bf16",
        "optimizer.main_weights=remainders",
        "precision.accumulate_allreduce_grads_in_fp32=false",
    ),
    "bf16, remainders, bf16 moments": ("precision.dtype=bf16", *TEN_BYTES),
}


def cpu_cases(steps: int, host: PluginHost) -> Iterator[Case]:
    for name, shape in SHAPES.items():
        yield step_against_plain_loop(name, shape, steps, host)
    for name, settings in OPTIMIZERS.items():
        yield bytes_of_optimizer(name, settings, host)
    yield import_case()


class Launches(UncompiledDispatchMode):
    """Counts operators other than views."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Views launch nothing.
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def launches(call: Callable[[], object]) -> int:
    with Launches() as mode:
        call()
    return mode.count


def step_against_plain_loop(name: str, shape: PlainShape, steps: int, host: PluginHost) -> Case:
    """The median ratio over pairs of steps, which alternate between the two, in fp32."""
    torch.manual_seed(0)
    data, plain = RandomTokens(shape.vocabulary, shape.sequence), PlainLoop(shape)
    run = TimedRun([*shape.settings(), *COMMON, "train.device=cpu"], None, host)
    arrays = collate(data[index] for index in range(shape.batch))
    batch = {name: torch.from_numpy(array) for name, array in arrays.items()}
    try:
        # In turns, so that both steps see the same machine.
        times = alternating({"mt": run.step, "plain": lambda: plain.step(batch)}, steps)
        operators, plain_operators = launches(run.step), launches(lambda: plain.step(batch))
    finally:
        run.close()
    return {
        "name": f"step against a plain loop, {name}",
        "parameters": sum(parameter.numel() for parameter in plain.model.parameters()),
        "pairs": steps,
        "tokens_per_second": shape.batch * shape.sequence / statistics.median(times["mt"]),
        "time_ratio": ratio(times, "mt", "plain"),
        "operators": operators,
        "operators_of_plain_loop": plain_operators,
    }


def bytes_of_optimizer(name: str, settings: tuple[str, ...], host: PluginHost) -> Case:
    """Bytes of weights, gradients, master weights and moments after a step."""
    small = PlainShape(layers=1, hidden=32, heads=2, vocabulary=261, sequence=8, batch=1)
    run = TimedRun([*small.settings(), *COMMON, *settings, "train.device=cpu"], None, host)
    try:
        run.step()
    finally:
        run.close()
    trainer = run.trainer
    mains = [parameter for _, parameter in trainer.engine.weights.named_parameters()]
    weights = list(trainer.model.parameters())
    tensors: list[Tensor] = [*weights, *mains]
    tensors += [tensor.grad for tensor in (*weights, *mains) if tensor.grad is not None]
    tensors += [x for main in mains for x in trainer.engine.optimizer.state[main].values() if x.ndim]
    storages = {tensor.data_ptr(): tensor.numel() * tensor.element_size() for tensor in tensors}
    count = sum(parameter.numel() for parameter in weights)
    return {"name": f"optimizer, {name}", "bytes_a_parameter": sum(storages.values()) / count}


def import_case(rounds: int = 3) -> Case:
    """Import time of the trainer over that of torch; each import runs in a new process, alternating."""
    modules = ("torch", "mt_core.train.trainer")
    times = alternating({module: partial(_import, module) for module in modules}, rounds, warm_up=0)
    return {"name": "importing the trainer against torch", "import_ratio": ratio(times, modules[1], modules[0])}


def _import(module: str) -> None:
    subprocess.run([sys.executable, "-c", f"import {module}"], check=True)
