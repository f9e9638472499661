"""Sections of the report: data drawn, single experts, planned memory."""

from __future__ import annotations

import base64
import json
import re
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from tests.ops.test_reading import write_run

from mt_ops.reading.opening import open_run
from mt_ops.report.png import indexed_png
from mt_ops.report.sections.blends import drawn_by, drawn_data
from mt_ops.report.sections.configuration import configuration
from mt_ops.report.sections.experts import expert_load
from mt_ops.report.sections.history import evaluations
from mt_ops.report.sections.time_and_memory import ranks


def write_events(folder: Path, *events: dict[str, object]) -> None:
    (folder / "events.jsonl").write_text("".join(json.dumps({"time": 1.0, **event}) + "\n" for event in events))


def drawn(iteration: int, *samples: int) -> dict[str, object]:
    parts = [
        {"name": f"set {place}", "weight": 0.5, "samples": count, "tokens": 16 * count}
        for place, count in enumerate(samples)
    ]
    return {"kind": "data", "iteration": iteration, "first_sample": 0, "datasets": parts}


def test_data_of_steps_that_were_taken_again_counts_once(tmp_path: Path) -> None:
    """The first process saved at 4 and at 6; the second went on from 4, as the checkpoint of 6 was lost."""
    write_run(tmp_path, range(1, 9))
    write_events(
        tmp_path,
        {"kind": "start", "iteration": 0},
        drawn(4, 10, 6),
        drawn(6, 15, 9),
        {"kind": "start", "iteration": 4},
        drawn(8, 12, 4),
    )
    run = open_run(tmp_path)
    assert [(part.samples, part.tokens) for part in drawn_by(run)] == [(22, 352), (10, 160)]
    section = drawn_data([run])
    assert section is not None
    assert "68.750%" in section.body
    assert section.body.count("50.000%") == 2


def test_each_evaluation_is_a_row_with_a_time_that_can_be_read(tmp_path: Path) -> None:
    write_run(tmp_path, range(1, 9))
    write_events(
        tmp_path,
        {"kind": "start", "iteration": 0},
        *(
            {"kind": "evaluation", "iteration": step, "values": {"iteration": step, "valid_loss": 5.0}}
            for step in (2, 4, 6)
        ),
        {"kind": "start", "iteration": 4},
        {"kind": "evaluation", "iteration": 6, "time": 86400.0, "values": {"valid_loss": 3.5, "hella": 0.25}},
    )
    section = evaluations([open_run(tmp_path)])
    assert section is not None
    assert re.findall(r'<th scope="row">(\d+)</th>', section.body) == ["2", "4", "6"]
    assert re.findall(r'<th scope="col">(\w+)</th>', section.body) == ["step", "time", "valid_loss", "hella"]
    assert section.body.endswith('1970-01-02 00:00:00 UTC</time></td><td class="number">3.5</td><td class="number">0.25'
                                 "</td></tr></tbody></table></div></details>")  # fmt: skip


def test_the_page_says_whose_configuration_it_shows(tmp_path: Path) -> None:
    write_run(tmp_path, range(1, 9))
    (tmp_path / "config.json").write_text('{"train": {"seed": 1}}')
    write_events(tmp_path, {"kind": "start", "iteration": 0})
    assert "resumed at step" not in configuration([open_run(tmp_path)]).body  # type: ignore[union-attr]
    write_events(tmp_path, {"kind": "start", "iteration": 0}, {"kind": "start", "iteration": 4})
    assert "As of the process that resumed at step 4" in configuration([open_run(tmp_path)]).body  # type: ignore[union-attr]


def decoded_png(data: bytes) -> np.ndarray:
    """[height, width], of files without filters; by the format's own description."""
    width, height = struct.unpack(">II", data[16:24])
    begin = data.index(b"IDAT")
    size = struct.unpack(">I", data[begin - 4 : begin])[0]
    rows = np.frombuffer(zlib.decompress(data[begin + 4 : begin + 4 + size]), np.uint8).reshape(height, width + 1)
    assert not rows[:, 0].any()
    return rows[:, 1:]


def test_png_is_read_by_another_library() -> None:
    image = pytest.importorskip("PIL.Image")
    import io

    read = image.open(io.BytesIO(indexed_png(np.array([[0, 1, 1], [1, 0, 1]], np.uint8), ["102030", "fde725"])))
    assert np.asarray(read.convert("RGB"))[:, :, 0].tolist() == [[0x10, 0xFD, 0xFD], [0xFD, 0x10, 0xFD]]


def test_map_of_single_experts(tmp_path: Path) -> None:
    """Four experts: at step 10 expert 2 has everything; steps from 10 on were taken again after a resume."""
    write_run(tmp_path, range(1, 11))
    lines = [(1, [100, 100, 100, 100]), (10, [0, 400, 0, 0]), (20, [0, 400, 0, 0]), (10, [0, 0, 400, 0])]
    content = [json.dumps({"iteration": step, "layers": {"3": loads}}) + "\n" for step, loads in lines]
    (tmp_path / "expert-load.jsonl").write_text("".join(content))
    section = expert_load([open_run(tmp_path)])
    assert section is not None
    assert "layer 3: at step 10 expert 2 has most, 400 % of the mean, expert 0 least, 0 %; 3 of 4" in section.body
    (png,) = re.findall(r"base64,([^\"]+)", section.body)
    assert decoded_png(base64.b64decode(png)).tolist() == [[4, 0], [4, 0], [4, 7], [4, 0]]


def test_planned_memory_stands_beside_the_measured(tmp_path: Path) -> None:
    """Two stages of two ranks."""
    write_run(tmp_path, range(1, 3))
    plan = [{"pp_ranks": [stage], "total": (stage + 1) * 2**30, "bytes": {}} for stage in (0, 1)]
    write_events(tmp_path, {"kind": "memory_plan", "iteration": 0, "ranks": plan})
    (tmp_path / "config.json").write_text(json.dumps({"parallel": {"pipeline_model_parallel_size": 2}}))
    (tmp_path / "environment.json").write_text(json.dumps({"world_size": 4}))
    (tmp_path / "status").mkdir()
    for rank in range(4):
        status = {"rank": rank, "phase": "ended", "time": 1.0, "device_peak_bytes": 3 * 2**29}
        (tmp_path / f"status/rank-{rank}.json").write_text(json.dumps(status))
    section = ranks([open_run(tmp_path)])
    assert section is not None
    cells = re.findall(r"[12] GiB \(\d+% of it\)", section.body)
    assert cells == ["1 GiB (150% of it)"] * 2 + ["2 GiB (75% of it)"] * 2
