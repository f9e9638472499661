"""Images in conversations with families of images of any size: the answer is that to ids and cells made by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.ckpt.convert_cases import GEMMA4_VL_EXPERTS, KIMI_K25, MINIMAX_M3_VL, MISTRAL3
from tests.infer.engines import randomize
from tests.infer.server.served import INFERENCE, live, model_of
from tests.infer.server.test_images import data_url, image_part, png

from mt_core.config.loading import config_from_dict
from mt_core.plugins import load_plugins
from mt_data.datasets.sft.chat_templates import ChatTemplate
from mt_data.tokenizers.byte_level import ByteLevelTokenizer
from mt_infer.chat.chat_format import ChatFormat
from mt_infer.sampling.parameters import SamplingParameters
from mt_infer.server.served_model import ServedModel
from mt_infer.text import TextGenerator

SIDE, MARK = 4, 261
CLIP = ([0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711])
HALF = ([0.5] * 3, [0.5] * 3)
TEMPLATE = (
    "{% for message in messages %}{% for part in message.content %}"
    "{% if part.type == 'image' %}IMAGE{% else %}{{ part.text }}{% endif %}{% endfor %}{% endfor %}:"
)
FAMILIES = {
    # What its template writes for an image, the text of an image of 2 x 3 cells, colours.
    "gemma4_vl": (GEMMA4_VL_EXPERTS, "<|image|>", b"<|image>", b"######", b"<image|>", HALF),
    "mistral3": (MISTRAL3, "[IMG]", b"", b"###[IMG_BREAK]###", b"[IMG_END]", CLIP),
    "minimax_m3_vl": (
        MINIMAX_M3_VL,
        "]<]image[>[",
        b"]<]start of image[>[",
        b"######",
        b"]<]end of image[>[",
        CLIP,
    ),
    "kimi_k25": (
        KIMI_K25,
        "<|media_begin|>image<|media_content|><|media_pad|><|media_end|>",
        b"<|media_begin|>image<|media_content|>",
        b"######",
        b"<|media_end|>",
        HALF,
    ),
}


def generator_of(model: dict) -> TextGenerator:
    decoder = {**model["language_model"], "max_position_embeddings": 128}
    sections = {
        "model": {**model, "language_model": decoder, "image_token_index": MARK, "vocab_size": 262},
        "inference": {**INFERENCE, "max_sequence_length": 128, "max_tokens_per_step": 128},
    }
    if model["family"] == "gemma4_vl":
        # Images fill max_pixels: 6 cells.
        keys = {"dataset_type": "image_text", "img_h": SIDE, "img_w": SIDE, "image_token_index": MARK}
        keys |= {"image_seq_length": 1, "dynamic_resolution": True, "image_markers": "gemma4", "size_rule": "fill"}
        sections["data"] = {**keys, "min_pixels": 1, "max_pixels": 6 * SIDE**2, "seq_length": 64}
    config = config_from_dict(sections, load_plugins())
    built, ctx = model_of(config, 1)
    randomize(built)  # with initial weights an image changes little
    return TextGenerator.of_model(built, ByteLevelTokenizer(), config, ctx)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_the_server_takes_images(family: str) -> None:
    model, placeholder, before, cells, behind, (mean, std) = FAMILIES[family]
    pixels = np.random.default_rng(3).integers(0, 256, (2 * SIDE, 3 * SIDE, 3), dtype=np.uint8)
    template = ChatTemplate("parts", TEMPLATE.replace("IMAGE", placeholder), {}, eod_after_answer=False)
    served = ServedModel("m", 0, generator_of(model), chat=ChatFormat(template, ByteLevelTokenizer()))
    content = [{"type": "text", "text": "a"}, image_part(data_url(png(pixels))), {"type": "text", "text": "b"}]
    body = {"model": "m", "max_tokens": 8, "temperature": 0, "messages": [{"role": "user", "content": content}]}
    with live([served]) as found:
        status, answer = found.call("/v1/chat/completions", body)
        assert status == 200, answer
    ids = [MARK if token == ord("#") else token for token in cells]
    ids = [*b"a", *before, *ids, *behind, *b"b:"]
    image = torch.from_numpy((pixels / 255 - mean) / std).float()
    # [2, side, 3, side, C] -> cells row by row, [6, C, side, side]
    image = image.unflatten(0, (2, SIDE)).unflatten(2, (3, SIDE)).permute(0, 2, 4, 1, 3).flatten(0, 1)
    inputs = {"images": image, "image_grids": torch.tensor([[2, 3]])}
    greedy = SamplingParameters(temperature=0.0, max_tokens=8)
    expected = generator_of(model).generate([ids], greedy, [inputs])[0][0].text
    assert answer["choices"][0]["message"]["content"] == expected
