"""What quantization costs: the perplexity of a text with and without it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mt_core.errors import DataError
from mt_infer.quantization.weights import product_of, weight_bytes
from mt_infer.text import TextGenerator

Settings = Mapping[str, Mapping[str, Any]]
FORMS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "weights int8": {"quantize_weights": "int8"},
    "weights fp8": {"quantize_weights": "fp8"},
    "weights int4": {"quantize_weights": "int4"},
    "cache int8": {"cache_dtype": "int8"},
    "cache fp8": {"cache_dtype": "fp8"},
}


@dataclass(frozen=True)
class Measured:
    """name: of the form. perplexity: of a token. weights: bytes. position: bytes of a position in the cache.

    product: how products with quantized weights are computed.
    """

    name: str
    perplexity: float
    weights: int
    position: int
    product: str


def measure(path: Path, text: str, device: str, settings: Settings) -> Iterator[Measured]:
    """Of each form, one loaded model after another. Raises DataError for a text of less than two tokens."""
    for name, keys in FORMS.items():
        inference = {**settings.get("inference", {}), **keys}
        generator = TextGenerator.load(path, device=device, settings={**settings, "inference": inference})
        engine = generator.engine.engine
        position = sum(group.bytes_per_position for group in engine.manager.layout.groups)
        weights, product = weight_bytes(engine.model), product_of(engine.model)
        yield Measured(name, perplexity(generator, text), weights, position, product)


def perplexity(generator: TextGenerator, text: str) -> float:
    """exp of the mean negative log-probability of a token, in windows of the longest sequence."""
    windows = [window for window in cut(generator.tokenizer.encode(text), generator.longest) if len(window) > 1]
    if not windows:
        raise DataError("the text has less than two tokens, and the first has no probability; take a longer one")
    # Each window starts anew, so that its first token has no score.
    scores = [score for scored in generator.score(windows) for score in scored]
    return math.exp(-sum(scores) / len(scores))


def cut(tokens: Sequence[int], length: int) -> list[list[int]]:
    return [list(tokens[start : start + length]) for start in range(0, len(tokens), length)]
