"""Conversations as text and tokens, and which of the tokens are answers."""

from __future__ import annotations

import importlib.util
import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mt_core.errors import ConfigError, DataError
from mt_core.interfaces import SpecialTokens, SplitRequest, Tokenizer
from mt_data.datasets.sft.answers import ConversationEncoder, answer_spans
from mt_data.datasets.sft.chat_templates import BUILTIN_TEMPLATES, ChatTemplate, load_chat_template
from mt_data.datasets.sft.config import SFTDataConfig
from mt_data.datasets.sft.conversations import Conversation
from mt_data.datasets.sft.dataset import build_sft
from mt_data.tokenizers.byte_level import ByteLevelTokenizer
from mt_data.tokenizers.hugging_face import HuggingFaceConfig, build_hugging_face

MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<|im_end|>\n' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
texts = st.text(st.characters(codec="utf-8", exclude_characters="\ufdd0\ufdd1"), max_size=12)


@st.composite
def conversations(draw: st.DrawFn) -> Conversation:
    messages = [{"role": "system", "content": draw(texts)}] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        messages += [{"role": "user", "content": draw(texts)}, {"role": "assistant", "content": draw(texts)}]
    return Conversation([*messages], None, "chats.jsonl", 7)


def conversation(*turns: tuple[str, str]) -> Conversation:
    return Conversation([{"role": role, "content": content} for role, content in turns], None, "chats.jsonl", 7)


HELLO = conversation(("user", "hi"), ("assistant", "yes"), ("user", "and"), ("assistant", "no"))


def template(source: str, **special: str) -> ChatTemplate:
    return ChatTemplate("test template", source, special, eod_after_answer=False)


@pytest.fixture(scope="module")
def bpe_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE with ChatML's marks, as `save_pretrained` would leave it, that puts BOS before a text."""
    from tokenizers import Tokenizer as Engine
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers

    folder = tmp_path_factory.mktemp("bpe")
    engine = Engine(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    marks = ["<|im_start|>", "<|im_end|>", "<|bos|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    text = [json.dumps(sorted(BUILTIN_TEMPLATES))] + ["the user and the assistant said\n\n hello assistant user"] * 3
    engine.train_from_iterator(
        text, trainers.BpeTrainer(vocab_size=400, special_tokens=marks, initial_alphabet=alphabet)
    )
    bos = engine.token_to_id("<|bos|>")
    engine.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", bos)])
    engine.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<|bos|>", "eos_token": "<|im_end|>", "chat_template": MARKED}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **settings})
    )
    return folder


@pytest.fixture(scope="module")
def bpe(bpe_directory: Path) -> Tokenizer:
    return build_hugging_face(HuggingFaceConfig(tokenizer_model=str(bpe_directory)))


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
def test_ids_and_mask_are_those_of_transformers(bpe_directory: Path, bpe: Tokenizer) -> None:
    from transformers import PreTrainedTokenizerFast

    reference = PreTrainedTokenizerFast.from_pretrained(str(bpe_directory))
    own = load_chat_template("tokenizer", None, bpe)
    chatml = load_chat_template("chatml", None, bpe)
    cases = [HELLO, conversation(("system", "s t"), ("user", "größer 🙂\n"), ("assistant", " the assistant")), HELLO]
    for case in cases:
        expected = reference.apply_chat_template(
            case.messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        for written in (own, chatml):
            encoded = ConversationEncoder(written, bpe).answers(case)
            assert encoded.tokens.tolist() == expected["input_ids"], written.name
            assert encoded.answer.astype(int).tolist() == expected["assistant_masks"], written.name


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(BUILTIN_TEMPLATES))
@settings(max_examples=60, deadline=None)
@given(case=conversations())
def test_marked_tokens_are_the_answers_and_no_others(name: str, case: Conversation) -> None:
    tokenizer = ByteLevelTokenizer()
    loaded = load_chat_template(name, None, tokenizer)
    encoded = ConversationEncoder(loaded, tokenizer).answers(case)
    assert tokenizer.special.eod is not None
    rest = encoded.tokens[~encoded.answer].tolist()
    assert tokenizer.special.eod not in rest
    wanted = [str(message["content"]) for message in case.messages if message["role"] == "assistant"]
    ends = {"chatml": "<|im_end|>\n", "llama3": "<|eot_id|>", "plain": "<eod>"}
    found = tokenizer.decode(encoded.tokens[encoded.answer].tolist())
    before = " " if name == "plain" else ""
    contents = [text.strip() if name == "llama3" else text for text in wanted]
    if name == "llama3":  # Jinja's trim takes what Python's strip takes
        assert found == "".join(text + ends[name] for text in contents)
    else:
        assert found == "".join(before + text + ends[name] for text in contents)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(case=conversations())
def test_a_generation_mark_and_prefixes_agree(case: Conversation) -> None:
    text, spans = answer_spans(case, load_chat_template("chatml", None, ByteLevelTokenizer()))
    marked_text, marked = answer_spans(case, template(MARKED))
    assert (text, spans) == (marked_text, marked)


def test_a_token_across_the_cut_counts_as_after_it() -> None:
    class Pairs:
        """Two characters a token, from the start of the text."""

        special = SpecialTokens()

        def encode(self, text: str) -> list[int]:
            return [sum(map(ord, text[place : place + 2])) for place in range(0, len(text), 2)]

    source = "{% for m in messages %}{{ m.role[0] + m.content }}{% endfor %}"
    case = conversation(("user", "abcd"), ("assistant", "xyz"))
    encoded = ConversationEncoder(template(source), Pairs()).answers(case)  # type: ignore[arg-type]
    # "ua" "bc" "da" "xy" "z": the answer begins, by the prompt "uabcd", within the third token.
    assert encoded.answer.tolist() == [False, False, True, True, True]


def test_padding_equal_to_eos_loses_no_end_mark(bpe: Tokenizer) -> None:
    encoded = ConversationEncoder(load_chat_template("chatml", None, bpe), bpe).answers(HELLO)
    ends = encoded.tokens == bpe.special.eos
    assert ends.sum() == 4
    assert encoded.answer[ends].tolist() == [False, True, False, True]


@pytest.mark.parametrize(
    ("source", "turns", "message"),
    [
        ("{{ messages[-1].content }}", [("user", "a"), ("assistant", "b")], "differently when more follows"),
        (
            "{% for m in messages %}{{ m.content if loop.last else m.content[:1] }};{% endfor %}",
            [("user", "a"), ("assistant", "bcd"), ("user", "e"), ("assistant", "f")],
            "up to message 2 differently when more follows .'cd;' becomes ';e;f;' at character 3",
        ),
        ("{% generation %}{% for m in messages %}{{ m.content }}{% endfor %}{% endgeneration %}",
         [("user", "a"), ("assistant", "b")], "marks all tokens as answers, the user's too"),
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",
         [("user", "a"), ("assistant", "b")], "writes nothing for the assistant's turns"),
        ("{{ raise_exception('roles must alternate') }}", [("user", "a"), ("assistant", "b")], "roles must alternate"),
        ("{{ bos_token }}", [("user", "a"), ("assistant", "b")], "'bos_token' is undefined"),
        ("{{ strftime_now('%Y') }}", [("user", "a"), ("assistant", "b")], "'strftime_now' is undefined"),
        ("{{ messages.__class__.__mro__ }}", [("user", "a"), ("assistant", "b")], "unsafe|undefined"),
        ("x", [("user", "a")], "has no assistant turn"),
        (MARKED, [("user", "a"), ("assistant", "\ufdd0")], "no characters of any text"),
    ],
)  # fmt: skip
def test_what_cannot_be_right_is_an_error_with_file_and_line(
    source: str, turns: list[tuple[str, str]], message: str
) -> None:
    with pytest.raises(DataError, match=message) as raised:
        ConversationEncoder(template(source), ByteLevelTokenizer()).answers(conversation(*turns))
    assert "chats.jsonl, line 7" in str(raised.value)


def test_all_tokens_on_purpose(bpe: Tokenizer) -> None:
    loaded = load_chat_template("plain", None, bpe)
    everything = ConversationEncoder(loaded, bpe).everything(HELLO)
    assert everything.answer.all()
    assert everything.tokens.tolist() == ConversationEncoder(loaded, bpe).answers(HELLO).tokens.tolist()
    alone = ConversationEncoder(loaded, bpe).everything(conversation(("user", "hi")))
    assert bpe.decode(alone.tokens.tolist()) == "User: hi"


def test_templates_that_cannot_be_loaded(tmp_path: Path, bpe: Tokenizer) -> None:
    plain = ByteLevelTokenizer()
    with pytest.raises(ConfigError, match=r"brings no chat template along; set data\.chat_template to chatml"):
        load_chat_template("tokenizer", None, plain)
    with pytest.raises(ConfigError, match=r'data\.chat_template="chatmi" must be .* \(did you mean "chatml"\?\)'):
        load_chat_template("chatmi", None, plain)
    broken = tmp_path / "broken.jinja"
    broken.write_text("first\n{% for m in messages %}\n{{ m.content }")
    with pytest.raises(ConfigError, match=r"broken\.jinja, line 3: no valid Jinja template"):
        load_chat_template("chatml", str(broken), plain)
    with pytest.raises(ConfigError, match=r"missing\.jinja cannot be read"):
        load_chat_template("chatml", str(tmp_path / "missing.jinja"), plain)
    with pytest.raises(ConfigError, match="needs an end-of-document id after each answer"):
        ConversationEncoder(load_chat_template("plain", None, NoEod()), NoEod())
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": [{}]}]
    called = Conversation([*messages], None, "chats.jsonl", 7)
    encoder = ConversationEncoder(load_chat_template("chatml", None, plain), plain)
    with pytest.raises(DataError, match="this template cannot write tool calls"):
        encoder.answers(called)


class NoEod(ByteLevelTokenizer):
    @property
    def special(self) -> Any:
        return SpecialTokens()


def test_a_wait_is_no_time_of_a_template(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with other work a good template may wait for the processor."""
    from mt_data.datasets.sft import jinja_sandbox

    class Waits(str):
        def __str__(self) -> str:
            time.sleep(0.1)
            return "x"

    monkeypatch.setattr(jinja_sandbox, "SECONDS", 0.05)
    template = jinja_sandbox.compile_template("{% for part in parts %}{{ part ~ '.' }}{% endfor %}", "waits")
    assert template.render({"parts": [Waits(), Waits()]}, "line 1", "")[0] == "x.x."
    endless = jinja_sandbox.compile_template("{% for a in r %}{% for b in r %}{{ a * b }}{% endfor %}{% endfor %}", "e")
    with pytest.raises(DataError, match=r"it takes longer than 0.05 s of processor time"):
        endless.render({"r": range(99999)}, "line 1", "")


def test_a_refusal_says_once_what_to_do(tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"
    template.write_text("{{ raise_exception('no') }}")
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}))
    config = SFTDataConfig(data_path=[str(data)], chat_template_file=str(template))
    with pytest.raises(DataError) as raised:
        build_sft(config, ByteLevelTokenizer(), SplitRequest("train", None, 16, 1))
    assert "refuses the conversation: no; data.chat_template" in str(raised.value)
    assert str(raised.value).count("correct the line") == 1
