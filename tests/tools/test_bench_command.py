"""`mt bench`: its commands write cases as they come, compare finds what got worse, the picture shows it."""

from __future__ import annotations

import json
import subprocess
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch

from mt_core.config.loading import load_config
from mt_core.errors import DataError
from mt_core.nn.kernels.catalogue import KERNELS
from mt_core.parallel.context import Axis
from mt_core.plugins import load_plugins
from mt_core.train.reporting.step_metrics import peak_of_name
from mt_tools.bench import cpu, simulation, startup
from mt_tools.bench.kernel_cases import CASES, SMALL
from mt_tools.bench.kernels import PLAIN_LOSSES, measure
from mt_tools.bench.machine import Machine
from mt_tools.bench.report import Report, bars, compare, conditions, metrics, read_report, to_svg
from mt_tools.bench.timing import alternating, elapsed
from mt_tools.bench.training import idle_share, kind_of, shares, utilization
from mt_tools.bench.training_presets import PRESETS


def report(kind: str, *cases: dict) -> Report:
    return Report(kind, {"device": "cpu", "date": "2026-11-21"}, None, cases=list(cases))


def written(folder: Path, name: str, *cases: dict) -> Path:
    path = folder / name
    made = Report("kernels", {"device": "cpu"}, path)
    for case in cases:
        made.add(case)
    return path


def case(**steps: float) -> dict:
    return {"name": "rms_norm", "step": {name: {"ms": ms, "percent_of_floor": 50 / ms} for name, ms in steps.items()}}


# -- the file -----------------------------------------------------------------------------------------


def test_a_run_that_is_cut_keeps_what_it_measured(tmp_path) -> None:
    made = Report("calibrate", conditions(), tmp_path / "deep" / "report.json")
    made.add({"name": "first", "tflops": 1.0})
    kept = read_report(tmp_path / "deep" / "report.json")
    assert kept.cases == [{"name": "first", "tflops": 1.0}]
    assert kept.conditions["versions"]["mt-core"]
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["report.json"]


def test_a_case_that_is_completed_stands_once(tmp_path) -> None:
    report = Report("train", conditions(), tmp_path / "report.json")
    for case in ({"name": "first", "a": 1}, {"name": "first", "a": 1, "b": 2}, {"name": "second"}):
        report.add(case)
    assert read_report(tmp_path / "report.json").cases == [{"name": "first", "a": 1, "b": 2}, {"name": "second"}]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "does not exist; mt bench KIND --out"),
        ("{", "is no report of mt bench"),
        ("[]", "is no report of mt bench"),
        ('{"format": 2, "kind": "cpu"}', "has format 2, and this mt reads 1"),
    ],
)
def test_files_that_are_no_reports(text, words, tmp_path) -> None:
    path = tmp_path / "report.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(DataError, match=words):
        read_report(path)


# -- comparing ----------------------------------------------------------------------------------------


def test_metrics_know_which_way_is_better() -> None:
    before = report("train", {"name": "a", "tokens_per_second": 100.0, "step_ms": 10.0, "loss": 2.0})
    after = report("train", {"name": "a", "tokens_per_second": 50.0, "step_ms": 5.0, "loss": 9.0})
    found = {change.metric: change.ratio for change in compare(before, after)}
    assert found == {"tokens_per_second": 0.5, "step_ms": 2.0}


def test_what_is_measured_by_implementation_is_found() -> None:
    values = {"name": "x", "step": {"triton": {"ms": 2.0}}, "peak_mb": {"triton": 7.0}, "cannot": {"te": "no"}}
    assert dict(metrics(values)) == {"step.triton.ms": 2.0, "peak_mb.triton": 7.0}


def test_compare_exits_with_1_for_a_regression_alone(mt, tmp_path) -> None:
    base = written(tmp_path, "base.json", case(torch=2.0, triton=1.0), {"name": "gone", "tflops": 1.0})
    slow = written(tmp_path, "slow.json", case(torch=2.0, triton=1.2))
    noisy = written(tmp_path, "noisy.json", case(torch=2.05, triton=0.99))
    outcome = mt("bench", "compare", base, slow)
    assert outcome.code == 1
    assert "worse: rms_norm, step.triton.ms: 1 -> 1.2" in outcome.out
    assert "missing: gone" in outcome.out
    assert "step.torch" not in outcome.out
    assert mt("bench", "compare", base, noisy).code == 0
    assert mt("bench", "compare", base, slow, "--tolerance", "0.3").code == 0


def test_reports_that_cannot_be_compared() -> None:
    with pytest.raises(DataError, match="mt bench cpu cannot be compared with one of mt bench sim"):
        compare(report("cpu"), report("sim"))
    with pytest.raises(DataError, match="no case in common"):
        compare(report("cpu", {"name": "a", "ms": 1.0}), report("cpu", {"name": "b", "ms": 1.0}))


# -- the picture --------------------------------------------------------------------------------------


def test_the_picture_has_a_bar_for_each_measurement_with_a_floor() -> None:
    made = report("kernels", case(torch=2.0, triton=1.0), {"name": "1.2b <bf16>", "of_gemm_peak": 0.5, "step_ms": 3.0})
    assert list(bars(made)) == [
        ("rms_norm step torch", 25.0),
        ("rms_norm step triton", 50.0),
        ("1.2b <bf16> of_gemm_peak", 50.0),
    ]
    svg = to_svg(made)
    assert svg.count("<rect") == 4
    assert 'width="100.0"' in svg
    assert 'width="200.0"' in svg
    assert "1.2b &lt;bf16&gt;" in svg


def test_a_report_without_floors_has_no_picture() -> None:
    with pytest.raises(DataError, match="nothing that is measured against a floor"):
        to_svg(report("cpu", {"name": "a", "time_ratio": 1.0}))


# -- where the time goes ------------------------------------------------------------------------------


def test_kernels_are_put_into_kinds() -> None:
    names = {
        "sm90_xmma_gemm_bf16bf16": "products",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop": "attention",
        "_rms_norm_forward": "norms",
        "Memcpy HtoD (Pinned -> Device)": "copies",
        "vectorized_elementwise_kernel": "elementwise and others",
        "_adamw_kernel": "optimizer",
    }
    assert {name: kind_of(name) for name in names} == names
    assert shares([("gemm", 3.0), ("rms_norm", 1.0)]) == {"products": 0.75, "norms": 0.25}


def test_utilization_is_of_the_peak_of_the_device_itself() -> None:
    """An A100 at 156 TFLOP/s is half busy; a device without a known peak has the reason and no number."""
    names = ("NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3", "NVIDIA Unheard-of")
    a100, h100, unknown = (utilization(156e12, name, peak_of_name(name)) for name in names)
    assert (a100["mfu"], a100["mfu_peak_tflops"]) == (0.5, 312.0)
    assert h100["mfu"] == pytest.approx(156 / 989.4)
    assert unknown.keys() == {"mfu_missing"}
    assert "NVIDIA Unheard-of is not known; logging.device_peak_tflops" in unknown["mfu_missing"]


def test_idle_is_what_no_kernel_covers() -> None:
    assert idle_share([(0.0, 4.0), (2.0, 5.0), (8.0, 10.0)]) == pytest.approx(0.3)
    assert idle_share([(0.0, 10.0), (2.0, 3.0)]) == 0.0
    assert idle_share([]) == 1.0


# -- the commands -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_configurations(name) -> None:
    preset, host = PRESETS[name], load_plugins()
    whole = load_config(preset=preset.preset, overrides=preset.settings("bf16", small=False), host=host).config
    small = load_config(preset=preset.preset, overrides=preset.settings("bf16", small=True), host=host).config
    assert whole.train.loss == small.train.loss
    assert whole.optimizer == small.optimizer
    assert whole.model.vocab_size is not None
    assert small.model.hidden_size == 64


@pytest.mark.slow
def test_train_measures_a_rehearsal(mt, tmp_path) -> None:
    out = tmp_path / "train.json"
    assert mt("bench", "train", "--preset", "8b", "--steps", 2, "--out", out).code == 0
    (one,) = read_report(out).cases
    assert one["name"] == "8b bf16"
    assert one["tokens_per_second"] > 0
    assert 0 < one["loss"] < 10
    assert sum(one["time_shares"].values()) == pytest.approx(1.0)
    # 2 layers of 64: q and o 2 x 64 x 64, k and v 2 x 64 x 32, three matrices of 64 x 128; output 64 x 512; and
    # scores and values of (32 + 1) / 2 keys, 4 x 64 each, forward and twice backward.
    products = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128) + 64 * 512
    assert one["gflops_per_token"] * 1e9 == pytest.approx(6 * products + 3 * 2 * 4 * 64 * 16.5, rel=0.02)
    assert "mfu" not in one
    assert json.loads(out.read_text())["conditions"]["small_sizes"] is True


def test_kernels_measures_those_requested(mt, tmp_path) -> None:
    out = tmp_path / "kernels.json"
    arguments = ["--only", "rms_norm", "--only", "linear_cross_entropy", "--rounds", 2, "--no-compile", "--out", out]
    assert mt("bench", "kernels", *arguments).code == 0
    cases = read_report(out).cases
    assert [one["name"].split()[0] for one in cases] == ["rms_norm", "linear_cross_entropy"]
    assert cases[0]["step"]["torch"]["against_torch"] == 1.0
    assert "triton" in cases[0]["cannot"]


def losses_and_gradients(function, inputs: list[torch.Tensor], *others: object) -> list[torch.Tensor]:
    """Of the first value that function gives, summed with weights 0, 1, 2, ... where it is a loss for each token."""
    given = function(*inputs, *others)
    values = given[0] if isinstance(given, tuple) else given
    weights = torch.arange(values.numel(), dtype=values.dtype).view_as(values) if values.dim() else torch.tensor(1.0)
    return [values, *torch.autograd.grad(values, inputs, weights)]


@pytest.mark.parametrize("kernel", PLAIN_LOSSES)
def test_what_is_compiled_for_a_loss_is_that_loss(kernel) -> None:
    """Values and gradients of the formula that is compiled against those of torch's implementation."""
    generator = torch.Generator().manual_seed(3)
    logits, hidden, weight = (
        torch.randn(*shape, generator=generator).requires_grad_() for shape in ((6, 11), (6, 4), (11, 4))
    )
    columns, factor = torch.tensor([0, 10, 3, 3, 7, 1]), torch.rand(6, generator=generator)
    inputs = [logits] if kernel == "cross_entropy" else [hidden, weight]
    others = (columns, factor, Axis()) if kernel == "linear_cross_entropy_sum" else (columns, Axis())
    reference = next(one for one in KERNELS[kernel] if one.name == "torch").function.load()
    for ours, theirs in zip(
        losses_and_gradients(PLAIN_LOSSES[kernel], inputs, *others),
        losses_and_gradients(reference, inputs, *others),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("make", CASES)
def test_every_kernel_has_a_compiled_entry(make, monkeypatch) -> None:
    """The compiler itself is left out: it is given the function back."""
    monkeypatch.setattr(torch, "compile", lambda function: function)
    machine = Machine(torch.device("cpu"), torch.float32, 1e9, 1e9)
    for case in make(machine, SMALL):
        measured = measure([case], machine, 1, compiled=True)
        assert set(measured["step"]) == {"torch", "torch.compile"}


class SteppedClock:
    """The clock of a benchmark's rounds, set forward by what stands for a process."""

    def __init__(self, benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead = 0.0
        measure = partial(elapsed, clock=lambda: time.perf_counter() + self.ahead)
        monkeypatch.setattr(benchmark, "alternating", partial(alternating, measure=measure))

    def step(self, seconds: float) -> None:
        self.ahead += seconds


@pytest.mark.slow
def test_cpu_counts_what_can_be_counted(mt, tmp_path, monkeypatch) -> None:
    """Imports of torch, in processes of their own, are replaced by steps of the clock."""
    cpu._import("json")
    with pytest.raises(subprocess.CalledProcessError):
        cpu._import("no_such_module")
    monkeypatch.setattr(cpu, "SHAPES", {"bytes": replace(cpu.SHAPES["bytes"], hidden=32, sequence=16, batch=2)})
    clock = SteppedClock(cpu, monkeypatch)
    monkeypatch.setattr(cpu, "_import", lambda module: clock.step(200 if module == "torch" else 500))
    out = tmp_path / "cpu.json"
    assert mt("bench", "cpu", "--steps", 2, "--out", out).code == 0
    cases = {one["name"]: one for one in read_report(out).cases}
    assert cases["importing the trainer against torch"]["import_ratio"] == pytest.approx(2.5, rel=0.2)
    step = cases["step against a plain loop, bytes"]
    assert step["operators"] <= step["operators_of_plain_loop"]
    held = {name: one["bytes_a_parameter"] for name, one in cases.items() if "bytes_a_parameter" in one}
    assert held == {
        "optimizer, fp32": 16,
        "optimizer, bf16, fp32 copies": 18,
        "optimizer, bf16, remainders": 14,
        "optimizer, bf16, remainders, bf16 moments": 10,
    }


def test_startup_counts_from_the_imports_and_from_torch(mt, tmp_path, monkeypatch) -> None:
    """Processes are replaced by steps of the clock, so long that this machine's own time hardly counts."""
    clock = SteppedClock(startup, monkeypatch)
    lengths = {"pass": 100, "import torch": 200, "--help": 600, "plugins": 800, "train.exit_iteration=1": 500}
    monkeypatch.setattr(startup, "_start", lambda arguments, environment: clock.step(lengths.get(arguments[-1], 300)))
    out = tmp_path / "startup.json"
    assert mt("bench", "startup", "--rounds", 3, "--train-rounds", 3, "--out", out).code == 0
    cases = {one["name"]: one for one in read_report(out).cases}
    assert set(cases) == {"mt --help", "mt plugins", "mt train, first step"}
    for name, length in (("mt --help", 600), ("mt plugins", 800)):
        assert cases[name]["seconds"] == pytest.approx(length, abs=50)
        assert cases[name]["python_seconds"] == pytest.approx(100, abs=50)
        assert cases[name]["time_ratio"] == pytest.approx(length / 300, rel=0.2)
    assert cases["mt train, first step"]["import_torch"] == pytest.approx(200, abs=50)
    assert cases["mt train, first step"]["beside_torch"]["seconds"] == pytest.approx(300, abs=50)


@pytest.mark.slow
def test_a_measured_pipeline_is_no_shorter_than_the_simulated_one(mt, tmp_path) -> None:
    out = tmp_path / "pipeline.json"
    sizes = ("--ranks", 2, "--micro-batches", 4, "--unit-ms", 5)
    outcome = mt("bench", "pipeline", *sizes, "--only", "1f1b", "--svg", tmp_path / "drawn", "--out", out)
    assert outcome.code == 0, outcome.err
    (case,) = read_report(out).cases
    # Each rank works 4 x 6 units; the second one begins 2 later and is waited for, 4 in its last backward pass.
    assert case["simulated_units"] == pytest.approx(4 * 6 + 2 + 4)
    assert case["units"] > 0.999 * case["simulated_units"]
    assert (tmp_path / "drawn" / "1f1b.svg").exists()


@pytest.mark.slow
def test_sim_plays_every_schedule(mt, tmp_path) -> None:
    out = tmp_path / "sim.json"
    assert mt("bench", "sim", "--out", out).code == 0
    cases = {one["name"]: one for one in read_report(out).cases}
    # (p - 1) / m
    assert cases["70b: 1f1b, 4 ranks, 32 micro-batches"]["bubble"] == pytest.approx(3 / 32)
    # Weights and gradients, 6 bytes, on 32 ranks; 12 bytes of state on 64; and activations.
    state = 70.55e9 * (6 / 32 + 12 / 64) / 2**30
    assert state < cases["llama3-70b on 64"]["memory_gib"] < 80
    plans = {name: one for name, one in cases.items() if "memory_gib" in one}
    assert set(plans) == {"llama3-70b on 64", "llama3.1-405b on 1024", "deepseek-v3 on 2048"}
    assert all(one["bubble"] > 0 for one in plans.values())
    # 79.6 GiB of an H100, 5 of them left free
    assert {name for name, one in plans.items() if one["fits"] and one["memory_gib"] < 74.6} == set(plans)


def test_sim_says_what_does_not_fit(monkeypatch) -> None:
    """70B on 8 ranks of one copy: 70.55e9 * 18 / 8 bytes and more."""
    run = simulation.SimulatedRun("70b on 8", "llama3-70b", 8, simulation._layout(8, 1, 1))
    monkeypatch.setattr(simulation, "RUNS", (run,))
    (case,) = simulation.plan_cases(load_plugins())
    assert case["memory_gib"] > 70.55e9 * 18 / 8 / 2**30
    assert case["fits"] is False


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "--preset", "9b"], "--preset 9b: it can be 124m, 1.2b, 3b, 8b, 7b-a1b"),
        (["train", "--precision", "fp4"], "--precision fp4: it can be bf16, fp8, mxfp8, nvfp4, fp32"),
        (["pipeline", "--only", "1f2b"], "--only 1f2b: no such schedule; there are gpipe, 1f1b"),
        (["kernels", "--only", "norm", "--rounds", "1"], "--only norm: no such kernel; there are rms_norm"),
    ],
)
def test_what_does_not_exist_is_named(arguments, words, mt) -> None:
    outcome = mt("bench", *arguments)
    assert outcome.code != 0
    assert words in outcome.err.replace("\n", " ")
