"""Which drafts are right.

At each drafted position the model's own token is sampled, with that position's uniform number. A draft is accepted
while it is that token. So tokens are those that are sampled one at a time, for the same seed, and their distribution is
the model's, whatever drafts are like.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from mt_infer.cache.batch import Chunk
from mt_infer.sampling.rows import SamplingRow
from mt_infer.sampling.sampler import Sampled, sample


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
