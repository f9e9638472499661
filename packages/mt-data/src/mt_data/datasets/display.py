"""Showing samples on a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from rich.console import Group, RenderableType
from rich.text import Text

from mt_core.specs import CAUSAL_LM_SAMPLE, SampleField, Tokenizer

LEARNED, CONTEXT, BOUNDARY = "green", "dim", "bold magenta"
LABELS, TOKENS = "labels", "tokens"
"""Fields of ids: `labels` unless it is a number of a class, and every field whose name ends in `tokens`."""
# Control characters of a corpus must not reach the terminal: their pictures do.
_PICTURES = (
    {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}
    | {127: 0x2421}
    | dict.fromkeys(range(128, 160), 65533)
)


def render_sample(
    sample: Mapping[str, np.ndarray], fields: Sequence[SampleField], tokenizer: Tokenizer, max_tokens: int
) -> RenderableType:
    """A causal sample as coloured text; the fields one by one of any other sample.

    fields: what the data set declares (`DatasetSpec.sample`). The names alone do not say what a sample is: a masked
    language model's has `tokens`, `labels` and `loss_mask` too, and so has one with the label of a class.
    """
    # segment_ids is there in some causal samples only (reset_attention_mask, packing).
    always = {field for field in CAUSAL_LM_SAMPLE if field.name != "segment_ids"}
    render = _render_causal if always <= set(fields) else _render_fields
    return render(sample, tokenizer, max_tokens)


def _render_causal(sample: Mapping[str, np.ndarray], tokenizer: Tokenizer, max_tokens: int) -> RenderableType:
    """The window of tokens; what the loss teaches to write is green, what is only read is dim."""
    tokens, labels, counted = sample["tokens"], sample["labels"], sample["loss_mask"] > 0
    # Input and label make one window: token i is learned where it is the label of position i - 1.
    window = np.append(tokens, labels[-1])
    learned = np.append(False, counted & (labels == window[1:]))
    shown = slice(0, max_tokens)
    text = _colour(window[shown], learned[shown], tokenizer)
    documents = 1 + int((tokens[:-1] == tokenizer.special.eod).sum()) if tokenizer.special.eod is not None else 1
    if "segment_ids" in sample:
        documents = len(np.unique(sample["segment_ids"]))
    cut = f", the first {max_tokens} shown" if len(window) > max_tokens else ""
    facts = (
        f"{len(tokens)} positions{cut}; {int(counted.sum())} count in the loss; documents: {documents}"
        f"{', which do not see one another' if 'segment_ids' in sample else ''}"
    )
    legend = Text.assemble(("learned", LEARNED), "  ", ("only read", CONTEXT), "  ", ("end of document", BOUNDARY))
    return Group(Text(facts), legend, text)


def _colour(window: NDArray[np.int64], learned: NDArray[np.bool_], tokenizer: Tokenizer) -> Text:
    text = Text()
    for start, stop in _runs(window, learned, tokenizer.special.eod):
        boundary = window[start] == tokenizer.special.eod
        style = BOUNDARY if boundary else LEARNED if learned[start] else CONTEXT
        decoded = printable(tokenizer.decode(window[start:stop].tolist()))
        text.append(f"{decoded or '<eod>'}\n" if boundary else decoded, style)
    return text


def _runs(window: NDArray[np.int64], learned: NDArray[np.bool_], eod: int | None) -> Iterator[tuple[int, int]]:
    """Stretches of equal colour; an end of document is a stretch of its own."""
    ends = window == (-1 if eod is None else eod)
    change = (learned[1:] != learned[:-1]) | ends[1:] | ends[:-1]
    bounds = [0, *(np.flatnonzero(change) + 1).tolist(), len(window)]
    return pairwise(bounds)


def _render_fields(sample: Mapping[str, np.ndarray], tokenizer: Tokenizer, max_tokens: int) -> RenderableType:
    parts: list[RenderableType] = []
    for name, value in sample.items():
        array = np.asarray(value)
        shown = array.reshape(-1)[:max_tokens].tolist()
        parts.append(Text.assemble((f"{name} ", "bold"), f"{array.dtype}{list(array.shape)} {shown}"))
        if _holds_ids(name, array):
            rows = array.reshape(-1, array.shape[-1])[:, :max_tokens]
            parts.extend(Text(_decoded(row, tokenizer), LEARNED) for row in rows)
    return Group(*parts)


def _holds_ids(name: str, array: np.ndarray) -> bool:
    return array.ndim > 0 and array.dtype.kind in "iu" and (name == LABELS or name.endswith(TOKENS))


def _decoded(ids: np.ndarray, tokenizer: Tokenizer) -> str:
    """The text of ids [s]; those that are no token's are left out: negative ones, and an image's behind the others."""
    return printable(tokenizer.decode(ids[(ids >= 0) & (ids < tokenizer.vocab_size)].tolist()))


def printable(text: str) -> str:
    """The text with control characters replaced, all but line feed and tab."""
    return text.translate(_PICTURES)
