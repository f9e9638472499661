"""Qwen3-VL generates: features of images in the text and behind layers of the decoder, against `transformers`."""

from __future__ import annotations

from base64 import b64encode
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tests.data.images.test_videos import write_film
from tests.infer.decoding import cached_logits
from tests.infer.engines import OPTIONS, run, tokens_of
from tests.infer.engines import randomize as randomize_engine
from tests.infer.server.served import INFERENCE, live, model_of
from tests.infer.test_qwen_vl import GREEDY, TEMPLATE, requested
from tests.models.qwen3_vl_reference import make_reference
from tests.models.qwen_vl_reference import GRIDS, LENGTH, as_reference_inputs, image_batch, texts_with_images
from tests.models.vision_reference import from_reference, randomize

from mt_core.config.loading import config_from_dict
from mt_core.parallel.context import ParallelContext
from mt_core.plugins import load_plugins
from mt_data.datasets.images.pixels import ImageFile
from mt_data.datasets.sft.chat_templates import ChatTemplate
from mt_data.tokenizers.byte_level import ByteLevelTokenizer
from mt_infer.chat.chat_format import ChatFormat
from mt_infer.config import InferenceConfig
from mt_infer.engine import InferenceEngine
from mt_infer.prompts import image_data, read_images
from mt_infer.server.served_model import ServedModel
from mt_infer.text import TextGenerator
from mt_models.qwen3_vl.hugging_face import HUGGING_FACE


@pytest.fixture(scope="module")
def pair():
    reference = make_reference()
    randomize(reference)
    return from_reference(load_plugins(), HUGGING_FACE, reference, {}, data={"seq_length": LENGTH}), reference


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
    assert [tokens_of(found) for found in run(engine, tokens.tolist(), GREEDY, inputs)] == expected


# -- videos of requests ------------------------------------------------------------------------------

MARK = 261
SHAPE = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
SECTIONS = {
    "model": {
        "family": "qwen3_vl",
        "vision_model": {**SHAPE, "patch_dim": 3, "num_position_embeddings": 16, "deepstack_layers": [0]},
        "language_model": {**SHAPE, "kv_channels": 8, "mrope_section": [2, 1, 1]},
        "image_token_index": MARK,
        "vocab_size": 262,
    },
    # Two frames a second, each of 2 by 3 cells, whatever the size.
    "data": {
        "dataset_type": "image_text", "image_token_index": MARK, "image_seq_length": 1, "img_h": 6, "img_w": 6,
        "dynamic_resolution": True, "image_markers": "qwen2_vl", "min_pixels": 36, "max_pixels": 36 * 8,
        "min_video_pixels": 36, "max_video_pixels": 36 * 40,
    },
    "inference": {**INFERENCE, "max_sequence_length": 256},
}  # fmt: skip


def new_generator() -> TextGenerator:
    config = config_from_dict(SECTIONS, load_plugins())
    model, ctx = model_of(config, 1)
    randomize_engine(model)
    return TextGenerator.of_model(model, ByteLevelTokenizer(), config, ctx)


def film(path: Path, frames: list[np.ndarray]) -> None:
    first, *rest = [Image.fromarray(frame) for frame in frames]
    first.save(path, save_all=True, append_images=rest, duration=500, lossless=True)


def test_a_video_of_a_request_is_that_of_a_prompt(tmp_path: Path) -> None:
    """By the server, from an animated file and from a video file, and by Python: times, frames, the order of a
    still before it."""
    random = np.random.default_rng(0)
    frames = [random.integers(0, 256, (12, 18, 3), dtype=np.uint8) for _ in range(4)]
    film(tmp_path / "film.webp", frames)
    Image.fromarray(frames[0]).save(tmp_path / "still.png")
    generator = new_generator()
    prompts, data = generator.prompts, image_data(generator.config)
    found = read_images([ImageFile(tmp_path / "still.png"), ImageFile(tmp_path / "film.webp")], data, videos=True)
    ids = prompts.with_pictures("<|im_start|>user\n<image><video>?", found)
    cells, inputs = [MARK] * 6, prompts.image_inputs(found)
    expected = [*b"<|im_start|>user\n<|vision_start|>", *cells, *b"<|vision_end|><0.2 seconds><|vision_start|>", *cells]
    expected += [*b"<|vision_end|><1.2 seconds><|vision_start|>", *cells, *b"<|vision_end|>?"]
    assert ids == expected
    assert inputs["images"].shape == (18, 6, 6, 6)
    assert torch.equal(inputs["images"][:6, :3], inputs["images"][:6, 3:])
    assert not torch.equal(inputs["images"][6:, :3], inputs["images"][6:, 3:])
    assert inputs["image_grids"].tolist() == [[2, 3]] * 3
    template = TEMPLATE.replace(
        "{% else %}{{ part.text }}",
        "{% elif part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>{% else %}{{ part.text }}",
    )
    chat = ChatFormat(ChatTemplate("qwen", template, {}, eod_after_answer=False), ByteLevelTokenizer())
    files = {"film.webp": "image/webp"}
    if find_spec("av"):
        write_film(tmp_path / "film.mp4", frames, 2)
        files["film.mp4"] = "video/mp4"
    urls = {
        name: f"data:{kind};base64," + b64encode((tmp_path / name).read_bytes()).decode()
        for name, kind in files.items()
    }
    answers = []
    with live([ServedModel("qwen", 0, generator, chat=chat)]) as served:
        for url in urls.values():
            content = [{"type": "video_url", "video_url": {"url": url}}, {"type": "text", "text": "?"}]
            messages = [{"role": "user", "content": content}]
            body = {"model": "qwen", "max_tokens": 8, "temperature": 0, "messages": messages}
            status, answer = served.call("/v1/chat/completions", body)
            assert status == 200, answer
            answers.append(answer["choices"][0]["message"]["content"])
    whole = prompts.with_pictures("<|im_start|>user\n<video>?<|im_end|>\n<|im_start|>assistant\n", found[1:])
    text = new_generator().generate([whole], GREEDY, [prompts.image_inputs(found[1:])])[0][0].text
    assert answers == [text] * len(files)
