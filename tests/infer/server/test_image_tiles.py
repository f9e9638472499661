"""Images in tiles, from a folder of `transformers` to text: the command and the server against its processor and
its greedy generation."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.data.images.marker_tokenizer import write_marker_tokenizer
from tests.data.images.reference_processors import InternVLProcessor, idefics3_processor
from tests.infer.server.served import chat_format, live, openai_client
from tests.models.vision_reference import randomize

from mt_cli.main import run
from mt_data.datasets.sft.chat_templates import load_chat_template
from mt_infer.chat.chat_format import ChatFormat
from mt_infer.server.options import ServerOptions
from mt_infer.server.served_model import ServedModel
from mt_infer.text import TextGenerator

transformers = pytest.importorskip("transformers")

SIDE, TOKENS = 12, 6
TOWER = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "image_size": SIDE,
    "patch_size": 2,
}  # fmt: skip
TEXT = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "intermediate_size": 24, "max_position_embeddings": 1024, "pad_token_id": 0,
}  # fmt: skip


def smolvlm(vocabulary: int, image_token: int, tokenizer: Any) -> tuple[Any, Any]:
    """The model and its processor: four tiles along the longer side, of 4 features each."""
    config = transformers.Idefics3Config(
        vision_config=TOWER, text_config={"model_type": "llama", "vocab_size": vocabulary, **TEXT}, scale_factor=3,
        image_token_id=image_token,
    )  # fmt: skip
    processor = idefics3_processor(tokenizer, SIDE, 4 * SIDE, 4)
    return transformers.Idefics3ForConditionalGeneration(config), processor


def internvl(vocabulary: int, image_token: int, tokenizer: Any) -> tuple[Any, Any]:
    """Up to 12 tiles and the whole, of 9 features each."""
    text = {"model_type": "qwen2", "vocab_size": vocabulary, **TEXT}
    config = transformers.InternVLConfig(
        vision_config={**TOWER, "attention_bias": True}, text_config=text, image_token_id=image_token,
        tie_word_embeddings=False, downsample_ratio=0.5,
    )  # fmt: skip
    return transformers.InternVLForConditionalGeneration(config), InternVLProcessor(tokenizer, SIDE, 9)


FAMILIES = {"smolvlm": (smolvlm, "<image>"), "internvl": (internvl, "<IMG_CONTEXT>")}


def reference_folder(family: str, folder: Path) -> tuple[Any, Any, str, int]:
    """Writes a tokenizer and a model with random weights; the model, its processor, the image token and its id."""
    folder.mkdir(exist_ok=True)
    make, mark = FAMILIES[family]
    vocabulary = write_marker_tokenizer(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    token = tokenizer.convert_tokens_to_ids(mark)
    model, processor = make(vocabulary, token, tokenizer)
    randomize(model.float().eval())
    model.save_pretrained(folder)
    return model, processor, mark, token


@pytest.fixture(scope="module")
def picture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("images") / "one.png"
    Image.fromarray(np.random.RandomState(3).randint(0, 256, (23, 40, 3)).astype(np.uint8)).save(path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_picture_is_continued_as_the_reference_does(family: str, picture: Path, tmp_path: Path, capsys) -> None:
    """`mt generate` and the server's chat, whose prompt is the same text."""
    model, processor, mark, _ = reference_folder(family, tmp_path)
    text = chat_format().text([{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "so?"}]}])
    asked = processor(text=[text.replace("<image>", mark)], images=[[Image.open(picture)]], return_tensors="pt")
    given = {key: asked[key] for key in ("input_ids", "attention_mask", "pixel_values")}
    with torch.no_grad():
        out = model.generate(**given, max_new_tokens=TOKENS, do_sample=False, eos_token_id=None)
    expected = out[0, given["input_ids"].shape[1] :].tolist()

    options = ["--max-tokens", str(TOKENS), "--temperature", "0", "--ignore-eod", "--json"]
    assert run(["generate", str(tmp_path), "--prompt", text, "--image", str(picture), *options]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tokens"] == expected

    generator = TextGenerator.load(tmp_path, device="cpu")
    chat = ChatFormat(load_chat_template("chatml", None, generator.tokenizer), generator.tokenizer)
    served = ServedModel(family, 0, generator, chat=chat)
    url = f"data:image/png;base64,{base64.b64encode(picture.read_bytes()).decode()}"
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "so?"}]
    with live([served], ServerOptions()) as server:
        client = openai_client(server)
        answer = client.chat.completions.create(
            model=family, messages=[{"role": "user", "content": content}], max_tokens=TOKENS, temperature=0,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
    assert answer.usage.prompt_tokens == given["input_ids"].shape[1]
    assert answer.choices[0].message.content == found["text"]
