"""A run is not resumed on other data than it was trained on, although the configuration names the same files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.core.conftest import LITTLE_TEXT

from mt_core.errors import CheckpointError
from mt_core.train import Trainer
from mt_core.train.checkpoint.resume import data_changes, data_identity
from mt_data.indexed import IndexedDatasetWriter
from mt_data.indexed.manifest import manifest_path


def write(prefix: Path, shift: int) -> None:
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for number in range(40):
            length = 20 + (number + shift) % 5
            writer.add_document((np.arange(length) * 7 + number + shift) % 60, [length])
        writer.finish()


def options(*prefixes: Path) -> list[str]:
    blend = ", ".join(f'{{prefix = "{prefix}", weight = 1.0}}' for prefix in prefixes)
    return [
        "data.dataset_type=gpt",
        f"data.data_path=[{blend}]",
        'data.split="1,0,0"',
        "tokenizer.tokenizer_type=NullTokenizer",
        "tokenizer.vocab_size=64",
        "train.eval_iters=0",
    ]


@pytest.mark.parametrize("manifest", [True, False])
@pytest.mark.parametrize("names", [["a"], ["a", "b"]])
def test_another_corpus_under_the_same_path(tiny: Any, tmp_path: Path, manifest: bool, names: list[str]) -> None:
    def corpus(shift: int) -> None:
        for name in names:
            write(tmp_path / name, shift)
            if not manifest:  # as Megatron leaves it
                Path(manifest_path(str(tmp_path / name))).unlink()

    keys = options(*(tmp_path / name for name in names))
    corpus(0)
    Trainer(tiny(*keys, "train.exit_iteration=2"), run_dir=tmp_path / "run").train()
    corpus(0)  # the same again: nothing is said
    Trainer(tiny(*keys, "train.exit_iteration=3"), run_dir=tmp_path / "run").train()
    corpus(1)
    with pytest.raises(
        CheckpointError, match=r"data\.content: \w{16} in the checkpoint, \w{16} now\n.*files .* hold something else"
    ):
        Trainer(tiny(*keys), run_dir=tmp_path / "run")
    accepted = tiny(*keys, 'checkpoint.accept_changes=["data.content"]')
    run = Trainer(accepted, run_dir=tmp_path / "run")
    run.train()
    assert run.state.iteration == 6


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "small"), [("mock", 'data.split="1,1,98"'), ("builtin", LITTLE_TEXT)], ids=["mock", "builtin"]
)
def test_data_that_lies_in_no_file_is_the_same_each_time(tiny: Any, tmp_path: Path, kind: str, small: str) -> None:
    keys = [f"data.dataset_type={kind}", small]
    run = Trainer(tiny(*keys, "train.exit_iteration=2"), run_dir=tmp_path)
    assert "data.content" in data_identity(run.train_data, None)
    run.train()
    assert Trainer(tiny(*keys), run_dir=tmp_path).state.iteration == 2


class Named:
    def __init__(self, name: str) -> None:
        self.name = name

    def fingerprint(self) -> str:
        return self.name


def test_what_is_compared() -> None:
    stored = data_identity(Named("one"), Named("tokenizer"))  # type: ignore[arg-type]
    assert [change.key for change in data_changes(stored, data_identity(Named("two"), None))] == ["data.content"]
    other = data_identity(Named("one"), Named("other"))  # type: ignore[arg-type]
    assert [change.key for change in data_changes(stored, other)] == ["tokenizer.content"]
    assert list(data_changes(stored, data_identity([1, 2], None))) == []  # a list of samples says nothing
    assert list(data_changes({}, stored)) == []  # nor does a checkpoint of an older release
