"""Records as people have them: which format they are, what is trained of them, and what is refused by name."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mt_core.errors import DataError
from mt_core.interfaces import SplitRequest
from mt_data.datasets.sft.answers import ConversationEncoder
from mt_data.datasets.sft.chat_templates import ChatTemplate
from mt_data.datasets.sft.config import SFTDataConfig
from mt_data.datasets.sft.conversations import Conversation
from mt_data.datasets.sft.dataset import SFTDataset, build_sft
from mt_data.datasets.sft.record_formats import RecordReader
from mt_data.preprocess.readers import Record
from mt_data.tokenizers.byte_level import ByteLevelTokenizer

TOKENIZER = ByteLevelTokenizer()
EOD = 256


def learned(records: list[Any], tmp_path: Path, **keys: Any) -> list[tuple[str, str]]:
    """(text, what is trained of it, "|" for the end of a document) of each example, in the order of the file."""
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(map(json.dumps, records)))
    return learned_of(path, **keys)


def learned_of(path: Path, **keys: Any) -> list[tuple[str, str]]:
    keys = {"split": "1", "chat_template": "plain", "packing": False} | keys
    dataset = build_sft(SFTDataConfig(data_path=[str(path)], **keys), TOKENIZER, SplitRequest("train", None, 400, 3))
    assert isinstance(dataset, SFTDataset)
    pairs = [dataset.conversations.tokens_of(number, 1000) for number in range(len(dataset.conversations))]
    return [(text(tokens), text(tokens[answer])) for tokens, answer in pairs]


def text(ids: np.ndarray) -> str:
    return "|".join(TOKENIZER.decode(part) for part in split_at_ends(ids.tolist()))


def split_at_ends(ids: list[int]) -> list[list[int]]:
    parts: list[list[int]] = [[]]
    for token in ids:
        if token == EOD:
            parts.append([])
        else:
            parts[-1].append(token)
    return parts


HELLO = ("User: Hi\n\nAssistant: Hello|", " Hello|")


@pytest.mark.parametrize(
    "record",
    [
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]},
        {"prompt": [{"role": "user", "content": "Hi"}], "completion": [{"role": "assistant", "content": "Hello"}]},
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
        {"instruction": "Hi", "input": "", "output": "Hello"},
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
                {"role": "assistant", "content": "Hello"},
            ]
        },
    ],
)
def test_formats_of_one_conversation_are_the_same_tokens(record: dict[str, Any], tmp_path: Path) -> None:
    assert learned([record], tmp_path) == [HELLO]


def test_texts_need_no_template_and_end_with_the_end_of_a_document(tmp_path: Path) -> None:
    prompt = {"prompt": "2+2=", "completion": "4"}
    assert learned([prompt], tmp_path, chat_template="tokenizer") == [("2+2=4|", "4|")]
    assert learned([{"text": "a story"}], tmp_path, chat_template="tokenizer") == [("a story|", "a story|")]
    assert learned([prompt], tmp_path, train_on="all") == [("2+2=4|", "2+2=4|")]


def test_alpaca_with_input_system_and_history(tmp_path: Path) -> None:
    record = {"instruction": "Add", "input": "2, 2", "output": "4", "system": "Be brief.", "history": [["a", "b"]]}
    ((whole, trained),) = learned([record], tmp_path)
    assert whole == "System: Be brief.\n\nUser: a\n\nAssistant: b|\n\nUser: Add\n2, 2\n\nAssistant: 4|"
    assert trained == " b| 4|"


CHAT = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]


def chat(**flags: Any) -> dict[str, Any]:
    """CHAT with flags of its turns: turn1=..., as (key, value)."""
    messages: list[dict[str, Any]] = [{"role": role, "content": content} for role, content in CHAT]
    for name, (key, value) in flags.items():
        messages[int(name.removeprefix("turn"))][key] = value
    return {"messages": messages}


@pytest.mark.parametrize(
    ("record", "keys", "trained"),
    [
        (chat(), {}, " b| d|"),
        (chat(turn1=("weight", 0)), {}, " d|"),
        (chat(turn3=("training", False)), {}, " b|"),
        (chat(turn0=("loss_mask", 0), turn1=("loss_mask", 0), turn3=("loss_mask", 1)), {}, " d|"),
        (chat(), {"train_on": "last_answer"}, " d|"),
    ],
)
def test_flags_of_single_turns(record: dict[str, Any], keys: dict[str, Any], trained: str, tmp_path: Path) -> None:
    # The end of a document stands behind trained answers alone where a template leaves it to the tokenizer.
    assert learned([record], tmp_path, **keys)[0][1] == trained


def test_each_answer_by_itself(tmp_path: Path) -> None:
    assert [trained for _, trained in learned([chat()], tmp_path, split_answers=True)] == [" b|", " d|"]


@pytest.mark.parametrize(
    ("records", "message"),
    [
        (
            [{"messages": [{"role": "user", "content": "a"}], "text": "b"}],
            "line 1 could be a record of messages or of te",
        ),
        (
            [{"text": "a"}, {"prompt": "a", "completion": "b"}],
            "line 2 is a record of the format prompt-compl.* line 1",
        ),
        ([{"chosen": "a", "rejected": "b"}], "trained by preferences"),
        ([chat(turn1=("trian", 0))], r'message 2 has the key "trian", which nothing reads \(did you mean "train"'),
        ([chat(turn3=("loss_maks", False))], 'did you mean "loss_mask"'),
        ([{"prompt": "a", "completion": [{"role": "assistant", "content": "b"}]}], "must both be texts"),
        ([{"prompt": "a", "completion": ""}], '"completion" is empty'),
        (
            [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}]}],
            "answer .* is empty",
        ),
        ([{"conversations": [{"from": "alice", "value": "b"}]}], "turn 1 is from 'alice'"),
        ([{"instruction": "a", "output": "b", "history": [["c"]]}], '"history" must be a list of pairs'),
        ([chat(turn1=("weight", 2))], '"weight" is 2; it says whether'),
        ([chat(turn0=("weight", 1))], r"message 1 \(user\) is to be trained"),
        ([chat(turn1=("weight", 0), turn3=("weight", 0))], "no assistant turn to be trained"),
        ([{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}], "a part of type 'image_url'"),
        ([{**chat(), "tools": "[{"}], '"tools" is a text that is no JSON'),
    ],
)
def test_what_is_ambiguous_or_wrong_is_named(records: list[Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        learned(records, tmp_path)


def test_a_json_array_and_parquet_are_read_with_their_places(tmp_path: Path) -> None:
    array = tmp_path / "data.json"
    array.write_text(json.dumps([chat(), chat()], indent=2))
    assert [trained for _, trained in learned_of(array)] == [" b| d|"] * 2
    array.write_text('[\n{"text": "a"},\n{"text": 5}\n]')
    with pytest.raises(DataError, match=r"data\.json, line 3"):
        learned_of(array)
    pq, pa = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    rows = [chat(), {"messages": [*chat()["messages"][:1], {"role": "assistant", "content": "e", "weight": 1}]}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "data.parquet")
    assert [trained for _, trained in learned_of(tmp_path / "data.parquet")] == [" b| d|", " e|"]


def test_calls_have_objects_as_arguments_and_tools_are_parsed() -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    record = Record({"messages": messages, "tools": '[{"name": "add"}]'}, "a.jsonl", 1)
    example = RecordReader().example(record)
    assert isinstance(example, Conversation)
    assert example.messages[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
    assert example.tools == [{"name": "add"}]
    spoken = {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'}
    sharegpt = RecordReader().example(
        Record({"conversations": [{"from": "human", "value": "a"}, spoken]}, "a.jsonl", 1)
    )
    assert isinstance(sharegpt, Conversation)
    assert sharegpt.messages[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}


# -- templates ---------------------------------------------------------------------------------------

BEGIN, END = "{% for m in messages %}<{{ m.role }}>", "<end>{% endfor %}"
MARKED = (
    BEGIN + "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}" + END
)
PROMPT = "{% if add_generation_prompt %}<assistant>{% endif %}"
FORGETS = (
    BEGIN + "{% if m.role == 'assistant' and loop.last %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}" + END + PROMPT
)
OPENS = BEGIN + "{{ m.content }}" + END + "{% if add_generation_prompt %}<assistant><think>{% endif %}"


def answers(source: str, messages: list[dict[str, Any]], **options: Any) -> list[str]:
    encoder = ConversationEncoder(ChatTemplate("t", source, {}, False), TOKENIZER, **options)
    encodings = encoder.encoded(Conversation([*messages], None, "a.jsonl", 1))
    return [text(encoding.tokens[encoding.answer]) for encoding in encodings]


def test_the_end_mark_is_trained_where_the_generation_tag_ends_before_it() -> None:
    assert answers(MARKED, chat()["messages"]) == ["b<end>d<end>"]


def test_a_generation_prompt_that_goes_on_where_the_turn_does_not() -> None:
    assert answers(OPENS, chat()["messages"]) == ["b<end>d<end>"]


def test_a_template_that_forgets_is_refused_or_trained_answer_by_answer() -> None:
    messages = [{**message, "reasoning_content": "r"} for message in chat()["messages"]]
    with pytest.raises(DataError, match=r"data\.split_answers=true"):
        answers(FORGETS, messages)
    assert answers(FORGETS, messages, split=True) == ["<think>r</think>b<end>", "<think>r</think>d<end>"]


def test_texts_beside_a_template_are_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="mt_data"):
        learned([{"prompt": "a", "completion": "b"}, {"prompt": "c", "completion": "d"}], tmp_path)
        learned([{"text": "a"}], tmp_path)
    assert caplog.text.count("line 1: prompt and answer are texts, which the model has as they are, without") == 1
    assert "line 2" not in caplog.text


def test_a_template_without_an_end_is_named_with_the_record(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lines = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    (tmp_path / "t.jinja").write_text(lines + "{% if add_generation_prompt %}assistant:{% endif %}")
    keys = {"chat_template": "tokenizer", "chat_template_file": str(tmp_path / "t.jinja")}
    with caplog.at_level(logging.WARNING, logger="mt_data"):
        learned([chat()], tmp_path, **keys)
    assert "line 1: the chat template" in caplog.text
    assert "does not learn to stop" in caplog.text
