"""Samples from token files and raw text: masks, splits, blends, and what is refused."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from mt_core.errors import ConfigError, DataError
from mt_core.interfaces import Dataset, SplitRequest
from mt_data.datasets.gpt import GPTDataConfig, GPTDataset, build_gpt
from mt_data.datasets.raw_text import RawTextOptions, tokenized
from mt_data.preprocess.options import PreprocessOptions
from mt_data.preprocess.run import preprocess
from mt_data.tokenizers.byte_level import ByteLevelTokenizer

EOD = 99


def documents(count: int, length: int = 10) -> list[list[int]]:
    """Document d is d, d, ..., EOD."""
    return [[d] * (length - 1) + [EOD] for d in range(count)]


def request(split: str = "train", samples: int | None = None, length: int = 8, seed: int = 1) -> SplitRequest:
    return SplitRequest(split, samples, length, seed)  # type: ignore[arg-type]


def built(config: GPTDataConfig, tokenizer: Any, asked: SplitRequest) -> Dataset:
    dataset = build_gpt(config, tokenizer, asked)
    assert dataset is not None
    assert not isinstance(dataset, dict)
    return dataset  # type: ignore[return-value]


@pytest.fixture
def prefix(write_tokens: Callable[..., str]) -> str:
    return write_tokens("small_text_document", documents(20))


@pytest.fixture
def tokenizer(fake_tokenizer: Any) -> Any:
    return fake_tokenizer(100, EOD)


# -- samples ------------------------------------------------------------------------------------------


def test_sample_fields_and_the_shift(prefix: str, tokenizer: Any) -> None:
    dataset = built(GPTDataConfig(data_path=[prefix], split="100"), tokenizer, request())  # type: ignore[list-item]
    assert len(dataset) == (200 - 1) // 8
    sample = dataset[0]
    types = {name: (array.dtype.name, array.shape) for name, array in sample.items()}
    assert types == {
        "tokens": ("int64", (8,)),
        "labels": ("int64", (8,)),
        "loss_mask": ("float32", (8,)),
        "position_ids": ("int64", (8,)),
    }
    np.testing.assert_array_equal(sample["tokens"][1:], sample["labels"][:-1])


def test_resets_and_masks_at_documents(write_tokens: Callable[..., str], tokenizer: Any) -> None:
    name = write_tokens("one", [[1, 2, EOD, 3, EOD, EOD, 4, 5, 6]])
    config = GPTDataConfig(
        data_path=[name],  # type: ignore[list-item]
        split="100",
        reset_position_ids=True,
        reset_attention_mask=True,
        eod_mask_loss=True,
    )
    sample = built(config, tokenizer, request())[0]
    assert sample["tokens"].tolist() == [1, 2, EOD, 3, EOD, EOD, 4, 5]
    assert sample["position_ids"].tolist() == [0, 1, 2, 0, 1, 0, 0, 1]
    assert sample["segment_ids"].tolist() == [0, 0, 0, 1, 1, 2, 3, 3]
    assert sample["segment_ids"].dtype == np.int32
    assert sample["loss_mask"].tolist() == [1, 1, 0, 1, 0, 0, 1, 1]


def test_without_the_extra_token_the_last_label_is_padding(prefix: str, tokenizer: Any) -> None:
    config = GPTDataConfig(data_path=[prefix], split="100", add_extra_token_to_sequence=False)  # type: ignore[list-item]
    dataset = built(config, tokenizer, request())
    assert len(dataset) == 200 // 8
    sample = dataset[3]
    np.testing.assert_array_equal(sample["tokens"][1:], sample["labels"][:-1])
    assert (sample["labels"][-1], sample["loss_mask"].tolist()) == (0, [1.0] * 7 + [0.0])


def test_last_validation_sample_is_padded_when_kept(prefix: str, tokenizer: Any) -> None:
    config = GPTDataConfig(
        valid_data_path=[prefix],  # type: ignore[list-item]
        drop_last_partial_validation_sequence=False,
    )
    dataset = built(config, tokenizer, request("valid", length=64))
    assert isinstance(dataset, GPTDataset)
    assert len(dataset) == 4  # 199 predictions in windows of 64
    (last,) = np.flatnonzero(dataset.index.shuffle_index == 3)
    sample = dataset[int(last)]
    assert sample["loss_mask"].sum() == 199 - 3 * 64
    assert (sample["tokens"][sample["loss_mask"] == 0][1:] == 0).all()
    assert sum(dataset[k]["loss_mask"].sum() for k in range(4)) == 199


def test_padding_masks_labels_unless_it_is_another_special_id(prefix: str, fake_tokenizer: Any) -> None:
    def counted(pad: int, **keys: bool) -> float:
        config = GPTDataConfig(data_path=[prefix], split="100", **keys)  # type: ignore[list-item, arg-type]
        dataset = built(config, fake_tokenizer(100, EOD, pad), request())
        return sum(float(dataset[k]["loss_mask"].sum()) for k in range(len(dataset)))

    everything = counted(50)
    assert everything == 24 * 8
    assert counted(7) < everything  # document 7 consists of the padding id
    assert counted(EOD) == everything
    assert counted(EOD, allow_ambiguous_pad_tokens=True) < everything


def test_switches_that_need_an_end_of_document_id(prefix: str, fake_tokenizer: Any) -> None:
    config = GPTDataConfig(data_path=[prefix], eod_mask_loss=True)  # type: ignore[list-item]
    with pytest.raises(ConfigError, match=r"data\.eod_mask_loss=true needs an end-of-document id"):
        build_gpt(config, fake_tokenizer(100, None), request())


def test_empty_documents_are_passed_over_and_named_rightly(write_tokens: Callable[..., str], tokenizer: Any) -> None:
    name = write_tokens("holes", [[], [1] * 5, [], [], [2] * 5])
    dataset = built(GPTDataConfig(data_path=[name], split="100"), tokenizer, request(length=4))  # type: ignore[list-item]
    named = {dataset.describe(k).split(": ")[1].split(" tokens")[0] for k in range(len(dataset))}
    assert named <= {"document 1", "document 4"}
    for k in range(len(dataset)):
        first = dataset.describe(k).split(": ")[1]
        assert first.startswith(f"document {1 if dataset[k]['tokens'][0] == 1 else 4}")


def test_outside_of_the_samples(prefix: str, tokenizer: Any) -> None:
    dataset = built(GPTDataConfig(data_path=[prefix]), tokenizer, request())  # type: ignore[list-item]
    for number in (-1, len(dataset)):
        with pytest.raises(IndexError, match=f"sample {number} of"):
            dataset[number]


# -- splits and blends -------------------------------------------------------------------------------


def test_splits_share_no_document(prefix: str, tokenizer: Any) -> None:
    config = GPTDataConfig(data_path=[prefix], split="70,20,10")  # type: ignore[list-item]
    seen = []
    for split in ("train", "valid", "test"):
        dataset = built(config, tokenizer, request(split, length=4))
        seen.append({int(t) for k in range(len(dataset)) for t in dataset[k]["tokens"]} - {EOD})
    assert seen == [set(range(14)), set(range(14, 18)), {18, 19}]


def test_default_split_is_megatrons(write_tokens: Callable[..., str], tokenizer: Any) -> None:
    config = GPTDataConfig(data_path=[write_tokens("many", documents(1000, 2))])  # type: ignore[list-item]
    dataset = built(config, tokenizer, request("valid", length=1))
    assert isinstance(dataset, GPTDataset)
    assert sorted(set(dataset.index.document_index.tolist())) == list(range(969, 999))


def test_an_empty_split_says_which_and_why(write_tokens: Callable[..., str], tokenizer: Any) -> None:
    name = write_tokens("two_hundred", documents(200))
    config = GPTDataConfig(data_path=[name], split="949,50,1")  # type: ignore[list-item]
    with pytest.raises(DataError, match=r"test split of .*two_hundred is empty.*949,50,1.*200 to 200 of 200.*larger"):
        build_gpt(config, tokenizer, request("test", 10))
    assert build_gpt(GPTDataConfig(data_path=[name], split="99,1"), tokenizer, request("test", 10)) is None  # type: ignore[list-item]


def test_a_split_too_short_for_a_sample(prefix: str, tokenizer: Any) -> None:
    config = GPTDataConfig(data_path=[prefix], split="80,10,10")  # type: ignore[list-item]
    with pytest.raises(DataError, match=r"valid split of .* has 20 tokens in 2 documents, too few .*seq_length=64"):
        build_gpt(config, tokenizer, request("valid", None, length=64))


def test_a_file_without_tokens(write_tokens: Callable[..., str], tokenizer: Any) -> None:
    with pytest.raises(DataError, match="has no sequences at all"):
        build_gpt(GPTDataConfig(data_path=[write_tokens("void", [[], []])]), tokenizer, request())  # type: ignore[list-item]


def test_weighted_blend(write_tokens: Callable[..., str], tokenizer: Any) -> None:
    first, second = write_tokens("a", [[1] * 50] * 4), write_tokens("b", [[2] * 50] * 400)
    entries = [{"prefix": first, "weight": 30}, {"prefix": second, "weight": 70}]
    config = GPTDataConfig.model_validate({"data_path": entries, "split": "100"})
    dataset = built(config, tokenizer, request(samples=1000))
    assert len(dataset) == 1000
    firsts = [int(dataset[k]["tokens"][0]) for k in range(len(dataset))]
    assert (firsts.count(1), firsts.count(2)) == (300, 700)
    assert firsts[:10].count(1) == 3
    assert dataset.describe(0).startswith("data set 1 of 2")
    with pytest.raises(DataError, match="leave the weights out"):
        build_gpt(config, tokenizer, request())


def test_extreme_weights_never_run_past_a_data_set(write_tokens: Callable[..., str], tokenizer: Any) -> None:
    first, second = write_tokens("tiny", [[1] * 9]), write_tokens("big", [[2] * 50] * 40)
    for weights in ([0.001, 0.999], [0.999, 0.001], [1e-9, 1.0]):
        entries = [{"prefix": p, "weight": w} for p, w in zip((first, second), weights, strict=True)]
        config = GPTDataConfig.model_validate(
            {"data_path": entries, "split": "100", "mid_level_dataset_surplus": 0.0, "data_cache_path": None}
        )
        dataset = built(config, tokenizer, request(samples=700))
        assert len(dataset) >= 700
        assert {int(dataset[k]["tokens"][0]) for k in range(len(dataset))} == {1, 2}


def test_blend_without_weights_takes_each_sample_once(
    write_tokens: Callable[..., str], tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    prefixes = [write_tokens("a", [[1] * 81]), write_tokens("b", [[2] * 41])]
    config = GPTDataConfig(data_path=prefixes, split="100")  # type: ignore[arg-type]
    dataset = built(config, tokenizer, request())
    assert sorted(int(dataset[k]["tokens"][0]) for k in range(len(dataset))) == [1] * 10 + [2] * 5
    assert len(built(config, tokenizer, request(samples=7))) == 7
    assert "repeated" not in caplog.text
    # Twice as many are each data set twice.
    dataset = built(config, tokenizer, request(samples=30))
    assert sorted(int(dataset[k]["tokens"][0]) for k in range(30)) == [1] * 20 + [2] * 10
    assert "takes 30 samples, and its blend of 2 data sets without weights has 15: each is repeated 2.0" in caplog.text


def test_exact_samples(write_tokens: Callable[..., str], tokenizer: Any) -> None:
    prefixes = [write_tokens("a", [[1] * 81]), write_tokens("b", [[2] * 41])]
    entries = [{"prefix": prefixes[0], "samples": 3}, {"prefix": prefixes[1], "samples": 20}]
    config = GPTDataConfig.model_validate({"train_data_path": entries})
    dataset = built(config, tokenizer, request(samples=23))
    assert sorted(int(dataset[k]["tokens"][0]) for k in range(len(dataset))) == [1] * 3 + [2] * 20
    with pytest.raises(DataError, match=r"needs 24 samples.*names exactly 23"):
        build_gpt(config, tokenizer, request(samples=24))


def test_megatrons_lists_in_files(write_tokens: Callable[..., str], tokenizer: Any, tmp_path: Path) -> None:
    first, second = write_tokens("a", [[1] * 50] * 4), write_tokens("b", [[2] * 50] * 4)
    (tmp_path / "blend").write_text(f"30 {first}\n70 {second}\n")
    config = GPTDataConfig(data_args_path=str(tmp_path / "blend"), split="100")
    dataset = built(config, tokenizer, request(samples=100))
    assert sum(int(dataset[k]["tokens"][0]) == 1 for k in range(100)) == 30
    (tmp_path / "splits.json").write_text(json.dumps({"train": [first, second], "valid": f"1 {first} 3 {second}"}))
    config = GPTDataConfig(per_split_data_args_path=str(tmp_path / "splits.json"))
    assert len(built(config, tokenizer, request())) == 2 * (199 // 8)
    valid = built(config, tokenizer, request("valid", 40))
    assert sum(int(valid[k]["tokens"][0]) == 1 for k in range(40)) == 10
    assert build_gpt(config, tokenizer, request("test", 40)) is None
    (tmp_path / "splits.json").write_text('{"train": [' + "1" * 5000 + "]}")
    with pytest.raises(DataError, match=r"splits\.json cannot be read: Exceeds the limit"):
        build_gpt(config, tokenizer, request())


def test_several_named_validation_sets(write_tokens: Callable[..., str], tokenizer: Any) -> None:
    first, second = write_tokens("a", [[1] * 50] * 4), write_tokens("b", [[2] * 50] * 4)
    config = GPTDataConfig.model_validate(
        {"train_data_path": [first], "valid_data_paths": {"x": [first], "y": [second]}}
    )
    sets = build_gpt(config, tokenizer, request("valid", 5))
    assert isinstance(sets, dict)
    assert {name: int(dataset[0]["tokens"][0]) for name, dataset in sets.items()} == {"x": 1, "y": 2}
    assert isinstance(build_gpt(config, tokenizer, request("train", 5)), GPTDataset)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"data_path": ["a"], "train_data_path": ["b"]}, "data.data_path and data.train_data_path are both given"),
        ({"data_path": ["a"], "data_args_path": "b"}, "data.data_path and data.data_args_path are both given"),
        ({"train_data_path": ["a"], "split": "9,1"}, "remove data.split"),
        ({"data_path": []}, "data.data_path is empty"),
        ({"data_path": ["30", "a", "70", "b"]}, 'has the prefix "30", which looks like a weight'),
        ({"data_path": [{"prefix": "a", "weight": 1.0}, "b"]}, "for some entries"),
        ({"data_path": [{"prefix": "a", "samples": 3}]}, "use data.train_data_path"),
        ({"data_path": [{"prefix": "a", "weight": 0}]}, "greater than 0"),
        ({"valid_data_path": ["a"], "valid_data_paths": {"x": ["b"]}}, "both given"),
    ],
)
def test_contradictions_in_the_configuration(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        GPTDataConfig.model_validate(values)


def test_no_data_is_named(tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match=r"needs data; set data\.data_path"):
        build_gpt(GPTDataConfig(), tokenizer, request())


# -- what is refused ----------------------------------------------------------------------------------


def test_a_missing_file(tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere"):
        build_gpt(GPTDataConfig(data_path=[str(tmp_path / "nowhere")]), tokenizer, request())  # type: ignore[list-item]


def test_another_tokenizer(write_tokens: Callable[..., str], fake_tokenizer: Any) -> None:
    made_with = {"tokenizer_type": "GPT2BPETokenizer", "fingerprint": "f00d", "vocab_size": 50257}
    name = write_tokens("foreign", documents(20), tokenizer=made_with)
    with pytest.raises(
        DataError, match=r"GPT2BPETokenizer \(fingerprint f00d.*FakeTokenizer.*accept_tokenizer_mismatch"
    ):
        build_gpt(GPTDataConfig(data_path=[name]), fake_tokenizer(100, EOD), request())  # type: ignore[list-item]
    accepted = GPTDataConfig(data_path=[name], accept_tokenizer_mismatch=True)  # type: ignore[list-item]
    assert build_gpt(accepted, fake_tokenizer(100, EOD), request()) is not None


def test_ids_past_the_vocabulary(prefix: str, fake_tokenizer: Any) -> None:
    dataset = built(GPTDataConfig(data_path=[prefix], split="100"), fake_tokenizer(99, 98), request())  # type: ignore[list-item]
    with pytest.raises(DataError, match=r"has the id 99 at position \d.* has 99 ids; .*small_text_document: document"):
        [dataset[number] for number in range(len(dataset))]


def test_the_cache_is_keyed_by_content(write_tokens: Callable[..., str], tokenizer: Any) -> None:
    def tokens() -> set[int]:
        dataset = built(GPTDataConfig(data_path=[name], split="100"), tokenizer, request(length=3))  # type: ignore[list-item]
        return {int(t) for k in range(len(dataset)) for t in dataset[k]["tokens"]}

    name = write_tokens("same", [[1] * 40])
    assert tokens() == {1}
    write_tokens("same", [[2] * 9, [3] * 9])
    assert tokens() == {2, 3}


# -- raw text -----------------------------------------------------------------------------------------


def test_raw_jsonl_equals_the_same_tokens_written_first(
    tmp_path: Path, write_tokens: Callable[..., str], byte_tokenizer: ByteLevelTokenizer
) -> None:
    texts = ["Grüße", "", "zweites Dokument", "三"] * 5
    raw = tmp_path / "corpus.jsonl"
    raw.write_text("".join(json.dumps({"content": text}) + "\n" for text in texts))
    ids = [[*byte_tokenizer.encode(text), byte_tokenizer.special.eod] if text else [] for text in texts]
    by_hand = write_tokens("by_hand", ids)
    asked = request(length=5)
    ours = built(GPTDataConfig(data_path=[str(raw)], json_key="content"), byte_tokenizer, asked)  # type: ignore[list-item]
    theirs = built(GPTDataConfig(data_path=[by_hand]), byte_tokenizer, asked)  # type: ignore[list-item]
    assert len(ours) == len(theirs)
    for k in range(len(ours)):
        np.testing.assert_array_equal(ours[k]["tokens"], theirs[k]["tokens"])
    assert "corpus.jsonl: document" in ours.describe(0)


@pytest.mark.slow
@pytest.mark.parametrize("compressed", [False, True])
def test_any_number_of_workers_writes_the_bytes_of_preprocess(
    tmp_path: Path, byte_tokenizer: ByteLevelTokenizer, monkeypatch: pytest.MonkeyPatch, compressed: bool
) -> None:
    monkeypatch.setattr("mt_data.preprocess.plan.MIN_SHARD_BYTES", 20_000)  # so that there are many pieces
    lines = "".join(json.dumps({"text": f"document {n} " * (n % 7)}) + "\n" for n in range(2000)).encode()
    raw = tmp_path / ("corpus.jsonl.gz" if compressed else "corpus.jsonl")
    raw.write_bytes(gzip.compress(lines) if compressed else lines)
    preprocess(
        PreprocessOptions(
            input=(str(raw),),
            output_prefix=str(tmp_path / "prepared"),
            tokenizer_type="ByteLevelTokenizer",
            append_eod=True,
        )
    )
    for workers in (1, 2):
        cache = tmp_path / f"cache{workers}"
        prefix = tokenized(str(raw), RawTextOptions("text", workers), byte_tokenizer, cache)
        for suffix in (".bin", ".idx"):
            expected = (tmp_path / f"prepared_text_document{suffix}").read_bytes()
            assert Path(f"{prefix}{suffix}").read_bytes() == expected
        kept = ["key.json", *(f"text_document{suffix}" for suffix in (".bin", ".idx", ".manifest.json"))]
        assert sorted(path.name for path in prefix.parent.iterdir()) == kept


class OwnTokenizer(ByteLevelTokenizer):
    """One that no other process can be given."""

    def __init__(self) -> None:
        super().__init__()
        self.callback = lambda: None


def test_a_tokenizer_that_cannot_be_sent_is_used_here(tmp_path: Path) -> None:
    raw = tmp_path / "corpus.jsonl"
    raw.write_text('{"text": "one"}\n' * 10)
    assert tokenized(str(raw), RawTextOptions(), OwnTokenizer(), tmp_path / "cache")
    with pytest.raises(ConfigError, match=r"data\.tokenize_workers=2: OwnTokenizer cannot be sent"):
        tokenized(str(raw), RawTextOptions(workers=2), OwnTokenizer(), tmp_path / "other")


def test_a_key_that_is_no_file_name_is_refused(tmp_path: Path, byte_tokenizer: ByteLevelTokenizer) -> None:
    with pytest.raises(ConfigError, match=r'data\.json_key="a/b" cannot be part of a file name'):
        tokenized("corpus.jsonl", RawTextOptions("a/b"), byte_tokenizer, tmp_path)


def test_changed_raw_text_is_tokenized_again(tmp_path: Path, byte_tokenizer: ByteLevelTokenizer) -> None:
    raw = tmp_path / "corpus.txt"
    for text in ("a" * 50, "b" * 50):
        raw.write_text(text)
        dataset = built(GPTDataConfig(data_path=[str(raw)], split="1"), byte_tokenizer, request())  # type: ignore[list-item]
        assert byte_tokenizer.decode(dataset[0]["tokens"].tolist()) == text[:8]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"text": 5}', '"text" is a number, not text'),
        ('{"body": "x"}', r'no key "text" \(its keys: body\).*data\.json_key'),
        ("[", "line 2"),
    ],
)
def test_bad_raw_text_names_the_line(line: str, words: str, tmp_path: Path, byte_tokenizer: ByteLevelTokenizer) -> None:
    raw = tmp_path / "bad.jsonl"
    raw.write_text('{"text": "good"}\n' + line + "\n")
    with pytest.raises(DataError, match=f"(?s)bad.jsonl.*line 2.*{words}|bad.jsonl.*{words}"):
        build_gpt(GPTDataConfig(data_path=[str(raw)]), byte_tokenizer, request())  # type: ignore[list-item]
    assert not list(tmp_path.glob("cache/mt/*/*.bin*"))


def test_raw_text_without_a_place_for_its_tokens(tmp_path: Path, byte_tokenizer: ByteLevelTokenizer) -> None:
    raw = tmp_path / "corpus.txt"
    raw.write_text("x" * 50)
    config = GPTDataConfig(data_path=[str(raw)], data_cache_path=str(raw / "no folder"))  # type: ignore[list-item]
    with pytest.raises(DataError, match=r"set data\.data_cache_path to a folder that can be written"):
        build_gpt(config, byte_tokenizer, request())
