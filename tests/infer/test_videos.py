"""Videos of prompts and of requests to the server, for families whose views are texts with times: Kimi K2.5 and
MiniMax-M3; of models that were trained on stills, and of published ones."""

from __future__ import annotations

from base64 import b64encode
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tests.infer.engines import randomize
from tests.infer.server.served import INFERENCE, live, model_of
from tests.infer.test_qwen3_vl import film
from tests.infer.test_qwen_vl import GREEDY, TEMPLATE

from mt_core.config.loading import config_from_dict
from mt_core.plugins import load_plugins
from mt_data.datasets.images.pixels import ImageFile
from mt_data.datasets.sft.chat_templates import ChatTemplate
from mt_data.tokenizers.byte_level import ByteLevelTokenizer
from mt_infer.chat.chat_format import ChatFormat
from mt_infer.prompts import image_data, read_images
from mt_infer.server.served_model import ServedModel
from mt_infer.text import TextGenerator

MARK = 261
SHAPE = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
PIXELS = {
    "dataset_type": "image_text", "image_token_index": MARK, "image_seq_length": 1, "img_h": 6, "img_w": 6,
    "dynamic_resolution": True, "min_pixels": 36, "max_pixels": 36 * 8, "min_video_pixels": 36,
    "max_video_pixels": 36 * 6,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "kimi_k25": {
        "model": {
            "family": "kimi_k25",
            "vision_model": {**SHAPE, "patch_dim": 3, "num_position_embeddings": 16},
            "language_model": {
                **SHAPE, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4,
                "v_head_dim": 8,
            },
        },
        "data": {"image_markers": "kimi", "size_rule": "padded"},
        "placeholder": "<|kimi_k25_video_placeholder|>",
        # 2 frames of a second, of which there are as many: a view of four and one of a frame.
        "text": [
            "00:00:00.000<|media_begin|>video<|media_content|>", "<|media_end|>00:00:02.000<|media_begin|>video"
            "<|media_content|>", "<|media_end|>",
        ],
        "grids": [[2, 3, 4], [2, 3, 1]],
    },
    "minimax_m3_vl": {
        "model": {
            "family": "minimax_m3_vl",
            "vision_model": {**SHAPE, "patch_dim": 3},
            "language_model": {
                **SHAPE,
                "num_query_groups": 2,
                "kv_channels": 8,
                "sparse_attention_freq": "[0]*1+[1]*1",
                "sparse_index_dim": 6,
                "sparse_block_size": 8,
                "sparse_topk_blocks": 4,
                "moe": {"num_experts": 4, "moe_ffn_hidden_size": 16, "moe_router_topk": 2},
            },
            "projection_hidden_size": 24,
        },
        "data": {"image_markers": "minimax_m3"},
        "placeholder": "]<]video[>[",
        # A frame of a second, but four at least of five: 0, 1, 2, 3.
        "text": [
            "]<]0.0 seconds[>[]<]start of image[>[", "]<]end of image[>[]<]1.0 seconds[>[]<]start of image[>[",
            "]<]end of image[>[",
        ],
        "grids": [[2, 3, 0], [2, 3, 1]],
    },
}  # fmt: skip


def new_generator(family: str) -> TextGenerator:
    keys = FAMILIES[family]
    sections = {
        "model": {**keys["model"], "image_token_index": MARK, "vocab_size": 262},
        "data": {**PIXELS, **keys["data"]},
        "inference": {**INFERENCE, "max_sequence_length": 256},
    }
    config = config_from_dict(sections, load_plugins())
    model, ctx = model_of(config, 1)
    randomize(model)
    return TextGenerator.of_model(model, ByteLevelTokenizer(), config, ctx)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_video_of_a_request_is_that_of_a_prompt(tmp_path: Path, family: str) -> None:
    keys = FAMILIES[family]
    random = np.random.default_rng(0)
    film(tmp_path / "film.webp", [random.integers(0, 256, (12, 18, 3), dtype=np.uint8) for _ in range(5)])
    Image.fromarray(random.integers(0, 256, (6, 6, 3), dtype=np.uint8)).save(tmp_path / "still.png")
    generator = new_generator(family)
    prompts, data = generator.prompts, image_data(generator.config)
    files = [ImageFile(tmp_path / "film.webp"), ImageFile(tmp_path / "still.png")]
    pictures = read_images(files, data, videos=True)
    ids = prompts.with_pictures("a<video>?", pictures[:1])
    first, second, last = (list(text.encode()) for text in keys["text"])
    assert ids == [*b"a", *first, *[MARK] * 6, *second, *[MARK] * 6, *last, *b"?"]
    inputs = prompts.image_inputs(pictures)
    assert inputs["image_grids"].tolist() == [*keys["grids"], [1, 1, 0]]
    template = TEMPLATE.replace(
        "{% else %}{{ part.text }}",
        "{% elif part.type == 'video' %}" + keys["placeholder"] + "{% else %}{{ part.text }}",
    )
    chat = ChatFormat(ChatTemplate("of the model", template, {}, eod_after_answer=False), ByteLevelTokenizer())
    url = "data:image/webp;base64," + b64encode((tmp_path / "film.webp").read_bytes()).decode()
    content = [{"type": "video_url", "video_url": {"url": url}}, {"type": "text", "text": "?"}]
    with live([ServedModel("one", 0, generator, chat=chat)]) as served:
        body = {"model": "one", "max_tokens": 8, "temperature": 0, "messages": [{"role": "user", "content": content}]}
        status, answer = served.call("/v1/chat/completions", body)
    assert status == 200, answer
    whole = prompts.with_pictures("<|im_start|>user\n<video>?<|im_end|>\n<|im_start|>assistant\n", pictures[:1])
    video = prompts.image_inputs(pictures[:1])
    expected = new_generator(family).generate([whole], GREEDY, [video])[0][0].text
    assert answer["choices"][0]["message"]["content"] == expected


@pytest.mark.parametrize(
    ("preset", "keys"),
    [
        ("kimi-k2.5", ("kimi_k25", 2.0, 1, 784, 784 * 1024)),
        ("minimax-m3-vl", ("minimax_m3", 1.0, 4, 4 * 784, 768 * 784)),
    ],
)
def test_published_models_take_videos_as_their_processors_do(preset: str, keys: tuple) -> None:
    from mt_core.config.loading import load_config

    data = image_data(load_config(preset=preset, overrides=["train.train_iters=1"], host=load_plugins()).config)
    assert (
        data.video_rule,
        data.video_fps,
        data.min_video_frames,
        data.min_video_pixels,
        data.max_video_pixels,
    ) == keys
