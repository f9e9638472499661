"""The commands as a user types them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from mt_core.errors import ConfigError
from mt_data.commands.corpora import clean, decontaminate, dedup, filter_urls
from mt_data.corpora.streaming import Reading

SENTENCE = "The people of the old city have lived with the river number {} and will be there for ever. "


def app() -> typer.Typer:
    made = typer.Typer()
    for name, command in (
        ("clean", clean),
        ("dedup", dedup),
        ("decontaminate", decontaminate),
        ("filter-urls", filter_urls),
    ):
        made.command(name)(command)
    return made


def type_in(*words: str | Path) -> str:
    result = CliRunner().invoke(app(), [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def texts_in(folder: Path) -> list[str]:
    return [json.loads(line)["text"] for path in sorted(folder.glob("*.jsonl")) for line in path.open()]


@pytest.mark.slow
def test_from_a_crawl_to_training_text(write_jsonl: Any, tmp_path: Path) -> None:
    good = [" ".join(SENTENCE.format(10 * n + i) for i in range(12)) for n in range(4)]
    contaminated = good[3] + "What is the name of the tall grey tower that stands beside the northern gate? "
    texts = [good[0], good[1], good[1] + " End.", contaminated, "Too short."]
    records = [{"url": f"http://site{n}.com/", "text": text} for n, text in enumerate(texts)]
    write_jsonl("raw/a.jsonl", records)
    evaluation = write_jsonl(
        "eval.jsonl", [{"q": "What is the name of the tall grey tower that stands beside the northern gate"}]
    )
    (tmp_path / "bad.list").write_text("site0.com\n")
    raw = tmp_path / "raw/*.jsonl"

    out = type_in("filter-urls", raw, "-o", tmp_path / "1", "--domains", tmp_path / "bad.list")
    assert "dropped: domain" in out
    out = type_in(
        "clean", tmp_path / "1/*.jsonl", "-o", tmp_path / "2", "--set", "min_tokens=100", "--dropped", tmp_path / "d"
    )
    assert "dropped: too_few_tokens" in out
    assert texts_in(tmp_path / "d") == ["Too short."]
    out = type_in("dedup", tmp_path / "2/*.jsonl", "-o", tmp_path / "3", "--threshold", "0.7")
    assert "dropped: near_duplicate" in out
    out = type_in(
        "decontaminate", tmp_path / "3/*.jsonl", "-o", tmp_path / "4", "--eval", evaluation, "--eval-keys", "q"
    )
    assert "document_cut" in out
    final = texts_in(tmp_path / "4")
    assert final[0] == good[1]
    assert "grey tower" not in " ".join(final)
    assert good[3].startswith(final[1])
    assert len(final) == 2


def test_rules_lists_every_rule() -> None:
    from mt_data.corpora.clean_options import CleanOptions

    out = type_in("clean", "--rules")
    assert all(name[:10] in out for name in CleanOptions.model_fields)


def test_flags_reach_the_library(write_jsonl: Any, tmp_path: Path) -> None:
    write_jsonl("a.jsonl", [{"body": "A b!"}, {"body": "a  B"}, {"body": "c"}])
    path = tmp_path / "a.jsonl"
    words = ["dedup", path, "-o", tmp_path / "out", "--method", "exact", "--normalize", "words", "--text-key", "body"]
    type_in(*words, "--ending", ".jsonl.gz", "--report", tmp_path / "r.json")
    assert json.loads((tmp_path / "r.json").read_text())["documents"]["dropped"] == 1
    assert (tmp_path / "out/a.jsonl.gz").exists()
    with pytest.raises(AssertionError, match=r"(?s)Invalid value for '--on-error'.*'ignore' is not one of 'raise'"):
        type_in("clean", path, "-o", tmp_path / "x", "--on-error", "ignore")
    ignore: Any = "ignore"
    with pytest.raises(ConfigError, match="--on-error 'ignore' is not known; give raise or skip"):
        Reading(on_error=ignore)


def test_neither_torch_nor_optional_packages_are_imported_to_show_help() -> None:
    code = """
import sys
import mt_data.commands.corpora
print([m for m in ("torch", "numpy", "scipy", "ftfy", "py3langid", "datasketch", "pydantic") if m in sys.modules])
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.slow
def test_no_command_imports_torch(write_jsonl: Any, tmp_path: Path) -> None:
    path = write_jsonl("a.jsonl", [{"text": SENTENCE * 20, "url": "http://a.b/"}])
    code = """
import sys
sys.modules["torch"] = None
from pathlib import Path
from mt_data.corpora.cleaning import clean
from mt_data.corpora.clean_options import preset
from mt_data.corpora.decontamination import decontaminate
from mt_data.corpora.deduplication import dedup
from mt_data.corpora.options import DedupOptions
from mt_data.corpora.options import OverlapOptions
from mt_data.corpora.running import RunOptions
from mt_data.corpora.url_filter import UrlLists, filter_urls
path, out = Path(sys.argv[1]), Path(sys.argv[2])
reports = [
    clean([path], preset("openwebtext"), RunOptions(out / "1")),
    dedup([path], DedupOptions(), RunOptions(out / "2")),
    decontaminate([path], [path], ["text"], OverlapOptions(), RunOptions(out / "3")),
    filter_urls([path], UrlLists(), RunOptions(out / "4")),
]
print([report.total.kept for report in reports])
"""
    command = [sys.executable, "-c", code, str(path), str(tmp_path / "out")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "[1, 1, 0, 1]\n"
