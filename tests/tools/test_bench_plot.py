"""`mt bench plot` writes a page or a bare picture, by the name of the file."""

from __future__ import annotations

import pytest

from mt_tools.bench.report import Report


@pytest.fixture
def kernels(tmp_path):
    path = tmp_path / "kernels.json"
    made = Report("kernels", {"device": "one <GPU>", "versions": {"torch": "2.15"}}, path)
    made.add({"name": "rms_norm", "step": {"triton": {"ms": 1.0, "percent_of_floor": 50.0}}})
    return path


def test_the_page_has_the_picture_and_the_conditions(mt, kernels) -> None:
    assert mt("bench", "plot", kernels).code == 0
    page = kernels.with_suffix(".html").read_text()
    assert page.startswith("<!doctype html>")
    assert "rms_norm step triton" in page
    assert "<td>device</td><td>one &lt;GPU&gt;</td>" in page
    assert "<td>versions</td><td>torch 2.15</td>" in page


def test_the_picture_alone(mt, kernels, tmp_path) -> None:
    assert mt("bench", "plot", kernels, "--out", tmp_path / "x.svg").code == 0
    assert (tmp_path / "x.svg").read_text().startswith("<svg")


def test_other_files_are_refused(mt, kernels, tmp_path) -> None:
    outcome = mt("bench", "plot", kernels, "--out", tmp_path / "x.png")
    assert outcome.code != 0
    assert "a picture is written as .html or .svg" in outcome.err.replace("\n", " ")
