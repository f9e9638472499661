"""Texts and conversations as ids, with images in their places."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mt_core.errors import ConfigError, DataError
from mt_core.interfaces import Tokenizer
from mt_data.datasets.images.config import ImageMarkers
from mt_data.datasets.images.records import MARK, ImageText
from mt_data.datasets.images.sample import EncodedText
from mt_data.datasets.images.tiles import DynamicResolution, Grid, Tiling
from mt_data.datasets.sft.answers import answer_spans, encode_with_cuts
from mt_data.datasets.sft.chat_templates import ChatTemplate, Span
from mt_data.datasets.sft.conversations import Conversation
from mt_data.datasets.sounds.rules import MARK as SOUND_MARK
from mt_data.datasets.sounds.rules import SOUND
from mt_data.datasets.sounds.tokens import SoundTokens
from mt_data.datasets.text_files import Encode, bare_encoder

# -- tokens of an image: one for each feature of each view, and markers around them ------------------
#
# Markers are those of the processors of the published models. They are encoded by the tokenizer; where it has a token
# for a marker, that is what comes out.

IMAGE = -1
"""Stands for a feature, and in a text that is not expanded for an image."""
VIEW = "\0"
"""Stands for the features of a view in the text of an image."""


def no_markers(grid: Grid, views: int) -> str:
    return VIEW * views


def internvl_markers(grid: Grid, views: int) -> str:
    """InternVL's: one pair around all views."""
    return f"<img>{VIEW * views}</img>"


def idefics3_markers(grid: Grid, views: int) -> str:
    """Those of Idefics3 and SmolVLM: row and column before a tile, and the whole image last."""
    around = "<fake_token_around_image>"
    whole = f"{around}<global-img>{VIEW}{around}"
    if views == 1:
        return whole
    # transformers: Idefics3Processor. Rows are separated by a line end, and the whole image by an empty line.
    rows = (
        "".join(f"{around}<row_{row}_col_{column}>{VIEW}" for column in range(1, grid.columns + 1))
        for row in range(1, grid.rows + 1)
    )
    return "\n".join([*rows, f"\n{whole}"])


def qwen2_vl_markers(grid: Grid, views: int) -> str:
    """Those of Qwen2-VL: one pair around all cells of an image."""
    return f"<|vision_start|>{VIEW * views}<|vision_end|>"


def gemma4_markers(grid: Grid, views: int) -> str:
    """Those of Gemma 4: one pair around all cells of an image."""
    return f"<|image>{VIEW * views}<image|>"


def pixtral_markers(grid: Grid, views: int) -> str:
    """Those of Pixtral: one behind each row of cells, another one behind the last."""
    row = VIEW * grid.columns
    return f"{row}[IMG_BREAK]" * (grid.rows - 1) + f"{row}[IMG_END]"


def kimi_markers(grid: Grid, views: int) -> str:
    """Those of Kimi K2.5: the kind before all cells of an image, and an end."""
    return f"<|media_begin|>image<|media_content|>{VIEW * views}<|media_end|>"


def kimi_video_markers(grid: Grid, views: int) -> str:
    """Those of Kimi K2.5 around a view of a video."""
    return kimi_markers(grid, views).replace("image", "video")


def minimax_m3_markers(grid: Grid, views: int) -> str:
    """Those of MiniMax-M3: one pair around all cells of an image."""
    return f"]<]start of image[>[{VIEW * views}]<]end of image[>["


MARKERS: dict[ImageMarkers, Callable[[Grid, int], str]] = {
    "none": no_markers,
    "idefics3": idefics3_markers,
    "internvl": internvl_markers,
    "qwen2_vl": qwen2_vl_markers,
    "gemma4": gemma4_markers,
    "pixtral": pixtral_markers,
    "kimi": kimi_markers,
    "minimax_m3": minimax_m3_markers,
}
OF_VIDEOS: dict[ImageMarkers, Callable[[Grid, int], str]] = {"kimi": kimi_video_markers}
"""Around a view of a video, where they are others than around an image."""
IN_TEMPLATES: dict[ImageMarkers, str] = {
    "qwen2_vl": "<|vision_start|><|image_pad|><|vision_end|>",
    "gemma4": "<|image|>",
    "pixtral": "[IMG]",
    "kimi": "<|media_begin|>image<|media_content|><|media_pad|><|media_end|>",
    "minimax_m3": "]<]image[>[",
}
"""What the chat templates of the published models write for an image, where that is not "<image>"."""
VIDEO_IN_TEMPLATES: dict[ImageMarkers, str] = {
    "qwen2_vl": "<|vision_start|><|video_pad|><|vision_end|>",
    "kimi": "<|kimi_k25_video_placeholder|>",
    "minimax_m3": "]<]video[>[",
}
"""What they write for a video."""


class ImageTokens:
    """The tokens of images by their grids, and those of sounds. features: of a view. encode: of a text within another
    one."""

    def __init__(
        self,
        tiling: Tiling,
        features: int,
        markers: ImageMarkers,
        encode: Encode,
        sounds: SoundTokens | None = None,
    ) -> None:
        self.tiling, self.features, self.sounds = tiling, features, sounds
        self.markers, self.encode = MARKERS[markers], encode
        self.video_markers = OF_VIDEOS.get(markers, self.markers)
        # Views of a video are one image in the text.
        self.joins_views = isinstance(tiling, DynamicResolution) and tiling.video_rule == "qwen2_vl"
        self.in_templates = IN_TEMPLATES.get(markers)
        self.video_in_templates = VIDEO_IN_TEMPLATES.get(markers)
        # Per object: a cache on the method would keep every object alive.
        self.of = lru_cache(maxsize=256)(self._of)

    def _of(
        self, grid: Grid, continues: bool = False, continued: bool = False, of_video: bool = False
    ) -> NDArray[np.int32]:
        """[n], IMAGE once for each feature of each view. continues, continued: of a view of a video that stands behind,
        or before, another one, without the markers between them. of_video: with the markers of videos."""
        markers = self.video_markers if of_video else self.markers
        text = markers(grid, self.tiling.num_views(grid))
        text = text[text.index(VIEW) if continues else 0 : text.rindex(VIEW) + 1 if continued else None]
        # The group keeps the separators in the result.
        pieces = re.split(f"({VIEW})", text)
        parts = [[IMAGE] * self.features if piece == VIEW else self.encode(piece) for piece in pieces if piece]
        return np.concatenate([np.array(part, np.int32) for part in parts])

    def of_all(self, grids: Sequence[Grid], times: Sequence[int] = ()) -> list[NDArray[np.int32]]:
        """The tokens of each image or view. times: the third numbers of the grids; above 0 where a view continues the
        one before it in the same image (qwen2_vl), and for each view of a video (kimi_k25)."""
        later = [time > 0 for time in times] or [False] * len(grids)
        if self.joins_views:
            return [self.of(*flags) for flags in zip(grids, later, [*later, False][1:], strict=True)]
        return [self.of(grid, of_video=of_video) for grid, of_video in zip(grids, later, strict=True)]

    def expand(
        self,
        tokens: NDArray[np.int32],
        counted: NDArray[np.bool_],
        grids: Sequence[Grid],
        times: Sequence[int] = (),
        samples: Sequence[int] = (),
    ) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """A text [n] with IMAGE once for each image, SOUND for each sound -> with the tokens of each, which do not
        count. samples: of each sound."""
        of_images, of_sounds = iter(self.of_all(grids, times)), iter(self._of_sounds(samples))
        places = np.flatnonzero(np.isin(tokens, (IMAGE, SOUND)))
        parts = [next(of_images if tokens[place] == IMAGE else of_sounds) for place in places.tolist()]
        uncounted = [np.zeros(len(part), np.bool_) for part in parts]
        return replaced(tokens, places, parts), replaced(counted, places, uncounted)

    def _of_sounds(self, samples: Sequence[int]) -> list[NDArray[np.int32]]:
        return [] if self.sounds is None else self.sounds.of_all(samples)


def replaced(values: NDArray[Any], places: NDArray[np.int64], parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """values [n] with a part in place of each of the elements at `places`."""
    # np.split cuts before each place, so that each further part begins with the element that is replaced: after[1:].
    first, *rest = np.split(values, places)
    return np.concatenate(
        [first, *(piece for part, after in zip(parts, rest, strict=True) for piece in (part, after[1:]))]
    )


class ImageTextEncoder:
    """A text counts whole, a conversation in its answers.

    image: what stands in the place of a mark. Raises ConfigError when the template needs an end-of-document id that
    the tokenizer does not have.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, image: EncodedText) -> None:
        self.template, self.image, self.sound = template, image, EncodedText([SOUND], [False])
        self.eod = tokenizer.special.eod
        self._encode = bare_encoder(tokenizer)
        if template.eod_after_answer and self.eod is None:
            raise ConfigError(
                f"{template.name} needs an end-of-document id after each answer, and the tokenizer has none; set "
                "data.eod_after_answer=false, or choose another template or tokenizer"
            )

    def __call__(self, pair: ImageText) -> EncodedText:
        """Raises DataError for a conversation without an answer, or whose template leaves an image out."""
        if isinstance(pair.text, Conversation):
            return self._conversation(pair.text, len(pair.images), len(pair.sounds))
        return self._pieces(pair.text, [(0, len(pair.text))], [len(pair.text)], with_sounds=bool(pair.sounds))

    def prompt(self, pair: ImageText) -> EncodedText:
        """What is to be continued by the last answer of a conversation; of a text, what is before its last part. The
        tokens are those of training."""
        text = self(pair)
        # The last run of counted tokens is the answer to be continued: first is where it begins.
        last = len(text.counted) - 1 - text.counted[::-1].index(True)
        first = next((place for place in range(last, -1, -1) if not text.counted[place]), -1) + 1
        return EncodedText(text.tokens[:first], text.counted[:first])

    def _conversation(self, conversation: Conversation, images: int, sounds: int) -> EncodedText:
        text, answers = answer_spans(conversation, self.template)
        if not answers:
            raise DataError(f"{conversation.where} has no answer of the assistant, so nothing would be learnt of it")
        for mark, count in [(MARK, images)] + ([(SOUND_MARK, sounds)] if sounds else []):
            if text.count(mark) != count:
                raise DataError(
                    f'{conversation.where}: {self.template.name} writes "{mark}" {text.count(mark)} times, and the '
                    f"number of {mark[1:-1]}s is {count}; correct the template"
                )
        ends = [end for _, end in answers] if self.template.eod_after_answer else []
        return self._pieces(text, answers, ends, with_sounds=sounds > 0)

    def _pieces(
        self, text: str, counted: Sequence[Span], ends: Sequence[int], *, with_sounds: bool = False
    ) -> EncodedText:
        """The text is encoded in pieces, cut at marks and at `ends`, behind which the end-of-document id goes."""
        marks = list(re.finditer(f"{MARK}|{SOUND_MARK}" if with_sounds else MARK, text))
        starts = {mark.start(): self.image if mark[0] == MARK else self.sound for mark in marks}
        cuts = {cut for mark in marks for cut in mark.span()}
        whole = EncodedText([], [])
        # Cut at marks, so that no token reaches over an image, and at the ends of answers, as generation ends there.
        for start, end in pairwise(sorted({0, *cuts, *ends, len(text)})):
            whole += starts[start] if start in starts else self._piece(text, start, end, counted)
            if end in ends and self.eod is not None:
                whole += EncodedText([self.eod], [True])
        return whole

    def _piece(self, text: str, start: int, end: int, counted: Sequence[Span]) -> EncodedText:
        # Counted spans that meet this piece, in characters of the piece.
        within = [(max(a, start) - start, min(b, end) - start) for a, b in counted if a < end and b > start]
        tokens, places = encode_with_cuts(text[start:end], [cut for span in within for cut in span], self._encode)
        learnt = [False] * len(tokens)
        for first, last in zip(places[::2], places[1::2], strict=True):
            learnt[first:last] = [True] * (last - first)
        return EncodedText(tokens, learnt)
