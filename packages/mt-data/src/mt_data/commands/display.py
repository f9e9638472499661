"""Display on a terminal: indexed datasets, the progress of work on them, and samples."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from rich.bar import Bar
from rich.console import Console, Group, RenderableType
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

from mt_core.interfaces import CAUSAL_LM_SAMPLE, SampleField, Tokenizer
from mt_data.indexed.inspection import DocumentPreview, Inspection, LengthStatistics
from mt_data.preprocess.options import Counts

BAR_WIDTH = 40


@contextmanager
def byte_progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar over `total` bytes on standard error, if that is a terminal; yields what to call with each count done."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)


def render_inspection(inspection: Inspection) -> RenderableType:
    """Facts, percentiles, histogram and first documents, one below the other."""
    parts: list[RenderableType] = [_facts(inspection)]
    if inspection.sequences:
        parts += ["", _percentiles(inspection.lengths), "", _histogram(inspection.lengths)]
    for preview in inspection.first_documents:
        parts += ["", *_document(preview)]
    return Group(*parts)


def _facts(inspection: Inspection) -> Table:
    table = Table.grid(padding=(0, 2))
    for name, value in _fact_rows(inspection):
        table.add_row(name, Text(value))
    return table


def _fact_rows(inspection: Inspection) -> list[tuple[str, str]]:
    lengths = inspection.lengths
    rows = [
        ("prefix", inspection.prefix),
        (
            "documents",
            f"{inspection.documents:,}"
            + (f" ({inspection.empty_documents:,} empty)" if inspection.empty_documents else ""),
        ),
        ("sequences", f"{inspection.sequences:,}" + (f" ({lengths.empty:,} empty)" if lengths.empty else "")),
        ("tokens", f"{inspection.tokens:,}"),
        ("dtype", inspection.dtype + (", with modes (multimodal)" if inspection.multimodal else "")),
        ("size", f"{inspection.bin_bytes:,} bytes .bin, {inspection.idx_bytes:,} bytes .idx"),
    ]
    if inspection.manifest is None:
        return [*rows, ("manifest", "none; tokenizer and checksums are not known")]
    tokenizer = inspection.manifest.tokenizer or {}
    rows.append(("tokenizer", str(tokenizer.get("tokenizer_type", "not recorded"))))
    if inspection.manifest.vocab_size is not None:
        rows.append(("vocabulary", f"{inspection.manifest.vocab_size:,}"))
    return rows + [(key, str(value)) for key, value in inspection.manifest.extra.items()]


def _percentiles(lengths: LengthStatistics) -> Table:
    table = Table(title="tokens in a sequence", title_justify="left", title_style="", box=None)
    columns = {"shortest": f"{lengths.shortest:,}"}
    columns |= {f"{percent} %": f"{value:,}" for percent, value in lengths.percentiles.items()}
    columns |= {"longest": f"{lengths.longest:,}", "mean": f"{lengths.mean:,.1f}"}
    for name in columns:
        table.add_column(name, justify="right")
    table.add_row(*columns.values())
    return table


def _histogram(lengths: LengthStatistics) -> Table:
    table = Table(box=None)
    table.add_column("tokens", justify="right")
    table.add_column("sequences", justify="right")
    table.add_column("")
    highest = max(count for _, _, count in lengths.histogram)
    for first, last, count in lengths.histogram:
        label = f"{first:,}" if first == last else f"{first:,} to {last:,}"
        table.add_row(label, f"{count:,}", Bar(highest, 0, count, width=BAR_WIDTH))
    return table


def _document(preview: DocumentPreview) -> Iterator[Text]:
    shown = "" if len(preview.ids) == preview.tokens else f", the first {len(preview.ids)}"
    yield Text(
        f"document {preview.number}: {preview.sequences:,} sequences, {preview.tokens:,} tokens{shown}", style="bold"
    )
    yield Text(" ".join(map(str, preview.ids)) if preview.text is None else printable(preview.text))


def printable(text: str) -> str:
    """`text` with control characters written as escapes, so that data cannot steer the terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


# -- progress of a run: a live bar on a terminal, a line every so often elsewhere --------------------

LINE_SECONDS = 30.0


class RichProgress:
    """Shows MB/s and documents/s of this run (shards taken over from an earlier one do not count in rates)."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.total = Counts()
        self.shards = 0
        self._done_here = Counts()
        self._input_bytes = 0
        self._started = self._last_line = time.monotonic()
        self._bar = Progress(
            TextColumn("tokenizing"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            _Summary(self),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=None)

    def __enter__(self) -> RichProgress:
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def note(self, text: str) -> None:
        self.console.print(text, soft_wrap=True, highlight=False, markup=False)

    def begin(self, total_bytes: int) -> None:
        self._input_bytes = total_bytes
        self._started = self._last_line = time.monotonic()
        self._bar.update(self._task, total=total_bytes)
        # Started only when the plan is made: drawing starts a thread of rich, and workers are forked before it.
        self._bar.start()

    def advance(self, counts: Counts, reused: bool) -> None:
        self.shards += 1
        self.total.add(counts)
        if not reused:
            self._done_here.add(counts)
        self._bar.update(self._task, completed=self.total.input_bytes)
        # Logs of batch jobs get a line every 30 s instead of a bar.
        if not self.console.is_terminal and time.monotonic() - self._last_line > LINE_SECONDS:
            self._last_line = time.monotonic()
            share = self.total.input_bytes / max(self._input_bytes, 1)
            self.note(f"{share:.0%}: {self.summary()}")

    def join(self, shards: int) -> None:
        self._bar.update(self._task, completed=self._input_bytes)
        self._bar.stop()
        self.note(f"{self.summary()}; joining {shards} shards")

    def _rates(self) -> tuple[float, float]:
        """(MB/s of input, documents/s)."""
        seconds = max(time.monotonic() - self._started, 1e-9)
        return self._done_here.input_bytes / 1e6 / seconds, self._done_here.documents / seconds

    def short_summary(self) -> str:
        """Rates and tokens, for the width of a terminal."""
        rate, documents = self._rates()
        tokens = sum(self.total.tokens.values())
        return f"{rate:.1f} MB/s {short(documents)} docs/s {short(tokens)} tokens"

    def summary(self) -> str:
        """Totals and rates as one line."""
        rate, documents = self._rates()
        tokens = sum(self.total.tokens.values())
        skipped = f", {self.total.skipped:,} skipped" if self.total.skipped else ""
        return (
            f"{rate:.1f} MB/s, {documents:,.0f} docs/s, {self.total.documents:,} documents, {tokens:,} tokens{skipped}"
        )


class _Summary(ProgressColumn):
    def __init__(self, owner: RichProgress) -> None:
        super().__init__()
        self._owner = owner

    def render(self, task: Task) -> Text:
        return Text(self._owner.short_summary(), no_wrap=True)


def short(number: float) -> str:
    """A count in three or four characters: 950, 8.4k, 16.6M."""
    for unit in ("", "k", "M", "G"):
        if number < 1000:
            return f"{number:.0f}" if not unit else f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g}T"


# -- samples -----------------------------------------------------------------------------------------

LEARNED, CONTEXT, BOUNDARY, SEGMENT = "green", "dim", "bold magenta", "cyan"
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
    tokens, counted = sample["tokens"], sample["loss_mask"] > 0
    legend = Text.assemble(("learned", LEARNED), "  ", ("only read", CONTEXT), "  ", ("end of document", BOUNDARY))
    facts = f"{len(tokens)} positions{{}}; {int(counted.sum())} count in the loss; documents: {{}}"
    if "segment_ids" in sample:
        segments = _segments(sample["segment_ids"])
        shown = [_render_segment(sample, segment, tokenizer, max_tokens) for segment in segments]
        documents = sum(bool(counted[segment].any()) for segment in segments) or len(segments)
        return Group(Text(f"{facts.format('', documents)}, which do not see one another"), legend, *shown)
    window, learned = _window(sample, slice(0, len(tokens)))
    documents = 1 + int((tokens[:-1] == tokenizer.special.eod).sum()) if tokenizer.special.eod is not None else 1
    cut = f", the first {max_tokens} shown" if len(window) > max_tokens else ""
    text = _colour(window[:max_tokens], learned[:max_tokens], tokenizer)
    return Group(Text(facts.format(cut, documents)), legend, text)


def _window(sample: Mapping[str, np.ndarray], part: slice) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """The tokens of some positions and the last one's label, and which of them are learned, both [positions + 1]."""
    tokens, labels, counted = sample["tokens"][part], sample["labels"][part], sample["loss_mask"][part] > 0
    # Input and label make one window: token i is learned where it is the label of position i - 1.
    window = np.append(tokens, labels[-1])
    return window, np.append(False, counted & (labels == window[1:]))


def _segments(segment_ids: NDArray[np.int32]) -> list[slice]:
    """The positions of each segment, in order."""
    bounds = [0, *(np.flatnonzero(np.diff(segment_ids)) + 1).tolist(), len(segment_ids)]
    return [slice(start, stop) for start, stop in pairwise(bounds)]


def _render_segment(
    sample: Mapping[str, np.ndarray], segment: slice, tokenizer: Tokenizer, max_tokens: int
) -> RenderableType:
    """A line with its number and positions, and its text; padding, which is a segment that is one token, by name."""
    window, learned = _window(sample, segment)
    count = segment.stop - segment.start
    head = f"-- segment {int(sample['segment_ids'][segment.start])}: positions {segment.start} to {segment.stop - 1}"
    if not learned.any() and (window == window[0]).all():
        return Text(f"{head}, padding", SEGMENT)
    cut = f", the first {max_tokens} tokens shown" if len(window) > max_tokens else ""
    line = Text(f"{head}, {int(learned.sum())} of {count} count in the loss{cut}", SEGMENT)
    return Group(line, _colour(window[:max_tokens], learned[:max_tokens], tokenizer))


def _colour(window: NDArray[np.int64], learned: NDArray[np.bool_], tokenizer: Tokenizer) -> Text:
    text = Text()
    for start, stop in _runs(window, learned, tokenizer.special.eod):
        boundary = window[start] == tokenizer.special.eod
        style = BOUNDARY if boundary else LEARNED if learned[start] else CONTEXT
        decoded = with_pictures(tokenizer.decode(window[start:stop].tolist()))
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
    return with_pictures(tokenizer.decode(ids[(ids >= 0) & (ids < tokenizer.vocab_size)].tolist()))


def with_pictures(text: str) -> str:
    """The text with control characters replaced, all but line feed and tab."""
    return text.translate(_PICTURES)
