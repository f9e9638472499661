"""Qwen2.5-VL against `transformers`: positions, logits, loss, every gradient, maps, sizes, FLOPs, bad input."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.infer.decoding import cached_logits
from tests.models.decoder_reference import without_values
from tests.models.qwen_vl_reference import (
    IMAGE,
    LENGTH,
    SIDE,
    VIDEO,
    VISION,
    as_reference_inputs,
    image_batch,
    make_reference,
    texts_with_images,
)
from tests.models.vision_reference import (
    assert_near,
    assert_same_gradients,
    assert_same_training,
    built,
    canonical_size,
    config_from,
    from_reference,
    randomize,
)
from torch.utils.flop_counter import FlopCounterMode

from mt_core.config.checks import as_world
from mt_core.config.loading import load_config
from mt_core.errors import ConfigError, DataError
from mt_core.specs import MODELS
from mt_models.hugging_face import load_reference, to_reference
from mt_models.qwen_vl.config import flops_per_sample, training_flops
from mt_models.qwen_vl.hugging_face import HUGGING_FACE
from mt_models.qwen_vl.model import multimodal_positions

transformers = pytest.importorskip("transformers")


def make_pair(host, **text):
    reference = make_reference(**text)
    randomize(reference)
    return from_reference(host, HUGGING_FACE, reference, {}, data={"seq_length": LENGTH}), reference


@pytest.fixture(scope="module")
def pair(host):
    return make_pair(host)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1e6}


@pytest.mark.parametrize(
    "text", [{}, {"tie_word_embeddings": True}, {"rope_parameters": {**YARN, "mrope_section": [1, 2, 1]}}], ids=str
)
def test_logits_loss_and_gradients_equal_the_reference(host, text) -> None:
    """Three texts, with an image that windows cut at two edges, with two images, and without one."""
    model, reference = make_pair(host, **text)
    tokens, (images, grids) = texts_with_images(), image_batch()
    labels = tokens.masked_fill(tokens == IMAGE, -100)
    theirs = reference(**as_reference_inputs(tokens, images, grids), labels=labels)
    logits = model(tokens, images, image_grids=grids)
    assert_same_training((model, logits), (reference, theirs), labels, HUGGING_FACE)


# -- positions ---------------------------------------------------------------------------------------


def test_positions_equal_the_reference(pair) -> None:
    _, reference = pair
    tokens, (images, grids) = texts_with_images(), image_batch()
    given = as_reference_inputs(tokens, images, grids)
    expected, _ = reference.model.get_rope_index(tokens, given["mm_token_type_ids"], given["image_grid_thw"])
    assert torch.equal(multimodal_positions(tokens == IMAGE, grids), expected)
    assert torch.equal(expected[:, 2], torch.arange(LENGTH).expand(3, -1))  # a text alone


@pytest.mark.parametrize("seconds", [1.0, 0.4, 2.75])
def test_a_video_equals_the_reference(host, seconds: float) -> None:
    """A still, then a video of three views of 1 x 2 cells of two frames each, which begin at one place: positions,
    logits, every gradient, and decoding in pieces that cut the video."""
    reference = make_reference()
    reference.config.vision_config.tokens_per_second = 3
    randomize(reference)
    model = from_reference(host, HUGGING_FACE, reference, {}, data={"seq_length": LENGTH})
    generator = torch.Generator().manual_seed(6)
    tokens = torch.randint(1, VIDEO, (1, LENGTH), generator=generator)
    tokens[0, 1:4] = tokens[0, 6:12] = IMAGE
    cells = torch.randn(9, 6, SIDE, SIDE, generator=generator)
    cells[:3, 3:] = cells[:3, :3]
    times = [0, *(round(view * seconds * 1e6) for view in range(3))]
    grids = torch.tensor([[[1, 3, 0], *([1, 2, time] for time in times[1:])]])
    logits = model(tokens, cells[None], image_grids=grids)
    # [V, T, C, m, p, m, p] -> [V, m, m, C, T, p, p]
    patches = cells.reshape(-1, 2, 3, 2, 3, 2, 3).permute(0, 3, 5, 2, 1, 4, 6).reshape(36, -1)
    theirs = tokens.clone()
    theirs[0, 6:12] = VIDEO
    given = {
        "image_grid_thw": torch.tensor([[1, 2, 6]]),
        "video_grid_thw": torch.tensor([[3, 2, 4]]),
        "second_per_grid_ts": torch.tensor([seconds]),
        "mm_token_type_ids": (theirs == IMAGE).int() + 2 * (theirs == VIDEO).int(),
    }
    expected, _ = reference.model.get_rope_index(theirs, **given)
    assert torch.equal(multimodal_positions(tokens == IMAGE, grids, None, 3), expected)
    output = reference(
        input_ids=theirs,
        attention_mask=torch.ones_like(theirs),
        pixel_values=patches[:12],
        pixel_values_videos=patches[12:],
        **given,
    )
    assert_near(logits, output.logits)
    logits[0, -1].sum().backward()
    output.logits[0, -1].sum().backward()
    assert_same_gradients(model, reference, HUGGING_FACE)
    decoded = cached_logits(model, tokens, (3, 8, 10, LENGTH), [{"images": cells, "image_grids": grids[0]}])
    torch.testing.assert_close(decoded, logits, atol=1e-4, rtol=1e-4)


def test_positions_by_hand_start_again_with_each_segment() -> None:
    places = torch.tensor([[0, 1, 1, 1, 1, 1, 1, 0, 0, 0, 1, 1, 0, 1]]).bool()
    grids = torch.tensor([[[2, 3], [2, 1], [0, 0]]])
    segments = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5]])
    time = [0, 1, 1, 1, 1, 1, 1, 4, 0, 1, 2, 2, 4, 5]
    row = [0, 1, 1, 1, 2, 2, 2, 4, 0, 1, 2, 3, 4, 5]
    column = [0, 1, 2, 3, 1, 2, 3, 4, 0, 1, 2, 2, 4, 5]
    # The last token has no grid left: it is a word.
    assert multimodal_positions(places, grids, segments)[:, 0].tolist() == [time, row, column]


def test_packed_texts_compute_what_they_do_alone(pair) -> None:
    model, _ = pair
    tokens, (images, grids) = texts_with_images(), image_batch()
    alone = model(tokens, images, image_grids=grids)
    packed = torch.cat([tokens[:1], tokens[1:2]], dim=1)
    cells = torch.cat([images[:1, :15], images[1:2, :7]], dim=1)
    shapes = torch.cat([grids[:1, :1], grids[1:2, :2]], dim=1)
    position_ids = torch.arange(LENGTH).repeat(2)[None]
    segments = torch.arange(2).repeat_interleave(LENGTH)[None]
    logits = model(packed, cells, position_ids, segments, shapes)
    torch.testing.assert_close(logits[0], alone[:2].flatten(0, 1), atol=1e-4, rtol=1e-4)


# -- batches -----------------------------------------------------------------------------------------


def test_a_text_alone_is_the_decoder_alone_and_has_gradients_of_zero_in_the_tower(host) -> None:
    model, _ = make_pair(host)
    tokens = texts_with_images()[2:]
    images, grids = image_batch([[]])
    logits = model(tokens, images, image_grids=grids)
    assert torch.equal(model(tokens), model.language_model(tokens))
    assert torch.equal(logits, model(tokens))
    logits.sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert all(gradient is not None for gradient in gradients.values())
    seen = {name.partition(".")[0] for name, gradient in gradients.items() if gradient.any()}
    assert seen == {"language_model"}


def test_images_that_do_not_fit_their_tokens_are_refused(pair) -> None:
    model, _ = pair
    tokens, (images, grids) = texts_with_images(), image_batch()
    other = grids.clone()
    other[0, 0] = torch.tensor([2, 6])
    with pytest.raises(DataError, match=r"\[15, 7, 0\] image tokens \(id 100\), and images of \[12, 7, 0\] merged"):
        model(tokens, images, image_grids=other)
    with pytest.raises(DataError, match=r"22 image tokens.*have 0 features"):
        model(tokens)


def test_frozen_parts_get_no_gradient(host) -> None:
    reference = make_reference()
    model = from_reference(host, HUGGING_FACE, reference, {"freeze": ["vision_model"]}, data={"seq_length": LENGTH})
    images, grids = image_batch()
    model(texts_with_images(), images, image_grids=grids).sum().backward()
    without = {name.partition(".")[0] for name, parameter in model.named_parameters() if parameter.grad is None}
    assert without == {"vision_model"}


# -- files -------------------------------------------------------------------------------------------


def test_files_go_both_ways(pair, tmp_path) -> None:
    """What is written here is read there, and the other way round."""
    model, reference = pair
    (tmp_path / "ours").mkdir()
    save_file(to_reference(model, HUGGING_FACE), tmp_path / "ours" / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "ours" / "config.json").write_text(json.dumps(HUGGING_FACE.write_config(model.config)))
    read = transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(tmp_path / "ours")
    state = read.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in reference.state_dict().items())
    given = as_reference_inputs(texts_with_images(), *image_batch())
    assert_near(read(**given).logits, reference(**given).logits)

    reference.save_pretrained(tmp_path / "theirs")
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    randomize(model, scale=1.0)
    load_reference(model, load_file(tmp_path / "theirs" / "model.safetensors"), HUGGING_FACE)
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


FLAT = {
    "model_type": "qwen2_5_vl", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 60,
    "num_key_value_heads": 2, "intermediate_size": 28, "rope_theta": 1e6, "rms_norm_eps": 1e-6,
    "rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}, "vision_config": VISION,
}  # fmt: skip


def test_both_layouts_of_a_configuration_mean_the_same() -> None:
    outer = {"model_type", "vision_config", "rope_theta", "rope_scaling"}
    text = {key: value for key, value in FLAT.items() if key not in outer}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 1, 1]}
    nested = {"model_type": "qwen2_5_vl", "vision_config": VISION, "text_config": text}
    assert HUGGING_FACE.read_config(nested) == HUGGING_FACE.read_config(FLAT)
    assert HUGGING_FACE.read_config({**FLAT, "text_config": text}) == HUGGING_FACE.read_config(FLAT)
    tied = HUGGING_FACE.read_config({**nested, "text_config": {**text, "tie_word_embeddings": True}})
    assert not tied["language_model"]["untie_embeddings_and_output_weights"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"rope_scalings": {}}, r"fields that are not known: rope_scalings"),
        ({"vision_config": {**VISION, "windows": 3}}, r"fields that are not known: windows=3"),
        ({"vision_config": {**VISION, "hidden_act": "gelu"}}, r"hidden_act='gelu' is not supported; it can be 'silu'"),
        ({"vision_config": {**VISION, "out_hidden_size": 8}}, r"out_hidden_size=8 and hidden_size=32 differ"),
        ({"vision_config": {**VISION, "rope_parameters": {"rope_theta": 5}}}, r"axial with the base 10000"),
        ({"text_config": {"hidden_size": 64}}, r"hidden_size=32 and text_config.hidden_size=64 differ"),
    ],
)
def test_a_hugging_face_configuration_that_cannot_be_read(fields, words) -> None:
    with pytest.raises(ConfigError, match=words):
        HUGGING_FACE.read_config(FLAT | fields)


# -- sizes -------------------------------------------------------------------------------------------

SIZES = {
    "qwen2.5-vl-3b": 3_754_622_976,
    "qwen2.5-vl-7b": 8_292_166_656,
    "qwen2.5-vl-32b": 33_452_718_336,
    "qwen2.5-vl-72b": 73_410_777_344,
}
"""Parameters of the published checkpoints."""


@pytest.mark.slow
def test_presets_have_the_sizes_of_the_published_models(host) -> None:
    assert set(host[MODELS].get("qwen_vl").presets.load()) == set(SIZES)
    for preset, size in SIZES.items():
        config = load_config(preset=preset, overrides=["train.train_iters=1"], host=host).config
        assert canonical_size(host, config) == size, preset
        external = transformers.Qwen2_5_VLConfig.from_dict(HUGGING_FACE.write_config(config.model))
        reference = without_values(transformers.Qwen2_5_VLForConditionalGeneration, external)
        assert reference.num_parameters() == size, preset


def test_each_part_has_the_flops_that_torch_counts(host) -> None:
    section = HUGGING_FACE.read_config(FLAT) | {"image_token_index": 59, "make_vocab_size_divisible_by": 1}
    section["vision_model"]["attention_backend"] = section["language_model"]["attention_backend"] = "eager"
    model = built(host, config_from(host, section, data={"seq_length": LENGTH}))
    tokens = texts_with_images().remainder(58)[:1]
    # Whole windows: torch counts padding too.
    tokens[0, 4:20] = 59
    with FlopCounterMode(display=False) as counter:
        model(tokens, torch.randn(1, 16, 3, SIDE, SIDE), image_grids=torch.tensor([[[4, 4]]]))
    flops = flops_per_sample(model.config, LENGTH, [(4, 4)], convention="full")
    assert flops.forward == pytest.approx(counter.get_total_flops(), rel=0.01)
    counts = {name: sum(ops.values()) for name, ops in counter.get_flop_counts().items()}
    assert flops.vision_model[0].forward == pytest.approx(counts["QwenVLModel.vision_model"], rel=0.01)
    assert flops.vision_projection == pytest.approx(counts["QwenVLModel.vision_projection"], rel=0.01)


# -- bad input ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("vision", "text", "words"),
    [
        ({"num_attention_heads": 5}, {}, r"vision_model.num_attention_heads=5"),
        ({"num_attention_heads": 12}, {}, r"num_attention_heads=2 has to be a multiple of 4"),
        ({"window_size": 5}, {}, r"window_size=5 is smaller than .*; use at least 6"),
        ({"full_attention_layers": [3]}, {}, r"full_attention_layers=\[3\] has 3, and layers go from 0 to 2"),
        ({"patch_size": 3}, {}, r"unknown key model.vision_model.patch_size"),
        ({}, {"mrope_section": [2, 2, 1]}, r"mrope_section=\[2, 2, 1\] has 5 pairs .* a head has 4"),
        ({}, {"family": "llama"}, r"language_model.family"),
        ({}, {"num_query_groups": 3}, r"in model.language_model.*num_query_groups=3"),
        ({}, {"rope_scaling_type": "dynamic", "rope_scaling_factor": 2.0}, r"rope_scaling_type=dynamic .* use yarn"),
    ],
)
def test_impossible_configurations_name_the_legal_values(host, vision, text, words) -> None:
    section = HUGGING_FACE.read_config(FLAT)
    section["vision_model"] |= vision
    section["language_model"] |= text
    with pytest.raises(ConfigError, match=words):
        config_from(host, section, data={"seq_length": LENGTH})


def test_context_parallelism_is_refused_with_the_reason(host) -> None:
    with as_world(2), pytest.raises(ConfigError, match=r"context_parallel_size=2 divides sequences.*any place"):
        config_from(
            host, HUGGING_FACE.read_config(FLAT), data={"seq_length": LENGTH}, parallel={"context_parallel_size": 2}
        )


def test_what_hugging_face_cannot_express_is_refused(host) -> None:
    section = HUGGING_FACE.read_config(FLAT)
    for part, keys, words in (
        ("language_model", {"qk_layernorm": True}, r"qk_layernorm=True cannot be written .* it can be False"),
        ("vision_model", {"norm_epsilon": 1e-5}, "norm_epsilon=1e-05 cannot be written"),
    ):
        config = config_from(host, section | {part: section[part] | keys}, data={"seq_length": LENGTH})
        with pytest.raises(ConfigError, match=words):
            HUGGING_FACE.write_config(config.model)


def test_flops_of_training_are_those_of_the_largest_image(host) -> None:
    """20 cells: 4 by 5."""
    model = HUGGING_FACE.read_config(make_reference().config.to_dict())
    keys = {"dataset_type": "captioned_shapes", "dynamic_resolution": True, "img_h": SIDE, "img_w": SIDE}
    keys |= {"image_token_index": IMAGE, "image_seq_length": 1, "seq_length": 24, "max_pixels": 20 * SIDE**2}
    config = config_from(host, model, data={**keys, "min_pixels": SIDE**2})
    expected = 3 * flops_per_sample(config.model, 24, [(4, 5)]).forward
    assert training_flops(config) == pytest.approx(expected)
