"""Image towers against `transformers`: states, pooled vectors, classes, every gradient, sizes, FLOPs, bad input."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.models.vision_reference import (
    TOWER,
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
from torch.utils.flop_counter import FlopCounterMode

from mt_core.config.loading import load_config
from mt_core.data.loader import collate
from mt_core.errors import CheckpointError, ConfigError
from mt_core.interfaces import SplitRequest
from mt_core.nn.layout import initialize
from mt_core.parallel.context import ParallelContext
from mt_core.specs import DATASETS, MODELS
from mt_models.heads.model import classification_loss
from mt_models.hugging_face import load_reference
from mt_models.vision.config import flops_per_image
from mt_models.vision.hugging_face import HUGGING_FACE
from mt_models.vision.layers import PatchEmbedding

transformers = pytest.importorskip("transformers")

EXAMPLES = Path(__file__).parents[2] / "examples"
CLASSIFICATION = {"train": {"loss": "classification"}}


def clip(**keys):
    return transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**{**TOWER, **keys}))


def siglip(**keys):
    return transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**{**TOWER, **keys}))


REFERENCES = {
    "CLIP": lambda: clip(),
    "CLIP with gelu": lambda: clip(hidden_act="gelu", layer_norm_eps=1e-3, image_size=20),
    "SigLIP": lambda: siglip(),
    "SigLIP without a pooler": lambda: siglip(vision_use_head=False, hidden_act="gelu"),
}


def make_pair(host, name: str, **keys):
    reference = REFERENCES[name]().float().eval()
    randomize(reference)
    return from_reference(host, HUGGING_FACE, reference, keys), reference


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("name", REFERENCES)
def test_states_pooled_vectors_and_gradients_equal_the_reference(host, name, backend) -> None:
    model, reference = make_pair(host, name, attention_backend=backend)
    images = random_images(2, 2, model.config.img_h, model.config.img_w)
    theirs = reference(images, output_hidden_states=True)
    ours = model(images)
    for state, expected in zip(model.vision_model.states(images), theirs.hidden_states, strict=True):
        assert_near(state, expected)
    assert_near(ours.hidden_states, theirs.last_hidden_state)
    weights = torch.randn(ours.hidden_states.shape, generator=torch.Generator().manual_seed(3))
    sums = [(ours.hidden_states * weights).sum(), (theirs.last_hidden_state * weights).sum()]
    if theirs.pooler_output is None:
        assert ours.pooled is None
    else:
        assert_near(ours.pooled, theirs.pooler_output)
        sums = [sums[0] + (ours.pooled * 3).sin().sum(), sums[1] + (theirs.pooler_output * 3).sin().sum()]
    for total in sums:
        total.backward()
    if name.startswith("SigLIP") and ours.pooled is not None:
        # Softmax does not see what is added to every score alike: the gradient of the probe's key bias is rounding.
        _clear_key_bias(model.vision_model.head.attention.linear_qkv.bias.grad, heads=4)
        reference.head.attention.in_proj_bias.grad[32:64] = 0
    for layer, other in zip(model.vision_model.decoder.layers, reference.encoder.layers, strict=True):
        _clear_key_bias(layer.self_attention.linear_qkv.bias.grad, heads=4)
        other.self_attn.k_proj.bias.grad.zero_()
    assert_same_gradients(model, reference, HUGGING_FACE)


def _clear_key_bias(gradient: torch.Tensor, heads: int) -> None:
    keys = gradient.view(heads, 3, -1)[:, 1]
    assert keys.abs().max() < 1e-4 * gradient.abs().max()
    keys.zero_()


@pytest.mark.parametrize("name", REFERENCES)
def test_maps_go_both_ways(host, name) -> None:
    assert_round_trip(*make_pair(host, name), HUGGING_FACE)


def test_published_names_and_those_of_transformers_5_are_the_same_tensors(host) -> None:
    model, reference = make_pair(host, "CLIP")
    published = {f"vision_model.{name}": tensor for name, tensor in reference.state_dict().items()}
    # A buffer that older versions stored.
    published["vision_model.embeddings.position_ids"] = torch.arange(17)[None]
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    randomize(model, scale=1.0)
    load_reference(model, published, HUGGING_FACE)
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


@pytest.mark.parametrize(
    ("kind", "config", "tower"),
    [
        ("CLIPForImageClassification", "CLIPConfig", "clip_vision_model"),
        ("SiglipForImageClassification", "SiglipConfig", "siglip_vision_model"),
    ],
)
def test_classes_losses_and_gradients_equal_the_reference(host, kind, config, tower) -> None:
    shape = getattr(transformers, config)(vision_config={**TOWER, "model_type": tower}, num_labels=5)
    shape._attn_implementation = "eager"
    reference = getattr(transformers, kind)(shape).float().eval()
    reference.config.architectures = [kind]
    randomize(reference)
    model = from_reference(host, HUGGING_FACE, reference, {}, **CLASSIFICATION)
    images = random_images(4, 2, 22, 22)
    batch = {"labels": torch.tensor([4, 0, -1, 2]), "loss_mask": torch.tensor([1.0, 1.0, 0.0, 1.0])}
    ours, theirs = model(images), reference(images).logits
    assert_near(ours, theirs)
    loss = (classification_loss(ours, batch) * batch["loss_mask"]).sum() / batch["loss_mask"].sum()
    expected = F.cross_entropy(theirs, batch["labels"], ignore_index=-1)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    loss.backward()
    expected.backward()
    for layer, other in zip(model.vision_model.decoder.layers, reference.vision_model.encoder.layers, strict=True):
        _clear_key_bias(layer.self_attention.linear_qkv.bias.grad, heads=4)
        other.self_attn.k_proj.bias.grad.zero_()
    assert_same_gradients(model, reference, HUGGING_FACE)
    assert_round_trip(model, reference, HUGGING_FACE)


def test_patches_are_those_of_the_convolution(host) -> None:
    keys = {"family": "vision", "num_layers": 1, "hidden_size": 8, "num_attention_heads": 2}
    config = config_from(host, {**keys, "img_h": 13, "img_w": 9, "patch_dim": 4}).model
    embedding = PatchEmbedding(config, ParallelContext(), bias=True)
    randomize(embedding)
    images = random_images(2, 3, 13, 9)
    expected = F.conv2d(images, embedding.weight, embedding.bias, stride=4).flatten(2).transpose(1, 2)
    assert_near(embedding(images), expected)
    assert config.grid == (3, 2)


def test_recomputing_layers_changes_no_gradient(host) -> None:
    keys = {
        "family": "vision", "num_layers": 3, "hidden_size": 16, "num_attention_heads": 2, "img_h": 8, "img_w": 8,
        "patch_dim": 4,
    }  # fmt: skip
    gradients = []
    for granularity in ("none", "full"):
        config = config_from(host, keys, recompute={"recompute_granularity": granularity})
        model = built(host, config).train()
        randomize(model)
        model(random_images(2, 3, 8, 8)).pooled.sin().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


def test_the_recipe_trains_on_what_its_data_set_gives(host) -> None:
    """Its samples fit the model; untrained, it guesses among six shapes."""
    config = load_config(EXAMPLES / "vision.toml", host=host).config
    model = built(host, config).train()
    initialize(model, 1, ParallelContext())
    data = host[DATASETS].get("shapes").build.load()(config.data, None, SplitRequest("train", 8, 1, 1))
    batch = {name: torch.from_numpy(array) for name, array in collate(data[i] for i in range(8)).items()}
    loss = classification_loss(model(batch["images"]), batch).mean()
    assert loss.item() == pytest.approx(math.log(6), abs=0.2)
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


# -- sizes -------------------------------------------------------------------------------------------

LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
SO400M = {"hidden_size": 1152, "num_hidden_layers": 27, "num_attention_heads": 16, "intermediate_size": 4304}
PUBLISHED = {
    "clip-vit-base-patch32": ("CLIP", {"patch_size": 32}),
    "clip-vit-base-patch16": ("CLIP", {"patch_size": 16}),
    "clip-vit-large-patch14": ("CLIP", {**LARGE, "patch_size": 14}),
    "clip-vit-large-patch14-336": ("CLIP", {**LARGE, "patch_size": 14, "image_size": 336}),
    "siglip-base-patch16-224": ("Siglip", {}),
    "siglip-base-patch16-256": ("Siglip", {"image_size": 256}),
    "siglip-base-patch16-384": ("Siglip", {"image_size": 384}),
    "siglip-base-patch16-512": ("Siglip", {"image_size": 512}),
    "siglip-so400m-patch14-224": ("Siglip", {**SO400M, "patch_size": 14}),
    "siglip-so400m-patch14-384": ("Siglip", {**SO400M, "patch_size": 14, "image_size": 384}),
}


@pytest.mark.slow
def test_presets_have_the_sizes_of_the_published_models(host) -> None:
    assert set(host[MODELS].get("vision").presets.load()) == set(PUBLISHED)
    for preset, (kind, shape) in PUBLISHED.items():
        external = getattr(transformers, f"{kind}VisionConfig")(**shape)
        with torch.device("meta"):
            reference = getattr(transformers, f"{kind}VisionModel")(external)
        config = load_config(preset=preset, overrides=["train.train_iters=1"], host=host).config
        assert canonical_size(host, config) == reference.num_parameters(), preset
        read = HUGGING_FACE.read_config(external.to_dict())
        written = config.model.model_dump()
        written["ffn_hidden_size"] = config.model.ffn_size
        initial = {"use_scaled_init_method"}
        assert {key: written[key] for key in read if key not in initial} == {
            key: value for key, value in read.items() if key not in initial
        }, preset


def test_the_large_clip_tower_has_304_million_parameters(host) -> None:
    config = load_config(preset="clip-vit-large-patch14", overrides=["train.train_iters=1"], host=host).config
    assert canonical_size(host, config) == 303_179_776  # CLIPVisionModel of openai/clip-vit-large-patch14


@pytest.mark.parametrize("keys", [{}, {"num_classes": 7}, {"add_pooler": False}])
@pytest.mark.parametrize("kind", ["clip", "siglip"])
def test_each_part_has_the_flops_that_torch_counts(host, kind, keys) -> None:
    shape = {"num_layers": 2, "hidden_size": 48, "num_attention_heads": 4, "img_h": 24, "img_w": 16, "patch_dim": 4}
    sections = CLASSIFICATION if "num_classes" in keys else {}
    section = {"family": "vision", "vision_model_type": kind, "attention_backend": "eager", **shape, **keys}
    model = built(host, config_from(host, section, **sections))
    # One image: a batch makes the pooler's query once for all.
    with FlopCounterMode(display=False) as counter:
        model(random_images(1, 3, 24, 16))
    flops = flops_per_image(model.config)
    assert flops.forward == pytest.approx(counter.get_total_flops(), rel=0.01)
    assert flops.training == 3 * flops.forward
    counts = {name: sum(ops.values()) for name, ops in counter.get_flop_counts().items()}
    for part, end in {
        "patches": ".conv1",
        "attention_projections": (".self_attention.linear_qkv", ".self_attention.linear_proj"),
        "feed_forward": (".layers.0.mlp", ".layers.1.mlp"),
        "pooler": "vision_model.head",
        "output": "classification_head",
    }.items():
        counted = sum(count for name, count in counts.items() if name.endswith(end))
        assert getattr(flops, part) == pytest.approx(counted, rel=0.01), part


# -- bad input ---------------------------------------------------------------------------------------

SMALL = {"family": "vision", "num_layers": 1, "hidden_size": 32, "num_attention_heads": 4}


@pytest.mark.parametrize(
    ("keys", "sections", "words"),
    [
        ({"num_attention_heads": 5}, {}, r"hidden_size=32 is not divisible.*heads can be 1, 2, 4, 8, 16 or 32"),
        ({"patch_dim": 300}, {}, r"model.patch_dim=300 is larger than an image.*use at most 224"),
        ({"activation": "swiglu"}, {}, r"model.activation.*'swiglu'.*quick_gelu"),
        (
            {"num_classes": 3},
            {"train": {"loss": "cross_entropy"}},
            r'train.loss=cross_entropy is for predicted words.*train.loss="classification"',
        ),
        ({}, {"data": {"dataset_type": "shapes"}}, r"model.num_classes is missing.*has 6 classes.*set it to 6"),
        ({"vision_model_type": "radio"}, {}, r"vision_model_type.*'clip', 'siglip' or 'internvit'"),
    ],
)
def test_impossible_configurations_name_the_legal_values(host, keys, sections, words) -> None:
    with pytest.raises(ConfigError, match=words):
        config_from(host, SMALL | keys, **sections)


def test_a_sequence_that_ranks_divide_is_refused_by_name(host) -> None:
    config = config_from(host, SMALL)
    sharded = config.model_copy(update={"parallel": config.parallel.model_copy(update={"sequence_parallel": True})})
    with pytest.raises(ConfigError, match=r"parallel.sequence_parallel=true.*model.family=vision.*set it to false"):
        host.check_config(sharded)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"hidden_act": "mish"}, r"hidden_act='mish' is not supported; it can be quick_gelu, gelu"),
        ({"num_register_tokens": 4}, r"fields that are not known: num_register_tokens=4"),
        ({"patch_size": [16, 14]}, r"patch_size=\[16, 14\] is not supported; patches are square"),
        ({"image_size": "large"}, r"image_size='large' is not supported; it can be a number of pixels"),
        ({"model_type": "dinov2"}, r"model_type='dinov2' is not supported; it can be clip_vision_model, siglip"),
        (
            {"model_type": "clip", "architectures": ["CLIPTextModel"]},
            r"architectures='CLIPTextModel'.*CLIPForImageClass",
        ),
    ],
)
def test_a_hugging_face_configuration_that_cannot_be_read(fields, words) -> None:
    with pytest.raises(ConfigError, match=words):
        HUGGING_FACE.read_config({"model_type": "clip_vision_model"} | fields)


def test_what_hugging_face_cannot_express_is_refused(host) -> None:
    for keys, words in (
        ({"img_w": 112}, "model.img_h=224 and model.img_w=112 cannot be written"),
        ({"add_pooler": False}, "model.add_pooler=false cannot be written"),
    ):
        with pytest.raises(ConfigError, match=words):
            HUGGING_FACE.write_config(config_from(host, SMALL | keys).model)


def test_tensors_that_do_not_fit_are_named(host) -> None:
    model, reference = make_pair(host, "SigLIP")
    tensors = dict(reference.state_dict())
    del tensors["head.probe"]
    tensors["embeddings.class_embedding"] = torch.zeros(32)
    with pytest.raises(CheckpointError, match=r"head.probe is missing.*class_embedding is in the checkpoint but un"):
        load_reference(model, tensors, HUGGING_FACE)


def test_a_preset_without_images_says_which_data_sets_have_them(mt, tmp_path) -> None:
    small = ("num_layers=1", "hidden_size=16", "num_attention_heads=2", "img_h=32", "img_w=32")
    keys = [part for key in small for part in ("--set", f"model.{key}")]
    done = mt("train", "--preset", "clip-vit-base-patch32", *keys, "--set", "train.train_iters=1")
    assert done.code == 2
    assert "gives no images, which model.family=vision takes; " in done.err
    assert "image_folder" in done.err
    assert "set data.dataset_type to one of them" in done.err
