"""The thinker of Qwen3-Omni against `transformers`: spectrograms, logits, loss, every gradient, maps, positions, bad
input."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.models.qwen3_omni_reference import (
    AUDIO,
    RATE,
    SPECIAL,
    make_reference,
    reference_features,
    sound,
    sound_batch,
)
from tests.models.qwen_vl_reference import IMAGE, SIDE, VIDEO, cells_of
from tests.models.vision_reference import assert_near, assert_same_training, from_reference, randomize
from torch.utils.flop_counter import FlopCounterMode

from mt_core.errors import ConfigError, DataError
from mt_models.qwen3_omni.flops import sound_flops
from mt_models.qwen3_omni.hugging_face import HUGGING_FACE
from mt_models.sound.spectrogram import slaney_filters, whisper_spectrogram

transformers = pytest.importorskip("transformers")
LENGTH = 80


def make_pair(host, **keys):
    reference = make_reference(**keys)
    randomize(reference)
    return from_reference(host, HUGGING_FACE, reference, {}, data={"seq_length": LENGTH}), reference


@pytest.mark.parametrize("samples", [201, 399, 16_000, 16_161, 40_003])
def test_spectrograms_equal_whispers(samples) -> None:
    wave = sound(samples, seed=samples)
    features, mask = reference_features([wave], 128)
    ours = whisper_spectrogram(wave, 128)
    assert ours.shape[1] == samples // 160 == int(mask.sum())
    torch.testing.assert_close(ours, features[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("bins", [80, 128])
def test_mel_bins_equal_those_of_whisper(bins) -> None:
    theirs = torch.from_numpy(transformers.WhisperFeatureExtractor(feature_size=bins).mel_filters)
    torch.testing.assert_close(slaney_filters(bins, 400), theirs.float(), atol=1e-8, rtol=1e-5)


SOUNDS = [[(37_000, 1)], [(30_000, 2), (17_003, 3)], []]
"""Samples and seeds of the sounds of three texts: 231 frames (two windows), 187 and 106 frames, none. In a batch with
longer ones, transformers fills up sounds that are shorter than a chunk, which changes what it makes of them."""
POSITIONS = [[13 + 13 + 4], [13 + 11, 13 + 1], []]


def texts_with_sounds() -> tuple[torch.Tensor, list[list[torch.Tensor]]]:
    """tokens [3, LENGTH]: a sound behind an image, two sounds with a word between them, none."""
    tokens = torch.randint(1, 90, (3, LENGTH), generator=torch.Generator().manual_seed(5))
    rows = [[sound(*one) for one in row] for row in SOUNDS]
    put(tokens[0], 3, IMAGE, 6, "vision_start", SPECIAL["vision_end"])
    put(tokens[0], 20, AUDIO, POSITIONS[0][0], "audio_start", 7)
    put(tokens[1], 0, AUDIO, POSITIONS[1][0], "audio_start", 7)
    put(tokens[1], 40, AUDIO, POSITIONS[1][1], "audio_start", 8)
    return tokens, rows


def put(row: torch.Tensor, start: int, token: int, count: int, before: str, behind: int) -> None:
    row[start], row[start + 1 : start + 1 + count], row[start + 1 + count] = SPECIAL[before], token, behind


def images_of_first_row() -> tuple[torch.Tensor, torch.Tensor]:
    """images [3, 6, 3, SIDE, SIDE] and grids [3, 1, 2] of an image of 2 x 3 cells."""
    images, grids = torch.full((3, 6, 3, SIDE, SIDE), 1e9), torch.zeros(3, 1, 2, dtype=torch.long)
    images[0], grids[0, 0] = cells_of(2, 3, 1), torch.tensor([2, 3])
    return images, grids


def patches_of(cells: torch.Tensor) -> torch.Tensor:
    """[V, C (of each of two frames), m p, m p] -> what the vision transformer of transformers takes."""
    frames = cells if cells.shape[1] == 6 else cells.repeat(1, 2, 1, 1)
    # [V, T, C, m, p, m, p] -> [V, m, m, C, T, p, p]
    split = frames.reshape(-1, 2, 3, 2, 3, 2, 3).permute(0, 3, 5, 2, 1, 4, 6)
    return split.reshape(4 * len(cells), -1)


@pytest.mark.parametrize(
    "keys",
    [{}, {"tied": True, "norm_topk_prob": False, "audio": {"activation_function": "relu"}}],
    ids=["untied", "tied"],
)
def test_logits_loss_and_gradients_equal_the_reference(host, keys) -> None:
    model, reference = make_pair(host, **keys)
    tokens, sounds = texts_with_sounds()
    (audio, lengths), (images, grids) = sound_batch(sounds, 3), images_of_first_row()
    labels = tokens.masked_fill((tokens == IMAGE) | (tokens == AUDIO), -100)
    features, mask = reference_features([one for row in sounds for one in row], 19)
    theirs = reference(
        input_ids=tokens,
        attention_mask=torch.ones_like(tokens),
        input_features=features,
        feature_attention_mask=mask,
        pixel_values=patches_of(images[0]),
        image_grid_thw=torch.tensor([[1, 4, 6]]),
        labels=labels,
    )
    logits = model(tokens, images, image_grids=grids, audio=audio, audio_lengths=lengths)
    assert_same_training((model, logits), (reference, theirs), labels, HUGGING_FACE)


def test_positions_of_a_video_go_on_with_its_time(host) -> None:
    """A sound, a video of three views a quarter of a second apart, and words behind it, after its last time."""
    model, reference = make_pair(host)
    tokens = torch.randint(1, 90, (1, 40), generator=torch.Generator().manual_seed(6))
    put(tokens[0], 2, AUDIO, 3, "audio_start", 7)
    put(tokens[0], 12, VIDEO, 12, "vision_start", SPECIAL["vision_end"])
    cells = torch.randn(12, 6, SIDE, SIDE, generator=torch.Generator().manual_seed(7))
    wave = sound(3_300, 3)
    features, mask = reference_features([wave], 19)
    output = reference(
        input_ids=tokens,
        attention_mask=torch.ones_like(tokens),
        input_features=features,
        feature_attention_mask=mask,
        pixel_values_videos=patches_of(cells),
        video_grid_thw=torch.tensor([[3, 4, 4]]),
        video_second_per_grid=torch.tensor([0.25]),
    )
    ours = tokens.masked_fill(tokens == VIDEO, IMAGE)
    times = torch.tensor([[[2, 2, 0], [2, 2, 250_000], [2, 2, 500_000]]])
    logits = model(ours, cells[None], image_grids=times, audio=wave[None], audio_lengths=torch.tensor([[3_300]]))
    assert_near(logits, output.logits)


def test_texts_without_sound_have_gradients_of_zero(host) -> None:
    model, _ = make_pair(host)
    tokens = torch.randint(1, 90, (2, 9))
    logits = model(tokens, audio=torch.zeros(2, 500), audio_lengths=torch.zeros(2, 1, dtype=torch.long))
    torch.testing.assert_close(logits, model(tokens))
    F.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
    assert all(not parameter.grad.any() for parameter in model.audio_model.parameters())


def test_sounds_and_tokens_are_as_many(host) -> None:
    model, _ = make_pair(host)
    tokens = torch.full((1, 9), AUDIO)
    with pytest.raises(DataError, match=r"have \[9\] audio tokens \(id 98\), and sounds of \[13\] features"):
        model(tokens, audio=torch.zeros(1, RATE), audio_lengths=torch.tensor([[RATE]]))
    with pytest.raises(DataError, match=r"have \[9\] audio tokens \(id 98\), and sounds of \[0\] features"):
        model(tokens)
    with pytest.raises(ConfigError, match="audio: a sound has 200 samples; at least 201"):
        model.check_request(tokens[0], {"audio": torch.zeros(200), "audio_lengths": torch.tensor([200])})
    with pytest.raises(ConfigError, match="audio_lengths add up to 3, and there are 200"):
        model.check_request(tokens[0], {"audio": torch.zeros(200), "audio_lengths": torch.tensor([3])})


def test_decoding_equals_the_forward_pass_and_greedy_continuation_the_reference(host) -> None:
    from tests.infer.decoding import cached_logits

    model, reference = make_pair(host)
    tokens, sounds = texts_with_sounds()
    tokens, sounds = tokens[1:2], sounds[1]
    inputs = {"audio": torch.cat(sounds), "audio_lengths": torch.tensor([len(one) for one in sounds])}
    features, mask = reference_features(sounds, 19)
    known = {"input_features": features, "feature_attention_mask": mask}
    with torch.no_grad():
        whole = model(tokens, audio=inputs["audio"][None], audio_lengths=inputs["audio_lengths"][None])
    decoded = cached_logits(model, tokens, (5, 30, 41, 42, 44, LENGTH), [inputs])
    torch.testing.assert_close(decoded, whole, atol=1e-4, rtol=1e-4)
    prompt = tokens[:, :60]
    written = reference.generate(
        input_ids=prompt, attention_mask=torch.ones_like(prompt), **known, max_new_tokens=8, do_sample=False
    )
    text = prompt
    for _ in range(8):
        with torch.no_grad():
            logits = model(text, audio=inputs["audio"][None], audio_lengths=inputs["audio_lengths"][None])
        text = torch.cat([text, logits[:, -1:].argmax(-1)], dim=1)
    assert text.tolist() == written.tolist()


def test_flops_of_a_sound_are_those_that_torch_counts(host) -> None:
    """Four seconds: two whole windows, so that attention has no padding."""
    model, _ = make_pair(host)
    with FlopCounterMode(display=False) as counter:
        model.sound_features([sound(64_000, 1)])
    spectrogram = 2 * 19 * 201 * 400
    ours = sound_flops(model.config.audio_model, 400, 36)
    assert ours == pytest.approx(counter.get_total_flops() - spectrogram, rel=1e-3)


@pytest.mark.parametrize(
    ("part", "keys", "words"),
    [
        ("audio_config", {"n_window": 40}, "audio_config.n_window=40 is not supported"),
        ("audio_config", {"output_dim": 35}, "audio_config.output_dim=35 and text_config.hidden_size=36 differ"),
        ("audio_config", {"max_source_positions": 12}, "max_source_positions=12 is not supported"),
        ("audio_config", {"activation_function": "selu"}, "selu"),
        ("vision_config", {"out_hidden_size": 35}, "vision_config.out_hidden_size=35"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(part, keys, words) -> None:
    external = make_reference().config.to_dict()
    external[part].update(keys)
    with pytest.raises(ConfigError, match=words):
        HUGGING_FACE.read_config(external)
