"""Qwen2.5-VL generates: positions behind images, against `transformers`; images of requests to the server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.infer.decoding import cached_logits
from tests.infer.engines import OPTIONS, randomize, run, tokens_of
from tests.infer.server.served import INFERENCE, live, model_of
from tests.infer.server.test_images import data_url, image_part, png
from tests.models.qwen_vl_reference import (
    GRIDS,
    IMAGE,
    LENGTH,
    SIDE,
    as_reference_inputs,
    image_batch,
    make_reference,
    texts_with_images,
)
from tests.models.vision_reference import from_reference
from tests.models.vision_reference import randomize as randomize_both
from torch import Tensor

from mt_core.config.loading import config_from_dict
from mt_core.errors import ConfigError
from mt_core.parallel.context import ParallelContext
from mt_core.plugins import load_plugins
from mt_data.datasets.sft.chat_templates import ChatTemplate
from mt_data.tokenizers.byte_level import ByteLevelTokenizer
from mt_infer.chat.chat_format import ChatFormat
from mt_infer.config import InferenceConfig
from mt_infer.engine import InferenceEngine
from mt_infer.sampling.parameters import SamplingParameters
from mt_infer.server.served_model import ServedModel
from mt_infer.text import TextGenerator
from mt_models.qwen_vl.hugging_face import HUGGING_FACE

GREEDY = SamplingParameters(temperature=0.0, max_tokens=8)


@pytest.fixture(scope="module")
def pair():
    reference = make_reference()
    randomize_both(reference)
    return from_reference(load_plugins(), HUGGING_FACE, reference, {}, data={"seq_length": LENGTH}), reference


def requested() -> list[dict[str, Tensor]]:
    """The inputs of each of the three texts."""
    images, _ = image_batch()
    return [
        {"images": cells[: sum(rows * columns for rows, columns in own)], "image_grids": torch.tensor(own)}
        if own
        else {}
        for cells, own in zip(images, GRIDS, strict=True)
    ]


def test_decoding_with_a_cache_equals_the_forward(pair) -> None:
    """Images are cut by the ends of pieces; a text without images is in the same passes."""
    model, _ = pair
    tokens, (images, grids) = texts_with_images(), image_batch()
    whole = model(tokens, images, image_grids=grids)
    decoded = cached_logits(model, tokens, (3, 7, 20, 21, 22, 23, LENGTH), requested())
    torch.testing.assert_close(decoded, whole, atol=1e-4, rtol=1e-4)


def test_prompts_with_images_are_continued_as_the_reference_does(pair) -> None:
    model, reference = pair
    tokens, inputs = texts_with_images(), requested()
    expected = []
    images, grids = image_batch()
    for row in range(len(GRIDS)):
        given = as_reference_inputs(tokens[row : row + 1], images[row : row + 1], grids[row : row + 1])
        found = reference.generate(**given, max_new_tokens=8, do_sample=False, eos_token_id=None)
        expected.append(found[0, LENGTH:].tolist())
    engine = InferenceEngine(model, None, ParallelContext(), InferenceConfig(**OPTIONS), longest=LENGTH + 8)
    events = run(engine, tokens.tolist(), GREEDY, inputs)
    assert [tokens_of(found) for found in events] == expected


def test_requests_that_do_not_fit_are_refused(pair) -> None:
    model, _ = pair
    engine = InferenceEngine(model, None, ParallelContext(), InferenceConfig(**OPTIONS), longest=LENGTH + 8)
    one = requested()[0]
    cases = [
        ({"images": one["images"]}, "need image_grids"),
        ({**one, "image_grids": torch.tensor([[3, 4]])}, "the grids have 12 cells, and there are 15"),
        ({"videos": one["images"]}, "takes no videos beside tokens; it takes images and image_grids"),
    ]
    for inputs, words in cases:
        with pytest.raises(ConfigError, match=words):
            engine.add([5, *[IMAGE] * 15, 7], GREEDY, inputs)
    with pytest.raises(ConfigError, match="14 image tokens .*have 15 features"):
        engine.add([5, *[IMAGE] * 14, 7], GREEDY, one)


# -- the server --------------------------------------------------------------------------------------

MARK = 261
SHAPE = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
SECTIONS = {
    "model": {
        "family": "qwen_vl",
        "vision_model": {**SHAPE, "patch_dim": 3, "window_size": 12, "full_attention_layers": [1]},
        "language_model": {**SHAPE, "mrope_section": [2, 1, 1]},
        "image_token_index": MARK,
        "vocab_size": 262,
    },
    "inference": {**INFERENCE, "max_sequence_length": 256},
}
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""In the form of the published models'."""


KEYS_OF_IMAGES = {
    "img_h": SIDE, "img_w": SIDE, "image_token_index": MARK, "image_seq_length": 1, "dynamic_resolution": True,
    "image_markers": "qwen2_vl", "video_rule": "qwen2_vl", "min_pixels": SIDE**2, "max_pixels": 60 * SIDE**2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711],
    "frames_per_view": 2,
}  # fmt: skip


def new_generator(**sections: dict[str, Any]) -> TextGenerator:
    config = config_from_dict({**SECTIONS, **sections}, load_plugins())
    model, ctx = model_of(config, 1)
    randomize(model)  # with initial weights an image changes little
    return TextGenerator.of_model(model, ByteLevelTokenizer(), config, ctx)


def cells_by_hand(pixels: np.ndarray) -> Tensor:
    """With CLIP's colours; row by row."""
    mean, std = np.array([0.48145466, 0.4578275, 0.40821073]), np.array([0.26862954, 0.26130258, 0.27577711])
    image = torch.from_numpy((pixels / 255 - mean) / std).float().permute(2, 0, 1)
    rows = image.split(SIDE, dim=1)
    return torch.stack([cell for row in rows for cell in row.split(SIDE, dim=2)])


def test_the_server_takes_images_of_several_sizes_where_the_template_has_them() -> None:
    random = np.random.default_rng(0)
    pictures = [random.integers(0, 256, (*size, 3), dtype=np.uint8) for size in ((12, 18), (24, 12))]
    content = [image_part(data_url(png(pictures[0]))), {"type": "text", "text": "and"}]
    content += [image_part(data_url(png(pictures[1]))), {"type": "text", "text": "?"}]
    chat = ChatFormat(ChatTemplate("qwen", TEMPLATE, {}, eod_after_answer=False), ByteLevelTokenizer())
    with live([ServedModel("qwen", 0, new_generator(), chat=chat)]) as served:
        body = {"model": "qwen", "max_tokens": 8, "temperature": 0, "messages": [{"role": "user", "content": content}]}
        status, answer = served.call("/v1/chat/completions", body)
        assert status == 200, answer
        video = [{"type": "video_url", "video_url": {"url": "data:video/mp4;base64,aaaa"}}]
        refused, error = served.call("/v1/chat/completions", body | {"messages": [{"role": "user", "content": video}]})
        assert (refused, "video 1 cannot be read" in error["error"]["message"]) == (400, True), error
    ids = [*b"<|im_start|>user\n<|vision_start|>", *[MARK] * 6, *b"<|vision_end|>and<|vision_start|>", *[MARK] * 8]
    ids += [*b"<|vision_end|>?<|im_end|>\n<|im_start|>assistant\n"]
    images = torch.cat([cells_by_hand(pixels) for pixels in pictures])
    inputs = {"images": images, "image_grids": torch.tensor([[2, 3], [4, 2]])}
    expected = new_generator().generate([ids], GREEDY, [inputs])[0][0].text
    assert answer["choices"][0]["message"]["content"] == expected


def test_the_server_takes_a_video_as_one_image_with_times(tmp_path: Path) -> None:
    """Two views of two frames a second apart behind each other, between one pair of markers."""
    random = np.random.default_rng(1)
    frames = [random.integers(0, 256, (12, 18, 3), dtype=np.uint8) for _ in range(4)]
    first, *rest = [Image.fromarray(frame) for frame in frames]
    first.save(tmp_path / "film.webp", save_all=True, append_images=rest, duration=500, lossless=True)
    url = data_url((tmp_path / "film.webp").read_bytes(), "image/webp")
    # Of the size of the frames, so that pixels by hand are those of the file.
    keys = {"dataset_type": "image_text", "min_video_pixels": 1, **KEYS_OF_IMAGES}
    content = [{"type": "video_url", "video_url": {"url": url}}, {"type": "text", "text": "?"}]
    template = TEMPLATE.replace(
        "{% else %}{{ part.text }}",
        "{% elif part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>{% else %}{{ part.text }}",
    )
    chat = ChatFormat(ChatTemplate("qwen", template, {}, eod_after_answer=False), ByteLevelTokenizer())
    with live([ServedModel("qwen", 0, new_generator(data=keys), chat=chat)]) as served:
        body = {"model": "qwen", "max_tokens": 8, "temperature": 0, "messages": [{"role": "user", "content": content}]}
        status, answer = served.call("/v1/chat/completions", body)
        assert status == 200, answer
    ids = [*b"<|im_start|>user\n<|vision_start|>", *[MARK] * 12, *b"<|vision_end|>?<|im_end|>\n"]
    ids += [*b"<|im_start|>assistant\n"]
    cells = [cells_by_hand(frame) for frame in frames]
    images = torch.cat([torch.cat(cells[:2], 1), torch.cat(cells[2:], 1)])
    grids = torch.tensor([[2, 3, 0], [2, 3, 1_000_000]])
    expected = new_generator().generate([ids], GREEDY, [{"images": images, "image_grids": grids}])[0][0].text
    assert answer["choices"][0]["message"]["content"] == expected
