"""examples/assistant, the whole life of a model, with few modules and few steps. Costs about 14 CPU seconds."""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from tests.docs.blocks import ROOT

from mt_cli import main

pytest.importorskip("transformers")
EXAMPLE = ROOT / "examples" / "assistant"


def run_here(words: list[str], folder: Path) -> None:
    """A command of the example in this process, which has torch and the plugins already."""
    if words[0] == "mt":
        assert main.run(words[1:], debug=True) == 0, words
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", words[1:])
        patch.syspath_prepend(str(folder))
        patch.delitem(sys.modules, "documents", raising=False)
        runpy.run_path(words[1], run_name="__main__")


@pytest.mark.long
def test_the_short_form_runs_from_text_to_a_served_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    # served.py starts mt as a program.
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    example = runpy.run_path(str(EXAMPLE / "assistant.py"))
    example["main"].__globals__["run"] = run_here
    example["main"](["--short", "--folder", "."])
    out = capsys.readouterr().out
    questions = len((tmp_path / "questions" / "prompts.jsonl").read_text().splitlines())
    assert questions > 3
    assert f"transformers gives the same text for {questions} of {questions} questions" in out
    assert "serves a page of" in out
    table = out[out.index("bits a byte") :].splitlines()[1:4]
    assert [row.split()[0] for row in table] == ["pretrained", "instructed", "preferred"]
    for name in ("report.html", "loss.svg", "assistant/model.safetensors", "assistant/generation_config.json"):
        assert (tmp_path / name).exists(), name
    # A second call has nothing to do, and shows the seconds of the first.
    seconds = json.loads((tmp_path / "seconds.json").read_text())
    assert next(iter(seconds)) == "data"
    assert list(seconds)[-1] == "outcome"
    example["main"](["--short", "--folder", "."])
    assert "$ mt" not in capsys.readouterr().out


@pytest.mark.slow
def test_no_question_about_a_held_out_function_is_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    monkeypatch.delitem(sys.modules, "documents", raising=False)
    runpy.run_path(str(EXAMPLE / "questions.py"))["main"](tmp_path, ["json", "shutil", "textwrap", "string"])
    read = {path.stem: [json.loads(line) for line in path.read_text().splitlines()] for path in tmp_path.iterdir()}
    trained = {one["messages"][0]["content"] for one in read["train"]}
    trained |= {one["prompt"][0]["content"] for one in read["pairs"]}
    held_out = {one["prompt"].split("\n\n")[0].removeprefix("User: ") for one in read["prompts"]}
    assert held_out
    assert not held_out & trained
    for pair in read["pairs"]:
        chosen, rejected = pair["chosen"][0]["content"], pair["rejected"][0]["content"]
        assert rejected.startswith(chosen)
        assert chosen.endswith(".")
