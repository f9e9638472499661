"""What is registered is what the data sets give."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from mt_core.interfaces import SplitRequest
from mt_data.datasets.glue_tasks import GLUE
from mt_data.datasets.specs import TASK_DATASETS

LENGTH = 48


@pytest.fixture
def sources(tmp_path: Path, write_sentences: Any, documents: Any) -> dict[str, tuple[str | None, dict[str, Any]]]:
    sentences = write_sentences(documents)
    write_sentences([[[60]]] * len(documents), "corpus_title_document")
    for name, task in GLUE.items():
        columns = [str(column) for column in (task.uid, task.label, *task.texts) if column is not None]
        row = {str(task.uid): "1", str(task.label): task.labels[0] if task.labels else "3.8"}
        lines = [columns] if task.header else []
        cells = [row.get(name, "waa") for name in columns] if task.header else ["source", "1", "", "waa"]
        (tmp_path / f"{name}.tsv").write_text("".join("\t".join(line) + "\n" for line in [*lines, cells]))
    (tmp_path / "texts.jsonl").write_text('{"text": "waa", "label": "no"}\n')
    article = {"article": "waa", "questions": ["wbb"], "options": [["a", "b", "c", "d"]], "answers": ["B"]}
    (tmp_path / "race.txt").write_text(json.dumps(article))
    chat = {"messages": [{"role": "user", "content": "waa"}, {"role": "assistant", "content": "wbb"}]}
    (tmp_path / "chat.jsonl").write_text(json.dumps(chat))
    return {
        "bert": (sentences, {}),
        "t5": (sentences, {"decoder_seq_length": LENGTH}),
        "ict": (sentences, {}),
        "sft": (str(tmp_path / "chat.jsonl"), {"chat_template": "plain"}),
        "instructions": (None, {"count": 8}),
        "race": (str(tmp_path), {}),
        "text_classification": (str(tmp_path / "texts.jsonl"), {"labels": ["no", "yes"]}),
        **{name: (str(tmp_path / f"{name}.tsv"), {}) for name in GLUE},
    }


@pytest.mark.parametrize("spec", TASK_DATASETS, ids=lambda spec: spec.name)
def test_samples_have_the_declared_fields(spec: Any, sources: Any, wordpiece: Any) -> None:
    path, keys = sources[spec.name]
    paths = {} if path is None else {"train_data_path": [path]}
    config = spec.config_type.load()(dataset_type=spec.name, **paths, **keys)
    dataset = spec.build.load()(config, wordpiece, SplitRequest("train", 1, LENGTH, 1))
    sample = dataset[0]
    assert {field.name: field.dtype for field in spec.sample} == {
        key: str(value.dtype) for key, value in sample.items()
    }
    named = {"sequence_length": LENGTH, "decoder_seq_length": LENGTH}
    for field in spec.sample:
        sizes = re.findall(r"\w+", field.shape)
        assert sample[field.name].shape == tuple(named.get(size) or int(size) for size in sizes), field.name
    assert dataset.describe(0)
