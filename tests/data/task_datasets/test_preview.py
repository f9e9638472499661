"""`mt data preview` on data sets whose samples are not causal, although their fields have the same names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from mt_data.commands.run_data import preview

app = typer.Typer()
app.command()(preview)


def show(folder: Path, vocab_file: str, data: str) -> str:
    file = folder / "run.toml"
    file.write_text(
        f"""
        [tokenizer]
        tokenizer_type = "BertWordPieceLowerCase"
        vocab_file = "{vocab_file}"
        vocab_extra_ids = 40
        [data]
        seq_length = 24
        {data}
        [train]
        train_iters = 2
        micro_batch_size = 1
        """
    )
    result = CliRunner().invoke(app, [str(file), "--samples", "1"], env={"COLUMNS": "400"})
    assert result.exit_code == 0, result.exception
    return result.output


@pytest.fixture(scope="module")
def sentences() -> list[list[list[int]]]:
    """Four documents of three sentences: wa1 wa2 wa3, ..."""
    return [[[49, 50, 51], [52, 53], [54, 55, 56]] for _ in range(4)]


def test_masked_words_are_shown(
    tmp_path: Path, vocab_file: str, write_sentences: Any, sentences: list[list[list[int]]]
) -> None:
    prefix = write_sentences(sentences)
    output = show(tmp_path, vocab_file, f'dataset_type = "bert"\ndata_path = ["{prefix}"]\nsplit = "1,0,0"')
    assert "tokens int64[24]" in output
    assert "[CLS] " in output
    assert "[MASK]" in output
    assert "count in the loss" not in output  # the legend of a causal sample


def test_classes_are_numbers(tmp_path: Path, vocab_file: str) -> None:
    ten = "index promptID pairID genre s1 s2 s3 s4 sentence1 sentence2"
    header = [*ten.split(" "), "label1", "gold_label"]
    row = ["0", "1", "2", "fiction", "", "", "", "", "wa wb", "wc", "neutral", "neutral"]
    (tmp_path / "train.tsv").write_text("\n".join("\t".join(line) for line in (header, row)) + "\n")
    output = show(tmp_path, vocab_file, f'dataset_type = "mnli"\ntrain_data_path = ["{tmp_path}/train.tsv"]')
    assert "labels int64[] [2]" in output
    assert "[SEP]" in output


def test_each_option_is_shown_by_itself(tmp_path: Path, vocab_file: str) -> None:
    question = {"article": "wa", "questions": ["wb _"], "options": [["wc", "wd", "we", "wf"]], "answers": ["B"]}
    (tmp_path / "q.txt").write_text(json.dumps(question))
    output = show(tmp_path, vocab_file, f'dataset_type = "race"\ntrain_data_path = ["{tmp_path}"]')
    assert "tokens int64[4, 24]" in output
    assert output.count("[CLS]") == 4
