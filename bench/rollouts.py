"""Steps of GRPO with LoRA on one machine: samples a second, and what of it generation and training take.

    uv run python bench/rollouts.py [--preset llama3-8b] [--steps 5] [--group 8] [--prompts 8] [--length 256]

Random weights, which draw completions of the full length; bf16 on a GPU, and on a CPU a model of two layers. A reward
that reads token ids alone, in this process, so that neither texts nor workers are part of what is measured. The first
step, which tunes kernels, is left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from mt_core.config.loading import LoadedConfig, load_config
from mt_core.plugins import load_plugins
from mt_core.train.trainer import Trainer

REWARD = """
def low(completion_ids, **_):
    return [sum(token < 64000 for token in ids) / max(len(ids), 1) for ids in completion_ids]
"""
SMALL = ("num_layers=2", "hidden_size=64", "ffn_hidden_size=128", "num_attention_heads=4", "num_query_groups=2")


def configured(folder: Path, arguments: argparse.Namespace) -> LoadedConfig:
    """Full prompts and completions: half a prompt of `length` bytes before each completion of `length` tokens."""
    (folder / "low_tokens.py").write_text(REWARD)
    prompt = "0123456789" * (arguments.length // 10)
    records = [json.dumps({"prompt": f"{number:08d}{prompt}"}) for number in range(1024)]
    (folder / "prompts.jsonl").write_text("\n".join(records) + "\n")
    gpu = torch.cuda.is_available()
    keys = [
        *(() if gpu else (f"model.{key}" for key in SMALL)),
        f"precision.dtype={'bf16' if gpu else 'fp32'}",
        "data.dataset_type=prompts",
        f"data.data_path=[{json.dumps(str(folder / 'prompts.jsonl'))}]",
        'data.split="100,0,0"',
        f"data.seq_length={4 * arguments.length}",
        "data.prompt_format=text",
        "train.loss=policy",
        "train.batch_source=rollouts",
        "train.loss_normalization=tokens",
        f"train.global_batch_size={arguments.group * arguments.prompts}",
        f"train.micro_batch_size={arguments.micro}",
        "train.train_iters=1000",
        "train.eval_interval=null",
        "train.eval_iters=0",
        "train.sample_prompt=null",
        f"rl.group_size={arguments.group}",
        f"rl.max_completion_length={arguments.length}",
        "rl.patience=0",
        "rl.write_rollouts=false",
        f"rewards.modules=[{json.dumps(str(folder / 'low_tokens.py'))}]",
        'rewards.functions=["low_tokens:low"]',
        "rewards.workers=0",
        "adapter.type=lora",
        "checkpoint.save_interval=null",
        "optimizer.lr=1e-5",
        "logging.progress=none",
        *(f for f in arguments.set),
    ]
    return load_config(preset=arguments.preset, overrides=keys, host=load_plugins())


class StepTimes:
    """Seconds of generation (the source's next batch) and of training (a step), one after another."""

    def __init__(self, trainer: Trainer) -> None:
        trainer.model.train()
        self.trainer, self.batches = trainer, trainer.source.batches()

    def step(self) -> dict[str, float]:
        began = _now()
        batch = next(self.batches)
        drawn = _now()
        self.trainer.take_step(batch)
        return {"generation": drawn - began, "training": _now() - drawn}


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        steps = StepTimes(Trainer(configured(Path(name), arguments), run_dir=Path(name) / "run"))
        steps.step()
        measured = [steps.step() for _ in range(arguments.steps)]
    samples = arguments.group * arguments.prompts
    generation = statistics.median(step["generation"] for step in measured)
    training = statistics.median(step["training"] for step in measured)
    peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None
    return {
        "preset": arguments.preset,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "samples": samples,
        "completion_tokens": arguments.length,
        "samples_per_second": samples / (generation + training),
        "generated_tokens_per_second": samples * arguments.length / generation,
        "generation_s": generation,
        "training_s": training,
        "peak_gib": peak,
    }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="llama3-8b")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--group", type=int, default=8, help="Completions of a prompt.")
    parser.add_argument("--prompts", type=int, default=8, help="Prompts of a step.")
    parser.add_argument("--length", type=int, default=256, help="Tokens of a completion.")
    parser.add_argument("--micro", type=int, default=4, help="Completions of a micro-batch.")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--out", type=Path, help="JSON file that is written.")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    result = measure(arguments)
    json.dump(result, sys.stdout, indent=2)
    print()
    if arguments.out:
        arguments.out.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
