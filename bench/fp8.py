"""Loss of a small GPT in FP8 against bf16 over 200 steps, by recipe, on CPU by emulation (or on a GPU).

    uv run python bench/fp8.py [--steps 200] [--dtype bf16] [--recipes tensorwise delayed rowwise blockwise mxfp8 nvfp4]
        [--out curves.json]

All runs start from the same weights and see the same samples. Printed: the validation loss at the end and the mean
training loss of the last 20 steps, and how far each is from the run without FP8. nvfp4 is also run without each of its
parts, and with the last layer in bf16. --out: the loss of every step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Mapping
from pathlib import Path

import torch

from mt_core.config.loading import load_config
from mt_core.plugins import PluginHost, load_plugins
from mt_core.train import Callback, Trainer
from mt_core.train.callbacks import Metrics, Run
from mt_tools.bench.report import as_line, conditions

SETTINGS = (
    "model.num_layers=2",
    "model.hidden_size=128",
    "model.num_attention_heads=4",
    "model.ffn_hidden_size=384",
    "data.seq_length=64",
    "data.num_workers=0",
    "train.micro_batch_size=8",
    "train.eval_interval=null",
    "train.eval_iters=8",
    "train.sample_prompt=null",
    "train.num_threads=1",
    "checkpoint.save_interval=null",
    "lr_schedule.lr_warmup_iters=20",
    "optimizer.lr=5e-4",
    "logging.progress=none",
)
LAST = 20
"""Steps whose training losses are averaged."""


class Losses(Callback):
    def __init__(self) -> None:
        self.values: list[float] = []

    def on_step_end(self, run: Run, metrics: Metrics) -> None:
        self.values.append(float(metrics["loss"]))


VARIANTS: Mapping[str, tuple[str, ...]] = {
    "nvfp4, last layer in bf16": ("precision.first_last_layers_bf16=true", "precision.num_layers_at_start_in_bf16=0"),
    "nvfp4, gradients to nearest": ("precision.fp4_stochastic_rounding=false",),
    "nvfp4, no Hadamard transform": ("precision.fp4_hadamard=false",),
    "nvfp4, weights in rows": ("precision.fp4_square_weight_blocks=false",),
}
"""Of the recipe nvfp4."""


def settings_of(name: str, fp8_format: str) -> list[str]:
    """name: a recipe, or one of VARIANTS."""
    recipe = name.split(",")[0]
    found = [f"precision.fp8_format={'e2m1' if recipe == 'nvfp4' else fp8_format}", f"precision.fp8_recipe={recipe}"]
    return [*found, "precision.fp8_min_features=1", *VARIANTS.get(name, ())]


def losses_of(settings: list[str], host: PluginHost, losses: Losses | None = None) -> tuple[float, float]:
    """Validation loss at the end, mean training loss of the last steps."""
    losses = losses or Losses()
    trainer = Trainer(load_config(preset="gpt-tiny", overrides=settings, host=host), host=host, callbacks=[losses])
    result = trainer.train()
    return result.losses["valid_loss"], statistics.mean(losses.values[-LAST:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--format", choices=("hybrid", "e4m3"), default="hybrid")
    recipes = ["tensorwise", "delayed", "rowwise", "blockwise", "mxfp8", "nvfp4", *VARIANTS]
    parser.add_argument("--recipes", nargs="+", default=recipes)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    host = load_plugins()
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu, FP8 emulated"
    print(as_line(conditions(torch=torch.__version__, device=device, steps=options.steps)))
    common = [*SETTINGS, f"train.train_iters={options.steps}", f"precision.dtype={options.dtype}"]
    reference: tuple[float, float] | None = None
    curves: dict[str, list[float]] = {}
    for recipe in [None, *options.recipes]:
        fp8 = settings_of(recipe, options.format) if recipe else []
        started, losses = time.perf_counter(), Losses()
        found = losses_of([*common, *fp8], host, losses)
        curves[recipe or options.dtype] = [round(loss, 4) for loss in losses.values]
        reference = reference or found
        off = [f"{mine / theirs - 1:+.3%}" for mine, theirs in zip(found, reference, strict=True)]
        seconds = time.perf_counter() - started
        print(
            f"{recipe or options.dtype:>28}: valid {found[0]:.4f} ({off[0]}), train {found[1]:.4f} ({off[1]}), "
            f"{seconds:.0f} s",
            flush=True,
        )
    if options.out:
        options.out.write_text(json.dumps(curves))


if __name__ == "__main__":
    main()
