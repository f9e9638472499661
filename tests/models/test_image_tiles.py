"""SmolVLM (Idefics3) and InternVL against `transformers`: logits, loss, gradients, generation, maps, sizes, FLOPs, bad
input."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tests.infer.decoding import cached_logits
from tests.infer.engines import run, tokens_of
from tests.models.decoder_reference import without_values
from tests.models.published_configs import PUBLISHED, SMOLVLM_500M
from tests.models.vision_reference import (
    assert_near,
    assert_round_trip,
    assert_same_gradients,
    built,
    canonical_size,
    config_from,
    from_reference,
    random_images,
    randomize,
)
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from mt_core.config.loading import load_config
from mt_core.errors import ConfigError
from mt_core.parallel.context import ParallelContext
from mt_core.specs import MODELS
from mt_infer.config import InferenceConfig
from mt_infer.engine import InferenceEngine
from mt_infer.sampling.parameters import SamplingParameters
from mt_models.hugging_face import load_reference, to_reference
from mt_models.internvl import hugging_face as internvl
from mt_models.llava.config import flops_per_sample, training_flops
from mt_models.smolvlm import hugging_face as smolvlm
from mt_models.vision import hugging_face as vision

transformers = pytest.importorskip("transformers")

VOCAB, IMAGE, FEATURES = 101, 100, 4
TOWER = {
    "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 40, "image_size": 24,
    "patch_size": 4,
}  # fmt: skip
TEXT = {
    "vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 24, "pad_token_id": 0,
}  # fmt: skip
KEYS = {
    "Idefics3": {"text": "llama", "scale_factor": 3},
    "SmolVLM": {"text": "llama", "scale_factor": 3},
    "InternVL": {"text": "qwen2", "vision": {"attention_bias": True, "image_size": 16}},
}
"""Of each class of the reference."""
MAPS = {"Idefics3": smolvlm.HUGGING_FACE, "SmolVLM": smolvlm.HUGGING_FACE, "InternVL": internvl.HUGGING_FACE}
MAPS_OF = {maps.family: maps for maps in MAPS.values()}


def reference_of(name: str, *, tied: bool = False):
    keys = dict(KEYS[name])
    text = {"model_type": keys.pop("text"), **TEXT, "tie_word_embeddings": tied}
    tower = {**TOWER, **keys.pop("vision", {})}
    config = getattr(transformers, f"{name}Config")(
        vision_config=tower, text_config=text, image_token_id=IMAGE, tie_word_embeddings=tied, **keys
    )
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).float().eval()
    randomize(model)
    return model


def make_pair(host, name: str, *, tied: bool = False):
    reference = reference_of(name, tied=tied)
    return from_reference(host, MAPS[name], reference, {}, data={"seq_length": 16}), reference


def text_with_images() -> Tensor:
    """Two rows: two images, and one."""
    tokens = torch.randint(1, IMAGE, (2, 16), generator=torch.Generator().manual_seed(5))
    tokens[0, 1 : 1 + FEATURES] = IMAGE
    tokens[0, 9 : 9 + FEATURES] = IMAGE
    tokens[1, 5 : 5 + FEATURES] = IMAGE
    return tokens


def images_of_text(name: str) -> tuple[Tensor, Tensor]:
    """[2, 2, 3, H, W], of which the second of the second row is padding, and what the reference takes: Idefics3 finds
    padding by its zeros, InternVL has none."""
    side = KEYS[name].get("vision", TOWER)["image_size"]
    images = random_images(4, 3, side, side).view(2, 2, 3, side, side)
    images[1, 1] = 0
    return images, images.flatten(0, 1)[:3] if name == "InternVL" else images


@pytest.mark.parametrize(("name", "tied"), [("Idefics3", False), ("SmolVLM", True), ("InternVL", False)])
def test_logits_loss_and_gradients_equal_the_reference(host, name, tied) -> None:
    model, reference = make_pair(host, name, tied=tied)
    tokens, (images, given) = text_with_images(), images_of_text(name)
    labels = tokens.masked_fill(tokens == IMAGE, -100)
    theirs = reference(input_ids=tokens, pixel_values=given, labels=labels)
    logits = model(tokens, images)
    assert_near(logits, theirs.logits)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    assert loss.item() == pytest.approx(theirs.loss.item(), rel=1e-5)
    loss.backward()
    theirs.loss.backward()
    clear_key_biases(model, reference)
    assert_same_gradients(model, reference, MAPS[name])
    assert_round_trip(model, reference, MAPS[name])


def clear_key_biases(model, reference) -> None:
    """Softmax does not see what is added to every score of a query: these gradients are rounding in both."""
    for ours in model.vision_model.decoder.layers:
        gradient = ours.self_attention.linear_qkv.bias.grad
        keys = gradient.view(2, 3, -1)[:, 1]
        assert keys.abs().max() < 1e-4 * gradient.abs().max()
        keys.zero_()
    if model.config.language_model.family == "qwen":
        for ours in model.language_model.decoder.layers:
            ours.self_attention.linear_qkv.bias.grad.view(2, 4, -1)[:, 2].zero_()
    for name, parameter in reference.named_parameters():
        if name.endswith("k_proj.bias"):
            parameter.grad.zero_()


@pytest.mark.parametrize("name", ["SmolVLM", "InternVL"])
def test_files_go_both_ways(host, name, tmp_path) -> None:
    """The reference reads what we write, and we read what it writes."""
    model, reference = make_pair(host, name)
    family = MAPS[name]
    save_file(to_reference(model, family), tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(family.write_config(model.config)))
    read = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path)
    state = read.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in reference.state_dict().items())
    tokens, (images, given) = text_with_images(), images_of_text(name)
    assert_near(model(tokens, images), read(input_ids=tokens, pixel_values=given).logits)

    reference.save_pretrained(tmp_path / "theirs")
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    randomize(model, scale=1.0)
    load_reference(model, load_file(tmp_path / "theirs" / "model.safetensors"), family)
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


@pytest.mark.parametrize("name", ["Idefics3", "InternVL"])
def test_decoding_with_a_cache_equals_the_forward_and_generation_the_reference(host, name) -> None:
    model, reference = make_pair(host, name)
    tokens, (images, _) = text_with_images()[:1], images_of_text(name)
    images = images[:1]
    # The first image is cut by the end of a piece.
    decoded = cached_logits(model, tokens, (3, 9, 14, 15, 16), [{"images": images[0]}])
    torch.testing.assert_close(decoded, model(tokens, images), atol=5e-5, rtol=1e-4)
    expected = reference.generate(
        input_ids=tokens, pixel_values=images[0] if name == "InternVL" else images,
        attention_mask=torch.ones_like(tokens), max_new_tokens=6, do_sample=False, eos_token_id=None,
    )[0, 16:].tolist()  # fmt: skip
    options = InferenceConfig(cache_memory_gb=0.01, cache_block_size=4, max_tokens_per_step=5)
    engine = InferenceEngine(model, None, ParallelContext(), options, longest=22)
    greedy = SamplingParameters(temperature=0.0, max_tokens=6)
    (events,) = run(engine, tokens.tolist(), greedy, [{"images": images[0]}])
    assert tokens_of(events) == expected


# -- sizes -------------------------------------------------------------------------------------------

PARAMETERS = {
    "smolvlm": {
        "smolvlm-256m": 256_484_928,
        "smolvlm-500m": 507_482_304,
        "smolvlm-2.2b": 2_246_272_880,
        "smolvlm2-2.2b": 2_246_784_880,
        "idefics3-8b": 8_462_086_384,
    },
    "internvl": {
        "internvl3-1b": 938_193_024,
        "internvl3-2b": 2_088_957_440,
        "internvl3-8b": 7_944_373_760,
        "internvl3-14b": 15_117_256_704,
    },
}
"""Of the published files."""


@pytest.mark.slow
@pytest.mark.parametrize("family", PARAMETERS)
def test_presets_have_the_sizes_of_the_published_models(host, family) -> None:
    spec = host[MODELS].get(family)
    assert set(spec.presets.load()) == set(PARAMETERS[family])
    maps = spec.name_maps["hf"].load()
    for preset, size in PARAMETERS[family].items():
        config = load_config(preset=preset, overrides=["train.train_iters=1"], host=host).config
        assert canonical_size(host, config) == size, preset
        external = maps.write_config(config.model)
        kind = getattr(transformers, external["architectures"][0])
        assert without_values(kind, kind.config_class.from_dict(external)).num_parameters() == size, preset


@pytest.mark.parametrize(("family", "preset"), [("smolvlm2-500m", "smolvlm-500m"), ("internvl3-1b", "internvl3-1b")])
def test_a_published_configuration_is_that_of_its_preset(host, family, preset) -> None:
    name, published = PUBLISHED[family]
    read = config_from(host, MAPS_OF[name].read_config(published), data={"seq_length": 2048}).model
    config = load_config(preset=preset, overrides=["train.train_iters=1"], host=host).config
    parts = {key: getattr(read, key) for key in ("vision_model", "language_model", "kept_token_ids")}
    assert MAPS_OF[name].write_config(read) == MAPS_OF[name].write_config(config.model.model_copy(update=parts))
    assert canonical_size(host, config.model_copy(update={"model": read})) == PARAMETERS[name][preset]


@pytest.mark.parametrize("family", ["smolvlm", "internvl"])
def test_each_part_has_the_flops_that_torch_counts(host, family) -> None:
    section = SMALL | {"family": family, "make_vocab_size_divisible_by": 1}
    model = built(host, config_from(host, section, data={"seq_length": 16}))
    tokens = torch.zeros(2, 16, dtype=torch.long)
    tokens[:, :4] = 60
    with FlopCounterMode(display=False) as counter:
        model(tokens, random_images(2, 3, 16, 16))
    flops = flops_per_sample(model.config, 16, convention="full")
    assert flops.forward * 2 == pytest.approx(counter.get_total_flops(), rel=0.01)
    counts = {name: sum(ops.values()) for name, ops in counter.get_flop_counts().items()}
    stem = type(model).__name__
    assert flops.vision_projection * 2 == pytest.approx(counts[f"{stem}.vision_projection"], rel=0.01)
    assert flops.language_model.forward * 32 == pytest.approx(counts[f"{stem}.language_model"], rel=0.01)


def test_flops_of_training_are_those_of_the_most_views(host) -> None:
    """Six tiles and a thumbnail, or as many views as a sample of several records has; none of a text."""
    section = SMALL | {"family": "internvl", "make_vocab_size_divisible_by": 1}
    of_text = config_from(host, section, data={"seq_length": 16})
    features = of_text.model.image_seq_length
    keys = {"dataset_type": "image_text", "img_h": 16, "img_w": 16, "image_token_index": 60, "seq_length": 16}
    keys |= {"image_seq_length": features, "max_num_tiles": 6, "use_thumbnail": True}
    for further, views in (({}, 7), ({"packing": True, "max_images": 9}, 9)):
        config = config_from(host, section, data={**keys, **further})
        assert training_flops(config) == pytest.approx(flops_per_sample(config.model, 16, images=views).training)
    assert training_flops(of_text) == pytest.approx(flops_per_sample(of_text.model, 16, images=0).training)


# -- bad input ---------------------------------------------------------------------------------------

SMALL = {
    "family": "smolvlm",
    "scale_factor": 2,
    "vision_model": {
        "vision_model_type": "siglip", "add_pooler": False, "num_layers": 2, "hidden_size": 16, "patch_dim": 4,
        "num_attention_heads": 2, "img_h": 16, "img_w": 16, "attention_backend": "eager",
    },
    "language_model": {
        "family": "llama", "num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "attention_backend": "eager",
    },
    "image_token_index": 60,
    "vocab_size": 61,
}  # fmt: skip


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"scale_factor": 3}, r"model.scale_factor=3 does not divide the 4 by 4 patches of an image; it can be 1, 2 o"),
        ({"vision_model": SMALL["vision_model"] | {"vision_model_type": "clip"}}, r"has a class token.*\"siglip\""),
        ({"scale_factors": 3}, r"model.scale_factors.*did you mean .scale_factor"),
    ],
)
def test_impossible_configurations_name_the_legal_values(host, keys, words) -> None:
    with pytest.raises(ConfigError, match=words):
        config_from(host, SMALL | keys, data={"seq_length": 16})


INTERNVL3_1B = PUBLISHED["internvl3-1b"][1]


@pytest.mark.parametrize(
    ("published", "change", "words"),
    [
        (SMOLVLM_500M, {"use_perceiver": True}, "not known: use_perceiver=True"),
        (SMOLVLM_500M, {"text_config": SMOLVLM_500M["text_config"] | {"qk_layer_norms": True}}, "qk_layer_norms=True"),
        (SMOLVLM_500M, {"vision_config": {"model_type": "clip_vision_model"}}, "vision_config.model_type='clip_visio"),
        (INTERNVL3_1B, {"vision_feature_layer": -2}, "vision_feature_layer=-2 is not supported; it can be -1"),
        (INTERNVL3_1B, {"vision_config": INTERNVL3_1B["vision_config"] | {"use_qk_norm": True}}, "use_qk_norm=True"),
        (INTERNVL3_1B, {"vision_config": {"patch_size": [14, 14]}}, "vision_config.attention_bias=False"),
    ],
)
def test_fields_that_change_what_is_computed_are_refused(published, change, words) -> None:
    maps = MAPS_OF["internvl" if published is INTERNVL3_1B else "smolvlm"]
    with pytest.raises(ConfigError, match=words):
        maps.read_config(published | change)


@pytest.mark.parametrize(
    ("family", "tower", "words"),
    [
        ("smolvlm", {"add_pooler": True}, "add_pooler=true cannot be written"),
        ("internvl", {}, "vision_model_type=siglip cannot be written as the tower of a Hugging Face internvl"),
    ],
)
def test_a_tower_without_a_form_there_cannot_be_written(host, family, tower, words) -> None:
    model = SMALL | {"family": family, "vision_model": SMALL["vision_model"] | tower}
    with pytest.raises(ConfigError, match=words):
        MAPS_OF[family].write_config(config_from(host, model).model)


def test_a_tower_of_internvit_is_no_tower_by_itself(host) -> None:
    tower = {key: value for key, value in SMALL["vision_model"].items() if key != "add_pooler"}
    config = config_from(host, {"family": "vision", **tower, "vision_model_type": "internvit"})
    assert built(host, config)(random_images(1, 3, 16, 16)).pooled is None
    with pytest.raises(ConfigError, match="vision_model_type=internvit cannot be written as a tower by itself"):
        vision.HUGGING_FACE.write_config(config.model)
