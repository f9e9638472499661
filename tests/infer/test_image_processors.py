"""The image processor in a folder of `transformers`, with values that are not the family's: mt makes the same pixels
and tokens, and what mt writes is read by the processor's class. And values that no model of mt takes are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from PIL import Image
from tests.data.images.reference_processors import InternVLProcessor, idefics3_processor
from tests.data.images.test_processors import assert_same_pixels
from tests.infer.server.test_image_tiles import SIDE, reference_folder
from tests.models.gemma4_vl_reference import make_reference as make_gemma4
from tests.models.qwen3_vl_reference import make_reference as make_qwen3
from tests.models.qwen_vl_reference import SIDE as CELL
from tests.models.qwen_vl_reference import make_reference
from tests.models.test_llava import TOWER, llava
from tests.models.test_mistral3 import make_reference as make_mistral3

from mt_ckpt.hugging_face.family import family_named
from mt_core.checkpoint_lookup import open_checkpoint
from mt_core.config.loading import config_from_dict
from mt_core.config.schema import Config
from mt_core.errors import ConfigError
from mt_core.plugins import load_plugins
from mt_core.specs import MODELS
from mt_core.train.build import restore_tokenizer
from mt_data.tokenizers.byte_level import ByteLevelTokenizer
from mt_eval.vqa import VisualQuestions
from mt_infer.prompts import PromptEncoder, image_data, views_of
from mt_infer.sampling.parameters import SamplingParameters

transformers = pytest.importorskip("transformers")

COLOURS = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]}
TEXT = "see <image> and"
BICUBIC, LANCZOS = 3, 1
HOST = load_plugins()


class Published(NamedTuple):
    """images: of `transformers`. ids: of TEXT with an image, where the family's processor runs without torchvision."""

    images: Any
    pixels: np.ndarray
    ids: list[int] | None = None


def smolvlm(folder: Path, image: Image.Image) -> Published:
    """The whole processor's file, processor_config.json."""
    _, processor, _, _ = reference_folder("smolvlm", folder)
    processor = idefics3_processor(processor.tokenizer, SIDE, 3 * SIDE, 4)
    for key, value in {**COLOURS, "resample": BICUBIC}.items():
        setattr(processor.image_processor, key, value)
    processor.save_pretrained(folder)
    found = processor(text=[TEXT], images=[[image]], return_tensors="np")
    return Published(processor.image_processor, found["pixel_values"][0], found["input_ids"][0].tolist())


def internvl(folder: Path, image: Image.Image) -> Published:
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

    _, processor, mark, _ = reference_folder("internvl", folder)
    assert isinstance(processor, InternVLProcessor)
    size = {"height": SIDE, "width": SIDE}
    processor.images = GotOcr2ImageProcessorPil(
        size=size, crop_to_patches=True, max_patches=3, resample=LANCZOS, **COLOURS
    )
    processor.images.save_pretrained(folder)
    found = processor(text=[TEXT.replace("<image>", mark)], images=[[image]], return_tensors="np")
    return Published(processor.images, found["pixel_values"], found["input_ids"][0].tolist())


def qwen_vl(folder: Path, image: Image.Image, make: Callable[[], Any] = make_reference) -> Published:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    make().save_pretrained(folder)
    sizes = {"shortest_edge": CELL**2, "longest_edge": 20 * CELL**2}
    processor = Qwen2VLImageProcessorPil(patch_size=CELL // 2, size=sizes, resample=LANCZOS, **COLOURS)
    processor.save_pretrained(folder)
    patches = processor(images=[image], return_tensors="np")["pixel_values"].reshape(-1, 2, 2, 3, 2, 3, 3)
    return Published(processor, patches[:, :, :, :, 0].transpose(0, 3, 1, 4, 2, 5).reshape(-1, 3, CELL, CELL))


def gemma4_vl(folder: Path, image: Image.Image) -> Published:
    """Colours have one value; the image becomes as large as 70 cells of 2 by 2 patches of 3 pixels hold."""
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    make_gemma4("images that see themselves, experts").save_pretrained(folder)
    processor = Gemma4ImageProcessorPil(patch_size=3, pooling_kernel_size=2, max_soft_tokens=70, resample=LANCZOS)
    processor.save_pretrained(folder)
    found = processor(images=[image], return_tensors="np")
    columns, rows = found["image_position_ids"][0].max(0) // 2 + 1
    patches = found["pixel_values"][0, : rows * columns * 4].reshape(rows, 2, columns, 2, 3, 3, 3)
    # [rows, m, columns, m, p, p, C] -> cells [rows columns, C, m p, m p]
    cells = patches.transpose(0, 2, 6, 1, 4, 3, 5).reshape(-1, 3, 6, 6)
    return Published(processor, cells * 2 - 1)


def mistral3(folder: Path, image: Image.Image) -> Published:
    """The image is made smaller, to whole cells of 2 by 2 patches of 3 pixels; the processor of texts doubles them."""
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

    make_mistral3("mistral").save_pretrained(folder)
    processor = PixtralImageProcessorPil(patch_size=3, size={"longest_edge": 25}, resample=LANCZOS, **COLOURS)
    processor.save_pretrained(folder)
    found = processor(images=[image], patch_size={"height": CELL, "width": CELL}, return_tensors="np")["pixel_values"]
    rows, columns = (side // CELL for side in found.shape[-2:])
    cells = found.reshape(3, rows, CELL, columns, CELL).transpose(1, 3, 0, 2, 4)
    return Published(processor, cells.reshape(-1, 3, CELL, CELL))


def llava_with(kind: str, folder: Path, image: Image.Image, **sizes: Any) -> Published:
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    llava("CLIP", "Llama", {}, {}).save_pretrained(folder)
    type_ = {"clip": CLIPImageProcessorPil, "siglip": SiglipImageProcessorPil}[kind]
    processor = type_(resample=LANCZOS, **sizes, **COLOURS)
    processor.save_pretrained(folder)
    return Published(processor, processor(images=[image], return_tensors="np")["pixel_values"])


EDGE = TOWER["image_size"]
SQUARE = {"height": EDGE, "width": EDGE}
FAMILIES = {
    "smolvlm": smolvlm,
    "internvl": internvl,
    "qwen_vl": qwen_vl,
    "qwen3_vl": lambda folder, image: qwen_vl(folder, image, make_qwen3),
    "gemma4_vl": gemma4_vl,
    "mistral3": mistral3,
    "llava, cropped": lambda folder, image: llava_with(
        "clip", folder, image, size={"shortest_edge": EDGE}, crop_size=SQUARE
    ),
    "llava, squashed": lambda folder, image: llava_with("siglip", folder, image, size=SQUARE),
}


def encoder_of(folder: Path) -> tuple[Config, PromptEncoder]:
    reader = open_checkpoint(folder, HOST)
    config = config_from_dict(reader.metadata["config"], HOST)
    return config, PromptEncoder(restore_tokenizer(config, reader.files(), HOST), config, ("images",))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_values_of_a_published_folder_make_the_images(family: str, tmp_path: Path) -> None:
    image = Image.fromarray(np.random.RandomState(3).randint(0, 256, (23, 40, 3)).astype(np.uint8))
    (tmp_path / "published").mkdir()
    published = FAMILIES[family](tmp_path / "published", image)
    config, encoder = encoder_of(tmp_path / "published")
    (ours,) = views_of([np.asarray(image)], image_data(config))
    assert_same_pixels(ours.pixels.numpy(), published.pixels, 1 / 255 / max(COLOURS["image_std"]))
    if published.ids is not None:
        assert encoder.with_images(TEXT, [ours.grid]) == published.ids

    written = family_named(config.model.family, HOST).preprocessor.write(config.model, config.data.model_dump())
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(written))
    again = type(published.images).from_pretrained(tmp_path)
    assert written["image_processor_type"] == published.images.to_dict()["image_processor_type"]
    expected, found = (one(images=[image], return_tensors="np")["pixel_values"] for one in (published.images, again))
    assert np.array_equal(expected, found)


@pytest.mark.parametrize(
    ("family", "fields", "words"),
    [
        ("llava", {"resample": 2}, "resample='2' is not supported; it can be 3, 1"),
        ("llava", {"size": {"shortest_edge": 8}}, "size={'shortest_edge': 8} does not fit.* 11 by 11 pixels"),
        ("llava", {"do_center_crop": True, "crop_size": 7}, "crop_size=7 does not fit"),
        ("llava", {"do_pad": True}, "do_pad=True does not fit the model; it can be False"),
        ("llava", {"rescale_factor": 1.0}, "rescale_factor=1.0 does not fit"),
        ("smolvlm", {"do_image_splitting": False}, "do_image_splitting=False"),
        ("smolvlm", {"max_image_size": {"longest_edge": 5}}, "max_image_size.* 11 by 11"),
        ("internvl", {"min_patches": 2}, "min_patches=2"),
        ("internvl", {"size": {"height": 11, "width": 12}}, "size=.*11 by 11"),
        ("qwen_vl", {"merge_size": 3}, "merge_size=3 does not fit the model; it can be 2"),
    ],
)
def test_values_that_do_not_fit_the_model_are_named(family: str, fields: dict[str, Any], words: str) -> None:
    shape = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2}
    tower = shape if family == "qwen_vl" else {**shape, "img_h": 11, "img_w": 11}
    decoder = {**shape, "family": "qwen", "vocab_size": 9} if family != "qwen_vl" else {**shape, "vocab_size": 9}
    model_type = HOST[MODELS].get(family, key="model.family").config_type.load()
    tables = {"vision_model": tower, "language_model": decoder, "image_token_index": 8}
    model = model_type.model_validate({"family": family, **tables})
    with pytest.raises(ConfigError, match=words):
        family_named(family, HOST).preprocessor.read(model, fields)


def test_images_for_a_model_of_text_name_the_families_that_take_some(tmp_path: Path) -> None:
    shape = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 9}
    config = config_from_dict({"model": {"family": "llama", **shape}}, HOST)
    families = "gemma4_vl, internvl, kimi_k25, llava, minimax_m3_vl, mistral3, qwen3_omni, qwen3_vl, qwen_next_vl, "
    families += "qwen_vl, smolvlm"
    words = f"model.family=llama takes no images; models of these families do: {families}"
    with pytest.raises(ConfigError, match=words):
        VisualQuestions([], ByteLevelTokenizer(), config, keys={}, sampling=SamplingParameters())
