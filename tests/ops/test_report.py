"""The report's file: what it carries, what it escapes, how large it gets."""

from __future__ import annotations

import base64
import json
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from tests.ops.test_reading import MEGATRON, write_run
from typer.testing import CliRunner

from mt_ops.reading.opening import open_runs
from mt_ops.reading.run import Series
from mt_ops.report.blob import Blob, thinned
from mt_ops.report.page import report


def decoded(blob: str, reference: dict[str, Any]) -> np.ndarray:
    """As the page's script does it."""
    raw = np.frombuffer(zlib.decompress(base64.b64decode(blob)), dtype=np.uint8)
    planes = raw[reference["at"] : reference["at"] + 4 * reference["n"]].reshape(4, -1)
    plain = np.ascontiguousarray(planes.T).reshape(-1)
    return np.cumsum(plain.view("<u4")) if reference["kind"] == "u" else plain.view("<f4")


def test_numbers_come_back() -> None:
    blob, steps, values = Blob(), np.array([1, 5, 70000]), np.array([1.5, np.nan, -3e8])
    first, second = blob.steps(steps), blob.floats(values)
    assert blob.steps(steps) is first
    assert decoded(blob.text(), first).tolist() == steps.tolist()
    assert np.array_equal(decoded(blob.text(), second), values.astype(np.float32), equal_nan=True)


def test_long_curves_keep_their_extremes() -> None:
    values = np.sin(np.arange(100_000) / 50.0)
    values[[777, 50_001]] = 40.0, -40.0
    values[60_000] = np.nan
    kept = thinned(Series(np.arange(1, 100_001), values), 1000)
    assert len(kept) < 1100
    assert {778, 50_002, 60_001, 1, 100_000} <= set(kept.steps.tolist())


def test_page_of_two_sources(tmp_path: Path) -> None:
    write_run(tmp_path / "run", range(1, 4))
    (tmp_path / "run/config.json").write_text(json.dumps({"model": {"note": "<script>alert(1)</script>"}}))
    event = {"time": 1.0, "iteration": 2, "kind": "warning", "text": "</script><b>x"}
    (tmp_path / "run/events.jsonl").write_text(json.dumps(event) + "\n")
    (tmp_path / "megatron.log").write_text(MEGATRON)
    page = report(open_runs([tmp_path / "run", tmp_path / "megatron.log"]))
    assert "alert(1)</script>" not in page
    assert "&lt;b&gt;x" in page
    assert "Permission is hereby granted" in page  # uPlot's licence
    # Nothing is loaded: addresses are those of namespaces and of comments alone.
    assert not re.search(r"(src|href)=[\"']?(https?:)?//", page)
    data = json.loads(re.search(r'<script id="data"[^>]*>(.*?)</script>', page, re.DOTALL).group(1))  # type: ignore[union-attr]
    assert [run["source"] for run in data["runs"]] == ["mt", "Megatron-LM"]
    loss = data["runs"][1]["series"]["loss"]
    assert decoded(data["blob"], loss["values"]).tolist() == np.array([4.947, 4.5], dtype=np.float32).tolist()


def test_command(tmp_path: Path) -> None:
    import typer

    from mt_ops.commands.report import report as command

    write_run(tmp_path / "run", range(1, 4))
    app = typer.Typer()
    app.command()(command)
    result = CliRunner().invoke(app, [str(tmp_path / "run"), "-o", str(tmp_path / "r.html")])
    assert (result.exit_code, (tmp_path / "r.html").exists()) == (0, True), result.output
