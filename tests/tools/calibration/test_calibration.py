"""Calibrated folders: what they hold is what was measured, in every layout."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.command_on_ranks import fork_ranks
from tests.tools.calibration.models import MOE, calibrate_rank, calibrated, samples, save_model
from torch import Tensor

from mt_core.checkpoint_lookup import open_checkpoint
from mt_core.errors import ConfigError
from mt_core.plugins import load_plugins
from mt_core.testing import run_ranks
from mt_core.train.trained_model import load_trained_model
from mt_tools.calibration.command_run import Data
from mt_tools.calibration.folding import folding_points
from mt_tools.calibration.matrices import matrices_of
from mt_tools.calibration.measure import Comparison
from mt_tools.calibration.options import CalibrationOptions, methods_named
from mt_tools.calibration.passes import Passes
from mt_tools.calibration.rotation import rotate_model
from mt_tools.calibration.samples import rank_batches
from mt_tools.calibration.store import CalibrationStore

W4A16 = CalibrationOptions("w4a16-g16")


def weights(folder: Path) -> dict[str, Tensor]:
    reader = open_checkpoint(folder, load_plugins())
    return {name: reader.read(name) for name in reader.shapes()}


def loss_of_folder(folder: Path, scratch: Path) -> float:
    trained = load_trained_model(folder, load_plugins(), device="cpu")
    scratch.mkdir()
    batches = rank_batches(samples(4, 2), 1, trained.ctx)
    return Comparison(Passes(trained), batches, CalibrationStore(scratch)).measure().cross_entropy


@pytest.mark.parametrize("scheme", ["w4a16-g16", "w4a16-asym-g16", "awq-g16", "gptq-g16", "nvfp4", "mxfp4"])
def test_the_folder_computes_what_was_measured(scheme: str, tmp_path: Path) -> None:
    # bf16: readers of some schemes return nothing more precise.
    source = save_model(tmp_path / "source", torch.bfloat16)
    result = calibrated(source, tmp_path / "out", CalibrationOptions(scheme))
    assert loss_of_folder(tmp_path / "out", tmp_path / "scratch") == result.after.cross_entropy
    assert result.before.divergence == 0.0 < result.after.divergence


FOLDED = (("smoothquant", "gptq"), ("awq", "mse"), ("rotate", "rotate-values", "mse", "gptq"))


@pytest.mark.parametrize("methods", FOLDED)
def test_what_is_folded_is_in_the_folder(methods: tuple, tmp_path: Path) -> None:
    source = save_model(tmp_path / "source", torch.bfloat16, untie_embeddings_and_output_weights=True)
    result = calibrated(source, tmp_path / "out", CalibrationOptions("w4a16-g16", methods))
    assert loss_of_folder(tmp_path / "out", tmp_path / "scratch") == result.after.cross_entropy


def test_factors_and_rotations_leave_the_outputs(tmp_path: Path) -> None:
    source = save_model(tmp_path / "source", untie_embeddings_and_output_weights=True)
    trained = load_trained_model(source, load_plugins(), device="cpu")
    tokens = torch.arange(16)[None]
    with torch.no_grad():
        plain = trained.model(tokens)
        generator = torch.Generator().manual_seed(1)
        for point in folding_points(trained.model, list(matrices_of(trained.model))):
            point.fold(0.5 + torch.rand(point.matrix.layout.shape[-1], generator=generator), torch.float32)
        folded = trained.model(tokens)
        before = trained.model.decoder.layers[0].mlp.linear_fc2.weight.clone()
        rotate_model(trained.model, trained.ctx, residual=True, values=True)
        rotated = trained.model(tokens)
    assert torch.allclose(folded, plain, atol=1e-4 * plain.abs().max())
    assert torch.allclose(rotated, plain, atol=1e-4 * plain.abs().max())
    assert not torch.allclose(before, trained.model.decoder.layers[0].mlp.linear_fc2.weight, atol=1e-2)


def test_blocks_that_factors_cannot_be_folded_in_are_named(tmp_path: Path) -> None:
    source = save_model(tmp_path / "source", family="mixtral", moe=MOE)
    with pytest.raises(ConfigError, match="in decoder.layers.0 its feed-forward is a "):
        calibrated(source, tmp_path / "out", CalibrationOptions("w4a16-g16", ("awq",)))
    tied = save_model(tmp_path / "tied", untie_embeddings_and_output_weights=False)
    with pytest.raises(ConfigError, match="--method rotate: the LM head is the matrix of the embeddings"):
        calibrated(tied, tmp_path / "out", CalibrationOptions("w4a16-g16", ("rotate",)))


def test_gptq_costs_less_than_rounding(tmp_path: Path) -> None:
    source = save_model(tmp_path / "source")
    nearest = calibrated(source, tmp_path / "nearest", CalibrationOptions("w4a16-g16", ("max",)))
    gptq = calibrated(source, tmp_path / "gptq", W4A16)
    assert sum(weight.error for weight in gptq.weights) < 0.9 * sum(weight.error for weight in nearest.weights)


def test_rounding_to_the_nearest_is_what_convert_writes(tmp_path: Path) -> None:
    from mt_ckpt.convert import convert
    from mt_core.checkpoint_specs import ConvertOptions

    source = save_model(tmp_path / "source")
    calibrated(source, tmp_path / "out", CalibrationOptions("w4a16-g16", ("max",)))
    convert(source, tmp_path / "plain", saver="hf", options=ConvertOptions(quantize="w4a16-g16"), host=load_plugins())
    assert (tmp_path / "out/model.safetensors").read_bytes() == (tmp_path / "plain/model.safetensors").read_bytes()


LAYOUTS = {
    "tp": {"tensor_model_parallel_size": 2},
    "sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "dp": {},
    "cp": {"context_parallel_size": 2},
    "pp": {"pipeline_model_parallel_size": 2},
    "ep": {"expert_model_parallel_size": 2},
}


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_choose_what_one_process_chooses(name: str, tmp_path: Path) -> None:
    """1 s each: two ranks."""
    model = {"family": "mixtral", "moe": MOE} if name == "ep" else {}
    source = save_model(tmp_path / "source", **model)
    # Small ones see few tokens; second moments of other orders of sums differ in the last bits.
    methods = ("smoothquant", "mse", "gptq") if name in ("tp", "pp") else ("mse", "gptq")
    options = CalibrationOptions("w4a16-g16", methods, min_tokens=8)
    one = calibrated(source, tmp_path / "one", options)
    (two, *_) = run_ranks(2, calibrate_rank, source, tmp_path / "two", options, LAYOUTS[name])
    assert two.before.cross_entropy == pytest.approx(one.before.cross_entropy, abs=1e-5)
    assert two.after.cross_entropy == pytest.approx(one.after.cross_entropy, abs=2e-2)
    assert [weight.name for weight in two.weights] == [weight.name for weight in one.weights]
    first, second = weights(tmp_path / "one"), weights(tmp_path / "two")
    for weight_name, value in first.items():
        # A sum in another order may turn a number at a tie, and those that follow it.
        same = torch.isclose(value, second[weight_name], rtol=1e-4, atol=1e-6).float().mean()
        assert same > 0.98, (weight_name, same)


def test_experts_with_few_tokens_are_named(tmp_path: Path) -> None:
    source = save_model(tmp_path / "source", family="mixtral", moe=MOE)
    result = calibrated(source, tmp_path / "out", CalibrationOptions("w4a16-g16", min_tokens=64))
    named = {weight.name: weight.unseen for weight in result.weights if weight.unseen}
    assert all(".experts." in name for name in named)
    # 8 samples of 16 tokens, two experts each: not all four have 64.
    assert named
    assert all(tokens < 64 for unseen in named.values() for tokens in unseen.values())


def test_methods_that_exclude_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match="chooses the ranges"):
        methods_named(["max", "mse"])
    with pytest.raises(ConfigError, match="--method gtpq"):
        methods_named(["gtpq"])


def test_schemes_that_cannot_be_calibrated_are_refused() -> None:
    with pytest.raises(ConfigError, match="fp8-blocks cannot be calibrated; it can be fp8, int8"):
        CalibrationOptions("fp8-blocks").quantizer()


@pytest.mark.slow
def test_the_command_takes_the_samples_of_a_data_set(mt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """2 s: two ranks."""
    fork_ranks(monkeypatch)
    source = save_model(tmp_path / "source")
    data = ["--set", "data.dataset_type=mock", "--set", "data.seq_length=16"]
    sizes = ["--samples", 4, "--eval-samples", 2, "--min-tokens", 8]
    words = ["calibrate", source, "--scheme", "w4a16-g16", *data, *sizes]
    one = mt(*words, "--out", tmp_path / "one")
    assert one.code == 0, one.err
    layout = ["--nproc", 2, "--set", "parallel.tensor_model_parallel_size=2"]
    two = mt(*words, "--out", tmp_path / "two", *layout)
    assert two.code == 0, two.err
    reports = [json.loads((tmp_path / name / "calibration.json").read_text()) for name in ("one", "two")]
    first, second = (report["before"]["cross_entropy"] for report in reports)
    assert first == pytest.approx(second, abs=1e-5)
    assert reports[0]["before"]["tokens"] == reports[1]["before"]["tokens"] == 2 * 16
    assert f"before        {first:.5f}" in one.out
    assert len(reports[0]["weights"]) == 2 * 4
    again = mt(*words, "--out", tmp_path / "one")
    assert again.code != 0
    assert "exists; give a folder that does not" in again.err


def test_a_text_needs_another_to_measure_with(mt, tmp_path: Path) -> None:
    outcome = mt("calibrate", tmp_path, "--out", tmp_path / "out", "--scheme", "int8", "--text", tmp_path / "a.txt")
    assert outcome.code != 0
    assert "--text and --eval-text go together" in outcome.err


@pytest.mark.parametrize(("given", "positions", "length"), [(None, 512, 512), (None, 8192, 2048), (64, 512, 64)])
def test_samples_are_not_longer_than_the_model(given: int | None, positions: int, length: int) -> None:
    trained: Any = SimpleNamespace(config=SimpleNamespace(model=SimpleNamespace(max_sequence_length=positions)))
    assert Data(None, None, 1, 1, given, 1).length(trained) == length
