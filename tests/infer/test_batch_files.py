"""A file of prompts becomes a file of completions, in order, whatever happens on the way."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.infer.engines import configuration, engine_of

from mt_core.errors import ConfigError, DataError
from mt_core.interfaces import SpecialTokens
from mt_infer import SamplingParameters, TextGenerator
from mt_infer.batch_files import generate_file
from mt_infer.config import InferenceConfig
from mt_infer.detokenizer import Detokenizer
from mt_infer.job_record import checkpoint_fingerprint, record_of
from mt_infer.lockstep import LockstepEngine
from mt_infer.megatron_generate import megatron_generate


class Letters:
    """Ids 1 ... 26 are the letters, 0 ends a document."""

    vocab_size = 27
    special = SpecialTokens(eod=0)

    def encode(self, text: str) -> list[int]:
        if not text.isascii():
            raise DataError("no letters")
        return [ord(letter) - 96 for letter in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(96 + token) for token in ids)


@pytest.fixture
def generator() -> TextGenerator:
    from tests.ckpt.convert_cases import MODELS

    config = configuration({**MODELS["gpt2"], "vocab_size": 27})
    engine = engine_of(config)
    return TextGenerator(LockstepEngine(engine), Letters(), config)


LINES = [
    {"prompt": "abc", "id": "first"},
    {"prompt": "hello", "max_tokens": 2},
    "broken {",
    {"tokens": [3, 4, 5], "temperature": 0.0},
    {"prompt": "x" * 100},
    {"text": "no prompt"},
    {"prompt": "zebra", "n": 2, "seed": 4},
    {"prompt": "abc", "top_k": -1},
    {"prompt": "\ud800"},
]
SAMPLING = SamplingParameters(seed=3, max_tokens=5, ignore_eod=True)


def written(path: Path) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in LINES))
    return path


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_line_has_its_answer_or_its_error(generator, tmp_path) -> None:
    done = generate_file(generator, written(tmp_path / "in.jsonl"), tmp_path / "out.jsonl", SAMPLING)
    found = records(tmp_path / "out.jsonl")
    assert [record.get("error", "")[:7] for record in found] == [
        "",
        "",
        "line 3:",
        "",
        "line 5:",
        "line 6:",
        "",
        "line 8:",
        "line 9:",
    ]
    assert (done.lines, done.failed) == (9, 5)
    assert found[0]["id"] == "first"
    assert [len(record["completions"]) for record in found if "completions" in record] == [1, 1, 1, 2]
    assert [record["completions"][0]["tokens"] for record in found if "completions" in record] == [5, 2, 5, 5]
    assert "shorten the prompt" in found[4]["error"]
    assert 'either "prompt" (a text) or "tokens"' in found[5]["error"]
    assert "top_k is -1" in found[7]["error"]
    assert found[8] == {"prompt": "\ud800", "error": "line 9: no letters"}


def test_a_key_that_stands_twice_in_a_line_is_its_error(generator, tmp_path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "a", "max_tokens": 1, "max_tokens": 9}\n{"prompt": "a", "max_tokens": 2}\n')
    assert generate_file(generator, source, target, SAMPLING).failed == 1
    assert "line 1: the key 'max_tokens' stands twice" in records(target)[0]["error"]


def test_texts_of_equal_lines_are_drawn_each_for_itself(generator, tmp_path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps({"prompt": "abc", "n": 3}) + "\n" + json.dumps({"prompt": "abc", "n": 3}) + "\n")
    generate_file(generator, source, target, SAMPLING)
    texts = {completion["text"] for record in records(target) for completion in record["completions"]}
    assert len(texts) == 6


def test_lines_with_lists_and_numbers_of_any_size(generator, tmp_path) -> None:
    """Each is honoured or refused, and none ends the run."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    every_letter_but_b = [[token] for token in range(27) if token != 2]
    asked = [
        {"bad_words_ids": every_letter_but_b},
        {"logit_bias": {"2": 1e6}},
        {"top_k": 10**21, "temperature": 1},
        {"stop": [1]},
        {"num_beams": 2, "temperature": 1, "length_penalty": 1e308},
        {"num_beams": 2, "temperature": 1, "length_penalty": -30},
        {"tokens": [True]},
    ]
    lines = [line if "tokens" in line else {"prompt": "a", **line} for line in asked]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    generate_file(generator, source, target, SAMPLING)
    found = [record.get("error") or record["completions"][0]["text"] for record in records(target)]
    assert found[:2] == ["bbbbb", "bbbbb"]
    words = ("it must be at most", "it must be a list of texts", "it must be from -30 to 30")
    assert all(one in error for one, error in zip(words, found[2:], strict=False))
    assert len(found[5]) == 5
    assert found[6].endswith('"tokens" must be a list of ids')


def test_log_probabilities_are_written_where_requested(generator, tmp_path) -> None:
    """As the model's forward pass gives them; of a line, and of all."""
    source = tmp_path / "in.jsonl"
    lines = [{"prompt": "abc"}, {"prompt": "hello", "logprobs": None, "prompt_logprobs": 0}]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    generate_file(generator, source, tmp_path / "out.jsonl", replace(SAMPLING, logprobs=2))
    (first,), (second,) = (record["completions"] for record in records(tmp_path / "out.jsonl"))
    ids = [1, 2, 3, *first["token_ids"]]
    with torch.inference_mode():
        logs = generator.model(torch.tensor([ids])).float().log_softmax(-1)[0, 2:-1]
    sampled = [row[token].item() for row, token in zip(logs, first["token_ids"], strict=True)]
    assert [one["token"] for one in first["logprobs"]] == pytest.approx(sampled, abs=1e-4)
    assert [[token for token, _ in one["top"]] for one in first["logprobs"]] == logs.topk(2).indices.tolist()
    assert "prompt_logprobs" not in first
    assert "logprobs" not in second
    assert [one is None for one in second["prompt_logprobs"]] == [True, False, False, False, False]


def test_a_killed_run_goes_on_where_it_was(generator, tmp_path) -> None:
    source, whole, cut = written(tmp_path / "in.jsonl"), tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    generate_file(generator, source, whole, SAMPLING)
    assert generate_file(generator, source, whole, SAMPLING).tokens == 0
    # Killed in the middle of the fourth line.
    record_of(whole).rename(record_of(cut))
    cut.write_bytes(b"".join(whole.read_bytes().splitlines(keepends=True)[:3]) + b'{"completi')
    done = generate_file(generator, source, cut, SAMPLING)
    assert cut.read_bytes() == whole.read_bytes()
    assert done.lines == 9
    assert generate_file(generator, source, cut, SAMPLING).tokens == 0


def test_an_output_of_another_job_is_not_continued(generator, tmp_path, monkeypatch) -> None:
    source, target = written(tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    monkeypatch.setattr(generator, "fingerprint", "one")
    generate_file(generator, source, target, SAMPLING)

    def refused(words: str, sampling: SamplingParameters = SAMPLING) -> None:
        with pytest.raises(ConfigError, match=f"{words}.* give another --output, or delete .*out.jsonl to begin anew"):
            generate_file(generator, source, target, sampling)

    refused("begun by another job: top_k was 0, and is 7; seed was 3, and is 4;", replace(SAMPLING, seed=4, top_k=7))
    monkeypatch.setattr(generator, "fingerprint", "another")
    refused("its model was another, or had other weights")
    inference = generator.config.section(InferenceConfig).model_copy(update={"quantize_weights": "int8"})
    quantized = generator.config.with_section("inference", inference)
    with monkeypatch.context() as changed:
        changed.setattr(generator, "config", quantized)
        refused('inference.quantize_weights was null, and is "int8"')
    monkeypatch.setattr(generator, "fingerprint", None)
    source.write_text('{"prompt": "a"}\n')
    refused("its input had other content")
    record_of(target).write_text("{}")
    refused("has lines, and the record of their job, .*out.jsonl.job.json, cannot be read")
    target.unlink()
    assert generate_file(generator, source, target, SAMPLING).lines == 1
    with pytest.raises(ConfigError, match="--output .*in.jsonl/out.jsonl cannot be written: Not a directory"):
        generate_file(generator, source, source / "out.jsonl", SAMPLING)


def test_files_of_something_else_are_kept(generator, tmp_path) -> None:
    source, notes = tmp_path / "in.jsonl", tmp_path / "notes.json"
    source.write_text('{"prompt": "abc"}')
    notes.write_text('{"not": "a completion"}')
    for target, words in ((source, "--output would replace --input"), (notes, "has lines, and the record of their")):
        before = target.read_bytes()
        with pytest.raises(ConfigError, match=words):
            generate_file(generator, source, target, SAMPLING)
        assert target.read_bytes() == before
        assert not record_of(target).exists()


def test_a_checkpoint_has_the_fingerprint_of_its_content(tmp_path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").write_bytes(bytes(300_000))
    first, second = (checkpoint_fingerprint(tmp_path / name) for name in ("a", "b"))
    (tmp_path / "b" / "weights").write_bytes(bytes(100_000) + b"1" + bytes(199_999))
    assert first == second != checkpoint_fingerprint(tmp_path / "b")


def test_ids_behind_the_tokenizers_have_no_text(generator) -> None:
    """As of a model whose vocabulary was made larger than its tokenizer's."""
    text = Detokenizer(Letters(), stop=("cd",))
    assert [text.add(token) for token in (1, 27, 2, 900, 3, 30, 4)] == ["a", "", "b", "", "", "", ""]
    assert (text.text, text.stopped_by) == ("ab", "cd")


@pytest.mark.parametrize("rows", [[{"prompt": "abc", "id": 1}, {"prompt": "hello", "id": 2}], []])
def test_parquet_files_give_the_same(generator, tmp_path, rows) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "in.parquet")
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for suffix in ("parquet", "jsonl"):
        generate_file(generator, tmp_path / f"in.{suffix}", tmp_path / f"out.{suffix}", SAMPLING)
    assert parquet.read_table(tmp_path / "out.parquet").to_pylist() == records(tmp_path / "out.jsonl")
    (tmp_path / "surrogate.jsonl").write_text(json.dumps({"prompt": "\ud800"}) + "\n")
    generate_file(generator, tmp_path / "surrogate.jsonl", tmp_path / "surrogate.parquet", SAMPLING)
    assert parquet.read_table(tmp_path / "surrogate.parquet")["prompt"].to_pylist() == ["?"]


def test_parquet_columns_keep_what_the_lines_say(generator, tmp_path) -> None:
    """Texts that look like dates stay texts; a column of several types holds JSON."""
    parquet = pytest.importorskip("pyarrow.parquet")
    given = [
        {"date": "2024-01-01", "id": 1, "size": 1, "tags": ["a"], "big": 2**53 + 1, "of": {"a": 1}, "none": {}},
        {"date": "2024-01-02", "id": "b", "size": 0.5, "tags": [], "big": 0.5, "of": {"b": "x"}, "error": 5},
        {"date": None, "id": {"deep": [1, "c"]}, "size": None, "huge": 2**70},
    ]
    lines = [{"prompt": "abc", **line} for line in given] + [{"prompt": 5, "completions": "others"}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    generate_file(generator, tmp_path / "in.jsonl", tmp_path / "out.parquet", replace(SAMPLING, logprobs=1))
    table = parquet.read_table(tmp_path / "out.parquet")
    assert {name: [row[name] for row in table.to_pylist()] for name in given[0]} == {
        "date": ["2024-01-01", "2024-01-02", None, None],
        "id": ["1", '"b"', '{"deep": [1, "c"]}', None],
        "size": [1.0, 0.5, None, None],
        "tags": [["a"], [], None, None],
        "big": ["9007199254740993", "0.5", None, None],
        "of": [{"a": 1, "b": None}, {"a": None, "b": "x"}, None, None],
        "none": ["{}", None, None, None],
    }
    assert table["huge"].to_pylist() == [None, None, str(2**70), None]
    assert table["prompt"].to_pylist() == ['"abc"', '"abc"', '"abc"', "5"]
    assert [error and error[:6] for error in table["error"].to_pylist()] == [None, None, None, "line 4"]
    assert [found and len(found[0]["logprobs"]) for found in table["completions"].to_pylist()] == [5, 5, 5, None]


# -- the interface of Accelerate's plugin ----------------------------------------------------------


def test_megatron_generate_continues_padded_prompts(generator) -> None:
    inputs, mask = torch.tensor([[5, 6, 7], [8, 9, 0]]), torch.tensor([[1, 1, 1], [1, 1, 0]])
    found = megatron_generate(generator, inputs, mask, max_new_tokens=4, stop_token=26)
    # The longest prompt and four more make 7, which is rounded up to 8.
    expected = generator.generate(
        [[5, 6, 7], [8, 9]],
        SamplingParameters(temperature=0.0, max_tokens=5, stop_token_ids=(26,), ignore_eod=True),
    )
    for row, prompt, (one,) in zip(found.tolist(), ([5, 6, 7], [8, 9]), expected, strict=True):
        assert row[: len(prompt) + len(one.tokens)] == [*prompt, *one.tokens]
    assert found.shape[1] == max(3 + len(expected[0][0].tokens), 2 + len(expected[1][0].tokens))
    sampled = [megatron_generate(generator, inputs[:1], max_length=12, top_k=5, random_seed=seed) for seed in (1, 1, 2)]
    assert sampled[0].tolist() == sampled[1].tolist() != sampled[2].tolist()
    started = megatron_generate(generator, inputs[:1], max_length=12, add_BOS=True)
    assert started[0, :4].tolist() == [0, 5, 6, 7]


def test_megatron_generate_returns_beams(generator) -> None:
    found = megatron_generate(generator, torch.tensor([[5, 6, 7]]), max_length=8, num_beams=3, stop_token=26)
    assert found.shape[0] == 3
    assert (found[:, :3] == torch.tensor([5, 6, 7])).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "one of max_length"),
        ({"max_length": 8, "max_new_tokens": 2}, "one of max_length"),
        ({"max_length": 3}, "leaves no room"),
        ({"max_length": 8, "top_k": 1001}, "top_k is 1001; it must be an integer from 0"),
        ({"max_length": 8, "top_k": 3, "top_p": 0.5}, "one of the two"),
        ({"max_length": 8, "temperature": 0.0}, "temperature is 0.0"),
        ({"max_length": 8, "top_p_decay": 2.0}, "top_p_decay is 2.0"),
        ({"max_length": 8, "num_beams": 2, "rows": 2}, "searches for one prompt, and there are 2"),
        ({"max_length": 8, "top_q": 1}, "has no top_q"),
    ],
)
def test_megatron_generate_names_what_it_cannot_do(generator, options, message) -> None:
    inputs = torch.tensor([[5, 6, 7]] * options.pop("rows", 1))
    with pytest.raises(ConfigError, match=message):
        megatron_generate(generator, inputs, **options)
