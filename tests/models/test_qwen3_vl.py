"""Qwen3-VL against `transformers`: logits, loss, every gradient, maps, resampled positions, decoding, bad input."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.models.qwen3_vl_reference import make_reference
from tests.models.qwen_vl_reference import (
    IMAGE,
    LENGTH,
    SIDE,
    VIDEO,
    as_reference_inputs,
    image_batch,
    texts_with_images,
)
from tests.models.vision_reference import (
    assert_near,
    assert_round_trip,
    assert_same_gradients,
    config_from,
    from_reference,
    randomize,
)
from torch.utils.flop_counter import FlopCounterMode

from mt_core.errors import ConfigError
from mt_models.flops import training_flops as decoder_flops
from mt_models.llava.dynamic_config import image_flops
from mt_models.qwen3_vl.config import merger_weights, training_flops
from mt_models.qwen3_vl.hugging_face import HUGGING_FACE

transformers = pytest.importorskip("transformers")


def make_pair(host, **keys):
    reference = make_reference(**keys)
    randomize(reference)
    return from_reference(host, HUGGING_FACE, reference, {}, data={"seq_length": LENGTH}), reference


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1e6}


@pytest.mark.parametrize(
    "keys",
    [{}, {"tied": True}, {"sparse": True}, {"rope_parameters": {**YARN, "mrope_section": [3, 1, 1]}}],
    ids=["dense", "tied", "experts", "yarn"],
)
def test_logits_loss_and_gradients_equal_the_reference(host, keys) -> None:
    """Three texts, with an image, with two, and without one; features of two layers are added to the decoder."""
    model, reference = make_pair(host, **keys)
    tokens, (images, grids) = texts_with_images(), image_batch()
    labels = tokens.masked_fill(tokens == IMAGE, -100)
    theirs = reference(**as_reference_inputs(tokens, images, grids), labels=labels)
    logits = model(tokens, images, image_grids=grids)
    assert_near(logits, theirs.logits)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    assert loss.item() == pytest.approx(theirs.loss.item(), rel=1e-5)
    loss.backward()
    theirs.loss.backward()
    assert_same_gradients(model, reference, HUGGING_FACE)
    # Files have experts the other way round than modules of transformers: tests/ckpt/test_convert_families.py reads and
    # writes them.
    if not keys.get("sparse"):
        assert_round_trip(model, reference, HUGGING_FACE)


def test_a_text_alone_is_the_decoder_alone(host) -> None:
    model, reference = make_pair(host)
    tokens = texts_with_images()[2:]
    assert torch.equal(model(tokens), model.language_model(tokens))
    assert_near(model(tokens), reference(tokens).logits)


def test_frames_of_a_video_equal_the_reference(host) -> None:
    """A video of two views of 2 x 2 cells with two frames each, behind texts with their times, after a still."""
    model, reference = make_pair(host)
    generator = torch.Generator().manual_seed(6)
    tokens = torch.randint(1, VIDEO, (1, LENGTH), generator=generator)
    tokens[0, 1:4] = tokens[0, 6:10] = tokens[0, 13:17] = IMAGE
    cells = torch.randn(11, 6, SIDE, SIDE, generator=generator)
    cells[:3, 3:] = cells[:3, :3]
    grids = torch.tensor([[[1, 3], [2, 2], [2, 2]]])
    logits = model(tokens, cells[None], image_grids=grids)
    # [V, T, C, m, p, m, p] -> [V, m, m, C, T, p, p]
    patches = cells.reshape(-1, 2, 3, 2, 3, 2, 3).permute(0, 3, 5, 2, 1, 4, 6).reshape(44, -1)
    theirs = tokens.clone()
    theirs[0, 6:17][theirs[0, 6:17] == IMAGE] = VIDEO
    output = reference(
        input_ids=theirs,
        attention_mask=torch.ones_like(theirs),
        pixel_values=patches[:12],
        image_grid_thw=torch.tensor([[1, 2, 6]]),
        pixel_values_videos=patches[12:],
        video_grid_thw=torch.tensor([[2, 4, 4]]),
        mm_token_type_ids=(theirs == IMAGE).int() + 2 * (theirs == VIDEO).int(),
    )
    assert_near(logits, output.logits)
    logits[0, -1].sum().backward()
    output.logits[0, -1].sum().backward()
    assert_same_gradients(model, reference, HUGGING_FACE)


def test_videos_of_samples_have_as_many_frames_as_patches(host) -> None:
    reference = make_reference()
    keys = {"data": {"dataset_type": "captioned_shapes", "frames_per_view": 2, "dynamic_resolution": True}}
    keys["data"] |= {"img_h": SIDE, "img_w": SIDE, "image_token_index": IMAGE, "image_seq_length": 1, "seq_length": 24}
    model = HUGGING_FACE.read_config(reference.config.to_dict())
    with pytest.raises(ConfigError, match="frames_per_view=2 has to be 1: model.family=qwen3_vl"):
        config_from(host, {**model, "vision_model": {**model["vision_model"], "temporal_patch_size": 1}}, **keys)


def test_the_tower_has_the_flops_that_torch_counts(host) -> None:
    """With mergers of three states; a sample counts its largest image, of 20 cells, and the decoder."""
    model, _ = make_pair(host)
    tokens = texts_with_images().clamp(max=IMAGE - 1)[:1]
    tokens[0, 4:20] = IMAGE
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(tokens, torch.randn(1, 16, 6, SIDE, SIDE), image_grids=torch.tensor([[[4, 4]]]))
    counts = {name: sum(ops.values()) for name, ops in counter.get_flop_counts().items()}
    tower, mergers = model.config.vision_model, merger_weights(model.config)
    # Two frames of each patch are embedded.
    frames = image_flops(tower, 16).patches
    assert image_flops(tower, 16).forward + frames == pytest.approx(counts["Qwen3VLModel.vision_model"], rel=0.01)
    assert 2 * 16 * mergers == pytest.approx(counts["Qwen3VLModel.vision_projection"], rel=0.01)
    keys = {"dataset_type": "captioned_shapes", "dynamic_resolution": True, "img_h": SIDE, "img_w": SIDE}
    keys |= {"image_token_index": IMAGE, "image_seq_length": 1, "seq_length": 24, "max_pixels": 20 * SIDE**2}
    section = HUGGING_FACE.read_config(make_reference().config.to_dict())
    config = config_from(host, section, data={**keys, "min_pixels": SIDE**2, "frames_per_view": 2})
    decoder = decoder_flops(config.model_copy(update={"model": config.model.decoder}))
    largest = image_flops(tower, 20)
    image = largest.forward + largest.patches + 2 * 20 * mergers
    assert training_flops(config) == pytest.approx(3 * image + decoder)
