"""Byte for byte what Megatron's script wrote."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mt_data.preprocess.options import PreprocessOptions
from mt_data.preprocess.run import preprocess

if "MT_GOLDEN" not in os.environ:
    pytest.skip("MT_GOLDEN names no folder of golden files", allow_module_level=True)
GOLDEN = Path(os.environ["MT_GOLDEN"]) / "data"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "source", "keys", "append_eod", "workers"),
    [
        ("corpus", "corpus", ("text", "title"), True, 1),
        ("corpus", "corpus", ("text", "title"), True, 2),
        ("edge", "edge", ("title", "text"), True, 1),
        ("edge_noeod", "edge", ("text",), False, 1),
    ],
)
def test_output_equals_megatrons(
    tmp_path: Path, name: str, source: str, keys: tuple[str, ...], append_eod: bool, workers: int
) -> None:
    vocabulary = {
        "vocab_file": str(GOLDEN / "gpt2" / "encoder.json"),
        "merge_file": str(GOLDEN / "gpt2" / "vocab.bpe"),
    }
    report = preprocess(
        PreprocessOptions(
            input=(str(GOLDEN / f"{source}.jsonl"),),
            output_prefix=str(tmp_path / name),
            tokenizer_type="GPT2BPETokenizer",
            tokenizer=vocabulary,
            json_keys=keys,
            append_eod=append_eod,
            workers=workers,
            shard_mb=0.1,
        )
    )
    assert set(report.outputs) == set(keys)
    for prefix in report.outputs.values():
        for ending in (".bin", ".idx"):
            ours = Path(f"{prefix}{ending}").read_bytes()
            assert ours == (GOLDEN / "prep" / f"{prefix.name}{ending}").read_bytes(), prefix.name + ending
