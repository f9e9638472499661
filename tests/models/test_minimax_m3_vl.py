"""MiniMax-M3 with pictures against `transformers`: logits, loss, every gradient, maps; decoding; files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.infer.decoding import cached_logits
from tests.infer.engines import OPTIONS, run, tokens_of
from tests.infer.test_qwen_vl import GREEDY, requested
from tests.models.decoder_reference import without_values
from tests.models.qwen_vl_reference import IMAGE, LENGTH, VOCAB, as_reference_inputs, image_batch, texts_with_images
from tests.models.video_reference import video_batch, video_texts
from tests.models.vision_reference import assert_same_training, canonical_size, from_reference, randomize
from torch import Tensor

from mt_core.config.loading import config_from_dict, load_config
from mt_core.errors import ConfigError
from mt_core.parallel.context import ParallelContext
from mt_core.plugins import load_plugins
from mt_infer.config import InferenceConfig
from mt_infer.engine import InferenceEngine
from mt_models.hugging_face import load_reference, to_reference
from mt_models.minimax_m3_vl.hugging_face import HUGGING_FACE, OUTDATED_SIZE

transformers = pytest.importorskip("transformers")

VISION = {
    "hidden_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 20, "patch_size": 3,
    "layer_norm_eps": 1e-3, "rope_parameters": {"rope_type": "axial", "rope_theta": 100.0},
}  # fmt: skip
"""18 of the 20 channels of a head are rotated."""
TEXT = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "rotary_dim": 4, "dense_intermediate_size": 28, "intermediate_size": 16,
    "shared_intermediate_size": 20, "num_local_experts": 4, "num_experts_per_tok": 2, "index_n_heads": 2,
    "index_head_dim": 6, "index_block_size": 3, "index_topk_blocks": 3,
    "layer_types": ["full_attention", "minimax_m3_sparse"], "mlp_layer_types": ["dense", "sparse"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
    "max_position_embeddings": 128, **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
}  # fmt: skip


def make_reference(**outer: Any) -> Any:
    config = transformers.MiniMaxM3VLConfig(
        vision_config=VISION,
        text_config=TEXT,
        projector_hidden_size=36,
        image_token_index=IMAGE,
        video_token_index=99,
        **outer,
    )
    config._attn_implementation = "eager"
    return transformers.MiniMaxM3SparseForConditionalGeneration(config).float().eval()


def given(tokens: Tensor, images: Tensor, grids: Tensor) -> dict[str, Tensor]:
    inputs = as_reference_inputs(tokens, images, grids)
    return {name: value for name, value in inputs.items() if name != "mm_token_type_ids"}


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
    theirs = reference(**given(tokens, images, grids), labels=labels)
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
        inputs = given(tokens[row : row + 1], images[row : row + 1], grids[row : row + 1])
        found = reference.generate(**inputs, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
        expected.append(found[0, LENGTH:].tolist())
    engine = InferenceEngine(model, None, ParallelContext(), InferenceConfig(**OPTIONS), longest=LENGTH + 8)
    assert [tokens_of(found) for found in run(engine, tokens.tolist(), GREEDY, requested())] == expected


@pytest.mark.slow
def test_what_is_written_is_read_by_transformers_to_the_last_bit(pair, tmp_path: Path) -> None:
    """Published names, which are those that transformers writes."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    model, reference = pair
    written = {name: tensor.contiguous() for name, tensor in to_reference(model, HUGGING_FACE).items()}
    save_file(written, tmp_path / "model.safetensors", metadata={"format": "pt"})
    reference.config.save_pretrained(tmp_path)
    again = transformers.MiniMaxM3SparseForConditionalGeneration.from_pretrained(tmp_path)
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in reference.state_dict().items())
    again.save_pretrained(tmp_path / "theirs")
    with safe_open(tmp_path / "theirs" / "model.safetensors", "pt") as file:
        theirs = {HUGGING_FACE.spelling(model.config, name) for name in file.keys()}  # noqa: SIM118
    assert theirs == set(written)


# -- videos ------------------------------------------------------------------------------------------

CLIPS = [[(1, 2, 0), *((1, 2, place) for place in (0, 1, 2, 3, 0))], [(2, 1, 0), (2, 1, 1)]]
"""Rows and columns of cells, and the place in a segment: a still and a video of two segments; one of two views."""
SEGMENTS = [[(1, 1, 2)], [(4, 1, 2), (1, 1, 2), (2, 2, 1)]]
"""Times, rows and columns of the still, and of the segments of the videos."""


def as_video_inputs(tokens: Tensor, images: Tensor) -> dict[str, Tensor]:
    """What `transformers` takes: the still first, then the views of all videos; two frames of each patch."""
    counts = [sum(rows * columns for rows, columns, _ in clips) for clips in CLIPS]
    cells = torch.cat([row[:count] for row, count in zip(images, counts, strict=True)])
    # [V, T, C, m, p, m, p] -> [V, m, m, C, T, p, p]
    patches = cells.reshape(-1, 2, 3, 2, 3, 2, 3).permute(0, 3, 5, 2, 1, 4, 6).reshape(len(cells) * 4, -1)
    still = 8  # patches of two cells
    thw = [torch.tensor([(time, 2 * rows, 2 * columns) for time, rows, columns in grids]) for grids in SEGMENTS]
    return {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "pixel_values": patches[:still],
        "image_grid_thw": thw[0],
        "pixel_values_videos": patches[still:],
        "video_grid_thw": thw[1],
    }


def test_videos_equal_the_reference(host) -> None:
    """Views of a segment see one another and turn with their place in it; the next segment begins again."""
    reference = make_reference()
    randomize(reference)
    model = from_reference(host, HUGGING_FACE, reference, {}, data={"seq_length": LENGTH})
    is_view = [[False, *[True] * 5], [True, True]]
    (tokens, theirs), (images, grids) = video_texts(CLIPS, is_view), video_batch(CLIPS, 2)
    labels = tokens.masked_fill(tokens == IMAGE, -100)
    # A still has two equal frames.
    images[0, :2, 3:] = images[0, :2, :3]
    returned = reference(**as_video_inputs(theirs, images), labels=labels)
    assert_same_training((model, model(tokens, images, image_grids=grids)), (reference, returned), labels, HUGGING_FACE)


# -- configuration -----------------------------------------------------------------------------------

MERGE = {"image_token_compression_method": "patch_merge", "spatial_merge_size": 2, "temporal_patch_size": 2}


@pytest.mark.parametrize(
    ("vision", "outer", "words"),
    [
        ({"img_token_compression_config": MERGE}, {"img_token_compression_config": MERGE}, None),
        ({}, {"img_token_compression_config": {**MERGE, "spatial_merge_size": 3}}, "contradict each other"),
        ({"rope_mode": "2d"}, {}, "rope_mode='2d' is not supported"),
        ({"model_type": "siglip_vision_model"}, {}, "vision_config.model_type='siglip_vision_model'"),
        ({}, {"multimodal_projector_bias": False}, "multimodal_projector_bias=False is not supported"),
        ({"rope_theta": 10000.0}, {}, "contradict each other"),
    ],
)
def test_fields_of_published_files(vision: dict[str, Any], outer: dict[str, Any], words: str | None) -> None:
    external = make_reference().config.to_dict()
    expected = HUGGING_FACE.read_config(external)
    changed = {**external, **outer, "vision_config": {**external["vision_config"], **vision}}
    if words is None:
        assert HUGGING_FACE.read_config(changed) == expected
        return
    with pytest.raises(ConfigError, match=words):
        HUGGING_FACE.read_config(changed)


@pytest.mark.parametrize("prefix", ["", "model.", "language_model.", "language_model.model.", "model.language_model."])
def test_layers_of_prediction_are_left_out_wherever_a_file_has_them(pair, prefix: str) -> None:
    model, _ = pair
    tensors = to_reference(model, HUGGING_FACE)
    load_reference(model, {**tensors, f"{prefix}mtp.layers.0.eh_proj.weight": torch.zeros(2)}, HUGGING_FACE)


def test_image_processors_are_read_and_written() -> None:
    config = config_from_dict({"model": HUGGING_FACE.read_config(make_reference().config.to_dict())}, load_plugins())
    assert HUGGING_FACE.preprocessor is not None
    fields = {"patch_size": 3, "merge_size": 2, "temporal_patch_size": 2}
    published = HUGGING_FACE.preprocessor.read(config.model, {**fields, "size": OUTDATED_SIZE})
    assert (published["min_pixels"], published["max_pixels"]) == (4 * 36, 576 * 36)
    sized = HUGGING_FACE.preprocessor.read(config.model, {**fields, "size": {"longest_edge": 360}})
    written = HUGGING_FACE.preprocessor.write(config.model, sized)
    assert (written["max_pixels"], written["image_processor_type"]) == (360, "MiniMaxM3VLImageProcessor")
    assert HUGGING_FACE.preprocessor.read(config.model, written) == sized
    with pytest.raises(ConfigError, match="patch_size=4 does not fit the model"):
        HUGGING_FACE.preprocessor.read(config.model, {"patch_size": 4})


# -- sizes -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_preset_has_the_size_of_the_class(host) -> None:
    config = load_config(preset="minimax-m3-vl", overrides=["train.train_iters=1"], host=host).config
    external = HUGGING_FACE.write_config(config.model)
    kind = transformers.MiniMaxM3SparseForConditionalGeneration
    reference = without_values(kind, kind.config_class.from_dict(external))
    biases = 57 * 128  # of experts, which are buffers there
    assert canonical_size(host, config) == reference.num_parameters() + biases
