"""SmolVLM and Idefics3 against `transformers`: logits, loss, gradients, generation, maps, sizes, FLOPs, bad input."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tests.infer.decoding import cached_logits
from tests.infer.engines import run, tokens_of
from tests.models.published_configs import SMOLVLM_500M
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
from mt_core.config.schema import InferenceConfig
from mt_core.errors import ConfigError
from mt_core.parallel.context import ParallelContext
from mt_infer.engine import InferenceEngine
from mt_infer.sampling.parameters import SamplingParameters
from mt_models.hugging_face import to_reference
from mt_models.smolvlm.flops import flops_per_sample
from mt_models.smolvlm.hugging_face import HUGGING_FACE

transformers = pytest.importorskip("transformers")

VOCAB, IMAGE, FEATURES = 101, 100, 4
TOWER = {
    "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 40, "image_size": 24,
    "patch_size": 4,
}  # fmt: skip
TEXT = {
    "model_type": "llama", "vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 24, "pad_token_id": 0,
}  # fmt: skip


def reference_of(name: str, *, tied: bool = False):
    config = getattr(transformers, f"{name}Config")(
        vision_config=TOWER, text_config={**TEXT, "tie_word_embeddings": tied}, scale_factor=3, image_token_id=IMAGE,
        tie_word_embeddings=tied,
    )  # fmt: skip
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).float().eval()
    randomize(model)
    return model


def make_pair(host, name: str = "Idefics3", *, tied: bool = False):
    reference = reference_of(name, tied=tied)
    return from_reference(host, HUGGING_FACE, reference, {}, data={"seq_length": 16}), reference


def text_with_images() -> Tensor:
    """Two rows: two images, and one."""
    tokens = torch.randint(1, IMAGE, (2, 16), generator=torch.Generator().manual_seed(5))
    tokens[0, 1 : 1 + FEATURES] = IMAGE
    tokens[0, 9 : 9 + FEATURES] = IMAGE
    tokens[1, 5 : 5 + FEATURES] = IMAGE
    return tokens


def images_of_text() -> Tensor:
    """[2, 2, 3, 24, 24]; the second of the second row is padding, which the reference finds by its zeros."""
    images = random_images(4, 3, 24, 24).view(2, 2, 3, 24, 24)
    images[1, 1] = 0
    return images


@pytest.mark.parametrize(("name", "tied"), [("Idefics3", False), ("SmolVLM", True)])
def test_logits_loss_and_gradients_equal_the_reference(host, name, tied) -> None:
    model, reference = make_pair(host, name, tied=tied)
    tokens, images = text_with_images(), images_of_text()
    labels = tokens.masked_fill(tokens == IMAGE, -100)
    theirs = reference(input_ids=tokens, pixel_values=images, labels=labels)
    logits = model(tokens, images)
    assert_near(logits, theirs.logits)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    assert loss.item() == pytest.approx(theirs.loss.item(), rel=1e-5)
    loss.backward()
    theirs.loss.backward()
    clear_key_biases(model, reference)
    assert_same_gradients(model, reference, HUGGING_FACE)
    assert_round_trip(model, reference, HUGGING_FACE)


def clear_key_biases(model, reference) -> None:
    """Softmax does not see what is added to every score of a query: these gradients are rounding in both."""
    for ours, theirs in zip(
        model.vision_model.decoder.layers, reference.model.vision_model.encoder.layers, strict=True
    ):
        gradient = ours.self_attention.linear_qkv.bias.grad
        keys = gradient.view(2, 3, -1)[:, 1]
        assert keys.abs().max() < 1e-4 * gradient.abs().max()
        keys.zero_()
        theirs.self_attn.k_proj.bias.grad.zero_()


def test_the_reference_reads_the_file_that_we_write(host, tmp_path) -> None:
    model, reference = make_pair(host, "SmolVLM")
    save_file(to_reference(model, HUGGING_FACE), tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(HUGGING_FACE.write_config(model.config)))
    read = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path)
    state = read.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in reference.state_dict().items())
    tokens, images = text_with_images(), images_of_text()
    assert_near(model(tokens, images), read(input_ids=tokens, pixel_values=images).logits)


def test_decoding_with_a_cache_equals_the_forward_and_generation_the_reference(host) -> None:
    model, reference = make_pair(host)
    tokens, images = text_with_images()[:1], images_of_text()[:1]
    # The first image is cut by the end of a piece.
    decoded = cached_logits(model, tokens, (3, 9, 14, 15, 16), [{"images": images[0]}])
    torch.testing.assert_close(decoded, model(tokens, images), atol=5e-5, rtol=1e-4)
    expected = reference.generate(
        input_ids=tokens, pixel_values=images, attention_mask=torch.ones_like(tokens), max_new_tokens=6,
        do_sample=False, eos_token_id=None,
    )[0, 16:].tolist()  # fmt: skip
    options = InferenceConfig(cache_memory_gb=0.01, cache_block_size=4, max_tokens_per_step=5)
    engine = InferenceEngine(model, None, ParallelContext(), options, longest=22)
    greedy = SamplingParameters(temperature=0.0, max_tokens=6)
    (events,) = run(engine, tokens.tolist(), greedy, [{"images": images[0]}])
    assert tokens_of(events) == expected


# -- sizes -------------------------------------------------------------------------------------------

PARAMETERS = {
    "smolvlm-256m": 256_484_928,
    "smolvlm-500m": 507_482_304,
    "smolvlm-2.2b": 2_246_272_880,
    "smolvlm2-2.2b": 2_246_784_880,
}
"""As the hub counts them in the published files."""


def test_presets_have_the_sizes_of_the_published_models(host) -> None:
    presets = host.models.get("smolvlm").presets.load()
    assert set(presets) == {*PARAMETERS, "idefics3-8b"}
    for preset in presets:
        config = load_config(preset=preset, overrides=["train.train_iters=1"], host=host).config
        size = canonical_size(host, config)
        with torch.device("meta"):
            external = transformers.Idefics3Config.from_dict(HUGGING_FACE.write_config(config.model))
            assert transformers.Idefics3ForConditionalGeneration(external).num_parameters() == size, preset
        assert size == PARAMETERS.get(preset, size)
    published = config_from(host, HUGGING_FACE.read_config(SMOLVLM_500M), data={"seq_length": 2048})
    assert canonical_size(host, published) == PARAMETERS["smolvlm-500m"]


def test_each_part_has_the_flops_that_torch_counts(host) -> None:
    model = built(host, config_from(host, SMALL, data={"seq_length": 16}))
    tokens = torch.zeros(2, 16, dtype=torch.long)
    tokens[:, :4] = 60
    with FlopCounterMode(display=False) as counter:
        model(tokens, random_images(2, 3, 16, 16))
    flops = flops_per_sample(model.config, 16, convention="full")
    assert flops.forward * 2 == pytest.approx(counter.get_total_flops(), rel=0.01)
    counts = {name: sum(ops.values()) for name, ops in counter.get_flop_counts().items()}
    assert flops.vision_projection * 2 == pytest.approx(counts["SmolVLMModel.vision_projection"], rel=0.01)
    assert flops.language_model.forward * 32 == pytest.approx(counts["SmolVLMModel.language_model"], rel=0.01)


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


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"use_perceiver": True}, "not known: use_perceiver=True"),
        ({"text_config": SMOLVLM_500M["text_config"] | {"qk_layer_norms": True}}, "text_config.qk_layer_norms=True"),
        ({"vision_config": {"model_type": "clip_vision_model"}}, "vision_config.model_type='clip_vision_model'"),
    ],
)
def test_fields_that_change_what_is_computed_are_refused(change, words) -> None:
    with pytest.raises(ConfigError, match=words):
        HUGGING_FACE.read_config(SMOLVLM_500M | change)


def test_a_pooler_cannot_be_written(host) -> None:
    config = config_from(host, SMALL | {"vision_model": SMALL["vision_model"] | {"add_pooler": True}})
    with pytest.raises(ConfigError, match="add_pooler=true cannot be written"):
        HUGGING_FACE.write_config(config.model)
