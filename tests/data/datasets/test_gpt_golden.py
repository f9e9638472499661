"""Orders and samples equal to what Megatron itself wrote, bit for bit."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mt_core.interfaces import SplitRequest
from mt_data.datasets.blend import BlendedDataset
from mt_data.datasets.config import BlendEntry
from mt_data.datasets.gpt import GPTDataConfig, build_gpt
from mt_data.datasets.splits import SPLITS

GOLDEN = os.environ.get("MT_GOLDEN")
pytestmark = pytest.mark.skipif(not GOLDEN, reason="MT_GOLDEN is not set: no golden files to compare with")
DATA = Path(GOLDEN or ".") / "data"


def gpt_configs() -> list[dict[str, Any]]:
    if not GOLDEN:
        return []
    configs = json.loads((DATA / "order.json").read_text())["configs"]
    return [config for config in configs if config["dataset"] == "GPTDataset"]


def entries(blend: list[Any]) -> list[BlendEntry]:
    prefixes, weights = blend
    given = weights or [None] * len(prefixes)
    return [BlendEntry(prefix=str(DATA / prefix), weight=w) for prefix, w in zip(prefixes, given, strict=True)]


def our_config(case: dict[str, Any], cache: Path) -> GPTDataConfig:
    theirs = case["config"]
    kept = ("eod_mask_loss", "reset_attention_mask", "reset_position_ids", "mid_level_dataset_surplus")
    values: dict[str, Any] = {key: theirs[key] for key in kept if key in theirs}
    if "blend" in theirs:
        values |= {"data_path": entries(theirs["blend"]), "split": theirs["split"]}
    else:
        named = zip(SPLITS, theirs["blend_per_split"], strict=True)
        values |= {f"{split}_data_path": entries(blend) for split, blend in named}
    return GPTDataConfig(seq_length=theirs["sequence_length"], data_cache_path=str(cache), **values)


def same(array: np.ndarray, golden: dict[str, Any]) -> None:
    assert (str(array.dtype), list(array.shape)) == (golden["dtype"], golden["shape"])
    assert hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest() == golden["sha256"]


def same_index(dataset: Any, golden: dict[str, Any]) -> None:
    if golden["class"] == "BlendedDataset":
        assert isinstance(dataset, BlendedDataset)
        for part, part_golden in zip(dataset.datasets, golden["datasets"], strict=True):
            same_index(part, part_golden)
    for name, array in dataset.index.arrays().items():
        same(array, golden[name])


def dense_attention_mask(segments: Any, length: int) -> Any:
    """Megatron's mask [1, s, s], True where the row must not look at the column."""
    masked = ~np.tri(length, dtype=bool)
    if segments is not None:
        masked |= segments[:, None] != segments[None, :]
    return masked[None]


def same_samples(dataset: Any, golden: dict[str, Any], length: int) -> None:
    samples = [dataset[k] for k in range(golden["count"])]
    for name in ("tokens", "labels", "loss_mask", "position_ids"):
        same(np.stack([sample[name] for sample in samples]), golden[name])
    masks = [dense_attention_mask(sample.get("segment_ids"), length) for sample in samples]
    same(np.stack(masks), golden["attention_mask"])


@pytest.mark.parametrize("case", gpt_configs(), ids=lambda case: case["name"])
def test_orders_and_samples_are_megatrons(case: dict[str, Any], fake_tokenizer: Any, tmp_path: Path) -> None:
    special = case["config"]["tokenizer"]
    tokenizer = fake_tokenizer(special["vocab_size"], special["eod"], special["pad"])
    config = our_config(case, tmp_path)
    for split, size in zip(SPLITS, case["sizes_train_valid_test"], strict=True):
        request = SplitRequest(split, size, config.seq_length, case["config"]["random_seed"])
        for _ in ("built", "from the cache"):
            dataset: Any = build_gpt(config, tokenizer, request)
            golden = case[split]
            if golden is None:
                assert dataset is None
                continue
            assert len(dataset) == golden["len"]
            same_index(dataset, golden)
        if golden is not None:
            same_samples(dataset, golden["samples"], config.seq_length)


def test_there_are_golden_configurations() -> None:
    names = {case["name"] for case in gpt_configs()}
    assert len(names) >= 12
    assert {"blend_2_weights", "blend_no_weights_exhaust", "blend_per_split"} <= names
