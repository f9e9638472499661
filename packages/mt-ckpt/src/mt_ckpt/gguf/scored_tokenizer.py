"""Vocabularies with scores (SentencePiece's BPE, llama.cpp's kind "llama") as the contents of tokenizer.json.

SentencePiece joins the two neighbours whose joint token has the highest score; the tokenizers library joins by a list
of pairs, first ones first. All pairs that make a token are listed by its score.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mt_core.errors import CheckpointError

SPACE = "\u2581"
NORMAL, UNKNOWN, UNUSED, BYTE = 1, 2, 5, 6


def scored_model(tokens: Sequence[str], scores: Sequence[float], kinds: Sequence[int]) -> dict[str, Any]:
    """The key `model`. Raises CheckpointError for lists of different lengths."""
    if len(scores) != len(tokens) or len(kinds) != len(tokens):
        raise CheckpointError(
            f"tokenizer.ggml.tokens has {len(tokens)} entries, scores {len(scores)} and token_type {len(kinds)}"
        )
    vocabulary = {token: number for number, token in reversed(list(enumerate(tokens)))}
    unknown = next((token for token, kind in zip(tokens, kinds, strict=True) if kind == UNKNOWN), None)
    ranked = sorted(_pairs(tokens, kinds, vocabulary), key=lambda pair: -scores[pair[0]])
    return {
        "type": "BPE",
        "unk_token": unknown,
        "fuse_unk": True,
        "byte_fallback": BYTE in kinds,
        "vocab": {token: number for number, token in enumerate(tokens)},
        "merges": [[first, second] for _, first, second in ranked],
    }


def _pairs(
    tokens: Sequence[str], kinds: Sequence[int], vocabulary: Mapping[str, int]
) -> Iterator[tuple[int, str, str]]:
    """(token, its two parts), of all ways to make a token of two others."""
    for number, (token, kind) in enumerate(zip(tokens, kinds, strict=True)):
        if kind != NORMAL:
            continue
        parts = [(token[:at], token[at:]) for at in range(1, len(token))]
        known = [pair for pair in parts if pair[0] in vocabulary and pair[1] in vocabulary]
        for first, second in sorted(known, key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]])):
            yield number, first, second


def scored_steps(adds_prefix: bool) -> dict[str, Any]:
    """The keys `normalizer`, `pre_tokenizer` and `decoder`: spaces are tokens' characters, with one in front."""
    prepend = [{"type": "Prepend", "prepend": SPACE}] if adds_prefix else []
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if adds_prefix else []
    back = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*prepend, replace]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
    }
