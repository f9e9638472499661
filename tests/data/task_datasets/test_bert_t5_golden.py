"""BERT and T5 against what Megatron itself made of the same files, bit for bit."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mt_core.interfaces import Dataset, SplitRequest
from mt_data.datasets.bert import BertDataConfig, build_bert
from mt_data.datasets.t5 import T5DataConfig, build_t5
from mt_data.tokenizers.bert_wordpiece import BertWordPieceConfig, build_bert_wordpiece

OURS = {
    "text": "tokens",
    "types": "tokentype_ids",
    "text_enc": "encoder_tokens",
    "text_dec": "decoder_tokens",
    "enc_mask": "encoder_mask",
    "dec_mask": "decoder_mask",
}


def build(case: dict[str, Any], split: Any, golden: Path, cache: Path) -> Dataset | None:
    given = case["config"]
    vocabulary = BertWordPieceConfig(vocab_file=str(golden / "wordpiece_vocab.txt"), vocab_extra_ids=100)
    tokenizer = build_bert_wordpiece(vocabulary)
    common: dict[str, Any] = {
        "data_path": [str(golden / prefix) for prefix in given["blend"][0]],
        "split": given["split"],
        "data_cache_path": str(cache),
        "mask_prob": given["masking_probability"],
        "short_seq_prob": given["short_sequence_probability"],
        "masking_max_ngram": given["masking_max_ngram"],
        "masking_do_full_word": given["masking_do_full_word"],
        "masking_use_longer_ngrams": given["masking_use_longer_ngrams"],
        "masking_use_geometric_distribution": given["masking_use_geometric_distribution"],
    }
    asked = case[split]["num_samples_asked"]
    request = SplitRequest(split, asked, given["sequence_length"], given["random_seed"])
    if case["dataset"].startswith("BERT"):
        config = BertDataConfig(**common, bert_binary_head=given["classification_head"])
        return build_bert(config, tokenizer, request)
    return build_t5(T5DataConfig(**common, decoder_seq_length=given["sequence_length_decoder"]), tokenizer, request)


def digest(array: np.ndarray, dtype: str) -> str:
    return hashlib.sha256(np.ascontiguousarray(array.astype(dtype)).tobytes()).hexdigest()


@pytest.mark.parametrize("name", ["bert_nsp_ngram3", "t5_geometric"])
@pytest.mark.parametrize("split", ["train", "valid", "test"])
def test_equal_to_megatron(name: str, split: str, golden: Path, tmp_path: Path) -> None:
    cases = json.loads((golden / "order.json").read_text())["configs"]
    case = next(case for case in cases if case["name"] == name)
    dataset: Any = build(case, split, golden, tmp_path)
    expected = case[split]
    index = dataset.samples.index
    assert (len(dataset), str(index.dtype)) == (expected["len"], expected["sample_index"]["dtype"])
    assert index[:6].tolist() == expected["sample_index"]["first"]
    assert digest(index, str(index.dtype)) == expected["sample_index"]["sha256"]
    samples = [dataset[number] for number in range(expected["samples"]["count"])]
    fields = {key: facts for key, facts in expected["samples"].items() if isinstance(facts, dict) and "sha256" in facts}
    assert {OURS.get(key, key) for key in fields} == set(samples[0])
    for key, facts in fields.items():
        stacked = np.stack([sample[OURS.get(key, key)] for sample in samples])
        assert list(stacked.shape) == facts["shape"], key
        assert digest(stacked, facts["dtype"]) == facts["sha256"], key
