"""Converting a Hugging Face checkpoint, against `cp` of the same files.

    python bench/convert.py [--layers 8] [--rounds 5] [--nproc N] [--fp8] [--folder DIR]

The source is a Llama in bf16 with random weights (hidden 2048, feed-forward 5632, vocabulary 32000, 16 heads, 4
key-value heads), cut into shards of 500 MB. In every round each method writes the same weights to new files on the
same disk, in an order that changes from round to round; every file and directory is fsynced within the time of each
(`cp`, and then fsync of what it wrote; `mt convert` has the disk begin while it works). The source is in the page cache
for all of them. The table gives the median time, the median over the rounds of the rate relative to that of `cp` in the
same round with the lowest and the highest, and the median of the processor time (user and system) that was used.
With --fp8 a copy in FP8 blocks is dequantized to bf16, beside `cp` of the bf16 files, as many bytes as it writes.
With --nproc the two conversions to other formats are also done by that many processes, whose start is counted.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from mt_ckpt.convert import convert
from mt_ckpt.files.safetensors import TensorInfo, split_by_size, write_safetensors
from mt_core.checkpoint_specs import ConvertOptions
from mt_core.plugins import PluginHost, load_plugins
from mt_tools.bench.report import as_line, conditions

HIDDEN, FFN, VOCAB, HEADS, GROUPS = 2048, 5632, 32_000, 16, 4
SHARD_BYTES = 500 * 10**6


def write_source(folder: Path, layers: int) -> None:
    keys = HIDDEN // HEADS * GROUPS
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    for i in range(layers):
        parts = {"self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (keys, HIDDEN)}
        parts |= {"self_attn.v_proj": (keys, HIDDEN), "self_attn.o_proj": (HIDDEN, HIDDEN)}
        parts |= {"mlp.gate_proj": (FFN, HIDDEN), "mlp.up_proj": (FFN, HIDDEN), "mlp.down_proj": (HIDDEN, FFN)}
        norms = {"input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,)}
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in {**parts, **norms}.items()}
    shapes |= {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCAB, HIDDEN)}
    places: dict[str, str] = {}
    infos = {name: TensorInfo(shape, torch.bfloat16) for name, shape in shapes.items()}
    for number, group in enumerate(split_by_size(infos, SHARD_BYTES)):
        file = f"model-{number:05d}.safetensors"
        write_safetensors(folder / file, group, (torch.randn(info.shape).to(info.dtype) for info in group.values()))
        places |= dict.fromkeys(group, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    config = {"model_type": "llama", "vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": layers}
    config |= {"num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "intermediate_size": FFN}
    (folder / "config.json").write_text(json.dumps(config))


def copy(source: Path, target: Path) -> None:
    subprocess.run(["cp", "-r", source, target], check=True)
    for file in [target, *target.iterdir()]:
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


@dataclass(frozen=True)
class Cost:
    """Seconds on the clock, and of processors."""

    elapsed: float
    processor: float


def methods(
    hf: Path, mt: Path, host: PluginHost, nproc: int, fp8: Path | None = None
) -> dict[str, Callable[[Path], object]]:
    """Each writes the weights to the directory that it is given."""
    if fp8 is not None:
        return {
            "cp": lambda target: copy(hf, target),
            "fp8 to hf": lambda target: convert(fp8, target, saver="hf", host=host),
            "fp8 to mt": lambda target: convert(fp8, target, saver="mt", host=host),
            **(
                {f"fp8 to hf, {nproc}": lambda target: convert(fp8, target, saver="hf", host=host, nproc=nproc)}
                if nproc > 1
                else {}
            ),
        }
    several: dict[str, Callable[[Path], object]] = {
        f"hf to mt, {nproc}": lambda target: convert(hf, target, saver="mt", host=host, nproc=nproc),
        f"mt to hf, {nproc}": lambda target: convert(mt, target, saver="hf", host=host, nproc=nproc),
    }
    return {
        "cp": lambda target: copy(hf, target),
        "hf to mt": lambda target: convert(hf, target, saver="mt", host=host),
        "mt to hf": lambda target: convert(mt, target, saver="hf", host=host),
        "hf to hf": lambda target: convert(hf, target, saver="hf", host=host),
        **(several if nproc > 1 else {}),
    }


def cost(method: Callable[[Path], object], target: Path) -> Cost:
    start, used = time.perf_counter(), sum(os.times()[:4])
    method(target)
    spent = Cost(time.perf_counter() - start, sum(os.times()[:4]) - used)
    shutil.rmtree(target)
    return spent


def report(num_bytes: int, costs: Mapping[str, list[Cost]]) -> None:
    print(f"\n{'method':12} {'median s':>9} {'MiB/s':>7} {'rate / cp':>10} {'lowest':>7} {'highest':>8} {'CPU s':>6}")
    for name, spent in costs.items():
        ratios = [cp.elapsed / own.elapsed for cp, own in zip(costs["cp"], spent, strict=True)]
        median = statistics.median(own.elapsed for own in spent)
        processor = statistics.median(own.processor for own in spent)
        rates = f"{statistics.median(ratios):10.2f} {min(ratios):7.2f} {max(ratios):8.2f}"
        print(f"{name:12} {median:9.2f} {num_bytes / 2**20 / median:7.0f} {rates} {processor:6.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--layers", type=int, default=8, help="102 MB each, and 262 MB for the rest")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="on the disk to measure (default: the temporary directory)")
    parser.add_argument("--fp8", action="store_true", help="dequantize FP8 instead")
    parser.add_argument("--nproc", type=int, default=1, help="also convert with so many processes")
    options = parser.parse_args()
    host = load_plugins()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        source, native = Path(folder) / "source", Path(folder) / "native"
        source.mkdir()
        write_source(source, options.layers)
        convert(source, native, saver="mt", host=host)
        fp8 = Path(folder) / "fp8" if options.fp8 else None
        if fp8 is not None:
            convert(source, fp8, saver="hf", options=ConvertOptions(quantize="fp8-blocks"), host=host)
        chosen = methods(source, native, host, options.nproc, fp8)
        num_bytes = sum(file.stat().st_size for file in source.iterdir())
        print(f"{num_bytes / 2**20:.0f} MiB in bf16, {options.rounds} rounds after one to warm up, all fsynced")
        print(as_line(conditions(torch=torch.__version__)))
        costs: dict[str, list[Cost]] = {name: [] for name in chosen}
        for number in range(options.rounds + 1):
            order = list(chosen)[number % len(chosen) :] + list(chosen)[: number % len(chosen)]
            for name in order:
                spent = cost(chosen[name], Path(folder) / "target")
                if number:
                    costs[name].append(spent)
        print(f"load of the machine at the end: {os.getloadavg()[0]:.1f}")
    report(num_bytes, costs)


if __name__ == "__main__":
    main()
