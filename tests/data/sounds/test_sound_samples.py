"""Samples of texts with sounds and images: from JSON lines and shards, damaged sounds, rules of the configuration."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
from tests.data.images.test_image_text import EOD, IMAGE, build, shown
from tests.data.sounds.test_wav import floats

from mt_core.errors import DataError

SOUND = 262
KEYS = {"audio_token_index": SOUND, "max_audio_seconds": 0.5, "max_sounds": 2}


def tone(samples: int, seed: int = 0) -> np.ndarray:
    return np.random.RandomState(seed).uniform(-0.5, 0.5, samples).astype(np.float32)


def heard(ids) -> str:
    """As `shown`, a position of sound being ~."""
    return "".join("~" if t == SOUND else shown([t]) for t in ids)


def lines(folder: Path, *records: dict) -> Path:
    path = folder / "records.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_sounds_of_lines_stand_at_their_marks(tmp_path) -> None:
    for name, samples in (("a", 1600), ("b", 3300)):
        (tmp_path / f"{name}.wav").write_bytes(floats(tone(samples)))
    records = [
        {"audio": ["a.wav", "b.wav"], "text": "x<audio>y<audio>z"},
        {"audio": "a.wav", "question": "What?", "answer": "a tone"},
    ]
    dataset = build(lines(tmp_path, *records), length=96, **KEYS)
    by_text = {heard(sample["tokens"]): sample for sample in map(dataset.__getitem__, range(len(dataset)))}
    around = "<|audio_start|>{}<|audio_end|>"
    both, asked = f"x{around.format('~~')}y{around.format('~~~')}z", f"User: {around.format('~~')}\nWhat?"
    whole = next(sample for text, sample in by_text.items() if text.startswith(both))
    np.testing.assert_array_equal(whole["audio"][:4900], np.concatenate([tone(1600), tone(3300)]))
    assert whole["audio"].shape == (8000,)
    assert not whole["audio"][4900:].any()
    assert whole["audio_lengths"].tolist() == [1600, 3300]
    question = next(sample for text, sample in by_text.items() if text.startswith(asked))
    assert question["audio_lengths"].tolist() == [1600, 0]
    # Neither sounds nor the texts around them count, where answers do.
    assert shown(question["labels"][question["loss_mask"] == 1]) == " a tone$"
    assert (whole["labels"] != SOUND).all()
    assert EOD in whole["labels"]


def test_sounds_of_a_shard_are_members(tmp_path) -> None:
    path = tmp_path / "one.tar"
    with tarfile.open(path, "w") as archive:
        for name, data in (("0.json", b'{"text": "hear: <audio>."}'), ("0.wav", floats(tone(1600), 8_000))):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    sample = build(path, length=64, **KEYS)[0]
    assert heard(sample["tokens"]).startswith("hear: <|audio_start|>~~~<|audio_end|>.")
    # Twice as many samples, at 16 kHz.
    assert sample["audio_lengths"].tolist() == [3200, 0]


@pytest.mark.parametrize(
    ("records", "keys", "words"),
    [
        ([{"audio": "a.wav", "text": "x"}], {"audio_token_index": None}, "has a sound; set data.audio_token_index"),
        ([{"audio": "long.wav", "text": "x"}], {}, r"1.0 seconds of sound, more than the 0.5 allowed"),
        ([{"audio": ["a.wav"] * 3, "text": "x"}], {}, "has 3 sounds, more than the 2 of a sample; set data.max_sounds"),
        ([{"audio": "short.wav", "text": "x"}], {}, "has 100 samples of sound at 16 kHz, and at least 201"),
        ([{"audio": "none.wav", "text": "x"}], {}, "none.wav cannot be read"),
        ([{"audio": "a.wav", "text": "<audio><audio>"}], {}, '"<audio>" 2 times, and the number of audios is 1'),
        ([{"audio": "text.wav", "text": "x"}], {}, "text.wav is no WAV file"),
    ],
)
def test_records_that_cannot_be_used_are_named(tmp_path, records, keys, words) -> None:
    for name, samples in (("a", 1600), ("long", 16_000), ("short", 100)):
        (tmp_path / f"{name}.wav").write_bytes(floats(tone(samples)))
    (tmp_path / "text.wav").write_text("words")
    with pytest.raises(DataError, match=words):
        build(lines(tmp_path, *records), **{**KEYS, **keys})


def test_a_sound_that_changes_later_does_not_count(tmp_path) -> None:
    (tmp_path / "a.wav").write_bytes(floats(tone(1600)))
    dataset = build(lines(tmp_path, {"audio": "a.wav", "text": "x"}), max_unusable_records=1, **KEYS)
    (tmp_path / "a.wav").write_bytes(floats(tone(1700)))
    sample = dataset[0]
    assert not sample["audio"].any()
    assert not sample["loss_mask"].any()
    assert sample["audio_lengths"].tolist() == [1600, 0]


def test_keys_that_contradict_each_other_are_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match="audio_token_index=261 is data.image_token_index too"):
        build(tmp_path, audio_token_index=IMAGE)
    with pytest.raises(ValueError, match="packing=true packs records by their positions"):
        build(tmp_path, packing=True, **KEYS)
