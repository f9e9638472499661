"""Drafters, which guess the next tokens, and the verification of their drafts.

At each drafted position the model's own token is sampled, with that position's uniform number. A draft is accepted
while it is that token. So tokens are those that are sampled one at a time, for the same seed, and their distribution is
the model's, whatever drafts are like.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
from torch import Tensor

from mt_infer.cache.batch import CachedBatch, Chunk
from mt_infer.isolation import run_isolated
from mt_infer.requests import RunningSequence
from mt_infer.sampling.rows import SamplingRow
from mt_infer.sampling.sampler import Sampled, choose, sample

Draft = tuple[int, ...]
DRAFTING = "tokens were drafted for it"
"""For the log."""


class Drafter:
    """Guesses the next tokens of sequences, before a forward pass or from what it computed. Subclasses do one of these.

    most: tokens of a draft. image_token: the id that stands for images in prompts, which is no word of a draft and may
    lie behind the vocabulary; None: the model reads none.
    """

    def __init__(self, most: int, image_token: int | None = None) -> None:
        self.most, self.image_token = most, image_token

    def propose(self, running: Sequence[RunningSequence]) -> list[RunningSequence]:
        """Sets `drafts` of the sequences that are ready for some; the same on every rank of the model. Returns the
        sequences for which that raises, each alone."""
        return []

    def continued(self, batch: CachedBatch, sampled: Sequence[Sequence[Sampled]]) -> list[Draft | None]:
        """On the last stage: drafts that follow the sampled tokens of each chunk; None where drafting raises."""
        return [()] * len(batch.sequences)

    def usable(self, sequence: RunningSequence, length: int) -> int:
        """How many drafts can be used behind `length` tokens, which are at least one more than the prompt."""
        # Beams are not sampled: their search takes candidates. A draft continues a sampled token, so that none is made
        # behind the prompt itself.
        if sequence.beams is not None or length <= sequence.prompt_length:
            return 0
        # One place is for the token that the model samples behind the last draft.
        return max(min(self.most, sequence.capacity - length - 1), 0)

    def ready(self, running: Sequence[RunningSequence]) -> list[RunningSequence]:
        """Sequences whose next token is the only thing to compute, with room for more.

        Those that the last step left out have drafts still.
        """
        return [
            sequence
            for sequence in running
            if sequence.num_uncomputed_tokens == 1
            and not sequence.drafts
            and self.usable(sequence, len(sequence.tokens))
        ]


def choose_drafts(logits: Tensor, rows: Sequence[SamplingRow], *, alone: bool) -> list[int | None]:
    """logits [B, vocab] -> the token of each row; None for a row for which choosing raises. alone: see run_isolated."""
    chosen: list[int | None] = [None] * len(rows)

    def choose_rows(numbers: Sequence[int]) -> None:
        tokens = choose(logits[list(numbers)], [rows[number] for number in numbers]).tolist()
        for number, token in zip(numbers, tokens, strict=True):
            chosen[number] = token

    run_isolated(choose_rows, range(len(rows)), alone=alone, what=DRAFTING)
    return chosen


class NgramDrafter(Drafter):
    """Drafts from the text itself: what followed the last tokens where they stood before (prompt lookup, Saxena, 2023).

    longest: number of last tokens that are looked up; fewer where that many are not found.
    """

    def __init__(self, most: int, longest: int, image_token: int | None = None) -> None:
        super().__init__(most, image_token)
        self.longest = longest

    def propose(self, running: Sequence[RunningSequence]) -> list[RunningSequence]:
        ready = self.ready(running)

        def draft(numbers: Sequence[int]) -> None:
            for number in numbers:
                ready[number].drafts = self._draft(ready[number])

        # alone: nothing is exchanged, and what raises here raises on all ranks, which have the same tokens.
        return [ready[number] for number in run_isolated(draft, range(len(ready)), alone=True, what=DRAFTING)]

    def _draft(self, sequence: RunningSequence) -> Draft:
        followed = continuation(sequence.tokens, self.longest)[: self.usable(sequence, len(sequence.tokens))]
        return tuple(takewhile(lambda token: token != self.image_token, followed))


def continuation(tokens: Sequence[int], longest: int) -> list[int]:
    """What followed the latest earlier place of the longest n-gram, of up to `longest` tokens, that ends the text."""
    text = np.asarray(tokens)
    # Places at which an earlier n-gram may end; the last token of the text itself is not one of them.
    ends = np.arange(len(text) - 1)
    latest: int | None = None
    # Longer and longer n-grams: places whose token `back` before the end is also that of the text. `latest` is the
    # latest place of the longest that exists. Example: text 1 2 3 9 2 3, longest=3: ends [2] for "3", [2] for "2 3",
    # none for "9 2 3"; 9 2 3 follows place 2.
    for back in range(min(longest, len(text) - 1)):
        ends = ends[(ends >= back) & (text[ends - back] == text[-1 - back])]
        if not len(ends):
            break
        latest = int(ends[-1])
    return [] if latest is None else text[latest + 1 :].tolist()


def verify(logits: Tensor, chunks: Sequence[Chunk], shares: Sequence[int] = ()) -> list[list[Sampled]]:
    """logits [R, vocab] behind each chunk's last token and each of its drafts -> its next tokens, one at least.

    shares: see log_probabilities.
    """
    # One row for each position behind the known tokens: row `count` is behind `count` drafts, with their penalties and
    # index.
    rows = [
        SamplingRow(chunk.sequence, chunk.drafts[:count]) for chunk in chunks for count in range(len(chunk.drafts) + 1)
    ]
    sampled = iter(sample(logits, rows, shares))
    return [accepted(chunk.drafts, [next(sampled) for _ in range(len(chunk.drafts) + 1)]) for chunk in chunks]


def accepted(drafts: Sequence[int], sampled: Sequence[Sampled]) -> list[Sampled]:
    """The sampled tokens up to the first that differs from its draft: that one is right, those behind it are not."""
    count = 0
    # Example: drafts a b c, sampled a b x y -> a b x. y was sampled behind c, which is not in the text.
    while count < len(drafts) and sampled[count].token == drafts[count]:
        count += 1
    return list(sampled[: count + 1])


@dataclass
class SpeculationStatistics:
    """Drafted tokens so far, and how many of them were right."""

    drafted: int = 0
    accepted: int = 0

    def count(self, drafted: int, accepted: int) -> None:
        self.drafted += drafted
        self.accepted += accepted

    @property
    def acceptance_rate(self) -> float | None:
        return self.accepted / self.drafted if self.drafted else None
