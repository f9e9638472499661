"""Runs in FP8: their losses, which layers it reaches, recomputation, resuming, and words for what cannot be."""

from __future__ import annotations

from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from mt_core._torch_compat import has_scaled_mm_on_cpu
from mt_core.checkpoint_lookup import open_checkpoint
from mt_core.config.schema import PrecisionConfig
from mt_core.errors import ConfigError
from mt_core.nn.fp8.multiply import Fp8Multiply
from mt_core.nn.fp8.options import resolve_options
from mt_core.nn.fp8.use import fp8_report
from mt_core.nn.kernels.choice import Kernels
from mt_core.nn.linear import LinearModule
from mt_core.parallel.context import ParallelContext
from mt_core.plugins import load_plugins
from mt_core.train import Trainer
from mt_core.train.build import build_model
from mt_core.train.checkpoint.run_directory import RunDirectory

RECIPES = ("tensorwise", "delayed", "rowwise", "blockwise")
HYBRID = "precision.fp8_format=hybrid"
BENCH = Path(__file__).parents[4] / "bench" / "fp8.py"
WIDE = ("model.hidden_size=128", "model.ffn_hidden_size=256", "model.num_layers=4")


def recipe(name: str) -> tuple[str, ...]:
    return ("precision.fp8_format=e2m1" if name == "nvfp4" else HYBRID, f"precision.fp8_recipe={name}")


def converted(model: torch.nn.Module) -> dict[str, bool]:
    """Path of each linear module -> whether it multiplies in FP8."""
    return {
        path: isinstance(module.multiply, Fp8Multiply)
        for path, module in model.named_modules()
        if isinstance(module, LinearModule)
    }


def model_of(tiny, *settings: str) -> torch.nn.Module:
    return build_model(tiny("model.vocab_size=256", *settings).config, ParallelContext(), load_plugins())


def run(config, directory=None) -> list[float]:
    """Losses of the steps."""
    losses: list[float] = []

    class Recorder:
        def __getattr__(self, name):
            return lambda *args: None

        def on_step_end(self, run, metrics):
            losses.append(metrics["loss"])

    Trainer(config, run_dir=directory, callbacks=[Recorder()]).train()
    return losses


# -- losses ------------------------------------------------------------------------------------------


FORTY_STEPS = (
    "precision.dtype=bf16",
    "train.train_iters=40",
    "train.micro_batch_size=4",
    "model.hidden_size=128",
    "optimizer.lr=1e-3",
)


@cache
def losses_of_40_steps(tiny) -> list[float]:
    return run(tiny(*FORTY_STEPS))


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES[1:])
def test_the_loss_stays_near_that_of_bf16(tiny, name) -> None:
    """40 steps; 100 of the first recipe are below."""
    plain, fp8 = losses_of_40_steps(tiny), run(tiny(*FORTY_STEPS, *recipe(name)))
    assert plain != fp8
    assert np.mean(fp8[-20:]) == pytest.approx(np.mean(plain[-20:]), rel=0.01)


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    """bench/fp8.py: its settings, its seeds."""
    spec = spec_from_file_location("bench_fp8", BENCH)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def settings_of_100_steps(bench) -> list[str]:
    smaller = ["data.seq_length=32", "train.micro_batch_size=4", "data.corpus_bytes=1000000"]
    return [*bench.SETTINGS, *smaller, "train.train_iters=100", "precision.dtype=bf16"]


@pytest.fixture(scope="module")
def losses_of_bf16(bench, settings_of_100_steps, tmp_path_factory) -> tuple[float, float]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("bf16"))
        return bench.losses_of(settings_of_100_steps, load_plugins())


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["tensorwise", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in RECIPES[1:])]
)
def test_100_steps_end_within_half_a_percent_of_bf16(
    bench, settings_of_100_steps, losses_of_bf16, name, tmp_path, monkeypatch
) -> None:
    """The runs of docs/guides/fp8.md with fewer steps, positions and samples: validation loss, and the mean training
    loss of the last 20 steps."""
    monkeypatch.chdir(tmp_path)
    settings = [*settings_of_100_steps, *recipe(name), "precision.fp8_min_features=1"]
    found = bench.losses_of(settings, load_plugins())
    assert found != losses_of_bf16
    assert found == pytest.approx(losses_of_bf16, rel=0.005)


# -- which layers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*RECIPES, "mxfp8", "nvfp4"])
def test_matrices_of_layers_are_converted_and_nothing_else(tiny, name) -> None:
    model = model_of(tiny, *WIDE, *recipe(name), "model.untie_embeddings_and_output_weights=true")
    found = converted(model)
    assert found.pop("output_layer") is False
    assert len(found) == 4 * 4
    assert all(found.values())
    assert fp8_report(model).converted == 16


def test_first_and_last_layers_are_left_out(tiny) -> None:
    keys = ("precision.first_last_layers_bf16=true", "precision.num_layers_at_end_in_bf16=2")
    model = model_of(tiny, *WIDE, HYBRID, *keys)
    layers = {path.split(".")[2] for path, is_fp8 in converted(model).items() if is_fp8}
    assert layers == {"1"}
    assert "4 matrices of this process; 12 not: a first or last layer" in str(fp8_report(model))


def test_small_and_odd_matrices_are_left_out_and_reported(tiny) -> None:
    """hidden 48, feed-forward 196, with gates 392: multiples of 4 and of 8."""
    sizes = ("model.hidden_size=48", "model.ffn_hidden_size=196")
    model = model_of(tiny, *sizes, HYBRID)
    assert {path.split(".")[-1] for path, is_fp8 in converted(model).items() if is_fp8} == {"linear_qkv", "linear_proj"}
    assert "2 not: 196 features are no multiple of 16; 2 not: 392 features" in str(fp8_report(model))
    with pytest.raises(ConfigError, match=r"no matrix of this process.*32 features are no multiple of 128"):
        model_of(tiny, *recipe("blockwise"))
    with pytest.raises(ConfigError, match=r"below precision.fp8_min_features=999"):
        model_of(tiny, *WIDE, HYBRID, "precision.fp8_min_features=999")


def test_the_output_layer_when_requested(tiny) -> None:
    untied = "model.untie_embeddings_and_output_weights=true"
    asked = (*WIDE, HYBRID, "precision.fp8_output_proj=true")
    model = model_of(tiny, *asked, untied, "model.make_vocab_size_divisible_by=64")
    assert converted(model)["output_layer"] is True
    tokens = torch.randint(0, 256, (1, 16))
    assert model(tokens).shape == (1, 16, 256)
    with pytest.raises(ConfigError, match="untie_embeddings_and_output_weights=true"):
        model_of(tiny, *asked, "model.untie_embeddings_and_output_weights=false")
    with pytest.raises(ConfigError, match="linear_cross_entropy multiplies by the LM head itself"):
        tiny(*asked, untied, "train.loss=linear_cross_entropy")


# -- state --------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", [*RECIPES, "nvfp4"])
def test_recomputation_changes_no_bit(tiny, name) -> None:
    common = (*recipe(name), "model.hidden_size=128", "train.train_iters=3", "model.hidden_dropout=0.1")
    plain = run(tiny(*common))
    assert run(tiny(*common, "recompute.recompute_granularity=full")) == plain
    selective = ("recompute.recompute_granularity=selective", "recompute.recompute_modules=['mlp']")
    assert run(tiny(*common, *selective)) == plain


def contents(directory) -> dict[str, np.ndarray]:
    reader = open_checkpoint(RunDirectory(directory).latest_checkpoint(), load_plugins())
    return {name: reader.read(name).contiguous().view(-1).view(torch.uint8).numpy() for name in reader.shapes()}


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["most_recent", "max"])
def test_delayed_scaling_goes_on_to_the_last_bit(tiny, tmp_path, algorithm) -> None:
    keys = ("precision.fp8_amax_history_len=4", f"precision.fp8_amax_compute_algo={algorithm}", "precision.dtype=bf16")
    common = (*recipe("delayed"), *keys)
    whole = run(tiny(*common), tmp_path / "whole")
    first = run(tiny(*common, "train.exit_iteration=3"), tmp_path / "parts")
    assert first + run(tiny(*common), tmp_path / "parts") == whole
    one, two = contents(tmp_path / "whole"), contents(tmp_path / "parts")
    histories = [name for name in one if name.endswith("linear_fc1.fp8.amax_history")]
    assert len(histories) == 2
    assert one.keys() == two.keys()
    assert [name for name in one if not np.array_equal(one[name], two[name])] == []


@pytest.mark.slow
def test_random_rounding_goes_on_to_the_last_bit(tiny, tmp_path) -> None:
    common = (*recipe("nvfp4"), "precision.dtype=bf16")
    whole = run(tiny(*common), tmp_path / "whole")
    assert whole != run(tiny(*common, "precision.fp4_stochastic_rounding=false"))
    first = run(tiny(*common, "train.exit_iteration=3"), tmp_path / "parts")
    assert first + run(tiny(*common), tmp_path / "parts") == whole
    one, two = contents(tmp_path / "whole"), contents(tmp_path / "parts")
    assert [name for name in one if not np.array_equal(one[name], two[name])] == []


@pytest.mark.slow
def test_a_checkpoint_without_fp8_can_be_gone_on_with(tiny, tmp_path) -> None:
    run(tiny("train.train_iters=2"), tmp_path / "plain")
    load = f"checkpoint.load={tmp_path / 'plain'}"
    run(tiny(HYBRID, load, "train.train_iters=2"))
    missing = "checkpoint.load_missing=['*.amax_history']"
    assert len(run(tiny(*recipe("delayed"), load, missing, "train.train_iters=2"))) == 2


# -- words --------------------------------------------------------------------------------------------

BAD = {
    "fp8_format=fp8": "fp8_format",
    "fp8_recipe=mxfp6": "fp8_recipe",
    "fp8_margin=-1": "fp8_margin",
    "fp8_amax_compute_algo=mean": "fp8_amax_compute_algo",
    "fp8_implementation=cuda": "fp8_implementation",
}


@pytest.mark.parametrize("setting", BAD)
def test_bad_values_are_named(tiny, setting) -> None:
    with pytest.raises(ConfigError, match=rf"precision\.{BAD[setting]}"):
        tiny(f"precision.{setting}")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (("precision.fp8_recipe=rowwise",), "precision.fp8_recipe .* would be ignored.*precision.fp8_format"),
        ((HYBRID, "precision.fp8_amax_history_len=9"), "fp8_amax_history_len .* would be ignored.*delayed"),
        ((HYBRID, "precision.num_layers_at_end_in_bf16=3"), "would be ignored.*first_last_layers_bf16"),
        ((HYBRID, "precision.dtype=fp16"), "precision.fp8_format=hybrid .*precision.dtype can be bf16 or fp32"),
        ((*recipe("delayed"), "parallel.use_torch_fsdp2=true"), "delayed keeps a history .* use tensorwise"),
    ],
)
def test_what_cannot_go_together_is_refused(tiny, settings, words) -> None:
    with pytest.raises(ConfigError, match=words):
        tiny(*settings)


@pytest.mark.skipif(not has_scaled_mm_on_cpu(), reason="this torch has no scaled_mm on a CPU")
def test_torch_serves_no_blocks_on_a_cpu(tiny) -> None:
    with pytest.raises(ConfigError, match=r"fp8_implementation=torch cannot serve: .*no blocks on a CPU; use emulated"):
        model_of(tiny, *WIDE, *recipe("blockwise"), "precision.fp8_implementation=torch")
    model_of(tiny, *WIDE, *recipe("rowwise"), "precision.fp8_implementation=torch")


def test_blocks_on_a_gpu_are_of_e4m3_alone(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    ctx = ParallelContext(device=torch.device("cuda"), params_dtype=torch.bfloat16)
    kernels = Kernels({}, "cpu", "bfloat16")
    hybrid = PrecisionConfig(dtype="bf16", fp8_format="hybrid", fp8_recipe="blockwise")
    with pytest.raises(ConfigError, match=r"blocks are of e4m3 alone, .*set fp8_format=e4m3"):
        resolve_options(hybrid, ctx, kernels)
    assert resolve_options(hybrid.model_copy(update={"fp8_format": "e4m3"}), ctx, kernels).implementation == "torch"


@pytest.mark.slow
@pytest.mark.skipif(not has_scaled_mm_on_cpu(), reason="this torch has no scaled_mm on a CPU")
def test_torchs_own_product_trains_as_the_emulated_one_does(tiny) -> None:
    common = ("model.hidden_size=128", "train.train_iters=3")
    for name in ("tensorwise", "rowwise"):
        emulated = run(tiny(*common, *recipe(name)))
        assert run(tiny(*common, *recipe(name), "precision.fp8_implementation=torch")) == pytest.approx(
            emulated, rel=1e-3
        )
