"""A token file that is replaced under an unchanged configuration is named by mt compare and mt report. 2 s."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tests.ops.test_ctl import tiny

from mt_core.data.file_contents import BLOCK_BYTES, WHOLE, changed_files, configured_contents, file_content
from mt_core.train import Trainer
from mt_data.indexed import IndexedDatasetWriter
from mt_ops.compare.comparison import compare, lines
from mt_ops.compare.drawn_samples import drawn_samples
from mt_ops.reading.opening import open_run
from mt_ops.reading.run import Run, Series
from mt_ops.report.page import report


def write(prefix: Path, shift: int) -> None:
    """Documents of the same lengths, whatever the shift is: files of the same sizes."""
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for number in range(60):
            writer.add_document((np.arange(20) * 7 + number + shift) % 60, [20])
        writer.finish()


def train(folder: Path, name: str) -> Path:
    keys = (
        "data.dataset_type=gpt",
        f'data.data_path=["{folder}/tokens"]',
        'data.split="1,0,0"',
        "tokenizer.tokenizer_type=NullTokenizer",
        "tokenizer.vocab_size=64",
        "train.eval_iters=0",
        "train.train_iters=2",
        "lr_schedule.lr_warmup_iters=0",
    )
    Trainer(tiny(*keys), run_dir=folder / name).train()
    return folder / name


@pytest.mark.slow
def test_a_replaced_token_file_is_named(tmp_path: Path) -> None:
    write(tmp_path / "tokens", 0)
    a = open_run(train(tmp_path, "a"))
    write(tmp_path / "tokens", 1)
    b = open_run(train(tmp_path, "b"))
    compared = compare(a, b, samples=drawn_samples(a, b, 2))
    assert [Path(content.key).name for content in compared.contents] == ["tokens.bin"]
    assert compared.causes[0].text.startswith(f"{tmp_path}/tokens.bin had other content: 2,400 bytes, digest")
    text = "\n".join(lines(compared))
    assert f"warning: {tmp_path}/tokens.bin is no longer what a was trained on" in text
    assert "what b was trained on" not in text
    assert "samples: the first 2 are the same, as the files are now" in text
    assert f"{tmp_path}/tokens.bin is no longer what a was trained on" in report([a])
    assert "no longer what" not in report([b])


@pytest.mark.slow
def test_runs_that_recorded_no_files_are_compared_by_the_fingerprints_of_their_checkpoints(tmp_path: Path) -> None:
    write(tmp_path / "tokens", 0)
    paths = [train(tmp_path, "a")]
    write(tmp_path / "tokens", 1)
    paths.append(train(tmp_path, "b"))
    for path in paths:
        events = [json.loads(line) for line in (path / "events.jsonl").read_text().splitlines()]
        old = [{key: value for key, value in entry.items() if key not in ("files", "data")} for entry in events]
        (path / "events.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in old))
    a, b = map(open_run, paths)
    compared = compare(a, b, samples=drawn_samples(a, b, 2))
    assert [content.key for content in compared.contents] == ["data.content"]
    assert f"the same [data] read other content from {tmp_path}/tokens" in compared.causes[0].text
    assert len(compared.changed) == 1
    assert compared.changed[0].startswith(f"{tmp_path}/tokens is no longer what a was trained on")


def run_of(name: str, tokenizer_model: str, **identity: str) -> Run:
    data = {f"{section}.content": fingerprint for section, fingerprint in identity.items()}
    start = {"time": 1.0, "iteration": 0, "kind": "start", "data": data, "files": []}
    config = {"tokenizer.tokenizer_model": tokenizer_model, "data.seq_length": 16}
    losses = Series(np.array([1]), np.array([5.0 if name == "a" else 4.0]))
    return Run(name, Path(name), "mt", {"loss": losses}, config=config, events=[start])


@pytest.mark.parametrize(
    ("other", "texts"),
    [
        # Named by the configuration, which is the whole cause.
        (run_of("b", "second", data="d2", tokenizer="t2"), ["tokenizer.tokenizer_model is first in A and second in B"]),
        (
            run_of("b", "first", data="d2", tokenizer="t2"),
            [
                "tokenizer.content is t1 in A and t2 in B: the same [tokenizer] read other content from the "
                "tokenizer's files",
                "data.content is d1 in A and d2 in B: its texts have other tokens by the tokenizer, or are other texts",
            ],
        ),
        (
            run_of("b", "first", data="d2", tokenizer="t1"),
            ["data.content is d1 in A and d2 in B: the same [data] read other content from its data"],
        ),
    ],
)
def test_another_tokenizer_comes_before_the_tokens_that_follow_from_it(other: Run, texts: list[str]) -> None:
    compared = compare(run_of("a", "first", data="d1", tokenizer="t1"), other)
    assert [cause.text for cause in compared.causes] == texts


def test_any_byte_of_a_small_file_and_blocks_of_a_large_one_are_looked_at(tmp_path: Path) -> None:
    small, large = tmp_path / "small", tmp_path / "large"
    small.write_bytes(bytes(1000))
    large.write_bytes(bytes(WHOLE + 5 * BLOCK_BYTES))
    recorded = [entry for path in (small, large) if (entry := file_content(path)) is not None]
    assert changed_files(recorded) == []
    small.write_bytes(bytes(999) + b"x")
    large.write_bytes(bytes(WHOLE + 5 * BLOCK_BYTES - 1) + b"x")
    assert changed_files(recorded) == recorded
    small.unlink()
    assert changed_files(recorded) == recorded[1:], "of a file that is not here nothing is known"


def test_files_of_prefixes_folders_patterns_and_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.bin", "a.idx", "b.bin", "notes/x.txt", "notes/cache/y.bin", "more/1.md", "more/2.rst", "gpt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "list.txt").write_text("0.5 a 0.5 b")

    def files(*overrides: str) -> list[str]:
        keys = ("data.dataset_type=gpt", "tokenizer.tokenizer_type=ByteLevelTokenizer")
        found = configured_contents(tiny(*keys, *overrides).config)
        return [str(Path(entry["path"]).relative_to(tmp_path)) for entry in found]

    assert files('data.data_path=["a", "notes", "more/*.md"]') == ["a.bin", "a.idx", "notes/x.txt", "more/1.md"]
    assert files("data.data_args_path=list.txt") == ["list.txt", "a.bin", "a.idx", "b.bin"]
