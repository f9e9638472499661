"""mt plot: SVG, the terminal, PNG and PDF; what a picture shows."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
import typer
from tests.ops.test_reading import write_run
from typer.testing import CliRunner

from mt_core.errors import DataError
from mt_ops.commands.plot import plot
from mt_ops.plot.curves import picture, running_mean
from mt_ops.plot.svg import Scale
from mt_ops.plot.svg import draw as svg
from mt_ops.plot.terminal import draw
from mt_ops.reading.opening import open_runs

APP = typer.Typer()
APP.command()(plot)


@pytest.fixture
def runs(tmp_path: Path) -> list[str]:
    write_run(tmp_path / "a", range(1, 41))
    write_run(tmp_path / "b<", range(1, 21), loss=6.0)
    return [str(tmp_path / "a"), str(tmp_path / "b<")]


def test_svg_has_each_curve_at_its_place(runs: list[str], tmp_path: Path) -> None:
    result = CliRunner().invoke(APP, [*runs, "-o", str(tmp_path / "x.svg")])
    assert result.exit_code == 0, result.output
    root = ET.parse(tmp_path / "x.svg").getroot()
    curves = root.findall("{http://www.w3.org/2000/svg}polyline")
    assert [curve[0].text for curve in curves] == ["a", "b<"]
    first = [tuple(map(float, point.split(","))) for point in curves[0].attrib["points"].split()]
    # From the left edge to the right one; a falling loss goes down, which are larger numbers.
    assert (first[0][0], first[-1][0]) == (70, 624)
    assert first[-1][1] > first[0][1]


def test_terminal_shows_a_falling_curve(runs: list[str]) -> None:
    text = draw(picture(open_runs([Path(runs[0])]), "loss", "step", 1), 60, 14)
    lines = [line.split("\N{BOX DRAWINGS LIGHT VERTICAL}")[1] for line in text.splitlines()[1:11]]
    ends = [len(line) for line in lines if line.strip()]
    assert ends == sorted(ends)
    assert max(ends) == 50


def test_the_last_label_of_an_axis_is_whole(tmp_path: Path) -> None:
    """It ends where the picture does."""
    write_run(tmp_path / "long", range(0, 1_000_001, 250_000))
    drawn = picture(open_runs([tmp_path / "long"]), "loss", "step", 1)
    for width in (40, 60, 61, 80, 100):
        labels = draw(drawn, width, 14).splitlines()[-1]
        assert labels.endswith("1M"), labels
        assert len(labels) <= width
    label = [each for each in ET.fromstring(svg(drawn)).iter() if each.text == "1M"][-1]
    assert float(label.attrib["x"]) + 8 * len("1M") / 2 <= 640


def test_scale_and_ticks() -> None:
    plain, logarithmic = Scale(0.0, 10.0, 0, 100, False), Scale(1.0, 1000.0, 0, 90, True)
    assert (float(plain(5.0)), float(logarithmic(10.0))) == (50.0, pytest.approx(30.0))
    assert plain.ticks() == [0, 2, 4, 6, 8, 10]
    assert logarithmic.ticks() == [1, 10, 100, 1000]


def test_running_mean_leaves_out_what_is_not_finite() -> None:
    assert running_mean(np.array([1.0, np.nan, 3.0, 5.0]), 2).tolist() == [1.0, 1.0, 3.0, 4.0]


def test_an_unknown_metric_is_named(runs: list[str]) -> None:
    with pytest.raises(DataError, match='did you mean "loss"'):
        picture(open_runs([Path(runs[0])]), "los", "step", 1)


@pytest.mark.slow  # the import of matplotlib
@pytest.mark.parametrize(("ending", "begin"), [("png", b"\x89PNG"), ("pdf", b"%PDF")])
def test_figures_of_matplotlib(runs: list[str], tmp_path: Path, ending: str, begin: bytes) -> None:
    pytest.importorskip("matplotlib")
    assert CliRunner().invoke(APP, [*runs, "-o", str(tmp_path / f"x.{ending}"), "--log-y"]).exit_code == 0
    assert (tmp_path / f"x.{ending}").read_bytes().startswith(begin)
