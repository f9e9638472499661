"""`mt eval vqa`, on a tiny LLaVA that learned from shards to name drawn shapes and their colours."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image
from tests.data.images.shape_shards import write_questions

from mt_cli import main
from mt_eval.vqa.answers import exact_match, normalized, vqa_accuracy

RECIPE = """
[model]
family = "llava"
image_token_index = 261
vision_feature_layers = [-1]
[model.vision_model]
num_layers = 2
hidden_size = 32
num_attention_heads = 2
img_h = 16
img_w = 16
patch_dim = 8
add_pooler = false
[model.language_model]
family = "llama"
num_layers = 2
hidden_size = 48
num_attention_heads = 2
max_position_embeddings = 64
[data]
dataset_type = "image_text"
train_data_path = ["{folder}/train-*.tar"]
seq_length = 48
img_h = 16
img_w = 16
image_token_index = 261
image_seq_length = 4
[train]
micro_batch_size = 64
train_iters = 300
num_threads = 1
[optimizer]
lr = 3e-3
min_lr = 5e-4
[lr_schedule]
lr_decay_style = "cosine"
lr_warmup_iters = 20
[checkpoint]
save_interval = 1000
[logging]
progress = "none"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Shards of drawn shapes, and `run`, which was trained on them."""
    folder = tmp_path_factory.mktemp("shapes")
    for number in range(4):
        write_questions(folder / f"train-{number}.tar", 500, seed=number)
    write_questions(folder / "valid.tar", 200, seed=99)
    (folder / "recipe.toml").write_text(RECIPE.format(folder=folder))
    assert main.run(["train", str(folder / "recipe.toml"), "--run-dir", str(folder / "run")]) == 0
    return folder


@pytest.mark.slow
def test_a_model_trained_on_shards_names_shapes_and_colours(folder: Path, capsys) -> None:
    """Above 95 % of shapes that it has not seen; one that ignores the image is right in 1 of 12 at most."""
    command = ["eval", "vqa", str(folder / "run"), "--data", str(folder / "valid.tar")]
    assert main.run([*command, "--json"]) == 0
    (result,) = json.loads(capsys.readouterr().out)["tasks"].values()
    assert result["samples"] == 200
    assert result["metrics"]["exact_match"] > 0.95
    assert result["metrics"]["vqa_accuracy"] == result["metrics"]["exact_match"]


@pytest.mark.slow
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
    command = ["eval", "vqa", str(folder / "run"), "--data", str(tmp_path / "questions.jsonl")]
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
        ("ping-pong", "ping pong"),
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
