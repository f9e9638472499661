"""Training steps of a plain model of torch on a GPU, with torch.compile: what `mt bench train` is compared with.

    python bench/peer_steps/plain_on_gpu.py --preset 1.2b --out plain-1.2b.json
    mt bench compare plain-1.2b.json train-1.2b.json

The model of `mt bench train --preset`, with its batch and sequence, as anybody would write it (`plain_torch`): each
block and the loss compiled, the fused AdamW of torch, gradients clipped. fp32 weights under autocast to bf16; for 8b,
whose fp32 state does not fit on one GPU, weights, gradients and moments in bf16, which rounds what mt keeps in 32 bits.
Without a GPU: small sizes, uncompiled, whose times mean nothing.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from cases import Case
from plain_torch import PlainModel
from torch import Tensor

from mt_tools.bench.report import Report, conditions


@dataclass(frozen=True)
class Preset:
    case: Case
    weights: torch.dtype = torch.float32


LLAMA_3 = Case("llama", ffn=8192, layers=16, hidden=2048, heads=32, groups=8, vocab=128256, sequence=4096, batch=4)
PRESETS = {
    "124m": Preset(Case("gpt", ffn=3072, layers=12, hidden=768, heads=12, sequence=1024, batch=32)),
    "1.2b": Preset(LLAMA_3),
    "8b": Preset(
        replace(LLAMA_3, ffn=14336, layers=32, hidden=4096, sequence=8192, batch=1, tied=False), torch.bfloat16
    ),
}
SMALL: dict[str, Any] = {"ffn": 128, "layers": 2, "hidden": 64, "heads": 4, "vocab": 512, "sequence": 32, "batch": 2}
WARM_UP = 5


def build_step(preset: Preset, device: torch.device) -> Callable[[], Tensor]:
    """A step on random ids, which returns the loss on the device."""
    case = preset.case
    with device:
        model = PlainModel(case).to(preset.weights)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    in_bf16 = preset.weights == torch.float32 and device.type == "cuda"

    def loss_of(hidden: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model.logits(hidden).flatten(0, 1).float(), labels.flatten())

    if device.type == "cuda":
        for block in model.blocks:
            block.compile()
        loss_of = torch.compile(loss_of)

    def step() -> Tensor:
        ids = torch.randint(0, case.vocab, (case.batch, case.sequence + 1), device=device)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16) if in_bf16 else nullcontext():
            loss = loss_of(model.hidden(ids[:, :-1]), ids[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    return step


def timed(step: Callable[[], Tensor], count: int, device: torch.device) -> tuple[list[float], Tensor]:
    """Seconds of each step, and the loss of the last one. The host does not wait between steps on a GPU."""
    for _ in range(WARM_UP):
        loss = step()
    if device.type != "cuda":
        moments = [time.perf_counter()]
        for _ in range(count):
            loss = step()
            moments.append(time.perf_counter())
        return [end - start for start, end in pairwise(moments)], loss
    torch.cuda.reset_peak_memory_stats()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        loss = step()
        event.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in pairwise(events)], loss


def measure(name: str, steps: int, device: torch.device) -> dict[str, Any]:
    """A case of the name that `mt bench train` gives its own."""
    preset = PRESETS[name]
    if device.type != "cuda":
        groups = None if preset.case.groups is None else 2
        preset = replace(preset, case=replace(preset.case, **SMALL, groups=groups))
    seconds, loss = timed(build_step(preset, device), steps, device)
    median = statistics.median(seconds)
    return {
        "name": f"{name} bf16",
        "contender": f"plain torch, {'blocks and loss compiled' if device.type == 'cuda' else 'uncompiled'}",
        "weights": str(preset.weights).removeprefix("torch."),
        "steps": steps,
        "tokens_per_second": preset.case.tokens / median,
        "step_ms": median * 1e3,
        "loss": loss.item(),
        **({"peak_gb": torch.cuda.max_memory_allocated() / 1e9} if device.type == "cuda" else {}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, action="append", help="Repeatable; all without.")
    parser.add_argument("--steps", type=int, default=20, help="Steps that are timed.")
    parser.add_argument("--out", type=Path, help="A report of mt bench.")
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    torch.manual_seed(0)
    report = Report("train", conditions(device=name, small_sizes=device.type != "cuda"), given.out, print)
    for preset in given.preset or PRESETS:
        report.add(measure(preset, given.steps, device))


if __name__ == "__main__":
    main()
