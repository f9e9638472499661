"""Rows of padding in Megatron's tables: what its softmax, which counts them, makes of the loss."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ckpt.megatron.conftest import GPT, LLAMA, MODELS, RandomCheckpoint
from tests.ckpt.scaled_weights import ScaledWeights
from tests.ckpt.test_convert_command import run_convert
from torch import Tensor
from torch.nn import functional as F

from mt_ckpt.convert import convert
from mt_ckpt.megatron.reader import open_checkpoint
from mt_ckpt.native.read import open_checkpoint as open_native
from mt_core.checkpoint_specs import CHECKPOINT_LOADERS, CHECKPOINT_SAVERS, CheckpointReader, ConvertOptions
from mt_core.errors import CheckpointError, ConfigError
from mt_core.plugins import PluginHost

TABLE, BIAS = "model.embedding.word_embeddings.weight", "model.output_layer.bias"
UNTIED = {**GPT, "untie_embeddings_and_output_weights": True}
VOCAB, ROWS = GPT["vocab_size"], 128


def through(
    source: CheckpointReader, path: Path, host: PluginHost, saver: str = "megatron", **options: Any
) -> CheckpointReader:
    host[CHECKPOINT_SAVERS].get(saver).convert.load()(path, source, ConvertOptions(**options), host)
    return host[CHECKPOINT_LOADERS].get(saver).open.load()(path, host)


def layer_norm_outputs(source: CheckpointReader, dtype: torch.dtype = torch.float32) -> Tensor:
    """Hidden states [1000, hidden] as only a final LayerNorm restricts them."""
    weight, bias = (source.read(f"model.decoder.final_layernorm.{kind}").float() for kind in ("weight", "bias"))
    x = torch.randn(1000, len(weight), generator=torch.Generator().manual_seed(3))
    return F.layer_norm(x, (len(weight),), weight, bias).to(dtype)


def excess(hidden: Tensor, table: Tensor, padding: Tensor) -> Tensor:
    """By how much rows of padding raise the loss: the logarithm of what they add to the sum of exp."""
    logits, low = hidden.float() @ table.float().T, hidden.float() @ padding.float().T
    return torch.cat([logits, low], dim=1).logsumexp(1) - logits.logsumexp(1)


@pytest.mark.parametrize("saver", ["megatron", "megatron-dist"])
@pytest.mark.parametrize("model", [GPT, UNTIED], ids=["tied", "untied"])
@pytest.mark.parametrize("offset", [-35.0, 0.0, 35.0])
def test_a_padded_softmax_gives_the_loss_of_the_model(
    host: PluginHost, tmp_path: Path, saver: str, model: dict[str, Any], offset: float
) -> None:
    """Logits of GPT-2 are near -35, and a row of zeros has the logit 0."""
    source = ScaledWeights(model, host, logit_offset=offset)
    written = through(source, tmp_path / "run", host, saver)
    head = "model.output_layer.weight" if model is UNTIED else TABLE
    padding = written.read(f"padding.{head}")
    assert padding.shape == (ROWS - VOCAB, 32)
    assert excess(layer_norm_outputs(source), source.read(head), padding).max() < 1e-5


def test_in_16_bits_too(host: PluginHost, tmp_path: Path) -> None:
    source = ScaledWeights(GPT, host, logit_offset=-35.0)
    source.tensors = {name: tensor.bfloat16() for name, tensor in source.tensors.items()}
    padding = through(source, tmp_path / "run", host).read(f"padding.{TABLE}")
    assert padding.dtype == torch.bfloat16
    hidden = layer_norm_outputs(source, torch.bfloat16)
    assert excess(hidden, source.read(TABLE), padding).max() < 1e-5


@pytest.mark.parametrize("family", ["bert", "t5"])
def test_an_output_bias_keeps_padding_out(host: PluginHost, tmp_path: Path, family: str) -> None:
    written = through(ScaledWeights(MODELS[family], host), tmp_path / "run", host)
    assert written.read(f"padding.{BIAS}").tolist() == [-1e4] * (ROWS - VOCAB)
    assert not written.read(f"padding.{TABLE}").any()


def test_without_a_bias_padding_adds_no_more_than_its_part(host: PluginHost, tmp_path: Path) -> None:
    """RMSNorm and no bias: a mean row adds at most log(rows / vocabulary), whatever the hidden state is."""
    source = ScaledWeights(LLAMA, host)
    head = "model.output_layer.weight"
    padding = through(source, tmp_path / "run", host).read(f"padding.{head}")
    torch.testing.assert_close(padding, source.read(head).mean(0).expand_as(padding))
    hidden = 3 * torch.randn(1000, 32, generator=torch.Generator().manual_seed(3))
    assert excess(hidden, source.read(head), padding).max() <= math.log(ROWS / VOCAB)


def test_a_norm_without_its_bias_at_work_gets_the_mean(host: PluginHost, tmp_path: Path) -> None:
    """As at the beginning of training: biases are zero, and no row is low for all hidden states."""
    source = ScaledWeights(GPT, host)
    source.tensors["model.decoder.final_layernorm.bias"].zero_()
    padding = through(source, tmp_path / "run", host).read(f"padding.{TABLE}")
    torch.testing.assert_close(padding, source.read(TABLE).mean(0).expand_as(padding))


POLICIES = {
    "zero": torch.zeros_like,
    "repeat-last": lambda table: table[-1:].expand_as(table),
    "mean": lambda table: table.mean(0).expand_as(table),
}


@pytest.mark.parametrize("policy", POLICIES)
def test_rows_that_are_requested(host: PluginHost, tmp_path: Path, policy: str) -> None:
    source = RandomCheckpoint(GPT, host, optimizer=True)
    written = through(source, tmp_path / "run", host, vocab_padding=policy)
    expected = POLICIES[policy](source.read(TABLE))[: ROWS - VOCAB]
    torch.testing.assert_close(written.read(f"padding.{TABLE}"), expected)
    assert not written.read("padding.optimizer.exp_avg.embedding.word_embeddings.weight").any()


@pytest.mark.parametrize("saver", ["megatron", "megatron-dist"])
def test_fp32_copies_of_made_rows_are_the_rows(host: PluginHost, tmp_path: Path, saver: str) -> None:
    """The mean of fp32 copies is another number than the mean of the 16-bit weights."""
    source = RandomCheckpoint(LLAMA, host, dtype=torch.bfloat16, optimizer=True)
    written = through(source, tmp_path / "run", host, saver)
    rows = written.read(f"padding.{TABLE}")
    assert torch.equal(written.read("padding.optimizer.main.embedding.word_embeddings.weight"), rows.float())


def test_low_rows_of_a_model_that_cannot_have_them(host: PluginHost, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="minus-inf-like: no row of this model has a low logit .*; use mean"):
        through(ScaledWeights(LLAMA, host), tmp_path / "run", host, vocab_padding="minus-inf-like")


# -- trained rows ---------------------------------------------------------------------------------------


def trained(model: dict[str, Any], host: PluginHost) -> RandomCheckpoint:
    """A run whose rows of padding were trained, with their moments."""
    source = RandomCheckpoint(model, host, optimizer=True)
    generator = torch.Generator().manual_seed(5)
    for name, tensor in list(source.tensors.items()):
        if tensor.ndim and len(tensor) == VOCAB:
            source.tensors[f"padding.{name}"] = torch.randn(ROWS - VOCAB, *tensor.shape[1:], generator=generator)
    return source


def padding_of(reader: CheckpointReader) -> dict[str, Tensor]:
    return {name: reader.read(name) for name in reader.shapes() if name.startswith("padding.")}


@pytest.mark.slow
@pytest.mark.parametrize("saver", ["megatron", "megatron-dist"])
@pytest.mark.parametrize("family", ["gpt", "bert", "t5", "llama"])
def test_trained_rows_and_their_moments_are_kept(host: PluginHost, tmp_path: Path, saver: str, family: str) -> None:
    """Megatron -> mt -> Megatron, bit for bit."""
    source = trained(MODELS[family], host)
    expected = padding_of(source)
    assert len(expected) == (6 if family != "gpt" else 3)
    first = through(source, tmp_path / "first", host, saver)
    torch.testing.assert_close(padding_of(first), expected, rtol=0, atol=0)
    convert(tmp_path / "first", tmp_path / "mt", saver="mt", host=host)
    torch.testing.assert_close(padding_of(open_native(tmp_path / "mt")), expected, rtol=0, atol=0)
    convert(tmp_path / "mt", tmp_path / "second", saver=saver, host=host)
    second = host[CHECKPOINT_LOADERS].get(saver).open.load()(tmp_path / "second", host)
    torch.testing.assert_close(padding_of(second), expected, rtol=0, atol=0)


def test_more_rows_than_the_source_has_are_made(host: PluginHost, tmp_path: Path) -> None:
    source = trained(MODELS["bert"], host)
    written = through(source, tmp_path / "run", host, target_tensor_parallel_size=2)
    bias = written.read(f"padding.{BIAS}")
    assert torch.equal(bias[: ROWS - VOCAB], source.read(f"padding.{BIAS}"))
    assert bias[ROWS - VOCAB :].tolist() == [-1e4] * ROWS


def test_the_number_of_ids_may_be_given(host: PluginHost, tmp_path: Path) -> None:
    """A run with a tokenizer of its own does not say how many of the rows are ids."""
    source = RandomCheckpoint({**GPT, "vocab_size": ROWS}, host)
    through(source, tmp_path / "run", host)
    convert(tmp_path / "run", tmp_path / "mt", saver="mt", true_vocab_size=VOCAB, host=host)
    native = open_native(tmp_path / "mt")
    assert native.metadata["config"]["model"]["vocab_size"] == VOCAB
    assert torch.equal(native.read(TABLE), source.read(TABLE)[:VOCAB])
    convert(tmp_path / "mt", tmp_path / "back", saver="megatron", host=host)
    back = open_checkpoint(tmp_path / "back", host, vocab_size=ROWS)
    assert torch.equal(back.read(TABLE), source.read(TABLE))
    with pytest.raises(ConfigError, match=r"--true-vocab-size 129: the checkpoint has 128 rows; it can be 1 to 128"):
        convert(tmp_path / "run", tmp_path / "more", saver="mt", true_vocab_size=129, host=host)


# -- verification ---------------------------------------------------------------------------------------


@pytest.fixture
def low_logits(host: PluginHost, tmp_path: Path) -> Path:
    source = ScaledWeights(GPT, host, logit_offset=-35.0)
    host[CHECKPOINT_SAVERS].get("mt").convert.load()(tmp_path / "mt", source, ConvertOptions(), host)
    return tmp_path / "mt"


@pytest.mark.slow
def test_verification_takes_the_padding_into_the_loss(host: PluginHost, low_logits: Path, tmp_path: Path) -> None:
    """Every tensor is the same, and Megatron's loss is not."""
    report = convert(low_logits, tmp_path / "run", saver="megatron-dist", verify=True, host=host)
    loss = report.verification.loss
    assert loss.target == pytest.approx(loss.source, abs=1e-5)
    assert loss.num_padding_rows == ROWS - VOCAB
    assert loss.num_parameters == report.num_parameters + (ROWS - VOCAB) * 32
    zeros = ConvertOptions(vocab_padding="zero")
    with pytest.raises(CheckpointError, match="Megatron computes another loss from it: .*27 rows of padding"):
        convert(low_logits, tmp_path / "zero", saver="megatron-dist", options=zeros, verify=True, host=host)


def test_the_command_prints_both_losses(low_logits: Path, tmp_path: Path) -> None:
    where = ("--load-dir", low_logits, "--save-dir", tmp_path / "run", "--saver", "megatron")
    result = run_convert(*where, "--verify", "--vocab-padding", "mean", "--true-vocab-size", "100")
    assert result.exit_code == 0, result.exception
    assert "of the source as mt computes it, " in result.output
    assert "28 rows of padding in its softmax" in result.output
