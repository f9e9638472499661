"""`mt doctor`."""

from __future__ import annotations

import json
import os
import platform
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from mt_cli.machine import Package, examine, torch_facts


@pytest.mark.slow
def test_facts_are_those_of_this_machine(mt) -> None:
    found = json.loads(mt("doctor", "--json").out)
    assert found["system"]["python"].startswith(platform.python_version())
    assert found["system"]["cores"].split()[-1] == str(os.cpu_count()) or "usable" in found["system"]["cores"]
    assert found["torch"]["torch"] == torch.__version__
    assert "gloo" in found["torch"]["distributed"]
    assert "fp32" in found["torch"]["cpu"]
    assert found["distributions"]["mt-core"] == version("mt-core")
    assert found["plugin_problems"] == []
    kernels = {entry["package"]: entry for entry in found["kernels"]}
    assert {"triton", "flash_attn", "transformer_engine", "apex", "liger_kernel", "torchao"} <= set(kernels)
    assert all(entry["gives"] for entry in kernels.values())


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Writes importable packages: name -> text of their __init__.py, and names of submodules."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def write(name: str, code: str, *submodules: str) -> None:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(code)
        for submodule in submodules:
            (tmp_path / name / f"{submodule}.py").write_text("")

    return write


@pytest.mark.slow
def test_packages_that_are_there_but_fail(packages, tmp_path: Path) -> None:
    packages("kernel_fine", "")
    packages("kernel_old", "raise ImportError('built for torch 1.0')")
    packages("kernel_crash", "import os; os.abort()")
    packages("kernel_exit", "raise SystemExit(3)")
    names = ["kernel_fine", "kernel_old", "kernel_crash", "kernel_exit", "kernel_none"]
    found = {f.package.module: (f.state, f.reason) for f in examine([Package(name, "speed") for name in names])}
    assert found == {
        "kernel_fine": ("usable", None),
        "kernel_old": ("unusable", "ImportError: built for torch 1.0"),
        "kernel_crash": ("unusable", "importing it ends with signal 6"),
        "kernel_exit": ("unusable", "importing it ends with status 3"),
        "kernel_none": ("missing", None),
    }


def test_another_project_of_the_same_name_is_not_taken(packages) -> None:
    packages("peak", "raise RuntimeError('imported')")
    packages("summit", "", "multi_tensor_apply")
    found = examine([Package(name, "speed", proof="multi_tensor_apply") for name in ("peak", "summit")])
    assert [(f.state, f.reason) for f in found] == [
        ("missing", "another project named peak is installed"),
        ("usable", None),
    ]


def test_without_torch_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mt_cli.machine.find_spec", lambda name: None)
    assert torch_facts() == {"torch": 'missing (pip install "mt-core[train]")'}


def test_the_report(mt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mt_cli.machine.KERNELS", (Package("kernel_none", "speed and more"),))
    monkeypatch.setattr("mt_cli.machine.DATA_PACKAGES", ())
    outcome = mt("doctor")
    assert outcome.code == 0
    assert ["kernel_none", "missing", "speed", "and", "more"] in outcome.lines
    assert ["torch", torch.__version__] in outcome.lines
    assert "All plugins are loaded." in outcome.out
