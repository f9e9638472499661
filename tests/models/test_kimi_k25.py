"""Kimi K2.5 with pictures against `transformers`: logits, loss, every gradient, maps; decoding; files."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.infer.decoding import cached_logits
from tests.infer.engines import OPTIONS, run, tokens_of
from tests.infer.test_qwen_vl import GREEDY, requested
from tests.models.decoder_reference import without_values
from tests.models.qwen_vl_reference import IMAGE, LENGTH, SIDE, VOCAB, image_batch, texts_with_images
from tests.models.video_reference import video_batch, video_texts
from tests.models.vision_reference import assert_same_training, canonical_size, from_reference, randomize
from torch import Tensor

from mt_core.config.loading import config_from_dict, load_config
from mt_core.errors import ConfigError
from mt_core.parallel.context import ParallelContext
from mt_core.plugins import load_plugins
from mt_data.datasets.images.config import ImageTextKeys
from mt_data.datasets.images.tiles import DynamicResolution, Grid, PaddedResolution
from mt_infer.config import InferenceConfig
from mt_infer.engine import InferenceEngine
from mt_models.hugging_face import to_reference
from mt_models.kimi_k25.hugging_face import HUGGING_FACE

transformers = pytest.importorskip("transformers")

VISION = {
    "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 20, "patch_size": 3,
    "pos_emb_height": 5, "pos_emb_width": 5,
}  # fmt: skip
TEXT = {
    "model_type": "deepseek_v3", "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 28, "moe_intermediate_size": 16,
    "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 8, "max_position_embeddings": 128, "num_nextn_predict_layers": 0, "aux_loss_alpha": 0.0,
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
}  # fmt: skip


def make_reference(**outer: Any) -> Any:
    keys = {"tie_word_embeddings": False, "projection_layer_norm_eps": 1e-3, **outer}
    config = transformers.Kimi_K25Config(
        vision_config=VISION,
        text_config=TEXT,
        projection_hidden_size=VISION["hidden_size"],
        image_token_id=IMAGE,
        video_token_id=99,
        **keys,
    )
    config._attn_implementation = "eager"
    return transformers.Kimi_K25ForConditionalGeneration(config).float().eval()


def as_reference_inputs(tokens: Tensor, images: Tensor, grids: Tensor) -> dict[str, Tensor]:
    """What `transformers` takes: patches of each image row by row."""
    texts = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    patches, sizes = [], []
    for row, own in zip(images, grids.tolist(), strict=True):
        first = 0
        for rows, columns in (grid for grid in own if grid[0]):
            cells = row[first : first + rows * columns].reshape(rows, columns, 3, 2, 3, 2, 3)
            first += rows * columns
            # [rows, columns, C, m, p, m, p] -> [rows, m, columns, m, C, p, p]
            patches.append(cells.permute(0, 3, 1, 5, 2, 4, 6).reshape(-1, 3, SIDE // 2, SIDE // 2))
            sizes.append((1, 2 * rows, 2 * columns))
    if not patches:
        return texts
    return {**texts, "pixel_values": torch.cat(patches), "image_grid_thw": torch.tensor(sizes)}


@pytest.fixture(scope="module")
def pair(host):
    reference = make_reference()
    randomize(reference)
    return from_reference(host, HUGGING_FACE, reference, {}, data={"seq_length": LENGTH}), reference


def test_logits_loss_and_gradients_equal_the_reference(pair) -> None:
    """Three texts, with an image, with two, and without one."""
    model, reference = pair
    tokens, (images, grids) = texts_with_images(), image_batch()
    labels = tokens.masked_fill(tokens == IMAGE, -100)
    theirs = reference(**as_reference_inputs(tokens, images, grids), labels=labels)
    logits = model(tokens, images, image_grids=grids)
    assert_same_training((model, logits), (reference, theirs), labels, HUGGING_FACE)


def test_decoding_equals_the_forward_pass(pair) -> None:
    """Images are cut by the ends of pieces."""
    model, _ = pair
    tokens, (images, grids) = texts_with_images(), image_batch()
    with torch.no_grad():
        whole = model(tokens, images, image_grids=grids)
    decoded = cached_logits(model, tokens, (3, 7, 20, 21, 22, 23, LENGTH), requested())
    torch.testing.assert_close(decoded, whole, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_prompts_with_images_are_continued_as_the_reference_does(pair) -> None:
    model, reference = pair
    tokens, (images, grids) = texts_with_images(), image_batch()
    expected = []
    for row in range(len(tokens)):
        given = as_reference_inputs(tokens[row : row + 1], images[row : row + 1], grids[row : row + 1])
        found = reference.generate(**given, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
        expected.append(found[0, LENGTH:].tolist())
    engine = InferenceEngine(model, None, ParallelContext(), InferenceConfig(**OPTIONS), longest=LENGTH + 8)
    assert [tokens_of(found) for found in run(engine, tokens.tolist(), GREEDY, requested())] == expected


@pytest.mark.slow
def test_what_is_written_is_read_by_transformers_to_the_last_bit(pair, tmp_path: Path) -> None:
    """Published names, whose rows of queries and keys are in another order than in its memory."""
    from safetensors.torch import save_file

    model, reference = pair
    save_file({name: tensor.contiguous() for name, tensor in to_reference(model, HUGGING_FACE).items()},
              tmp_path / "model.safetensors", metadata={"format": "pt"})  # fmt: skip
    reference.config.save_pretrained(tmp_path)
    again = transformers.Kimi_K25ForConditionalGeneration.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in reference.state_dict().items())


def test_names_that_transformers_writes_are_those_of_published_files() -> None:
    """Its writer moves two prefixes too far."""
    names = {
        "language_model.model.blocks.1.mlp.gate.weight": "language_model.model.layers.1.mlp.gate.weight",
        "vision_tower.encoder.patch_embed.proj.bias": "vision_tower.patch_embed.proj.bias",
        "model.mm_projector.pre_norm.bias": "mm_projector.pre_norm.bias",
        "vision_tower.encoder.blocks.0.norm1.weight": "vision_tower.encoder.blocks.0.norm1.weight",
    }
    assert {name: HUGGING_FACE.spelling(None, name) for name in names} == names


def test_the_first_published_files_are_read() -> None:
    external = make_reference().config.to_dict()
    newer = HUGGING_FACE.read_config(external)
    vision = {
        "vt_hidden_size": 24, "vt_num_hidden_layers": 2, "vt_num_attention_heads": 2, "vt_intermediate_size": 20,
        "patch_size": 3, "init_pos_emb_height": 5, "init_pos_emb_width": 5, "init_pos_emb_time": 4,
        "merge_kernel_size": [2, 2], "merge_type": "sd2_tpool", "mm_hidden_size": 24, "projector_ln_eps": 1e-3,
        "mm_projector_type": "patchmerger", "projector_hidden_act": "gelu", "text_hidden_size": 32,
        "pos_emb_type": "divided_fixed", "video_attn_type": "spatial_temporal", "model_type": "",
    }  # fmt: skip
    older = {key: value for key, value in external.items() if not key.startswith("projection")}
    older |= {"vision_config": vision, "media_placeholder_token_id": older.pop("image_token_id")}
    assert HUGGING_FACE.read_config(older) == newer
    with pytest.raises(ConfigError, match="vision_config.text_hidden_size=64 is not supported; it can be 32"):
        HUGGING_FACE.read_config({**older, "vision_config": {**vision, "text_hidden_size": 64}})


# -- videos ------------------------------------------------------------------------------------------

CLIPS = [[(1, 2, 0), (2, 2, 4), (2, 2, 3)], [(3, 1, 1), (2, 1, 2)]]
"""Rows and columns of cells and frames: a still and a video of 7 frames; one of a frame, and one of two."""
IS_VIEW = [[False, True, True], [True, True]]


def video_features(reference: Any, images: Tensor) -> dict[str, Any]:
    """What the class computes of each still and each view by itself: it takes no views with other numbers of frames
    together (transformers 5.23)."""
    parts: dict[str, list[Tensor]] = {"image": [], "video": []}
    for row, grids, of_video in zip(images, CLIPS, IS_VIEW, strict=True):
        first = 0
        for (rows, columns, frames), is_of_video in zip(grids, of_video, strict=True):
            frames = max(frames, 1)
            cells = row[first : first + rows * columns].reshape(rows, columns, 4, 3, 2, 3, 2, 3)[:, :, :frames]
            first += rows * columns
            # [rows, columns, T, C, m, p, m, p] -> [T, rows, m, columns, m, C, p, p]
            patches = cells.permute(2, 0, 4, 1, 6, 3, 5, 7).reshape(-1, 3, SIDE // 2, SIDE // 2)
            sizes = torch.tensor([[frames, 2 * rows, 2 * columns]])
            states = reference.model.vision_tower(patches, sizes).pooler_output
            parts["video" if is_of_video else "image"].append(reference.model.mm_projector(states).squeeze(1))
    return {name: SimpleNamespace(pooler_output=features) for name, features in parts.items()}


def test_videos_equal_the_reference(host) -> None:
    """Frames of a view see one another, and have the times of their view alone; states are averaged over real
    frames: padding of a view with fewer frames has no part."""
    reference = make_reference()
    randomize(reference)
    model = from_reference(host, HUGGING_FACE, reference, {}, data={"seq_length": LENGTH})
    (tokens, theirs), (images, grids) = video_texts(CLIPS, IS_VIEW), video_batch(CLIPS, 4)
    labels = tokens.masked_fill(tokens == IMAGE, -100)
    features = video_features(reference, images)
    returned = reference(theirs, torch.ones_like(theirs), mm_encoder_outputs=features, labels=labels)
    assert_same_training((model, model(tokens, images, image_grids=grids)), (reference, returned), labels, HUGGING_FACE)


def test_requests_with_videos_have_the_logits_of_training(pair) -> None:
    model, _ = pair
    (tokens, _), (images, grids) = video_texts(CLIPS, IS_VIEW), video_batch(CLIPS, 4)
    inputs = [
        {"images": row[: sum(rows * columns for rows, columns, _ in clips)], "image_grids": torch.tensor(clips)}
        for row, clips in zip(images, CLIPS, strict=True)
    ]
    with torch.no_grad():
        whole = model(tokens, images, image_grids=grids)
    decoded = cached_logits(model, tokens, (5, 20, tokens.shape[1]), inputs)
    torch.testing.assert_close(decoded, whole, atol=1e-4, rtol=1e-4)


# -- images ------------------------------------------------------------------------------------------


def keys_of_images(**fields: Any) -> tuple[Any, dict[str, Any]]:
    """The model's configuration, and the keys of [data] of a preprocessor_config.json with these fields."""
    config = config_from_dict({"model": HUGGING_FACE.read_config(make_reference().config.to_dict())}, load_plugins())
    assert HUGGING_FACE.preprocessor is not None
    return config.model, HUGGING_FACE.preprocessor.read(config.model, {"patch_size": 3, "merge_size": 2, **fields})


@pytest.mark.parametrize(
    ("size", "resized", "grid"),
    [
        # 7 x 13 whole patches are more than 60: 23 sqrt(60 / 91) = 18.67, 40 sqrt(60 / 91) = 32.48.
        ((23, 40), (18, 32), (3, 6)),
        ((12, 30), (12, 30), (2, 5)),
        ((13, 31), (13, 31), (3, 6)),
        ((2, 2), (2, 2), (1, 1)),
        # 1 x 600 patches: 512 patches of a side are the narrower limit, of which 60 patches leave 60.
        ((3, 1800), (1, 569), (1, 95)),
    ],
)
def test_an_image_is_made_smaller_and_padded(
    size: tuple[int, int], resized: tuple[int, int], grid: tuple[int, int]
) -> None:
    """60 patches of 3 pixels. Pixels are Pillow's, and black beyond."""
    from PIL import Image

    _, keys = keys_of_images(max_patches=60)
    tiling = DynamicResolution.of(ImageTextKeys.model_validate({**only_fields(keys), "seq_length": 99}))
    pixels = np.random.RandomState(1).randint(0, 256, (*size, 3)).astype(np.uint8)
    assert tiling.grid(*size) == grid
    assert tiling.max_views >= grid[0] * grid[1]
    expected = np.zeros((grid[0] * 6, grid[1] * 6, 3), np.uint8)
    expected[: resized[0], : resized[1]] = Image.fromarray(pixels).resize(resized[::-1], Image.Resampling.BICUBIC)
    views = tiling.views(pixels, Grid(*grid)).reshape(*grid, 6, 6, 3).swapaxes(1, 2).reshape(expected.shape)
    assert np.array_equal(views, expected)


def only_fields(keys: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in keys.items() if key in ImageTextKeys.model_fields and key != "dataset_type"}


def test_no_image_has_more_cells_than_are_reserved() -> None:
    tiling = PaddedResolution(6, 6, max_pixels=60 * 9)
    sizes = [*range(1, 60), 100, 200, 1536, 3000]
    assert max(tiling.num_views(tiling.grid(height, width)) for height in sizes for width in sizes) <= tiling.max_views


def test_image_processors_are_read_and_written() -> None:
    model, keys = keys_of_images(max_patches=60, image_mean=[0.5, 0.5, 0.4])
    assert (keys["max_pixels"], keys["size_rule"], keys["image_mean"]) == (540, "padded", [0.5, 0.5, 0.4])
    written = HUGGING_FACE.preprocessor.write(model, keys)
    assert (written["max_patches"], written["size"]) == (60, {"max_height": 512, "max_width": 512})
    published = {"in_patch_limit": 60, "patch_size": 3, "merge_kernel_size": 2, "patch_limit_on_one_side": 512}
    published |= {"image_mean": [0.5, 0.5, 0.4], "image_std": [0.5, 0.5, 0.5]}
    assert keys_of_images(media_proc_cfg=published)[1] == keys
    with pytest.raises(ConfigError, match="size.max_height=64 does not fit the model; it can be 512"):
        keys_of_images(size={"max_height": 64, "max_width": 64})


# -- sizes -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_preset_has_the_size_of_the_class(host) -> None:
    config = load_config(preset="kimi-k2.5", overrides=["train.train_iters=1"], host=host).config
    external = HUGGING_FACE.write_config(config.model)
    kind = transformers.Kimi_K25ForConditionalGeneration
    reference = without_values(kind, kind.config_class.from_dict(external))
    biases = 60 * 384  # of experts, which are buffers there
    assert canonical_size(host, config) == reference.num_parameters() + biases
