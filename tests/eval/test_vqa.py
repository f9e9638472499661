"""`mt eval vqa`, on a tiny LLaVA that learned from shards to name drawn shapes and their colours."""

from __future__ import annotations

import json
from contextlib import chdir
from pathlib import Path

import pytest
from PIL import Image
from tests.built_once import built_once
from tests.docs.blocks import ROOT, blocks, mt_commands

from mt_cli import main
from mt_eval.vqa import exact_match, normalized, vqa_accuracy

PAGE = [block for block in blocks() if block.page == "docs/guides/multimodal.md"]
QUIET = ["--set", "logging.progress=none", "--set", "train.num_threads=1", "--set", "train.eval_interval=null"]


def train_on_shapes(folder: Path) -> None:
    """Shards of shapes that docs/guides/multimodal.md draws, and `runs/shapes`, which its recipe trained on them."""
    (folder / "examples").symlink_to(ROOT / "examples")
    drawing = next(block.text for block in PAGE if "def write_shard" in block.text)
    with chdir(folder):
        exec(compile(drawing, "docs/guides/multimodal.md", "exec"), {})
        assert main.run([*words("mt train"), *QUIET]) == 0


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest) -> Path:
    return built_once(request, "shapes", train_on_shapes)


def words(beginning: str) -> list[str]:
    """The words after `mt` of the page's command that begins so."""
    return next(
        command.words for command in mt_commands() if command.block in PAGE and command.text.startswith(beginning)
    )


@pytest.mark.long
def test_a_model_trained_on_shards_names_shapes_and_colours(folder: Path, capsys) -> None:
    """Above 95 % of shapes that it has not seen; one that ignores the image is right in 1 of 12 at most."""
    with chdir(folder):
        assert main.run([*words("mt eval vqa"), "--json"]) == 0
        (result,) = json.loads(capsys.readouterr().out)["tasks"].values()
        sheet = next(block.text for block in PAGE if "A sheet of answers" in block.text)
        exec(compile(sheet, "docs/guides/multimodal.md", "exec"), {})
        # Bash reads $'...' so.
        asked = [word.removeprefix("$").replace("\\n", "\n") for word in words("mt generate")]
        assert main.run(asked) == 0
    assert result["samples"] == 200
    assert result["metrics"]["exact_match"] > 0.95
    assert result["metrics"]["vqa_accuracy"] == result["metrics"]["exact_match"]
    assert (folder / "runs" / "shapes" / "answers.png").is_file()
    assert "Assistant: blue triangle" in capsys.readouterr().out


@pytest.mark.long
def test_a_killed_evaluation_goes_on_and_damaged_images_are_named(folder: Path, tmp_path: Path, capsys) -> None:
    """From lines with several answers, by people who do not agree, and with a template that the run has not."""
    images = tmp_path / "images"
    images.mkdir()
    lines = [
        {"image": f"{n}.png", "question": "What?", "answers": ["A red circle", "red circle", "ball"]} for n in "ab"
    ]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    Image.new("RGB", (16, 16), (220, 40, 40)).save(images / "a.png")
    (images / "b.png").write_bytes(b"no image")
    output = tmp_path / "result.json"
    command = ["eval", "vqa", str(folder / "runs" / "shapes"), "--data", str(tmp_path / "questions.jsonl")]
    command += ["--image-folder", str(images), "--max-tokens", "16", "--output", str(output)]
    assert main.run(command) == 0
    assert "1 samples could not be scored" in " ".join(capsys.readouterr().out.split())
    samples = output.with_suffix(".samples.jsonl")
    header, first, second = samples.read_text().splitlines()
    assert json.loads(first)["details"]["answer"].split()[0] == "red"
    assert "b.png cannot be read as an image" in json.loads(second)["error"]
    samples.write_text(f"{header}\n{first}\n{second[:20]}")
    assert main.run(command) == 0
    assert samples.read_text().splitlines() == [header, first, second]


# -- answers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("The two dogs.", "2 dogs"),
        ("none", "0"),
        ("a red, round ball!", "red round ball"),
        ("1,000", "1000"),  # what is between digits goes, as in the reference
        ("10,000?!x", "10000x"),
        ("ping-pong", "ping pong"),
        ("red/-blue-green", "red blue green"),
        ("3.5", "3.5"),
        ("Don't know", "dont know"),
    ],
)
def test_answers_are_normalized_as_for_vqa(answer: str, expected: str) -> None:
    """By hand, from the rules of VQAv2's evaluation."""
    assert normalized(answer) == expected


def test_accuracy_counts_the_people_who_agree() -> None:
    """Ten people, of whom n gave the answer: the mean over them of min(1, others that did / 3)."""
    for agreeing, expected in ((0, 0), (1, 9 / 30), (2, (8 * 2 / 3 + 2 / 3) / 10), (3, (7 + 3 * 2 / 3) / 10), (4, 1)):
        given = ["Yes."] * agreeing + [f"other {n}" for n in range(10 - agreeing)]
        assert vqa_accuracy("yes", given) == pytest.approx(expected), agreeing
    assert vqa_accuracy("the cat", ["cat"]) == 1.0
    assert (exact_match(" cat\n", ["dog", "cat"]), exact_match("the cat", ["cat"])) == (1.0, 0.0)
