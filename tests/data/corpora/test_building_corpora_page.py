"""The page on building corpora does what it says when its blocks are run from top to bottom."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from mt_data.commands.corpora import clean, decontaminate, dedup, filter_urls
from mt_data.commands.preprocess import preprocess

PAGE = Path(__file__).parents[3] / "docs/data/building-corpora.md"


@pytest.mark.slow
def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    app = typer.Typer()
    for name, command in {
        "clean": clean,
        "dedup": dedup,
        "decontaminate": decontaminate,
        "filter-urls": filter_urls,
        "preprocess": preprocess,
    }.items():
        app.command(name)(command)
    blocks: list[Any] = re.findall(r"^```(python|sh)\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    ran = {kind: 0 for kind, _ in blocks}
    for kind, block in blocks:
        ran[kind] += 1
        if kind == "python":
            exec(compile(block, "block.py", "exec"), {})
            continue
        for line in block.splitlines():
            result = CliRunner().invoke(app, shlex.split(line)[2:], catch_exceptions=False)
            assert result.exit_code == 0, result.output
    assert ran == {"python": 2, "sh": 6}

    def counts(folder: str) -> dict[str, int]:
        report: dict[str, dict[str, int]] = json.loads(Path(folder, "report.json").read_text())
        return report["documents"]

    assert [counts(folder)["kept"] for folder in ("wanted", "cleaned", "unique", "final")] == [5, 4, 3, 3]
    assert counts("final")["written"] == 4
    assert Path("corpus_text_document.idx").exists()
    assert "café of the valley" in Path("cleaned/crawl.jsonl").read_text()
    assert "nine bridges" not in Path("final/crawl.jsonl").read_text()
