"""Calibration beside llm-compressor: the same model, texts, scheme and reader.

    python bench/calibration.py texts FOLDER
    mt calibrate MODEL --out OUT --scheme w4a16-g64 --text FOLDER/calibrate.txt --eval-text FOLDER/evaluate.txt \
        --samples 32 --eval-samples 16 --seq-length 256
    python bench/calibration.py peer MODEL FOLDER gptq OUT-PEER
    python bench/calibration.py measure MODEL FOLDER OUT OUT-PEER

`peer` and `measure` run in an environment with llmcompressor and transformers. The texts are the two halves of the
topics of Python's own help (pydoc_data). `measure` has transformers compute the cross-entropy of 16 x 255 tokens, and
the divergence from MODEL. Groups have 64 columns: 128 do not divide the 576 of SmolLM2-135M.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

LENGTH, SAMPLES, MEASURED, GROUP = 256, 32, 16, 64
METHODS = ("nearest", "gptq", "gptq-mse", "awq", "int8", "int8-smoothquant")


def write_texts(folder: Path) -> None:
    from pydoc_data.topics import topics

    text = "\n".join(topics[name] for name in sorted(topics))
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("calibrate", text[: len(text) // 2]), ("evaluate", text[len(text) // 2 :])):
        (folder / f"{name}.txt").write_text(part, encoding="utf-8")


def ids_of(model: Path, file: Path, number: int) -> Tensor:
    """[number, LENGTH]"""
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(model)(file.read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"]
    return torch.tensor(ids[: number * LENGTH]).view(number, LENGTH)


def recipe(method: str) -> Any:
    from llmcompressor.modifiers.awq import AWQModifier
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.smoothquant import SmoothQuantModifier

    weights = {"num_bits": 4, "type": "int", "symmetric": method != "awq", "strategy": "group", "group_size": GROUP}
    if method == "gptq-mse":
        weights["observer"] = "memoryless_mse"
    groups = {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}, "ignore": ["lm_head"]}
    int8 = {"targets": "Linear", "scheme": "W8A8", "ignore": ["lm_head"]}
    recipes = {
        "nearest": lambda: QuantizationModifier(**groups),
        "gptq": lambda: GPTQModifier(**groups),
        "gptq-mse": lambda: GPTQModifier(**groups),
        "awq": lambda: AWQModifier(**groups),
        "int8": lambda: GPTQModifier(**int8),
        "int8-smoothquant": lambda: [SmoothQuantModifier(smoothing_strength=0.5), GPTQModifier(**int8)],
    }
    return recipes[method]()


def run_peer(model: Path, folder: Path, method: str, out: Path) -> None:
    from datasets import Dataset
    from llmcompressor import oneshot
    from transformers import AutoModelForCausalLM

    # It pins memory, also where no GPU is.
    torch.Tensor.pin_memory = lambda self, *rest: self  # type: ignore[method-assign]
    ids = ids_of(model, folder / "calibrate.txt", SAMPLES).tolist()
    data = Dataset.from_dict({"input_ids": ids, "attention_mask": [[1] * LENGTH] * SAMPLES})
    started = time.perf_counter()
    oneshot(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        dataset=data,
        recipe=recipe(method),
        max_seq_length=LENGTH,
        num_calibration_samples=SAMPLES,
        output_dir=out,
        shuffle_calibration_samples=False,
    )
    print(f"{out}: {time.perf_counter() - started:.0f} s")


@torch.no_grad()
def log_probabilities(folder: Path, ids: Tensor) -> Iterator[Tensor]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for row in ids:
        yield torch.log_softmax(model(row[None]).logits[0, :-1].double(), -1)


def measure(model: Path, folder: Path, results: list[Path]) -> None:
    ids = ids_of(model, folder / "evaluate.txt", MEASURED)
    for result in (model, *results):
        loss, divergence = 0.0, 0.0
        for row, first, second in zip(ids, log_probabilities(model, ids), log_probabilities(result, ids), strict=True):
            loss -= second.gather(1, row[1:, None]).sum().item()
            divergence += (first.exp() * (first - second)).sum().item()
        tokens = MEASURED * (LENGTH - 1)
        print(f"{result}: cross-entropy {loss / tokens:.5f}, KL {divergence / tokens:.5f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("texts").add_argument("folder", type=Path)
    peer, measured = commands.add_parser("peer"), commands.add_parser("measure")
    for command in (peer, measured):
        command.add_argument("model", type=Path)
        command.add_argument("folder", type=Path)
    peer.add_argument("method", choices=METHODS)
    peer.add_argument("out", type=Path)
    measured.add_argument("results", type=Path, nargs="+")
    options = parser.parse_args()
    if options.command == "texts":
        write_texts(options.folder)
    elif options.command == "peer":
        run_peer(options.model, options.folder, options.method, options.out)
    else:
        measure(options.model, options.folder, options.results)


if __name__ == "__main__":
    main()
