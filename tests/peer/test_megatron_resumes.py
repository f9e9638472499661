"""Runs that go from Megatron through mt and back: the next steps are those of the undisturbed run, with padding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.peer.cases import DATA, EXPERT, ONE_RANK, PIPELINE, TENSOR, Layout
from tests.peer.megatron import Megatron
from tests.peer.our_outputs import SEQUENCE, inputs_of, logits_of, token_losses

from mt_ckpt.convert import convert
from mt_ckpt.native.read import open_checkpoint
from mt_core.checkpoint_specs import ConvertOptions
from mt_core.plugins import PluginHost

VOCAB = 101
SHAPE = [
    "--hidden-size=32",
    "--num-attention-heads=4",
    "--max-position-embeddings=16",
    f"--vocab-size={VOCAB}",
    "--padded-vocab-size=128",
    "--lr=0.01",
]
LAYERS = ["--num-layers=4", f"--seq-length={SEQUENCE}"]
LLAMA = [
    *("--normalization=RMSNorm", "--swiglu", "--disable-bias-linear", "--position-embedding-type=rope"),
    *("--group-query-attention", "--num-query-groups=2", "--untie-embeddings-and-output-weights"),
    "--make-vocab-size-divisible-by=64",  # 128 rows on two ranks too
]
MODELS: dict[str, tuple[str, list[str]]] = {
    "gpt": ("gpt", [*LAYERS, *SHAPE]),
    "llama": ("gpt", [*LAYERS, *SHAPE, *LLAMA]),
    "mup": ("gpt", [*LAYERS, *SHAPE, "--use-mup", "--mup-base-hidden-size=8"]),
    "bert": ("bert", [*LAYERS, *SHAPE]),
    "mixtral": ("gpt", [*LAYERS, *SHAPE, *LLAMA, "--num-experts=4", "--moe-ffn-hidden-size=24"]),
}
BATCH = ["--global-batch-size=4"]
RESHARDABLE = ["--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable"]
BF16 = ["--bf16"]
NEXT_STEPS, FIRST_STEPS = 3, 3


def train(
    megatron: Megatron, name: str, layout: Layout, arguments: list[str], num_steps: int, **more: Any
) -> list[float]:
    family, _ = MODELS[name]
    answer = megatron.ask(
        family,
        world_size=layout.world_size,
        arguments=[*arguments, *BATCH, *layout.arguments],
        inputs=inputs_of(family, VOCAB),
        num_steps=num_steps,
        **more,
    )
    return answer.step_losses


ROUND_TRIPS = {
    "gpt torch_dist": ("gpt", ONE_RANK, "torch_dist"),
    "gpt torch": ("gpt", ONE_RANK, "torch"),
    "bert torch_dist": ("bert", ONE_RANK, "torch_dist"),
    "bert torch": ("bert", ONE_RANK, "torch"),
    "llama torch_dist, tensor": ("llama", TENSOR, "torch_dist"),
    "llama torch, tensor": ("llama", TENSOR, "torch"),
    "mixtral torch_dist": ("mixtral", ONE_RANK, "torch_dist"),
    "mup torch_dist": ("mup", ONE_RANK, "torch_dist"),
    "mup torch": ("mup", ONE_RANK, "torch"),
    "gpt torch_dist, data": ("gpt", DATA, "torch_dist"),
}
WITHOUT_DISTRIBUTED = {
    "gpt": ("gpt", ONE_RANK, []),
    "mup": ("mup", ONE_RANK, []),
    "gpt, 16 bits": ("gpt", ONE_RANK, BF16),
    "bert": ("bert", ONE_RANK, []),
    "llama, tensor": ("llama", TENSOR, []),
    "llama, pipeline, 16 bits": ("llama", PIPELINE, BF16),
    "gpt, data": ("gpt", DATA, []),
    "mixtral": ("mixtral", ONE_RANK, []),
    "mixtral, expert": ("mixtral", EXPERT, []),
    "mixtral, expert, 16 bits": ("mixtral", EXPERT, BF16),
}


@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_the_next_steps_are_those_of_the_undisturbed_run(
    megatron: Megatron, host: PluginHost, tmp_path: Path, name: str
) -> None:
    model, layout, ckpt_format = ROUND_TRIPS[name]
    optimizer = RESHARDABLE if ckpt_format == "torch_dist" else []
    made = [*MODELS[model][1], *optimizer]
    undisturbed = train(megatron, model, layout, made, FIRST_STEPS + NEXT_STEPS)
    train(megatron, model, layout, made, FIRST_STEPS, save=tmp_path / "run", save_format=ckpt_format)
    convert(tmp_path / "run", tmp_path / "mt", saver="mt", host=host)
    saver = "megatron-dist" if ckpt_format == "torch_dist" else "megatron"
    options = ConvertOptions(**{f"target_{axis}": size for axis, size in layout.options.items()})
    convert(tmp_path / "mt", tmp_path / "back", saver=saver, options=options, host=host)
    resumed = resume(megatron, model, layout, optimizer, tmp_path / "back", ckpt_format)
    torch.testing.assert_close(resumed, undisturbed[FIRST_STEPS:], rtol=0, atol=1e-5)


def resume(
    megatron: Megatron, model: str, layout: Layout, arguments: list[str], path: Path, ckpt_format: str, **more: Any
) -> list[float]:
    """Losses of the next steps."""
    arguments = [*arguments, "--lr=0.01"]
    files = {"load": path, "load_format": ckpt_format, "load_optimizer": True}
    return train(megatron, model, layout, arguments, NEXT_STEPS, **files, **more)


@pytest.mark.parametrize("name", WITHOUT_DISTRIBUTED)
def test_a_plain_optimizer_continues_in_torch_dist(
    megatron: Megatron, host: PluginHost, tmp_path: Path, name: str
) -> None:
    """Without --use-distributed-optimizer; what Megatron saves of the resumed run is read again."""
    model, layout, arguments = WITHOUT_DISTRIBUTED[name]
    made = [*MODELS[model][1], *arguments]
    undisturbed = train(megatron, model, layout, made, FIRST_STEPS + NEXT_STEPS)
    train(megatron, model, layout, made, FIRST_STEPS, save=tmp_path / "run")
    convert(tmp_path / "run", tmp_path / "mt", saver="mt", host=host)
    options = ConvertOptions(**{f"target_{axis}": size for axis, size in layout.options.items()})
    convert(tmp_path / "mt", tmp_path / "back", saver="megatron-dist", options=options, host=host)
    resumed = resume(megatron, model, layout, arguments, tmp_path / "back", "torch_dist", save=tmp_path / "again")
    torch.testing.assert_close(resumed, undisturbed[FIRST_STEPS:], rtol=0, atol=1e-5)
    convert(tmp_path / "again", tmp_path / "mt again", saver="mt", host=host)
    reader = open_checkpoint(tmp_path / "mt again")
    steps = {float(reader.read(tensor)) for tensor in reader.shapes() if tensor.startswith("optimizer.step.")}
    assert steps == {FIRST_STEPS + NEXT_STEPS}


@pytest.mark.parametrize("ckpt_format", ["torch", "torch_dist"])
@pytest.mark.parametrize("model", MODELS)
def test_we_compute_what_megatron_does_from_its_files(
    megatron: Megatron, host: PluginHost, tmp_path: Path, model: str, ckpt_format: str
) -> None:
    """Logits, and the loss over all rows of its tables with --true-vocab-size counted as ids."""
    family, arguments = MODELS[model]
    inputs = inputs_of(family, VOCAB)
    answer = megatron.ask(
        family,
        arguments=[*arguments, *BATCH],
        inputs=inputs,
        num_steps=0,
        save=tmp_path / "run",
        save_format=ckpt_format,
    )
    convert(tmp_path / "run", tmp_path / "mt", saver="mt", host=host)
    logits = logits_of(open_checkpoint(tmp_path / "mt"), inputs, host)
    torch.testing.assert_close(logits, answer.logits[..., :VOCAB], rtol=0, atol=5e-6)
    convert(tmp_path / "run", tmp_path / "wide", saver="mt", true_vocab_size=128, host=host)
    wide = logits_of(open_checkpoint(tmp_path / "wide"), inputs, host)
    torch.testing.assert_close(wide, answer.logits, rtol=0, atol=5e-6)
    losses = token_losses(wide, inputs["labels"])
    torch.testing.assert_close(losses, answer.token_losses.double(), rtol=0, atol=1e-5)
