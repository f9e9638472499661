"""`mt moe plot`: the plot has a cell for each layer and step, and colours follow the numbers."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mt_core.errors import DataError
from mt_moe.plot import MOST_COLUMNS, app, draw, read_history

SVG = "{http://www.w3.org/2000/svg}"


def write(path: Path, steps: int, layers: int = 2) -> Path:
    lines = []
    for step in range(1, steps + 1):
        entry = {"kind": "train", "iteration": step, "loss": 1.0}
        for layer in range(layers):
            entry[f"moe/layer_{layer}/load_max_over_mean"] = 1.0 + layer + step / steps
            entry[f"moe/layer_{layer}/dead_experts"] = 0.0
        lines.append(json.dumps(entry))
    path.write_text("\n".join([*lines, json.dumps({"kind": "valid", "iteration": steps, "valid_loss": 1.0})]))
    return path


def cells(plot: str) -> dict[str, str]:
    """ "layer 1, step 2: 2.5" -> colour"""
    found = {}
    for box in ElementTree.fromstring(plot).iter(f"{SVG}rect"):
        title = box.find(f"{SVG}title")
        if title is not None:
            found[title.text or ""] = box.attrib["fill"]
    return found


def test_a_cell_for_each_layer_and_step(tmp_path) -> None:
    found = cells(draw(read_history(write(tmp_path / "m.jsonl", 2), "load_max_over_mean")))
    assert set(found) == {
        "layer 0, step 1: 1.5", "layer 0, step 2: 2", "layer 1, step 1: 2.5", "layer 1, step 2: 3",
    }  # fmt: skip
    assert found["layer 0, step 1: 1.5"] == "#f7f6f0"  # the lowest
    assert found["layer 1, step 2: 3"] == "#9e1c38"  # the highest
    assert len(set(found.values())) == 4


def test_equal_numbers_have_one_colour(tmp_path) -> None:
    assert len(set(cells(draw(read_history(write(tmp_path / "m.jsonl", 3), "dead_experts"))).values())) == 1


def test_long_runs_are_thinned_with_their_first_and_last_step(tmp_path) -> None:
    found = cells(draw(read_history(write(tmp_path / "m.jsonl", 1000, layers=1), "load_max_over_mean")))
    assert len(found) == MOST_COLUMNS
    steps = [int(label.split("step ")[1].split(":")[0]) for label in found]
    assert (steps[0], steps[-1]) == (1, 1000)


def test_the_command_writes_beside_the_metrics(tmp_path) -> None:
    write(tmp_path / "metrics.jsonl", 2)
    done = CliRunner().invoke(app, ["plot", str(tmp_path), "--metric", "dead_experts"])
    assert done.exit_code == 0, done.output
    assert "2 layers, 2 steps" in done.output
    ElementTree.parse(tmp_path / "moe_dead_experts.svg")


def test_a_line_cut_short_by_a_kill_is_left_out(tmp_path) -> None:
    path = write(tmp_path / "m.jsonl", 2)
    path.write_text(path.read_text() + '\n{"kind": "tra')
    assert read_history(path, "dead_experts").steps == [1, 2]


def test_what_is_not_there_is_named(tmp_path) -> None:
    path = write(tmp_path / "m.jsonl", 2)
    with pytest.raises(DataError, match=r'no metric moe/layer_N/dead_expert \(did you mean "dead_experts"\?\)'):
        read_history(path, "dead_expert")
    with pytest.raises(DataError, match="No such file or directory; name a run directory"):
        read_history(tmp_path / "none", "dead_experts")
    dense = tmp_path / "dense.jsonl"
    dense.write_text('{"kind": "train", "iteration": 1, "loss": 1.0}\n')
    with pytest.raises(DataError, match="it has none of a mixture of experts"):
        read_history(dense, "dead_experts")
    dense.write_text("no json\n{}\n")
    with pytest.raises(DataError, match="line 1 is no JSON"):
        read_history(dense, "dead_experts")
