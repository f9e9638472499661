"""Sound of Gemma 4 (E2B, E4B) against `transformers`: spectrograms, logits, loss, every gradient, maps, decoding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.models.gemma4_vl_reference import (
    CASES,
    IMAGE,
    TEXT,
    VISION,
    as_reference_inputs,
    image_batch,
    randomize_buffers,
    texts_with_images,
)
from tests.models.qwen3_omni_reference import RATE, sound, sound_batch
from tests.models.vision_reference import (
    assert_near,
    assert_round_trip,
    assert_same_gradients,
    config_from,
    from_reference,
    randomize,
)

from mt_core.errors import ConfigError
from mt_models.gemma4_vl.hugging_face import HUGGING_FACE
from mt_models.sound.spectrogram import gemma_spectrogram, htk_filters

transformers = pytest.importorskip("transformers")
AUDIO, BINS, LENGTH = 98, 16, 48
TOWER = {
    "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "subsampling_conv_channels": [BINS, 6],
    "conv_kernel_size": 3, "attention_chunk_size": 4, "attention_context_left": 6, "output_proj_dims": 20,
    "rms_norm_eps": 1e-3, "residual_weight": 0.4, "attention_logit_cap": 3.0,
}  # fmt: skip
"""Windows of five positions, which are shorter than the sounds."""


def make_reference(**audio: Any) -> Any:
    text, vision = CASES["per-layer embeddings, bounds"]
    config = transformers.Gemma4Config(
        vision_config=transformers.Gemma4VisionConfig(**VISION, **vision),
        text_config=transformers.Gemma4TextConfig(**{**TEXT, **text}),
        audio_config=transformers.Gemma4AudioConfig(**{**TOWER, **audio}),
        image_token_id=IMAGE,
        audio_token_id=AUDIO,
        video_token_id=10_000,
    )
    config._attn_implementation = config._experts_implementation = "eager"
    return transformers.Gemma4ForConditionalGeneration(config).float().eval()


def make_pair(host, **audio):
    reference = make_reference(**audio)
    randomize(reference, scale=0.2)
    randomize_buffers(reference)
    return from_reference(host, HUGGING_FACE, reference, {}, data={"seq_length": LENGTH}), reference


def extracted(sounds: list[torch.Tensor], bins: int = BINS) -> dict[str, torch.Tensor]:
    extractor = transformers.Gemma4AudioFeatureExtractor(feature_size=bins)
    found = extractor([one.numpy() for one in sounds], return_tensors="pt")
    return {name: found[name] for name in ("input_features", "input_features_mask")}


@pytest.mark.parametrize("samples", [161, 320, 321, 5_000, 16_161])
def test_spectrograms_equal_the_extractors(samples) -> None:
    wave = sound(samples, seed=samples)
    theirs = extracted([wave], 128)
    real = theirs["input_features"][0][theirs["input_features_mask"][0].bool()]
    ours = gemma_spectrogram(wave, 128)
    assert ours.shape == real.shape == ((samples - 1) // 160, 128)
    # fp32 there: magnitudes near the floor of 0.001 are the difference of larger ones.
    torch.testing.assert_close(ours, real, atol=1e-3, rtol=1e-4)
    assert (ours - real).abs().mean() < 1e-5
    filters = torch.from_numpy(transformers.Gemma4AudioFeatureExtractor(feature_size=128).mel_filters)
    torch.testing.assert_close(htk_filters(128, 512), filters, atol=1e-9, rtol=1e-6)


def padded_spectrograms(sounds: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Those of the test above, with frames of zeros behind the shorter ones, as the extractor has them: what it makes
    in fp32 differs by a thousandth where magnitudes are small, which gradients show."""
    frames = [gemma_spectrogram(one, BINS) for one in sounds]
    most = max(map(len, frames)) + 3
    padded = torch.stack([F.pad(one, (0, 0, 0, most - len(one))) for one in frames])
    return {
        "input_features": padded,
        "input_features_mask": torch.stack([torch.arange(most) < len(one) for one in frames]),
    }


SOUNDS = [[(9_000, 1)], [(4_321, 2), (1_300, 3)], []]
"""Samples and seeds: 56 frames, 27 and 8; thus 14, 7 and 2 positions."""


def texts_with_sounds() -> tuple[torch.Tensor, list[list[torch.Tensor]]]:
    """tokens [3, LENGTH]: those with images, and behind them sounds."""
    tokens = torch.randint(1, 90, (3, LENGTH), generator=torch.Generator().manual_seed(5))
    tokens[:, :24] = texts_with_images().where(texts_with_images() != AUDIO, 1)
    tokens[0, 25:39] = AUDIO
    tokens[1, 25:32] = tokens[1, 34:36] = AUDIO
    return tokens, [[sound(*one) for one in row] for row in SOUNDS]


@pytest.mark.parametrize(
    "audio",
    [{}, {"use_clipped_linears": False, "attention_context_right": 3, "hidden_act": "relu", "gradient_clipping": 0.7}],
    ids=["bounds", "future"],
)
def test_logits_loss_and_gradients_equal_the_reference(host, audio) -> None:
    model, reference = make_pair(host, **audio)
    tokens, sounds = texts_with_sounds()
    tokens = tokens.masked_fill(tokens == IMAGE, 5)
    waves, lengths = sound_batch(sounds, 2)
    labels = tokens.masked_fill(tokens == AUDIO, -100)
    theirs = reference(**texts(tokens), **padded_spectrograms([one for row in sounds for one in row]), labels=labels)
    logits = model(tokens, audio=waves, audio_lengths=lengths)
    assert_near(logits, theirs.logits)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    assert loss.item() == pytest.approx(theirs.loss.item(), rel=1e-5)
    loss.backward()
    theirs.loss.backward()
    assert_same_gradients(model, reference, HUGGING_FACE, untrained=("vision",))
    assert_round_trip(model, reference, HUGGING_FACE)


def test_sounds_beside_images_equal_the_reference(host) -> None:
    model, reference = make_pair(host)
    tokens, sounds = texts_with_sounds()
    (waves, lengths), (images, grids) = sound_batch(sounds, 2), image_batch()
    theirs = reference(
        **as_reference_inputs(tokens, images, grids), **padded_spectrograms([one for row in sounds for one in row])
    )
    logits = model(tokens, images, image_grids=grids, audio=waves, audio_lengths=lengths)
    assert_near(logits, theirs.logits)


def texts(tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    types = torch.zeros_like(tokens)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "mm_token_type_ids": types}


def test_decoding_equals_the_forward_pass(host) -> None:
    from tests.infer.decoding import cached_logits

    model, _ = make_pair(host)
    tokens, sounds = texts_with_sounds()
    tokens, own = tokens[1:2].clone(), sounds[1]
    tokens[tokens == IMAGE] = 5
    inputs = {"audio": torch.cat(own), "audio_lengths": torch.tensor([len(one) for one in own])}
    with torch.no_grad():
        whole = model(tokens, audio=inputs["audio"][None], audio_lengths=inputs["audio_lengths"][None])
    decoded = cached_logits(model, tokens, (5, 28, 35, 36, LENGTH), [inputs])
    torch.testing.assert_close(decoded, whole, atol=1e-4, rtol=1e-4)


def test_what_cannot_be_built_is_refused(host) -> None:
    external = make_reference().config.to_dict()
    external["audio_config"]["attention_invalid_logits_value"] = -5.0
    with pytest.raises(ConfigError, match=r"attention_invalid_logits_value=-5.0 is not supported"):
        HUGGING_FACE.read_config(external)
    keys = HUGGING_FACE.read_config(make_reference().config.to_dict())
    without = {key: value for key, value in keys.items() if key != "audio_model"}
    with pytest.raises(ConfigError, match="freeze has audio_model, and the model has no audio tower"):
        config_from(host, {**without, "freeze": ["audio_model"]}, data={"seq_length": LENGTH})
    assert keys["audio_token_index"] == AUDIO
    assert np.isclose(RATE / 160 / 4, 25)
