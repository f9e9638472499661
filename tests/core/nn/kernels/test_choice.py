"""Which implementation a configuration gets, and what is said when it cannot have the one it names."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import get_args

import pytest
import torch

from mt_core.errors import ConfigError
from mt_core.nn.kernels import request
from mt_core.nn.kernels.catalogue import KERNELS
from mt_core.nn.kernels.choice import Kernels, able, choose, refusals
from mt_core.nn.kernels.request import Feature, KernelName, KernelRequest

CUDA = KernelRequest(device_type="cuda", dtype="bfloat16", width=4096)
CPU = KernelRequest(device_type="cpu", dtype="float32", width=64)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Packages that are there, whatever this machine has."""
    names = {"triton"}
    monkeypatch.setattr(request, "_installed", lambda module, part="": module in names)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    return names


def test_every_kernel_has_a_torch_implementation_that_serves_all() -> None:
    assert set(KERNELS) == set(get_args(KernelName))
    for kernel, implementations in KERNELS.items():
        assert implementations[0].name == "torch"
        assert implementations[0].supports(CPU) is True
        assert "torch" in able(kernel, CPU)
        assert len({i.name for i in implementations}) == len(implementations)


def test_every_function_of_ours_can_be_loaded() -> None:
    for kernel, implementations in KERNELS.items():
        for implementation in implementations[:1]:
            assert callable(implementation.function.load()), kernel


def test_auto(installed: set[str]) -> None:
    assert str(choose("rms_norm", "auto", CUDA)) == "rms_norm: triton (auto: cuda, bfloat16, width 4096)"
    assert str(choose("rms_norm", "auto", CPU)) == "rms_norm: torch (auto on cpu)"
    wide = KernelRequest(device_type="cuda", dtype="bfloat16", width=65536)
    assert str(choose("rms_norm", "auto", wide)) == (
        "rms_norm: torch (auto: triton cannot serve (cuda, bfloat16, width 65536), "
        "its rows are at most 32768 wide, not 65536)"
    )
    installed.clear()
    assert choose("rms_norm", "auto", CUDA).implementation.name == "torch"


def test_auto_leaves_out_what_has_not_run_on_a_gpu(installed: set[str]) -> None:
    conv = KernelRequest(device_type="cuda", dtype="bfloat16", width=4)
    assert str(choose("causal_conv", "auto", conv)) == (
        "causal_conv: torch (auto: triton has not run on a GPU, and is used if named)"
    )
    assert choose("causal_conv", "triton", conv).implementation.name == "triton"
    with pytest.raises(ConfigError, match="it has at most 4 taps, not 7; use auto or torch"):
        choose("causal_conv", "triton", replace(conv, width=7))
    for changed, reason in (
        ({"width": 160}, "its queries have at most 128 channels, not 160; use auto or torch"),
        ({"dtype": "float32"}, "it computes in bfloat16, not in float32; use auto or torch"),
    ):
        with pytest.raises(ConfigError, match=reason):
            choose("index_scores", "triton", replace(conv, **changed))
    with pytest.raises(ConfigError, match="it takes 2, 4, 8 streams, not 3; use auto or torch"):
        choose("hyper_connection", "triton", replace(conv, width=3))


def test_auto_takes_no_package_that_nobody_named(installed: set[str]) -> None:
    installed.update({"transformer_engine", "apex", "liger_kernel"})
    assert choose("rms_norm", "auto", CUDA).implementation.name == "triton"
    installed.discard("triton")
    assert choose("rms_norm", "auto", CUDA).implementation.name == "torch"


@pytest.mark.parametrize(
    ("kernel", "wanted", "features", "words"),
    [
        ("rms_norm", "te", (), "Transformer Engine is not installed; use auto, torch, triton, apex or liger"),
        ("rms_norm", "apex", ("zero_centered",), "NVIDIA Apex has no form of it with zero_centered"),
        ("rotary", "liger", ("interleaved", "partial"), "liger-kernel has no form of it with interleaved or partial"),
        ("activation", "liger", ("geglu",), "no form of it with geglu"),
        ("softmax", "apex", (), "kernels.softmax=apex: no such implementation; it can be auto, torch or triton"),
    ],
)
def test_a_named_one_that_cannot_serve(
    installed: set[str], kernel: KernelName, wanted: str, features: tuple[Feature, ...], words: str
) -> None:
    installed.update({"apex", "liger_kernel"})
    request = KernelRequest(device_type="cuda", dtype="bfloat16", features=frozenset(features))
    with pytest.raises(ConfigError) as caught:
        choose(kernel, wanted, request)
    assert words in str(caught.value)


def test_triton_on_cpu_is_for_tests(installed: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError, match=r"kernels.rotary=triton cannot serve \(cpu, float32, width 64\).*interpreter"
    ):
        choose("rotary", "triton", CPU)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert choose("rotary", "triton", CPU).implementation.name == "triton"


def test_reasons_are_given_for_each(installed: set[str]) -> None:
    request = KernelRequest(device_type="cuda", dtype="float64")
    assert refusals("rms_norm", request) == {
        "triton": "it computes in bfloat16, float16, float32, not in float64",
        "te": "Transformer Engine is not installed",
        "apex": "NVIDIA Apex is not installed",
        "liger": "liger-kernel is not installed",
    }


def test_a_model_lists_what_it_got_once_for_each_use() -> None:
    kernels = Kernels({"rms_norm": "torch"}, "cpu", "float32")
    for _ in range(3):
        norm = kernels.pick("rms_norm", width=64)
    kernels.pick("rms_norm", width=16)
    kernels.pick("rotary", "interleaved", width=16)
    assert norm(torch.ones(1, 4), torch.ones(4), 0.0).tolist() == [[1.0] * 4]
    assert [str(choice) for choice in kernels.choices] == [
        "rms_norm: torch (as kernels.rms_norm says, for cpu, float32, width 64)",
        "rms_norm: torch (as kernels.rms_norm says, for cpu, float32, width 16)",
        "rotary: torch (auto on cpu)",
    ]


def test_choosing_imports_neither_torch_nor_triton() -> None:
    script = (
        "import sys\n"
        "from mt_core.nn.kernels.choice import choose, refusals\n"
        "from mt_core.nn.kernels.request import KernelRequest\n"
        "request = KernelRequest(device_type='cuda', dtype='bfloat16')\n"
        "choose('rms_norm', 'auto', request), refusals('rms_norm', request)\n"
        "print([m for m in ('torch', 'triton', 'transformer_engine', 'apex', 'liger_kernel') if m in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
