"""Mistral 3 with pictures against `transformers`: logits, loss, every gradient, maps; decoding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.infer.decoding import cached_logits
from tests.infer.engines import OPTIONS, run, tokens_of
from tests.infer.test_qwen_vl import GREEDY, requested
from tests.models.qwen_vl_reference import IMAGE, LENGTH, VOCAB, image_batch, texts_with_images
from tests.models.vision_reference import assert_same_training, config_from, from_reference, randomize
from torch import Tensor

from mt_core.errors import ConfigError
from mt_core.parallel.context import ParallelContext
from mt_core.specs import MODELS
from mt_infer.config import InferenceConfig
from mt_infer.engine import InferenceEngine
from mt_models.llava.dynamic_config import largest_image_flops
from mt_models.mistral3.config import training_flops
from mt_models.mistral3.hugging_face import HUGGING_FACE

transformers = pytest.importorskip("transformers")

VISION = {
    "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 20, "patch_size": 3,
    "image_size": 60,
}  # fmt: skip
TEXT = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 10, "intermediate_size": 28, "max_position_embeddings": 128, "rms_norm_eps": 1e-3,
    "sliding_window": None, **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8, "mscale": 1.0,
    "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
LATENTS = {
    "num_key_value_heads": 4, "head_dim": 16, "q_lora_rank": 14, "kv_lora_rank": 10, "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6, "v_head_dim": 9, "moe_intermediate_size": 12, "n_routed_experts": 5,
    "num_experts_per_tok": 3, "n_shared_experts": 2, "first_k_dense_replace": 1,
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "mistral": ("MistralConfig", {}, {"hidden_act": "silu"}, {"tie_word_embeddings": False}),
    "ministral3": ("Ministral3Config", {"rope_parameters": YARN}, {"hidden_act": "gelu"}, {
        "tie_word_embeddings": True, "multimodal_projector_bias": True,
    }),
    "mistral4": ("Mistral4Config", {**LATENTS, "rope_parameters": YARN}, {"hidden_act": "silu"}, {
        "tie_word_embeddings": False,
    }),
}  # fmt: skip


def make_reference(case: str) -> Any:
    kind, text, vision, outer = CASES[case]
    config = transformers.Mistral3Config(
        vision_config=transformers.PixtralVisionConfig(**VISION, **vision),
        text_config=getattr(transformers, kind)(**{**TEXT, **text}),
        image_token_index=IMAGE,
        **outer,
    )
    config._attn_implementation = "eager"
    return transformers.Mistral3ForConditionalGeneration(config).float().eval()


def as_reference_inputs(tokens: Tensor, images: Tensor, grids: Tensor) -> dict[str, Tensor]:
    """What `transformers` takes: whole images, padded to the largest, and their sizes."""
    texts = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    whole = []
    for row, own in zip(images, grids.tolist(), strict=True):
        first = 0
        for rows, columns in (grid for grid in own if grid[0]):
            cells = row[first : first + rows * columns].unflatten(0, (rows, columns))
            first += rows * columns
            # [rows, columns, C, side, side] -> [C, rows side, columns side]
            whole.append(cells.permute(2, 0, 3, 1, 4).flatten(3).flatten(1, 2))
    if not whole:
        return texts
    sizes = torch.tensor([image.shape[1:] for image in whole])
    height, width = sizes.max(0).values.tolist()
    padded = [F.pad(image, (0, width - image.shape[2], 0, height - image.shape[1])) for image in whole]
    return {**texts, "pixel_values": torch.stack(padded), "image_sizes": sizes}


@pytest.fixture(scope="module", params=list(CASES))
def pair(request, host):
    reference = make_reference(request.param)
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


def test_a_file_with_an_lm_head_that_does_not_say_so_is_not_tied() -> None:
    external = make_reference("mistral").config.to_dict()
    del external["tie_word_embeddings"]
    found = HUGGING_FACE.held(external, ["language_model.lm_head.weight"])
    assert HUGGING_FACE.read_config(found)["language_model"]["untie_embeddings_and_output_weights"]
    assert not HUGGING_FACE.read_config(external)["language_model"]["untie_embeddings_and_output_weights"]


def test_a_decoder_of_another_family_is_refused() -> None:
    external = make_reference("mistral").config.to_dict()
    external["text_config"]["model_type"] = "llama"
    with pytest.raises(ConfigError, match="text_config.model_type='llama' is not supported; it can be mistral"):
        HUGGING_FACE.read_config(external)


def test_flops_of_the_text_are_those_of_mistral_4_alone(host) -> None:
    """The decoder's latent attention and experts are counted, not the heads and the feed-forward of a Mistral."""
    model = HUGGING_FACE.read_config(make_reference("mistral4").config.to_dict())
    whole = config_from(host, model, data={"seq_length": LENGTH})
    alone = config_from(host, {**model["language_model"], "vocab_size": VOCAB}, data={"seq_length": LENGTH})
    image = largest_image_flops(whole, whole.model.projection_weights)
    assert training_flops(whole) - image == pytest.approx(host[MODELS].get("mistral4").training_flops.load()(alone))
