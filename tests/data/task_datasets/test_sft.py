"""Packed conversations: each once an epoch, none sees another, the loss on answers only."""

from __future__ import annotations

import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mt_core.errors import DataError
from mt_core.interfaces import SplitRequest
from mt_data.datasets.sft.config import SFTDataConfig
from mt_data.datasets.sft.dataset import SFTDataset, build_sft
from mt_data.datasets.sft.packing import pack_best_fit
from mt_data.tokenizers.byte_level import ByteLevelTokenizer

TOKENIZER = ByteLevelTokenizer()


def write_chats(path: Path, sizes: list[tuple[int, int]]) -> str:
    """A conversation for each (letters of the question, letters of the answer), told apart by its number."""
    with path.open("w") as file:
        for number, (asked, answered) in enumerate(sizes):
            question, answer = f"{number}?" + "q" * asked, f"{number}!" + "a" * answered
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": messages}) + "\n")
    return str(path)


def build(path: str, length: int = 100, part: Any = "train", samples: int | None = None, **keys: Any) -> SFTDataset:
    keys = {"split": "1", "chat_template": "plain"} | keys
    dataset = build_sft(SFTDataConfig(data_path=[path], **keys), TOKENIZER, SplitRequest(part, samples, length, 3))
    assert isinstance(dataset, SFTDataset)
    return dataset


def expected_tokens(number: int, size: tuple[int, int]) -> tuple[list[int], list[int]]:
    """What the template "plain" makes of a conversation of `write_chats`, and its mask."""
    prompt = f"User: {number}?{'q' * size[0]}\n\nAssistant:".encode()
    answer = [*f" {number}!{'a' * size[1]}".encode(), 256]
    return [*prompt, *answer], [0] * len(prompt) + [1] * len(answer)


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 60)), min_size=1, max_size=25),
    length=st.integers(40, 150),
    samples=st.one_of(st.none(), st.integers(1, 60)),
    packing=st.booleans(),
)
def test_every_conversation_once_an_epoch_whole_and_alone(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: list[tuple[int, int]],
    length: int,
    samples: int | None,
    packing: bool,
) -> None:
    path = write_chats(tmp_path_factory.mktemp("chats") / "chats.jsonl", sizes)
    expected = [expected_tokens(number, size) for number, size in enumerate(sizes)]
    trained = {n for n, (_, mask) in enumerate(expected) if any(mask[1 : length + 1])}
    if not trained:
        with pytest.raises(DataError, match="no conversation to train on"):
            build(path, length)
        return
    dataset = build(path, length, samples=samples, packing=packing)
    epochs, left = divmod(len(dataset), len(dataset.packing))
    assert left == 0
    assert len(dataset) >= (samples or 1) > (epochs - 1) * len(dataset.packing)
    for epoch in range(epochs):
        seen: Counter[int] = Counter()
        for index in range(epoch * len(dataset.packing), (epoch + 1) * len(dataset.packing)):
            sample = dataset[index]
            members = dataset.members(index)
            assert packing or len(members) == 1
            seen.update(members)
            start = 0
            for segment, number in enumerate(members):
                tokens, mask = expected[number]
                count = min(len(tokens) - 1, length)
                here = slice(start, start + count)
                assert sample["tokens"][here].tolist() == tokens[:count]
                assert sample["labels"][here].tolist() == tokens[1 : count + 1]
                assert sample["loss_mask"][here].tolist() == mask[1 : count + 1]
                assert sample["position_ids"][here].tolist() == list(range(count))
                assert (sample["segment_ids"][here] == segment).all()
                start += count
            assert start <= length
            assert not sample["loss_mask"][start:].any()
            assert (sample["segment_ids"][start:] == len(members)).all()
        assert seen == Counter(trained)
    assert len(dataset.selection.dropped) == len(sizes) - len(trained)


@given(st.lists(st.integers(1, 64), max_size=60), st.integers(64, 100))
def test_packing_is_a_partition_that_fits(lengths: list[int], capacity: int) -> None:
    packing = pack_best_fit(np.array(lengths, np.int64), capacity)
    packs = [packing.of(pack).tolist() for pack in range(len(packing))]
    assert sorted(item for pack in packs for item in pack) == list(range(len(lengths)))
    loads = sorted(sum(lengths[item] for item in pack) for pack in packs)
    assert all(0 < load <= capacity for load in loads)
    # Best fit opens a pack only for what fits in no other one, so no two could be one.
    assert len(loads) < 2 or loads[0] + loads[1] > capacity
    assert all(pack == sorted(pack) for pack in packs)


def test_epochs_differ_in_order_and_a_longer_run_begins_as_a_shorter_one(tmp_path: Path) -> None:
    path = write_chats(tmp_path / "chats.jsonl", [(n % 7, n % 30) for n in range(60)])
    short, long = build(path, samples=1), build(path, samples=100)
    packs = len(short.packing)
    np.testing.assert_array_equal(long.order[:packs], short.order)
    assert long.order[:packs].tolist() != long.order[packs : 2 * packs].tolist()


def test_splits_are_disjoint_and_cached_files_are_encoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_chats(tmp_path / "chats.jsonl", [(3, 5)] * 50)
    keys = {"split": "80,20,0", "data_cache_path": str(tmp_path / "cache")}
    train = build(path, **keys)
    monkeypatch.setattr("mt_data.datasets.sft.encoding._encode_files", lambda *_: pytest.fail("encoded again"))
    valid = build(path, part="valid", **keys)
    assert train.selection.numbers.tolist() == list(range(40))
    assert valid.selection.numbers.tolist() == list(range(40, 50))
    config = SFTDataConfig(data_path=[path], chat_template="plain", **keys)
    assert build_sft(config, TOKENIZER, SplitRequest("test", 5, 100, 3)) is None
    monkeypatch.undo()
    write_chats(tmp_path / "chats.jsonl", [(3, 6)] * 50)
    assert len(build(path, **keys).conversations.tokens) == len(train.conversations.tokens) + 50


def test_too_long_conversations_are_cut_counted_or_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_chats(tmp_path / "chats.jsonl", [(1, 1), (5, 200), (300, 5)])
    with caplog.at_level(logging.WARNING, logger="mt_data"):
        dataset = build(path, 64)
    assert (dataset.selection.cut.tolist(), dataset.selection.dropped.tolist()) == ([1], [2])
    assert "1 cut at the end, 1 left out because no answer remained" in caplog.text
    with pytest.raises(DataError, match=r"chats\.jsonl, line 2: the conversation has \d+ positions, more than data\."):
        build(path, 64, on_too_long="error")
    with pytest.raises(DataError, match=r"no conversation to train on: each of its 3 has no answer within data\.seq_"):
        build(path, 8)


def test_a_blend_and_describe(tmp_path: Path) -> None:
    first = write_chats(tmp_path / "a.jsonl", [(3, 5)] * 20)
    second = write_chats(tmp_path / "b.jsonl", [(4, 9)] * 20)
    entries = [{"prefix": first, "weight": 3.0}, {"prefix": second, "weight": 1.0}]
    config = SFTDataConfig(train_data_path=entries, chat_template="plain", packing=False)
    dataset = build_sft(config, TOKENIZER, SplitRequest("train", 40, 64, 3))
    assert dataset is not None
    places = [dataset.describe(index) for index in range(40)]
    assert sum("a.jsonl" in place for place in places) == 30
    assert "a.jsonl, line " in places[0]


def test_several_validation_sets(tmp_path: Path) -> None:
    paths = {name: [write_chats(tmp_path / f"{name}.jsonl", [(3, 5)] * count)] for name, count in (("a", 2), ("b", 3))}
    config = SFTDataConfig(valid_data_paths=paths, chat_template="plain", packing=False)
    built = build_sft(config, TOKENIZER, SplitRequest("valid", None, 64, 3))
    assert isinstance(built, dict)
    assert {name: len(dataset) for name, dataset in built.items()} == {"a": 2, "b": 3}


def test_patterns_and_gzip(tmp_path: Path) -> None:
    import gzip

    plain = Path(write_chats(tmp_path / "part-1.jsonl", [(3, 5)] * 3))
    (tmp_path / "part-2.jsonl.gz").write_bytes(gzip.compress(plain.read_bytes()))
    dataset = build(str(tmp_path / "part-*"))
    assert len(dataset.conversations) == 6
    assert dataset.conversations.where(4).endswith("part-2.jsonl.gz, line 2")


GOOD = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{not json", "is no JSON"),
        ('["a"]', "must be a JSON object"),
        ('{"message": []}', r'has no key "messages"; its keys are message. .*did you mean "message"'),
        ('{"messages": []}', '"messages" must be a list of at least one message'),
        ('{"messages": ["hi"]}', "message 1 must be an object"),
        ('{"messages": [{"role": "bot", "content": "a"}]}', "message 1 has the role 'bot'; it must be one of system,"),
        (
            '{"messages": [{"role": "user", "content": "a"}, {"role": "asistant", "content": "b"}]}',
            'message 2 has the role .*did you mean "assistant"',
        ),
        ('{"messages": [{"role": "user", "content": null}]}', r'message 1 \(user\) needs a text under "content"'),
        ('{"messages": [{"role": "user", "content": "a"}]}', "has no assistant turn, so nothing would be learnt"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(f"{GOOD}\n\n{line}\n{GOOD}\n")
    with pytest.raises(DataError, match=message) as raised:
        build(str(path))
    assert f"{path}, line 3" in str(raised.value)


def test_bad_files_and_keys(tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    with pytest.raises(DataError, match="holds no conversation"):
        build(str(empty))
    with pytest.raises(DataError, match="matches no file"):
        build(str(tmp_path / "none-*.jsonl"))
    with pytest.raises(ValueError, match=r"data\.reset_attention_mask=True has no effect with data\.dataset_type=.sft"):
        SFTDataConfig(data_path=["a.jsonl"], reset_attention_mask=True)
    with pytest.raises(ValueError, match="chatml.* and data.chat_template_file=a.jinja are both given"):
        SFTDataConfig(data_path=["a.jsonl"], chat_template="chatml", chat_template_file="a.jinja")
    with pytest.raises(ValueError, match=r"data\.mmap_bin_files=False has no effect"):
        SFTDataConfig(data_path=["a.jsonl"], mmap_bin_files=False)


SURROGATE = GOOD.replace('"a"', '"\\ud800"')
"""JSON can write what no text holds: only the tokenizer notices."""


@pytest.mark.parametrize("bad", ["nothing", "[]", '{"messages": []}', GOOD.replace("user", "usr"), SURROGATE])
def test_lines_that_cannot_be_used_are_named_or_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, bad: str
) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join([GOOD, bad, GOOD, GOOD]))
    with pytest.raises(DataError, match=r'chats\.jsonl, line 2.*leave such lines out with data\.on_error="skip"'):
        build(str(path))
    keys = {"on_error": "skip", "data_cache_path": str(tmp_path / "cache")}
    dataset = build(str(path), **keys)
    assert dataset.conversations.line.tolist() == [1, 3, 4]
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="mt_data"):
        build(str(path), **keys)  # read from the cache: said all the same
    assert "lines left out: 1; the first is" in caplog.text
    assert "chats.jsonl, line 2" in caplog.text


def test_a_file_without_one_usable_line(tmp_path: Path) -> None:
    (tmp_path / "chats.jsonl").write_text("nothing\n")
    with pytest.raises(DataError, match="holds no conversation"):
        build(str(tmp_path / "chats.jsonl"), on_error="skip")
