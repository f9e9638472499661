"""A tokenizer with the markers that published models of images and text have around images."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

MARKERS = [
    *("<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>"),
    *(f"<row_{row}_col_{column}>" for row in (1, 2, 3) for column in (1, 2, 3)),
    *("<img>", "</img>", "<IMG_CONTEXT>", "<video>", "<eod>"),
]
"""Of rows and columns only some, as published tokenizers have: others are texts."""


def write_marker_tokenizer(folder: Path) -> int:
    """Bytes, a merge of two line ends, and the markers. Returns the size of the vocabulary."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: number for number, character in enumerate([*alphabet, "ĊĊ"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("Ċ", "Ċ")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in MARKERS])
    tokenizer.save(str(folder / "tokenizer.json"))
    keys = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<eod>",
        "extra_special_tokens": {
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(keys))
    return tokenizer.get_vocab_size()
