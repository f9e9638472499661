"""Megatron loads what we write, strictly, and computes our logits and our loss from it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from tests.ckpt.scaled_weights import ScaledWeights
from tests.peer.cases import CASES, EXPERT, INTERLEAVED, ONE_RANK, PIPELINE, TENSOR, Case, Layout
from tests.peer.megatron import Answer, Megatron
from tests.peer.our_outputs import SEQUENCE, inputs_of, logits_of, token_losses

from mt_core.checkpoint_specs import CHECKPOINT_SAVERS, ConvertOptions
from mt_core.plugins import PluginHost

FORMATS = {"megatron": "torch", "megatron-dist": "torch_dist"}
SAVERS = list(FORMATS)
LOSS = 1e-4


def ask(
    megatron: Megatron,
    host: PluginHost,
    path: Path,
    case: Case,
    layout: Layout,
    saver: str,
    source: ScaledWeights,
    *,
    double: bool = False,
) -> Answer:
    options = ConvertOptions(**{f"target_{name}": size for name, size in layout.options.items()})
    host[CHECKPOINT_SAVERS].get(saver).convert.load()(path, source, options, host)
    return megatron.ask(
        case.family,
        world_size=layout.world_size,
        arguments=[*layout.arguments, f"--seq-length={SEQUENCE}"],
        load=path,
        load_format=FORMATS[saver],
        inputs=inputs_of(case.model["family"], case.model["vocab_size"]),
        double=double,
    )


def check(
    answer: Answer, case: Case, source: ScaledWeights, host: PluginHost, *, tolerance: float | None = None
) -> None:
    """In the dtype of the answer."""
    vocab_size = case.model["vocab_size"]
    inputs = inputs_of(case.model["family"], vocab_size)
    double = answer.logits.dtype == torch.float64
    ours = logits_of(source, inputs, host, double=double)
    atol = tolerance or (case.tolerance if double else case.tolerance_fp32)
    torch.testing.assert_close(answer.logits[..., :vocab_size], ours, rtol=0, atol=atol)
    losses = token_losses(ours, inputs["labels"])
    excess = answer.token_losses - losses
    assert answer.padded_vocab_size > vocab_size
    assert excess.min() > -LOSS
    if case.exact:
        assert excess.max() < LOSS
    else:
        mean = ours.double().mean(-1) + math.log(answer.padded_vocab_size - vocab_size)
        predicted = torch.logaddexp(ours.double().logsumexp(-1), mean) - ours.double().logsumexp(-1)
        torch.testing.assert_close(excess.double(), predicted, rtol=0, atol=LOSS)
        assert excess.max() < math.log(answer.padded_vocab_size / vocab_size) + LOSS


@pytest.mark.parametrize("saver", SAVERS)
@pytest.mark.parametrize("name", CASES)
def test_every_family(megatron: Megatron, host: PluginHost, tmp_path: Path, name: str, saver: str) -> None:
    """In fp64: what is left is not the order of summation."""
    case = CASES[name]
    source = ScaledWeights(case.model, host, arguments={"transformer_impl": case.transformer_impl})
    check(ask(megatron, host, tmp_path / "run", case, ONE_RANK, saver, source, double=True), case, source, host)


@pytest.mark.parametrize("name", ["hybrid", "gpt"])
def test_both_are_within_rounding_of_fp64(megatron: Megatron, host: PluginHost, tmp_path: Path, name: str) -> None:
    """Of a hybrid, fp32 weights that are moved by half an ulp move logits by up to 7e-6; mt, which scans in chunks, is
    as near to fp64 as Megatron's layers with a scan position by position."""
    case, asked = CASES[name], {}
    source = ScaledWeights(case.model, host, arguments={"transformer_impl": case.transformer_impl})
    for double in (True, False):
        path = tmp_path / str(double)
        asked[double] = ask(megatron, host, path, case, ONE_RANK, "megatron", source, double=double).logits[..., :101]
    ours = logits_of(source, inputs_of(case.model["family"], 101), host)
    largest = case.tolerance_fp32
    for found in (ours, asked[False]):
        difference = found - asked[True]
        assert difference.abs().max() < largest
        assert difference.square().mean().sqrt() < largest / 5


LAYOUTS = {
    "tensor gpt": ("gpt", TENSOR),
    "tensor llama": ("llama", TENSOR),
    "tensor bert": ("bert", TENSOR),
    "pipeline gpt": ("gpt", PIPELINE),
    "pipeline bert": ("bert", PIPELINE),
    "interleaved llama": ("llama", INTERLEAVED),
    "expert mixtral": ("mixtral", EXPERT),
}


@pytest.mark.parametrize("saver", SAVERS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout(megatron: Megatron, host: PluginHost, tmp_path: Path, name: str, saver: str) -> None:
    model, layout = LAYOUTS[name]
    source = ScaledWeights(CASES[model].model, host)
    # In fp64, since in fp32 how far sums differ depends on the processor; Megatron's pipelines send fp32 only.
    double = layout not in (PIPELINE, INTERLEAVED)
    answer = ask(megatron, host, tmp_path / "run", CASES[model], layout, saver, source, double=double)
    check(answer, CASES[model], source, host)


@pytest.mark.parametrize("offset", [-35.0, 35.0])
@pytest.mark.parametrize("name", ["gpt", "gpt untied"])
def test_logits_far_from_zero(megatron: Megatron, host: PluginHost, tmp_path: Path, name: str, offset: float) -> None:
    """As the real GPT-2's, whose logits are near -35: rows of zeros made the loss 36.7 instead of 8."""
    source = ScaledWeights(CASES[name].model, host, logit_offset=offset)
    answer = ask(megatron, host, tmp_path / "run", CASES[name], ONE_RANK, "megatron-dist", source)
    check(answer, CASES[name], source, host, tolerance=5e-5)


def test_no_padding_no_excess(megatron: Megatron, host: PluginHost, tmp_path: Path) -> None:
    """Without a norm with a bias only that makes the loss the same."""
    source = ScaledWeights({**CASES["llama"].model, "vocab_size": 128}, host)
    inputs = inputs_of("llama", 128)
    host[CHECKPOINT_SAVERS].get("megatron-dist").convert.load()(tmp_path / "run", source, ConvertOptions(), host)
    answer = megatron.ask("gpt", load=tmp_path / "run", arguments=[f"--seq-length={SEQUENCE}"], inputs=inputs)
    expected = token_losses(logits_of(source, inputs, host), inputs["labels"])
    torch.testing.assert_close(answer.token_losses.double(), expected, rtol=0, atol=LOSS)
