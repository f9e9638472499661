"""Limits of what the files of a tokenizer may ask for: the library ends the process where its memory does not suffice.

Texts that grow: a file of a few kilobytes can double a text forty times, or put a billion ids around each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mt_core.errors import DataError

LONGEST_TEXT = 4096
"""Characters that a normalizer or decoder may put for a match or before a text."""
MOST_GROWTH = 256.0
"""How many times longer a text may become by all replacements of a normalizer or decoder."""
MOST_STEPS = 100
MOST_IDS = 1 << 16
"""Ids that a post-processor may put around a text, and elements of a fixed length."""
IDS_OF_TEXT = 1024
LARGEST_ID = 1 << 26
MOST_VALUES = 3_000_000
"""Values in one JSON file: those of 500,000 tokens and as many merges, and memory of half a gigabyte to read."""
MOST_BYTES = 1 << 27


def require_file_size(path: Path, key: str) -> None:
    """Raise DataError for a file of a tokenizer that is too large, without reading it."""
    if (size := path.stat().st_size) > MOST_BYTES:
        raise _refusal(str(path), key, f"it has {size} bytes; {MOST_BYTES} are allowed")


def require_size(data: bytes, path: str, key: str) -> None:
    """Raise DataError for a JSON file of a tokenizer that is too large to be read, before it is."""
    if len(data) > MOST_BYTES:
        raise _refusal(path, key, f"it has {len(data)} bytes; {MOST_BYTES} are allowed")
    # Each value but the first of an array or object follows a comma. Those within texts count too, and are few.
    if (count := sum(data.count(mark) for mark in (b",", b"[", b"{"))) > MOST_VALUES:
        raise _refusal(path, key, f"it has {count} values; {MOST_VALUES} are allowed")


def require_limits(content: Any, path: str, key: str) -> None:
    """Raise DataError for a tokenizer.json whose texts, ids or numbers no tokenizer has. content: its JSON."""
    if not isinstance(content, Mapping):
        return
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        steps = list(components(content.get(part)))
        longest = max((len(text) for step in steps for text in _put(step)), default=0)
        growth = math.prod(map(_growth, steps[:MOST_STEPS]))
        if longest > LONGEST_TEXT:
            raise _refusal(path, key, f"its {part} puts a text of {longest} characters; {LONGEST_TEXT} are allowed")
        if growth > MOST_GROWTH or len(steps) > MOST_STEPS:
            raise _refusal(path, key, f"its {part} makes texts more than {MOST_GROWTH:g} times longer, or is too long")
    processors = list(components(content.get("post_processor")))
    if len(processors) > MOST_STEPS:
        raise _refusal(path, key, f"its post-processor has {len(processors)} parts; {MOST_STEPS} are allowed")
    for step in processors:
        if (count := _ids_around(step)) > MOST_IDS:
            raise _refusal(path, key, f"its post-processor puts {count} ids around a text; {MOST_IDS} are allowed")
    if (largest := max(_ids(content), default=0)) > LARGEST_ID:
        raise _refusal(path, key, f"it has the id {largest}; the largest allowed is {LARGEST_ID}")


def _refusal(path: str, key: str, reason: str) -> DataError:
    return DataError(f"tokenizer.{key}={path!r} is refused: {reason}")


def components(part: Any) -> Iterator[Mapping[str, Any]]:
    """The parts of a sequence, in any depth that JSON has been read with."""
    waiting = [part]
    while waiting:
        step = waiting.pop()
        if not isinstance(step, Mapping):
            continue
        yield step
        for name in ("normalizers", "pretokenizers", "decoders", "processors"):
            inner = step.get(name)
            waiting.extend(inner if isinstance(inner, list) else [])


def _put(step: Mapping[str, Any]) -> list[str]:
    return [text for name in ("content", "prepend", "replacement") if isinstance(text := step.get(name), str)]


def _growth(step: Mapping[str, Any]) -> float:
    """How many times longer a replacement makes a text. A regular expression may match between two characters."""
    content, pattern = step.get("content"), step.get("pattern")
    if step.get("type") != "Replace" or not isinstance(content, str) or not isinstance(pattern, Mapping):
        return 1.0
    matched = pattern.get("String")
    if not isinstance(matched, str):
        return float(max(len(content), 1))
    return max(len(content) / max(len(matched), 1), 1.0)


def _ids_around(step: Mapping[str, Any]) -> int:
    special = step.get("special_tokens")
    sizes = {
        name: len(entry["ids"])
        for name, entry in (special.items() if isinstance(special, Mapping) else ())
        if isinstance(entry, Mapping) and isinstance(entry.get("ids"), list)
    }
    return max((sum(_sizes(step.get(name), sizes)) for name in ("single", "pair")), default=0)


def _sizes(pieces: Any, sizes: Mapping[str, int]) -> Iterator[int]:
    for piece in pieces if isinstance(pieces, list) else ():
        token = piece.get("SpecialToken") if isinstance(piece, Mapping) else None
        # A text that is put several times is as many ids more.
        yield sizes.get(str(token.get("id")), 1) if isinstance(token, Mapping) else IDS_OF_TEXT


def _ids(content: Mapping[str, Any]) -> Iterator[int]:
    model = content.get("model")
    vocab = model.get("vocab") if isinstance(model, Mapping) else None
    if isinstance(vocab, Mapping):
        yield from (number for number in vocab.values() if isinstance(number, int))
    added = content.get("added_tokens")
    for entry in added if isinstance(added, list) else ():
        if isinstance(entry, Mapping) and isinstance(entry.get("id"), int):
            yield entry["id"]
