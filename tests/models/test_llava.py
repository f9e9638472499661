"""LLaVA against `transformers`: logits, loss, every gradient, decoding, maps, sizes, FLOPs, bad input."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.infer.decoding import cached_logits
from tests.infer.engines import logprobs_of, run, tokens_of
from tests.models.decoder_reference import without_values
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
from mt_core.data.loader import collate
from mt_core.errors import ConfigError, DataError, PluginError
from mt_core.interfaces import SplitRequest
from mt_core.nn.layout import initialize, parameter_layouts
from mt_core.nn.loss import cross_entropy
from mt_core.parallel.context import ParallelContext
from mt_core.specs import DATASETS, MODELS, TOKENIZERS
from mt_infer.config import InferenceConfig
from mt_infer.engine import InferenceEngine
from mt_infer.sampling.parameters import SamplingParameters
from mt_models.hugging_face import load_reference
from mt_models.llava.config import flops_per_sample
from mt_models.llava.hugging_face import HUGGING_FACE

transformers = pytest.importorskip("transformers")

EXAMPLES = Path(__file__).parents[2] / "examples"
VOCAB, IMAGE = 101, 100
TOWER = {
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 40,
    "image_size": 11,
    "patch_size": 4,
}
FEATURES = 4
"""Patches of an image."""
TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
GPT2 = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "tie_word_embeddings": False}
CASES = {
    "CLIP and Llama": ("CLIP", "Llama", {}, {}),
    "CLIP and Mistral, two layers": ("CLIP", "Mistral", {"sliding_window": 5}, {"vision_feature_layer": [-2, 1]}),
    "CLIP and Qwen 2, all positions": ("CLIP", "Qwen2", {}, {"vision_feature_select_strategy": "full"}),
    "SigLIP and Qwen 3": (
        "Siglip",
        "Qwen3",
        {"head_dim": 8},
        {"vision_feature_layer": -1, "vision_feature_select_strategy": "full", "multimodal_projector_bias": False},
    ),
    "CLIP and Llama, tied": ("CLIP", "Llama", {"tie_word_embeddings": True}, {"projector_hidden_act": "gelu_new"}),
    "CLIP and GPT-2": ("CLIP", "GPT2", {}, {}),
}


def llava(tower: str, text: str, text_keys: dict, keys: dict):
    vision_config = getattr(transformers, f"{tower}VisionConfig")(**TOWER)
    text_config = getattr(transformers, f"{text}Config")(**{**(GPT2 if text == "GPT2" else TEXT), **text_keys})
    config = transformers.LlavaConfig(
        vision_config=vision_config, text_config=text_config, image_token_index=IMAGE, **keys
    )
    config._attn_implementation = "eager"
    return transformers.LlavaForConditionalGeneration(config).float().eval()


def make_pair(host, name: str, **keys):
    reference = llava(*CASES[name])
    randomize(reference)
    keys.setdefault("vision_feature_select_strategy", CASES[name][3].get("vision_feature_select_strategy", "default"))
    return from_reference(host, HUGGING_FACE, reference, keys, data={"seq_length": 16}), reference


def text_with_images(features: int) -> Tensor:
    """Three rows of text: an image in the middle, two images, none."""
    tokens = torch.randint(1, IMAGE, (3, 16), generator=torch.Generator().manual_seed(5))
    tokens[0, 3 : 3 + features] = IMAGE
    tokens[1, 1 : 1 + features] = IMAGE
    tokens[1, 9 : 9 + features] = IMAGE
    return tokens


def images_of_text() -> Tensor:
    return random_images(3, 3, 11, 11)


@pytest.mark.parametrize("name", CASES)
def test_logits_loss_and_gradients_equal_the_reference(host, name) -> None:
    model, reference = make_pair(host, name)
    tokens, images = text_with_images(model.config.image_seq_length), images_of_text()
    labels = tokens.masked_fill(tokens == IMAGE, -100)
    theirs = reference(tokens, pixel_values=images, labels=labels)
    logits = model(tokens, images)
    assert_near(logits, theirs.logits)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    assert loss.item() == pytest.approx(theirs.loss.item(), rel=1e-5)
    loss.backward()
    theirs.loss.backward()
    clear_key_biases(model, reference)
    assert_same_gradients(model, reference, HUGGING_FACE, untrained=unread(model))


@pytest.mark.parametrize("norm", ["none", "LayerNorm", "RMSNorm"])
def test_squares_of_patches_through_a_norm_and_a_wide_projection(host, norm) -> None:
    """As models of Megatron's example have them: side by side in reading order, two by two."""
    keys = {"scale_factor": 2, "projection_normalization": norm, "projection_ffn_hidden_size": 40}
    keys |= {"projection_activation": "squared_relu", "projection_norm_epsilon": 0.1, "projection_bias": False}
    pair, _ = make_pair(host, "CLIP and Llama")
    section = {**pair.config.model_dump(exclude_none=True), **keys}
    tower = {**section["vision_model"], "img_h": 16, "img_w": 24, "patch_dim": 4}
    model = built(host, config_from(host, {**section, "vision_model": tower}, data={"seq_length": 16}))
    numbers = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.vision_projection.parameters():
            parameter.normal_(std=0.3, generator=numbers)
    projection, grid = model.vision_projection, torch.randn(2, 4, 6, 24, generator=numbers)
    squares = [grid[:, 2 * i : 2 * i + 2, 2 * j : 2 * j + 2].flatten(1) for i in range(2) for j in range(3)]
    x = torch.stack(squares, dim=1)
    if norm != "none":
        x = x - x.mean(-1, keepdim=True) if norm == "LayerNorm" else x
        x = x / (x.square().mean(-1, keepdim=True) + 0.1).sqrt() * projection.input_layernorm.weight
        x = x + projection.input_layernorm.bias if norm == "LayerNorm" else x
    expected = (x @ projection.encoder.linear_fc1.weight.T).relu().square() @ projection.encoder.linear_fc2.weight.T
    torch.testing.assert_close(projection(grid.flatten(1, 2)), expected, rtol=1e-4, atol=1e-4)
    assert model.config.image_seq_length == 6
    with pytest.raises(ConfigError, match="projection_activation=squared_relu cannot be written"):
        HUGGING_FACE.write_config(model.config)
    config = model.config.model_copy(update={"projection_activation": "gelu"})
    with pytest.raises(ConfigError, match="model.projection_ffn_hidden_size=40 cannot be written as a Hugging Face"):
        HUGGING_FACE.write_config(config)


def unread(model) -> tuple[str, ...]:
    """The tower's parts that no feature passes through."""
    layers = range(max(model.config.feature_states), 3)
    return ("vision_model.ln_post", "vision_model.head", *(f"vision_model.decoder.layers.{i}." for i in layers))


def clear_key_biases(model, reference) -> None:
    """Softmax does not see what is added to every score of a query: these gradients are rounding in both."""
    for layer in model.vision_model.decoder.layers:
        bias = layer.self_attention.linear_qkv.bias
        if bias.grad is not None:
            keys = bias.grad.view(2, 3, -1)[:, 1]
            assert keys.abs().max() < 1e-4 * bias.grad.abs().max()
            keys.zero_()
    for layer in reference.model.vision_tower.encoder.layers:
        if layer.self_attn.k_proj.bias.grad is not None:
            layer.self_attn.k_proj.bias.grad.zero_()
    if model.config.language_model.family == "gpt":
        for layer, theirs in zip(model.language_model.decoder.layers, reference.model.language_model.h, strict=True):
            layer.self_attention.linear_qkv.bias.grad.view(4, 3, -1)[:, 1].zero_()
            theirs.attn.c_attn.bias.grad[32:64].zero_()


@pytest.mark.parametrize("name", CASES)
def test_maps_go_both_ways(host, name) -> None:
    assert_round_trip(*make_pair(host, name), HUGGING_FACE)


def test_a_checkpoint_that_we_write_is_one_that_the_reference_reads(host, tmp_path) -> None:
    """Names as published, from which transformers makes its own."""
    import json

    from safetensors.torch import save_file

    from mt_models.hugging_face import to_reference

    model, reference = make_pair(host, "CLIP and Llama")
    save_file(to_reference(model, HUGGING_FACE), tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(HUGGING_FACE.write_config(model.config)))
    read = transformers.LlavaForConditionalGeneration.from_pretrained(tmp_path)
    state = read.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in reference.state_dict().items())


def test_the_file_that_the_reference_writes_is_read(host, tmp_path) -> None:
    from safetensors.torch import load_file

    model, reference = make_pair(host, "CLIP and Llama")
    reference.save_pretrained(tmp_path)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    randomize(model, scale=1.0)
    load_reference(model, load_file(tmp_path / "model.safetensors"), HUGGING_FACE)
    assert all(torch.equal(parameter, before[name]) for name, parameter in model.named_parameters())


def test_text_alone_is_the_decoder_alone(host) -> None:
    model, _ = make_pair(host, "CLIP and Llama")
    tokens = text_with_images(FEATURES)[2:]
    assert torch.equal(model(tokens), model.language_model(tokens))


@pytest.mark.parametrize("name", ["CLIP and Llama", "CLIP and Mistral, two layers", "CLIP and GPT-2"])
def test_decoding_with_a_cache_equals_the_forward(host, name) -> None:
    model, _ = make_pair(host, name)
    tokens, images = text_with_images(FEATURES)[1:2], images_of_text()[1:]
    whole = model(tokens, images)
    # The first image is cut by the end of a piece.
    decoded = cached_logits(model, tokens, (3, 9, 14, 15, 16), [{"images": images}])
    torch.testing.assert_close(decoded, whole, atol=5e-5, rtol=1e-4)


def test_a_prompt_with_an_image_is_continued_as_the_reference_does(host) -> None:
    model, reference = make_pair(host, "CLIP and Llama")
    prompt, images = text_with_images(FEATURES)[:1], images_of_text()[:1]
    expected = reference.generate(
        prompt, pixel_values=images, attention_mask=torch.ones_like(prompt), max_new_tokens=6, do_sample=False,
        eos_token_id=None,
    )[0, 16:].tolist()  # fmt: skip
    options = InferenceConfig(cache_memory_gb=0.01, cache_block_size=4, max_tokens_per_step=5)
    engine = InferenceEngine(model, None, ParallelContext(), options, longest=22)
    greedy = SamplingParameters(temperature=0.0, max_tokens=6)
    (events,) = run(engine, prompt.tolist(), greedy, [{"images": images}])
    assert tokens_of(events) == expected


def test_an_image_token_that_was_generated_is_a_word(host) -> None:
    """As in the reference, which splices features into prompts only."""
    model, reference = make_pair(host, "CLIP and Llama")
    prompt, images = text_with_images(FEATURES)[:1], images_of_text()[:1]
    options = InferenceConfig(cache_memory_gb=0.01, cache_block_size=4)
    engine = InferenceEngine(model, None, ParallelContext(), options, longest=22)
    forced = SamplingParameters(temperature=0.0, max_tokens=4, logit_bias={IMAGE: 1000.0}, logprobs=0)
    (events,) = run(engine, prompt.tolist(), forced, [{"images": images}])
    assert tokens_of(events) == [IMAGE] * 4
    words = torch.full((1, 4), IMAGE)
    with torch.no_grad():
        embedded = reference.get_input_embeddings()(words)
        cache = reference(prompt, pixel_values=images, use_cache=True)
        logits = reference.model.language_model(inputs_embeds=embedded, past_key_values=cache.past_key_values)
        after = reference.lm_head(logits.last_hidden_state)[0]
    expected = torch.cat([cache.logits[0, -1:], after[:-1]]).log_softmax(-1)[:, IMAGE]
    assert logprobs_of(events) == pytest.approx(expected.tolist(), abs=1e-4)


def test_several_images_a_sample_come_in_order(host) -> None:
    model, _ = make_pair(host, "CLIP and Llama")
    tokens = text_with_images(FEATURES)[1:2].repeat(2, 1)
    images = random_images(4, 3, 11, 11)
    assert torch.equal(model(tokens, images.view(2, 2, 3, 11, 11)), model(tokens, images))


def test_an_image_token_outside_the_vocabulary_serves_as_well(host) -> None:
    inside, reference = make_pair(host, "CLIP and Llama")
    outside, _ = make_pair(host, "CLIP and Llama", image_token_index=5000)
    load_reference(outside, reference.state_dict(), HUGGING_FACE)
    tokens, images = text_with_images(FEATURES), images_of_text()
    assert torch.equal(outside(tokens.masked_fill(tokens == IMAGE, 5000), images), inside(tokens, images))


def test_images_that_do_not_fit_their_tokens_are_refused(host) -> None:
    model, _ = make_pair(host, "CLIP and Llama")
    tokens, images = text_with_images(FEATURES), images_of_text()
    with pytest.raises(DataError, match=r"12 image tokens \(id 100\), and its images have 8 features; write"):
        model(tokens, images[:2])
    with pytest.raises(DataError, match=r"12 image tokens.*have 0 features"):
        model(tokens)


def test_images_beyond_the_tokens_of_a_row_are_padding(host) -> None:
    model, _ = make_pair(host, "CLIP and Llama")
    tokens, images = text_with_images(FEATURES), images_of_text()
    padded = torch.full((3, 2, 3, 11, 11), torch.nan)
    padded[0, 0], padded[1] = images[0], images[1:]
    assert torch.equal(model(tokens, padded), model(tokens, images))
    with pytest.raises(DataError, match=r"rows .* have \[4, 8, 0\] image tokens .* at most 1 images of 4 features"):
        model(tokens, padded[:, :1])
    with pytest.raises(DataError, match=r"have \[4, 7, 0\] image tokens"):
        model(tokens.index_fill(1, torch.tensor([12]), 5), padded)


def test_a_batch_without_images_has_gradients_of_zero_in_the_tower(host) -> None:
    """Every rank has a gradient of each parameter, whatever its samples are."""
    model, _ = make_pair(host, "CLIP and Llama")
    tokens = text_with_images(FEATURES)[2:]
    logits = model(tokens, torch.zeros(1, 2, 3, 11, 11))
    assert torch.equal(logits, model(tokens))
    logits.sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert all(gradient is not None for gradient in gradients.values())
    seen = {name.partition(".")[0] for name, gradient in gradients.items() if gradient.any()}
    assert seen == {"language_model"}


def test_the_recipe_trains_on_what_its_data_set_gives(host) -> None:
    """Its samples fit the model; untrained, it guesses among the ids of bytes."""
    config = load_config(EXAMPLES / "llava.toml", host=host).config
    tokenizer = host[TOKENIZERS].get("ByteLevelTokenizer").build.load()(config.tokenizer)
    config = config.model_copy(update={"model": config.model.model_copy(update={"vocab_size": tokenizer.vocab_size})})
    model = built(host, config).train()
    initialize(model, 1, ParallelContext())
    data = host[DATASETS].get("captioned_shapes").build.load()(config.data, tokenizer, SplitRequest("train", 4, 56, 1))
    batch = {name: torch.from_numpy(array) for name, array in collate(data[i] for i in range(4)).items()}
    losses = cross_entropy(model(**{name: batch[name] for name in model.inputs if name in batch}), batch)
    loss = (losses * batch["loss_mask"]).sum() / batch["loss_mask"].sum()
    assert loss.item() == pytest.approx(math.log(261), abs=0.3)
    loss.backward()
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, parameter in model.named_parameters() if parameter.grad is not None}


# -- freezing ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "parts", [["vision_model"], ["vision_model", "language_model"], ["language_model"], ["vision_projection"]]
)
def test_frozen_parts_get_no_gradient_and_the_others_the_same(host, parts) -> None:
    tokens, images = text_with_images(FEATURES), images_of_text()
    gradients = []
    for freeze in ([], parts):
        model, _ = make_pair(host, "CLIP and Llama", freeze=freeze)
        model(tokens, images).sin().sum().backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
        # What checkpoints go by.
        declared = {name for name, layout in parameter_layouts(model).items() if layout.trained}
        assert declared == {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    for name, gradient in gradients[1].items():
        if name.startswith(tuple(parts)):
            assert gradient is None, name
        elif gradients[0][name] is not None:
            assert torch.equal(gradient, gradients[0][name]), name


# -- sizes -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_presets_have_the_sizes_of_the_published_models(host) -> None:
    tower = {
        "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096,
        "image_size": 336, "patch_size": 14, "projection_dim": 768, "vocab_size": 32000,
    }  # fmt: skip
    texts = {
        "llava-1.5-7b": {},
        "llava-1.5-13b": {
            "hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 40, "intermediate_size": 13824,
            "num_key_value_heads": 40,
        },
    }  # fmt: skip
    assert set(host[MODELS].get("llava").presets.load()) == set(texts)
    common = {"vocab_size": 32064, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "pad_token_id": 32001}
    for preset, shape in texts.items():
        # As the files of the published models are: what is Llama's default is left out.
        external = {
            "model_type": "llava", "ignore_index": -100, "image_token_index": 32000, "vocab_size": 32064,
            "vision_config": {"model_type": "clip_vision_model", **tower},
            "text_config": {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **common, **shape},
        }  # fmt: skip
        published = transformers.LlavaConfig.from_dict(external)
        reference = without_values(transformers.LlavaForConditionalGeneration, published)
        config = load_config(preset=preset, overrides=["train.train_iters=1"], host=host).config
        assert canonical_size(host, config) == reference.num_parameters(), preset
        read = config_from(host, HUGGING_FACE.read_config(external), data={"seq_length": 2048}).model
        assert canonical_size(host, config.model_copy(update={"model": read})) == reference.num_parameters(), preset
        assert config.model.image_seq_length == read.image_seq_length == 576


@pytest.mark.parametrize("keys", [{}, {"vision_projection_type": "affine"}, {"vision_feature_layers": [1, 3]}])
def test_each_part_has_the_flops_that_torch_counts(host, keys) -> None:
    tower = {"num_layers": 3, "hidden_size": 24, "num_attention_heads": 2, "img_h": 8, "img_w": 8, "patch_dim": 4}
    decoder = {"family": "llama", "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
    tower["attention_backend"] = decoder["attention_backend"] = "eager"
    section = {
        "family": "llava", "vision_model": tower, "language_model": decoder, "image_token_index": 60, "vocab_size": 128
    }  # fmt: skip
    model = built(host, config_from(host, section | keys, data={"seq_length": 16}))
    tokens = torch.zeros(2, 16, dtype=torch.long)
    tokens[:, :4] = 60
    with FlopCounterMode(display=False) as counter:
        model(tokens, random_images(2, 3, 8, 8))
    flops = flops_per_sample(model.config, 16, convention="full")
    assert flops.forward * 2 == pytest.approx(counter.get_total_flops(), rel=0.01)
    counts = {name: sum(ops.values()) for name, ops in counter.get_flop_counts().items()}
    # The counter hears of modules that are called: the tower's layers and patches, not the tower.
    parts = (f"LlavaModel.vision_model.{part}" for part in ("conv1", *(f"decoder.layers.{i}" for i in range(3))))
    assert flops.vision_model.forward * 2 == pytest.approx(sum(counts.get(part, 0) for part in parts), rel=0.01)
    assert flops.vision_projection * 2 == pytest.approx(counts["LlavaModel.vision_projection"], rel=0.01)
    assert flops.language_model.forward * 32 == pytest.approx(counts["LlavaModel.language_model"], rel=0.01)


# -- bad input ---------------------------------------------------------------------------------------

SMALL = {
    "family": "llava",
    "vision_model": {
        "num_layers": 2,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "img_h": 8,
        "img_w": 8,
        "patch_dim": 4,
    },
    "language_model": {"family": "llama", "num_layers": 1, "hidden_size": 32, "num_attention_heads": 4},
    "image_token_index": 60,
    "vocab_size": 61,
}


def changed(part: str, **keys) -> dict:
    return {part: {**SMALL[part], **keys}}


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (
            changed("language_model", num_layer=3),
            r"model.language_model.num_layer .*did you mean .num_layers",
        ),
        (changed("vision_model", patch_size=3), r"unknown key model.vision_model.patch_size"),
        ({"language_model": {"num_layers": 1}}, r"model.language_model.family is missing"),
        (changed("language_model", num_attention_heads=5), r"in model.language_model.*num_attention_heads=5"),
        (changed("vision_model", num_attention_heads=5), r"model.vision_model.num_attention_heads=5; the number of he"),
        (changed("language_model", vocab_size=7), r"model.language_model.vocab_size=7 and model.vocab_size=61 differ"),
        (changed("vision_model", vision_model_type="siglip"), r"leaves the class token out, and.*siglip has none"),
        (
            {"vision_feature_layers": [-4]},
            r"vision_feature_layers=\[-4\]: the tower has the states 0 to 2, or -3",
        ),
        ({"vision_feature_layers": []}, r"vision_feature_layers.*at least 1 item"),
        ({"freeze": ["tower"]}, r"freeze.*'vision_model', 'vision_projection' or 'language_model'"),
    ],
)
def test_impossible_configurations_name_the_legal_values(host, keys, words) -> None:
    with pytest.raises(ConfigError, match=words):
        config_from(host, SMALL | keys, data={"seq_length": 16})


def test_an_unknown_family_is_named_with_those_that_exist(host) -> None:
    with pytest.raises(PluginError, match=r"language_model.family=lama needs a model family.*did you mean .llama"):
        config_from(host, SMALL | changed("language_model", family="lama"))


@pytest.mark.parametrize("family", ["bert", "gpt_classification"])
def test_a_model_that_continues_no_text_is_no_decoder(host, family) -> None:
    keys = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 16}
    sections = {"data": {"seq_length": 16}, "train": {"loss": "classification"}}
    with pytest.raises(ConfigError, match=f"model.language_model.family={family} does not continue text.*llama"):
        built(host, config_from(host, SMALL | {"language_model": {"family": family, **keys}}, **sections))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"vision_config": {"model_type": "pixtral"}},
            r"vision_config.model_type='pixtral' is not supported; it can be",
        ),
        ({"text_config": {"model_type": "bert"}}, r"text_config.model_type='bert' is not supported; it can be llama, "),
        ({"projector_hidden_act": "mish"}, r"projector_hidden_act='mish' is not supported"),
        ({"image_grid_pinpoints": []}, r"fields that are not known: image_grid_pinpoints"),
    ],
)
def test_a_hugging_face_configuration_that_cannot_be_read(fields, words) -> None:
    with pytest.raises(ConfigError, match=words):
        HUGGING_FACE.read_config({"model_type": "llava"} | fields)


def test_what_hugging_face_cannot_express_is_refused(host) -> None:
    config = config_from(host, SMALL | {"vision_projection_type": "affine"}, data={"seq_length": 16})
    with pytest.raises(ConfigError, match="vision_projection_type=affine cannot be written"):
        HUGGING_FACE.write_config(config.model)
