"""Images in conversations with LLaVA: as data, as files of allowed folders, and what is refused."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tests.infer.engines import randomize
from tests.infer.server.served import INFERENCE, Live, chat_format, live, model_of, openai_client, scripted_model

from mt_core.config.loading import config_from_dict
from mt_core.plugins import load_plugins
from mt_data.datasets.sft.chat_templates import ChatTemplate
from mt_data.tokenizers.byte_level import ByteLevelTokenizer
from mt_infer.chat.chat_format import ChatFormat
from mt_infer.sampling.parameters import SamplingParameters
from mt_infer.server.options import ServerOptions
from mt_infer.server.served_model import ServedModel
from mt_infer.text import TextGenerator

SIZE, FEATURES, IMAGE = 8, 4, 261
SHAPE = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
LLAVA = {
    "family": "llava",
    "vision_model": {**SHAPE, "img_h": SIZE, "img_w": SIZE, "patch_dim": 4},
    "language_model": {"family": "llama", **SHAPE},
    "image_token_index": IMAGE,
    "vocab_size": 262,
}
DATA = {"dataset_type": "captioned_shapes", "img_h": SIZE, "img_w": SIZE, "seq_length": 512} | {
    "image_token_index": IMAGE,
    "image_seq_length": FEATURES,
}


def new_llava() -> TextGenerator:
    sections = {"model": LLAVA, "data": DATA, "inference": {**INFERENCE, "max_sequence_length": 512}}
    config = config_from_dict(sections, load_plugins())
    model, ctx = model_of(config, 1)
    randomize(model)  # with initial weights an image changes little
    return TextGenerator.of_model(model, ByteLevelTokenizer(), config, ctx)


@pytest.fixture(scope="module")
def llava() -> TextGenerator:
    """The weights of the served model, in an engine of its own."""
    return new_llava()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("images")


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Live]:
    model = ServedModel("llava", 0, new_llava(), chat=chat_format())
    text_only = scripted_model("ok", chat=chat_format())
    with live([model, text_only], ServerOptions(media_folders=(folder,))) as found:
        yield found


def picture(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8)


def png(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def data_url(content: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def image_part(url: str) -> dict:
    return {"type": "image_url", "image_url": {"url": url}}


def expected(llava: TextGenerator, before: str, *pieces: np.ndarray | str) -> str:
    """Greedy text behind ids and colours that are put together by hand."""
    ids, images = list(before.encode()), []
    for piece in pieces:
        if isinstance(piece, str):
            ids += piece.encode()
        else:
            ids += [IMAGE] * FEATURES
            images.append(torch.from_numpy((piece.astype(np.float32) / 255 - 0.5) / 0.5).permute(2, 0, 1))
    greedy = SamplingParameters(temperature=0.0, max_tokens=8)
    return llava.generate([ids], greedy, [{"images": torch.stack(images)}])[0][0].text


def test_a_model_of_images_takes_no_videos(served: Live) -> None:
    content = [{"type": "video_url", "video_url": {"url": "data:video/mp4;base64,aaaa"}}]
    body = {"model": "llava", "max_tokens": 1, "messages": [{"role": "user", "content": content}]}
    status, error = served.call("/v1/chat/completions", body)
    assert status == 400
    assert "a part is a video_url" in error["error"]["message"]


@pytest.mark.slow
def test_a_model_sees_the_images_of_a_conversation(served: Live, llava: TextGenerator, folder: Path) -> None:
    first, second = picture(1), picture(2)
    (folder / "it is.png").write_bytes(png(second))
    client = openai_client(served)

    def answer(*parts: dict, **asked: object) -> str:
        messages = [{"role": "user", "content": list(parts)}]
        done = client.chat.completions.create(model="llava", messages=messages, max_tokens=8, temperature=0, **asked)
        if asked:
            return "".join(piece.choices[0].delta.content or "" for piece in done)
        return done.choices[0].message.content

    def text(value: str) -> dict:
        return {"type": "text", "text": value}

    open_, close = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
    one = answer(text("what is it?"), image_part(data_url(png(first))))
    assert one == expected(llava, open_ + "what is it?\n", first, close)
    both = (image_part(data_url(png(first))), image_part(f"file://{folder}/it%20is.png"), text("and?"))
    assert answer(*both) == expected(llava, open_, first, "\n", second, "\nand?" + close)
    assert answer(text("what is it?"), image_part(data_url(png(second)))) != one
    assert answer(text("what is it?"), image_part(data_url(png(first))), stream=True) == one
    shown = {model.id: model.takes_images for model in client.models.list()}
    assert shown == {"llava": True, "scripted": False}


@pytest.mark.slow
def test_images_that_cannot_be_are_errors(served: Live, folder: Path) -> None:
    (folder / "link.png").symlink_to(folder.parent / "outside.png")
    (folder.parent / "outside.png").write_bytes(png(picture(1)))
    postscript = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n"
    good = data_url(png(picture(1)))
    cases = [
        ([image_part("http://127.0.0.1/a.png")], "does not fetch"),
        ([image_part("gopher:x")], "does not fetch"),
        ([image_part("file://[")], "is no URL"),
        ([image_part(f"file://{folder}/a%00.png")], "is no URL: embedded null"),
        ([image_part(f"file://{folder}/../outside.png")], "outside the folders"),
        ([image_part(f"file://{folder}/link.png")], "outside the folders"),
        ([image_part(f"file://elsewhere{folder}/it.png")], "does not fetch"),
        ([image_part(f"file://{folder}/none.png")], "cannot be read as an image"),
        ([image_part("data:text/plain;base64,aaaa")], "data:image/"),
        ([image_part("data:image/png;base64,a*")], "not valid base64"),
        ([image_part(data_url(b"no image"))], "cannot be read as an image: PNG, JPEG"),
        ([image_part(data_url(postscript, "image/eps"))], "cannot be read as an image"),
        ([image_part(data_url(png(np.zeros((5000, 6600, 3), np.uint8))))], "6600 x 5000 pixels"),
        ([image_part(data_url(png(np.zeros((1, 500_000, 3), np.uint8))))], "image 1: an image of 1 x 500000 pixels is"),
        ([image_part(good), {"type": "text", "text": "<image>"}], "<image> 2 times, and the number of images is 1"),
        ([image_part(good)] * 200, "context is 512"),
        ([image_part(data_url(b"no image"))] * 129, "129 images take 516 and more"),  # none of them is decoded
        ([{"type": "image_url", "image_url": {"url": good, "detail": "fine"}}], "auto"),
    ]
    for content, words in cases:
        status, answer = served.call(
            "/v1/chat/completions", {"model": "llava", "messages": [{"role": "user", "content": content}]}
        )
        assert (status, words in answer["error"]["message"]) == (400, True), (words, answer)
    for model, role, words in (("scripted", "user", "takes no images"), ("llava", "assistant", 'those of "user"')):
        body = {"model": model, "messages": [{"role": role, "content": [image_part(good)]}]}
        status, answer = served.call("/v1/chat/completions", body)
        assert (status, words in answer["error"]["message"]) == (400, True), answer
    assert served.service.engine.is_idle


def test_a_template_for_parts_is_given_parts() -> None:
    """As those of published LLaVA checkpoints are written: texts that are no parts would be left out."""
    source = (
        "{% for message in messages %}{{ message.role | upper }}: "
        "{% for part in message.content | selectattr('type', 'equalto', 'image') %}<image>\n{% endfor %}"
        "{% for part in message.content | selectattr('type', 'equalto', 'text') %}{{ part.text }}{% endfor %}</s>"
        "{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
    )
    chat = ChatFormat(ChatTemplate("llava", source, {}, eod_after_answer=False), ByteLevelTokenizer())
    parts = [{"type": "text", "text": "what?"}, {"type": "image"}]
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": parts}]
    assert chat.text(messages) == "SYSTEM: be brief</s>USER: <image>\nwhat?</s>ASSISTANT:"
    assert chat.stop == ("</s>",)
    chat.close()
