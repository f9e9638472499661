"""Sounds in conversations: as OpenAI's client sends them, as data: and file: URLs, and what is refused."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.ckpt.convert_cases import QWEN3_OMNI
from tests.data.sounds.test_wav import floats
from tests.infer.engines import randomize
from tests.infer.server.served import INFERENCE, Live, live, model_of, openai_client, scripted_model

from mt_core.config.loading import config_from_dict
from mt_core.plugins import load_plugins
from mt_data.datasets.sft.chat_templates import ChatTemplate
from mt_data.tokenizers.byte_level import ByteLevelTokenizer
from mt_infer.chat.chat_format import ChatFormat
from mt_infer.sampling.parameters import SamplingParameters
from mt_infer.server.options import ServerOptions
from mt_infer.server.served_model import ServedModel
from mt_infer.text import TextGenerator

IMAGE, SOUND = 261, 262
TEMPLATE = (
    "{% for message in messages %}{% for part in message.content %}"
    "{% if part.type == 'audio' %}<|audio_start|><|audio_pad|><|audio_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endfor %}:"
)
WAVE = np.random.RandomState(1).uniform(-0.5, 0.5, 3300).astype(np.float32)


def generator_of() -> TextGenerator:
    decoder = {**QWEN3_OMNI["language_model"], "max_position_embeddings": 128}
    tokens = {"image_token_index": IMAGE, "audio_token_index": SOUND, "vocab_size": 263}
    config = config_from_dict(
        {
            "model": {**QWEN3_OMNI, "language_model": decoder, **tokens},
            "inference": {**INFERENCE, "max_sequence_length": 128, "max_tokens_per_step": 128},
        },
        load_plugins(),
    )
    built, ctx = model_of(config, 1)
    randomize(built)
    return TextGenerator.of_model(built, ByteLevelTokenizer(), config, ctx)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sounds")
    (path / "a.wav").write_bytes(floats(WAVE))
    return path


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Live]:
    template = ChatFormat(ChatTemplate("parts", TEMPLATE, {}, eod_after_answer=False), ByteLevelTokenizer())
    model = ServedModel("omni", 0, generator_of(), chat=template)
    with live([model, scripted_model("ok", chat=template)], ServerOptions(media_folders=(folder,))) as found:
        yield found


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def input_audio(data: bytes, kind: str = "wav") -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": encoded(data), "format": kind}}


def audio_url(url: str) -> dict[str, Any]:
    return {"type": "audio_url", "audio_url": {"url": url}}


def body(*parts: dict[str, Any], model: str = "omni") -> dict[str, Any]:
    content = [{"type": "text", "text": "a"}, *parts, {"type": "text", "text": "b"}]
    return {"model": model, "max_tokens": 8, "temperature": 0, "messages": [{"role": "user", "content": content}]}


@pytest.mark.slow
def test_a_sound_is_heard_in_every_form(served: Live, folder: Path) -> None:
    """The answer is that to ids and samples made by hand."""
    ids = [*b"a<|audio_start|>", *[SOUND] * 3, *b"<|audio_end|>b:"]
    inputs = {"audio": torch.from_numpy(WAVE), "audio_lengths": torch.tensor([3300])}
    greedy = SamplingParameters(temperature=0.0, max_tokens=8)
    expected = generator_of().generate([ids], greedy, [inputs])[0][0].text
    quiet = {**inputs, "audio": inputs["audio"] / 1000}
    assert generator_of().generate([ids], greedy, [quiet])[0][0].text != expected
    forms = [
        input_audio(floats(WAVE)),
        audio_url(f"data:audio/wav;base64,{encoded(floats(WAVE))}"),
        audio_url((folder / "a.wav").as_uri()),
    ]
    for part in forms:
        status, answer = served.call("/v1/chat/completions", body(part))
        assert status == 200, answer
        assert answer["choices"][0]["message"]["content"] == expected
    asked = body(input_audio(floats(WAVE)))
    done = openai_client(served).chat.completions.create(**asked)
    assert done.choices[0].message.content == expected
    assert done.usage.prompt_tokens == len(ids)


@pytest.mark.parametrize(
    ("part", "model", "words"),
    [
        (input_audio(floats(WAVE)), "scripted", 'the model "scripted" takes no sounds'),
        (input_audio(b"no wav"), "omni", "sound 1 is no WAV file"),
        (input_audio(b"x", "mp3"), "omni", 'has the format "mp3"; this server reads "wav"'),
        (input_audio(floats(WAVE[:100])), "omni", "has 100 samples of sound at 16 kHz, and at least 201 are needed"),
        (audio_url("https://host/a.wav"), "omni", "which this server does not fetch"),
        (audio_url("file:///etc/passwd"), "omni", "outside the folders that this server reads audios from"),
        (audio_url("data:image/png;base64,AA=="), "omni", "it must be data:audio/"),
        (input_audio(floats(np.zeros(400_000))), "omni", "context"),
    ],
)
def test_what_is_no_sound_is_refused_by_a_sentence(served: Live, part: dict, model: str, words: str) -> None:
    status, answer = served.call("/v1/chat/completions", body(part, model=model))
    assert status == 400, answer
    assert words in answer["error"]["message"]
