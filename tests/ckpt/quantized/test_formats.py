"""`mt quantization PATH`: formats, bits a weight and errors of what is in the files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from tests.ckpt.quantized.test_written import LLAMA
from typer.testing import CliRunner, Result

from mt_ckpt.convert import convert
from mt_ckpt.hugging_face.reader import open_checkpoint
from mt_ckpt.layer_formats import grouped, layer_formats
from mt_core.checkpoint_specs import ConvertOptions
from mt_core.errors import CheckpointError
from mt_core.plugins import PluginHost

SMALLER = {**LLAMA, "num_layers": 1, "ffn_hidden_size": 96}


@pytest.fixture
def folders(make_model, host: PluginHost, tmp_path: Path) -> tuple[Path, Path]:
    """(quantized, original)"""
    source = make_model(**LLAMA)
    options = ConvertOptions(quantize="w4a16-g32")
    convert(source, tmp_path / "out", saver="hf", options=options, host=host)
    return tmp_path / "out", source


def test_bits_are_those_of_the_files(folders: tuple[Path, Path], host: PluginHost) -> None:
    found = {entry.name: entry for entry in layer_formats(open_checkpoint(folders[0], host))}
    fc1 = found["decoder.layers.0.mlp.linear_fc1.weight"]
    # Each of gate and up, 160 x 64: 4 bits, a scale in fp32 for 32 numbers, and two int64 for the shape.
    assert fc1.num_bytes == 2 * (160 * 64 // 2 + 160 * 2 * 4 + 16)
    assert (fc1.format, fc1.quantized, fc1.error) == ("int4, groups of 32", True, None)
    embedding = found["embedding.word_embeddings.weight"]
    assert (embedding.format, embedding.quantized, embedding.bits_per_weight) == ("float32", False, 32.0)


def test_errors_are_those_to_the_original(folders: tuple[Path, Path], host: PluginHost) -> None:
    from mt_ckpt.native.read import open_checkpoint as open_own

    reader, original = open_checkpoint(folders[0], host), open_own(folders[1])
    for entry in layer_formats(reader, original):
        name = f"model.{entry.name}"
        gap, exact = (reader.read(name) - original.read(name)).double(), original.read(name).double()
        assert entry.error == pytest.approx((gap.norm() / exact.norm()).item(), rel=1e-6)
        assert entry.largest_error == gap.abs().max().item()
        assert (entry.error > 0) == entry.quantized


def test_layers_that_are_stored_alike_are_one_line(folders: tuple[Path, Path], host: PluginHost) -> None:
    groups = {group.name: group for group in grouped(layer_formats(open_checkpoint(folders[0], host)))}
    assert groups["decoder.layers.*.mlp.linear_fc1.weight"].count == 2
    assert groups["decoder.layers.*.mlp.linear_fc1.weight"].numel == 2 * 320 * 64


def test_another_model_is_no_original(folders: tuple[Path, Path], make_model, host: PluginHost) -> None:
    from mt_ckpt.native.read import open_checkpoint as open_own

    reader = open_checkpoint(folders[0], host)
    with pytest.raises(CheckpointError, match="it is another model"):
        layer_formats(reader, open_own(make_model("other", **SMALLER)))


def run(*arguments: str | Path) -> Result:
    from mt_infer.commands.measure import quantization

    application = typer.Typer()
    application.command()(quantization)
    return CliRunner().invoke(application, [str(argument) for argument in arguments])


def test_the_command(folders: tuple[Path, Path]) -> None:
    quantized, original = folders
    shown = run(quantized, "--original", original)
    assert shown.exit_code == 0, shown.output
    assert "decoder.layers.*.mlp.linear_fc1.weight" in shown.output
    assert "int4, groups of 32" in shown.output
    assert "with 16 bits it would be" in shown.output
    assert len(run(quantized, "--tensors").output.splitlines()) > len(shown.output.splitlines())
    content = json.loads(run(quantized, "--json").output)
    assert {"tensors", "num_parameters", "num_quantized_parameters", "num_bytes", "bits_per_weight"} == set(content)


def test_options_of_files_and_of_perplexities_do_not_mix(folders: tuple[Path, Path], tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("a")
    assert "leave FILE out" in str(run(folders[0], text, "--json").exception)
    assert "give FILE too" in str(run(folders[0], "--device", "cpu").exception)
