"""From an image, and a class or an encoded text, to the arrays of a sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mt_core.errors import ConfigError
from mt_core.interfaces import Tokenizer
from mt_data.datasets.images.config import ImageTextKeys
from mt_data.datasets.sounds.rules import SOUND


def labelled(image: NDArray[np.float32], label: int) -> dict[str, np.ndarray]:
    """The fields of IMAGE_CLASS_SAMPLE."""
    return {"images": image, "labels": np.array(label, np.int64), "loss_mask": np.array(1, np.float32)}


@dataclass(frozen=True)
class EncodedText:
    """tokens [n], the image token repeated where the image stands, and counted bool [n], True for what is learnt."""

    tokens: list[int]
    counted: list[bool]

    def __add__(self, other: EncodedText) -> EncodedText:
        return EncodedText(self.tokens + other.tokens, self.counted + other.counted)


@dataclass(frozen=True)
class SampleShape:
    """What turns an encoded text into the arrays of a sample."""

    length: int
    image_token: int
    image_length: int
    filler: int
    audio_token: int | None = None

    @classmethod
    def of(cls, config: ImageTextKeys, tokenizer: Tokenizer, sequence_length: int) -> SampleShape:
        """Raises ConfigError when an image leaves no room for text, or its token is one of the text's."""
        if config.image_seq_length >= sequence_length:
            raise ConfigError(
                f"data.seq_length={sequence_length} has no room for text beside data.image_seq_length="
                f"{config.image_seq_length} positions of an image; make it larger"
            )
        special = tokenizer.special
        for key in ("image_token_index", "audio_token_index"):
            token = getattr(config, key)
            if token is not None and token in (special.eod, special.bos, special.eos, special.pad):
                raise ConfigError(
                    f"data.{key}={token} is a special id of the tokenizer; take one that no text has, such as "
                    f"{tokenizer.vocab_size}, the first behind the vocabulary"
                )
        filler = next((token for token in (special.pad, special.eod) if token is not None), 0)
        return cls(sequence_length, config.image_token_index, config.image_seq_length, filler, config.audio_token_index)

    @property
    def image(self) -> EncodedText:
        return EncodedText([self.image_token] * self.image_length, [False] * self.image_length)

    def arrays(self, text: EncodedText) -> dict[str, np.ndarray]:
        """Fields of IMAGE_TEXT_SAMPLE without the image: the text but its last token, cut to the length."""
        sample = self.padding()
        self.write(sample, 0, np.array(text.tokens, np.int64), np.array(text.counted, np.bool_))
        return sample

    def padding(self, segments: int | None = None) -> dict[str, np.ndarray]:
        """Fields of a sample without any text. segments: of a sample in which so many do not see one another."""
        sample: dict[str, np.ndarray] = {
            "tokens": np.full(self.length, self.filler, np.int64),
            "labels": np.full(self.length, self.filler, np.int64),
            "loss_mask": np.zeros(self.length, np.float32),
            "position_ids": np.arange(self.length, dtype=np.int64),
        }
        if segments is not None:
            # Padding is a segment of its own, which nothing sees.
            sample["segment_ids"] = np.full(self.length, segments, np.int32)
        return sample

    def write(
        self,
        sample: dict[str, np.ndarray],
        start: int,
        tokens: NDArray[np.integer],
        counted: NDArray[np.bool_],
        segment: int = 0,
    ) -> int:
        """Put a text [n], whose images and sounds are negative ids or their tokens, behind `start`; returns where it
        ends.

        What goes beyond the length is cut.
        """
        # One token more than positions that are left: the last one is a label alone.
        left = self.length - start + 1
        ids = np.where(tokens == SOUND, self.audio_token or 0, np.where(tokens < 0, self.image_token, tokens))[:left]
        end = start + len(ids) - 1
        sample["tokens"][start:end] = ids[:-1]
        # These tokens need not be in the vocabulary; they are never predicted.
        is_feature = np.isin(ids[1:], [token for token in (self.image_token, self.audio_token) if token is not None])
        sample["labels"][start:end] = np.where(is_feature, self.filler, ids[1:])
        sample["loss_mask"][start:end] = counted[1:left]
        # To the end and not to `end`: the padding behind the last text goes on counting, and the next text overwrites
        # it.
        sample["position_ids"][start:] = np.arange(self.length - start)
        if "segment_ids" in sample:
            sample["segment_ids"][start:end] = segment
        return end


def padded_sounds(sounds: Sequence[NDArray[np.float32]], config: ImageTextKeys) -> dict[str, np.ndarray]:
    """audio fp32 [max_audio_samples]: sounds end to end; audio_lengths int64 [max_sounds]: samples of each. The rest is
    0."""
    audio = np.zeros(config.max_audio_samples, np.float32)
    lengths = np.zeros(config.max_sounds, np.int64)
    start = 0
    for number, sound in enumerate(sounds):
        audio[start : start + len(sound)] = sound
        lengths[number], start = len(sound), start + len(sound)
    return {"audio": audio, "audio_lengths": lengths}
